"""One pod, one decision: the node with the highest score that can give the exact allocation.

The decision is a booking that is in force in the tables when `schedule` returns. Who asked for it
writes it to the API server, and removes it again if that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from cluster.scheduler.cycle.advice import Advisor
from cluster.scheduler.cycle.evaluation import Evaluation, Evaluator, Profile, Promises
from cluster.scheduler.cycle.gang_preemption import GangPreemption
from cluster.scheduler.cycle.node_search import Arguments
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.opinions import Opinion, with_opinion
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.post_filter import NotFound, PostFilter
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.cycle.proposals import ROOM_BY_NOW, NeedsRoom, Proposals
from cluster.scheduler.cycle.quota_preemption import QuotaPreemption
from cluster.scheduler.cycle.seating import Seat
from cluster.scheduler.cycle.timings import (
    POST_FILTER,
    RESERVE,
    SUCCESS,
    UNSCHEDULABLE,
    Timings,
)
from cluster.scheduler.cycle.trial import RowChecks
from cluster.scheduler.cycle.victims import Candidate, may_go
from cluster.scheduler.plugins.contract import Reason, Recorded, Refusal
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.quotas.elastic_quota import ElasticQuotaAdmission
from cluster.scheduler.plugins.unsupported import Unsupported
from cluster.scheduler.reasons.counterfactuals import NONE, Counterfactuals, but_for, nearest
from cluster.scheduler.reasons.diagnosis import Diagnosis, diagnose, refused
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation, Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_TRIES: Final = 64
"""Nodes that pass all filters but refuse the exact allocation, one after another, before the pod is
given up for this time. The filters predict allocations nearly always; a pod that meets 64 wrong
predictions waits for the next change instead of holding up the others."""

_BEST_TRIES: Final = _MOST_TRIES // 2
"""So many of these have the best totals. The others are drawn, at each attempt again: nodes that
refuse a pod each time do not keep it from one further down for ever."""

_MIX: Final = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio: consecutive numbers times this differ in all bits."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision that is in force in the tables, and what has to stand on the pod for it."""

    booking: Booking
    recorded: Recorded


