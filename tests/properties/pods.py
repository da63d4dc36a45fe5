"""The pods of a random life: what sorts there are, and what their objects and requests say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    ANNOTATION_OOM_SCORE_ADJ,
    ANNOTATION_RESCTRL,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_CORE_SCHED_GROUP_ID,
    LABEL_CORE_SCHED_POLICY,
    LABEL_QOS_CLASS,
)
from apis.qos import KubeQoS
from hooks import subject as subjects
from hooks.decision import Decision
from hooks.subject import NOTHING_REQUESTED, Requested, make_pod
from linux.resources import UNLIMITED, Resource
from tests.simulated.kubelet import (
    Container,
    KubeQos,
    Limits,
    Pod,
    oom_score_adj_of,
    shares_of,
)

GIB = 1 << 30
NO_LIMITS = Limits()
BATCH_CONTAINERS = ("c0", "c1", "c2", "c3")
"""The containers that the annotation of a batch pod names."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of pod: its class, and what its containers ask for.

    exclusive_cpus: the scheduler's for the pod alone, in whole cores where the kind says so. numa:
    the scheduler names the NUMA node that the pod is to stay on. cache_percent: of cache and memory
    bandwidth, for the pod alone.
    """

    name: str
    kube_qos: KubeQos
    qos: str = ""
    limits: Limits = NO_LIMITS
    batch_milli: int = 0
    batch_bytes: int = 0
    exclusive_cpus: int = 0
    whole_cores: bool = False
    numa: bool = False
    oom_score_adj: int | None = None
    cache_percent: int = 0
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def pinned_cpus(self) -> int:
        """What kubelet's static policy gives each container: Guaranteed and whole CPUs only."""
        whole, rest = divmod(self.limits.cpu_limit_milli, 1000)
        return whole if self.kube_qos == "Guaranteed" and not rest else 0


_ONE_CPU = Limits(1000, 1000, GIB, memory_request_bytes=GIB)

