"""Resctrl: a pod's own share of the last-level cache and of memory bandwidth.

A pod that carries the annotation gets a control group of its own, `koordlet-<uid>`, with a schemata
made for this machine; its containers join the group, at creation by the runtime's RDT class.

Every decision reads the annotation, so an edited annotation takes effect, and a cache that it no
longer names is unlimited again. A share for some caches only leaves the other caches unlimited,
while upstream then drops the whole line. Rules: docs/facts/policies.md, "resctrl of a pod".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec

from apis.annotations import PodResctrl, annotation_field, parse_resctrl
from apis.errors import InputError
from apis.keys import ANNOTATION_RESCTRL
from hooks.claim import Claim, Rank
from hooks.facts import NodeInputs, ResctrlFacts
from hooks.policy import Off, OffBecause, Policy
from hooks.schemata import NOT_MOUNTED, WHOLE, MachineSchemata, Range, make_schemata
from hooks.subject import ContainerSubject, Level, Pod, PodSubject
from linux.resctrl import POD_GROUP_PREFIX, check_group
from linux.resources import Resource

NAME: Final = "Resctrl"

_SOURCE: Final = f"annotation {ANNOTATION_RESCTRL}"
_MOST_CACHED_ENTRIES: Final = 64
"""Caches named by an annotation whose schemata is cached. Machines have fewer caches. Measured: 256
such annotations hold 750 KiB."""


class Rule(msgspec.Struct, frozen=True):
    facts: ResctrlFacts


def parse(inputs: NodeInputs) -> Rule | Off:
    facts = inputs.kernel.resctrl
    if facts is None:
        return Off(OffBecause.UNSUPPORTED, NOT_MOUNTED)
    if not (facts.l3_domains or facts.mb_domains):
        return Off(OffBecause.UNSUPPORTED, "this machine has no resctrl with L3 or MB allocation")
    return Rule(facts)


def group_of(pod: Pod) -> str:
    """Return the name of the pod's control group. Raises InputError for an unusable UID."""
    try:
        if not pod.uid:
            raise ValueError("the pod has no UID, which the name of its control group needs")
        return check_group(POD_GROUP_PREFIX + pod.uid)
    except ValueError as error:
        raise InputError(
            obj=pod.obj, field="metadata.uid", value=pod.uid, problem=str(error)
        ) from None


def schemata_of(wish: PodResctrl, facts: ResctrlFacts) -> MachineSchemata:
    """Return the schemata that a pod requests; "" as text if the machine supports no part of it."""
    cache: dict[int, Range] | None = None
    llc, mb = wish.llc, wish.mb
    if llc.schemata.range or any(entry.range for entry in llc.schemata_per_cache):
        default = _range(llc.schemata.range) or WHOLE
        cache = dict.fromkeys(facts.l3_domains, default)
        cache |= {
            entry.cache_id: own
            for entry in llc.schemata_per_cache
            if (own := _range(entry.range)) is not None
        }
    memory: dict[int, int] | None = None
    if mb.schemata.percent or any(entry.percent for entry in mb.schemata_per_cache):
        memory = dict.fromkeys(facts.mb_domains, mb.schemata.percent or 100)
        memory |= {
            entry.cache_id: entry.percent for entry in mb.schemata_per_cache if entry.percent
        }
    made = make_schemata(facts, cache=cache, memory=memory)
    if made.text and (cache is None or memory is None):
        # Parts not requested are written as unlimited: an earlier annotation may have limited them.
        whole = make_schemata(
            facts, cache={} if cache is None else None, memory={} if memory is None else None
        )
        text = whole.text + made.text if cache is None else made.text + whole.text
        made = MachineSchemata(text, made.degraded)
    foreign = [
        *sorted((cache or {}).keys() - set(facts.l3_domains)),
        *sorted((memory or {}).keys() - set(facts.mb_domains)),
    ]
    if foreign and made.text:
        unknown = f"this machine has no cache {', '.join(map(str, foreign))}"
        made = MachineSchemata(
            made.text, f"{made.degraded}; {unknown}" if made.degraded else unknown
        )
    return made


_cached_schemata = lru_cache(maxsize=256)(schemata_of)


def _range(share: tuple[int, ...]) -> Range | None:
    return (share[0], share[1]) if len(share) == 2 else None


def _of_pod(rule: Rule, pod: Pod) -> MachineSchemata | None:
    text = pod.annotations.get(ANNOTATION_RESCTRL)
    if text is None:
        return None
    wish = parse_resctrl(text, obj=pod.obj)
    entries = len(wish.llc.schemata_per_cache) + len(wish.mb.schemata_per_cache)
    make = _cached_schemata if entries <= _MOST_CACHED_ENTRIES else schemata_of
    made = make(wish, rule.facts)
    if not made.text and not made.degraded:
        raise InputError(
            obj=pod.obj,
            field=annotation_field(ANNOTATION_RESCTRL),
            value=text,
            problem="requests neither cache nor memory bandwidth",
            hint='for example {"llc":{"schemata":{"range":[0,30]}}}',
        )
    return made


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claim]:
    made = _of_pod(rule, subject.pod)
    if made is not None and made.text:
        yield Claim(
            resource=Resource.RESCTRL_SCHEMATA,
            key=group_of(subject.pod),
            value=made.text,
            policy=NAME,
            reason="the pod's own cache and memory bandwidth",
            source=_SOURCE,
            rank=Rank.POD,
            degraded=made.degraded,
        )


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claim]:
    made = _of_pod(rule, subject.pod)
    if made is not None and made.text:
        yield Claim(
            resource=Resource.RESCTRL_GROUP,
            value=group_of(subject.pod),
            policy=NAME,
            reason="the pod's own control group",
            source=_SOURCE,
            rank=Rank.POD,
            degraded=made.degraded,
        )


POLICY: Final = Policy(
    name=NAME,
    gate="Resctrl",
    gate_default=False,
    summary="a pod's own share of the last-level cache and of memory bandwidth",
    parse=parse,
    claims={Level.POD: claim_pod, Level.CONTAINER: claim_container},
    individual=lambda pod: ANNOTATION_RESCTRL in pod.annotations,
)
