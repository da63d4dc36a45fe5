"""What plugins may look at of a pod. Pods of equal content share one shape.

A shape leaves out what differs between the replicas of a workload: name, UID, generated volumes,
timestamps. Labels stay, because selectors of other pods may name any of them. So whatever follows
from a pod alone is worked out once for all replicas. Masks and scores of all nodes are kept for
what filters and scores look at of a shape (`tables.reduction`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from apis.core import (
    ContainerStatus,
    OwnerReference,
    Toleration,
    is_sidecar,
    kube_qos,
    pod_priority_class_with_default,
    pod_qos,
    pod_requests,
    requests_in_force,
)
from apis.decode import encode
from apis.keys import (
    ANNOTATION_BIND_GANG_GROUP_ID,
    ANNOTATION_BIND_GANG_GROUP_ID_OLD,
    ANNOTATION_BIND_GANG_MEMBER_COUNT,
    ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD,
    ANNOTATION_BIND_TIMESTAMP,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_GPU_MINORS,
    ANNOTATION_RESERVATION_ALLOCATED,
    ANNOTATION_RESOURCE_STATUS,
    CPU,
    MEMORY,
)
from apis.meta import LabelSelector
from apis.qos import KubeQoS, PriorityClass, QoSClass
from apis.quantity import ResourceList
from apis.scheduling_pod import (
    Affinity,
    ContainerPort,
    SchedulingContainer,
    SchedulingPod,
    SchedulingPodSpec,
    SchedulingPodStatus,
    TopologySpreadConstraint,
)
from cluster.scheduler.tables.amounts import Amounts, amounts_of
from cluster.scheduler.tables.declared_features import needed

T = TypeVar("T")

MILLI_CPU_WITHOUT_REQUEST: Final = 100
MEMORY_WITHOUT_REQUEST: Final = 200 * 1024 * 1024
"""What a container without a request counts with in the scores of kube-scheduler's resource
plugins. An explicit request of 0 stays 0."""

_DOMAINS: Final = ("koordinator.sh/", "pod-group.scheduling.sigs.k8s.io", "cluster-autoscaler.")
"""Annotations whose key contains one of these belong to the shape; others differ freely between
replicas and no plugin reads them."""


_RECORDED: Final = frozenset(
    {
        ANNOTATION_RESOURCE_STATUS,
        ANNOTATION_DEVICE_ALLOCATED,
        ANNOTATION_RESERVATION_ALLOCATED,
        ANNOTATION_BIND_TIMESTAMP,
        ANNOTATION_GPU_MINORS,
        ANNOTATION_BIND_GANG_GROUP_ID,
        ANNOTATION_BIND_GANG_MEMBER_COUNT,
        ANNOTATION_BIND_GANG_GROUP_ID_OLD,
        ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD,
    }
)
"""Written when a pod is bound: they say where the pod is, so a bound pod's shape lacks them, as it
lacks the node's name. They are read into its booking."""


class PodClaim(NamedTuple):
    """A persistent volume claim of a pod.

    name: in the pod's namespace. pod, pod_uid: of a claim that is made for the pod (a generic
    ephemeral volume), the pod that has to own it; "" for other claims.
    """

    name: str
    pod: str = ""
    pod_uid: str = ""


class PodDisk(NamedTuple):
    """A disk that stands in the pod itself. Two of one kind and name are one disk.

    monitors: of a Ceph image, which is the same disk as another if they have one in common.
    """

    kind: str
    name: str
    read_only: bool
    monitors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PodShape:
    """A pod as plugins see it. Compared by identity: `Shapes` keeps one for each content.

    requests: as the scheduler counts them, with overhead. limits: the same sum of limits.
    scored: cpu and memory with the defaults of containers that request none, of a pod on a node.
    scored_pending: the same of the pod that is to be placed, for which its own requests
    (`spec.resources`) do not count.
    owner_kind: kind of the controller, or "". owner_references: to all owners.
    identity: name and UID of the one pod that this is the shape of; None, the usual case, where
    nothing about the pod depends on which one it is.
    images: of containers, one for each. image_volumes: of volumes with the files of an image.
    claims: in the order of the pod's volumes, each once. features: bits of those that its node has
    to declare: see `declared_features`. spread_by: selects the pods of the same workload (of its
    Service, ReplicaSet or StatefulSet) for the cluster's default spread, or None.
    """

    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    scheduler_name: str
    priority: int
    preemption_policy: str
    priority_class: PriorityClass
    qos: QoSClass
    kube_qos: KubeQoS
    requests: Amounts
    limits: Amounts
    scored: Amounts
    scored_pending: Amounts
    node_selector: Mapping[str, str]
    affinity: Affinity | None
    tolerations: tuple[Toleration, ...]
    spread: tuple[TopologySpreadConstraint, ...]
    spread_by: LabelSelector | None
    ports: tuple[ContainerPort, ...]
    images: tuple[str, ...]
    image_volumes: tuple[str, ...]
    claims: tuple[PodClaim, ...]
    disks: tuple[PodDisk, ...]
    gates: tuple[str, ...]
    resource_claims: tuple[str, ...]
    features: int
    owner_kind: str
    owner: str
    owner_references: tuple[OwnerReference, ...]
    spec: SchedulingPodSpec
    identity: tuple[str, str] | None = None
    _derived: dict[Any, Any] = field(default_factory=dict)

    def derived(self, compute: Callable[[PodShape], T]) -> T:
        """Return compute(self), worked out once. `compute` must be a module's own function."""
        try:
            value: T = self._derived[compute]
        except KeyError:
            value = self._derived[compute] = compute(self)
        return value


