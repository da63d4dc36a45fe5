"""Which pods of a node have to go so that another pod fits, and which node costs the least.

Victims of one node, in kube-scheduler's order: all pods that may be victims are taken away; if the
pod fits then, they are put back one after another, and each that leaves room for the pod stays. Put
back first are those whose eviction goes beyond a PodDisruptionBudget, then the others, the more
important first. What remains are the victims.

The best of several nodes has the fewest evictions beyond a budget, then the lowest priority of its
most important victim, then the smallest sum of priorities, then the fewest victims, then the latest
start of the earliest of its most important victims.

Two ways lead to the same victims. `by_trial` tries one node with every plugin. `by_amounts_on`
looks at the amounts that pods request alone; `victim_columns` does so for all nodes at once.
docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from apis.keys import ANNOTATION_RESERVE_POD, LABEL_DISABLE_PREEMPTIBLE, LABEL_PREEMPTIBLE
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

MayBeVictim = Callable[[PodShape], bool]
"""Whether pods of a shape may be evicted. Priorities are compared besides."""

StillFits = Callable[[PendingPod[PodShape], int], bool]
"""(pod, row) -> whether the pod fits there as the tables are, inside a trial."""

LOWEST_PRIORITY: Final = -(2**31)
"""Of an int32. Sums of priorities count from here, so that a victim more never makes a sum less."""

NO_VICTIM: Final = LOWEST_PRIORITY - 1
"""The priority of the most important of no victims."""

NO_LIMIT: Final = 2**62
"""The room of a node for what is not looked at."""

PendingPods = Sequence[PendingPod[PodShape]]


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
            sum(priority - LOWEST_PRIORITY for priority in priorities),
            len(self.victims),
            -min(v.start for v in self.victims if v.shape.priority == highest),
        )


def default_victims(shape: PodShape) -> bool:
    """Return whether pods of a shape may be evicted for others, by their labels too."""
    labels = shape.labels
    return (
        labels.get(LABEL_DISABLE_PREEMPTIBLE) != "true"
        and labels.get(LABEL_PREEMPTIBLE) != "false"
        and victims_by_priority(shape)
    )


def victims_by_priority(shape: PodShape) -> bool:
    """Return whether pods of a shape may be evicted where labels do not protect them.

    What a Reservation keeps is not taken from it.
    """
    return ANNOTATION_RESERVE_POD not in shape.annotations


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

    with Trial(checks.tables) as trial:
        for booking in potential:
            trial.remove(booking.uid)
        if not fits():
            return None
        victims, violations = put_back(checks.tables, trial, potential, budgets, fits)
    return Candidate(row, victims, violations)


def put_back(
    tables: Tables,
    trial: Trial,
    potential: Sequence[Booking],
    budgets: DisruptionBudgets,
    fits: Callable[[], bool],
) -> tuple[tuple[Booking, ...], int]:
    """Place pods again that a trial removed, one after another, while everything still fits.

    potential: the most important first; those beyond a budget are put back before the others.
    Returns the pods that cannot be, and how many of them go beyond a budget.
    """
    beyond = budgets.violating(potential)
    victims = set()
    for booking in sorted(potential, key=lambda each: each.uid not in beyond):
        with Trial(tables) as back:
            back.place(booking)
            stays = fits()
        if stays:
            trial.place(booking)
        else:
            victims.add(booking.uid)
    staying_away = tuple(booking for booking in potential if booking.uid in victims)
    return staying_away, len(beyond & victims)


def by_amounts_on(
    tables: Tables,
    pod: PendingPod[PodShape],
    row: int,
    requested: Sequence[tuple[str, int]] | None,
    may_be_victim: MayBeVictim,
    budgets: DisruptionBudgets,
    promised: PendingPods = (),
) -> Candidate | None:
    """Return what `by_amounts` finds for one node, or None if it has no victims or no room.

    promised: pods that are nominated there and count beside the pod.

    For a node that changed: the columns take twenty times as long for one row.
    """
    nodes = tables.nodes
    # Beside the amounts, a pod takes one of the places of the node.
    room = [NO_LIMIT]
    if requested is not None:
        room = [int(nodes.allowed_pods[row] - nodes.pods[row]) - 1 - len(promised)]
    for name, amount in requested or ():
        column = nodes.resources.find(name)
        if column is None:
            return None
        taken_by_others = sum(each.shape.requests.get(name, 0) for each in promised)
        left = int(nodes.allocatable[row, column] - nodes.requested[row, column])
        room.append(left - amount - taken_by_others)
    potential = sorted(
        (each for each in tables.on(row).values() if may_go(pod, each, may_be_victim)),
        key=importance,
    )
    if not potential:
        return None
    taken = {
        each.uid: [1, *(each.shape.requests.get(name, 0) for name, _ in requested or ())]
        for each in potential
    }
    for amounts in taken.values():
        room = [has + amount for has, amount in zip(room, amounts, strict=True)]
    if min(room) < 0:
        return None
    beyond = budgets.violating(potential) if len(budgets) else frozenset()
    victims = set(taken)
    for each in sorted(potential, key=lambda each: each.uid not in beyond):
        rest = [has - amount for has, amount in zip(room, taken[each.uid], strict=True)]
        if min(rest) >= 0:
            room = rest
            victims.remove(each.uid)
    return Candidate(
        row,
        tuple(each for each in potential if each.uid in victims),
        len(beyond & victims),
    )
