"""The part of core/v1 that this project reads, and the Kubernetes rules about it.

Unknown fields are ignored when decoding. Objects that we write back are patched, never rewritten
from these types, so nothing that another component wrote is lost.
docs/facts/apis.md, "Requests of a pod" and "Classes of a pod".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import field

from apis.decode import Wire, json_decoder
from apis.keys import CPU, MEMORY
from apis.qos import (
    KubeQoS,
    PriorityClass,
    QoSClass,
    priority_class_with_default,
    qos_class,
)
from apis.quantity import ZERO, Quantity, ResourceList, add_resources, max_resources


class OwnerReference(Wire, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(Wire, frozen=True):
    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()


class ResourceRequirements(Wire, frozen=True):
    requests: ResourceList = field(default_factory=dict)
    limits: ResourceList = field(default_factory=dict)


class VolumeMount(Wire, frozen=True):
    name: str = ""
    mount_path: str = ""
    read_only: bool = False


class Container(Wire, frozen=True):
    name: str
    image: str = ""
    resources: ResourceRequirements = ResourceRequirements()
    restart_policy: str | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()


class PersistentVolumeClaimVolumeSource(Wire, frozen=True):
    claim_name: str
    read_only: bool = False


class Volume(Wire, frozen=True):
    name: str
    persistent_volume_claim: PersistentVolumeClaimVolumeSource | None = None


class Toleration(Wire, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class PodSpec(Wire, frozen=True):
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resources: ResourceRequirements | None = None
    overhead: ResourceList = field(default_factory=dict)
    priority: int | None = None
    priority_class_name: str = ""
    preemption_policy: str | None = None
    scheduler_name: str = ""
    restart_policy: str = ""
    runtime_class_name: str | None = None
    host_network: bool = False
    host_pid: bool = field(name="hostPID", default=False)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    termination_grace_period_seconds: int | None = None
    volumes: tuple[Volume, ...] = ()


class ContainerStateRunning(Wire, frozen=True):
    started_at: str | None = None


class ContainerStateWaiting(Wire, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerStateTerminated(Wire, frozen=True):
    exit_code: int = 0
    reason: str = ""
    finished_at: str | None = None


class ContainerState(Wire, frozen=True):
    running: ContainerStateRunning | None = None
    waiting: ContainerStateWaiting | None = None
    terminated: ContainerStateTerminated | None = None


class ContainerStatus(Wire, frozen=True):
    name: str
    container_id: str = field(name="containerID", default="")
    ready: bool = False
    started: bool | None = None
    restart_count: int = 0
    state: ContainerState = ContainerState()
    allocated_resources: ResourceList = field(default_factory=dict)
    resources: ResourceRequirements | None = None


class Condition(Wire, frozen=True):
    """A pod or node condition, and the common shape of conditions elsewhere."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None
    last_probe_time: str | None = None
    observed_generation: int | None = None


class PodIP(Wire, frozen=True):
    ip: str = ""


