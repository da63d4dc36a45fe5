"""A queue that remembers which changes of the cluster it was called with."""

from __future__ import annotations

from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.registrations import registrations
from cluster.scheduler.tables.shapes import PodShape


class HeardQueue(SchedulingQueue[PodShape]):
    """events: in the order in which they came."""

    def __init__(self) -> None:
        super().__init__(registrations())
        self.events: list[ClusterEvent] = []

    def cluster_event(self, event: ClusterEvent, now: float) -> int:
        self.events.append(event)
        return super().cluster_event(event, now)

    def heard(self) -> list[tuple[str, Action]]:
        """Return kind and action of the events since the last call."""
        found = [(event.kind, event.action) for event in self.events]
        self.events.clear()
        return found
