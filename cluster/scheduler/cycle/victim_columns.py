"""The victims on all nodes at once, and what each node costs, as columns.

Pods are in the way here only by the amounts that they request. Filters that hold a node back in
another way are asked beside that (`freeable`), or where a node is tried (`victims.by_trial`).
docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.victims import (
    LOWEST_PRIORITY,
    NO_LIMIT,
    NO_VICTIM,
    Candidate,
    MayBeVictim,
    PendingPods,
)
from cluster.scheduler.plugins.contract import Opening
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import NOBODY
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Promised = Mapping[int, PendingPods]
"""Row -> pods that are nominated there and count beside the pod in question."""

_NOTHING_PROMISED: Promised = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Costs:
    """Nodes with victims, as columns: one element for each of `rows`.

    victims: [element, position in the order of importance], as of `Occupants`. Of the other rows:
    without: how many have no pod that may be a victim. short: by kube-scheduler's text of a reason,
    how many are short of something even without all these pods.
    """

    rows: NDArray[np.intp]
    victims: NDArray[np.bool_]
    violations: NDArray[np.int64]
    highest: NDArray[np.int64]
    total: NDArray[np.int64]
    count: NDArray[np.int64]
    earliest: NDArray[np.float64]
    without: int
    short: Mapping[str, int]

    def order(self, ties: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the elements, the least cost first. ties: a number for each, for equal costs."""
        return np.lexsort(
            (ties, -self.earliest, self.count, self.total, self.highest, self.violations)
        )

    def candidate(self, element: int, tables: Tables) -> Candidate:
        """Return one element as it is used everywhere else."""
        row = int(self.rows[element])
        bookings = tables.occupants.bookings[row]
        victims = tuple(bookings[int(at)] for at in np.flatnonzero(self.victims[element]))
        return Candidate(row, victims, int(self.violations[element]))


def by_amounts(
    tables: Tables,
    pod: PendingPod[PodShape],
    rows: NDArray[np.intp],
    requested: Sequence[tuple[str, int]] | None,
    may_be_victim: MayBeVictim,
    budgets: DisruptionBudgets,
    promised: Promised = _NOTHING_PROMISED,
) -> Costs:
    """Return the victims on those of `rows` where the pod fits without them.

    A node has room when its pods leave `requested` (resource, amount) and one pod's place free; no
    other plugin is asked. None for a profile that looks at no amounts: every node has room.
    """
    occupants = tables.occupants
    occupants.follow()
    asked = len(rows)
    # Below, the first axis is the position on the node, so that one step is one pass.
    rows, numbers, evictable = _evictable(tables, pod, rows, may_be_victim)
    taken = _taken(tables, numbers, requested or ())
    room = _room(tables, rows, requested, promised)
    room += (taken * evictable).sum(axis=1)
    fits = (room >= 0).all(axis=0)
    without = asked - len(rows)
    texts = (*(f"Insufficient {name}" for name, _ in requested or ()), "Too many pods")
    lacking = np.count_nonzero(room < 0, axis=1).tolist()
    short = {text: count for text, count in zip(texts, lacking, strict=True) if count}
    rows, numbers, evictable = rows[fits], numbers[:, fits], evictable[:, fits]
    taken, room = taken[:, :, fits], room[:, fits]

    beyond = _beyond_budgets(tables, rows, numbers, evictable, budgets)
    victims = evictable.copy()
    turns = (beyond, evictable & ~beyond) if beyond.any() else (evictable,)
    for turn in turns:
        for at in np.flatnonzero(turn.any(axis=1)):
            stays = turn[at].copy()
            for back, left in zip(taken[:, at], room, strict=True):
                stays &= back <= left
            room -= taken[:, at] * stays
            victims[at] &= ~stays
    priorities = np.where(victims, occupants.priorities[numbers], NO_VICTIM)
    highest = priorities.max(axis=0, initial=NO_VICTIM)
    important = victims & (priorities == highest)
    starts = np.where(important, occupants.starts[rows, : len(numbers)].T, np.inf)
    return Costs(
        rows=rows,
        victims=victims.T,
        violations=np.count_nonzero(victims & beyond, axis=0),
        highest=highest,
        total=np.where(victims, priorities - LOWEST_PRIORITY, 0).sum(axis=0),
        count=np.count_nonzero(victims, axis=0),
        earliest=starts.min(axis=0, initial=np.inf),
        without=without,
        short=short,
    )


