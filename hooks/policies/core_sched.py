"""CoreSched: which processes may share a physical core, by core scheduling cookies.

Containers of one group share a cookie; hyper-threads of a core run only one cookie at a time. A
class with `coreExpeller` gets groups of its own, so that it pushes others off the core. The claim
holds the group's name, and the executor gives equal names equal cookies. The name may be empty:
that is the group of all pods without a group label.

`schedIdle: 1` becomes cpu.idle on the pods of the class. Upstream sets it on the QoS directories,
where kubelet's own writes then fail and kubelet may not start; a compatibility switch does so too.
cpu.idle needs no core scheduling: it is claimed on kernels and machines without that as well.

Tables: docs/facts/policies.md, "Core scheduling"; the two sysctls: docs/facts/kernel.md, "Core
scheduling".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from apis.annotations import CoreSchedPolicy, core_sched_group_id, core_sched_policy
from apis.keys import LABEL_CORE_SCHED_GROUP_ID, LABEL_CORE_SCHED_POLICY
from apis.nodeslo import CPUPolicy, ResourceQOS
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.claim import Claim, Rank
from hooks.facts import KernelFacts, NodeInputs
from hooks.policy import Off, OffBecause, Policy
from hooks.subject import (
    ContainerSubject,
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

NAME: Final = "CoreSched"
EXPELLER_SUFFIX: Final = "-expeller"

_STRATEGY: Final = "NodeSLO spec.resourceQOSStrategy"
_NO_CORE_SCHED: Final = (
    "this kernel has no core scheduling (CONFIG_SCHED_CORE), or the machine no SMT"
)


class Entry(msgspec.Struct, frozen=True):
    """The settings of a class. field: the class's block in the NodeSLO."""

    enabled: bool
    expeller: bool
    idle: bool
    field: str


class Rule(msgspec.Struct, frozen=True):
    """Entries by label and, for pods without one, by Kubernetes QoS."""

    labelled: Mapping[QoSClass, Entry]
    unlabelled: Mapping[KubeQoS, Entry]
    cookies: bool
    idle_supported: bool
    idle_on_directories: bool
    sysctls: tuple[Claim, ...]

    @property
    def degraded(self) -> str:
        if not self.cookies:
            return f"{_NO_CORE_SCHED}: only schedIdle takes effect"
        wanted = any(entry.idle for entry in self.labelled.values())
        return (
            "schedIdle: this kernel has no cpu.idle" if wanted and not self.idle_supported else ""
        )


def parse(inputs: NodeInputs) -> Rule | Off:
    kernel, strategy = inputs.kernel, inputs.slo.resource_qos_strategy
    if strategy.policies.cpu_policy is not CPUPolicy.CORE_SCHED:
        return Off(
            OffBecause.NODESLO,
            f"{_STRATEGY}.policies.cpuPolicy is {strategy.policies.cpu_policy}, not coreSched",
        )
    lsr = _entry("lsrClass", strategy.lsr_class)
    ls = _entry("lsClass", strategy.ls_class)
    be = _entry("beClass", strategy.be_class)
    if not (lsr.enabled or ls.enabled or be.enabled):
        return Off(
            OffBecause.NODESLO,
            f"{_STRATEGY}: cpuQOS.enable is false for lsrClass, lsClass and beClass",
        )
    idle_supported = Resource.CPU_IDLE in kernel.supported
    if not kernel.core_sched and not (idle_supported and (lsr.idle or ls.idle or be.idle)):
        return Off(OffBecause.UNSUPPORTED, _NO_CORE_SCHED)
    return Rule(
        labelled={QoSClass.LSE: lsr, QoSClass.LSR: lsr, QoSClass.LS: ls, QoSClass.BE: be},
        unlabelled={
            KubeQoS.GUARANTEED: lsr if lsr.enabled else ls,
            KubeQoS.BURSTABLE: ls,
            KubeQoS.BESTEFFORT: be,
        },
        cookies=kernel.core_sched,
        idle_supported=idle_supported,
        idle_on_directories=compat.CPU_IDLE_ON_QOS_DIRECTORIES in inputs.settings.compat,
        sysctls=_sysctls(kernel) if kernel.core_sched else (),
    )


