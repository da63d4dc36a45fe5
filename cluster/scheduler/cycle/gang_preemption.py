"""Makes room for a whole gang by evicting less important pods, or for none of it.

The members are seated one after another, by priority, index and name: on a node that takes the
member as things are, else on the one where that costs the least. Seated members count for the next
ones, and evicted pods are gone for them, so the gang fits if the search says so. Victims of a node,
and what nodes are compared by, are those of DefaultPreemption, but members of the same group are no
victims; evictions for one member use up the budgets for the next. If one gang of the group gets
less than it needs (room for all members if it is strict, for its minimum if not), no pod is
evicted.

docs/scheduler.md, "Coscheduling".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.freeing import FreeingCosts
from cluster.scheduler.cycle.gang_plans import place_in_gang
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.preemption import NEVER, NotFound, default_victims
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victims import (
    Candidate,
    MayBeVictim,
    by_amounts,
    by_amounts_on,
    by_trial,
    openable,
)
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.gang_definitions import gang_name
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Pod = PendingPod[PodShape]

_Reach = tuple[tuple[str, int], ...]
"""Filters and their `cluster_version`: equal as long as only rows that changed have new masks."""

_MOST_TRIED: Final = 16
"""Nodes that are tried for one member, first without victims, then with them. Chosen: amounts are
mostly right, so the first node is; 100 members that meet 16 wrong ones each take two seconds."""

_POLICY_NEVER: Final = "preemption: not eligible due to preemptionPolicy=Never."
_VICTIMS_END: Final = "preemption: not eligible due to terminating pods on the nominated nodes."
_GATHERED: Final = "preemption: not for gangs that are gathered in the network."
_NO_VICTIM: Final = "preemption: the gang fits without evictions."
_NOT_THIS_ONE: Final = "preemption: no eviction makes room for this member of the gang."


@dataclass(frozen=True, slots=True)
class Seat:
    """A member and the node that it gets once the victims there are gone."""

    pod: Pod
    candidate: Candidate


class GangPreemption:
    """The search for one set of tables."""

    def __init__(
        self,
        tables: Tables,
        checks: Callable[[str], RowChecks],
        evaluate: Callable[[PodShape], Evaluation],
        budgets: DisruptionBudgets,
        node_of: Callable[[str], str],
    ) -> None:
        """checks: by scheduler name, with nominated pods. evaluate: also asks the admissions, so
        that no pod is evicted for a gang whose quota is full; raises Refusal. node_of: the
        node that a pod is nominated for, by UID, or ""."""
        self._tables = tables
        self._checks = checks
        self._evaluate = evaluate
        self._budgets = budgets
        self._node_of = node_of

    def find(
        self,
        trigger: Pod,
        gangs: Sequence[Wanted[PodShape]],
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> tuple[Seat, ...] | NotFound:
        """Return a seat for each member that gets one, or why nothing helps.

        trigger: the member that no node takes. gangs: all members of the group that are not bound
        and have no scheduling gates, also those that have a node and wait. being_evicted: whether a
        placed pod is the victim of a preemption and not gone yet. salt: draws between nodes of
        equal cost.
        """
        pods = sorted(
            (pod for each in gangs for pod in each.pods),
            key=lambda pod: (-pod.priority, place_in_gang(pod)),
        )
        if trigger.shape.preemption_policy == NEVER:
            return NotFound(_POLICY_NEVER)
        if any(each.gather is not None for each in gangs):
            return NotFound(_GATHERED)
        for each in gangs:
            if len(each.pods) < each.least:
                return NotFound(
                    f"preemption: gang {each.gang} needs {each.least} pods, and only"
                    f" {len(each.pods)} without scheduling gates exist."
                )
        if any(self._victims_end(pod, being_evicted) for pod in pods):
            return NotFound(_VICTIMS_END, waits=True)
        with Trial(self._tables) as trial, self._budgets.trial():
            for pod in pods:
                # Those that wait give their nodes back.
                trial.remove(pod.uid)
            seats = _Seating(
                self._tables,
                self._checks,
                self._evaluate,
                self._budgets,
                _victims_of(frozenset(each.gang for each in gangs)),
                salt,
            ).seat(pods, trial)
        seated = {seat.pod.uid for seat in seats}
        for each in gangs:
            got = sum(pod.uid in seated for pod in each.pods)
            # One more member that finds no node would have a strict gang give all nodes back.
            need = len(each.pods) if each.strict else each.least
            if got < need:
                return NotFound(
                    f"preemption: gang {each.gang} needs room for {need} pods, and without"
                    f" less important pods there is room for {got}."
                )
        if not any(seat.candidate.victims for seat in seats):
            return NotFound(_NO_VICTIM if trigger.uid in seated else _NOT_THIS_ONE)
        return tuple(seats)

    def _victims_end(self, pod: Pod, being_evicted: Callable[[Booking], bool]) -> bool:
        """Return whether pods on a member's nominated node are being evicted for it."""
        row = self._tables.nodes.row(self._node_of(pod.uid))
        return row is not None and any(
            booking.shape.priority < pod.priority and being_evicted(booking)
            for booking in self._tables.on(row).values()
        )


def _victims_of(group: frozenset[str]) -> MayBeVictim:
    """Return which pods may be evicted for the gangs of a group: none of its own."""

    @cache
    def may_be_victim(shape: PodShape) -> bool:
        name = gang_name(shape)
        return default_victims(shape) and (name is None or name.id not in group)

    return may_be_victim


