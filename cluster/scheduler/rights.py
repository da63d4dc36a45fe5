"""What the scheduler may do at the API server, as one table.

The manifests are made from it. Two tests hold it to the code: each cache of the process has its
row and each row of a cache its cache, and an API server's audit log shows that every right is used
and none is missing. A part that reads or writes something new adds its row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.scheduler.binding.events import NEW_EVENTS
from cluster.scheduler.configuration.koordinator_arguments import GPUSharedResourceTemplatesConfig
from cluster.scheduler.serving.access import ACCESS_REVIEWS, TOKEN_REVIEWS
from cluster.scheduler.sources.disruption_budgets import DISRUPTION_BUDGETS
from cluster.scheduler.sources.workloads import (
    REPLICA_SETS,
    REPLICATION_CONTROLLERS,
    SERVICES,
    STATEFUL_SETS,
)
from kube.resources import (
    CLUSTER_NETWORK_TOPOLOGIES,
    CONFIG_MAPS,
    CSI_DRIVERS,
    CSI_NODES,
    CSI_STORAGE_CAPACITIES,
    DEVICES,
    ELASTIC_QUOTAS,
    LEASES,
    NAMESPACES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
    SCHEDULE_EXPLANATIONS,
    STORAGE_CLASSES,
    VOLUME_ATTACHMENTS,
    Resource,
)

FOLLOW: Final = ("list", "watch")
"""What a cache does."""
LEASE_NAME: Final = "koord-scheduler"
"""Of the shipped configuration, and upstream's."""


TEMPLATES_NAME: Final = GPUSharedResourceTemplatesConfig().config_map_name


@dataclass(frozen=True, slots=True)
class Right:
    """Verbs on one resource or subresource, of all namespaces."""

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""
    names: tuple[str, ...] = ()

    @property
    def plural(self) -> str:
        """Return the resource as RBAC names it."""
        parts = (self.resource.plural, self.subresource)
        return "/".join(part for part in parts if part)


FOLLOWED: Final[Sequence[Right]] = tuple(
    Right(resource, FOLLOW)
    for resource in (
        PODS,  # what waits for a node, and what runs where
        NODES,  # what there is
        NAMESPACES,  # namespaceSelector of pod affinity
        DISRUPTION_BUDGETS,  # victims of a preemption
        SERVICES,  # the default spread of a workload
        REPLICATION_CONTROLLERS,  # the default spread of a workload
        REPLICA_SETS,  # the default spread of a workload
        STATEFUL_SETS,  # the default spread of a workload
        NODE_METRICS,  # LoadAwareScheduling
        NODE_RESOURCE_TOPOLOGIES,  # NodeNUMAResource
        DEVICES,  # DeviceShare
        POD_GROUPS,  # Coscheduling
        PERSISTENT_VOLUME_CLAIMS,  # VolumeBinding
        PERSISTENT_VOLUMES,  # VolumeBinding, VolumeZone
        STORAGE_CLASSES,  # VolumeBinding
        CSI_NODES,  # NodeVolumeLimits
        CSI_DRIVERS,  # VolumeBinding: free storage
        CSI_STORAGE_CAPACITIES,  # VolumeBinding: free storage
        VOLUME_ATTACHMENTS,  # NodeVolumeLimits
        ELASTIC_QUOTAS,  # ElasticQuota
        RESERVATIONS,  # Reservation
        SCHEDULE_EXPLANATIONS,  # questions why pods are or are not scheduled
        CLUSTER_NETWORK_TOPOLOGIES,  # gangs that are gathered in the network
    )
)
"""One row for each cache, and what needs it."""

WRITTEN: Final[Sequence[Right]] = (
    Right(PODS, ("create",), "binding"),  # bindings
    Right(PODS, ("get",)),  # what became of a binding whose answer was lost
    Right(PODS, ("patch",)),  # labels, and removed annotations, which a Binding does not carry
    Right(PODS, ("patch",), "status"),  # conditions, and the nominated node
    Right(PODS, ("delete",)),  # victims of a preemption
    Right(NEW_EVENTS, ("create", "patch")),  # events, and the count of one that repeats
    Right(POD_GROUPS, ("patch",)),  # the status of gangs
    Right(ELASTIC_QUOTAS, ("create", "patch")),  # the built-in quotas, and the status of quotas
    Right(PODS, ("create",), "eviction"),  # pods of quotas that use too much
    Right(PERSISTENT_VOLUMES, ("get", "patch")),  # the claim of a volume, before its pod is bound
    Right(PERSISTENT_VOLUME_CLAIMS, ("get", "patch")),  # the node that a volume is made for
    Right(NODES, ("get",)),  # whether the node of a reservation is gone
    Right(CLUSTER_NETWORK_TOPOLOGIES, ("patch",), "status"),  # the domains of the network
    Right(RESERVATIONS, ("get", "patch")),  # the node and the allocation of a reservation
    Right(RESERVATIONS, ("delete",)),  # reservations that ended a day ago
    Right(RESERVATIONS, ("patch",), "status"),  # the state of a reservation
    Right(SCHEDULE_EXPLANATIONS, ("patch",), "status"),  # the answers
    Right(SCHEDULE_EXPLANATIONS, ("delete",)),  # those whose time is over
    Right(TOKEN_REVIEWS, ("create",)),  # who asks at the secure port
    Right(ACCESS_REVIEWS, ("create",)),  # who may read what at the secure port
)

IN_NAMESPACE: Final[Sequence[Right]] = (
    # A name cannot restrict create.
    Right(LEASES, ("create",)),  # leader election
    Right(LEASES, ("get", "update"), names=(LEASE_NAME,)),  # leader election
    Right(CONFIG_MAPS, FOLLOW, names=(TEMPLATES_NAME,)),  # templates of shared GPUs
)
"""In the namespace of the installation alone."""

NODE_LOCKS: Final[Sequence[Right]] = (
    Right(NODES, ("patch",)),  # locks for device plugins that hand devices to one pod at a time
)
"""Only with the gate DevicePluginAdaption, and only for nodes with devices of such a vendor. A
manifest of their own grants them: RBAC cannot restrict a patch to annotations."""

CLUSTER_WIDE: Final = (*FOLLOWED, *WRITTEN)
