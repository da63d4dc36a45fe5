"""Changes of nodes and pods into the tables and the queue.

Each object is parsed once. An object that fails is logged with its name and left as it was; no
other object is affected. An event that shows a pod without a node while its binding is under way is
older than the decision: the queue takes an edit over, and the booking stays in force. One that
comes after the answer to the Binding is older than that, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Final

from apis.core import is_terminated
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_INITIALIZED,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_POD_SCHEDULED,
)
from apis.meta import LabelSelector, unix_seconds
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.cycle.events import NODE, POD, RESERVATION, Action, ClusterEvent
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.permit import Decisions, Permit
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.sources.bookings import booking_of
from cluster.scheduler.sources.complaints import Complaints
from cluster.scheduler.sources.gangs import GangSource
from cluster.scheduler.sources.operating_pods import OperatingPods
from cluster.scheduler.sources.quotas import QuotaSource
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from kube.cache import Change, Event, object_key

_ESTIMATES: Final = (
    ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_POD_SCHEDULED,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_INITIALIZED,
)


class ClusterSource:
    """Takes the events of the caches of pods and nodes."""

    def __init__(
        self,
        tables: Tables,
        queue: SchedulingQueue[PodShape],
        permit: Permit[PodShape],
        gangs: GangSource,
        *,
        scheduler_names: Container[str],
        clock: Callable[[], float],
        follow: Callable[[Decisions], None],
        forget: Callable[[str], None],
        seen_bound: Callable[[str], None] = lambda uid: None,
        nominator: Nominator[PodShape],
        spread_by: Callable[[SchedulingPod], LabelSelector | None] = lambda pod: None,
        quotas: QuotaSource | None = None,
        other_nominations: bool = False,
        estimation_problems: Callable[[SchedulingPod, PodShape], Sequence[InputError]] = (
            lambda pod, shape: ()
        ),
        named: Callable[[SchedulingPod], str] = lambda pod: pod.ref,
    ) -> None:
        """scheduler_names: of the profiles. clock: seconds, as the queue counts them. follow:
        carries out what a change means for gangs. forget: called with the UID of a pod that is
        gone, is being deleted, or was given to another scheduler. seen_bound: called with the UID
        of a pod that the API server shows on a node. nominator: takes the nominations that pods
        show when they are first seen, as after a restart, and those that other programs write
        later. spread_by: selects the
        pods of the workload that a pod belongs to. quotas: takes pods without a node, if a profile
        schedules by quotas. other_nominations: the nominator also takes those of other schedulers'
        pods. estimation_problems: why annotations about the load of a pod are not in force. named:
        how errors name a pod; a reserve pod, which no API server has, by its Reservation.
        """
        self._tables = tables
        self._queue = queue
        self._permit = permit
        self._gangs = gangs
        self._follow = follow
        self._forget_attempt = forget
        self._seen_bound = seen_bound
        self._nominator = nominator
        self._scheduler_names = scheduler_names
        self._clock = clock
        self._spread_by = spread_by
        self._quotas = quotas
        self._other_nominations = other_nominations
        self._estimation_problems = estimation_problems
        self._named = named
        self._shapes = Shapes()
        self._operating = OperatingPods(tables.reservations)
        self.complaints = Complaints()
        """Of the annotations of pods that are bound or wait."""

    # --- nodes ---------------------------------------------------------------------------------

    def node_event(self, event: Event[SchedulingNode]) -> None:
        """Take a change of a node."""
        new, old = event.new, event.old
        if event.change is Change.DELETED:
            self._tables.delete_node(new.metadata.name)
            self._tell(NODE, Action.DELETE, new, None)
            return
        actions = Action.ADD if old is None else node_actions(old, new)
        if old is not None and not actions:
            return
        self._tables.upsert_node(new)
        self._tell(NODE, actions, old, new)

    # --- pods ----------------------------------------------------------------------------------

    def pod_event(self, event: Event[SchedulingPod]) -> None:
        """Take a change of a pod."""
        new, old = event.new, event.old
        if event.change is Change.DELETED:
            self._forget(new)
            return
        if old is not None and old.metadata.uid != new.metadata.uid:
            # Deleted and created again between two looks: two pods of one name.
            self._forget(old)
            old = None
        if is_terminated(new):
            self._forget(new)
        elif new.spec.node_name:
            self._bound(old, new)
        elif new.spec.scheduler_name in self._scheduler_names:
            self._pending(old, new)
        else:
            self._of_another_scheduler(new)

    def shape_of(self, pod: SchedulingPod) -> PodShape:
        """Return the shape of a pod as the API server shows it."""
        return self._shapes.of(pod, spread_by=self._spread_by(pod))

    def _bound(self, old: SchedulingPod | None, new: SchedulingPod) -> None:
        uid = new.metadata.uid
        promised = self._nominator.forget(uid)
        read = booking_of(new, self.shape_of(new))
        unread = self._estimation_problems(new, read.booking.shape)
        self._complain(new, (*read.problems, *unread))
        known = self._tables.bookings.get(uid)
        booking = _keeping_pods(read.booking, known)
        if known != booking:
            self._tables.place(booking)
        for kept_on in {promised, "" if known is None else known.node}:
            self._end_promise(kept_on, new.spec.node_name)
        self._seen_bound(uid)
        if self._operating.follow(new, read.booking.shape.requests):
            self._tell(RESERVATION, Action.UPDATE_OTHER, old, new)
        if self._quotas is not None:
            self._quotas.waits_no_more(uid)
        gang = self._gangs.gang_of(new)
        defines = self._gangs.defined_by(new) if gang else None
        self._follow(self._permit.bound(uid, self._clock(), gang=gang, defines=defines))
        if old is None or not old.spec.node_name:
            self._tell(POD, Action.ADD, None, new)
        else:
            actions = pod_actions(old, new)
            if known is not None and _may_have_less(known, booking):
                actions |= Action.UPDATE_POD_SCALE_DOWN
            if actions:
                self._tell(POD, actions, old, new)

    def _pending(self, old: SchedulingPod | None, new: SchedulingPod) -> None:
        uid = new.metadata.uid
        if new.metadata.deletion_timestamp is not None:
            if self._quotas is not None:
                self._quotas.waits_no_more(uid)
            self._follow(self._permit.gone(uid, self._clock()))
            self._forget_attempt(uid)
            return
        lost_its_node = old is not None and old.spec.node_name
        if self._queue.state_of(uid) is None and uid in self._tables.bookings and not lost_its_node:
            # Our own Binding is newer than this event. A pod loses its node only where the API
            # server's data is restored from a backup.
            return
        shape = self.shape_of(new)
        self._complain(new, self._estimation_problems(new, shape))
        if self._quotas is not None:
            self._quotas.waits(uid, shape)
        gang = self._gangs.gang_of(new)
        pod = PendingPod(
            key=object_key(new),
            uid=uid,
            priority=shape.priority,
            shape=shape,
            created=unix_seconds(new.metadata.creation_timestamp),
            gang=gang,
        )
        promised = self._nominator.node_of(uid)
        if self._queue.state_of(uid) is not None:
            self._nominator.update(pod)
            if old is not None:
                before = old.status.nominated_node_name
                self._nominator.follow(pod, before, new.status.nominated_node_name)
        elif new.status.nominated_node_name:
            self._nominator.follow(pod, "", new.status.nominated_node_name)
        elif self._other_nominations:
            # It was another scheduler's until now.
            self._nominator.withdraw(uid)
        self._end_promise(promised, self._nominator.node_of(uid))
        defines = self._gangs.defined_by(new) if gang else None
        self._follow(self._permit.add(pod, self._clock(), defines=defines))

    def withdraw(self, uid: str) -> bool:
        """Schedule a pod no more that waits for a node; one that does not wait is left alone.

        Returns whether its room stays booked, because its binding is under way or has succeeded.
        """
        if self._queue.state_of(uid) is not None:
            self._follow(self._permit.gone(uid, self._clock()))
            self._forget_attempt(uid)
        return uid in self._tables.bookings

    def _of_another_scheduler(self, new: SchedulingPod) -> None:
        uid = new.metadata.uid
        # Its label may have named one of ours before.
        self.withdraw(uid)
        if self._quotas is not None and new.metadata.deletion_timestamp is None:
            # What it requests counts for its quota all the same.
            self._quotas.waits(uid, self.shape_of(new))
        if self._other_nominations:
            self._nominated_by_other(new)

    def _nominated_by_other(self, new: SchedulingPod) -> None:
        uid, node = new.metadata.uid, new.status.nominated_node_name
        if new.metadata.deletion_timestamp is not None:
            node = ""
        promised = self._nominator.node_of(uid)
        if node:
            shape = self.shape_of(new)
            created = unix_seconds(new.metadata.creation_timestamp)
            pod = PendingPod(object_key(new), uid, shape.priority, shape, created)
            self._nominator.nominated_by_other(pod, node)
        else:
            self._nominator.withdraw(uid)
        self._end_promise(promised, node)

    def _end_promise(self, promised: str, node: str) -> None:
        """Wake pods if room on `promised` was kept for a pod that has or wants `node` now."""
        if promised not in ("", node):
            # It is free, as if a pod had left.
            self._tell(POD, Action.DELETE, None, None)

    def _complain(self, pod: SchedulingPod, problems: Sequence[InputError]) -> None:
        self.complaints.set(pod.ref, [problem.about(self._named(pod)) for problem in problems])

    def _forget(self, pod: SchedulingPod) -> None:
        uid = pod.metadata.uid
        if self._quotas is not None:
            self._quotas.waits_no_more(uid)
        self._follow(self._permit.gone(uid, self._clock()))
        self._forget_attempt(uid)
        self._gangs.forget(pod)
        self.complaints.forget(pod.ref)
        self._operating.forget(uid)
        if self._tables.remove(uid) is not None:
            self._tell(POD, Action.DELETE, pod, None)

    def _tell(self, kind: str, action: Action, old: object, new: object) -> None:
        self._queue.cluster_event(ClusterEvent(kind, action, old, new), self._clock())


def _keeping_pods(booking: Booking, known: Booking | None) -> Booking:
    """Return a booking with the pods that a reservation takes over, as far as that was decided.

    The pods themselves show it, but perhaps later than the Reservation.
    """
    if known is None or not known.allocation.takes or known.node != booking.node:
        return booking
    return replace(booking, allocation=replace(booking.allocation, takes=known.allocation.takes))


def node_actions(old: SchedulingNode, new: SchedulingNode) -> Action:
    """Return what changed between two states of a node, as far as scheduling looks at it."""
    actions = Action(0)
    if old.status.allocatable != new.status.allocatable:
        actions |= Action.UPDATE_NODE_ALLOCATABLE
    if old.metadata.labels != new.metadata.labels:
        actions |= Action.UPDATE_NODE_LABEL
    if old.spec.taints != new.spec.taints or old.spec.unschedulable != new.spec.unschedulable:
        actions |= Action.UPDATE_NODE_TAINT
    if old.metadata.annotations != new.metadata.annotations:
        actions |= Action.UPDATE_NODE_ANNOTATION
    if old.status.declared_features != new.status.declared_features:
        actions |= Action.UPDATE_NODE_DECLARED_FEATURES
    if old.status.images != new.status.images:
        actions |= Action.UPDATE_OTHER
    return actions


def pod_actions(old: SchedulingPod, new: SchedulingPod) -> Action:
    """Return what changed between two states of a bound pod, as far as others depend on it."""
    actions = Action(0)
    if old.metadata.labels != new.metadata.labels:
        actions |= Action.UPDATE_POD_LABEL
    terminates = new.metadata.deletion_timestamp is not None
    if terminates and old.metadata.deletion_timestamp is None:
        # It does not count for spread any more.
        actions |= Action.UPDATE_OTHER
    return actions


def _may_have_less(known: Booking, booking: Booking) -> bool:
    """Return whether a pod may take less of its node than before.

    It requests less of anything, or has a lower limit or another annotation about its estimate:
    what it is expected to use follows from these. Or it has other CPUs, amounts of NUMA nodes or
    devices, or uses another reservation.
    """
    before, after = known.shape, booking.shape
    return (
        _less(before.requests, after.requests)
        or _less(before.limits, after.limits)
        or known.allocation != booking.allocation
        or any(before.annotations.get(key) != after.annotations.get(key) for key in _ESTIMATES)
    )


def _less(before: Amounts, after: Amounts) -> bool:
    return any(after.get(name, 0) < amount for name, amount in before.items())