class PodStatus(Wire, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    qos_class: str = ""
    pod_ip: str = field(name="podIP", default="")
    pod_ips: tuple[PodIP, ...] = field(name="podIPs", default=())
    host_ip: str = field(name="hostIP", default="")
    start_time: str | None = None
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    ephemeral_container_statuses: tuple[ContainerStatus, ...] = ()
    resize: str = ""
    allocated_resources: ResourceList = field(default_factory=dict)
    resources: ResourceRequirements | None = None


class Pod(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def ref(self) -> str:
        """How errors name the pod: "Pod default/web"."""
        return f"Pod {self.metadata.namespace}/{self.metadata.name}"


class Taint(Wire, frozen=True):
    key: str
    value: str = ""
    effect: str = ""


class NodeSpec(Wire, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    provider_id: str = field(name="providerID", default="")


class NodeAddress(Wire, frozen=True):
    type: str = ""
    address: str = ""


class NodeSystemInfo(Wire, frozen=True):
    kernel_version: str = ""
    os_image: str = ""
    container_runtime_version: str = ""
    kubelet_version: str = ""
    architecture: str = ""
    machine_id: str = field(name="machineID", default="")


class NodeStatus(Wire, frozen=True):
    capacity: ResourceList = field(default_factory=dict)
    allocatable: ResourceList = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    addresses: tuple[NodeAddress, ...] = ()
    node_info: NodeSystemInfo = NodeSystemInfo()


class Node(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class ConfigMap(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    data: dict[str, str] = field(default_factory=dict)


class Namespace(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class PriorityClassObject(Wire, frozen=True):
    """scheduling.k8s.io/v1 PriorityClass; the name leaves PriorityClass to Koordinator's bands."""

    metadata: ObjectMeta = ObjectMeta()
    value: int = 0
    preemption_policy: str | None = None
    global_default: bool = False


decode_node: Final = json_decoder(Node)
"""Decode the JSON of a Node; raises msgspec.DecodeError or its ValidationError."""


# --- resources of a pod ------------------------------------------------------------------------

_POD_LEVEL_RESOURCES: Final = frozenset({CPU, MEMORY})


def is_sidecar(container: Container) -> bool:
    """Return whether an init container keeps running beside the others (native sidecar)."""
    return container.restart_policy == "Always"


def _is_infeasible(pod: Pod) -> bool:
    """Return whether the node cannot fulfil what a resize asks for.

    Kubelets before 1.33 say so in `status.resize`, which Kubernetes does not look at any more.
    """
    return pod.status.resize == "Infeasible" or any(
        condition.type == "PodResizePending" and condition.reason == "Infeasible"
        for condition in pod.status.conditions
    )


def _in_force(
    wanted: Mapping[str, Quantity], status: ContainerStatus | PodStatus, *, infeasible: bool
) -> Mapping[str, Quantity]:
    """Return the largest of what is wanted, unless that is infeasible, allocated and in force."""
    # Without what is in force, Kubernetes does not count what was allocated either.
    if status.resources is None:
        return wanted
    known = [status.resources.requests, status.allocated_resources]
    return max_resources(known if infeasible else [wanted, *known])


def requests_in_force(pod: Pod) -> Callable[[Container], Mapping[str, Quantity]]:
    """Return what says how much a container of the pod counts with.

    While a resize is under way, that is the largest of what it asks for, what was allocated and
    what is in force. An ordinary init container counts with what it asks for.
    """
    sidecars = {container.name for container in pod.spec.init_containers if is_sidecar(container)}
    statuses = {status.name: status for status in pod.status.container_statuses}
    for status in pod.status.init_container_statuses:
        if status.name in sidecars:
            statuses[status.name] = status
    infeasible = _is_infeasible(pod)

    def requests(container: Container) -> Mapping[str, Quantity]:
        status = statuses.get(container.name)
        wanted = container.resources.requests
        return wanted if status is None else _in_force(wanted, status, infeasible=infeasible)

    return requests


def _pod_level_in_force(pod: Pod) -> ResourceList:
    """Return the requests of the pod itself that replace the sum of its containers.

    While a resize is under way they count as those of a container do. What `spec.resources` does
    not request is the containers' sum, whatever the status says.
    """
    wanted = pod.spec.resources.requests if pod.spec.resources is not None else {}
    if not wanted:
        return {}
    in_force = _in_force(wanted, pod.status, infeasible=_is_infeasible(pod))
    return {
        name: in_force.get(name, ZERO)
        for name in wanted
        if name in _POD_LEVEL_RESOURCES or name.startswith("hugepages-")
    }


def pod_requests(pod: Pod) -> ResourceList:
    """Return what the scheduler counts for the pod.

    max(containers + sidecars, peak while initialising) + overhead; pod-level cpu, memory and huge
    pages replace the sum. While a resize is under way, containers, and the pod's own requests,
    count with the largest of what is asked for, what was allocated and what is in force.
    """
    requests = requests_in_force(pod)
    running = add_resources(*(requests(container) for container in pod.spec.containers))
    sidecars: ResourceList = {}
    peak: ResourceList = {}
    for container in pod.spec.init_containers:
        if is_sidecar(container):
            sidecars = add_resources(sidecars, requests(container))
            peak = max_resources([peak, sidecars])
        else:
            # An ordinary init container runs together with the sidecars started before it.
            peak = max_resources([peak, add_resources(sidecars, requests(container))])
    total = max_resources([add_resources(running, sidecars), peak])
    return add_resources({**total, **_pod_level_in_force(pod)}, pod.spec.overhead)


# --- classes of a pod --------------------------------------------------------------------------


def compute_kube_qos(spec: PodSpec) -> KubeQoS:
    """Return the Kubernetes QoS class that the API server would compute for `spec`."""
    requirements: list[ResourceRequirements]
    if spec.resources and (spec.resources.requests or spec.resources.limits):
        requirements = [spec.resources]
    else:
        requirements = [c.resources for c in (*spec.containers, *spec.init_containers)]
    requests = add_resources(*(_qos_resources(r.requests) for r in requirements))
    limits = add_resources(*(_qos_resources(r.limits) for r in requirements))
    if not requests and not limits:
        return KubeQoS.BESTEFFORT
    all_limited = all(len(_qos_resources(r.limits)) == 2 for r in requirements)
    if all_limited and requests == limits:
        return KubeQoS.GUARANTEED
    return KubeQoS.BURSTABLE


def _qos_resources(resources: Mapping[str, Quantity]) -> ResourceList:
    return {name: q for name in (CPU, MEMORY) if (q := resources.get(name)) and q.nano > 0}


def kube_qos(pod: Pod) -> KubeQoS:
    """Return `status.qosClass` when it is set and known, else what the spec implies."""
    try:
        return KubeQoS(pod.status.qos_class)
    except ValueError:
        return compute_kube_qos(pod.spec)


def pod_qos(pod: Pod) -> QoSClass:
    """Return the class of the pod's label, or NONE."""
    return qos_class(pod.metadata.labels)


def pod_priority_class_with_default(pod: Pod) -> PriorityClass:
    """Return the class of the label, of spec.priority's band, or what the QoS class implies."""
    return priority_class_with_default(pod.metadata.labels, pod.spec.priority, kube_qos(pod))


def is_terminated(pod: Pod) -> bool:
    """Return whether all containers of the pod have ended for good."""
    return pod.status.phase in ("Succeeded", "Failed")


def is_active(pod: Pod) -> bool:
    """Return whether the pod is pending or running."""
    return pod.status.phase in ("Pending", "Running")
