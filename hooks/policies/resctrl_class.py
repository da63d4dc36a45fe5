"""RdtResctrl: cache and memory bandwidth shares of the QoS classes.

Three control groups, `LSR` (also for LSE), `LS` and `BE`, one for each class whose `resctrlQOS` is
enabled, hold the tasks of the class's pods. A pod with its own resctrl annotation is in none of
them. A class that is switched off has no group: its tasks return to the default group.

Rules: docs/facts/policies.md, "resctrl of classes".
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from apis.errors import InputError, InputErrors
from apis.keys import ANNOTATION_RESCTRL
from apis.qos import KubeQoS, QoSClass
from hooks.claim import Claim
from hooks.facts import NodeInputs
from hooks.policy import Off, OffBecause, Partial, Policy, never
from hooks.schemata import NOT_MOUNTED, WHOLE, Range, make_schemata
from hooks.subject import ContainerSubject, Level, NodeSubject, SandboxSubject
from linux.resources import Resource

NAME: Final = "RdtResctrl"

_STRATEGY: Final = "NodeSLO spec.resourceQOSStrategy"
_DEFAULT_RANGE: Final[Mapping[str, Range]] = {"LSR": WHOLE, "LS": WHOLE, "BE": (0, 30)}
"""Upstream's default range of the cache, in percent, of an enabled class."""


class Rule(msgspec.Struct, frozen=True):
    """groups: one schemata claim for each enabled class. tasks: the group claim by class."""

    groups: tuple[Claim, ...]
    tasks: Mapping[QoSClass | KubeQoS, Claim]
    degraded: str


def parse(inputs: NodeInputs) -> Rule | Off | Partial:
    strategy = inputs.slo.resource_qos_strategy
    classes = (
        (
            "LSR",
            "lsrClass",
            strategy.lsr_class.resctrl_qos,
            (QoSClass.LSE, QoSClass.LSR, KubeQoS.GUARANTEED),
        ),
        ("LS", "lsClass", strategy.ls_class.resctrl_qos, (QoSClass.LS, KubeQoS.BURSTABLE)),
        ("BE", "beClass", strategy.be_class.resctrl_qos, (QoSClass.BE, KubeQoS.BESTEFFORT)),
    )
    enabled = [entry for entry in classes if entry[2].enable]
    if not enabled:
        return Off(
            OffBecause.NODESLO,
            f"{_STRATEGY}: resctrlQOS.enable is false for lsrClass, lsClass and beClass",
        )
    facts = inputs.kernel.resctrl
    if facts is None:
        return Off(OffBecause.UNSUPPORTED, NOT_MOUNTED)
    if not (facts.l3_domains or facts.mb_domains):
        return Off(OffBecause.UNSUPPORTED, "this machine has no resctrl with L3 or MB allocation")
    groups: list[Claim] = []
    tasks: dict[QoSClass | KubeQoS, Claim] = {}
    errors: dict[str, InputError] = {}
    for group, field, qos, members in enabled:
        source = f"{_STRATEGY}.{field}.resctrlQOS"
        start, end = qos.cat_range_start_percent, qos.cat_range_end_percent
        if start >= end:
            errors[group] = InputError(
                obj="NodeSLO",
                field=f"spec.resourceQOSStrategy.{field}.resctrlQOS.catRangeStartPercent",
                value=start,
                problem=f"not below catRangeEndPercent, which is {end}",
                hint="both are percentages of the cache's ways",
            )
            start, end = _DEFAULT_RANGE[group]
        # 0 means no limit, as 100 does. It is written, to undo an earlier limit.
        made = make_schemata(
            facts,
            cache=dict.fromkeys(facts.l3_domains, (start, end)),
            memory=dict.fromkeys(facts.mb_domains, qos.mba_percent or 100),
        )
        if not made.text:
            continue
        groups.append(
            Claim(
                resource=Resource.RESCTRL_SCHEMATA,
                key=group,
                value=made.text,
                policy=NAME,
                reason=f"cache and memory bandwidth of class {group}",
                source=source,
                degraded=made.degraded,
            )
        )
        member = Claim(
            resource=Resource.RESCTRL_GROUP,
            value=group,
            policy=NAME,
            reason=f"control group of class {group}",
            source=f"{source}.enable",
            degraded=made.degraded,
        )
        tasks |= dict.fromkeys(members, member)
    degraded = "; ".join(dict.fromkeys(claim.degraded for claim in groups if claim.degraded))
    rule = Rule(tuple(groups), tasks, degraded)
    if not errors:
        return rule
    return Partial(
        rule, InputErrors(list(errors.values())), lambda last: _with_groups_of(last, rule, errors)
    )


def _with_groups_of(last: Rule, rule: Rule, bad: Container[str]) -> Rule:
    before = {claim.key: claim for claim in last.groups if claim.key in bad}
    return replace(rule, groups=tuple(before.get(claim.key, claim) for claim in rule.groups))


def claim_node(rule: Rule, subject: NodeSubject) -> tuple[Claim, ...]:
    return rule.groups


def claim_container(rule: Rule, subject: ContainerSubject | SandboxSubject) -> Iterator[Claim]:
    pod = subject.pod
    if ANNOTATION_RESCTRL in pod.annotations:
        return
    claim = rule.tasks.get(pod.qos or pod.kube_qos)
    if claim is not None:
        yield claim


POLICY: Final = Policy(
    name=NAME,
    gate="RdtResctrl",
    gate_default=True,
    summary="cache and memory bandwidth shares of the QoS classes",
    parse=parse,
    claims={
        Level.NODE: claim_node,
        Level.SANDBOX: claim_container,
        Level.CONTAINER: claim_container,
    },
    degraded=lambda rule: rule.degraded,
    individual=never,
)