def headroom_without_victims(
    tables: Tables,
    pod: PendingPod[PodShape],
    rows: NDArray[np.intp],
    requested: Sequence[tuple[str, int]] | None,
    may_be_victim: MayBeVictim,
    promised: Promised = _NOTHING_PROMISED,
) -> NDArray[np.int64]:
    """Return by row of the table how many such pods fit on those of `rows` without all victims.

    By amounts alone, as in `by_amounts`. 0 on other rows, and where no pod may be a victim.
    """
    headroom = np.zeros(len(tables.nodes), dtype=np.int64)
    tables.occupants.follow()
    rows, numbers, evictable = _evictable(tables, pod, rows, may_be_victim)
    room = _room(tables, rows, requested, promised)
    room += (_taken(tables, numbers, requested or ()) * evictable).sum(axis=1)
    # `room` is what is left beside one pod.
    each = np.array([*(amount for _, amount in requested or ()), 1], dtype=np.int64)
    headroom[rows] = np.maximum((room // each[:, np.newaxis]).min(axis=0) + 1, 0)
    return headroom


class MayLeave:
    """The pods of some rows that may be victims of a pod, for filters. A `Leaving`."""

    def __init__(
        self,
        tables: Tables,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        may_be_victim: MayBeVictim,
    ) -> None:
        tables.occupants.follow()
        self._occupants = tables.occupants
        self._numbers = tables.occupants.numbers[rows]
        may_go = _may_go_by_number(tables, pod, self._numbers, may_be_victim)
        self._shapes = np.flatnonzero(may_go)
        self._which = may_go[self._numbers]

    @property
    def any(self) -> NDArray[np.bool_]:
        """Which of the rows have such pods."""
        return np.asarray(self._which.any(axis=1), dtype=np.bool_)

    def weigh(self, weigh: Callable[[PodShape], int]) -> NDArray[np.int64]:
        weights = np.zeros(len(self._occupants.priorities), dtype=np.int64)
        for number in self._shapes.tolist():
            shape = self._occupants.shapes[number]
            weights[number] = 0 if shape is None else weigh(shape)
        if not weights.any():
            return np.zeros(len(self._numbers), dtype=np.int64)
        result: NDArray[np.int64] = np.where(self._which, weights[self._numbers], 0).sum(axis=1)
        return result


def freeable(
    tables: Tables,
    pod: PendingPod[PodShape],
    rows: NDArray[np.intp],
    evaluation: Evaluation,
    may_be_victim: MayBeVictim,
) -> NDArray[np.intp]:
    """Return those of `rows` that evictions may free for the pod.

    Rows are left out where a filter refuses the pod whichever of the possible victims leave.
    """
    for plugin, mask in evaluation.masks:
        held = mask[rows] != 0
        if held.any() and isinstance(plugin, Opening):
            leaving = MayLeave(tables, pod, rows[held], may_be_victim)
            keep = ~held
            keep[held] = plugin.may_open(pod.shape, tables, rows[held], leaving)
            rows = rows[keep]
    return rows


def _evictable(
    tables: Tables,
    pod: PendingPod[PodShape],
    rows: NDArray[np.intp],
    may_be_victim: MayBeVictim,
) -> tuple[NDArray[np.intp], NDArray[np.int32], NDArray[np.bool_]]:
    """Return the rows with pods that may be victims, and by [position, element] the numbers of
    their shapes and which may be."""
    numbers = tables.occupants.numbers[rows]
    evictable = _may_go_by_number(tables, pod, numbers, may_be_victim)[numbers]
    some = evictable.any(axis=1)
    rows, numbers, evictable = rows[some], numbers[some], evictable[some]
    # Positions are looked at up to the last one that may be a victim.
    width = int(np.flatnonzero(evictable.any(axis=0))[-1]) + 1 if len(rows) else 0
    return (
        rows,
        np.ascontiguousarray(numbers[:, :width].T),
        np.ascontiguousarray(evictable[:, :width].T),
    )


def _taken(
    tables: Tables, numbers: NDArray[np.int32], requested: Sequence[tuple[str, int]]
) -> NDArray[np.int64]:
    """Return by [resource, position, element] what each pod takes; the last resource is a place."""
    occupants = tables.occupants
    each = np.ones((len(requested) + 1, len(occupants.requests)), dtype=np.int64)
    for number, (name, _) in enumerate(requested):
        column = tables.nodes.resources.find(name)
        each[number] = 0 if column is None else occupants.requests[:, column]
    each[:, NOBODY] = 0
    return each[:, numbers]


def _room(
    tables: Tables,
    rows: NDArray[np.intp],
    requested: Sequence[tuple[str, int]] | None,
    promised: Promised,
) -> NDArray[np.int64]:
    """Return by [resource, element] what is free beside the pod and those that are promised."""
    nodes = tables.nodes
    room = np.full((len(requested or ()) + 1, len(rows)), NO_LIMIT, dtype=np.int64)
    for number, (name, amount) in enumerate(requested or ()):
        column = nodes.resources.find(name)
        # Without a column no node has any of it.
        free = (
            0 if column is None else nodes.allocatable[rows, column] - nodes.requested[rows, column]
        )
        room[number] = free - amount
    if requested is not None:
        room[-1] = nodes.allowed_pods[rows] - nodes.pods[rows] - 1
    elements = {row: at for at, row in enumerate(rows.tolist())} if promised else {}
    for row in promised.keys() & elements.keys():
        for other in promised[row]:
            amounts = [other.shape.requests.get(name, 0) for name, _ in requested or ()]
            room[:, elements[row]] -= np.array([*amounts, 1])
    return room


def _may_go_by_number(
    tables: Tables,
    pod: PendingPod[PodShape],
    numbers: NDArray[np.int32],
    may_be_victim: MayBeVictim,
) -> NDArray[np.bool_]:
    """Return for each number of a shape whether its pods may be victims."""
    occupants = tables.occupants
    present = np.zeros(len(occupants.priorities), dtype=np.bool_)
    if occupants.priorities.min() >= pod.priority:
        return present
    present[numbers] = True
    present &= occupants.priorities < pod.priority
    present[NOBODY] = False
    for number in np.flatnonzero(present):
        shape = occupants.shapes[number]
        present[number] = shape is not None and may_be_victim(shape)
    return present


def _beyond_budgets(
    tables: Tables,
    rows: NDArray[np.intp],
    numbers: NDArray[np.int32],
    evictable: NDArray[np.bool_],
    budgets: DisruptionBudgets,
) -> NDArray[np.bool_]:
    """Return which evictions go beyond a budget, counting on each node from the most important.

    All by [position, element].
    """
    beyond = np.zeros(evictable.shape, dtype=np.bool_)
    if not len(budgets) or not len(rows):
        return beyond
    occupants = tables.occupants
    present = np.zeros(len(occupants.priorities), dtype=np.bool_)
    present[numbers[evictable]] = True
    known: dict[str, int] = {}
    limits: list[int] = []
    # Number of a shape -> numbers of the budgets that select it.
    selected: dict[int, list[int]] = {}
    with_names = np.zeros(len(present), dtype=np.bool_)
    for number in np.flatnonzero(present).tolist():
        shape = occupants.shapes[number]
        for budget in () if shape is None else budgets.of(shape):
            place = known.setdefault(budget.key, len(limits))
            if place == len(limits):
                limits.append(budgets.allowed(budget))
            if budget.disrupted:
                with_names[number] = True
            selected.setdefault(number, []).append(place)
    if not selected:
        return beyond
    # Budgets with names of disrupted pods are rare; those nodes are counted pod by pod.
    slow: NDArray[np.bool_] = np.any(with_names[numbers] & evictable, axis=0)
    for element in np.flatnonzero(slow).tolist():
        of_row = occupants.bookings[int(rows[element])]
        may_go_at = np.flatnonzero(evictable[:, element]).tolist()
        uids = budgets.violating(of_row[at] for at in may_go_at)
        beyond[[at for at in may_go_at if of_row[at].uid in uids], element] = True
    most = max(map(len, selected.values()))
    table = np.full((most, len(present)), -1, dtype=np.int64)
    for number, found in selected.items():
        table[: len(found), number] = found
    elements, places = np.nonzero((evictable & ~slow).T)
    # One entry for each pod and budget, in the order of importance on each node.
    budget_of = table[:, numbers[places, elements]].T
    entries, which = np.nonzero(budget_of >= 0)
    found_budgets = budget_of[entries, which]
    over = entries[_beyond_limits(elements[entries], found_budgets, np.array(limits))]
    beyond[places[over], elements[over]] = True
    return beyond


def _beyond_limits(
    elements: NDArray[np.intp], budgets: NDArray[np.int64], limits: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which entries come after as many of the same element and budget as the limit says."""
    groups = elements * len(limits) + budgets
    order = np.argsort(groups, kind="stable")
    in_order = groups[order]
    begins = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]][: len(order)])
    rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.r_[begins, len(order)]))
    result = np.zeros(len(order), dtype=np.bool_)
    result[order] = rank >= limits[budgets[order]]
    return result
