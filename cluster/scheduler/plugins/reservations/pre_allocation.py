"""Pre-allocation: a Reservation on room that running pods have, which become its first owners.

On a node, the room of such pods counts as free for the Reservation if each of them fits into it.
When the pods end, the Reservation keeps what they had. docs/scheduler.md, "Reservation".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from apis.core import Taint
from apis.keys import (
    ANNOTATION_PRE_ALLOCATABLE_PRIORITY,
    ANNOTATION_RESERVE_POD,
    LABEL_IS_PRE_ALLOCATABLE,
)
from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    AppliesByShape,
    Given,
    Mask,
    OfRowAlone,
    Reason,
    Recorded,
    Refusal,
    Scores,
    to_largest,
    zeros,
)
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.facts import ReservationFacts
from cluster.scheduler.tables.reservations.matching import Match, match
from cluster.scheduler.tables.reservations.pre_allocation import PreAllocation, demand_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_FEW_ROWS: Final = 64
"""Nodes up to which all pods of each are looked at. Of more, those without a pod of use are left
out first, which takes a look at each shape of the cluster. Chosen: 64 nodes have fewer pods than a
cluster has shapes."""

_NO_PODS: Final = Reason("node(s) had no pods whose room the reservation can take over")


@dataclass(frozen=True, slots=True)
class Settings:
    """cluster: whether Reservations may ask for candidates by `label`, ordered by the number in
    the annotation `priority`. prefer_free: room that no pod has is used first."""

    cluster: bool = False
    label: str = LABEL_IS_PRE_ALLOCATABLE
    priority: str = ANNOTATION_PRE_ALLOCATABLE_PRIORITY
    prefer_free: bool = False


@dataclass(frozen=True, slots=True)
class PreAllocating(AppliesByShape, OfRowAlone):
    """Admission, Filter, Score and Allocator for such reserve pods alone."""

    settings: Settings = Settings()
    name: str = "Reservation"

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a mode that the profile does not allow. Raises Refusal."""
        demand = pod.derived(demand_of)
        if demand is not None and demand.cluster and not self.settings.cluster:
            raise Refusal(
                self.name,
                "spec.preAllocationPolicy.mode = 'Cluster': enableClusterMode is not set in the "
                "preAllocationConfig of Reservation's arguments",
            )

    # --- filter ----------------------------------------------------------------------------------

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return pod.derived(demand_of) is not None

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return (_NO_PODS,)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        """Hold nodes back where no pods fit, of a Reservation that takes no free room."""
        demand = pod.derived(demand_of)
        mask = zeros(len(tables.nodes))
        assert demand is not None
        if demand.required:
            search = _Search(self.settings, demand, pod, tables)
            mask[:] = 1
            for row in search.rows(rows):
                mask[row] = not search.chosen(row)
        return mask[rows]

    def given(self, pod: PodShape, tables: Tables, rows: Rows) -> Given | None:
        """Return the room of the pods that would be taken over on each node."""
        found = self.taken_over(pod, tables, rows)
        if not found:
            return None
        amounts = [
            sum(tables.resources.vector(each.shape.requests) for each in chosen)
            for chosen in found.values()
        ]
        return Given(
            np.array(list(found), dtype=np.int64),
            np.array(amounts, dtype=np.int64),
            np.array([len(chosen) for chosen in found.values()], dtype=np.int64),
        )

    def taken_over(
        self, pod: PodShape, tables: Tables, rows: Rows
    ) -> Mapping[int, tuple[Booking, ...]]:
        """Return by row the pods that would be taken over, for rows with some."""
        demand = pod.derived(demand_of)
        if demand is None:
            return {}
        search = _Search(self.settings, demand, pod, tables)
        return {row: chosen for row in search.rows(rows) if (chosen := search.chosen(row))}

    # --- score -----------------------------------------------------------------------------------

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        """Return how much of the Reservation the pods that are taken over fill, 1..100 by node.

        A node where none is taken over has 0, or twice the most where free room is preferred.
        """
        demand = pod.derived(demand_of)
        assert demand is not None
        result = zeros(len(tables.nodes))
        search = _Search(self.settings, demand, pod, tables)
        if self.settings.prefer_free and not demand.required:
            result[:] = 2 * MAX_SCORE
        for row in search.rows(rows):
            if chosen := search.chosen(row):
                result[row] = max(1, _filled(search.wanted, chosen))
        scores: Scores = result[rows]
        return scores

    def normalize(self, raw: Scores) -> Scores:
        return to_largest(raw)

    # --- allocation ------------------------------------------------------------------------------

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        """Add the pods that are taken over on this node, if any."""
        demand = pod.derived(demand_of)
        assert demand is not None
        chosen = _Search(self.settings, demand, pod, tables).chosen(row)
        if demand.required and not chosen:
            return _NO_PODS
        return replace(allocation, takes=tuple(each.uid for each in chosen))

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        return Recorded({}, {})


