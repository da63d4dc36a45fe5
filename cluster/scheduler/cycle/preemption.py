"""DefaultPreemption: makes room for a pod by evicting less important ones.

What other kinds of preemption build on:

- `cycle.trial`: `Trial` looks at the tables as if some pods were gone and others placed, and undoes
  it; `RowChecks.fits(pod, row)` says inside or outside a trial whether one node takes a pod.
- `cycle.victims`: `by_trial` returns the victims of one node; `by_amounts` of `victim_columns`, of
  all nodes at once. Which pods may be victims is a predicate over shapes (`MayBeVictim`), and what
  has to hold beside the plugins is another one (`StillFits`). `Candidate.cost` compares nodes.
- `cycle.node_search`: the victims of all nodes, by amounts or one by one.
- `tables.disruption_budgets`: the state of PodDisruptionBudgets.
- `Preemption.find` below is DefaultPreemption's search; `victims_for` says whom it may evict.
- `post_filter.PostFilter` is what runs for a pod that no node takes. Those of a profile stand in
  `Scheduling.post_filters`, in their order; the first that finds victims ends the search.
  `preemptions` decides what is done with what it found, and `evictions` does it.

A pod may preempt unless its policy is Never, or a less important pod on the node that it is
nominated for is being evicted already. Nodes come into question where evicting pods can help
(`Diagnosis.resolvable`).

No I/O and no clock. docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import ANNOTATION_RESERVE_POD
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.cycle.node_search import MOST_REFUSED, Arguments, NodeSearch, Tried
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.post_filter import NEVER, NotFound
from cluster.scheduler.cycle.proposals import ROOM_BY_NOW, Proposal, Proposals
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.unfreed import no_node, not_helpful
from cluster.scheduler.cycle.victims import (
    Candidate,
    MayBeVictim,
    by_trial,
    default_victims,
    may_go,
    victims_by_priority,
)
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_POLICY_NEVER: Final = "preemption: not eligible due to preemptionPolicy=Never."
_VICTIMS_END: Final = "preemption: not eligible due to a terminating pod on the nominated node."
_RESERVES: Final = "preemption: not eligible due to being a Reservation."
_NONE_AGREED: Final = "preemption: extenders agree to none of the nodes that could be freed."
_NOT_ANY_MORE: Final = (
    "preemption: none of the nodes that extenders agreed to can be freed any more."
)

_MOST_PROPOSED: Final = 32
"""Nodes that extenders are asked about; chosen. kube-scheduler asks about as many as it tries, 100
or more."""

_MOST_TRIED_TO_PROPOSE: Final = 2 * _MOST_PROPOSED
"""Nodes that are tried to find these, by each of the two ways to victims. Chosen: 64 trials of 2 ms
each take 130 ms, during which nothing else is decided. While none is found, as few are tried at one
attempt as without extenders."""


class Preemption:
    """The search for the cheapest node, for the pods of one profile. A PostFilter."""

    name: Final = "DefaultPreemption"

    def __init__(
        self,
        evaluator: Evaluator,
        tables: Tables,
        nominator: Nominator[PodShape],
        budgets: DisruptionBudgets,
        arguments: Arguments | None = None,
    ) -> None:
        self._evaluator = evaluator
        self._tables = tables
        self._nominator = nominator
        self._budgets = budgets
        self._arguments = arguments or Arguments()
        self._checks = RowChecks(evaluator.profile, tables, nominator)
        self._nodes = NodeSearch(self._checks, budgets, self._arguments)

    def post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> Candidate | NotFound:
        """Return the node to free for a pod, with the victims there. See PostFilter."""
        reason = self.why_not(pod, being_evicted)
        if reason is not None:
            return reason
        return self.find(pod, self._resolvable(diagnosis), salt=salt)

    def victims_for(self, pod: PendingPod[PodShape]) -> MayBeVictim:
        """Return which pods may be evicted for a pod."""
        # For a Reservation the plugin of that name preempts, whose victims no switch changes.
        reserves = ANNOTATION_RESERVE_POD in pod.shape.annotations
        protects = reserves or self._arguments.protects
        return default_victims if protects else victims_by_priority

    def _resolvable(self, diagnosis: Diagnosis) -> NDArray[np.intp]:
        """Return the rows where evictions can help."""
        # Evictions change nodes, not what refuses a pod before any node is looked at.
        return np.zeros(0, dtype=np.intp) if diagnosis.refusal else diagnosis.resolvable

    def why_not(
        self, pod: PendingPod[PodShape], being_evicted: Callable[[Booking], bool]
    ) -> NotFound | None:
        """Return why a pod may not preempt now, or None if it may."""
        reserves = ANNOTATION_RESERVE_POD in pod.shape.annotations
        if reserves and not self._arguments.reservations:
            return NotFound(_RESERVES)
        if pod.shape.preemption_policy == NEVER:
            return NotFound(_POLICY_NEVER)
        row = self._tables.nodes.row(self._nominator.node_of(pod.uid))
        if row is not None and any(
            booking.shape.priority < pod.priority and being_evicted(booking)
            for booking in self._tables.on(row).values()
        ):
            return NotFound(_VICTIMS_END, waits=True)
        return None

    def find(
        self,
        pod: PendingPod[PodShape],
        resolvable: NDArray[np.intp],
        *,
        salt: int,
        may_be_victim: MayBeVictim | None = None,
    ) -> Candidate | NotFound:
        """Return the node to free for a pod, with the victims there.

        resolvable: rows where evictions can help. salt: decides between nodes of equal cost.
        may_be_victim: None for `victims_for` the pod.
        """
        tables = self._tables
        may_be_victim = may_be_victim or self.victims_for(pod)
        if not len(resolvable):
            return not_helpful(tables)
        try:
            evaluation = self._evaluator.evaluate_nodes(pod.shape)
        except Refusal:
            return not_helpful(tables)
        ties = tables.nodes.order ^ np.uint64(salt)
        costs, by_hand = self._nodes.amounts(pod, evaluation, resolvable, may_be_victim)
        best = None
        before = self._nodes.refused_before(pod)
        refused: list[int] = []
        for row, best in self._nodes.confirmed(pod, costs, ties, before):
            if best is not None:
                break
            refused.append(row)
            if len(refused) == MOST_REFUSED:
                break
        by_hand = np.union1d(by_hand, np.array(refused, dtype=np.intp))
        tried, left = Tried(best), np.setdiff1d(by_hand, before)
        if len(left):
            tried = self._nodes.tried(pod, left, evaluation, ties, may_be_victim, best)
        if tried.best is not None:
            self._nodes.end(pod)
            return tried.best
        held = np.union1d(by_hand, costs.rows[costs.count > 0])
        text = no_node(self._checks, pod, len(resolvable), costs, held, evaluation, may_be_victim)
        return replace(text, more=self._goes_on(pod, before, refused, tried))

    def _goes_on(
        self, pod: PendingPod[PodShape], before: list[int], refused: list[int], tried: Tried
    ) -> bool:
        """Return whether the search goes on at the next attempt. refused: by the cheaper way."""
        # Those that are left of these may have other victims.
        final = set(tried.refused) if tried.cut else {*refused, *tried.refused}
        cut = tried.cut or len(refused) == MOST_REFUSED
        return self._nodes.goes_on(pod, final.union(before), len(final), cut=cut)

    # --- with extenders ---------------------------------------------------------------------------

    def propose(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> Proposals | NotFound:
        """Return the nodes that could be freed for a pod, for extenders to choose from.

        NotFound: what `post_filter` would return, as there is none.
        """
        tables = self._tables
        reason = self.why_not(pod, being_evicted)
        if reason is not None:
            return reason
        resolvable = self._resolvable(diagnosis)
        if not len(resolvable):
            return not_helpful(tables)
        try:
            evaluation = self._evaluator.evaluate_nodes(pod.shape)
        except Refusal:
            return not_helpful(tables)
        ties = tables.nodes.order ^ np.uint64(salt)
        may_be_victim = self.victims_for(pod)
        costs, by_hand = self._nodes.amounts(pod, evaluation, resolvable, may_be_victim)
        found: list[Candidate] = []
        before = self._nodes.refused_before(pod)
        refused: list[int] = []
        in_turn = self._nodes.confirmed(pod, costs, ties, before)
        for number, (row, confirmed) in enumerate(in_turn):
            if len(found) == _MOST_PROPOSED or (found and number >= _MOST_TRIED_TO_PROPOSE):
                break
            if confirmed is not None:
                found.append(confirmed)
                continue
            refused.append(row)
            if not found and len(refused) == MOST_REFUSED:
                break
        by_hand = np.union1d(by_hand, np.array(refused, dtype=np.intp))
        left = np.setdiff1d(by_hand, before)
        in_order = self._nodes.in_order(pod, left, evaluation, ties, may_be_victim)
        in_vain: list[int] = []
        for number, (row, _) in enumerate(in_order):
            if not found and len(in_vain) == MOST_REFUSED:
                break
            if len(found) == _MOST_PROPOSED or (found and number >= _MOST_TRIED_TO_PROPOSE):
                break
            candidate = by_trial(self._checks, pod, row, may_be_victim, self._budgets)
            if candidate is not None and candidate.victims:
                found.append(candidate)
            else:
                in_vain.append(row)
        if not found:
            cut = len(in_vain) < len(in_order)
            tried = Tried(None, tuple(in_vain), cut)
            held = np.union1d(by_hand, costs.rows[costs.count > 0])
            text = no_node(
                self._checks, pod, len(resolvable), costs, held, evaluation, may_be_victim
            )
            return replace(text, more=self._goes_on(pod, before, refused, tried))
        self._nodes.end(pod)
        found.sort(key=lambda each: (each.cost, ties[each.row]))
        return {
            tables.nodes.name(each.row): Proposal(
                {victim.uid: victim.key for victim in each.victims}, each.violations
            )
            for each in found
        }

    def choose(
        self, pod: PendingPod[PodShape], agreed: Proposals, *, salt: int
    ) -> Candidate | NotFound:
        """Return the cheapest of the nodes that extenders agreed to, as the tables are now.

        A node counts if the pod fits there without the victims. Victims that are gone, or may not
        be evicted any more, are left out. Where one of the nodes takes the pod by now, no pod is
        evicted: the change that made room has the pod tried again.
        """
        tables = self._tables
        may_be_victim = self.victims_for(pod)
        found: list[Candidate] = []
        for node, proposal in agreed.items():
            row = tables.nodes.row(node)
            if row is None:
                continue
            if self._checks.fits(pod, row):
                return NotFound(ROOM_BY_NOW)
            here = (tables.on(row).get(uid) for uid in proposal.victims)
            victims = sorted(
                (each for each in here if each and may_go(pod, each, may_be_victim)),
                key=importance,
            )
            with Trial(tables) as trial:
                for victim in victims:
                    trial.remove(victim.uid)
                fits = self._checks.fits(pod, row)
            if fits:
                beyond = len(self._budgets.violating(victims))
                violations = max(beyond, proposal.violations)
                found.append(Candidate(row, tuple(victims), violations))
        ties = tables.nodes.order ^ np.uint64(salt)
        best = min(found, key=lambda each: (each.cost, ties[each.row]), default=None)
        return best or NotFound(_NOT_ANY_MORE if agreed else _NONE_AGREED)
