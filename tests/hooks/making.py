"""Short ways to make subjects, node inputs and decisions for the tests of policies.

`decide` also checks what every decision owes to people and effectors: each claim names a source and
a reason, and can be carried out on its level.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from apis.effective_nodeslo import decode_nodeslo
from apis.keys import ANNOTATION_POD_CPU_ALLOCS, LABEL_QOS_CLASS
from apis.nodeslo import (
    NodeSLOSpec,
)
from apis.qos import KubeQoS, QoSClass
from apis.topology import NodeCPUFacts, parse_node_cpu_facts, parse_pod_cpu_allocs
from hooks.check import claim_problem
from hooks.claim import Claim
from hooks.decision import Decision
from hooks.engine import Engine
from hooks.facts import KernelFacts, NodeInputs, NodeMeta, Settings
from hooks.policy import Policy
from hooks.subject import (
    Amounts,
    ContainerKind,
    ContainerSpec,
    ContainerSubject,
    Pod,
    PodSubject,
    QosSubject,
    Requested,
    SandboxSubject,
    Subject,
    make_pod,
)
from linux.resources import Resource

GIB = 1 << 30
EVERYTHING = frozenset(Resource)
"""A kernel that can do all, bvt and Anolis' memory files included."""
MAINLINE = frozenset(
    {
        Resource.CPU_SHARES,
        Resource.CPU_CFS_QUOTA,
        Resource.CPU_IDLE,
        Resource.CPUSET_CPUS,
        Resource.MEMORY_LIMIT,
        Resource.MEMORY_MIN,
        Resource.MEMORY_LOW,
        Resource.MEMORY_HIGH,
        Resource.MEMORY_OOM_GROUP,
        Resource.OOM_SCORE_ADJ,
    }
)