@dataclass(slots=True)
class _Search:
    """Chooses pods for one reserve pod, on one node after the other."""

    settings: Settings
    demand: PreAllocation
    pod: PodShape
    tables: Tables
    _matched: dict[PodShape, bool] = field(default_factory=dict)

    def rows(self, rows: Rows) -> list[int]:
        """Return those of `rows`, in their order, where a pod may be of use by its shape."""
        within = np.arange(len(self.tables.nodes))[rows]
        found: list[int] = within.tolist()
        if len(found) <= _FEW_ROWS:
            return found
        matches = self.tables.matches
        some = np.zeros(len(self.tables.nodes), dtype=np.bool_)
        for shape in matches.shapes():
            if self._may_be_used(shape):
                some[list(matches.rows_of(shape))] = True
        return [row for row in found if some[row]]

    def chosen(self, row: int) -> tuple[Booking, ...]:
        """Return the pods to take over on a node; none if they do not help, or are not needed."""
        free = self._free(row)
        if self.settings.prefer_free and not self.demand.required and _covers(free, self.wanted):
            return ()
        candidates = list(self._candidates(row))
        if not candidates:
            return ()
        if self.demand.multiple:
            return self._several(candidates, free)
        for each in candidates:
            if _covers(_added(free, each.shape.requests), self.wanted):
                return (each,)
        return ()

    @property
    def wanted(self) -> Amounts:
        return self.pod.requests

    def _several(self, candidates: list[Booking], free: Amounts) -> tuple[Booking, ...]:
        left = dict(self.wanted)
        taken: list[Booking] = []
        for each in candidates:
            if not _inside(each.shape.requests, left):
                continue
            left = {name: left[name] - each.shape.requests.get(name, 0) for name in left}
            free = _added(free, each.shape.requests)
            taken.append(each)
            if _covers(free, self.wanted):
                return tuple(taken)
        return ()

    def _free(self, row: int) -> Amounts:
        nodes, names = self.tables.nodes, self.tables.resources
        columns = {name: names.find(name) for name in self.wanted}
        return {
            name: 0
            if column is None
            else int(nodes.allocatable[row, column] - nodes.requested[row, column])
            for name, column in columns.items()
        }

    def _candidates(self, row: int) -> Iterator[Booking]:
        found = [each for each in self.tables.on(row).values() if self._may_be_taken(each)]
        yield from sorted(found, key=self._order)

    def _may_be_taken(self, booking: Booking) -> bool:
        if booking.terminating or not self._may_be_used(booking.shape):
            return False
        # The binding of a Reservation may have failed after its pods were marked.
        used, tables = booking.allocation.reservation, self.tables
        return not used or (used not in tables.bookings and tables.reservations.get(used) is None)

    def _may_be_used(self, shape: PodShape) -> bool:
        """Return whether a pod may be taken over as far as its shape says."""
        known = self._matched.get(shape)
        if known is None:
            known = self._matched[shape] = (
                ANNOTATION_RESERVE_POD not in shape.annotations
                and _inside(shape.requests, self.wanted)
                and (not self.demand.cluster or shape.labels.get(self.settings.label) == "true")
                and self._matches(shape)
            )
        return known

    def _matches(self, shape: PodShape) -> bool:
        """Return whether a pod may use the Reservation.

        Labels of the node are left out, so that one answer holds for all nodes.
        """
        demand = self.demand
        facts = ReservationFacts(
            name=demand.name,
            uid="",
            owners=demand.owners,
            allocatable=self.wanted,
            taints=tuple(
                Taint(key=each.key, value=each.value, effect=each.effect) for each in demand.taints
            ),
            labels=self.pod.labels,
        )
        taints_for_all = self.tables.reservations.taints_for_all
        return match(shape, facts, {}, taints_for_all=taints_for_all) is Match.YES

    def _order(self, booking: Booking) -> tuple[int, str]:
        shape = booking.shape
        if self.demand.cluster:
            text = shape.annotations.get(self.settings.priority, "")
            digits = text.removeprefix("-")
            sound = digits.isascii() and digits.isdigit() and len(digits) <= 10
            return -int(text) if sound else 0, booking.uid
        return -_filled(self.wanted, (booking,)), booking.uid


def _filled(wanted: Amounts, pods: Iterable[Booking]) -> int:
    """Return the mean part in percent of what is wanted that pods request, 0..100."""
    used: Counter[str] = Counter()
    for each in pods:
        used.update(each.shape.requests)
    parts = [
        min(MAX_SCORE, MAX_SCORE * used.get(name, 0) // amount)
        for name, amount in wanted.items()
        if amount
    ]
    return sum(parts) // len(parts) if parts else 0


def _inside(requests: Amounts, kept: Amounts) -> bool:
    """Return whether a pod requests no more than is kept, of each resource that is kept."""
    return all(requests.get(name, 0) <= amount for name, amount in kept.items())


def _covers(free: Amounts, wanted: Amounts) -> bool:
    return all(free.get(name, 0) >= amount for name, amount in wanted.items() if amount)


def _added(free: Amounts, more: Amounts) -> Mapping[str, int]:
    return {name: amount + more.get(name, 0) for name, amount in free.items()}
