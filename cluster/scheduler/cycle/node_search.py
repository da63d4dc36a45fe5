"""The search for the node whose victims cost least, over all nodes.

There are two ways to the victims on a node. If a pod lacks nothing but amounts of resources there,
the victims follow from what its pods request, and all such nodes are compared at once. If another
plugin refuses the node, pods are removed on trial. That costs more, so only as many nodes are tried
as the arguments say: half of them are the cheapest by amounts, the others are drawn at random, so
that nodes which refuse the pod each time do not keep it from the rest for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
        self, pod: PendingPod[PodShape], costs: Costs, ties: NDArray[np.uint64]
    ) -> Iterator[tuple[int, Candidate | None]]:
        """Yield the rows to try, the cheapest first, each with its victims.

        None stands for a row that refuses the pod without these victims, as where the exact
        allocation fails. Others of its pods may be in the way: `tried` finds them.
        """
        order = costs.order(ties[costs.rows])
        # A node that no eviction is needed for is held back by what evictions do not change, such
        # as an extender.
        needed = order[costs.count[order] > 0]
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
    ) -> Candidate | None:
        """Return the cheapest of `best` and the nodes that are tried one by one.

        None is tried that costs more than `best`, or than one that was found, by the priority of
        its victims alone.
        """
        found: list[Candidate] = [] if best is None else [best]
        most = len(found) + _MOST_FOUND
        for row, highest in self.in_order(pod, rows, evaluation, ties, may_be_victim):
            bound = (0, highest)
            if len(found) == most or any(each.cost[:2] < bound for each in found):
                break
            candidate = by_trial(self._checks, pod, row, may_be_victim, self._budgets)
            if candidate is not None and candidate.victims:
                found.append(candidate)
        return min(found, key=lambda each: (each.cost, ties[each.row]), default=None)

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
