"""What has refused pods tried again: changes that may help them, the end of a back-off, long waits.

No I/O, no clock: `now` as for the queue. docs/facts/scheduler.md, "The queue".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from cluster.scheduler.cycle.events import (
    ClusterEvent,
    EventTable,
    Interest,
    event_name,
    may_help,
)
from cluster.scheduler.cycle.waiting import (
    ATTEMPT_FAILED,
    BACKOFF_OVER,
    STATE_CHANGED,
    WAITED_LONG,
    Backoff,
    Held,
    QueueState,
)
from cluster.scheduler.cycle.waiting_pods import WaitingPods
from cluster.scheduler.tables.pending import Shape

S = TypeVar("S", bound=Shape)

FLUSH_INTERVAL_S: Final = 30.0
"""How often pods are looked for that were unschedulable for too long; kube-scheduler's."""
LONGEST_UNSCHEDULABLE_S: Final = 300.0
"""After this a pod is tried again without an event; kube-scheduler's
podMaxInUnschedulablePodsDuration."""
STATE_INTERVAL_S: Final = 0.1
"""The shortest time between two questions to hints that look at the present state alone, as long as
up to `_STATE_SHAPES` wait for them; with more it grows in proportion: 1 s with 20,000. Chosen:
2,000 shapes of 500 quotas are asked in 3 to 5 ms, so questions take a twentieth of the time at
most; with twice the value a pod of a full quota is tried that much later after another one has
gone."""
_STATE_SHAPES: Final = 2000


