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

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.gang_plans import place_in_gang
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.preemption import NEVER, NotFound, default_victims
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victims import Candidate, Costs, MayBeVictim, by_amounts, by_trial
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

        trigger: the member that no node takes. gangs: all members of the group that are not bound,
        also those that have a node and wait. being_evicted: whether a placed pod is the victim of a
        preemption and not gone yet. salt: draws between nodes of equal cost.
        """
        pods = sorted(
            (pod for each in gangs for pod in each.pods),
            key=lambda pod: (-pod.priority, place_in_gang(pod)),
        )
        if trigger.shape.preemption_policy == NEVER:
            return NotFound(_POLICY_NEVER)
        if any(each.gather is not None for each in gangs):
            return NotFound(_GATHERED)
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

    def may_be_victim(shape: PodShape) -> bool:
        name = gang_name(shape)
        return default_victims(shape) and (name is None or name.id not in group)

    return may_be_victim


@dataclass(frozen=True, slots=True, order=True)
class _Bound:
    """A node that could be freed. cost: what nodes are compared by, and a draw between equals.

    costs, element: where the victims by amounts are found.
    """

    cost: tuple[float, ...]
    row: int
    costs: Costs = field(compare=False)
    element: int = field(compare=False)


class _Seating:
    """One search: what it has found out about nodes is kept for members of the same shape."""

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
        self._costs: dict[PodShape, list[_Bound]] = {}
        """Shape -> a heap of what freeing each node would cost by amounts."""
        self._unfit: set[PodShape] = set()

    def seat(self, pods: Sequence[Pod], trial: Trial) -> list[Seat]:
        """Return the seats found; the trial has them, without their victims, when this returns."""
        seats = []
        for pod in pods:
            if pod.shape in self._unfit:
                continue
            candidate = self._candidate(pod)
            if candidate is None:
                self._unfit.add(pod.shape)
                continue
            for victim in candidate.victims:
                trial.remove(victim.uid)
                self._budgets.spend(victim)
            checks = self._checks(pod.shape.scheduler_name)
            allocation = checks.allocation(pod.shape, candidate.row)
            if not isinstance(allocation, Allocation):
                continue
            node = self._tables.nodes.name(candidate.row)
            trial.place(Booking(pod.key, pod.uid, pod.shape, node, allocation))
            seats.append(Seat(pod, candidate))
            self._again(pod, candidate.row)
        return seats

    def _candidate(self, pod: Pod) -> Candidate | None:
        try:
            evaluation = self._evaluate(pod.shape)
        except Refusal:
            return None
        free = self._free(pod, evaluation)
        if free is not None:
            return Candidate(free, (), 0)
        heap = self._costs.get(pod.shape)
        if heap is None:
            found = diagnose(pod.shape, self._tables, evaluation.masks)
            heap = self._costs[pod.shape] = self._bounds(pod, found.resolvable)
            heapq.heapify(heap)
        tried = 0
        while heap and tried < _MOST_TRIED:
            stale = heapq.heappop(heap)
            # Members seated since then may have changed the node, or used up a budget.
            for fresh in self._bounds(pod, np.array([stale.row], dtype=np.intp)):
                if fresh.cost > stale.cost and heap and heap[0].cost < fresh.cost:
                    heapq.heappush(heap, fresh)
                    continue
                tried += 1
                candidate = self._confirmed(pod, fresh)
                if candidate is not None:
                    return candidate
        return None

    def _confirmed(self, pod: Pod, bound: _Bound) -> Candidate | None:
        """Return the victims on a node: those by amounts if the pod fits without them."""
        checks = self._checks(pod.shape.scheduler_name)
        candidate = bound.costs.candidate(bound.element, self._tables)
        with Trial(self._tables) as trial:
            for victim in candidate.victims:
                trial.remove(victim.uid)
            if checks.fits(pod, bound.row):
                return candidate
        return by_trial(checks, pod, bound.row, self._may_be_victim, self._budgets)

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

    def _bounds(self, pod: Pod, rows: NDArray[np.intp]) -> list[_Bound]:
        """Return what freeing nodes costs, of those with room without less important pods."""
        filters = self._checks(pod.shape.scheduler_name).profile.filters
        fit = next((each for each in filters if isinstance(each, NodeResourcesFit)), None)
        requested = None if fit is None else fit.looked_at(pod.shape)
        costs = by_amounts(self._tables, pod, rows, requested, self._may_be_victim, self._budgets)
        columns = (costs.violations, costs.highest, costs.total, costs.count, -costs.earliest)
        ties = self._tables.nodes.order[costs.rows] ^ np.uint64(self._salt)
        keys = zip(*(column.tolist() for column in (*columns, ties)), strict=True)
        return [
            _Bound(tuple(key), row, costs, element)
            for element, (key, row) in enumerate(zip(keys, costs.rows.tolist(), strict=True))
        ]

    def _again(self, pod: Pod, row: int) -> None:
        """Put a node that was taken back among those that could be freed for the next member."""
        heap = self._costs.get(pod.shape)
        if heap is not None:
            for bound in self._bounds(pod, np.array([row], dtype=np.intp)):
                heapq.heappush(heap, bound)
