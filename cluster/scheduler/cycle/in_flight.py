"""The pods that left the queue to be scheduled, and the changes of the cluster since then.

The evaluation of a pod may have missed a change that happens while the pod is being scheduled. The
change is kept until the pod has been refused, and then counts as if it came afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from cluster.scheduler.cycle.events import ClusterEvent

T = TypeVar("T")

MOST_EVENTS: Final = 500
"""Chosen: to ask whether that many changes help a refused pod takes up to 12 ms (measured: a hint
that looks at a pod before and after the change takes 24 us), as long as 40 decisions; at twice the
value, twice as long, for each refused pod. A pod that missed more changes, such as one that waits
for its gang or for extenders in a busy cluster, counts as helped: it is tried again after its
back-off."""


@dataclass(frozen=True, slots=True)
class Landed(Generic[T]):
    """A pod that is not in flight any more. events: changes since it left the queue, or None when
    some of them were dropped."""

    entry: T
    events: tuple[ClusterEvent, ...] | None


class InFlight(Generic[T]):
    """Entries by UID, with the position in the log of changes at which each left the queue."""

    def __init__(self, most_events: int = MOST_EVENTS) -> None:
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._events: deque[ClusterEvent] = deque()
        self._first = 0
        """Position of the first event of the log; positions only grow."""
        self._most_events = most_events

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def events_kept(self) -> int:
        """How many changes are kept."""
        return len(self._events)

    def start(self, uid: str, entry: T) -> None:
        """Record that a pod left the queue."""
        self._entries[uid] = entry, self._first + len(self._events)

    def record(self, event: ClusterEvent) -> None:
        """Record a change of the cluster; dropped when no pod is in flight."""
        if not self._entries:
            return
        self._events.append(event)
        if len(self._events) > self._most_events:
            self._events.popleft()
            self._first += 1

    def drop(self, uid: str) -> None:
        """Remove a pod, if it is in flight."""
        self._entries.pop(uid, None)
        self._forget_seen()

    def land(self, uid: str) -> Landed[T] | None:
        """Remove and return a pod with the changes that it missed; None when not in flight."""
        found = self._entries.pop(uid, None)
        if found is None:
            return None
        entry, position = found
        skip = position - self._first
        events = None
        if skip >= 0:
            events = tuple(self._events[n] for n in range(skip, len(self._events)))
        self._forget_seen()
        return Landed(entry, events)

    def _forget_seen(self) -> None:
        """Drop the events that every pod in flight came after."""
        oldest = next((position for _, position in self._entries.values()), None)
        while self._events and (oldest is None or self._first < oldest):
            self._events.popleft()
            self._first += 1
