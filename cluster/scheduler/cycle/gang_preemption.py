"""Makes room for a whole gang by evicting less important pods, or for none of it.

The members are seated one after another (`seating`), by priority, index and name; members of the
same group are not victims. If one gang of the group gets less than it needs (room for all members
if it is strict, for its minimum if not), no pod is evicted. A gang that is gathered in the network
is seated in one domain (`gathered_seats`), and always as a whole, because it is planned as a whole
once the victims are gone.

A search is one step: nothing else is decided meanwhile. Measured on 5,000 nodes: 0.4 to 0.5 ms for
each of a thousand members, 4 to 6 ms with a hard spread constraint over hosts. Parts of it would
have to take the trial back before other pods are tried, and to repeat it after: that is a quarter
of the former search, so more than 0.1 s at its end. So that searches in vain leave the time to
others, a long one is not repeated for a while (`futile_searches`).

docs/scheduler.md, "Coscheduling".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.gang_order import place_in_gang
from cluster.scheduler.cycle.gang_plans import NO_TOPOLOGY, gathered_as
from cluster.scheduler.cycle.gathered_seats import GatheredSeats
from cluster.scheduler.cycle.gathering import NotGathered
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.post_filter import NEVER, NotFound
from cluster.scheduler.cycle.seating import Pod, Search, Seat, Seating
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victims import MayBeVictim, default_victims
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.gang_definitions import gang_name
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_POLICY_NEVER: Final = "preemption: not eligible due to preemptionPolicy=Never."
_VICTIMS_END: Final = "preemption: not eligible due to terminating pods on the nominated nodes."
_GATED: Final = (
    "preemption: not for a gang that is gathered in the network, while a member has scheduling"
    " gates."
)
_NO_VICTIM: Final = "preemption: the gang fits without evictions."
_NO_MORE: Final = (
    "preemption: the gang needs no evictions for its minimum, and none makes room for more of its"
    " pods."
)


class GangPreemption:
    """The search for one set of tables."""

    def __init__(
        self,
        tables: Tables,
        checks: Callable[[str], RowChecks],
        evaluate: Callable[[PodShape], Evaluation],
        budgets: DisruptionBudgets,
        node_of: Callable[[str], str],
        network: NetworkTopology | None,
    ) -> None:
        """checks: by scheduler name, with nominated pods. evaluate: also asks the admissions, so
        that no pod is evicted for a gang whose quota is full; raises Refusal. node_of: the
        node that a pod is nominated for, by UID, or "". network: see GangPlans."""
        self._tables = tables
        self._checks = checks
        self._evaluate = evaluate
        self._budgets = budgets
        self._node_of = node_of
        self._network = network

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
        placed pod is the victim of a preemption and not gone yet. salt: decides between nodes of
        equal cost.
        """
        as_they_are = {pod.uid: pod for each in gangs for pod in each.pods}
        pods = sorted(
            map(self._tables.reservations.pod_for, as_they_are.values()),
            key=lambda pod: (-pod.priority, place_in_gang(pod)),
        )
        if trigger.shape.preemption_policy == NEVER:
            return NotFound(_POLICY_NEVER)
        for each in gangs:
            if len(each.pods) < each.least:
                return NotFound(
                    f"preemption: gang {each.gang} needs {each.least} pods, and only"
                    f" {len(each.pods)} without scheduling gates exist."
                )
        if any(self._victims_end(pod, being_evicted) for pod in pods):
            return NotFound(_VICTIMS_END, waits=True)
        gather = gathered_as(gangs) if self._network is not None else None
        if gather is not None and any(each.gated for each in gangs):
            return NotFound(_GATED)
        group = frozenset(each.gang for each in gangs)
        search = Search(
            self._tables,
            cache(lambda name: self._checks(name).apart_from(group)),
            self._evaluate,
            self._budgets,
            _victims_of(group),
            salt,
        )
        with Trial(self._tables) as trial, self._budgets.trial():
            for pod in pods:
                # Those that wait give their nodes back.
                trial.remove(pod.uid)
            if self._network is not None and gather is not None:
                tree = self._network.tree()
                try:
                    if tree is None:
                        raise NotGathered(NO_TOPOLOGY)
                    seats = GatheredSeats(search, tree, gather, pods).seat(trial)
                except NotGathered as error:
                    return NotFound(f"preemption: {error}.")
            else:
                seating = Seating(search)
                each_seat = (seating.seat(pod, trial) for pod in pods)
                seats = tuple(seat for seat in each_seat if seat is not None)
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
            # Members that are tried while the search rests get this answer too: it holds for all.
            return NotFound(_NO_VICTIM if len(seats) == len(pods) else _NO_MORE)
        return tuple(replace(seat, pod=as_they_are[seat.pod.uid]) for seat in seats)

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
