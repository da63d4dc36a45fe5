"""Subjects: the things that policies decide about.

A node has QoS directories (kubelet makes one for each Kubernetes QoS class), pods, their sandboxes
and containers, and declared host applications. A subject is a frozen value made from what NRI, CRI,
kubelet and the objects directory report; a policy reads its rule and the subject, nothing else.

`cgroup` is always the directory relative to a hierarchy's root, without leading or trailing slash
("kubepods.slice/kubepods-burstable.slice/…"); "" means unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from apis.cpuset import CpuSet
from apis.qos import KubeQoS, QoSClass, qos_class


class Level(StrEnum):
    """Where a subject stands; also the label of metrics and the word in `koordctl`."""

    NODE = "node"
    QOS = "kubeqos"
    POD = "pod"
    SANDBOX = "sandbox"
    CONTAINER = "container"
    HOST_APP = "hostapp"


class Requested(msgspec.Struct, frozen=True, cache_hash=True):
    """What kubelet requested from the runtime, before any policy. None: not requested.

    From the pod's specification where it is known, else from the runtime's request at creation or
    update.
    """

    cpu_shares: int | None = None
    cfs_quota_us: int | None = None  # -1: unlimited; per cfs_period_us, else per 100 ms
    cfs_period_us: int | None = None
    memory_limit_bytes: int | None = None  # -1: unlimited
    cpus: CpuSet | None = None
    mems: CpuSet | None = None
    oom_score_adj: int | None = None


NOTHING_REQUESTED: Final = Requested()


class Amounts(msgspec.Struct, frozen=True):
    """Requests and limits of a container's specification. None: not set.

    CPU in milli-cores, memory in bytes; `batch_*` are kubernetes.io/batch-cpu (milli-cores) and
    batch-memory, `mid_*` likewise.
    """

    cpu_request_milli: int | None = None
    cpu_limit_milli: int | None = None
    memory_request_bytes: int | None = None
    memory_limit_bytes: int | None = None
    batch_cpu_request_milli: int | None = None
    batch_cpu_limit_milli: int | None = None
    batch_memory_request_bytes: int | None = None
    batch_memory_limit_bytes: int | None = None
    mid_cpu_request_milli: int | None = None
    mid_cpu_limit_milli: int | None = None
    mid_memory_request_bytes: int | None = None
    mid_memory_limit_bytes: int | None = None


class ContainerKind(StrEnum):
    """When a container runs in the pod's life, which decides how it counts in the pod's sums."""

    REGULAR = "regular"
    INIT = "init"
    SIDECAR = "sidecar"  # an init container with restartPolicy Always


class ContainerSpec(msgspec.Struct, frozen=True):
    """One container of a pod's specification."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    amounts: Amounts = Amounts()


class Pod(msgspec.Struct, frozen=True):
    """A pod as far as it is known. Not itself a subject: subjects refer to it."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    kube_qos: KubeQoS
    qos: QoSClass  # from the label alone
    cgroup: str = ""
    priority: int | None = None
    runtime_handler: str = ""
    phase: str = ""  # "" when unknown
    host_network: bool = False
    created_at: float = 0.0  # seconds since the epoch; 0 when unknown
    specs: tuple[ContainerSpec, ...] = ()  # empty when the specification is not known
    resources: Amounts = Amounts()  # spec.resources: they replace the containers' sum
    overhead: Amounts = Amounts()
    restart_policy: str = ""  # "" when unknown
    status_reason: str = ""  # of a pod that failed as a whole: "Evicted" by kubelet

    @property
    def obj(self) -> str:
        """The name that errors and events carry."""
        return f"Pod {self.namespace}/{self.name}"

    @property
    def ended(self) -> bool:
        """Whether the pod is known to have ended: it uses, requests and owns nothing any more."""
        return self.phase in ("Succeeded", "Failed")

    def spec(self, container: str) -> ContainerSpec | None:
        """Return the specification of the named container, if it is known."""
        for spec in self.specs:
            if spec.name == container:
                return spec
        return None


def make_pod(
    *,
    namespace: str,
    name: str,
    uid: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    kube_qos: KubeQoS,
    cgroup: str = "",
    priority: int | None = None,
    runtime_handler: str = "",
    phase: str = "",
    host_network: bool = False,
    created_at: float = 0.0,
    specs: tuple[ContainerSpec, ...] = (),
    resources: Amounts = Amounts(),  # noqa: B008 - frozen
    overhead: Amounts = Amounts(),  # noqa: B008 - frozen
    restart_policy: str = "",
    status_reason: str = "",
) -> Pod:
    """Return a Pod with its QoS class derived from its labels."""
    return Pod(
        namespace=namespace,
        name=name,
        uid=uid,
        labels=labels,
        annotations=annotations,
        kube_qos=kube_qos,
        qos=qos_class(labels),
        cgroup=cgroup,
        priority=priority,
        runtime_handler=runtime_handler,
        phase=phase,
        host_network=host_network,
        created_at=created_at,
        specs=specs,
        resources=resources,
        overhead=overhead,
        restart_policy=restart_policy,
        status_reason=status_reason,
    )


class NodeSubject(msgspec.Struct, frozen=True):
    """The node itself: sysctls, QoS-class resctrl groups."""

    level = Level.NODE

    @property
    def key(self) -> str:
        return "node"

    @property
    def cgroup(self) -> str:
        return ""


class QosSubject(msgspec.Struct, frozen=True):
    """A QoS directory. Guaranteed stands for the kubepods root itself.

    `pods` are the pods that live below: for Burstable and BestEffort those of the class, for the
    root all pods of the node. Only pods that are pending, running or of unknown phase are listed.
    """

    kube_qos: KubeQoS
    cgroup: str
    pods: tuple[Pod, ...] = ()

    level = Level.QOS

    @property
    def key(self) -> str:
        return f"kubeqos/{self.kube_qos}"


class PodSubject(msgspec.Struct, frozen=True):
    """A pod's own directory. requested: what kubelet sets on it, where that is known."""

    pod: Pod
    requested: Requested = NOTHING_REQUESTED

    level = Level.POD

    @property
    def key(self) -> str:
        return f"pod/{self.pod.uid}"

    @property
    def cgroup(self) -> str:
        return self.pod.cgroup


class SandboxSubject(msgspec.Struct, frozen=True):
    """The sandbox (pause) container of a pod."""

    pod: Pod
    id: str
    cgroup: str = ""

    level = Level.SANDBOX

    @property
    def key(self) -> str:
        return f"sandbox/{self.id}"


class ContainerSubject(msgspec.Struct, frozen=True):
    """A container. At creation its cgroup does not exist yet."""

    pod: Pod
    name: str
    id: str
    cgroup: str = ""
    requested: Requested = NOTHING_REQUESTED

    level = Level.CONTAINER

    @property
    def key(self) -> str:
        return f"container/{self.id}"


class HostAppSubject(msgspec.Struct, frozen=True):
    """A host application that the NodeSLO declares, with its own directory."""

    name: str
    qos: QoSClass
    cgroup: str
    priority: str = ""

    level = Level.HOST_APP

    @property
    def key(self) -> str:
        return f"hostapp/{self.name}"


Subject = NodeSubject | QosSubject | PodSubject | SandboxSubject | ContainerSubject | HostAppSubject
