"""Makes room for pods that no node takes: chooses whom to evict, and asks extenders about it.

A pod of a gang has room made for its whole gang at once, where `enablePreemption` of Coscheduling
is set. What was chosen is carried out by `evictions`; the pod goes back to the queue either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from cluster.scheduler.auditing.permit import AuditedPermit
from cluster.scheduler.binding.placement import Refused
from cluster.scheduler.binding.statuses import UNSCHEDULABLE
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.cycle.futile_searches import FutileSearches
from cluster.scheduler.cycle.permit import Decisions, Permit, Wanted
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.proposals import NeedsRoom, Proposals
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.seating import Seat
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.evictions import Evictions
from cluster.scheduler.metrics import SchedulerMetrics
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.reports import Reports
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from kube.faults import Faults

_NO_NODES: Final = frozenset({"NoNodes"})
"""Stands for a plugin where there is no node that one could hold back."""
_AS_A_WHOLE: Final = NotFound(
    "preemption: not eligible due to other members of the gang without a node."
)
"""Pods that are evicted for one member are evicted for nothing if the others find no node. With
`enablePreemption` of Coscheduling, room is made for the gang as a whole."""


class PreemptionConsultant(Protocol):
    """Extenders that are asked about preemptions. They are asked in the background."""

    def preempts(self, pod: PodShape) -> bool:
        """Return whether extenders are asked which pods are evicted for a pod."""
        ...

    def ask_victims(self, pod: PendingPod[PodShape]) -> None:
        """Ask about a preemption: take what is `proposed`, and give the answer to `agreed`."""
        ...


class AttemptEnds(Protocol):
    """How attempts end: see `Attempts`."""

    def follow(self, decisions: Decisions, nominated: Mapping[str, str] = ...) -> None: ...

    def abandon(
        self, pod: PendingPod[PodShape], message: str, now: float, *, reason: str = ...
    ) -> None: ...

    def failed(self, pod: PendingPod[PodShape], message: str, now: float) -> None: ...


class Preemptions:
    """Takes back the pods that no node takes, with room made for them where that helps."""

    def __init__(
        self,
        scheduling: Scheduling,
        queue: SchedulingQueue[PodShape],
        permit: Permit[PodShape],
        metrics: SchedulerMetrics,
        *,
        attempts: AttemptEnds,
        evictions: Evictions,
        reports: Reports,
        explanations: Explanations,
        faults: Faults,
        consultant: Callable[[], PreemptionConsultant | None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        audit: AuditedPermit | None = None,
    ) -> None:
        """consultant: returns the extenders to ask at that moment, if any. clock, wall, audit: see
        Attempts."""
        self._scheduling = scheduling
        self._queue = queue
        self._permit = permit
        self._metrics = metrics
        self._attempts = attempts
        self._evictions = evictions
        self._reports = reports
        self._explanations = explanations
        self._faults = faults
        self._consultant = consultant
        self._clock = clock
        self._wall = wall
        self._audit = audit
        self._futile = FutileSearches()
        self._needing: dict[str, NeedsRoom] = {}
        """Pods for which extenders are asked about evictions, by UID."""

    def forget(self, uid: str) -> None:
        """Ignore what extenders will say about a pod that is gone."""
        self._needing.pop(uid, None)

    def unplaced(self, pod: PendingPod[PodShape], diagnosis: Diagnosis, now: float) -> None:
        """Take back a pod that no node takes, and make room for it where that helps."""
        if self._scheduling.preempts_for_gangs(pod) and ELASTIC_QUOTA not in diagnosis.plugins:
            self._unplaced_member(pod, diagnosis, now)
            return
        found: Candidate | NotFound = _AS_A_WHOLE
        if not self._permit.needs_others(pod.uid):
            if self._scheduling.post_filters.get(pod.shape.scheduler_name):
                self._metrics.preemptions.labels().inc()
            asked = self._ask(pod, diagnosis)
            if isinstance(asked, NeedsRoom):
                return
            found = self._scheduling.post_filter(
                pod, diagnosis, self._evictions.being_evicted, agreed=asked
            )
        self._make_room(pod, diagnosis, found, now)

    def _ask(self, pod: PendingPod[PodShape], diagnosis: Diagnosis) -> NeedsRoom | NotFound | None:
        """Have extenders asked about a preemption.

        Returns what they are asked about, or why it would not help; None for a pod that they are
        not asked about.
        """
        consultant = self._consultant()
        if consultant is None or not consultant.preempts(pod.shape):
            return None
        needs = self._scheduling.needs_room(pod, diagnosis, self._evictions.being_evicted)
        if isinstance(needs, NeedsRoom):
            self._needing[pod.uid] = needs
            consultant.ask_victims(pod)
        return needs

    def proposed(self, uid: str) -> Proposals | None:
        """Return the nodes that could be freed for a pod now.

        None: it is not waited for any more, or no node could be freed and it was taken back.
        """
        needs = self._needing.get(uid)
        if needs is None:
            return None
        nodes = self._scheduling.propose(needs, self._evictions.being_evicted)
        if not isinstance(nodes, NotFound):
            return nodes
        self._end(uid, nodes)
        return None

    def may_evict(self, uid: str, node: str, victim: str) -> str:
        """Return namespace/name of a pod that may be evicted from a node for another pod.

        uid: of the pod that needs room. victim: UID of the pod to evict; "" is returned for one
        that is not on the node, or that the other may not evict.
        """
        needs, row = self._needing.get(uid), self._scheduling.tables.nodes.row(node)
        found = None if row is None else self._scheduling.tables.on(row).get(victim)
        if needs is None or found is None or not self._scheduling.may_evict(needs.pod, found):
            return ""
        return found.key

    def agreed(self, uid: str, nodes: Proposals | None, error: str = "") -> None:
        """Take which preemptions extenders agree to, or why they could not be asked."""
        if nodes is not None:
            self._end(uid, nodes)
            return
        needs = self._needing.pop(uid, None)
        if needs is None or self._queue.state_of(uid) is not QueueState.IN_FLIGHT:
            return
        diagnosis = needs.diagnosis(self._scheduling.tables.nodes)
        message = f"{diagnosis.text} preemption: {error}"
        self._attempts.abandon(needs.pod, message, self._clock(), reason=UNSCHEDULABLE)

    def _end(self, uid: str, nodes: Proposals | NotFound) -> None:
        """End the attempt on a pod. nodes: what extenders agree to, or why they are not asked."""
        needs = self._needing.pop(uid, None)
        if needs is None or self._queue.state_of(uid) is not QueueState.IN_FLIGHT:
            return
        pod, now = needs.pod, self._clock()
        diagnosis = needs.diagnosis(self._scheduling.tables.nodes)
        try:
            found: Candidate | NotFound = NotFound("")
            if not self._edited(pod) and not self._permit.needs_others(uid):
                found = self._scheduling.post_filter(
                    pod, diagnosis, self._evictions.being_evicted, agreed=nodes
                )
            self._make_room(pod, diagnosis, found, now)
        except Exception as problem:  # noqa: BLE001 - as in `next`
            self._faults.note("making room for a pod", about=pod.key)
            self._attempts.failed(pod, f"{type(problem).__name__}: {problem}", now)

    def _edited(self, pod: PendingPod[PodShape]) -> bool:
        """Return whether a pod was edited since it was tried. It is tried again, as it is now."""
        now = self._queue.pod(pod.uid)
        return now is None or (now.shape, now.priority) != (pod.shape, pod.priority)

    def _make_room(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        found: Candidate | NotFound,
        now: float,
    ) -> None:
        """Take back a pod that no node takes. found: whom to evict for it, or why no pod is."""
        plugins = diagnosis.plugins or _NO_NODES
        nominated: str | None = None
        if isinstance(found, Candidate):
            nominated = self._scheduling.tables.nodes.name(found.row)
            self._metrics.preempts(len(found.victims))
            for other in self._evictions.carry_out(pod, found):
                self._reports.nomination_ended(other)
        else:
            if found.remark:
                diagnosis = replace(diagnosis, remarks=(*diagnosis.remarks, found.remark))
            if not found.waits and self._evictions.end_nomination(pod.uid):
                nominated = ""
        self._tell(pod.uid, found if isinstance(found, NotFound) else (found,))
        message = diagnosis.text
        self._explanations.refused(pod.key, pod.uid, diagnosis, at=self._wall())
        if isinstance(found, Candidate) or found.waits:
            decisions = self._permit.refused_alone(pod.uid, plugins, now)
        else:
            decisions = self._permit.refused(pod.uid, plugins, message, now)
        self._reports.report(pod.key, pod.uid, UNSCHEDULABLE, message, nominated)
        self._attempts.follow(decisions)
        if isinstance(found, NotFound) and found.more:
            self._permit.put_off(pod.uid, now)

    def _unplaced_member(self, pod: PendingPod[PodShape], diagnosis: Diagnosis, now: float) -> None:
        """Take back the gang of a pod that no node takes, and make room for all of it at once.

        All members give back what they have, and wait until their victims are gone.
        """
        gangs = self._permit.unbound(pod.uid)
        pods = {member.uid: member for each in gangs for member in each.pods}
        as_of = self._queue.changes, pods
        resting = self._futile.resting(pod.gang, pod.uid, self._clock())
        found = self._search(pod, gangs, as_of) if resting is None else resting.found
        nominated: dict[str, str] = {}
        without = set(pods)
        if isinstance(found, NotFound):
            diagnosis = replace(diagnosis, remarks=(*diagnosis.remarks, found.remark))
            if found.waits:
                without.clear()
        else:
            without -= {seat.pod.uid for seat in found}
            self._metrics.preempts(sum(len(seat.candidate.victims) for seat in found))
            for seat in found:
                nominated[seat.pod.uid] = self._scheduling.tables.nodes.name(seat.candidate.row)
                for other in self._evictions.carry_out(seat.pod, seat.candidate):
                    self._reports.nomination_ended(other)
        for uid in sorted(without):
            if self._evictions.end_nomination(uid):
                nominated[uid] = ""
        if resting is None:
            self._tell(
                pod.uid,
                found if isinstance(found, NotFound) else [seat.candidate for seat in found],
            )
        message = diagnosis.text
        self._explanations.refused(pod.key, pod.uid, diagnosis, at=self._wall())
        plugins = diagnosis.plugins or _NO_NODES
        decisions = self._permit.refused(pod.uid, plugins, message, now)
        self._reports.report(pod.key, pod.uid, UNSCHEDULABLE, message, nominated.pop(pod.uid, None))
        self._attempts.follow(decisions, nominated)
        reported = {uid for each in decisions for uid in (*each.give_back, *each.held_up)}
        # In a gang that is not strict, the others are not refused with this one.
        others = {uid: node for uid, node in nominated.items() if uid not in reported}
        self._reports.held_up(others, message, others)
        if resting is not None and resting.as_of != as_of:
            # What changed since may have made room: it is looked for after the rest.
            self._permit.put_off(pod.uid, now)

    def _search(
        self, pod: PendingPod[PodShape], gangs: Sequence[Wanted[PodShape]], as_of: object
    ) -> tuple[Seat, ...] | NotFound:
        """Look for room for the gangs of a pod. as_of: equal as long as nothing changed."""
        self._metrics.preemptions.labels().inc()
        began = self._clock()
        found = self._scheduling.seats(pod, gangs, self._evictions.being_evicted)
        if isinstance(found, NotFound):
            ended = self._clock()
            self._futile.searched(pod.gang, found, by=pod.uid, as_of=as_of, began=began, now=ended)
        return found

    def _tell(self, uid: str, found: Iterable[Candidate] | NotFound) -> None:
        """Tell the auditor, if there is one, of the preemptions for a pod or its gang."""
        if self._audit is None:
            return
        if isinstance(found, NotFound):
            self._audit.not_preempted(uid, found)
            return
        bookings = self._scheduling.tables.bookings
        victims = (victim.uid for each in found for victim in each.victims)
        self._audit.preempted(uid, [victim for victim in victims if victim in bookings])

    def evicted(self, victim: Victim, refused: Refused | None) -> None:
        """Take the outcome of an eviction: None, or why the victim stays."""
        pod = self._evictions.evicted(victim.uid, refused)
        if pod is not None:
            # Tried at once, it would choose the same victim again.
            self._permit.put_off(pod.uid, self._clock())
            if self._evictions.end_nomination(pod.uid, not_for=pod.shape):
                self._reports.nomination_ended(pod)