def a_pod(
    qos: QoSClass | str = QoSClass.NONE,
    kube_qos: KubeQoS = KubeQoS.BURSTABLE,
    *,
    name: str = "web",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, Any] | None = None,
    specs: Iterable[ContainerSpec] = (),
    resources: Amounts = Amounts(),  # noqa: B008 - frozen
    overhead: Amounts = Amounts(),  # noqa: B008 - frozen
    uid: str = "",
) -> Pod:
    """Return a pod; annotations that are not texts are written as JSON."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in (annotations or {}).items()
    }
    all_labels = dict(labels or {})
    if qos:
        all_labels[LABEL_QOS_CLASS] = str(qos)
    return make_pod(
        namespace="default",
        name=name,
        uid=uid or f"uid-{name}",
        labels=all_labels,
        annotations=texts,
        kube_qos=kube_qos,
        cgroup=f"kubepods/{kube_qos.lower()}/pod{name}",
        specs=tuple(specs),
        resources=resources,
        overhead=overhead,
    )


def be_pod(**kwargs: Any) -> Pod:
    return a_pod(QoSClass.BE, KubeQoS.BESTEFFORT, **kwargs)


def batch(
    name: str,
    *,
    cpu: tuple[int | None, int | None] = (None, None),
    memory: tuple[int | None, int | None] = (None, None),
    kind: ContainerKind = ContainerKind.REGULAR,
) -> ContainerSpec:
    """Return a container with batch resources, each as (request, limit)."""
    return ContainerSpec(
        name=name,
        kind=kind,
        amounts=Amounts(
            batch_cpu_request_milli=cpu[0],
            batch_cpu_limit_milli=cpu[1],
            batch_memory_request_bytes=memory[0],
            batch_memory_limit_bytes=memory[1],
        ),
    )


def plain(
    name: str,
    *,
    cpu: tuple[int | None, int | None] = (None, None),
    memory: tuple[int | None, int | None] = (None, None),
    kind: ContainerKind = ContainerKind.REGULAR,
) -> ContainerSpec:
    """Return a container with plain resources, each as (request, limit)."""
    return ContainerSpec(
        name=name,
        kind=kind,
        amounts=Amounts(
            cpu_request_milli=cpu[0],
            cpu_limit_milli=cpu[1],
            memory_request_bytes=memory[0],
            memory_limit_bytes=memory[1],
        ),
    )


def a_container(pod: Pod, name: str = "main", **requested: Any) -> ContainerSubject:
    return ContainerSubject(
        pod=pod, name=name, id=f"{pod.uid}-{name}", requested=Requested(**requested)
    )


def a_sandbox(pod: Pod) -> SandboxSubject:
    return SandboxSubject(pod=pod, id=f"{pod.uid}-sandbox")


def a_pod_subject(pod: Pod, **requested: Any) -> PodSubject:
    return PodSubject(pod=pod, requested=Requested(**requested))


def a_directory(kube_qos: KubeQoS, *pods: Pod) -> QosSubject:
    return QosSubject(kube_qos=kube_qos, cgroup=f"kubepods/{kube_qos.lower()}", pods=pods)


def slo(spec: Mapping[str, Any]) -> NodeSLOSpec:
    return decode_nodeslo(dict(spec), obj="NodeSLO n1")


def classes(
    field: str, *, policies: Mapping[str, str] | None = None, **by_class: Any
) -> NodeSLOSpec:
    """Return a NodeSLO with `field` of classes: classes("cpuQOS", lsr={...}, be={...})."""
    strategy: dict[str, Any] = {
        f"{name}Class": {field: {"enable": True} | block} for name, block in by_class.items()
    }
    if policies is not None:
        strategy["policies"] = dict(policies)
    return slo({"resourceQOSStrategy": strategy})


def topology(annotations: Mapping[str, Any]) -> NodeCPUFacts:
    texts = {key: json.dumps(value) for key, value in annotations.items()}
    obj = "NodeResourceTopology n1"
    allocs = parse_pod_cpu_allocs(texts.get(ANNOTATION_POD_CPU_ALLOCS, "null"), obj=obj)
    return msgspec.structs.replace(parse_node_cpu_facts(texts, obj=obj), pod_cpu_allocs=allocs)


def node(
    *,
    slo: NodeSLOSpec | None = None,
    topology: NodeCPUFacts | None = None,
    gates: Mapping[str, bool] | None = None,
    compat: Iterable[str] = (),
    kernel: KernelFacts | None = None,
    annotations: Mapping[str, str] | None = None,
    allocatable_memory_bytes: int | None = None,
    **settings: Any,
) -> NodeInputs:
    """Return node inputs; the kernel can do everything unless said otherwise."""
    inputs = NodeInputs(
        topology=topology,
        node=NodeMeta(
            name="n1",
            annotations=annotations or {},
            allocatable_memory_bytes=allocatable_memory_bytes,
        ),
        kernel=kernel if kernel is not None else KernelFacts(supported=EVERYTHING),
        settings=Settings(feature_gates=gates or {}, compat=frozenset(compat), **settings),
    )
    return inputs if slo is None else msgspec.structs.replace(inputs, slo=slo)


def engine(inputs: NodeInputs, *policies: Policy, previous: Engine | None = None) -> Engine:
    """Return an engine with only `policies`, all of their gates on unless `inputs` says no."""
    gates = {policy.gate: True for policy in policies} | dict(inputs.settings.feature_gates)
    settings = msgspec.structs.replace(inputs.settings, feature_gates=gates)
    return Engine.build(
        policies, msgspec.structs.replace(inputs, settings=settings), previous=previous
    )


def claims_of(decision: Decision) -> list[Claim]:
    return [
        claim
        for outcome in decision.outcomes.values()
        for claim in (outcome.winner, *outcome.modifiers, *outcome.losers)
    ]


def decide(subject: Subject, inputs: NodeInputs, *policies: Policy) -> Decision:
    """Return the decision of `policies` alone, checked as the module's docstring says."""
    decision = engine(inputs, *policies).decide(subject)
    for claim in claims_of(decision):
        assert claim.reason and claim.source, claim
        assert claim_problem(claim, subject.level) == "", claim
    return decision


def values(decision: Decision) -> dict[str, Any]:
    """Return the decided values by resource name, or `resource:key` where there is a key."""
    return {
        f"{resource.value}:{key}" if key else resource.value: outcome.value
        for (resource, key), outcome in decision.outcomes.items()
    }


def only_fault(decision: Decision) -> str:
    """Return the message of the one fault, which must be an input error."""
    (fault,) = decision.faults
    assert fault.input_error, fault
    return fault.message
