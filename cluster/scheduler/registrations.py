"""After which changes of the cluster a plugin's refusal may not hold any more, as a table.

A pod waits until a change of one of its refusing plugins' rows. Source of the rules of Kubernetes'
own plugins: kube-scheduler's registrations; docs/facts/scheduler.md, "The queue".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from apis.keys import LABEL_PRIORITY_CLASS, LABEL_QOS_CLASS
from apis.scheduling_pod import SchedulingPod
from apis.storage import CSIStorageCapacity, PersistentVolume, PersistentVolumeClaim
from cluster.scheduler.cycle.events import (
    ANY_KIND,
    NAMESPACE,
    NODE,
    POD,
    RESERVATION,
    Action,
    EventTable,
    Hint,
    Registration,
)
from cluster.scheduler.cycle.opinions import EXTENDER
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.reservations.pre_allocation import demand_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.volumes.objects import largest_volume

CLAIM: Final = "PersistentVolumeClaim"
VOLUME: Final = "PersistentVolume"
STORAGE_CLASS: Final = "StorageClass"
CSI_NODE: Final = "CSINode"
CSI_DRIVER: Final = "CSIDriver"
STORAGE_CAPACITY: Final = "CSIStorageCapacity"
ATTACHMENT: Final = "VolumeAttachment"
"""Kinds of objects about volumes, in events."""


def _is_claim_of(pod: PendingPod[PodShape], old: Any, new: PersistentVolumeClaim) -> bool:
    """Return whether a claim is one of the pod's."""
    meta = new.metadata
    return meta.namespace == pod.shape.namespace and any(
        claim.name == meta.name for claim in pod.shape.claims
    )


def _used_volumes(pod: PendingPod[PodShape], old: Any, new: Any) -> bool:
    """Return whether a pod that is gone may have used volumes.

    old: the pod, as pending or as placed; None for one that a node was promised to no longer.
    """
    if old is None:
        return True
    if isinstance(old, PendingPod):
        return bool(old.shape.claims or old.shape.disks)
    return bool(old.spec.volumes)


def _more_storage(
    pod: PendingPod[PodShape], old: CSIStorageCapacity | None, new: CSIStorageCapacity
) -> bool:
    """Return whether a larger volume can be made than before."""
    return old is None or largest_volume(new) > largest_volume(old)


def _other_zones(
    pod: PendingPod[PodShape], old: PersistentVolume | None, new: PersistentVolume
) -> bool:
    """Return whether a volume is new, or has other labels than before."""
    return old is None or old.metadata.labels != new.metadata.labels


def _takes_pods_over(pod: PendingPod[PodShape], old: Any, new: Any) -> bool:
    """Return whether a reserve pod may go where running pods have its room."""
    return pod.shape.derived(demand_of) is not None


def _other_class(pod: PendingPod[PodShape], old: SchedulingPod, new: SchedulingPod) -> bool:
    """Return whether the label of a pod's QoS class or of its priority class changed.

    LSE pods alone keep others off their cores, and prod pods alone count for prod thresholds.
    """
    return any(
        old.metadata.labels.get(key) != new.metadata.labels.get(key)
        for key in (LABEL_QOS_CLASS, LABEL_PRIORITY_CLASS)
    )


_NODE_ADDED: Final = Action.ADD
_RESERVED: Final = Registration(RESERVATION, Action.ALL)
"""Room may be reserved for the pod from now on, or not reserved for others any more. Reserve pods
that a pod matches do not count in spread and affinity, nor as load to come."""
_TAKEN_OVER: Final = Registration(POD, Action.UPDATE_POD_LABEL, _takes_pods_over)
"""By its labels a pod may be one whose room a Reservation takes over."""
_CLASS_EDITED: Final = Registration(POD, Action.UPDATE_POD_LABEL, _other_class)
"""In its new class a pod may hold back fewer others: by CPUs that it has for itself, or by load."""

