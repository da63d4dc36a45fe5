"""From the queue to a binding: one attempt for each pod, and what follows from it.

A pod that is placed is bound at once, or waits on its node for the other members of its gang. What
is taken back (a member whose gang was rejected, a binding that the API server refused) leaves the
tables, and the queue learns which room became free. For a pod that no node takes, room may be made
by evicting others (`preemptions`). What users see of all this is written by `reports`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from apis.decode import canonical_json
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.auditing.permit import AuditedPermit
from cluster.scheduler.binding.events import scheduled
from cluster.scheduler.binding.placement import Bound, Outcome, Placement, Why
from cluster.scheduler.binding.reservations import ReservationPlacement, TakenPod
from cluster.scheduler.binding.statuses import (
    SCHEDULER_ERROR,
    SCHEDULING_GATED,
    UNSCHEDULABLE,
)
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.cycle.gang_plans import GangPlans, PlanOutdated
from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.cycle.permit import Decisions, Permit
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Decision, Placed, Scheduling, Unplaced
from cluster.scheduler.cycle.timings import PERMIT, SUCCESS, WAIT
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.evictions import Evictions, EvictionWriters
from cluster.scheduler.metrics import SchedulerMetrics, Tried
from cluster.scheduler.placements import of_pod, of_reservation, reference_of
from cluster.scheduler.preemptions import PreemptionConsultant, Preemptions
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.reports import Reports, ReportWriters
from cluster.scheduler.sources.reserve_pods import ReservePod
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from kube.faults import Faults

_log = logging.getLogger(__name__)

_NOBODY: Final[Mapping[str, str]] = MappingProxyType({})
_NO_RESERVATIONS: Final[Mapping[str, ReservePod]] = MappingProxyType({})


class Writers(EvictionWriters, ReportWriters, Protocol):
    """What carries decisions to the API server. Its methods return at once."""

    def bind(self, placement: Placement) -> None: ...

    def reserve(self, placement: ReservationPlacement) -> None:
        """As `bind`, for a Reservation."""
        ...

    def settled(self, placement: Placement | ReservationPlacement) -> None:
        """A pod is bound: nothing about it waits any more."""
        ...


class Consultant(PreemptionConsultant, Protocol):
    """Extenders. They are asked in the background."""

    def concerns(self, pod: PodShape) -> bool:
        """Return whether extenders are asked about the nodes of a pod."""
        ...

    def binds(self, pod: PodShape) -> bool:
        """Return whether an extender binds a pod."""
        ...

    def ask(self, pod: PendingPod[PodShape]) -> None:
        """Ask about a pod in the background.

        `Attempts.candidates` names the nodes to ask about; `Attempts.consulted` takes the answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """A pod that has a node and is not bound yet.

    tried: how its attempt came to be, for metrics. submitted: its binding is under way.
    """

    pod: PendingPod[PodShape]
    decision: Decision
    tried: Tried
    submitted: bool