@dataclass(frozen=True, slots=True)
class Placed(Decision):
    """A decision with the verdicts on all nodes, some hundred KiB: not for keeping."""

    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No node takes the pod as things are."""

    diagnosis: Diagnosis


class Scheduling:
    """Places pods of all profiles on one set of tables."""

    def __init__(
        self,
        tables: Tables,
        profiles: Mapping[str, Profile],
        *,
        seed: int,
        preemption: Mapping[str, Arguments] = MappingProxyType({}),
        quota_preemption: Mapping[str, bool] = MappingProxyType({}),
        gang_preemption: Container[str] = (),
        network: NetworkTopology | None = None,
    ) -> None:
        """profiles: by scheduler name. seed: with the same seed and inputs, the same placements.
        preemption: the arguments of the profiles with DefaultPreemption, by scheduler name.
        quota_preemption: by scheduler name of the profiles where pods of a quota preempt each
        other, whether those of the default quota do so too.
        gang_preemption: names of those in which a gang makes room for all of its pods at once.
        network: see GangPlans.
        """
        self.tables = tables
        self.nominator: Nominator[PodShape] = Nominator()
        self.budgets = DisruptionBudgets()
        self._evaluators = {name: Evaluator(profile, tables) for name, profile in profiles.items()}
        self._checks = {
            name: RowChecks(profile, tables, self.nominator) for name, profile in profiles.items()
        }
        self.post_filters: dict[str, list[PostFilter]] = {
            name: [Preemption(self._evaluators[name], tables, self.nominator, self.budgets, given)]
            for name, given in preemption.items()
        }
        """What runs for a pod that no node takes, by scheduler name, in order."""
        for name, default_quota in quota_preemption.items():
            evaluator = self._evaluators[name]
            admission = next(
                each
                for each in evaluator.profile.admissions
                if isinstance(each, ElasticQuotaAdmission)
            )
            self.post_filters.setdefault(name, []).append(
                QuotaPreemption(
                    Preemption(evaluator, tables, self.nominator, self.budgets),
                    evaluator,
                    tables,
                    self.nominator,
                    self.budgets,
                    admission,
                    default_quota=default_quota,
                )
            )
        self._gang_preemption = gang_preemption
        self._gangs = GangPreemption(
            tables,
            self.checks,
            self.evaluate,
            self.budgets,
            self.nominator.node_of,
            network,
        )
        self._advisor = Advisor()
        self._salt = seed % 2**64

    def prepare(self) -> None:
        """Work out beforehand what the first search for victims would have to: who is on each node,
        and the budgets of each shape."""
        self.tables.occupants.follow()
        for shape in self.tables.matches.shapes():
            self.budgets.of(shape)

    def profile(self, name: str) -> Profile:
        """Return the profile of a scheduler name."""
        return self._evaluators[name].profile

    def checks(self, name: str) -> RowChecks:
        """Return the checks of single nodes for a scheduler name, with nominated pods."""
        return self._checks[name]

    def timings(self, name: str) -> Timings:
        """Return the durations of the decisions of a scheduler name."""
        return self._evaluators[name].timings

    def evaluate(self, shape: PodShape) -> Evaluation:
        """Return every node's verdict on a pod. Raises Refusal."""
        return self._evaluators[shape.scheduler_name].evaluate(shape)

    def admit(self, shape: PodShape) -> None:
        """Ask the plugins without a node dimension about a pod. Raises Refusal."""
        self._evaluators[shape.scheduler_name].admit(shape)

    def feasible_nodes(self, pod: PendingPod[PodShape]) -> tuple[str, ...]:
        """Return the names of the nodes that all filters pass, without booking anything."""
        try:
            feasible = self.evaluate(self.tables.reservations.pod_for(pod).shape).feasible
        except Refusal:
            return ()
        return tuple(map(self.tables.nodes.name, feasible.tolist()))

    def schedule(
        self,
        *,
        key: str,
        uid: str,
        shape: PodShape,
        profile: str,
        now: float,
        opinion: Opinion | None = None,
        node: str = "",
        together: frozenset[str] = frozenset(),
        avoid: str = "",
    ) -> Placed | Unplaced:
        """Choose a node for a pod and book it there.

        key: namespace/name. profile: the scheduler name. now: seconds since 1970. opinion: what
        extenders say about its nodes. node: the only one that may be chosen; "" for any. together:
        gangs whose nominated pods do not count, because `node` is part of a plan for all of them.
        avoid: a node that is chosen only if no other one takes the pod.
        """
        evaluator = self._evaluators[profile]
        name = key.partition("/")[2]
        booked, shape = shape, self.tables.reservations.shape_for(shape, name, uid)
        self._salt = (self._salt + _MIX) % 2**64
        nominated = self.tables.nodes.row(self.nominator.node_of(uid))
        rejected: dict[int, tuple[str, Reason]] = {}
        refusing: dict[int, tuple[str, Reason]] = {}
        timings = evaluator.timings
        # The nominated node mostly takes the pod: what is promised elsewhere is looked at only if
        # it does not.
        planned = self.tables.nodes.row(node) if node else None
        avoided = self.tables.nodes.row(avoid) if avoid else None
        at_large = nominated is None or node or nominated == avoided
        checks = self._checks[profile].apart_from(together) if together else self._checks[profile]
        for only in (planned,) if at_large else (nominated, None):
            try:
                promises = self._promises(key, uid, shape, checks, only)
                evaluation = evaluator.evaluate(shape, promises)
            except Refusal as refusal:
                return Unplaced(self._refused(refusal, shape, profile, now))
            if opinion is not None:
                evaluation, rejected = with_opinion(evaluation, opinion)
            choice = evaluation
            if node or only is not None:
                choice = evaluation.only(only)
            evaluated = timings.clock()
            found = None
            choices = choice.with_last(avoided) if avoided is not None else (choice,)
            for part in choices:
                found = found or self._choose(evaluator.profile, shape, part, nominated, refusing)
            if found is None:
                if refusing:
                    timings.step(RESERVE, UNSCHEDULABLE, timings.clock() - evaluated)
                continue
            row, allocation = found
            booking = Booking(
                key=key,
                uid=uid,
                shape=booked,
                node=self.tables.nodes.name(row),
                allocation=allocation,
                start=now,
            )
            self.tables.place(booking)
            recorded = self._record(evaluator.profile, shape, booking)
            timings.step(RESERVE, SUCCESS, timings.clock() - evaluated)
            return Placed(booking, recorded, evaluation)
        refusing |= rejected
        diagnosis = diagnose(shape, self.tables, evaluation.masks, refused_rows=refusing)
        sentences = (
            explainer.explain(shape, self.tables, evaluation.masks)
            for explainer in evaluator.profile.explainers
        )
        diagnosis = replace(diagnosis, remarks=tuple(filter(None, sentences)))
        return Unplaced(
            self._advised(
                shape,
                profile,
                diagnosis,
                lambda: nearest(shape, self.tables, evaluation.masks, refused_rows=refusing),
                now,
            )
        )

    def _choose(
        self,
        profile: Profile,
        shape: PodShape,
        choice: Evaluation,
        nominated: int | None,
        refusing: dict[int, tuple[str, Reason]],
    ) -> tuple[int, Allocation] | None:
        """Return the best node that can give the exact allocation, with what it gives.

        nominated: the row that comes first. refusing: takes the rows that cannot, and why.
        """
        preferred = (
            *(() if nominated is None else (nominated,)),
            *(
                row
                for preference in profile.preferences
                for row in preference.preferred(shape, self.tables)
            ),
        )
        while len(refusing) < _MOST_TRIES:
            row = choice.first(preferred, without=refusing)
            if row is None:
                pick = choice.best if len(refusing) < _BEST_TRIES else choice.drawn
                row = pick(self._salt, without=tuple(refusing))
            if row is None:
                return None
            allocation = self._allocate(profile, shape, row)
            if isinstance(allocation, Allocation):
                return row, allocation
            refusing[row] = allocation
        return None

    def may_preempt(self, pod: PendingPod[PodShape]) -> bool:
        """Return whether pods are placed that a pod could make room for itself by evicting."""
        shape = pod.shape
        if self.preempts_for_gangs(pod):
            # The gang makes room for all of its pods when it is refused.
            return False
        return (
            bool(self.post_filters.get(shape.scheduler_name))
            and shape.preemption_policy != "Never"
            and any(other.priority < pod.priority for other in self.tables.matches.shapes())
        )

    def preempts_for_gangs(self, pod: PendingPod[PodShape]) -> bool:
        """Return whether room is made for the gang of a pod as a whole."""
        return bool(pod.gang) and pod.shape.scheduler_name in self._gang_preemption

    def seats(
        self,
        pod: PendingPod[PodShape],
        gangs: Sequence[Wanted[PodShape]],
        being_evicted: Callable[[Booking], bool],
    ) -> tuple[Seat, ...] | NotFound:
        """Return where the members of a group get room by evictions, or why they do not.

        See GangPreemption.find.
        """
        timings = self._evaluators[pod.shape.scheduler_name].timings
        began = timings.clock()
        # A gang that is refused as a whole is not scheduled, which would change it.
        self._salt = (self._salt + _MIX) % 2**64
        found = self._gangs.find(pod, gangs, being_evicted=being_evicted, salt=self._salt)
        status = UNSCHEDULABLE if isinstance(found, NotFound) else SUCCESS
        timings.step(POST_FILTER, status, timings.clock() - began)
        return found

    def examine(self, shape: PodShape, profile: str) -> Evaluation | None:
        """Return every node's verdict now, or None if a plugin refuses the pod by itself.

        Nothing is placed. profile: the scheduler name.
        """
        try:
            return self._evaluators[profile].evaluate_nodes(shape)
        except Refusal:
            return None

    def post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        being_evicted: Callable[[Booking], bool],
        agreed: Proposals | NotFound | None = None,
    ) -> Candidate | NotFound:
        """Return the victims whose eviction makes room for a pod that no node takes, or why none.

        being_evicted: whether a placed pod is the victim of a preemption and not gone yet.
        agreed: what extenders left of `propose`, or its NotFound; None where it was not called.
        """
        timings = self._evaluators[pod.shape.scheduler_name].timings
        began = timings.clock()
        found = self._post_filter(pod, diagnosis, being_evicted, agreed)
        status = SUCCESS if isinstance(found, Candidate) else UNSCHEDULABLE
        timings.step(POST_FILTER, status, timings.clock() - began)
        return found

    def _post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        being_evicted: Callable[[Booking], bool],
        agreed: Proposals | NotFound | None,
    ) -> Candidate | NotFound:
        pod = self.tables.reservations.pod_for(pod)
        remarks = []
        waits = more = False
        # Without any node there is nothing to free.
        profile = pod.shape.scheduler_name if diagnosis.nodes else ""
        for each in self.post_filters.get(profile, ()):
            found: Candidate | NotFound
            if agreed is not None and isinstance(each, Preemption):
                found = (
                    agreed
                    if isinstance(agreed, NotFound)
                    else each.choose(pod, agreed, salt=self._salt)
                )
            else:
                found = each.post_filter(
                    pod, diagnosis, being_evicted=being_evicted, salt=self._salt
                )
            if isinstance(found, Candidate):
                return found
            remarks.append(found.remark)
            waits = waits or found.waits
            more = more or found.more
        return NotFound(" ".join(filter(None, remarks)), waits, more)

    def needs_room(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        being_evicted: Callable[[Booking], bool],
    ) -> NeedsRoom | NotFound:
        """Return what `propose` takes for a pod that no node takes, right after its attempt.

        NotFound: DefaultPreemption evicts no pods for this one, whatever extenders say.
        """
        default = self._default_preemption(pod, diagnosis)
        if default is None:
            return NotFound("")
        mine = self.tables.reservations.pod_for(pod)
        reason = default.why_not(mine, being_evicted)
        if reason is not None:
            return reason
        if diagnosis.refusal or not len(diagnosis.resolvable):
            # There is nothing to search.
            found = default.propose(mine, diagnosis, being_evicted=being_evicted, salt=self._salt)
            if isinstance(found, NotFound):
                return found
        evaluation = self.examine(mine.shape, pod.shape.scheduler_name)
        passed = diagnosis.resolvable[:0] if evaluation is None else evaluation.feasible
        return NeedsRoom.of(pod, diagnosis, passed, self.tables.nodes)

    def propose(
        self, needs: NeedsRoom, being_evicted: Callable[[Booking], bool]
    ) -> Proposals | NotFound:
        """Return the nodes that DefaultPreemption could free for a pod, for extenders to judge, or
        why there is none.

        Where a node passes that did not at the attempt, no pod is evicted: the change that made
        room has the pod tried again.
        """
        nodes, pod = self.tables.nodes, self.tables.reservations.pod_for(needs.pod)
        diagnosis = needs.diagnosis(nodes)
        default = self._default_preemption(pod, diagnosis)
        if default is None:
            return NotFound("")
        evaluation = self.examine(pod.shape, pod.shape.scheduler_name)
        if evaluation is not None and len(np.setdiff1d(evaluation.feasible, needs.passed(nodes))):
            return NotFound(ROOM_BY_NOW)
        return default.propose(pod, diagnosis, being_evicted=being_evicted, salt=self._salt)

    def may_evict(self, pod: PendingPod[PodShape], booking: Booking) -> bool:
        """Return whether DefaultPreemption may evict a placed pod for `pod`."""
        default = self._preemption(pod.shape.scheduler_name)
        return default is not None and may_go(pod, booking, default.victims_for(pod))

    def _default_preemption(
        self, pod: PendingPod[PodShape], diagnosis: Diagnosis
    ) -> Preemption | None:
        # Without any node there is nothing to free.
        return self._preemption(pod.shape.scheduler_name) if diagnosis.nodes else None

    def _preemption(self, profile: str) -> Preemption | None:
        found = self.post_filters.get(profile, ())
        return next((each for each in found if isinstance(each, Preemption)), None)

    def _promises(
        self, key: str, uid: str, shape: PodShape, checks: RowChecks, only: int | None
    ) -> Promises | None:
        """Return what decides about the nodes for which other pods are nominated.

        only: the one row that it is to look at, None for all."""
        if not len(self.nominator):
            return None
        pod = PendingPod(key, uid, shape.priority, shape, created=0.0)
        if only is None:
            return lambda feasible: checks.held_by_nominated(pod, feasible)
        return lambda feasible: checks.held_by_nominated(pod, feasible[feasible == only])

    def _advised(
        self,
        shape: PodShape,
        profile: str,
        diagnosis: Diagnosis,
        work: Callable[[], Counterfactuals],
        now: float,
    ) -> Diagnosis:
        version = self.tables.nodes.version
        return self._advisor.advise((profile, shape), diagnosis, work, version=version, now=now)

    def _refused(self, refusal: Refusal, shape: PodShape, profile: str, now: float) -> Diagnosis:
        diagnosis = refused(refusal, self.tables)
        return self._advised(
            shape, profile, diagnosis, lambda: self._but_for(refusal, shape, profile), now
        )

    def _but_for(self, refusal: Refusal, shape: PodShape, profile: str) -> Counterfactuals:
        """Return how many nodes would take the pod without the plugin that refused it."""
        if refusal.plugin in (Unsupported().name, NodeAffinity().name):
            # What the pod asks for beyond the filters is not known here, and nodes that the pod's
            # own terms exclude would stay excluded.
            return NONE
        try:
            feasible = self._evaluators[profile].evaluate_nodes(shape).feasible
        except Refusal:
            return NONE
        return but_for(refusal.plugin, str(refusal), self.tables, feasible)

    def _allocate(
        self, profile: Profile, shape: PodShape, row: int
    ) -> Allocation | tuple[str, Reason]:
        allocation = NO_ALLOCATION
        for allocator in profile.allocators:
            if allocator.applies(shape, self.tables):
                given = allocator.allocate(shape, self.tables, row, allocation)
                if isinstance(given, Reason):
                    return allocator.name, given
                allocation = given
        return allocation

    def _record(self, profile: Profile, shape: PodShape, booking: Booking) -> Recorded:
        """Return what all allocators record; a later one wins where two name one key."""
        annotations: dict[str, str | None] = {}
        labels: dict[str, str | None] = {}
        lock = ""
        for allocator in profile.allocators:
            if allocator.applies(shape, self.tables):
                recorded = allocator.record(booking, self.tables)
                annotations |= recorded.annotations
                labels |= recorded.labels
                lock = recorded.lock or lock
        return Recorded(annotations, labels, lock)