_TABLE: Final[Mapping[str, Sequence[Registration]]] = {
    # What an extender looks at is not known.
    EXTENDER: (Registration(ANY_KIND, Action.ALL),),
    "NoNodes": (Registration(NODE, _NODE_ADDED),),
    "NodeUnschedulable": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_TAINT),),
    "TaintToleration": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_TAINT),),
    "NodeAffinity": (Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),),
    "NodeDeclaredFeatures": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_DECLARED_FEATURES),
    ),
    "NodePorts": (Registration(NODE, _NODE_ADDED), Registration(POD, Action.DELETE), _RESERVED),
    "NodeResourcesFit": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        _RESERVED,
        _TAKEN_OVER,
    ),
    "VolumeRestrictions": (
        Registration(NODE, _NODE_ADDED),
        Registration(POD, Action.DELETE, _used_volumes),
        Registration(CLAIM, Action.ADD | Action.UPDATE_OTHER, _is_claim_of),
    ),
    "NodeVolumeLimits": (
        Registration(NODE, _NODE_ADDED),
        Registration(POD, Action.DELETE, _used_volumes),
        Registration(CLAIM, Action.ADD | Action.UPDATE_OTHER, _is_claim_of),
        Registration(CSI_NODE, Action.ALL),
        Registration(ATTACHMENT, Action.DELETE),
    ),
    "VolumeBinding": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        # A placement that is taken back gives up the volumes that it planned with.
        Registration(POD, Action.DELETE, _used_volumes),
        Registration(CLAIM, Action.ADD | Action.UPDATE_OTHER, _is_claim_of),
        Registration(VOLUME, Action.ADD | Action.UPDATE_OTHER),
        Registration(STORAGE_CLASS, Action.ADD | Action.UPDATE_OTHER),
        Registration(CSI_DRIVER, Action.UPDATE_OTHER | Action.DELETE),
        Registration(STORAGE_CAPACITY, Action.ADD | Action.UPDATE_OTHER, _more_storage),
    ),
    "VolumeZone": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        Registration(CLAIM, Action.ADD | Action.UPDATE_OTHER, _is_claim_of),
        Registration(VOLUME, Action.ADD | Action.UPDATE_OTHER, _other_zones),
        Registration(STORAGE_CLASS, Action.ADD),
    ),
    "LoadAwareScheduling": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(NODE, Action.UPDATE_NODE_ANNOTATION),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        Registration("NodeMetric", Action.ALL),
        _RESERVED,
        _TAKEN_OVER,
        _CLASS_EDITED,
    ),
    "NodeNUMAResource": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
        Registration(NODE, Action.UPDATE_NODE_ANNOTATION | Action.UPDATE_NODE_LABEL),
        # What pods request counts on nodes with amplified cpu.
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        _CLASS_EDITED,
        Registration("NodeResourceTopology", Action.ALL),
        # The devices that a pod gets decide which NUMA nodes it may use.
        Registration("Device", Action.ALL),
        _RESERVED,
    ),
    "Coscheduling": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        Registration("ClusterNetworkTopology", Action.ALL),
    ),
    "SchedulingHint": (Registration(NODE, _NODE_ADDED),),
    "DeviceShare": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        Registration("Device", Action.ALL),
        _RESERVED,
    ),
    "Reservation": (
        Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE | Action.UPDATE_NODE_LABEL),
        Registration(POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN),
        # It is refused too where a reservation cannot give the pod's CPUs or devices.
        Registration("NodeResourceTopology", Action.ALL),
        Registration("Device", Action.ALL),
        _CLASS_EDITED,
        _RESERVED,
        # A Reservation that takes running pods over may take a new one over.
        Registration(POD, Action.ADD, _takes_pods_over),
        _TAKEN_OVER,
    ),
}


def _between_pods(
    spread_hint: Hint | None, affinity_hint: Hint | None
) -> Mapping[str, Sequence[Registration]]:
    return {
        "PodTopologySpread": (
            Registration(
                NODE,
                _NODE_ADDED | Action.DELETE | Action.UPDATE_NODE_LABEL | Action.UPDATE_NODE_TAINT,
            ),
            Registration(
                POD,
                Action.ADD | Action.DELETE | Action.UPDATE_POD_LABEL | Action.UPDATE_OTHER,
                spread_hint,
            ),
            _RESERVED,
        ),
        "InterPodAffinity": (
            Registration(NODE, _NODE_ADDED | Action.UPDATE_NODE_LABEL),
            Registration(POD, Action.ADD | Action.DELETE | Action.UPDATE_POD_LABEL, affinity_hint),
            # Terms select namespaces by their labels.
            Registration(NAMESPACE, Action.ALL),
            _RESERVED,
        ),
    }


def registrations(
    quota_hint: Hint | None = None,
    spread_hint: Hint | None = None,
    affinity_hint: Hint | None = None,
) -> EventTable:
    """Return the table of all plugins. A plugin without a row waits for an edit of the pod.

    quota_hint: whether a pod that ElasticQuota refused may pass; a change may come from anywhere in
    the tree of quotas, so it is asked about all that give resources back or add some.
    spread_hint, affinity_hint: whether the change of a pod may help one that PodTopologySpread or
    InterPodAffinity refused. Without a hint, every such change counts.
    """
    quotas = tuple(
        Registration(kind, actions, quota_hint, by_state=True)
        for kind, actions in (
            (NODE, _NODE_ADDED | Action.UPDATE_NODE_ALLOCATABLE),
            (POD, Action.DELETE | Action.UPDATE_POD_SCALE_DOWN | Action.UPDATE_POD_LABEL),
            # It began to be deleted: ElasticQuotaImmediateIgnoreTerminatingPod.
            (POD, Action.UPDATE_OTHER),
            (ELASTIC_QUOTA, Action.ALL),
        )
    )
    between_pods = _between_pods(spread_hint, affinity_hint)
    return EventTable({**_TABLE, **between_pods, ELASTIC_QUOTA: quotas})
