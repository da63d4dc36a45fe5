"""What is known about a gang before its first member is tried: whether it fits, and on which nodes.

A gang with too little room is refused at once, so that it takes no node from others. A gang that
is to be gathered in the network gets a node for each of its pods. A plan is worked out from counts
of the headroom and then tried on the tables (`plan_trial`); where a domain takes fewer pods than
counted, its headroom is corrected and the gang is planned again.

Where preemption made room for a gathered gang, its members go where they are nominated, if they fit
there by now. What is promised to other pods is not planned with; what is promised to members is, as
all of them are planned at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.gang_order import place_in_gang
from cluster.scheduler.cycle.gathering import Gathering, NotGathered, Offers
from cluster.scheduler.cycle.headroom import Headroom, headroom_of, most_placed
from cluster.scheduler.cycle.permit import COSCHEDULING, Wanted
from cluster.scheduler.cycle.plan_trial import PlanTrial, Tried
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.plugins.between_pods.near_pods import same_job
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import NetworkTopology, NetworkTree
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_PLANS: Final = 1_000
"""Gangs whose plan is kept. Chosen: a plan lives until its pods were tried, a few milliseconds."""
_MOST_TRIES: Final = 64
"""Plans of one gang that are tried on the tables. Each corrects the headroom of its domain, so that
another one is tried next. Chosen: as many as nodes that one pod is tried on."""

NO_TOPOLOGY: Final = "no cluster network topology"


class PlanOutdated(Exception):
    """The gang has to be planned again; the message says why."""


class _NotCarriedOut(NotGathered):
    """Nodes took fewer pods in trials than were counted, and no domain has enough of the rest."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """nodes: of the pods of one gang that were not tried yet, by UID. kinds: their reduced shapes.
    in_turns: whether it may depend on the order of the pods which nodes take them."""

    nodes: dict[str, str]
    kinds: Mapping[str, PodShape]
    in_turns: bool


@dataclass(frozen=True, slots=True)
class _Short:
    """The refusal of a group without room. shapes: one of each kind of its pods. as_of: see
    `GangPlans._as_of`."""

    wanted: Sequence[Wanted[PodShape]]
    shapes: tuple[PodShape, ...]
    as_of: tuple[object, ...]
    refusal: Diagnosis


class GangPlans:
    """Looks at a gang as a whole when its first member is to be tried."""

    def __init__(
        self,
        tables: Tables,
        checks: Callable[[str], RowChecks],
        evaluate: Callable[[PodShape], Evaluation],
        network: NetworkTopology | None,
        *,
        admit: Callable[[PodShape], None],
        examine: Callable[[PodShape, str], Evaluation | None],
        node_of: Callable[[str], str],
        may_preempt: Callable[[PendingPod[PodShape]], bool] = lambda pod: False,
    ) -> None:
        """checks: by scheduler name, with nominated pods. evaluate: raises Refusal. network: None
        where no profile is aware of the network; gangs are not gathered then. admit: the part of
        `evaluate` that looks at no node, and at what single pods may differ in. examine: shape and
        scheduler name -> the verdict of filters alone, or None. node_of: the node
        that a pod is nominated for, by UID, or "". may_preempt: whether a pod could make room for
        itself."""
        self._tables = tables
        self._checks = checks
        self._examine = examine
        self._node_of = node_of
        self._evaluate = evaluate
        self._admit = admit
        self._network = network
        self._may_preempt = may_preempt
        self._plans: OrderedDict[str, _Plan] = OrderedDict()
        """By gang. Gangs of one group are planned together."""
        self._last_short: _Short | None = None
        """Members of a gang that is not strict are refused each by itself, one after another."""

    def node_for(
        self, pod: PendingPod[PodShape], wanted: Sequence[Wanted[PodShape]]
    ) -> str | Diagnosis:
        """Return the node that is planned for a member, "" for any, or why it cannot be placed.

        wanted: of the member's group if it is the first that is tried, else nothing. Raises
        PlanOutdated where other members have nodes by a plan without this one.
        """
        if wanted and not self._still_planned(pod, wanted):
            refused = self._still_short(wanted) or self._begin(wanted)
            if refused is not None:
                return refused
        plan = self._plans.get(pod.gang)
        if plan is None:
            return ""
        if pod.uid not in plan.nodes:
            del self._plans[pod.gang]
            raise PlanOutdated(f"gang {pod.gang} was gathered before this pod came")
        if plan.in_turns:
            self._trade(pod, plan)
        node = plan.nodes.pop(pod.uid)
        if not plan.nodes:
            del self._plans[pod.gang]
        return node

    def _trade(self, pod: PendingPod[PodShape], plan: _Plan) -> None:
        """Give a pod whose node does not take it yet that of another one which may stand for it."""
        rows, profile = self._tables.nodes.row, pod.shape.scheduler_name
        seen = self._tables.reservations.pod_for(pod)
        kind = plan.kinds[pod.uid]
        mine = plan.nodes[pod.uid]
        here = rows(mine)
        if here is not None and self._checks(profile).passes(seen.shape, here):
            return
        # All nodes at once: each of a thousand members may have to look at those of all others.
        evaluation = self._examine(seen.shape, profile)
        feasible = set() if evaluation is None else set(evaluation.feasible.tolist())
        for uid, node in plan.nodes.items():
            if plan.kinds[uid] == kind and rows(node) in feasible:
                plan.nodes[pod.uid], plan.nodes[uid] = plan.nodes[uid], mine
                return

    def _still_planned(self, pod: PendingPod[PodShape], wanted: Sequence[Wanted[PodShape]]) -> bool:
        """Return whether a plan goes on although no member waits, as each is bound at once."""
        at_once = all(each.least == 0 for each in wanted)
        plan = self._plans.get(pod.gang)
        return at_once and plan is not None and pod.uid in plan.nodes

    def _still_short(self, wanted: Sequence[Wanted[PodShape]]) -> Diagnosis | None:
        """Return the refusal of a group of which nothing changed since, nor of what it needs.

        Admissions are not asked again: they could only refuse its pods as well.
        """
        kept = self._last_short
        if kept is None or len(kept.wanted) != len(wanted):
            return None
        if any(one is not other for one, other in zip(kept.wanted, wanted, strict=True)):
            return None
        return kept.refusal if self._as_of(kept.shapes) == kept.as_of else None

    def _keep_short(
        self,
        given: Sequence[Wanted[PodShape]],
        shapes: Iterable[PodShape],
        refusal: Diagnosis,
    ) -> None:
        kinds = {self._tables.reduction.of(shape): shape for shape in shapes}
        of_kinds = tuple(kinds.values())
        as_of = self._as_of(of_kinds)
        self._last_short = None if as_of is None else _Short(given, of_kinds, as_of, refusal)

    def _as_of(self, shapes: Iterable[PodShape]) -> tuple[object, ...] | None:
        """Return what is equal as long as the headroom for pods of these shapes is, and which of
        them mean the same to nodes; None where a plugin refuses them."""
        tables = self._tables
        found: list[object] = [
            tables.nodes.version,
            tables.reduction.version,
            tables.reservations.match_version,
        ]
        for shape in shapes:
            evaluation = self._examine(shape, shape.scheduler_name)
            if evaluation is None:
                return None
            found += (
                (plugin.name, plugin.cluster_version(shape, tables))
                for plugin, _ in evaluation.masks
            )
        return tuple(found)

    def _begin(self, wanted: Sequence[Wanted[PodShape]]) -> Diagnosis | None:
        for each in wanted:
            self._plans.pop(each.gang, None)
        given = wanted
        seen = self._tables.reservations.pod_for
        wanted = [replace(each, pods=tuple(map(seen, each.pods))) for each in wanted]
        try:
            evaluations = self._evaluations(
                dict.fromkeys(pod.shape for each in wanted for pod in each.pods)
            )
        except Refusal:
            # The attempt of that member will say why.
            return None
        headroom = self._headroom(evaluations, sum(len(each.pods) for each in wanted))
        short = self._short(wanted, headroom)
        alone = sum(each.least for each in wanted) <= 1
        if (
            short is not None
            and alone
            and any(self._may_preempt(each.pods[0]) for each in wanted if each.pods)
        ):
            # What it lacks, it may free. A pod that needs others does not preempt alone.
            return None
        if short is not None:
            self._keep_short(given, evaluations, short)
            return short
        gather = gathered_as(wanted)
        if self._network is None or gather is None:
            return None
        tree = self._network.tree()
        if tree is None:
            return self._refuse(NO_TOPOLOGY, headroom, COSCHEDULING)
        pods = sorted((pod for each in wanted for pod in each.pods), key=place_in_gang)
        group = frozenset(each.gang for each in wanted)
        checks = cache(lambda name: self._checks(name).apart_from(group))
        try:
            plan = self._as_nominated(tree, gather, pods, checks)
            if plan is None:
                counted = self._counted(pods, headroom, checks)
                plan = self._gathered(tree, gather, pods, evaluations, counted, checks)
        except Refusal:
            return None
        except _NotCarriedOut as error:
            # Whatever applies may be what refused a pod in the trials.
            applying = self._applying(evaluations, checks)
            return self._refuse(str(error), headroom, COSCHEDULING, *applying)
        except NotGathered as error:
            return self._refuse(str(error), headroom, COSCHEDULING)
        # Filters that look at other nodes too may pass a node only once other members are placed.
        in_turns = any(
            plugin.cluster_version(shape, self._tables)
            for shape, evaluation in evaluations.items()
            for plugin, _ in evaluation.masks
        )
        self._keep(plan, wanted, in_turns=in_turns)
        return None

    def _evaluations(self, shapes: Iterable[PodShape]) -> dict[PodShape, Evaluation]:
        """Return what nodes mean for pods of each shape, worked out once for each reduced shape.

        Raises Refusal.
        """
        known: dict[PodShape, Evaluation] = {}
        evaluations = {}
        for shape in shapes:
            reduced = self._tables.reduction.of(shape)
            if reduced in known:
                self._admit(shape)
            else:
                known[reduced] = self._evaluate(shape)
            evaluations[shape] = known[reduced]
        return evaluations

    def _applying(
        self, evaluations: Mapping[PodShape, Evaluation], checks: Callable[[str], RowChecks]
    ) -> set[str]:
        """Return the names of the filters and allocators that apply to one of the shapes."""
        names = set()
        for shape, evaluation in evaluations.items():
            names |= {plugin.name for plugin, _ in evaluation.masks}
            allocators = checks(shape.scheduler_name).profile.allocators
            names |= {each.name for each in allocators if each.applies(shape, self._tables)}
        return names

    def _keep(
        self, plan: dict[str, str], wanted: Iterable[Wanted[PodShape]], *, in_turns: bool
    ) -> None:
        for each in wanted:
            nodes = {pod.uid: plan[pod.uid] for pod in each.pods}
            kinds = {pod.uid: self._tables.reduction.of(pod.shape) for pod in each.pods}
            if nodes:
                self._plans[each.gang] = _Plan(nodes, kinds, in_turns)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)

    def _headroom(
        self, evaluations: Mapping[PodShape, Evaluation], pods: int
    ) -> dict[PodShape, Headroom]:
        """Return the headroom for pods of each shape, worked out once for each reduced shape.

        pods: how many there are of all shapes.
        """
        known: dict[PodShape, Headroom] = {}
        headroom = {}
        for shape, evaluation in evaluations.items():
            reduced = self._tables.reduction.of(shape)
            if reduced not in known:
                known[reduced] = headroom_of(shape, evaluation, pods)
            headroom[shape] = known[reduced]
        return headroom

    def _alike(self, pods: Iterable[PendingPod[PodShape]]) -> dict[PodShape, int]:
        """Return one shape for each reduced shape, and how many of the pods have the latter.

        Nodes mean the same for these pods, so that they share one headroom. Counted by their
        shapes, which labels of single pods tell apart, each would have it for itself.
        """
        found: dict[PodShape, tuple[PodShape, int]] = {}
        for pod in pods:
            reduced = self._tables.reduction.of(pod.shape)
            first, count = found.get(reduced, (pod.shape, 0))
            found[reduced] = first, count + 1
        return dict(found.values())

    def _short(
        self, wanted: Sequence[Wanted[PodShape]], headroom: dict[PodShape, Headroom]
    ) -> Diagnosis | None:
        for each in wanted:
            members = self._alike(each.pods)
            most = most_placed(members, headroom)
            if most < each.least:
                return self._refuse(
                    f"gang {each.gang} needs room for {each.least} pods together,"
                    f" and there is room for {most} at most",
                    {shape: headroom[shape] for shape in members},
                )
        return None

    def _refuse(self, message: str, headroom: dict[PodShape, Headroom], *plugins: str) -> Diagnosis:
        limiting = frozenset(plugins).union(*(each.plugins for each in headroom.values()))
        return Diagnosis(nodes=self._tables.nodes.count, plugins=limiting, refusal=message)

    # --- gathering -------------------------------------------------------------------------------

    def _as_nominated(
        self,
        tree: NetworkTree,
        gather: Gather,
        pods: Sequence[PendingPod[PodShape]],
        checks: Callable[[str], RowChecks],
    ) -> dict[str, str] | None:
        """Return the nominated node of each pod, by UID, if they are gathered and fit there now."""
        nodes = {pod.uid: self._node_of(pod.uid) for pod in pods}
        counts = np.zeros(len(self._tables.nodes), dtype=np.int64)
        on: dict[int, list[PendingPod[PodShape]]] = {}
        for pod in pods:
            row = self._tables.nodes.row(nodes[pod.uid])
            if row is None:
                return None
            counts[row] += 1
            on.setdefault(row, []).append(pod)
        nothing = np.zeros_like(counts)
        offers = Offers(counts, nothing, nothing)
        try:
            filled = Gathering(tree, self._tables.nodes, gather, offers, len(pods)).choose()
        except NotGathered:
            return None
        with Trial(self._tables) as trial:
            for row, _ in filled:
                for pod in on[row]:
                    booking = checks(pod.shape.scheduler_name).booking(pod, row)
                    if booking is None:
                        return None
                    trial.place(booking)
        return nodes

    def _counted(
        self,
        pods: Sequence[PendingPod[PodShape]],
        headroom: dict[PodShape, Headroom],
        checks: Callable[[str], RowChecks],
    ) -> NDArray[np.int64]:
        """Return how many of the pods each row takes at most, beside those that are promised it.

        Raises Refusal.
        """
        counted = np.zeros(len(self._tables.nodes), dtype=np.int64)
        kinds: dict[tuple[str, int], list[PendingPod[PodShape]]] = {}
        for pod in pods:
            kinds.setdefault((pod.shape.scheduler_name, pod.priority), []).append(pod)
        for (name, _), members in kinds.items():
            of_profile = checks(name)
            promised = of_profile.promised(members[0])
            with Trial(self._tables) as trial:
                for row, others in promised.items():
                    of_profile.place_nominated(trial, others, row)
                # Worked out here: the terms of the others may tell members apart.
                for shape, count in self._alike(members).items():
                    found = headroom[shape].by_row
                    if promised:
                        beside = headroom_of(shape, self._evaluate(shape), len(pods))
                        found = np.minimum(found, beside.by_row)
                    counted += np.minimum(found, count)
        return counted

    def _gathered(
        self,
        tree: NetworkTree,
        gather: Gather,
        pods: Sequence[PendingPod[PodShape]],
        evaluations: dict[PodShape, Evaluation],
        counted: NDArray[np.int64],
        checks: Callable[[str], RowChecks],
    ) -> dict[str, str]:
        """Return a node for each pod, by UID. counted: as `_counted`.

        Raises NotGathered where the headroom does not suffice, and _NotCarriedOut.
        """
        length = len(self._tables.nodes)
        first = pods[0].shape
        scores = np.zeros(length, dtype=np.int64)
        scores[evaluations[first].feasible] = evaluations[first].totals
        counter = same_job(first, self._tables)
        existing = np.zeros(length, dtype=np.int64)
        if counter is not None:
            existing = counter.column(length).copy()
        trial = PlanTrial(self._tables, checks, self._examine)
        for number in range(_MOST_TRIES):
            offers = Offers(counted, existing, scores)
            gathering = Gathering(tree, self._tables.nodes, gather, offers, len(pods))
            try:
                choice = gathering.choice()
            except NotGathered as error:
                if number:
                    raise _NotCarriedOut(str(error)) from error
                raise
            tried = trial.fill_domain(choice.nodes, partial(gathering.rows_of, choice), pods)
            if len(tried.nodes) == len(pods):
                nodes = self._in_order(tree, gather, pods, tried, trial)
                if nodes is not None:
                    return nodes
            before, counted = counted, counted.copy()
            for row in tried.full:
                counted[row] = min(counted[row], tried.taken[row])
            if (counted == before).all():
                break
        raise _NotCarriedOut(f"none of {number + 1} plans for the gang could be carried out")

    def _in_order(
        self,
        tree: NetworkTree,
        gather: Gather,
        pods: Sequence[PendingPod[PodShape]],
        tried: Tried,
        trial: PlanTrial,
    ) -> dict[str, str] | None:
        """Return the nodes of the pods, with those that follow each other on nodes that do.

        None if the nodes that the trial found are not gathered as demanded. The nodes as they were
        found, where the pods cannot be placed in the order of the network.
        """
        if not tried.moved:
            return tried.nodes
        counts = np.zeros(len(self._tables.nodes), dtype=np.int64)
        counts[list(tried.taken)] = list(tried.taken.values())
        nothing = np.zeros_like(counts)
        offers = Offers(counts, nothing, nothing)
        try:
            filled = Gathering(tree, self._tables.nodes, gather, offers, len(pods)).choose()
        except NotGathered:
            return None
        ordered = trial.fill(filled, pods)
        return ordered.nodes if len(ordered.nodes) == len(pods) else tried.nodes


def gathered_as(wanted: Iterable[Wanted[PodShape]]) -> Gather | None:
    """Return how the gangs of a group are gathered, or None; the first that says so decides."""
    return next((each.gather for each in wanted if each.gather is not None), None)
