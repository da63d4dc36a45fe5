"""InterPodAffinity: pods beside pods of a kind, or apart from them, within a node label's value.

Filter. Required affinity: every term's domain must hold a pod that all terms mean; if no pod
anywhere is meant, a pod that its own terms mean may begin on any node with all keys. Required
anti-affinity: no pod that a term means may be in the term's domain. Terms of pods that run: their
required anti-affinity holds the pod back from their domains.

Score: weights of the pod's preferred terms for each pod that they mean in the domain (minus for
anti-affinity), the same for preferred terms of pods that run and mean this pod, and
`hard_weight` for their required affinity terms; scaled to 0..100 over the feasible nodes.
docs/facts/scheduler.md, "Affinity between pods".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from apis.scheduling_pod import PodAffinity, PodAffinityTerm
from cluster.scheduler.plugins.between_pods.pod_selection import TermPods, sees_reserve_pods
from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    NO_LIMIT,
    Leaving,
    Mask,
    Reason,
    Scores,
    zeros,
)
from cluster.scheduler.tables.labels import ABSENT
from cluster.scheduler.tables.matching import Counter, Weigh, is_reserve_pod
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_REASONS: Final = (
    Reason("node(s) didn't match pod affinity rules", resolvable=False),
    Reason("node(s) didn't match pod anti-affinity rules"),
    Reason("node(s) didn't satisfy existing pods anti-affinity rules"),
)
_AFFINITY: Final = 1
_ANTI_AFFINITY: Final = 2
_EXISTING: Final = 4


@dataclass(frozen=True, slots=True)
class Term:
    """A term of a pod: which pods it means, within which topology."""

    topology_key: str
    pods: TermPods
    weight: int = 1

    @property
    def key(self) -> Hashable:
        return (self.topology_key, self.pods.key)


@dataclass(frozen=True, slots=True)
class Terms:
    """All terms of a pod's shape, with namespace selectors resolved."""

    affinity: tuple[Term, ...]
    anti_affinity: tuple[Term, ...]
    preferred: tuple[Term, ...]
    """Anti-affinity has negative weights."""


def terms_of(pod: PodShape, tables: Tables) -> Terms:
    """Return the terms of a shape, kept until a namespace changes."""
    kept = pod.derived(_kept_terms)
    found = kept.get(tables)
    version = tables.namespaces.version
    if found is None or found[0] != version:
        found = kept[tables] = (version, _terms(pod, tables))
    return found[1]


def _kept_terms(pod: PodShape) -> WeakKeyDictionary[Tables, tuple[int, Terms]]:
    return WeakKeyDictionary()


