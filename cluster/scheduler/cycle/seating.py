"""Seats the members of a gang, one after another, each on a node that may need evictions first.

A member gets a node that takes it as things are, else the one where making room costs the least.
Seated members count for the next ones, and evicted pods are gone for them, so the gang fits if the
seats say so. Victims of a node, and what nodes are compared by, are those of DefaultPreemption;
evictions for one member use up the budgets for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.freeing import FreeingCosts
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victim_columns import Promised, by_amounts, freeable
from cluster.scheduler.cycle.victims import Candidate, MayBeVictim, by_amounts_on, by_trial
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Pod = PendingPod[PodShape]

Kind = tuple[PodShape, int]
"""Reduced shape and priority."""

_Reach = tuple[tuple[str, int], ...]
"""Filters and their `cluster_version`: equal as long as only rows that changed have new masks."""

_MOST_TRIED: Final = 16
"""Nodes that are tried for one member, first without victims, then with them. Chosen: amounts are
mostly right, so the first node is; 100 members that meet 16 wrong ones each take two seconds."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A member and the node that it gets once the victims there are gone."""

    pod: Pod
    candidate: Candidate


@dataclass(frozen=True, slots=True, eq=False)
class Search:
    """What a search for seats goes by.

    checks: by scheduler name; nominated pods count, but for those of the gang's own group.
    evaluate: also asks the admissions, so that no pod is evicted for a gang whose quota is full;
    raises Refusal. salt: decides between nodes of equal cost.
    """

    tables: Tables
    checks: Callable[[str], RowChecks]
    evaluate: Callable[[PodShape], Evaluation]
    budgets: DisruptionBudgets
    may_be_victim: MayBeVictim
    salt: int
    _promised: dict[tuple[str, int], Promised] = field(default_factory=dict, init=False)

    def promised(self, pod: Pod) -> Promised:
        """Return the rows that are promised to other pods, which count beside a member."""
        key = pod.shape.scheduler_name, pod.priority
        if key not in self._promised:
            self._promised[key] = self.checks(pod.shape.scheduler_name).promised(pod)
        return self._promised[key]

    def requested(self, pod: Pod) -> tuple[tuple[str, int], ...] | None:
        """Return the amounts that nodes must have left; None for a profile that looks at none."""
        filters = self.checks(pod.shape.scheduler_name).profile.filters
        fit = next((each for each in filters if isinstance(each, NodeResourcesFit)), None)
        return None if fit is None else tuple(fit.looked_at(pod.shape))

    def freeable(self, pod: Pod, evaluation: Evaluation) -> NDArray[np.intp]:
        """Return the rows where evictions may make room for a member, or for one more member.

        Nodes that take it as they are, and those that are promised to others, are among them.
        """
        rows = np.zeros(len(self.tables.nodes), dtype=np.bool_)
        rows[diagnose(pod.shape, self.tables, evaluation.masks).resolvable] = True
        rows[evaluation.feasible] = True
        rows[list(self.promised(pod))] = True
        return freeable(self.tables, pod, np.flatnonzero(rows), evaluation, self.may_be_victim)

    def kind(self, pod: Pod) -> Kind:
        """Return what members have in common that may stand for each other."""
        return self.tables.reduction.of(pod.shape), pod.priority


@dataclass(frozen=True, slots=True, eq=False)
class Within:
    """Nodes to which seats are limited. rows: by row, whether it is one. rank: by row; of nodes
    that are as good otherwise, the one with the lowest number is taken."""

    rows: NDArray[np.bool_]
    rank: NDArray[np.uint64]


