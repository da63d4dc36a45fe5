"""Standing claims: what dynamic strategies want at one moment, beside the policies' claims.

A strategy (CPU suppression, CPU burst) changes its mind every second. Its claims enter a decision
from outside, so the engine is not rebuilt and the outcomes that are cached by shape stay: only the
resources with a standing claim are composed again, from the claims that the cached outcome keeps.

A `Standing` is immutable. Who publishes it gives each strategy's claims a time to live; a claim
that is not renewed is missing from the next `Standing`, and the original value returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from apis.qos import KubeQoS
from hooks.claim import Claim
from hooks.compose import compose, resolve_conflicts
from hooks.decision import Decision, Outcome, ResourceKey
from hooks.requested import value_in_request
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    Level,
    PodSubject,
    Requested,
    SandboxSubject,
    Subject,
)
from linux.resources import UNLIMITED, Resource

Claims = tuple[Claim, ...]

_OF_PODS: Final = (ContainerSubject, PodSubject, SandboxSubject)
"""The subjects that have a pod, and so its class."""


class Standing(msgspec.Struct, frozen=True):
    """The claims of all strategies.

    by_subject: by the subject's key.
    by_class: for every subject of the level whose pod has the Kubernetes QoS class; a container
        that is created now gets them with its first decision.
    """

    by_subject: Mapping[str, Claims] = {}
    by_class: Mapping[tuple[Level, KubeQoS], Claims] = {}

    def of(self, subject: Subject) -> Claims:
        """Return the standing claims on one subject; () for none."""
        own = self.by_subject.get(subject.key, ())
        if self.by_class and isinstance(subject, _OF_PODS):
            return own + self.by_class.get((subject.level, subject.pod.kube_qos), ())
        return own


NOTHING_STANDS: Final = Standing()


def merged(parts: Sequence[Standing]) -> Standing:
    """Return the claims of several strategies together; the order of `parts` is kept.

    Without any claim this is `NOTHING_STANDS`, and the claims of one strategy alone stay the same
    object.
    """
    parts = [part for part in parts if part.by_subject or part.by_class]
    if len(parts) == 1:
        return parts[0]
    by_subject: dict[str, Claims] = {}
    by_class: dict[tuple[Level, KubeQoS], Claims] = {}
    for part in parts:
        for key, claims in part.by_subject.items():
            by_subject[key] = by_subject.get(key, ()) + claims
        for group, claims in part.by_class.items():
            by_class[group] = by_class.get(group, ()) + claims
    return Standing(by_subject, by_class) if by_subject or by_class else NOTHING_STANDS


def renewed(before: Standing, now: Standing) -> Standing:
    """Return `now` with the objects of `before` for all claims that are equal.

    It is `before` itself if all are. So readers see by identity what has changed.
    """
    if now is before:
        return before
    by_subject = {
        key: former if (former := before.by_subject.get(key)) == claims else claims
        for key, claims in now.by_subject.items()
    }
    by_class = before.by_class if before.by_class == now.by_class else now.by_class
    if by_class is before.by_class and by_subject == before.by_subject:
        return before
    return Standing(by_subject, by_class)


def differing(before: Standing, now: Standing) -> frozenset[str] | None:
    """Return the keys of the subjects whose claims differ; None: any subject's may.

    Claims of their own count as different if they are other objects, see `renewed`.
    """
    if before.by_class != now.by_class:
        return None
    former, newest = before.by_subject, now.by_subject
    differ = {key for key, claims in newest.items() if former.get(key) is not claims}
    return frozenset(differ.union(former.keys() - newest.keys()))


def still_lifted(before: Standing, now: Standing) -> Standing:
    """Return `now`, with the claims of `before` that no new container of a class has a quota.

    They go with a quota of the class's directory on cgroup v1. Their end is in force for replies at
    once, but the kernel has the directory's quota until it is written, and would refuse a container
    with a larger one of its own.
    """
    by_class = dict(now.by_class)
    for group in before.by_class:
        ended = _lifted(before, group)
        if ended and not _lifted(now, group):
            by_class[group] = (*by_class.get(group, ()), *ended)
    return now if by_class == now.by_class else Standing(now.by_subject, by_class)


def _lifted(standing: Standing, group: tuple[Level, KubeQoS]) -> Claims:
    if group[0] is not Level.CONTAINER:
        return ()
    return tuple(
        claim
        for claim in standing.by_class.get(group, ())
        if claim.resource is Resource.CPU_CFS_QUOTA and claim.value == UNLIMITED
    )


def same_effect(one: Claims, other: Claims) -> bool:
    """Return whether two sets of claims lead to the same values; reasons may differ."""
    if one is other:
        return True
    return len(one) == len(other) and all(
        a.value == b.value
        and (a.resource, a.key, a.policy, a.op, a.rank, a.factor, a.degraded)
        == (b.resource, b.key, b.policy, b.op, b.rank, b.factor, b.degraded)
        for a, b in zip(one, other, strict=True)
    )


def under(decision: Decision, standing: Claims, subject: Subject) -> Decision:
    """Return `decision`, of the policies alone, with the standing claims composed in."""
    if not standing:
        return decision
    return replace(decision, outcomes=with_standing(decision.outcomes, standing, subject))


def with_standing(
    outcomes: Mapping[ResourceKey, Outcome], standing: Claims, subject: Subject
) -> Mapping[ResourceKey, Outcome]:
    """Return `outcomes`, of the policies' claims alone, with the standing claims composed in.

    Outcomes of other resources stay the same objects.
    """
    requested: Requested = getattr(subject, "requested", NOTHING_REQUESTED)
    added: dict[ResourceKey, list[Claim]] = {}
    for claim in standing:
        added.setdefault((claim.resource, claim.key), []).append(claim)
    changed = dict(outcomes)
    for key, claims in added.items():
        before = outcomes.get(key)
        own = (
            [] if before is None else [c for c in _claims_of(before) if (c.resource, c.key) == key]
        )
        outcome = compose([*own, *claims], value_in_request(requested, key[0]))
        if outcome is not None:
            changed[key] = outcome
    return resolve_conflicts(changed)


def _claims_of(outcome: Outcome) -> Claims:
    return (outcome.winner, *outcome.modifiers, *outcome.losers)
