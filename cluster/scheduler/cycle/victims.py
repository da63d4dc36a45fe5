"""Which pods of a node have to go so that another pod fits, and which node costs the least.

Victims of one node, in kube-scheduler's order: all pods that may be victims are taken away; if the
pod fits then, they are put back one after another, and each that leaves room for the pod stays. Put
back first are those whose eviction goes beyond a PodDisruptionBudget, then the others, the more
important first. What remains are the victims.

The best of several nodes has the fewest evictions beyond a budget, then the lowest priority of its
most important victim, then the smallest sum of priorities, then the fewest victims, then the latest
start of the earliest of its most important victims.

Two ways lead to the same victims. `by_trial` tries one node with every plugin. `by_amounts` works
out all nodes at once, where pods are in the way only by the amounts that they request.
docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import NOBODY, importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

MayBeVictim = Callable[[PodShape], bool]
"""Whether pods of a shape may be evicted. Priorities are compared besides."""

StillFits = Callable[[PendingPod[PodShape], int], bool]
"""(pod, row) -> whether the pod fits there as the tables are, inside a trial."""

_LOWEST_PRIORITY: Final = -(2**31)
"""Of an int32. Sums of priorities count from here, so that a victim more never makes a sum less."""

NO_VICTIM: Final = _LOWEST_PRIORITY - 1
"""The priority of the most important of no victims."""

_NO_LIMIT: Final = 2**62


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node on which a pod would fit. victims: the most important first. violations: how many of
    them go beyond a budget."""

    row: int
    victims: tuple[Booking, ...]
    violations: int

    @property
    def cost(self) -> tuple[int, int, int, int, float]:
        """What nodes are compared by, the least first."""
        if not self.victims:
            return 0, NO_VICTIM, 0, 0, 0.0
        priorities = [victim.shape.priority for victim in self.victims]
        highest = max(priorities)
        return (
            self.violations,
            highest,
            sum(priority - _LOWEST_PRIORITY for priority in priorities),
            len(self.victims),
            -min(v.start for v in self.victims if v.shape.priority == highest),
        )


def may_go(pod: PendingPod[PodShape], booking: Booking, may_be_victim: MayBeVictim) -> bool:
    """Return whether a placed pod may be evicted for `pod`."""
    return booking.shape.priority < pod.priority and may_be_victim(booking.shape)


def by_trial(
    checks: RowChecks,
    pod: PendingPod[PodShape],
    row: int,
    may_be_victim: MayBeVictim,
    budgets: DisruptionBudgets,
    *,
    still_fits: StillFits | None = None,
) -> Candidate | None:
    """Return the victims on one node, or None if the pod does not fit even without them.

    still_fits: what has to hold beside the plugins' filters and the exact allocation, such as a
    quota; it is asked inside the trial, after each step.
    """
    potential = sorted(
        (each for each in checks.tables.on(row).values() if may_go(pod, each, may_be_victim)),
        key=importance,
    )
    if not potential:
        return None

    def fits() -> bool:
        return checks.fits(pod, row) and (still_fits is None or still_fits(pod, row))

    beyond = budgets.violating(potential)
    victims = set()
    with Trial(checks.tables) as trial:
        for booking in potential:
            trial.remove(booking.uid)
        if not fits():
            return None
        for booking in sorted(potential, key=lambda each: each.uid not in beyond):
            with Trial(checks.tables) as back:
                back.place(booking)
                stays = fits()
            if stays:
                trial.place(booking)
            else:
                victims.add(booking.uid)
    return Candidate(
        row,
        tuple(booking for booking in potential if booking.uid in victims),
        len(beyond & victims),
    )