def _terms(pod: PodShape, tables: Tables) -> Terms:
    def term(raw: PodAffinityTerm, weight: int = 1) -> Term:
        selected = frozenset[str]()
        if raw.namespace_selector is not None and not raw.namespace_selector.is_empty():
            selected = tables.namespaces.selected(raw.namespace_selector)
        return Term(raw.topology_key, TermPods(pod, raw, selected), weight)

    affinity = pod.affinity
    beside = (affinity.pod_affinity if affinity else None) or PodAffinity()
    apart = (affinity.pod_anti_affinity if affinity else None) or PodAffinity()
    return Terms(
        tuple(term(raw) for raw in beside.required),
        tuple(term(raw) for raw in apart.required),
        (
            *(term(weighted.pod_affinity_term, weighted.weight) for weighted in beside.preferred),
            *(term(weighted.pod_affinity_term, -weighted.weight) for weighted in apart.preferred),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Around:
    """What the pods that run mean for one pod: counters, kept while the same shapes run."""

    version: tuple[int, int, bool]
    """Of affinity terms and namespaces, and whether reserve pods count."""
    required: tuple[Counter, ...]
    """One for all terms of required affinity together, if there are any."""
    apart: tuple[tuple[Term, Counter], ...]
    existing: tuple[tuple[str, Counter], ...]
    """(topology key, pods that run with required anti-affinity to this pod)."""
    scored: tuple[tuple[str, Counter], ...]
    """(topology key, sum of weights of the pods that count)."""

    def changes(self) -> int:
        counters = (
            *self.required,
            *(c for _, c in self.apart),
            *(c for _, c in self.existing),
        )
        return sum(counter.version for counter in counters)


@dataclass(frozen=True, slots=True)
class InterPodAffinity:
    """hard_weight: weight of required affinity terms of pods that run, in the score.
    ignore_existing: whether terms of pods that run, required ones too, count in the score only for
    pods that have preferred terms themselves."""

    hard_weight: int = 1
    ignore_existing: bool = False
    name: str = "InterPodAffinity"

    # --- filter --------------------------------------------------------------------------------

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        around = self._around(pod, tables)
        return bool(around.required or around.apart or around.existing)

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        around = self._around(pod, tables)
        # Each number only grows, so their combination does not repeat.
        terms, namespaces, reserve_pods = around.version
        members = tables.nodes.membership + terms + namespaces
        return 2 * ((members << 40) + around.changes()) + reserve_pods

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        length = len(tables.nodes)
        around = self._around(pod, tables)
        alive = tables.nodes.alive[:length]
        mask = zeros(length)
        own = terms_of(pod, tables)
        for counter in around.required:
            has_keys = np.ones(length, dtype=np.bool_)
            beside = np.ones(length, dtype=np.bool_)
            for term in own.affinity:
                labels = tables.nodes.labels.column(term.topology_key)
                ids = labels.ids[:length]
                has_keys &= ids != ABSENT
                beside &= (counter.by_domain(labels, alive) > 0)[ids]
            begins = counter.weigh(pod) and not self._anywhere(own, counter, tables)
            mask[~(has_keys & (beside | bool(begins)))] = _AFFINITY
        self._keep_apart(mask, around, tables)
        return mask[rows]

    def headroom(self, pod: PodShape, tables: Tables, rows: Rows, pods: int) -> NDArray[np.int64]:
        """Return 0 where anti-affinity holds pods back, which more pods never end, and at most 1
        where a pod that is placed keeps others of its shape away.

        Affinity sets no limit: one of the pods that are placed may be the one that others need.
        """
        length = len(tables.nodes)
        apart = zeros(length)
        self._keep_apart(apart, self._around(pod, tables), tables)
        headroom = np.where(apart == 0, NO_LIMIT, 0)
        for term in terms_of(pod, tables).anti_affinity:
            if term.pods.match(pod):
                ids = tables.nodes.labels.column(term.topology_key).ids[:length]
                headroom[ids != ABSENT] = np.minimum(headroom[ids != ABSENT], 1)
        return headroom[rows]

    def may_open(
        self, pod: PodShape, tables: Tables, rows: NDArray[np.intp], leaving: Leaving
    ) -> NDArray[np.bool_]:
        """Return where all pods of the domain that the pod keeps apart from could leave."""
        length = len(tables.nodes)
        around = self._around(pod, tables)
        kept_apart = (
            *((term.topology_key, counter) for term, counter in around.apart),
            *around.existing,
        )
        result = np.ones(len(rows), dtype=np.bool_)
        for topology_key, counter in kept_apart:
            labels = tables.nodes.labels.column(topology_key)
            ids = labels.ids[:length][rows]
            counts = counter.by_domain(labels, tables.nodes.alive[:length])[ids]
            result &= (ids == ABSENT) | (counts <= leaving.weigh(counter.weigh))
        return result

    def _anywhere(self, own: Terms, counter: Counter, tables: Tables) -> bool:
        """Return whether a pod that all terms mean is in a domain of any term."""
        length = len(tables.nodes)
        found = counter.column(length) > 0
        return any(
            bool(
                (found & (tables.nodes.labels.column(t.topology_key).ids[:length] != ABSENT)).any()
            )
            for t in own.affinity
        )

    def _keep_apart(self, mask: Mask, around: _Around, tables: Tables) -> None:
        for term, counter in around.apart:
            self._hold(mask, term.topology_key, counter, tables, _ANTI_AFFINITY)
        for topology_key, counter in around.existing:
            self._hold(mask, topology_key, counter, tables, _EXISTING)

    def _hold(
        self, mask: Mask, topology_key: str, counter: Counter, tables: Tables, bit: int
    ) -> None:
        length = len(mask)
        labels = tables.nodes.labels.column(topology_key)
        ids = labels.ids[:length]
        taken = (counter.by_domain(labels, tables.nodes.alive[:length]) > 0)[ids]
        mask[(mask == 0) & taken & (ids != ABSENT)] = bit

    # --- what runs around the pod --------------------------------------------------------------

    def _around(self, pod: PodShape, tables: Tables) -> _Around:
        of_tables = pod.derived(_kept_around)
        kept = of_tables.get(tables)
        if kept is None:
            kept = of_tables[tables] = {}
        version = (
            tables.matches.affinity_version,
            tables.namespaces.version,
            sees_reserve_pods(pod, tables),
        )
        known = kept.get(self)
        if known is None or known.version != version:
            known = kept[self] = self._look_around(pod, tables, version)
        return known

    def _look_around(
        self, pod: PodShape, tables: Tables, version: tuple[int, int, bool]
    ) -> _Around:
        own = terms_of(pod, tables)
        counters = _Counters(tables, reserve_pods=version[2])
        required: tuple[Counter, ...] = ()
        if own.affinity:
            meant = tuple(term.pods for term in own.affinity)
            required = (
                counters.of(
                    ("all of", tuple(pods.key for pods in meant)),
                    lambda other: int(all(pods.match(other) for pods in meant)),
                ),
            )
        apart = tuple((term, counters.meant(term)) for term in own.anti_affinity)
        existing = tuple(
            (term.topology_key, counters.owners(term, "anti"))
            for term in _distinct(
                term
                for shape in counters.shapes_with_affinity()
                for term in terms_of(shape, tables).anti_affinity
            )
            if term.pods.match(pod)
        )
        scored = [
            (term.topology_key, counters.weighted(term)) for term in own.preferred if term.weight
        ]
        scored += [
            (topology_key, counter)
            for topology_key, counter in self._scored_existing(pod, own, counters)
        ]
        return _Around(version, required, apart, existing, tuple(scored))

    def _scored_existing(
        self, pod: PodShape, own: Terms, counters: _Counters
    ) -> Iterator[tuple[str, Counter]]:
        if self.ignore_existing and not own.preferred:
            return
        kinds = ["preferred"]
        if self.hard_weight:
            kinds.append("affinity")
        for kind in kinds:
            terms: Iterable[Term] = _distinct(
                term
                for shape in counters.shapes_with_affinity()
                for term in getattr(terms_of(shape, counters.tables), kind)
            )
            for term in terms:
                if term.pods.match(pod):
                    weight = self.hard_weight if kind == "affinity" else 1
                    yield term.topology_key, counters.owners(term, kind, weight)

    def scored(self, pod: PodShape, tables: Tables) -> tuple[tuple[str, Counter], ...]:
        """Return (topology key, counter of weights) of all terms that count in the score."""
        return self._around(pod, tables).scored


@dataclass(frozen=True, slots=True)
class InterPodAffinityScore:
    """The score of `affinity`'s preferred terms."""

    affinity: InterPodAffinity
    name: str = "InterPodAffinity"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return bool(self.affinity.scored(pod, tables))

    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        length = len(tables.nodes)
        total = zeros(len(feasible))
        for topology_key, counter in self.affinity.scored(pod, tables):
            labels = tables.nodes.labels.column(topology_key)
            sums = counter.by_domain(labels, tables.nodes.alive[:length])
            sums[ABSENT] = 0
            total += sums[labels.ids[feasible]]
        if not len(total):
            return total
        smallest, largest = int(total.min()), int(total.max())
        if largest == smallest:
            return np.zeros_like(total)
        return MAX_SCORE * (total - smallest) // (largest - smallest)


def _kept_around(
    pod: PodShape,
) -> WeakKeyDictionary[Tables, dict[InterPodAffinity, _Around]]:
    return WeakKeyDictionary()


def _distinct(terms: Iterable[Term]) -> Iterator[Term]:
    """Yield one of several terms with the same topology and pods."""
    seen = set()
    for term in terms:
        if term.key not in seen:
            seen.add(term.key)
            yield term


@dataclass(frozen=True, slots=True)
class _Counters:
    """Makes counters of pods. reserve_pods: whether reserve pods of Reservations count."""

    tables: Tables
    reserve_pods: bool

    def shapes_with_affinity(self) -> Iterator[PodShape]:
        """Yield the shapes whose terms count."""
        for shape in self.tables.matches.shapes_with_affinity():
            if self.reserve_pods or not is_reserve_pod(shape):
                yield shape

    def of(self, key: Hashable, weigh: Weigh) -> Counter:
        return self.tables.matches.counter(key, weigh, with_reserve_pods=self.reserve_pods)

    def meant(self, term: Term) -> Counter:
        """Return the counter of the pods that a term means."""
        pods = term.pods
        return self.of(("meant", pods.key), lambda other: int(pods.match(other)))

    def weighted(self, term: Term) -> Counter:
        """Return the counter of a term's weight for each pod that it means."""
        pods, weight = term.pods, term.weight
        key = ("weighted", pods.key, weight)
        return self.of(key, lambda other: weight * int(pods.match(other)))

    def owners(self, term: Term, kind: str, weight: int = 1) -> Counter:
        """Return the counter of the pods that have this term, with the sum of its weights.

        kind: "anti" or "affinity" for required terms, "preferred" for weighted ones.
        """
        member = "anti_affinity" if kind == "anti" else kind
        tables, key = self.tables, term.key

        def weigh(shape: PodShape) -> int:
            terms: tuple[Term, ...] = getattr(terms_of(shape, tables), member)
            return weight * sum(term.weight for term in terms if term.key == key)

        return self.of(("owners", kind, key, weight, tables.namespaces.version), weigh)