def personal(shape: PodShape, name: str, uid: str) -> PodShape:
    """Return the shape of this one pod, which no other pod shares."""
    return replace(shape, identity=(name, uid), _derived={})


class Shapes:
    """Keeps one shape for each content, as long as it is referenced."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[bytes, PodShape] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, pod: SchedulingPod, *, spread_by: LabelSelector | None = None) -> PodShape:
        """Return the shape of a pod. spread_by: see PodShape."""
        key = _content(pod, spread_by)
        shape = self._known.get(key)
        if shape is None:
            shape = self._known[key] = _shape(pod, spread_by)
        return shape


def _annotations(pod: SchedulingPod) -> dict[str, str]:
    recorded = _RECORDED if pod.spec.node_name else frozenset()
    return {
        key: text
        for key, text in sorted(pod.metadata.annotations.items())
        if key not in recorded and any(domain in key for domain in _DOMAINS)
    }


def _labels(pod: SchedulingPod) -> dict[str, str]:
    return dict(sorted(pod.metadata.labels.items()))


def _claims(pod: SchedulingPod) -> tuple[PodClaim, ...]:
    claims = []
    for volume in pod.spec.volumes:
        if volume.persistent_volume_claim is not None:
            claims.append(PodClaim(volume.persistent_volume_claim.claim_name))
        elif volume.ephemeral is not None:
            meta = pod.metadata
            claims.append(PodClaim(f"{meta.name}-{volume.name}", meta.name, meta.uid))
    return tuple(dict.fromkeys(claims))


def _disks(pod: SchedulingPod) -> tuple[PodDisk, ...]:
    disks = []
    for volume in pod.spec.volumes:
        if (disk := volume.gce_persistent_disk) is not None:
            disks.append(PodDisk("gce", disk.pd_name, disk.read_only))
        if (disk := volume.aws_elastic_block_store) is not None:
            # One pod only, even if all mount it read-only.
            disks.append(PodDisk("aws", disk.volume_id, False))
        if (disk := volume.iscsi) is not None:
            disks.append(PodDisk("iscsi", disk.iqn, disk.read_only))
        if (disk := volume.rbd) is not None:
            name = f"{disk.pool}/{disk.image}"
            disks.append(PodDisk("rbd", name, disk.read_only, disk.monitors))
    return tuple(disks)


def _image_volumes(spec: SchedulingPodSpec) -> tuple[str, ...]:
    return tuple(volume.image.reference for volume in spec.volumes if volume.image is not None)


def _owner(pod: SchedulingPod) -> tuple[str, str]:
    for owner in pod.metadata.owner_references:
        if owner.controller:
            return owner.kind, owner.uid
    return "", ""


def _content(pod: SchedulingPod, spread_by: LabelSelector | None) -> bytes:
    """Return a text that is equal for pods of one shape, and for no others."""
    spec = pod.spec
    return encode(
        (
            pod.metadata.namespace,
            _labels(pod),
            _annotations(pod),
            _claims(pod),
            _disks(pod),
            _image_volumes(spec),
            pod.metadata.owner_references,
            spread_by,
            spec.scheduler_name,
            spec.priority,
            spec.preemption_policy,
            spec.node_selector,
            spec.affinity,
            spec.tolerations,
            spec.topology_spread_constraints,
            spec.scheduling_gates,
            spec.resource_claims,
            spec.scheduling_group,
            spec.workload_ref,
            spec.overhead,
            spec.resources,
            spec.host_network,
            needed(spec),
            [_content_of(container) for container in spec.containers],
            [_content_of(container) for container in spec.init_containers],
            pod.status.qos_class,
            _amounts_in_force(pod) if _is_resized(pod) else None,
        )
    )


def _amounts_in_force(pod: SchedulingPod) -> tuple[Amounts, ...]:
    """Return requests, scored and scored_pending of its shape."""
    requests = amounts_of(pod_requests(pod))
    by_containers = _scored_by_containers(pod)
    return requests, _scored(pod, requests, by_containers), by_containers


def _is_resized(pod: SchedulingPod) -> bool:
    """Return whether resources in force differ from what the pod or a container requests."""
    spec, status = pod.spec, pod.status
    if spec.resources is not None and _differs(spec.resources.requests, status):
        return True
    statuses = {
        each.name: each for each in (*status.container_statuses, *status.init_container_statuses)
    }
    return any(
        container.name in statuses
        and _differs(container.resources.requests, statuses[container.name])
        for container in (*spec.containers, *spec.init_containers)
    )


def _differs(requests: ResourceList, status: ContainerStatus | SchedulingPodStatus) -> bool:
    if status.resources is None:
        return False
    allocated = status.allocated_resources
    return status.resources.requests != requests or bool(allocated and allocated != requests)


def _content_of(container: SchedulingContainer) -> tuple[Any, ...]:
    return container.image, container.resources, container.restart_policy, container.ports


def _shape(pod: SchedulingPod, spread_by: LabelSelector | None) -> PodShape:
    spec = pod.spec
    owner_kind, owner = _owner(pod)
    containers = (*spec.containers, *spec.init_containers)
    requests, scored, scored_pending = _amounts_in_force(pod)
    return PodShape(
        namespace=pod.metadata.namespace,
        labels=_labels(pod),
        annotations=_annotations(pod),
        scheduler_name=spec.scheduler_name,
        priority=spec.priority or 0,
        preemption_policy=spec.preemption_policy or "PreemptLowerPriority",
        priority_class=pod_priority_class_with_default(pod),
        qos=pod_qos(pod),
        kube_qos=kube_qos(pod),
        requests=requests,
        limits=_limits(spec),
        scored=scored,
        scored_pending=scored_pending,
        node_selector=spec.node_selector,
        affinity=spec.affinity,
        tolerations=spec.tolerations,
        spread=spec.topology_spread_constraints,
        spread_by=spread_by,
        ports=_host_ports(spec),
        images=tuple(container.image for container in containers),
        image_volumes=_image_volumes(spec),
        claims=_claims(pod),
        disks=_disks(pod),
        gates=tuple(gate.name for gate in spec.scheduling_gates),
        resource_claims=tuple(claim.name for claim in spec.resource_claims),
        features=needed(spec),
        owner_kind=owner_kind,
        owner=owner,
        owner_references=pod.metadata.owner_references,
        spec=spec,
    )


def _host_ports(spec: SchedulingPodSpec) -> tuple[ContainerPort, ...]:
    """Return the host ports that the pod holds. An ordinary init container is gone when its pod
    runs, and kube-scheduler counts none of its ports."""
    containers = (*spec.containers, *(each for each in spec.init_containers if is_sidecar(each)))
    return tuple(port for container in containers for port in container.ports if port.host_port)


def _limits(spec: SchedulingPodSpec) -> Amounts:
    """Return the sum of the limits, counted as requests are: a larger init container counts."""
    as_requests = [
        SchedulingContainer(
            name=container.name,
            resources=type(container.resources)(requests=container.resources.limits),
            restart_policy=container.restart_policy,
        )
        for container in (*spec.containers, *spec.init_containers)
    ]
    count = len(spec.containers)
    resources = spec.resources
    limited = SchedulingPodSpec(
        containers=tuple(as_requests[:count]),
        init_containers=tuple(as_requests[count:]),
        resources=type(resources)(requests=resources.limits) if resources else None,
    )
    total = amounts_of(pod_requests(SchedulingPod(spec=limited)))
    overhead = amounts_of(spec.overhead)
    return {name: limit + overhead.get(name, 0) for name, limit in total.items()}


def _scored(pod: SchedulingPod, requests: Amounts, by_containers: Amounts) -> Amounts:
    """Return cpu and memory with the defaults of containers without a request.

    In a pod with requests of its own there are defaults only for what neither it nor a container
    names. While a resize is under way, the pod and its containers count as in `pod_requests`.
    Source: kube-scheduler's NonZeroRequested; docs/facts/scheduler.md, "Requests".
    """
    if pod.spec.resources is None or not pod.spec.resources.requests:
        return by_containers
    return {name: requests.get(name, amount) for name, amount in by_containers.items()}


def _scored_by_containers(pod: SchedulingPod) -> Amounts:
    """Return cpu and memory with the defaults of containers, whatever the pod itself requests."""
    result = {}
    spec, in_force = pod.spec, requests_in_force(pod)
    overhead = amounts_of(spec.overhead)
    for name, default in ((CPU, MILLI_CPU_WITHOUT_REQUEST), (MEMORY, MEMORY_WITHOUT_REQUEST)):

        def amount(container: SchedulingContainer, name: str = name, default: int = default) -> int:
            requested = in_force(container).get(name)
            return default if requested is None else amounts_of({name: requested})[name]

        running = sum(amount(container) for container in spec.containers)
        sidecars = peak = 0
        for container in spec.init_containers:
            if is_sidecar(container):
                sidecars += amount(container)
                peak = max(peak, sidecars)
            else:
                peak = max(peak, sidecars + amount(container))
        result[name] = max(running + sidecars, peak) + overhead.get(name, 0)
    return result
