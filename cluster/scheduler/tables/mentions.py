"""Which labels, namespaces and owners of pods the selectors of other objects look at.

Affinity terms of pods on nodes and owners of reservations decide by labels, namespace and owner of
a pod that waits. What none of them mentions cannot change what a node means for that pod.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from apis.keys import ANNOTATION_NETWORK_TOPOLOGY_SELECTOR
from apis.meta import LabelSelector
from apis.scheduling import ReservationOwner
from apis.scheduling_pod import PodAffinityTerm
from cluster.scheduler.tables.shapes import PodShape

Mention = tuple[str, str]
"""("label", key), ("namespace", name), or one of the two below."""

EVERY_NAMESPACE: Final[Mention] = ("namespaces", "")
"""A selector of namespaces: which ones it selects follows their labels."""
OWNERS: Final[Mention] = ("owners", "")
"""Owner references of pods."""


def label(key: str) -> Mention:
    return ("label", key)


def namespace(name: str) -> Mention:
    return ("namespace", name)


class Mentions:
    """Counts mentions as the objects that have them come and go."""

    def __init__(self) -> None:
        self._counts: Counter[Mention] = Counter()
        self._now: frozenset[Mention] = frozenset()
        self._version = 0
        self._stale = False

    def add(self, mentions: Iterable[Mention]) -> None:
        """Count the mentions of one more object."""
        for each in mentions:
            self._counts[each] += 1
            self._stale = True

    def remove(self, mentions: Iterable[Mention]) -> None:
        """Take back what `add` did with the same mentions."""
        for each in mentions:
            self._counts[each] -= 1
            if not self._counts[each]:
                del self._counts[each]
            self._stale = True

    @property
    def now(self) -> frozenset[Mention]:
        """All mentions."""
        if self._stale:
            self._follow()
        return self._now

    @property
    def version(self) -> int:
        """A number that changes when `now` does, and only then."""
        if self._stale:
            self._follow()
        return self._version

    def _follow(self) -> None:
        fresh = frozenset(self._counts)
        if fresh != self._now:
            self._now = fresh
            self._version += 1
        self._stale = False


def mentioned_by_affinity(shape: PodShape) -> frozenset[Mention]:
    """Return what a pod's terms about other pods mention; for `PodShape.derived`."""
    affinity = shape.affinity
    terms: list[PodAffinityTerm] = []
    for each in (affinity.pod_affinity, affinity.pod_anti_affinity) if affinity else ():
        if each is not None:
            terms += each.required
            terms += (weighted.pod_affinity_term for weighted in each.preferred)
    return frozenset(each for term in terms for each in _of_term(term, shape))


def mentioned_by_pod(shape: PodShape) -> frozenset[Mention]:
    """Return what a pod itself has counted of pods like it; for `PodShape.derived`."""
    found = set(shape.derived(mentioned_by_affinity))
    for constraint in shape.spread:
        found.update(_of_selector(constraint.label_selector))
        found.update(map(label, constraint.match_label_keys))
    found.update(_of_selector(shape.spread_by))
    if key := shape.annotations.get(ANNOTATION_NETWORK_TOPOLOGY_SELECTOR):
        found.add(label(key))
    if found or shape.spread or shape.spread_by is not None or shape.claims:
        # Pods are counted, and claims are looked for, in the pod's namespace.
        found.add(namespace(shape.namespace))
    return frozenset(found)


def mentioned_by_owners(owners: Iterable[ReservationOwner]) -> frozenset[Mention]:
    """Return what the owners of a reservation mention."""
    found: set[Mention] = set()
    for owner in owners:
        found.update(_of_selector(owner.label_selector))
        if owner.object is not None and owner.object.namespace:
            found.add(namespace(owner.object.namespace))
        if owner.controller is not None:
            found.add(OWNERS)
            if owner.controller.namespace:
                found.add(namespace(owner.controller.namespace))
    return frozenset(found)


def _of_term(term: PodAffinityTerm, owner: PodShape) -> Iterator[Mention]:
    yield from _of_selector(term.label_selector)
    yield from map(namespace, term.namespaces)
    if term.namespace_selector is not None:
        yield EVERY_NAMESPACE
    elif not term.namespaces:
        yield namespace(owner.namespace)


def _of_selector(selector: LabelSelector | None) -> Iterator[Mention]:
    if selector is not None:
        yield from map(label, selector.match_labels)
        yield from (label(each.key) for each in selector.match_expressions)