# --- all nodes at once ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """Nodes with victims, as columns: one element for each of `rows`.

    victims: [element, position in the order of importance], as of `Occupants`.
    """

    rows: NDArray[np.intp]
    victims: NDArray[np.bool_]
    violations: NDArray[np.int64]
    highest: NDArray[np.int64]
    total: NDArray[np.int64]
    count: NDArray[np.int64]
    earliest: NDArray[np.float64]

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
    promised: Callable[[int], Sequence[PendingPod[PodShape]]] = lambda row: (),
) -> Costs:
    """Return the victims on those of `rows` where the pod fits without them.

    A node has room when its pods leave `requested` (resource, amount) and one pod's place free; no
    other plugin is asked. None for a profile that looks at no amounts: every node has room.
    promised: row -> pods that are nominated there and count beside the pod.
    """
    occupants = tables.occupants
    occupants.follow()
    numbers = occupants.numbers[rows]
    may_go_by_number = _may_go_by_number(tables, pod, numbers, may_be_victim)
    evictable = may_go_by_number[numbers]
    some = evictable.any(axis=1)
    rows, numbers, evictable = rows[some], numbers[some], evictable[some]
    # Positions are looked at up to the last one that may be a victim.
    width = int(np.flatnonzero(evictable.any(axis=0))[-1]) + 1 if len(rows) else 0
    numbers, evictable = numbers[:, :width], evictable[:, :width]

    counts_pods = requested is not None
    requested = requested or ()
    columns = [tables.nodes.resources.find(name) for name, _ in requested]
    if any(column is None for column in columns):
        rows, numbers, evictable = rows[:0], numbers[:0], evictable[:0]
    used = [column for column in columns if column is not None]
    # One more column counts the pods themselves.
    each = np.ones((len(occupants.requests), len(used) + 1), dtype=np.int64)
    each[:, :-1] = occupants.requests[:, used]
    each[NOBODY] = 0
    own = np.array([*(amount for _, amount in requested), 1], dtype=np.int64)
    nodes = tables.nodes
    room = np.empty((len(rows), len(own)), dtype=np.int64)
    room[:, :-1] = nodes.allocatable[rows][:, used] - nodes.requested[rows][:, used]
    room[:, -1] = nodes.allowed_pods[rows] - nodes.pods[rows] if counts_pods else _NO_LIMIT
    room -= own
    for element, row in enumerate(rows):
        for other in promised(int(row)):
            amounts = [other.shape.requests.get(name, 0) for name, _ in requested]
            room[element] -= np.array([*amounts, 1], dtype=np.int64)
    for at in range(width):
        room += np.where(evictable[:, at, None], each[numbers[:, at]], 0)
    fits = (room >= 0).all(axis=1)
    rows, numbers, evictable, room = rows[fits], numbers[fits], evictable[fits], room[fits]

    beyond = _beyond_budgets(tables, rows, numbers, evictable, budgets)
    victims = evictable.copy()
    turns = (beyond, evictable & ~beyond) if beyond.any() else (evictable,)
    for turn in turns:
        for at in range(width):
            back = each[numbers[:, at]]
            stays = turn[:, at] & (back <= room).all(axis=1)
            room -= np.where(stays[:, None], back, 0)
            victims[:, at] &= ~stays
    priorities = np.where(victims, occupants.priorities[numbers], NO_VICTIM)
    highest = priorities.max(axis=1, initial=NO_VICTIM)
    important = victims & (priorities == highest[:, None])
    starts = np.where(important, occupants.starts[rows][:, :width], np.inf)
    return Costs(
        rows=rows,
        victims=victims,
        violations=np.count_nonzero(victims & beyond, axis=1),
        highest=highest,
        total=np.where(victims, priorities - _LOWEST_PRIORITY, 0).sum(axis=1),
        count=np.count_nonzero(victims, axis=1),
        earliest=starts.min(axis=1, initial=np.inf),
    )


def _may_go_by_number(
    tables: Tables,
    pod: PendingPod[PodShape],
    numbers: NDArray[np.int32],
    may_be_victim: MayBeVictim,
) -> NDArray[np.bool_]:
    """Return for each number of a shape whether its pods may be victims."""
    occupants = tables.occupants
    present = np.zeros(len(occupants.priorities), dtype=np.bool_)
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
    """Return which evictions go beyond a budget, counting on each node from the most important."""
    beyond = np.zeros(evictable.shape, dtype=np.bool_)
    if not len(budgets) or not len(rows):
        return beyond
    occupants = tables.occupants
    selected: dict[int, tuple[int, ...]] = {}
    """Number of a shape -> numbers of the budgets that select it."""
    known: dict[str, int] = {}
    allowed: list[int] = []
    with_names: set[int] = set()
    for number in np.unique(numbers[evictable]):
        shape = occupants.shapes[number]
        found = budgets.of(shape) if shape is not None else ()
        if not found:
            continue
        for budget in found:
            if budget.key not in known:
                known[budget.key] = len(allowed)
                allowed.append(budgets.allowed(budget))
            if budget.disrupted:
                with_names.add(int(number))
        selected[int(number)] = tuple(known[budget.key] for budget in found)
    if not selected:
        return beyond
    # Budgets with names of disrupted pods are rare; those nodes are counted pod by pod.
    counted = np.isin(numbers, list(with_names)) & evictable
    slow: NDArray[np.bool_] = np.any(counted, axis=1)
    for element in np.flatnonzero(slow):
        of_row = occupants.bookings[int(rows[element])]
        places = np.flatnonzero(evictable[element])
        uids = budgets.violating(of_row[int(at)] for at in places)
        beyond[element, [at for at in places if of_row[int(at)].uid in uids]] = True
    most = max(len(found) for found in selected.values())
    table = np.full((len(occupants.priorities), most), -1, dtype=np.int64)
    for number, found_numbers in selected.items():
        table[number, : len(found_numbers)] = found_numbers
    limits = np.array(allowed, dtype=np.int64)
    elements, places = np.nonzero(evictable & ~slow[:, None])
    # One entry for each pod and budget, in the order of importance on each node.
    budget_of = table[numbers[elements, places]]
    entries, which = np.nonzero(budget_of >= 0)
    groups = elements[entries] * len(allowed) + budget_of[entries, which]
    order = np.argsort(groups, kind="stable")
    in_order = groups[order]
    begins = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]]) if len(order) else order
    lengths = np.diff(np.r_[begins, len(order)])
    rank = np.arange(len(order)) - np.repeat(begins, lengths)
    over = entries[order][rank >= limits[in_order % len(allowed)]]
    beyond[elements[over], places[over]] = True
    return beyond