class Attempts:
    """Schedules the pods of the queue, one call for each."""

    def __init__(
        self,
        scheduling: Scheduling,
        queue: SchedulingQueue[PodShape],
        permit: Permit[PodShape],
        metrics: SchedulerMetrics,
        writers: Writers,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] | None = None,
        pod_of: Callable[[str], SchedulingPod | None],
        reserve_pods: Mapping[str, ReservePod] = _NO_RESERVATIONS,
        network: NetworkTopology | None = None,
        resizes: bool = False,
        audit: AuditedPermit | None = None,
    ) -> None:
        """clock: seconds on a clock that never jumps. wall: seconds since 1970, for what is shown;
        None: `clock`. pod_of: namespace/name -> the pod as last seen.
        reserve_pods: by UID; what is decided about such a pod is written to its Reservation.
        network: the one in which gangs are gathered. resizes: a Reservation also keeps what its
        devices have, under the names that devices have it. audit: is told of preemptions."""
        self._scheduling = scheduling
        self._plans = GangPlans(
            scheduling.tables,
            scheduling.checks,
            scheduling.evaluate,
            network,
            admit=scheduling.admit,
            examine=scheduling.examine,
            node_of=scheduling.nominator.node_of,
            may_preempt=scheduling.may_preempt,
        )
        self._tables = scheduling.tables
        self._queue = queue
        self._permit = permit
        self._metrics = metrics
        self._writers = writers
        self._clock = clock
        self._wall = wall or clock
        self._pod_of = pod_of
        self._reserve_pods = reserve_pods
        self._resizes = resizes
        self._held: dict[str, _Held] = {}
        self._asked: dict[str, PendingPod[PodShape]] = {}
        """Pods that extenders are asked about, by UID."""
        self._locked: dict[str, str] = {}
        """UID -> the node whose lock another pod kept, so that the pod was not bound there. Its
        next attempt takes another node if there is one: a node whose device plugin hangs keeps its
        devices free, so it stays the best one for each pod in turn."""
        self.consultant: Consultant | None = None
        self.look_again: Callable[[SchedulingPod], None] = lambda pod: None
        """Takes a pod that had a booking when it was last seen, and has none now."""
        self.faults = Faults("scheduler")
        self.explanations = Explanations()
        self.reports = Reports(
            queue,
            self.explanations,
            writers,
            wall=self._wall,
            pod_of=pod_of,
            reserve_pods=reserve_pods,
        )
        self.evictions = Evictions(
            scheduling,
            queue,
            writers,
            clock=clock,
            take_back=self._preempt_waiting,
            reference=self.reports.reference,
            audit=audit,
        )
        self.preemptions = Preemptions(
            scheduling,
            queue,
            permit,
            metrics,
            attempts=self,
            evictions=self.evictions,
            reports=self.reports,
            explanations=self.explanations,
            faults=self.faults,
            consultant=lambda: self.consultant,
            clock=clock,
            wall=self._wall,
            audit=audit,
        )

    def waits_on(self, uid: str) -> str:
        """Return the node that a pod has although it is not known to be bound, or ""."""
        held = self._held.get(uid)
        return "" if held is None else held.decision.booking.node

    def profile_of(self, uid: str) -> str:
        """Return the scheduler name of a pod that has a node and is not bound yet, or ""."""
        held = self._held.get(uid)
        return "" if held is None else held.pod.shape.scheduler_name

    @property
    def held(self) -> int:
        """How many pods have a node and are not known to be bound."""
        return len(self._held)

    def next(self, now: float) -> bool:
        """Try the next pod; return whether there was one.

        A fault is counted and logged, and ends nothing but the step that it is in.
        """
        with self._surviving("ending the waits of gangs"):
            self.follow(self._permit.expire(now))
        pod: PendingPod[PodShape] | None = None
        with self._surviving("taking a pod from the queue"):
            pod = self._permit.pop(now)
        if pod is None:
            with self._surviving("reporting gated pods"):
                self._report_gated()
            return False
        with self._surviving("giving a pod up", about=pod.key):
            try:
                self._attempt(pod, now)
            except Exception as error:  # noqa: BLE001 - one pod must not end all scheduling
                self.faults.note("scheduling a pod", about=pod.key)
                self.failed(pod, f"{type(error).__name__}: {error}", now)
        return True

    @contextmanager
    def _surviving(self, doing: str, *, about: str = "") -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - as in `next`
            self.faults.note(doing, about=about)

    def _attempt(self, pod: PendingPod[PodShape], now: float) -> None:
        if self.consultant is not None and self.consultant.concerns(pod.shape):
            self._asked[pod.uid] = pod
            self.consultant.ask(pod)
        else:
            self._conclude(pod, None, now)

    def candidates(self, uid: str) -> tuple[str, ...] | None:
        """Return the nodes that plugins pass for a pod that extenders are asked about.

        None: it is not waited for any more.
        """
        pod = self._asked.get(uid)
        if pod is None:
            return None
        return self._scheduling.feasible_nodes(pod)

    def consulted(self, uid: str, opinion: Opinion | None, error: str = "") -> None:
        """Take what extenders say about a pod, or why they could not be asked."""
        pod = self._asked.pop(uid, None)
        if pod is None or self._queue.state_of(uid) is not QueueState.IN_FLIGHT:
            return
        now = self._clock()
        if error:
            self.failed(pod, error, now)
            return
        try:
            self._conclude(pod, opinion, now)
        except Exception as problem:  # noqa: BLE001 - as in `next`
            self.faults.note("scheduling a pod", about=pod.key)
            self.failed(pod, f"{type(problem).__name__}: {problem}", now)

    def _conclude(self, pod: PendingPod[PodShape], opinion: Opinion | None, now: float) -> None:
        profile = pod.shape.scheduler_name
        began = time.perf_counter()
        try:
            outcome = self._decide(pod, opinion)
        except PlanOutdated as outdated:
            self.abandon(pod, str(outdated), now)
            return
        self._metrics.decided(outcome, profile, time.perf_counter() - began)
        if isinstance(outcome, Unplaced):
            self.preemptions.unplaced(pod, outcome.diagnosis, now)
            return
        if self._scheduling.nominator.node_of(pod.uid) not in ("", outcome.booking.node):
            self.evictions.end_nomination(pod.uid)
        decision = Decision(outcome.booking, outcome.recorded)
        tried = Tried(*self._queue.tries(pod.uid), began)
        self._held[pod.uid] = _Held(pod, decision, tried, submitted=False)
        node = outcome.booking.node
        self.explanations.placed(pod.key, pod.uid, outcome.evaluation, node, at=self._wall())
        permitting = time.perf_counter()
        decisions = self._permit.placed(pod.uid, now)
        status = WAIT if pod.gang and not decisions else SUCCESS
        timings = self._scheduling.timings(profile)
        timings.step(PERMIT, status, time.perf_counter() - permitting)
        self.follow(decisions)

    def _decide(self, pod: PendingPod[PodShape], opinion: Opinion | None) -> Placed | Unplaced:
        node = ""
        if pod.gang:
            # A gang that is known not to fit takes no node from others, not even for a moment.
            planned = self._plans.node_for(pod, self._permit.wanted(pod.uid))
            if isinstance(planned, Diagnosis):
                return Unplaced(planned)
            node = planned
        began = time.perf_counter()
        outcome = self._scheduling.schedule(
            key=pod.key,
            uid=pod.uid,
            shape=pod.shape,
            profile=pod.shape.scheduler_name,
            now=self._wall(),
            opinion=opinion,
            node=node,
            together=self._permit.group(pod.uid) if node else frozenset(),
            avoid=self._locked.pop(pod.uid, ""),
        )
        if node:
            self._metrics.planned.labels().observe(time.perf_counter() - began)
        refused_here = isinstance(outcome, Unplaced) and not outcome.diagnosis.refusal
        if node and opinion is None and refused_here:
            # What is no matter of nodes, such as a full quota, would refuse the next plan as well.
            raise PlanOutdated(f"node {node}, planned for the pod, does not take it any more")
        return outcome

    def in_memory(self, uid: str) -> bytes | None:
        """Return the JSON of the reserve pod of a Reservation, which no API server has."""
        reserve_pod = self._reserve_pods.get(uid)
        return None if reserve_pod is None else canonical_json(reserve_pod.pod).encode()

    def _preempt_waiting(self, uid: str, why: str) -> bool:
        """Have a victim give the node back on which it waits. Returns whether it waited."""
        held = self._held.get(uid)
        if held is None or held.submitted:
            return False
        self.abandon(held.pod, why, self._clock(), reason=UNSCHEDULABLE)
        return True

    # --- what follows --------------------------------------------------------------------------

    def follow(self, decisions: Decisions, nominated: Mapping[str, str] = _NOBODY) -> None:
        """Carry out what an input means for gangs. nominated: UID -> node, where that changed."""
        for decision in decisions:
            for uid in decision.allow:
                held = self._held.get(uid)
                if held is not None and not held.submitted:
                    self._submit(held, decision.annotations)
            for uid in decision.give_back:
                held = self._held.pop(uid, None)
                if held is not None:
                    self._free(held.pod, undoes=decision.undoes, gangs=decision.gangs)
            uids = (*decision.give_back, *decision.held_up)
            self.reports.held_up(uids, decision.message, nominated)

    def seen_bound(self, uid: str) -> None:
        """Give up the attempt on a pod that another program bound, while it waited on its node.

        Its booking is that of the node which the API server shows. A binding under way goes on.
        """
        self._asked.pop(uid, None)
        self._locked.pop(uid, None)
        held = self._held.get(uid)
        if held is not None and not held.submitted:
            del self._held[uid]

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone, being deleted or not ours any more; free the node it waits on.

        A binding under way goes on, and `bound` takes its outcome.
        """
        self._asked.pop(uid, None)
        self._locked.pop(uid, None)
        self.preemptions.forget(uid)
        held = self._held.pop(uid, None)
        if held is not None and not held.submitted:
            self._free(held.pod)
        self.evictions.gone(uid)

    def _submit(self, held: _Held, gang: Mapping[str, str | None]) -> None:
        pod, decision = held.pod, held.decision
        annotations = {**decision.recorded.annotations, **gang}
        self._held[pod.uid] = _Held(pod, decision, held.tried, submitted=True)
        reserve_pod = self._reserve_pods.get(pod.uid)
        if reserve_pod is not None:
            takes = self._pods(decision.booking.allocation.takes)
            self._writers.reserve(
                of_reservation(reserve_pod, decision, annotations, takes, resizes=self._resizes)
            )
        else:
            delegated = self.consultant is not None and self.consultant.binds(pod.shape)
            self._writers.bind(of_pod(pod, decision, annotations, delegated=delegated))

    def bound(self, placement: Placement | ReservationPlacement, outcome: Outcome) -> None:
        """Take the outcome of a binding."""
        held = self._held.pop(placement.uid, None)
        if held is None:
            # The watch has shown that the pod is bound or gone, or it was forgotten.
            if isinstance(outcome, Bound):
                self._writers.settled(placement)
            else:
                self._free_forgotten(placement)
            return
        pod, now = held.pod, self._clock()
        self._metrics.bound(outcome, pod, held.tried, now, time.perf_counter())
        if isinstance(outcome, Bound):
            about = reference_of(placement)
            controller = pod.shape.scheduler_name
            self._writers.event(scheduled(about, placement.node, controller=controller))
            self._writers.settled(placement)
            self.evictions.bound(placement.uid)
            self.follow(self._permit.bound(placement.uid, now))
        elif outcome.why in (Why.DELETED, Why.OTHER_UID):
            self._free(pod)
            self.follow(self._permit.gone(placement.uid, now))
        elif self._queue.state_of(placement.uid) is QueueState.IN_FLIGHT:
            _log.warning("%s", outcome.message)
            if outcome.why is Why.LOCKED:
                self._locked[pod.uid] = placement.node
            self.abandon(pod, outcome.message, now)

    def failed(self, pod: PendingPod[PodShape], message: str, now: float) -> None:
        """Count an attempt that ended with an error before its binding, and give it up."""
        self._metrics.attempts.labels("error", pod.shape.scheduler_name).inc()
        self.abandon(pod, message, now)

    def abandon(
        self,
        pod: PendingPod[PodShape],
        message: str,
        now: float,
        *,
        reason: str = SCHEDULER_ERROR,
    ) -> None:
        """Give an attempt up because of an error; the pod is tried again after its back-off."""
        self._held.pop(pod.uid, None)
        self._free(pod, undoes=self._queue.order(pod.uid))
        decisions = self._permit.failed(pod.uid, message, now)
        # The status with the nomination was dropped if it waited still before the binding.
        nominated = self._scheduling.nominator.node_of(pod.uid)
        self.reports.report(pod.key, pod.uid, reason, message, nominated)
        self.follow(decisions)

    def _free_forgotten(self, placement: Placement | ReservationPlacement) -> None:
        """Free the node of a pod that was forgotten during its binding and was not bound.

        A pod that is being deleted may stay for long, for a finalizer, and never shows a node. A
        pod that was given to another scheduler may be ours again.
        """
        if isinstance(placement, ReservationPlacement):
            known = self._reserve_pods.get(placement.uid)
            pod = None if known is None else known.pod
        else:
            pod = self._pod_of(placement.key)
        if pod is None or pod.metadata.uid != placement.uid or pod.spec.node_name:
            return
        if self._tables.remove(placement.uid) is not None:
            self._queue.cluster_event(ClusterEvent(POD, Action.DELETE, old=pod), self._clock())
            self.look_again(pod)

    def _free(
        self, pod: PendingPod[PodShape], *, undoes: int = 0, gangs: tuple[str, ...] = ()
    ) -> None:
        """Take a placement out of the tables, and have pods tried that its room may help."""
        if self._tables.remove(pod.uid) is not None:
            event = ClusterEvent(POD, Action.DELETE, old=pod, undoes=undoes, gangs=gangs)
            self._queue.cluster_event(event, self._clock())

    def _pods(self, uids: Iterable[str]) -> tuple[TakenPod, ...]:
        """Return the names of pods that have a booking."""
        found = ((uid, self._tables.bookings.get(uid)) for uid in uids)
        names = ((uid, *each.key.split("/", 1)) for uid, each in found if each is not None)
        return tuple(TakenPod(namespace, name, uid) for uid, namespace, name in names)

    def _report_gated(self) -> None:
        for gated in self._queue.take_gated():
            # It may wait for long, and its room would stay unused.
            ended = self.evictions.end_nomination(gated.pod.uid)
            # The API server itself writes the condition of pods with scheduling gates, and none of
            # Reservations.
            if gated.plugin != "SchedulingGates" or gated.pod.uid in self._reserve_pods:
                pod, nominated = gated.pod, "" if ended else None
                self.reports.report(pod.key, pod.uid, SCHEDULING_GATED, gated.reason, nominated)
