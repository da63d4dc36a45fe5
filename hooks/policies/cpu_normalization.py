"""CPUNormalization: CFS quotas in standard cores instead of this node's cores.

A node whose cores do more work than the standard core carries a ratio above 1, which divides the
CFS quota of LS pods. Every decision divides kubelet's request, so a quota is never divided twice,
and a removed ratio leaves no divided quota.

The quota of a pod's directory is divided only when kubelet limits it, that is when every container
has a limit, and only on cgroup v2. On v1 the kernel refuses a container whose quota is above its
pod's, so a divided pod could not start a container while koordlet is away (upstream issue 2047).
The limit still holds there, because all of its containers are divided. `batch_resource` divides the
quotas of BE pods.

A pod without a class to which kubelet's static policy gives whole CPUs keeps its quota, like a pod
with CPUs from the scheduler: kubelet (from 1.33) removes such a pod's quota, which its
specification does not show. Rules: docs/facts/policies.md, "CPU normalisation".
"""

from __future__ import annotations

from typing import Final

import msgspec

from apis.annotations import parse_cpu_normalization_ratio
from apis.errors import InputError
from apis.keys import ANNOTATION_CPU_NORMALIZATION_RATIO
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.claim import Claim, Op
from hooks.facts import NodeInputs, NodeMeta
from hooks.policies.cpuset_allocator import allocated_cpus
from hooks.policy import Off, OffBecause, Policy, never
from hooks.subject import Amounts, ContainerSubject, Level, PodSubject
from linux.cgroup_files import DEFAULT_PERIOD_US
from linux.resources import Resource

NAME: Final = "CPUNormalization"
RATIO_SOURCE: Final = f"Node annotation {ANNOTATION_CPU_NORMALIZATION_RATIO}"


class Rule(msgspec.Struct, frozen=True):
    """ratio: above 1.0. pods: the quotas of pods' directories are divided too.

    kubelet_static: kubelet's CPU manager runs the static policy.
    """

    ratio: float
    divide: Claim
    pods: bool
    kubelet_static: bool


def node_ratio(node: NodeMeta) -> float | None:
    """Return the node's CPU normalisation ratio, None without one. Raises InputError."""
    text = node.annotations.get(ANNOTATION_CPU_NORMALIZATION_RATIO)
    if text is None:
        return None
    return parse_cpu_normalization_ratio(text, obj=f"Node {node.name}")


def division(ratio: float, policy: str) -> Claim:
    """Return the claim that divides a CFS quota by the ratio."""
    return Claim(
        resource=Resource.CPU_CFS_QUOTA,
        value=0,
        policy=policy,
        reason=f"CPU normalisation ratio {ratio:g}",
        source=RATIO_SOURCE,
        op=Op.DIVIDE,
        factor=ratio,
    )


def parse(inputs: NodeInputs) -> Rule | Off:
    ratio = node_ratio(inputs.node)
    if ratio is None:
        return Off(OffBecause.NODESLO, f"{RATIO_SOURCE} is not set")
    if ratio <= 1.0:
        return Off(OffBecause.NODESLO, f"{RATIO_SOURCE} is {ratio:g}: quotas stay as requested")
    pods = inputs.kernel.cgroup_version == 2 or (
        compat.NORMALIZED_PODS_ON_V1 in inputs.settings.compat
    )
    facts = inputs.topology
    static = facts is not None and facts.cpu_manager_policy.policy == "static"
    return Rule(ratio, division(ratio, NAME), pods, static)


def _in_scope(rule: Rule, subject: ContainerSubject | PodSubject) -> bool:
    pod = subject.pod
    if pod.qos is QoSClass.LS:
        return True
    if pod.qos is not QoSClass.NONE or (rule.kubelet_static and _whole_cpus(subject)):
        return False
    try:
        return not allocated_cpus(pod)
    except InputError:
        # CPUSetAllocator reports the bad annotation, and the pod has no CPUs of its own.
        return True


def _whole_cpus(subject: ContainerSubject | PodSubject) -> bool:
    """Return whether kubelet's static policy gives CPUs to the container, or to one of the pod."""
    pod = subject.pod
    # Kubelet gives none to a pod with resources of its own (spec.resources).
    if pod.kube_qos is not KubeQoS.GUARANTEED or pod.resources != Amounts():
        return False
    if isinstance(subject, PodSubject):
        specs = pod.specs
    else:
        spec = pod.spec(subject.name)
        specs = () if spec is None else (spec,)
    if specs:
        limits = [spec.amounts.cpu_limit_milli or 0 for spec in specs]
        return any(limit > 0 and limit % 1000 == 0 for limit in limits)
    requested = subject.requested
    return (requested.cfs_quota_us or 0) % (requested.cfs_period_us or DEFAULT_PERIOD_US) == 0


def claim_pod(rule: Rule, subject: PodSubject) -> tuple[Claim, ...]:
    return claim(rule, subject) if rule.pods else ()


def claim(rule: Rule, subject: ContainerSubject | PodSubject) -> tuple[Claim, ...]:
    """Divide kubelet's quota. A pod with an unlimited container has none, and stays so."""
    requested = subject.requested.cfs_quota_us
    if requested is None or requested <= 0 or not _in_scope(rule, subject):
        return ()
    return (rule.divide,)


POLICY: Final = Policy(
    name=NAME,
    gate="CPUNormalization",
    gate_default=False,
    summary="CFS quotas of LS pods divided by the node's CPU normalisation ratio",
    parse=parse,
    claims={Level.POD: claim_pod, Level.CONTAINER: claim},
    individual=never,
)
