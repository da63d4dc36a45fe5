"""Carries preemptions out: nominations, and victims from the decision until they are gone.

The preemptor is nominated for the node. A victim that waits there for its gang gives the node back;
any other one is evicted through the API server, in the background. If that is refused, the
nomination ends and the preemptor is tried again after a back-off, as after an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from apis.meta import ObjectReference
from cluster.scheduler.auditing.permit import AuditedPermit
from cluster.scheduler.binding.events import Event, pod_reference, preempted
from cluster.scheduler.binding.placement import Refused
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

_log = logging.getLogger(__name__)


class EvictionWriters(Protocol):
    """Where evictions go. All of it happens in the background."""

    def evict(self, victim: Victim, controller: str) -> None:
        """Evict a pod; its outcome comes back through `Preemptions.evicted`.

        controller: the scheduler's name, for the pod's condition.
        """
        ...

    def event(self, event: Event) -> None: ...


class Evictions:
    """All preemptions under way."""

    def __init__(
        self,
        scheduling: Scheduling,
        queue: SchedulingQueue[PodShape],
        writers: EvictionWriters,
        *,
        clock: Callable[[], float],
        take_back: Callable[[str, str], bool],
        reference: Callable[[PendingPod[PodShape]], ObjectReference],
        audit: AuditedPermit | None = None,
    ) -> None:
        """clock: seconds, as the queue counts them. take_back: (UID, why) -> whether the pod had a
        node without being bound there, and gave it back. reference: to the object that a pod
        stands for. audit: see Attempts."""
        self._scheduling = scheduling
        self._nominator = scheduling.nominator
        self._queue = queue
        self._writers = writers
        self._clock = clock
        self._take_back = take_back
        self._reference = reference
        self._audit = audit
        self._under_way: dict[str, tuple[PendingPod[PodShape], Booking]] = {}
        """UID of a victim that is not gone -> the pod for which it makes room, and the victim."""

    def __len__(self) -> int:
        """Count of victims that are not gone."""
        return len(self._under_way)

    def being_evicted(self, booking: Booking) -> bool:
        """Return whether a placed pod is the victim of a preemption, and not gone yet."""
        return booking.preempted or booking.uid in self._under_way

    def carry_out(
        self, pod: PendingPod[PodShape], candidate: Candidate
    ) -> tuple[PendingPod[PodShape], ...]:
        """Evict the victims of a preemption, and nominate the pod for their node.

        Returns the less important pods whose nomination for the node ends by that.
        """
        tables = self._scheduling.tables
        node = tables.nodes.name(candidate.row)
        less_important = self._nominator.below(node, pod.priority)
        for other in less_important:
            self._nominator.withdraw(other.uid)
        self._nominator.nominate(pod, node)
        controller = pod.shape.scheduler_name
        preemptor = self._reference(pod)
        for victim in candidate.victims:
            if self.being_evicted(victim) or victim.uid not in tables.bookings:
                # A gang that gives back the node of one victim gives back those of others too.
                continue
            namespace, _, name = victim.key.partition("/")
            _log.info("pod %s is evicted from node %s for pod %s", victim.key, node, pod.key)
            why = f"preempted by pod {pod.key} on node {node}"
            if not self._take_back(victim.uid, why):
                self._scheduling.budgets.spend(victim)
                self._under_way[victim.uid] = pod, victim
                self._writers.evict(Victim(namespace, name, victim.uid), controller)
            about = pod_reference(namespace, name, victim.uid)
            self._writers.event(preempted(about, preemptor, node, controller=controller))
        return less_important

    def evicted(self, uid: str, refused: Refused | None) -> PendingPod[PodShape] | None:
        """Take the outcome of an eviction; None means that the victim ends, or is gone.

        Returns the pod that gets no room because the eviction is refused. Its nomination is to be
        ended.
        """
        if refused is None or uid not in self._under_way:
            return None
        pod, victim = self._under_way.pop(uid)
        if self._audit is not None:
            self._audit.victim_stays(uid)
        self._scheduling.budgets.give_back(victim)
        _log.warning("pod %s gets no room: %s", pod.key, refused.message)
        return pod

    def gone(self, uid: str) -> None:
        """Forget a pod that is gone, as a victim and as a preemptor."""
        self._under_way.pop(uid, None)
        if self._audit is not None:
            self._audit.victim_gone(uid)
        self.end_nomination(uid)
        self._nominator.forget(uid)

    def bound(self, uid: str) -> None:
        """End the nomination of a pod that is bound."""
        self._nominator.forget(uid)

    def end_nomination(self, uid: str, *, not_for: PodShape | None = None) -> bool:
        """End a pod's claim to a node, and have pods tried that it kept out.

        not_for: see ClusterEvent. Returns whether there was one.
        """
        node = self._nominator.withdraw(uid)
        if node:
            # The room that was promised is free, as if a pod had left.
            event = ClusterEvent(POD, Action.DELETE, not_for=not_for)
            self._queue.cluster_event(event, self._clock())
        return bool(node)
