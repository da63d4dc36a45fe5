"""Reservations into the queue and the tables: each is followed as its reserve pod.

A Reservation without a node waits in the queue of the profile that its template names. One with a
node is a booking there until it ends. A Reservation that cannot be used is refused with a message
that names the field, and is not scheduled; if it has a node already, it keeps that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import MappingProxyType

from apis.core import is_terminated
from apis.errors import InputError
from apis.scheduling import Reservation
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.events import RESERVATION, Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.sources.reservation_facts import facts_of
from cluster.scheduler.sources.reserve_pods import ReservePod, read_reserve_pod
from cluster.scheduler.tables.reservations.table import ReservationTable
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event

_log = logging.getLogger(__name__)


class ReservationSource:
    """Takes the events of the cache of Reservations."""

    def __init__(
        self,
        table: ReservationTable,
        queue: SchedulingQueue[PodShape],
        *,
        pod_event: Callable[[Event[SchedulingPod]], None],
        withdraw: Callable[[str], bool],
        scheduler_names: Container[str],
        clock: Callable[[], float],
        refuse: Callable[[ReservePod, str], None],
    ) -> None:
        """pod_event: takes the events of pods. withdraw: has a pod that waits scheduled no more, by
        its UID, and returns whether its room stays booked. scheduler_names: of the profiles that
        schedule reservations. clock: seconds, as the queue counts them. refuse: says why a
        Reservation is not scheduled.
        """
        self._table = table
        self._queue = queue
        self._pod_event = pod_event
        self._withdraw = withdraw
        self._scheduler_names = scheduler_names
        self._clock = clock
        self._refuse = refuse
        self._known: dict[str, ReservePod] = {}
        self._followed: dict[str, SchedulingPod] = {}
        """UID -> the reserve pod as it was last made known as a pod."""
        self.problems: dict[str, tuple[str, ...]] = {}
        """UID -> what cannot be used of a Reservation."""

    @property
    def reserve_pods(self) -> Mapping[str, ReservePod]:
        """All Reservations, by UID."""
        return MappingProxyType(self._known)

    def reservation_event(self, event: Event[Reservation]) -> None:
        """Take a change of a Reservation."""
        new, old = event.new, event.old
        if old is not None and old.metadata.uid != new.metadata.uid:
            # Deleted and created again between two looks: two Reservations of one name.
            self._forget(old)
        if event.change is Change.DELETED:
            self._forget(new)
            return
        known = self._known.get(new.metadata.uid)
        if known is not None and _alike(known.reservation, new):
            self._known[new.metadata.uid] = replace(known, reservation=new)
            return
        read = self._known[new.metadata.uid] = read_reserve_pod(new)
        problems = self._set_facts(read)
        self._follow(read)
        self._name_problems(read, problems)
        before = None if known is None else known.reservation
        if _keeps(new) or (before is not None and _keeps(before)):
            self._tell(Action.ADD if before is None else Action.UPDATE_OTHER, before, new)

    def _forget(self, reservation: Reservation) -> None:
        uid = reservation.metadata.uid
        self._known.pop(uid, None)
        self.problems.pop(uid, None)
        self._table.delete(uid)
        self._end(uid)
        if _keeps(reservation):
            self._tell(Action.DELETE, reservation, None)

    def _set_facts(self, read: ReservePod) -> tuple[InputError, ...]:
        """Let pods use the Reservation, or not any more; return what of it cannot be read."""
        if not read.pod.spec.node_name or is_terminated(read.pod):
            self._table.delete(read.uid)
            return ()
        facts, problems = facts_of(read)
        self._table.upsert(facts)
        return problems

    def _follow(self, read: ReservePod) -> None:
        """Make the new state of a reserve pod known as that of a pod."""
        pod, before = read.pod, self._followed.get(read.uid)
        if before is not None and before.spec.node_name not in ("", pod.spec.node_name):
            # It left its node: a pod never does.
            self._end(read.uid)
            before = None
        refused = self._waits(pod) and (read.problems or not self._is_ours(pod))
        # A binding that is under way may succeed, and the room is its own until that is known.
        if is_terminated(pod) or (refused and not self._withdraw(read.uid)):
            self._end(read.uid)
        elif not refused:
            self._followed[read.uid] = pod
            change = Change.ADDED if before is None else Change.MODIFIED
            self._pod_event(Event(change, before, pod))

    def look_again(self, uid: str) -> None:
        """Follow a Reservation as it was last seen, after its binding failed."""
        read = self._known.get(uid)
        if read is not None:
            self._follow(read)
            # While it was being bound, no refusal was written.
            self._refuse_invalid(read)

    def _end(self, uid: str) -> None:
        pod = self._followed.pop(uid, None)
        if pod is not None:
            self._pod_event(Event(Change.DELETED, pod, pod))

    def _waits(self, pod: SchedulingPod) -> bool:
        return not pod.spec.node_name and not is_terminated(pod)

    def _is_ours(self, pod: SchedulingPod) -> bool:
        return pod.spec.scheduler_name in self._scheduler_names

    def _name_problems(self, read: ReservePod, others: tuple[InputError, ...]) -> None:
        texts = tuple(str(problem) for problem in (*read.problems, *others))
        if texts == self.problems.get(read.uid, ()):
            return
        for text in texts:
            _log.warning("%s", text)
        if not texts:
            del self.problems[read.uid]
            return
        self.problems[read.uid] = texts
        self._refuse_invalid(read)

    def _refuse_invalid(self, read: ReservePod) -> None:
        """Show why a Reservation without a node is not scheduled, if it cannot be used."""
        texts = self.problems.get(read.uid, ())
        if texts and self._waits(read.pod) and self._is_ours(read.pod):
            self._refuse(read, "; ".join(texts))

    def _tell(self, action: Action, old: Reservation | None, new: Reservation | None) -> None:
        self._queue.cluster_event(ClusterEvent(RESERVATION, action, old, new), self._clock())


def _keeps(reservation: Reservation) -> bool:
    """Return whether a Reservation keeps resources on a node, so that pods may use it."""
    return reservation.status.phase == "Available"


def _alike(before: Reservation, after: Reservation) -> bool:
    """Return whether only who uses the Reservation, or what is observed about it, differs."""
    one, other = before.metadata, after.metadata
    return (
        before.spec == after.spec
        and before.status.phase == after.status.phase
        and before.status.node_name == after.status.node_name
        and before.status.allocatable == after.status.allocatable
        and one.labels == other.labels
        and one.annotations == other.annotations
        and one.deletion_timestamp == other.deletion_timestamp
    )