KINDS = (
    Kind("guaranteed", "Guaranteed", limits=_ONE_CPU),
    Kind("latency", "Burstable", "LS", Limits(500, 2000, GIB, memory_request_bytes=GIB // 2)),
    Kind("latency-numa", "Burstable", "LS", Limits(500, 2000, GIB), numa=True),
    Kind("unlimited", "Burstable", "LS", Limits(250)),
    Kind("reserved", "Guaranteed", "LSR", _ONE_CPU, exclusive_cpus=1),
    Kind("reserved-numa", "Guaranteed", "LSR", _ONE_CPU, exclusive_cpus=2, numa=True),
    Kind("reserved-without", "Guaranteed", "LSR", _ONE_CPU),
    Kind("alone", "Guaranteed", "LSE", _ONE_CPU, exclusive_cpus=2, whole_cores=True),
    Kind(
        "grouped", "Burstable", "LS", Limits(500), oom_score_adj=-500,
        labels=((LABEL_CORE_SCHED_GROUP_ID, "shop"),),
    ),
    Kind(
        "core-exclusive", "Burstable", "LS", Limits(500),
        labels=((LABEL_CORE_SCHED_POLICY, "exclusive"),),
    ),
    Kind("cached", "Burstable", "LS", Limits(500, 2000, GIB), cache_percent=30),
    Kind("cached-batch", "BestEffort", "BE", cache_percent=20),
    Kind("system", "Burstable", "SYSTEM", Limits(100)),
    Kind("batch", "BestEffort", "BE", batch_milli=500, batch_bytes=GIB // 2),
    Kind("batch-numa", "BestEffort", "BE", batch_milli=500, batch_bytes=GIB // 2, numa=True),
    Kind("batch-unlimited", "BestEffort", "BE"),
    Kind("spare", "BestEffort", oom_score_adj=900),
)  # fmt: skip


@dataclass
class Running:
    """A pod on both kernels, with what the scheduler gave it.

    first: its sort before its object was edited; runtimes are never told of an edit.
    """

    kind: Kind
    name: str
    here: Pod
    twin: Pod
    node: int = 0
    cpus: frozenset[int] = frozenset()
    containers: list[RunningContainer] = field(default_factory=list)
    first: Kind | None = None


@dataclass
class RunningContainer:
    name: str
    pod: Running
    here: Container
    twin: Container
    limits: Limits
    stored: Requested = NOTHING_REQUESTED


def told(pod: Running) -> subjects.Pod:
    """The pod as the runtime tells of it."""
    labels, annotations = metadata(pod, pod.first or pod.kind)
    return make_pod(
        namespace="default",
        name=pod.name,
        uid=pod.here.uid,
        labels=labels,
        annotations=annotations,
        kube_qos=KubeQoS(pod.kind.kube_qos),
        cgroup=pod.here.cgroup,
    )


def metadata(pod: Running, kind: Kind) -> tuple[dict[str, str], dict[str, str]]:
    """The labels and annotations of a pod as one of this sort."""
    labels = dict(kind.labels)
    if kind.qos:
        labels[LABEL_QOS_CLASS] = kind.qos
    annotations: dict[str, str] = {}
    status: dict[str, object] = {}
    if pod.cpus:
        status["cpuset"] = str(CpuSet(pod.cpus))
    if kind.numa:
        amount = "kubernetes.io/batch-cpu" if kind.qos == "BE" else "cpu"
        status["numaNodeResources"] = [{"node": pod.node, "resources": {amount: "500"}}]
    if status:
        annotations[ANNOTATION_RESOURCE_STATUS] = json.dumps(status)
    if kind.batch_milli:
        both = {"requests": batch_of(kind), "limits": batch_of(kind)}
        annotations[ANNOTATION_EXTENDED_RESOURCE_SPEC] = json.dumps(
            {"containers": dict.fromkeys(BATCH_CONTAINERS, both)}
        )
    if kind.oom_score_adj is not None:
        annotations[ANNOTATION_OOM_SCORE_ADJ] = str(kind.oom_score_adj)
    if kind.cache_percent:
        share = kind.cache_percent
        annotations[ANNOTATION_RESCTRL] = json.dumps(
            {"llc": {"schemata": {"range": [0, share]}}, "mb": {"schemata": {"percent": share}}}
        )
    return labels, annotations


def batch_of(kind: Kind) -> dict[str, str]:
    """The batch resources of each container, which are both its request and its limit."""
    return {
        "kubernetes.io/batch-cpu": str(kind.batch_milli),
        "kubernetes.io/batch-memory": str(kind.batch_bytes),
    }


def requested(limits: Limits, qos: KubeQos, capacity_bytes: int) -> Requested:
    """What kubelet's CRI request for a new container says; an update leaves the OOM score out."""
    score = oom_score_adj_of(qos, limits, capacity_bytes) if capacity_bytes else None
    return Requested(
        cpu_shares=shares_of(limits.cpu_request_milli),
        cfs_quota_us=limits.quota_us,
        cfs_period_us=100_000,
        memory_limit_bytes=limits.memory_limit_bytes or UNLIMITED,
        cpus=CpuSet.parse(limits.cpus) if limits.cpus else None,
        oom_score_adj=score,
    )


def over(asked: Requested, decision: Decision) -> Requested:
    """The specification that the runtime stores: the request with our values over it."""
    fields = {
        Resource.CPU_SHARES: "cpu_shares",
        Resource.CPU_CFS_QUOTA: "cfs_quota_us",
        Resource.MEMORY_LIMIT: "memory_limit_bytes",
        Resource.CPUSET_CPUS: "cpus",
        Resource.OOM_SCORE_ADJ: "oom_score_adj",
    }
    changes = {
        fields[resource]: outcome.value
        for (resource, _), outcome in decision.outcomes.items()
        if resource in fields
    }
    return msgspec.structs.replace(asked, **changes)


def overlay(upper: Requested, lower: Requested) -> Requested:
    """What the runtime stores after an update: it names what changes."""
    said = {
        name: value for name, value in msgspec.structs.asdict(upper).items() if value is not None
    }
    return msgspec.structs.replace(lower, **said)