class _Seating:
    """One search: what it has found out about nodes is kept for members that are alike."""

    def __init__(
        self,
        tables: Tables,
        checks: Callable[[str], RowChecks],
        evaluate: Callable[[PodShape], Evaluation],
        budgets: DisruptionBudgets,
        may_be_victim: MayBeVictim,
        salt: int,
    ) -> None:
        self._tables = tables
        self._checks = checks
        self._evaluate = evaluate
        self._budgets = budgets
        self._may_be_victim = may_be_victim
        self._salt = salt
        self._costs: dict[Hashable, FreeingCosts] = {}
        """By priority and requested amounts."""
        self._open: dict[PodShape, tuple[_Reach, NDArray[np.bool_]]] = {}
        """Shape -> the rows where evictions may help it, as of what reaches across nodes."""
        self._unfit: set[PodShape] = set()

    def seat(self, pods: Sequence[Pod], trial: Trial) -> list[Seat]:
        """Return the seats found; the trial has them, without their victims, when this returns."""
        seats = []
        for pod in pods:
            if pod.shape in self._unfit:
                continue
            before = trial.mark()
            candidate = self._made_room(pod, trial)
            booking = None if candidate is None else self._booking(pod, candidate.row)
            if candidate is None or booking is None:
                trial.back_to(before)
                self._unfit.add(pod.shape)
                continue
            trial.place(booking)
            seats.append(Seat(pod, candidate))
            self._spend(candidate.victims)
            for costs in self._costs.values():
                costs.changed(candidate.row)
            if pod.shape in self._open:
                self._open[pod.shape][1][candidate.row] = True
        return seats

    def _booking(self, pod: Pod, row: int) -> Booking | None:
        allocation = self._checks(pod.shape.scheduler_name).allocation(pod.shape, row)
        if not isinstance(allocation, Allocation):
            return None
        return Booking(pod.key, pod.uid, pod.shape, self._tables.nodes.name(row), allocation)

    def _made_room(self, pod: Pod, trial: Trial) -> Candidate | None:
        """Return the node for a member; its victims are gone from the trial. None: no node."""
        try:
            evaluation = self._evaluate(pod.shape)
        except Refusal:
            return None
        free = self._free(pod, evaluation)
        if free is not None:
            return Candidate(free, (), 0)
        where = self._open_for(pod, evaluation)
        costs = self._costs_for(pod)
        for _ in range(_MOST_TRIED):
            freed = costs.cheapest(where)
            if freed is None:
                return None
            candidate = self._evicted(pod, freed.candidate, trial)
            if candidate is not None:
                return candidate
            where[freed.candidate.row] = False
        return None

    def _open_for(self, pod: Pod, evaluation: Evaluation) -> NDArray[np.bool_]:
        """Return by row whether evictions there may help a member; kept for its shape.

        A member that got a node, and the victims there, change what spread and affinity between
        pods refuse on other nodes; then it is worked out again.
        """
        reach = tuple(
            (plugin.name, plugin.cluster_version(pod.shape, self._tables))
            for plugin, _ in evaluation.masks
        )
        kept = self._open.get(pod.shape)
        if kept is not None and kept[0] == reach:
            return kept[1]
        where = np.zeros(len(self._tables.nodes), dtype=np.bool_)
        resolvable = diagnose(pod.shape, self._tables, evaluation.masks).resolvable
        where[openable(self._tables, pod, resolvable, evaluation, self._may_be_victim)] = True
        self._open[pod.shape] = reach, where
        return where

    def _evicted(self, pod: Pod, by_amounts: Candidate, trial: Trial) -> Candidate | None:
        """Take the victims of a node out of the trial: those by amounts if the pod fits then.

        Returns None, with the trial as it was, if no victims there make room for the pod.
        """
        checks = self._checks(pod.shape.scheduler_name)
        candidate: Candidate | None = by_amounts
        before = trial.mark()
        for victim in by_amounts.victims:
            trial.remove(victim.uid)
        if not checks.fits(pod, by_amounts.row):
            trial.back_to(before)
            candidate = by_trial(checks, pod, by_amounts.row, self._may_be_victim, self._budgets)
            for victim in () if candidate is None else candidate.victims:
                trial.remove(victim.uid)
        return candidate

    def _spend(self, victims: Sequence[Booking]) -> None:
        if victims and len(self._budgets):
            for victim in victims:
                self._budgets.spend(victim)
            for costs in self._costs.values():
                costs.budgets_changed()

    def _free(self, pod: Pod, evaluation: Evaluation) -> int | None:
        """Return the best node that takes a member as things are, or None."""
        checks = self._checks(pod.shape.scheduler_name)
        refusing: list[int] = []
        while len(refusing) < _MOST_TRIED:
            row = evaluation.best(self._salt, without=refusing)
            if row is None or checks.fits(pod, row):
                return row
            refusing.append(row)
        return None

    def _costs_for(self, pod: Pod) -> FreeingCosts:
        """Return what freeing nodes costs for pods that request what this one does."""
        filters = self._checks(pod.shape.scheduler_name).profile.filters
        fit = next((each for each in filters if isinstance(each, NodeResourcesFit)), None)
        requested = None if fit is None else fit.looked_at(pod.shape)
        key = (pod.priority, None if requested is None else tuple(requested))
        costs = self._costs.get(key)
        if costs is None:
            tables, nodes = self._tables, self._tables.nodes
            asked = (requested, self._may_be_victim, self._budgets)
            every = np.flatnonzero(nodes.alive[: len(nodes)])
            costs = self._costs[key] = FreeingCosts(
                tables,
                lambda: by_amounts(tables, pod, every, *asked),
                lambda row: by_amounts_on(tables, pod, row, *asked),
                nodes.order[: len(nodes)] ^ np.uint64(self._salt),
            )
        return costs
