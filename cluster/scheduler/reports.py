"""What users see of attempts: conditions and events of pods, messages of Reservations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from apis.meta import ObjectReference
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding.events import Event, failed, pod_reference, reservation_reference
from cluster.scheduler.binding.reservation_writer import ReservationRefusal
from cluster.scheduler.binding.statuses import SCHEDULING_GATED, UNSCHEDULABLE, PodStatus, Shown
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.sources.reserve_pods import ReservePod
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape


class ReportWriters(Protocol):
    """Where reports go. All of it happens in the background."""

    def status(self, status: PodStatus, shown: Shown) -> None: ...

    def event(self, event: Event) -> None: ...

    def refuse_reservation(self, refusal: ReservationRefusal) -> None:
        """As `status`, for a Reservation."""
        ...


class Reports:
    """Writes why pods wait, to the pods themselves or to the Reservations they stand for."""

    def __init__(
        self,
        queue: SchedulingQueue[PodShape],
        explanations: Explanations,
        writers: ReportWriters,
        *,
        wall: Callable[[], float],
        pod_of: Callable[[str], SchedulingPod | None],
        reserve_pods: Mapping[str, ReservePod],
    ) -> None:
        """wall, pod_of, reserve_pods: see Attempts."""
        self._queue = queue
        self._explanations = explanations
        self._writers = writers
        self._wall = wall
        self._pod_of = pod_of
        self._reserve_pods = reserve_pods

    def reference(self, pod: PendingPod[PodShape]) -> ObjectReference:
        """Return a reference to the object that a pod stands for, for events."""
        reserve_pod = self._reserve_pods.get(pod.uid)
        if reserve_pod is not None:
            return reservation_reference(reserve_pod.name, pod.uid)
        namespace, _, name = pod.key.partition("/")
        return pod_reference(namespace, name, pod.uid)

    def held_up(self, uids: Iterable[str], message: str, nominated: Mapping[str, str]) -> None:
        """Say why pods wait that were not refused themselves. nominated: UID -> new node."""
        for uid in uids:
            key = self._queue.key(uid)
            if key is not None:
                self._explanations.held_up(key, uid, message, at=self._wall())
                self.report(key, uid, UNSCHEDULABLE, message, nominated.get(uid))

    def refuse_reservation(self, reserve_pod: ReservePod, message: str) -> None:
        """Say why a Reservation is not scheduled at all."""
        self.report(reserve_pod.pod.metadata.name, reserve_pod.uid, UNSCHEDULABLE, message)

    def nomination_ended(self, pod: PendingPod[PodShape]) -> None:
        """Show that a pod's nomination has ended, and nothing else about it."""
        known = self._pod_of(pod.key)
        if known is not None and known.metadata.uid == pod.uid:
            said = shown(known)
            reason, message = said.reason or UNSCHEDULABLE, said.message
            explained = self._explanations.get(pod.key)
            if explained is not None and explained.uid == pod.uid and explained.message:
                # The status that says so may wait still, and this one takes its place.
                reason, message = UNSCHEDULABLE, explained.message
            namespace, _, name = pod.key.partition("/")
            generation = known.metadata.generation
            status = PodStatus(namespace, name, pod.uid, reason, message, "", generation)
            self._writers.status(status, said)

    def report(
        self, key: str, uid: str, reason: str, message: str, nominated: str | None = None
    ) -> None:
        """Say why a pod has no node. key: namespace/name. nominated: its node now, if changed."""
        reserve_pod = self._reserve_pods.get(uid)
        if reserve_pod is not None:
            refusal = ReservationRefusal(reserve_pod.name, uid, message)
            self._writers.refuse_reservation(refusal)
            about = reservation_reference(reserve_pod.name, uid)
            controller = reserve_pod.pod.spec.scheduler_name
        else:
            pod = self._pod_of(key)
            if pod is None or pod.metadata.uid != uid:
                return
            namespace, _, name = key.partition("/")
            generation = pod.metadata.generation
            status = PodStatus(namespace, name, uid, reason, message, nominated, generation)
            self._writers.status(status, shown(pod))
            about = pod_reference(namespace, name, uid)
            controller = pod.spec.scheduler_name
        if reason != SCHEDULING_GATED:
            self._writers.event(failed(about, message, controller=controller))


def shown(pod: SchedulingPod) -> Shown:
    """Return what the API server shows about the scheduling of a pod."""
    nominated = pod.status.nominated_node_name
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled":
            return Shown(condition.status, condition.reason, condition.message, nominated)
    return Shown(nominated_node=nominated)