class Seating:
    """What one search has found out about nodes is kept for members that are alike."""

    def __init__(self, search: Search, within: Within | None = None) -> None:
        """within: None for all nodes, where scores and the salt decide between equal ones."""
        self._search = search
        self._tables = search.tables
        self._within = within
        self._costs: dict[Hashable, FreeingCosts] = {}
        """By priority and requested amounts."""
        self._open: dict[Kind, tuple[_Reach, NDArray[np.bool_]]] = {}
        """Kind -> the rows where evictions may help it, as of what reaches across nodes."""
        self._unfit: dict[Kind, _Reach] = {}
        """Kind that no node takes -> as of what reaches across nodes. What happens on single nodes
        makes no room for it: later members are not more important, so their victims are among those
        that this one could have had."""

    def seat(self, pod: Pod, trial: Trial, only: int | None = None) -> Seat | None:
        """Return the seat of a member, which the trial has then, without the victims there.

        only: the one row that may be taken. None: there is none, and the trial is as it was.
        """
        try:
            evaluation = self._search.evaluate(pod.shape)
        except Refusal:
            return None
        kind, reach = self._search.kind(pod), self._reach(pod, evaluation)
        if self._unfit.get(kind) == reach:
            return None
        before = trial.mark()
        candidate = self._made_room(pod, evaluation, reach, trial, only)
        checks = self._search.checks(pod.shape.scheduler_name)
        booking = None
        if candidate is not None:
            booking = checks.booking_where_it_fits(pod, candidate.row)
        if candidate is None or booking is None:
            trial.back_to(before)
            if only is None:
                self._unfit[kind] = reach
            return None
        trial.place(booking)
        self._spend(candidate.victims)
        for costs in self._costs.values():
            costs.changed(candidate.row)
        if kind in self._open:
            self._open[kind][1][candidate.row] = True
        return Seat(pod, candidate)

    def _reach(self, pod: Pod, evaluation: Evaluation) -> _Reach:
        return tuple(
            (plugin.name, plugin.cluster_version(pod.shape, self._tables))
            for plugin, _ in evaluation.masks
        )

    def _made_room(
        self, pod: Pod, evaluation: Evaluation, reach: _Reach, trial: Trial, only: int | None
    ) -> Candidate | None:
        """Return the node for a member; its victims are gone from the trial. None: no node."""
        free = self._free(pod, evaluation if only is None else evaluation.only(only))
        if free is not None:
            return Candidate(free, (), 0)
        where = self._open_for(pod, evaluation, reach)
        if only is not None:
            here = np.zeros_like(where)
            here[only] = where[only]
            where = here
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

    def _free(self, pod: Pod, evaluation: Evaluation) -> int | None:
        """Return the best node that takes a member as things are, or None.

        Nodes that are promised to others come last: they take it only if they take all of these.
        """
        checks = self._search.checks(pod.shape.scheduler_name)
        promised = list(self._search.promised(pod))
        for begin in (promised, []) if promised else ([],):
            refusing = list(begin)
            while len(refusing) < len(begin) + _MOST_TRIED:
                row = self._best(evaluation, refusing)
                if row is None:
                    break
                if checks.fits(pod, row):
                    return row
                refusing.append(row)
        return None

    def _best(self, evaluation: Evaluation, without: Sequence[int]) -> int | None:
        if self._within is None:
            return evaluation.best(self._search.salt, without=without)
        rows = evaluation.feasible
        rows = rows[self._within.rows[rows]]
        if without:
            rows = rows[~np.isin(rows, without)]
        return int(rows[self._within.rank[rows].argmin()]) if len(rows) else None

    def _open_for(self, pod: Pod, evaluation: Evaluation, reach: _Reach) -> NDArray[np.bool_]:
        """Return by row whether evictions there may help a member; kept for its kind.

        A member that got a node, and the victims there, change what spread and affinity between
        pods refuse on other nodes; then it is worked out again.
        """
        kind = self._search.kind(pod)
        kept = self._open.get(kind)
        if kept is not None and kept[0] == reach:
            return kept[1]
        where = np.zeros(len(self._tables.nodes), dtype=np.bool_)
        where[self._search.freeable(pod, evaluation)] = True
        if self._within is not None:
            where &= self._within.rows
        self._open[kind] = reach, where
        return where

    def _evicted(self, pod: Pod, by_amounts: Candidate, trial: Trial) -> Candidate | None:
        """Take the victims of a node out of the trial: those by amounts if the pod fits then.

        Returns None, with the trial as it was, if no victims there make room for the pod.
        """
        search = self._search
        checks = search.checks(pod.shape.scheduler_name)
        candidate: Candidate | None = by_amounts
        before = trial.mark()
        for victim in by_amounts.victims:
            trial.remove(victim.uid)
        if not checks.fits(pod, by_amounts.row):
            trial.back_to(before)
            candidate = by_trial(checks, pod, by_amounts.row, search.may_be_victim, search.budgets)
            for victim in () if candidate is None else candidate.victims:
                trial.remove(victim.uid)
        return candidate

    def _spend(self, victims: Sequence[Booking]) -> None:
        budgets = self._search.budgets
        if victims and len(budgets):
            for victim in victims:
                budgets.spend(victim)
            for costs in self._costs.values():
                costs.budgets_changed()

    def _costs_for(self, pod: Pod) -> FreeingCosts:
        """Return what freeing nodes costs for pods that request what this one does."""
        search, tables, nodes = self._search, self._tables, self._tables.nodes
        requested = search.requested(pod)
        key = (pod.shape.scheduler_name, pod.priority, requested)
        costs = self._costs.get(key)
        if costs is None:
            length = len(nodes)
            ties = nodes.order[:length] ^ np.uint64(search.salt)
            some = nodes.alive[:length]
            if self._within is not None:
                ties, some = self._within.rank, some & self._within.rows
            rows, promised = np.flatnonzero(some), search.promised(pod)
            asked = (requested, search.may_be_victim, search.budgets)
            costs = self._costs[key] = FreeingCosts(
                tables,
                lambda: by_amounts(tables, pod, rows, *asked, promised),
                lambda row: by_amounts_on(tables, pod, row, *asked, promised.get(row, ())),
                ties,
            )
        return costs