def _entry(name: str, block: ResourceQOS) -> Entry:
    cpu = block.cpu_qos
    return Entry(
        enabled=cpu.enable,
        expeller=cpu.enable and cpu.core_expeller,
        idle=cpu.enable and cpu.sched_idle == 1,
        field=f"{_STRATEGY}.{name}.cpuQOS",
    )


def _sysctls(kernel: KernelFacts) -> tuple[Claim, ...]:
    """Group identity off, then core scheduling on: both at once can lock an Anolis kernel up."""
    wanted = []
    if kernel.group_identity_sysctl:
        wanted.append((GROUP_IDENTITY, "0", "core scheduling excludes group identity"))
    if kernel.sched_core_sysctl:
        wanted.append((SCHED_CORE, "1", "core scheduling is switched on by a class"))
    return switch_claims(NAME, f"{_STRATEGY}.policies.cpuPolicy", wanted)


def _entry_of(rule: Rule, pod: Pod) -> Entry | None:
    if pod.qos is QoSClass.SYSTEM:
        return None
    return rule.labelled.get(pod.qos) or rule.unlabelled[pod.kube_qos]


def claim_node(rule: Rule, subject: NodeSubject) -> tuple[Claim, ...]:
    return rule.sysctls


def claim_qos(rule: Rule, subject: QosSubject) -> Iterator[Claim]:
    entry = rule.unlabelled[subject.kube_qos]
    if rule.idle_on_directories and rule.idle_supported and entry.idle:
        yield _idle(entry, f"the {subject.kube_qos} directory")


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claim]:
    if rule.idle_on_directories or not rule.idle_supported:
        return
    pod = subject.pod
    entry = _entry_of(rule, pod)
    if entry is not None and entry.idle:
        yield _idle(entry, f"pods of class {pod.qos or pod.kube_qos}")


def _idle(entry: Entry, whose: str) -> Claim:
    return Claim(
        resource=Resource.CPU_IDLE,
        value=1,
        policy=NAME,
        reason=f"{whose} run only where the CPU would be idle",
        source=f"{entry.field}.schedIdle",
    )


def claim_container(rule: Rule, subject: ContainerSubject | SandboxSubject) -> Iterator[Claim]:
    pod = subject.pod
    entry = _entry_of(rule, pod)
    if not rule.cookies or entry is None or not entry.enabled:
        return
    choice = core_sched_policy(pod.labels)
    if choice is CoreSchedPolicy.NONE:
        return
    group, source, rank = core_sched_group_id(pod.labels), f"{entry.field}.enable", Rank.DEFAULT
    reason = "shares its core with pods without a group label"
    if choice is CoreSchedPolicy.EXCLUSIVE:
        group, source, rank = pod.uid, f"label {LABEL_CORE_SCHED_POLICY}", Rank.POD
        reason = "shares its core with its own pod only"
    elif group:
        source, rank = f"label {LABEL_CORE_SCHED_GROUP_ID}", Rank.POD
        reason = "shares its core with pods of its group"
    if entry.expeller:
        group += EXPELLER_SUFFIX
        reason += " in an expelling class"
    yield Claim(
        resource=Resource.CORE_SCHED_COOKIE,
        value=group,
        policy=NAME,
        reason=reason,
        source=source,
        rank=rank,
    )


POLICY: Final = Policy(
    name=NAME,
    gate="CoreSched",
    gate_default=False,
    summary="which containers may share a physical core, by core scheduling cookies",
    parse=parse,
    claims={
        Level.NODE: claim_node,
        Level.QOS: claim_qos,
        Level.POD: claim_pod,
        Level.SANDBOX: claim_container,
        Level.CONTAINER: claim_container,
    },
    degraded=lambda rule: rule.degraded,
    individual=lambda pod: LABEL_CORE_SCHED_POLICY in pod.labels,
)
