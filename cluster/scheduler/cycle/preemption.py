"""DefaultPreemption: makes room for a pod by evicting less important ones.

What other kinds of preemption build on:

- `cycle.trial`: `Trial` looks at the tables as if some pods were gone and others placed, and undoes
  it; `RowChecks.fits(pod, row)` says inside or outside a trial whether one node takes a pod.
- `cycle.victims`: `by_trial` returns the victims of one node; `by_amounts` of `victim_columns`, of
  all nodes at once. Which pods may be victims is a predicate over shapes (`MayBeVictim`), and what
  has to hold beside the plugins is another one (`StillFits`). `Candidate.cost` compares nodes.
- `tables.disruption_budgets`: the state of PodDisruptionBudgets.
- `Preemption.find` below is DefaultPreemption's search; `default_victims` its predicate.
- `PostFilter` is what runs for a pod that no node takes. Those of a profile stand in
  `Scheduling.post_filters`, in their order; the first that finds victims ends the search, and
  `attempts` carries out what it found.

A pod may preempt unless its policy is Never, or a less important pod on the node that it is
nominated for is being evicted already. Nodes come into question where evicting pods can help
(`Diagnosis.resolvable`). Where pods are in the way only by the amounts that they request, all nodes
are compared; where other plugins hold a node back, nodes are tried one by one, in the order of what
the amounts alone would cost, up to the number that the arguments give.

No I/O and no clock. docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from apis.keys import ANNOTATION_RESERVE_POD, LABEL_DISABLE_PREEMPTIBLE, LABEL_PREEMPTIBLE
from cluster.scheduler.cycle.evaluation import Evaluation, Evaluator
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.proposals import ROOM_BY_NOW, Proposal, Proposals
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victim_columns import Costs, MayLeave, by_amounts, openable
from cluster.scheduler.cycle.victims import (
    NO_VICTIM,
    Candidate,
    MayBeVictim,
    by_trial,
    may_go,
)
from cluster.scheduler.plugins.contract import Filter, Mask, Refusal
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

NEVER: Final = "Never"
"""The preemptionPolicy of pods that preempt no others."""

_POLICY_NEVER: Final = "preemption: not eligible due to preemptionPolicy=Never."
_VICTIMS_END: Final = "preemption: not eligible due to a terminating pod on the nominated node."
_RESERVES: Final = "preemption: not eligible due to being a Reservation."
_NO_VICTIMS: Final = "No preemption victims found for incoming pod"
_NONE_AGREED: Final = "preemption: extenders agree to none of the nodes that could be freed."
_NOT_ANY_MORE: Final = (
    "preemption: none of the nodes that extenders agreed to can be freed any more."
)
_NOT_HELPFUL: Final = "Preemption is not helpful for scheduling"

_MORE_ROOM_NEVER_HURTS: Final = frozenset(
    {
        "NodeUnschedulable",
        "TaintToleration",
        "NodeAffinity",
        "NodePorts",
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
them: they may need a pod that would be a victim. One exception passes for rare: without a pod that
uses a Reservation, LoadAwareScheduling counts its part of it as load to come until the next report,
beside the usage that the last one has of the pod. The trial that confirms the victims sees that."""

_MOST_FOUND: Final = 8
"""Nodes with victims that are found by trials until the best of them is taken. Chosen: a trial
takes 2 ms with 20 pods on a node, and nodes come in the order of what they are likely to cost."""

_MOST_CONFIRMED: Final = 16
"""Nodes whose victims follow from amounts and that a trial does not confirm, one after another,
before the search goes on with trials alone. Chosen: filters and amounts disagree by defects only,
or where the exact allocation is refused."""


_MOST_PROPOSED: Final = 32
"""Nodes that extenders are asked about; chosen. kube-scheduler asks about as many as it tries, 100
or more."""

_MOST_TRIED_TO_PROPOSE: Final = 2 * _MOST_PROPOSED
"""Nodes that are tried to find these, by each of the two ways to victims. Chosen: 64 trials of 2 ms
each take 130 ms, during which nothing else is decided. Only while none is found, as many are tried
as without extenders: the pod would else never get room that is there."""

