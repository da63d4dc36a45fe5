"""The search for the node whose victims cost least, over all nodes.

There are two ways to the victims on a node. If a pod lacks nothing but amounts of resources there,
the victims follow from what its pods request, and all such nodes are compared at once. If another
plugin refuses the node, pods are removed on trial. That costs more, so only as many nodes are tried
as the arguments say: half of them are the cheapest by amounts, the others are drawn at random, so
that nodes which refuse the pod each time do not keep it from the rest for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victim_columns import Costs, by_amounts, freeable
from cluster.scheduler.cycle.victims import NO_VICTIM, Candidate, MayBeVictim, by_trial
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

_MORE_ROOM_NEVER_HURTS: Final = frozenset(
    {
        "NodeUnschedulable",
        "TaintToleration",
        "NodeAffinity",
        "NodePorts",
        "NodeDeclaredFeatures",
        "NodeResourcesFit",
        "LoadAwareScheduling",
        "NodeNUMAResource",
        "DeviceShare",
        "VolumeRestrictions",
        "NodeVolumeLimits",
        "VolumeBinding",
        "VolumeZone",
    }
)
"""Filters that pass a node with fewer pods if they pass it with more. Of these, a node that only
NodeResourcesFit holds back needs no trial to find its victims. Affinity and spread are not among
them: they may need a pod that would be a victim. One exception is rare enough to be left in:
without a pod that uses a Reservation, LoadAwareScheduling counts its part of it as load to come
until the next report, beside the usage that the last one has of the pod. The trial that confirms
the victims sees that."""

_MOST_FOUND: Final = 8
"""Nodes with victims that are found by trials until the best of them is taken. Chosen: a trial
takes 2 ms with 20 pods on a node, and nodes come in the order of what they are likely to cost."""


MOST_REFUSED: Final = 32
"""Nodes that refuse a pod in one search, for each of the two ways, until the search is left to the
pod's next attempt, which goes on with others. Chosen: 64 trials of 2 to 3 ms take up to 0.2 s,
while nothing else is decided."""

_MOST_SEARCHES: Final = 200
"""Pods whose refusals are kept, the last ones. Chosen: each takes up to 50 KB with 5,000 nodes, and
without them a search begins once more."""


@dataclass(slots=True)
class _Refusals:
    """The nodes that refused one pod in a search which goes on at its next attempt.

    rows: row -> its version after it did. trials: how many there were.
    """

    rows: dict[int, int] = field(default_factory=dict)
    trials: int = 0


@dataclass(frozen=True, slots=True)
class Tried:
    """best: the cheapest of the nodes that were tried one by one. refused: rows that have no
    victims who make room. cut: whether others are left to be tried."""

    best: Candidate | None
    refused: tuple[int, ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """How many nodes are tried one by one: the larger of the two, at most all.

    reservations: whether pods are evicted for Reservations too. protects: whether the labels that
    protect pods from the preemption of quotas, gangs and Reservations count here too.
    """

    candidates_percentage: int = 10
    candidates_absolute: int = 100
    reservations: bool = False
    protects: bool = True

    def most_tried(self, nodes: int) -> int:
        """Return how many of `nodes` are tried."""
        wanted = max(nodes * self.candidates_percentage // 100, self.candidates_absolute)
        return max(1, min(nodes, wanted))


class NodeSearch:
    """The search for the pods of one profile."""

    def __init__(self, checks: RowChecks, budgets: DisruptionBudgets, arguments: Arguments) -> None:
        """checks: with nominated pods."""
        self._checks = checks
        self._tables = checks.tables
        self._budgets = budgets
        self._arguments = arguments
        self._refusals: OrderedDict[tuple[str, PodShape], _Refusals] = OrderedDict()
        """By the UID of the pod and its shape, which an edit changes."""

    def refused_before(self, pod: PendingPod[PodShape]) -> list[int]:
        """Return the rows that refused a pod in this search, and have not changed since.

        A trial changes rows too, so this is asked before the first one.
        """
        refusals = self._refusals.get((pod.uid, pod.shape))
        if refusals is None:
            return []
        versions = self._tables.nodes.row_version
        return [row for row, version in refusals.rows.items() if versions[row] == version]

    def goes_on(
        self, pod: PendingPod[PodShape], refused: Iterable[int], tried: int, *, cut: bool
    ) -> bool:
        """Return whether the search for a pod, which found nothing, goes on at its next attempt.

        It does so until as many nodes have been tried as the arguments say. refused: rows that are
        not to be tried again, those of `refused_before` among them. cut: whether others are left.
        """
        refusals = self._refusals.pop((pod.uid, pod.shape), None) or _Refusals()
        versions = self._tables.nodes.row_version
        refusals.rows = {row: int(versions[row]) for row in refused}
        refusals.trials += tried
        if not cut or refusals.trials >= self._arguments.most_tried(self._tables.nodes.count):
            return False
        self._refusals[pod.uid, pod.shape] = refusals
        if len(self._refusals) > _MOST_SEARCHES:
            self._refusals.popitem(last=False)
        return True

    def end(self, pod: PendingPod[PodShape]) -> None:
        """End the search for a pod. What refused it is tried again in the next one."""
        self._refusals.pop((pod.uid, pod.shape), None)

    def amounts(
        self,
        pod: PendingPod[PodShape],
        evaluation: Evaluation,
        resolvable: NDArray[np.intp],
        may_be_victim: MayBeVictim,
    ) -> tuple[Costs, NDArray[np.intp]]:
        """Return the nodes whose victims follow from amounts, and the rows of all others."""
        short = np.zeros(len(self._tables.nodes), dtype=np.bool_)
        only = np.ones(len(short), dtype=np.bool_)
        requested: list[tuple[str, int]] | None = None
        for plugin, mask in evaluation.masks:
            if isinstance(plugin, NodeResourcesFit):
                short |= mask != 0
                requested = plugin.looked_at(pod.shape)
            elif plugin.name in _MORE_ROOM_NEVER_HURTS:
                only &= mask == 0
            else:
                only[:] = False
        short[list(self._checks.promised(pod))] = True
        # Evicting a pod inside a reservation frees nothing beyond the reservation.
        only[self._rows_with_reservations()] = False
        simple = (short & only)[resolvable]
        costs = self._by_amounts(pod, resolvable[simple], requested, may_be_victim)
        return costs, resolvable[~simple]

    def _rows_with_reservations(self) -> NDArray[np.intp]:
        return np.array(sorted(self._tables.reservations.rows()), dtype=np.intp)

    def _by_amounts(
        self,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        requested: list[tuple[str, int]] | None,
        may_be_victim: MayBeVictim,
    ) -> Costs:
        return by_amounts(
            self._tables,
            pod,
            rows,
            requested,
            may_be_victim,
            self._budgets,
            self._checks.promised(pod),
        )

    def confirmed(
        self,
        pod: PendingPod[PodShape],
        costs: Costs,
        ties: NDArray[np.uint64],
        without: Sequence[int] = (),
    ) -> Iterator[tuple[int, Candidate | None]]:
        """Yield the rows to try but for `without`, the cheapest first, each with its victims.

        None stands for a row that refuses the pod without these victims, as where the exact
        allocation fails. Others of its pods may be in the way: `tried` finds them.
        """
        order = costs.order(ties[costs.rows])
        # A node that no eviction is needed for is held back by what evictions do not change, such
        # as an extender.
        needed = order[costs.count[order] > 0]
        needed = needed[~np.isin(costs.rows[needed], without)]
        for element in needed[self._some_of(ties[costs.rows[needed]])]:
            candidate = costs.candidate(int(element), self._tables)
            with Trial(self._tables) as trial:
                for victim in candidate.victims:
                    trial.remove(victim.uid)
                fits = self._checks.fits(pod, candidate.row)
            yield candidate.row, candidate if fits else None

    def _some_of(self, ties: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the places of the nodes that one search tries, ascending.

        ties: of all nodes, the cheapest first. The first half of those that are tried are the
        cheapest; the others are drawn from the rest, so that each node is tried some time.
        """
        most = self._arguments.most_tried(self._tables.nodes.count)
        if len(ties) <= most:
            return np.arange(len(ties))
        first = most - most // 2
        drawn = first + np.argsort(ties[first:])[: most // 2]
        return np.concatenate((np.arange(first), np.sort(drawn)))

    def tried(
        self,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        evaluation: Evaluation,
        ties: NDArray[np.uint64],
        may_be_victim: MayBeVictim,
        best: Candidate | None,
    ) -> Tried:
        """Return the cheapest of `best` and the nodes that are tried one by one.

        None is tried that costs more than `best`, or than one that was found, by the priority of
        its victims alone.
        """
        found: list[Candidate] = [] if best is None else [best]
        most = len(found) + _MOST_FOUND
        refused: list[int] = []
        cut = False
        for row, highest in self.in_order(pod, rows, evaluation, ties, may_be_victim):
            bound = (0, highest)
            if len(refused) == MOST_REFUSED:
                cut = True
                break
            if len(found) == most or any(each.cost[:2] < bound for each in found):
                break
            candidate = by_trial(self._checks, pod, row, may_be_victim, self._budgets)
            if candidate is not None and candidate.victims:
                found.append(candidate)
            else:
                refused.append(row)
        cheapest = min(found, key=lambda each: (each.cost, ties[each.row]), default=None)
        return Tried(cheapest, tuple(refused), cut)

    def in_order(
        self,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        evaluation: Evaluation,
        ties: NDArray[np.uint64],
        may_be_victim: MayBeVictim,
    ) -> list[tuple[int, int]]:
        """Return the rows to try one by one, the cheapest by their amounts first, each with the
        priority that its most important victim has at least."""
        rows = freeable(self._tables, pod, rows, evaluation, may_be_victim)
        fit = (f for f in self._checks.profile.filters if isinstance(f, NodeResourcesFit))
        requested = next((each.looked_at(pod.shape) for each in fit), None)
        bounds = self._by_amounts(pod, rows, requested, may_be_victim)
        order = bounds.order(ties[bounds.rows])
        # There a pod may fit in what is reserved, which the amounts of the node do not show.
        inside = np.setdiff1d(np.intersect1d(rows, self._rows_with_reservations()), bounds.rows)
        in_order = np.concatenate((inside, bounds.rows[order]))
        highest = np.concatenate((np.full(len(inside), NO_VICTIM), bounds.highest[order]))
        tried = self._some_of(ties[in_order])
        return list(zip(in_order[tried].tolist(), highest[tried].tolist(), strict=True))