class Waking(Generic[S]):
    """Moves pods from where they wait to where they back off or are active; gangs as a whole."""

    def __init__(
        self,
        waiting: WaitingPods[S],
        events: EventTable,
        backoff: Backoff,
        longest_unschedulable_s: float,
    ) -> None:
        """longest_unschedulable_s: after this a pod is tried again without an event."""
        self._waiting = waiting
        self._events = events
        self._backoff = backoff
        self._longest_unschedulable_s = longest_unschedulable_s
        self._changed: set[str] = set()
        """Plugins with hints by state, after changes about which they were not asked yet."""
        self._ask_at = -math.inf
        """When they may be asked again."""
        self._next_flush: float | None = None
        self._together: dict[str, float] = {}
        """Gang -> when its members are tried again together, after an error of one of them."""

    def next_time(self) -> float | None:
        """Return when `advance` may have something to do, without any further input."""
        failed = self._waiting.failed.first()
        times = [] if failed is None else [failed[0][0]]
        if self._changed:
            times.append(self._ask_at)
        if self._next_flush is not None:
            times.append(self._next_flush)
        return min(times, default=None)

    # --- changes ---------------------------------------------------------------------------------

    def event(self, event: ClusterEvent, now: float) -> int:
        """Move the pods that a change may help. Returns how many were moved.

        Pods of plugins with hints by state are moved by `advance`.
        """
        interest = self._events.interest(event.kind, event.action)
        groups: dict[Held[S], None] = {}
        asked = _Asked(event, interest)
        for plugin in interest:
            if plugin in self._events.by_state and event.concerns_all:
                if self._waiting.refused_by(plugin):
                    self._changed.add(plugin)
                continue
            for held in self._waiting.refused_by(plugin):
                if held not in groups and self._may_help(held, event, asked):
                    groups[held] = None
        return self.wake(groups, now, event_name(event.kind, event.action))

    def helped(self, groups: Iterable[Held[S]], events: Sequence[ClusterEvent] | None) -> bool:
        """Return whether one of the events may help; None stands for events that are not known."""
        return events is None or any(
            self._may_help(held, event, asked)
            for event in events
            for asked in (_Asked(event, self._events.interest(event.kind, event.action)),)
            for held in groups
        )

    def _may_help(self, held: Held[S], event: ClusterEvent, asked: _Asked) -> bool:
        gang, shape, _, _ = held.key
        if held.order <= event.undoes or gang in event.gangs or shape is event.not_for:
            return False
        return asked.may_help(held)

    # --- time ------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Move the pods whose time has come, and those that a change of state helps."""
        if self._changed and now >= self._ask_at:
            self._ask_by_state(now)
        while (ready := self._waiting.refused.first()) is not None and ready[0][0] <= now:
            self.activate_held(ready[1], BACKOFF_OVER)
        while (failed := self._waiting.failed.first()) is not None and failed[0][0] <= now:
            self._waiting.withdraw(failed[1])
            self._waiting.put(failed[1], QueueState.ACTIVE, BACKOFF_OVER)
        if self._next_flush is not None and self._next_flush <= now:
            self._flush(now)

    def _ask_by_state(self, now: float) -> None:
        """Move the pods that may be helped by all changes since the last question."""
        changed, self._changed = self._changed, set()
        interest = {plugin: self._events.by_state[plugin] for plugin in changed}
        shapes = sum(len(self._waiting.refused_by(plugin)) for plugin in changed)
        self._ask_at = now + STATE_INTERVAL_S * max(1.0, shapes / _STATE_SHAPES)
        asked = _Asked(None, interest)
        groups = {
            held: None
            for plugin in changed
            for held in self._waiting.refused_by(plugin)
            if asked.may_help(held)
        }
        self.wake(groups, now, STATE_CHANGED)

    def _flush(self, now: float) -> None:
        limit = now - self._longest_unschedulable_s
        unschedulable = self._waiting.unschedulable()
        waited = [held for held in unschedulable if held.refused_at <= limit]
        self.wake(waited, now, WAITED_LONG)
        left = any(held.state is QueueState.UNSCHEDULABLE for held in unschedulable)
        self._next_flush = now + FLUSH_INTERVAL_S if left else None

    # --- moves -----------------------------------------------------------------------------------

    def wait_together(self, gangs: Iterable[str], until: float, now: float) -> None:
        """Have members of `gangs` that are woken before `until` tried then, with the others.

        Tried earlier, they would keep nodes from other pods until then.
        """
        ahead = {gang: end for gang, end in self._together.items() if end > now}
        self._together = ahead | dict.fromkeys(gangs, until)

    def put_unschedulable(self, held: Held[S]) -> None:
        """Have the pods of a group wait until they can be helped."""
        self._waiting.move(held, QueueState.UNSCHEDULABLE, ATTEMPT_FAILED)
        if self._next_flush is None:
            self._next_flush = held.refused_at + FLUSH_INTERVAL_S

    def activate_held(self, held: Held[S], why: str) -> None:
        """Make the pods of a group active at once."""
        if held.state is not QueueState.ACTIVE:
            self._waiting.move(held, QueueState.ACTIVE, why)

    def wake(self, groups: Iterable[Held[S]], now: float, why: str) -> int:
        """Move unschedulable pods to where they back off or are active; gangs as a whole."""
        moved = 0
        gangs = set()
        for first in groups:
            gang = first.key[0]
            if gang in gangs:
                continue
            if gang:
                gangs.add(gang)
            asleep = [
                held
                for held in (self._waiting.groups(gang) if gang else (first,))
                if held.state is QueueState.UNSCHEDULABLE
            ]
            if not asleep:
                continue
            together = self._together.get(gang, now)
            if together > now:
                moved += self._put_off(asleep, together, now, why)
                continue
            refused_at = max(held.refused_at for held in asleep)
            refusals = max(held.refusals for held in asleep)
            for held in asleep:
                held.refused_at, held.refusals = refused_at, refusals
                until = held.refused_at + self._backoff.after(held.refusals)
                state = QueueState.ACTIVE if until <= now else QueueState.BACKOFF
                self._waiting.move(held, state, why, until=until)
                moved += len(held.pods)
        return moved

    def _put_off(self, groups: Iterable[Held[S]], until: float, now: float, why: str) -> int:
        """Have refused pods back off as after an error, until then. Returns how many did."""
        entries = [entry for held in groups for entry in held.pods.values()]
        for entry in entries:
            self._waiting.withdraw(entry)
            entry.since = now
            self._waiting.put(entry, QueueState.BACKOFF, why, until=until)
        return len(entries)


class _Asked:
    """Which probes one change may help, each asked once: members of a gang may share thousands."""

    def __init__(self, event: ClusterEvent | None, interest: Interest) -> None:
        """event, interest: see `may_help`."""
        self._event = event
        self._interest = interest
        self._answers: dict[int, bool] = {}
        """By the identity of what several groups share."""

    def may_help(self, held: Held[Any]) -> bool:
        probes = held.probes
        if len(probes) == 1:
            pod, plugins = probes[0]
            return may_help(pod, plugins, self._event, self._interest)
        known = self._answers.get(id(probes))
        if known is None:
            known = any(may_help(p, plugins, self._event, self._interest) for p, plugins in probes)
            self._answers[id(probes)] = known
        return known