_MOST_EXPLAINED: Final = 16
"""Nodes on which a trial shows what holds them back without their victims; others are counted with
what holds them back now. Chosen: 16 trials of 20 pods each take 10 ms, and a text needs no more."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """How many nodes are tried one by one: the larger of the two, at most all.

    reservations: whether pods are evicted for Reservations too.
    """

    candidates_percentage: int = 10
    candidates_absolute: int = 100
    reservations: bool = False

    def most_tried(self, nodes: int) -> int:
        """Return how many of `nodes` are tried."""
        wanted = max(nodes * self.candidates_percentage // 100, self.candidates_absolute)
        return max(1, min(nodes, wanted))


@dataclass(frozen=True, slots=True)
class NotFound:
    """No eviction helps now.

    remark: why, for the end of the pod's condition. waits: victims of the pod's former preemption
    are still there, so its nomination stays.
    """

    remark: str
    waits: bool = False


class PostFilter(Protocol):
    """Looks for a way to place a pod that no node takes as things are."""

    @property
    def name(self) -> str: ...

    def post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> Candidate | NotFound:
        """Return the node to free with its victims, or why there is none.

        being_evicted: whether a placed pod is the victim of a preemption and not gone yet.
        salt: draws between nodes of equal cost.
        """
        ...


def default_victims(shape: PodShape) -> bool:
    """Return whether pods of a shape may be evicted for others, by their labels.

    What a Reservation keeps is not taken from it.
    """
    labels = shape.labels
    return (
        labels.get(LABEL_DISABLE_PREEMPTIBLE) != "true"
        and labels.get(LABEL_PREEMPTIBLE) != "false"
        and ANNOTATION_RESERVE_POD not in shape.annotations
    )


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
        may_be_victim: MayBeVictim = default_victims,
    ) -> Candidate | NotFound:
        """Return the node to free for a pod, with the victims there.

        resolvable: rows where evictions can help. salt: draws between nodes of equal cost.
        """
        tables = self._tables
        if not len(resolvable):
            return self._not_helpful()
        try:
            evaluation = self._evaluator.evaluate_nodes(pod.shape)
        except Refusal:
            return self._not_helpful()
        ties = tables.nodes.order ^ np.uint64(salt)
        costs, by_hand = self._amounts(pod, evaluation, resolvable, may_be_victim)
        best = next(self._confirmed(pod, costs, ties, _MOST_CONFIRMED), None)
        if len(by_hand):
            best = self._tried(pod, by_hand, evaluation, ties, may_be_victim, best)
        if best is None:
            return self._nothing(pod, len(resolvable), costs, by_hand, evaluation, may_be_victim)
        return best

    def _not_helpful(self) -> NotFound:
        nodes = self._tables.nodes.count
        return NotFound(_none(nodes, {_NOT_HELPFUL: nodes}))

    def _nothing(
        self,
        pod: PendingPod[PodShape],
        resolvable: int,
        costs: Costs,
        by_hand: NDArray[np.intp],
        evaluation: Evaluation,
        may_be_victim: MayBeVictim,
    ) -> NotFound:
        """Return why a search found no node. resolvable: how many nodes it looked at. costs,
        by_hand: what `_amounts` returned for these."""
        nodes = self._tables.nodes.count
        reasons = Counter(costs.short)
        reasons[_NOT_HELPFUL] += nodes - resolvable
        reasons[_NO_VICTIMS] += costs.without + int(np.count_nonzero(costs.count == 0))
        reasons += self._why(pod, by_hand, evaluation, may_be_victim)
        return NotFound(_none(nodes, reasons))

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
        reason = self.why_not(pod, being_evicted)
        if reason is not None:
            return reason
        resolvable = self._resolvable(diagnosis)
        if not len(resolvable):
            return self._not_helpful()
        try:
            evaluation = self._evaluator.evaluate_nodes(pod.shape)
        except Refusal:
            return self._not_helpful()
        ties = self._tables.nodes.order ^ np.uint64(salt)
        costs, by_hand = self._amounts(pod, evaluation, resolvable, default_victims)
        confirmed = self._confirmed(pod, costs, ties, _MOST_TRIED_TO_PROPOSE)
        found = list(islice(confirmed, _MOST_PROPOSED))
        in_order = self._in_order(pod, by_hand, evaluation, ties, default_victims)
        for number, (row, _) in enumerate(in_order):
            if len(found) == _MOST_PROPOSED or (found and number >= _MOST_TRIED_TO_PROPOSE):
                break
            candidate = by_trial(self._checks, pod, row, default_victims, self._budgets)
            if candidate is not None and candidate.victims:
                found.append(candidate)
        if not found:
            return self._nothing(pod, len(resolvable), costs, by_hand, evaluation, default_victims)
        found.sort(key=lambda each: (each.cost, ties[each.row]))
        return {
            self._tables.nodes.name(each.row): Proposal(
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
        found: list[Candidate] = []
        for node, proposal in agreed.items():
            row = tables.nodes.row(node)
            if row is None:
                continue
            if self._checks.fits(pod, row):
                return NotFound(ROOM_BY_NOW)
            here = (tables.on(row).get(uid) for uid in proposal.victims)
            victims = sorted(
                (each for each in here if each and may_go(pod, each, default_victims)),
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

    # --- two ways to victims ---------------------------------------------------------------------

    def _amounts(
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

    def _confirmed(
        self, pod: PendingPod[PodShape], costs: Costs, ties: NDArray[np.uint64], most: int
    ) -> Iterator[Candidate]:
        """Yield the nodes that take the pod once their victims are gone, the cheapest first.

        most: how many nodes are looked at.
        """
        order = costs.order(ties[costs.rows])
        # A node that no eviction is needed for is held back by what evictions do not change, such
        # as an extender.
        for element in order[costs.count[order] > 0][:most]:
            candidate = costs.candidate(int(element), self._tables)
            with Trial(self._tables) as trial:
                for victim in candidate.victims:
                    trial.remove(victim.uid)
                fits = self._checks.fits(pod, candidate.row)
            if fits:
                yield candidate

    def _tried(
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
        for row, highest in self._in_order(pod, rows, evaluation, ties, may_be_victim):
            bound = (0, highest)
            if len(found) == most or any(each.cost[:2] < bound for each in found):
                break
            candidate = by_trial(self._checks, pod, row, may_be_victim, self._budgets)
            if candidate is not None and candidate.victims:
                found.append(candidate)
        return min(found, key=lambda each: (each.cost, ties[each.row]), default=None)

    def _in_order(
        self,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        evaluation: Evaluation,
        ties: NDArray[np.uint64],
        may_be_victim: MayBeVictim,
    ) -> list[tuple[int, int]]:
        """Return the rows to try one by one, the cheapest by their amounts first, each with the
        priority that its most important victim has at least."""
        rows = openable(self._tables, pod, rows, evaluation, may_be_victim)
        fit = (f for f in self._evaluator.profile.filters if isinstance(f, NodeResourcesFit))
        requested = next((each.looked_at(pod.shape) for each in fit), None)
        bounds = self._by_amounts(pod, rows, requested, may_be_victim)
        order = bounds.order(ties[bounds.rows])
        first = [(int(bounds.rows[at]), int(bounds.highest[at])) for at in order]
        # There a pod may fit in what is reserved, which the amounts of the node do not show.
        inside = np.setdiff1d(np.intersect1d(rows, self._rows_with_reservations()), bounds.rows)
        order_of_rows = [(int(row), NO_VICTIM) for row in inside] + first
        return order_of_rows[: self._arguments.most_tried(self._tables.nodes.count)]

    def _why(
        self,
        pod: PendingPod[PodShape],
        rows: NDArray[np.intp],
        evaluation: Evaluation,
        may_be_victim: MayBeVictim,
    ) -> Counter[str]:
        """Return what holds nodes back without all pods that may be victims, counted by text."""
        counts: Counter[str] = Counter()
        with_victims = MayLeave(self._tables, pod, rows, may_be_victim).any
        counts[_NO_VICTIMS] = int(np.count_nonzero(~with_victims))
        rows = rows[with_victims]
        for row in rows[:_MOST_EXPLAINED].tolist():
            with Trial(self._tables) as trial:
                for booking in tuple(self._tables.on(row).values()):
                    if may_go(pod, booking, may_be_victim):
                        trial.remove(booking.uid)
                counts.update(self._first_reasons(pod, row))
        masks = ((plugin, mask[rows[_MOST_EXPLAINED:]]) for plugin, mask in evaluation.masks)
        counts.update(_first_texts(pod.shape, masks))
        return counts

    def _first_reasons(self, pod: PendingPod[PodShape], row: int) -> list[str]:
        masks = ((each, np.array([bits])) for each, bits in self._checks.masks(pod.shape, row))
        texts = list(_first_texts(pod.shape, masks))
        if not texts:
            refused = self._checks.allocation(pod.shape, row)
            texts = [] if isinstance(refused, Allocation) else [refused[1].text]
        return texts or [_NO_VICTIMS]


def _first_texts(pod: PodShape, masks: Iterable[tuple[Filter, Mask]]) -> Counter[str]:
    """Return the reasons of the first filter that holds each node back, with counts of nodes."""
    counts: Counter[str] = Counter()
    passes: NDArray[np.bool_] | bool = True
    for plugin, mask in masks:
        for number, reason in enumerate(plugin.reasons(pod)):
            counts[reason.text] += int(np.count_nonzero(passes & (mask >> number & 1 == 1)))
        passes = passes & (mask == 0)
    return +counts


def _none(nodes: int, reasons: Mapping[str, int]) -> str:
    """Return kube-scheduler's text for nodes that preemption does not free."""
    parts = sorted(f"{count} {reason}" for reason, count in reasons.items() if count)
    return f"preemption: 0/{nodes} nodes are available: {', '.join(parts)}."
