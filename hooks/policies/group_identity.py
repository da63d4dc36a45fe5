"""GroupIdentity: the kernel's group identity (`cpu.bvt_warp_ns`) by QoS class.

bvt orders groups on a CPU: 2 is high (latency sensitive), -1 low (best effort) and yields to the
others. It exists on Anolis kernels only. Elsewhere a low identity gets what a mainline kernel has:
cpu.idle on the pod, or the smallest weight on older kernels; a high identity has no stand-in.

The stand-in is set on pods, never on the besteffort directory: kubelet rewrites that directory's
weight when it starts and every minute, the kernel refuses this while cpu.idle is 1, and kubelet
does not start if the write fails. Idle pods are enough for the scheduler to treat a CPU that runs
only them as free, and the directory has the smallest weight anyway.

Table, annotation and sysctls: docs/facts/policies.md, "Group identity"; the file's behaviour:
docs/facts/kernel.md, "What a write does".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from apis.annotations import parse_cpu_qos
from apis.keys import ANNOTATION_CPU_QOS
from apis.nodeslo import CPUPolicy, ResourceQOS
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.claim import Claim, Rank
from hooks.facts import KernelFacts, NodeInputs
from hooks.policy import Off, OffBecause, Policy, never
from hooks.subject import (
    ContainerSubject,
    HostAppSubject,
    Level,
    NodeSubject,
    Pod,
    PodSubject,
    QosSubject,
    SandboxSubject,
)
from hooks.switches import switch_claims
from linux.resources import Resource
from linux.sysctls import GROUP_IDENTITY, SCHED_CORE
from linux.weights import MIN_SHARES

NAME: Final = "GroupIdentity"

_STRATEGY: Final = "NodeSLO spec.resourceQOSStrategy"
_ANNOTATION: Final = f"annotation {ANNOTATION_CPU_QOS}"


class Means(StrEnum):
    """The file that carries an identity on this kernel."""

    BVT = "cpu.bvt_warp_ns"
    IDLE = "cpu.idle"
    WEIGHT = "cpu.weight"


_DEGRADED: Final[Mapping[Means, str]] = {
    Means.BVT: "",
    Means.IDLE: "no cpu.bvt_warp_ns here: identity -1 becomes cpu.idle=1 on pods, 1 and 2 nothing",
    Means.WEIGHT: (
        "no cpu.bvt_warp_ns and no cpu.idle here: identity -1 becomes the smallest CPU weight, "
        "1 and 2 nothing"
    ),
}


class Identity(msgspec.Struct, frozen=True):
    """A bvt value and the input field that it came from."""

    value: int
    source: str


class Rule(msgspec.Struct, frozen=True):
    """The table of docs/facts/policies.md, "Group identity".

    labelled: by the pod's label. unlabelled: by Kubernetes QoS, for every other pod.
    enabled: a class is switched on; otherwise every value is 0, which undoes older values.
    """

    means: Means
    enabled: bool
    labelled: Mapping[QoSClass, Identity]
    unlabelled: Mapping[KubeQoS, Identity]
    directories: Mapping[KubeQoS, Identity]
    sysctls: tuple[Claim, ...] = ()


def parse(inputs: NodeInputs) -> Rule | Off:
    kernel, strategy = inputs.kernel, inputs.slo.resource_qos_strategy
    right_policy = strategy.policies.cpu_policy is CPUPolicy.GROUP_IDENTITY

    def identity(name: str, block: ResourceQOS) -> tuple[bool, Identity]:
        if not right_policy:
            return False, Identity(0, f"{_STRATEGY}.policies.cpuPolicy")
        if not block.cpu_qos.enable:
            return False, Identity(0, f"{_STRATEGY}.{name}.cpuQOS.enable")
        value = block.cpu_qos.group_identity
        return True, Identity(value, f"{_STRATEGY}.{name}.cpuQOS.groupIdentity")

    lsr_on, lsr = identity("lsrClass", strategy.lsr_class)
    ls_on, ls = identity("lsClass", strategy.ls_class)
    be_on, be = identity("beClass", strategy.be_class)
    enabled = lsr_on or ls_on or be_on
    means = _means(kernel)
    if means is not Means.BVT:
        if compat.GROUP_IDENTITY_BVT_ONLY in inputs.settings.compat:
            return Off(
                OffBecause.UNSUPPORTED,
                "this kernel has no cpu.bvt_warp_ns, and the compat switch "
                f"{compat.GROUP_IDENTITY_BVT_ONLY} forbids a stand-in",
            )
        if not enabled:
            why = f"{_STRATEGY}: cpuQOS.enable is false for lsrClass, lsClass and beClass"
            if not right_policy:
                why = f"{_STRATEGY}.policies.cpuPolicy is {strategy.policies.cpu_policy}"
            return Off(OffBecause.NODESLO, why)
    guaranteed = lsr if lsr_on or not ls_on else ls
    return Rule(
        means=means,
        enabled=enabled,
        labelled={QoSClass.LSE: lsr, QoSClass.LSR: lsr, QoSClass.LS: ls, QoSClass.BE: be},
        unlabelled={
            KubeQoS.GUARANTEED: guaranteed,
            KubeQoS.BURSTABLE: ls,
            KubeQoS.BESTEFFORT: be,
        },
        directories={
            KubeQoS.GUARANTEED: Identity(0, f"{_STRATEGY} (kubepods stays neutral)"),
            KubeQoS.BURSTABLE: ls,
            KubeQoS.BESTEFFORT: be,
        },
        sysctls=_sysctls(kernel) if enabled and means is Means.BVT else (),
    )


def _means(kernel: KernelFacts) -> Means:
    if Resource.CPU_BVT in kernel.supported or kernel.group_identity_sysctl:
        return Means.BVT
    return Means.IDLE if Resource.CPU_IDLE in kernel.supported else Means.WEIGHT


def _sysctls(kernel: KernelFacts) -> tuple[Claim, ...]:
    """Core scheduling off, then group identity on: both at once can lock an Anolis kernel up."""
    wanted = []
    if kernel.group_identity_sysctl:
        if kernel.sched_core_sysctl:
            wanted.append((SCHED_CORE, "0", "group identity excludes core scheduling"))
        wanted.append((GROUP_IDENTITY, "1", "group identity is switched on by a class"))
    return switch_claims(NAME, f"{_STRATEGY}.policies.cpuPolicy", wanted)


def identity_of_pod(rule: Rule, pod: Pod) -> tuple[Identity, Rank]:
    """Return the pod's identity, with rank POD if it is from the pod's own annotation."""
    identity = rule.labelled.get(pod.qos)
    if identity is None:
        identity = rule.unlabelled[pod.kube_qos]
    if pod.qos is QoSClass.LS and rule.enabled:
        text = pod.annotations.get(ANNOTATION_CPU_QOS)
        if text is not None:
            own = parse_cpu_qos(text, obj=pod.obj)
            if not own.enable:
                return Identity(0, f"{_ANNOTATION}.enable"), Rank.POD
            if own.group_identity is not None:
                return Identity(own.group_identity, f"{_ANNOTATION}.groupIdentity"), Rank.POD
    return identity, Rank.DEFAULT


def _bvt(identity: Identity, rank: Rank, whose: str) -> Claim:
    return Claim(
        resource=Resource.CPU_BVT,
        value=identity.value,
        policy=NAME,
        reason=f"group identity of {whose}",
        source=identity.source,
        rank=rank,
    )


def _stand_in(rule: Rule, identity: Identity, rank: Rank) -> Claim:
    if rule.means is Means.IDLE:
        return Claim(
            resource=Resource.CPU_IDLE,
            value=1,
            policy=NAME,
            reason="group identity -1: yields the CPU to all other groups",
            source=identity.source,
            rank=rank,
            degraded="cpu.idle stands in for bvt -1; idle pods share the rest of the CPU equally",
        )
    return Claim(
        resource=Resource.CPU_SHARES,
        value=MIN_SHARES,
        policy=NAME,
        reason="group identity -1: the smallest weight among its siblings",
        source=identity.source,
        rank=rank,
        degraded="the smallest weight stands in for bvt -1; it does not preempt",
    )


def _whose(pod: Pod) -> str:
    return f"{pod.qos} pods" if pod.qos else f"unlabelled {pod.kube_qos} pods"


def claim_node(rule: Rule, subject: NodeSubject) -> tuple[Claim, ...]:
    return rule.sysctls


def claim_qos(rule: Rule, subject: QosSubject) -> Iterator[Claim]:
    if rule.means is Means.BVT:
        identity = rule.directories[subject.kube_qos]
        yield _bvt(identity, Rank.DEFAULT, f"the {subject.kube_qos} directory")


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claim]:
    pod = subject.pod
    identity, rank = identity_of_pod(rule, pod)
    if rule.means is Means.BVT:
        yield _bvt(identity, rank, _whose(pod))
        return
    # kubelet gives the besteffort directory, where these pods lie, the smallest weight already.
    placed_low = rule.means is Means.WEIGHT and pod.kube_qos is KubeQoS.BESTEFFORT
    if identity.value < 0 and not placed_low:
        yield _stand_in(rule, identity, rank)


def claim_container(rule: Rule, subject: ContainerSubject | SandboxSubject) -> Iterator[Claim]:
    """Claim the pod's value: a container inherits it only at creation, so later changes need it."""
    if rule.means is Means.BVT:
        identity, rank = identity_of_pod(rule, subject.pod)
        yield _bvt(identity, rank, _whose(subject.pod))


def claim_host_app(rule: Rule, subject: HostAppSubject) -> Iterator[Claim]:
    source = f"NodeSLO spec.hostApplications[{subject.name}].qos"
    identity = rule.labelled.get(subject.qos) or Identity(0, source)
    if rule.means is Means.BVT:
        yield _bvt(identity, Rank.DEFAULT, f"host applications of class {subject.qos or 'none'}")
    elif identity.value < 0:
        yield _stand_in(rule, identity, Rank.DEFAULT)


POLICY: Final = Policy(
    name=NAME,
    gate="GroupIdentity",
    gate_default=True,
    summary="which QoS class yields on a CPU: bvt, or cpu.idle on kernels without it",
    parse=parse,
    claims={
        Level.NODE: claim_node,
        Level.QOS: claim_qos,
        Level.POD: claim_pod,
        Level.SANDBOX: claim_container,
        Level.CONTAINER: claim_container,
        Level.HOST_APP: claim_host_app,
    },
    degraded=lambda rule: _DEGRADED[rule.means],
    individual=never,
)
