"""Random lives of the scheduling queue, beside a world in which each shape fits or does not.

No pod is lost or in two places, the counts are right, importance goes first, and no pod whose shape
fits waits for longer than the back-off: events that help are never missed.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduler.cycle.events import Action, ClusterEvent, EventTable, Registration
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import Gate, QueueState
from tests.cluster.scheduler.pending import FakeShape, Pod, pending

SHAPES = ("a", "b", "c")
PLUGINS = ("P", "Q")
GANGS = ("", "", "g", "h")

names = st.integers(0, 11).map(str)
shapes = st.sampled_from(SHAPES)


def helps(pod: Pod, old: Any, new: Any) -> bool:
    """An event carries the shape that it helps."""
    return bool(pod.shape.name == new)


class QueueLife(RuleBasedStateMachine):
    """The queue with a scheduler, a cluster and users around it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocked_by: dict[str, str] = {}
        """Shape -> the plugin that refuses it. Other shapes fit."""
        self.closed: set[str] = set()
        """UIDs of pods that a gate keeps out."""
        self.known: dict[str, Pod] = {}
        self.flying: dict[str, str] = {}
        """UID -> the plugin that refused the pod when it was evaluated, or ""."""
        self.queue: SchedulingQueue[FakeShape] = SchedulingQueue(
            EventTable(
                {plugin: [Registration(plugin, Action.UPDATE, helps)] for plugin in PLUGINS}
            ),
            gates=[Gate("Gate", lambda pod: "closed" if pod.uid in self.closed else None)],
        )

    # --- users ---------------------------------------------------------------------------------

    @rule(name=names, shape=shapes, priority=st.integers(0, 1), gang=st.sampled_from(GANGS))
    def add_or_edit(self, name: str, shape: str, priority: int, gang: str) -> None:
        before = self.known.get(name)
        if before is not None:
            gang = before.gang
        pod = pending(name, shape, priority=priority, gang=gang, created=self.now)
        self.known[name] = pod
        self.queue.add(pod, self.now)

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.known.pop(name, None)
        self.flying.pop(name, None)
        self.queue.remove(name)

    @rule(name=names)
    def close(self, name: str) -> None:
        self.closed.add(name)

    @rule(name=names)
    def open(self, name: str) -> None:
        self.closed.discard(name)
        self.queue.activate([name], self.now)

    # --- the cluster ---------------------------------------------------------------------------

    @rule(shape=shapes, plugin=st.sampled_from(PLUGINS))
    def block(self, shape: str, plugin: str) -> None:
        self.blocked_by.setdefault(shape, plugin)

    @rule(shape=shapes)
    def unblock(self, shape: str) -> None:
        plugin = self.blocked_by.pop(shape, None)
        if plugin is not None:
            event = ClusterEvent(plugin, Action.UPDATE_OTHER, new=shape)
            self.queue.cluster_event(event, self.now)

    @rule(seconds=st.sampled_from((0.5, 3.0, 11.0, 400.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.queue.advance(self.now)

    # --- the scheduler -------------------------------------------------------------------------

    @rule()
    def pop(self) -> None:
        self.queue.advance(self.now)
        active = [
            pod
            for pod in self.known.values()
            if self.queue.state_of(pod.uid) is QueueState.ACTIVE and pod.uid not in self.closed
        ]
        pod = self.queue.pop(self.now)
        if pod is None:
            assert not active
            return
        assert pod == self.known[pod.uid]
        assert pod.uid not in self.closed
        if active:
            assert pod.priority == max(other.priority for other in active)
        self.flying[pod.uid] = self.blocked_by.get(pod.shape.name, "")

    def fly(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.flying)))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end_as_evaluated(self, data: st.DataObject) -> None:
        uid = self.fly(data)
        plugin = self.flying.pop(uid)
        if plugin:
            self.queue.refuse(uid, {plugin}, self.now)
        else:
            del self.known[uid]
            self.queue.remove(uid)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end_alone(self, data: st.DataObject) -> None:
        uid = self.fly(data)
        plugin = self.flying.pop(uid)
        if plugin:
            self.queue.refuse_alone(uid, {plugin}, self.now)
        else:
            self.queue.fail(uid, self.now)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end_with_an_error(self, data: st.DataObject) -> None:
        uid = self.fly(data)
        del self.flying[uid]
        self.queue.fail(uid, self.now)

    @precondition(lambda self: any(self.known[uid].gang for uid in self.flying))
    @rule(data=st.data())
    def end_with_the_gang(self, data: st.DataObject) -> None:
        members = sorted(uid for uid in self.flying if self.known[uid].gang)
        uid = data.draw(st.sampled_from(members))
        gang = self.known[uid].gang
        plugin = self.flying.pop(uid)
        waiting = [
            other
            for other, refused_by in self.flying.items()
            if self.known[other].gang == gang and not refused_by
        ]
        for other in waiting:
            del self.flying[other]
        if plugin:
            self.queue.refuse_gangs(uid, {plugin}, [gang], waiting, self.now)
            return
        if data.draw(st.booleans()):
            self.queue.fail_gangs(uid, [gang], waiting, self.now)
            assert self.queue.untried([gang])
            return
        self.queue.return_waiting([uid, *waiting], [gang], self.now)
        self.queue.activate([uid, *waiting], self.now)

    # --- what holds at any moment --------------------------------------------------------------

    @invariant()
    def each_pod_is_in_one_place_and_is_counted_there(self) -> None:
        places = {uid: self.queue.state_of(uid) for uid in self.known}
        assert None not in places.values()
        assert len(self.queue) == len(self.known)
        for place in QueueState:
            there = sorted(uid for uid, other in places.items() if other is place)
            assert self.queue.count(place) == len(there), place
            if place is QueueState.IN_FLIGHT:
                assert there == sorted(self.flying)
        for uid, where in places.items():
            assert (self.queue.gate(uid) is not None) == (where is QueueState.GATED)

    @invariant()
    def untried_members_are_those_that_are_active_or_back_off(self) -> None:
        for gang in ("g", "h"):
            queued = [
                uid
                for uid, pod in self.known.items()
                if pod.gang == gang
                and self.queue.state_of(uid) in (QueueState.ACTIVE, QueueState.BACKOFF)
            ]
            assert self.queue.untried([gang]) == len(queued)

    def teardown(self) -> None:
        """Let the scheduler run on: whatever fits has to come out, and nothing waits for ever."""
        for uid, plugin in list(self.flying.items()):
            if plugin:
                self.queue.refuse(uid, {plugin}, self.now)
            else:
                self.queue.fail(uid, self.now)
        self.flying.clear()
        for _ in range(3):
            self.now += 10
            while (pod := self.queue.pop(self.now)) is not None:
                plugin = self.blocked_by.get(pod.shape.name, "")
                if plugin:
                    self.queue.refuse(pod.uid, {plugin}, self.now)
                else:
                    self.known.pop(pod.uid)
                    self.queue.remove(pod.uid)
        for uid, pod in self.known.items():
            if uid in self.closed or pod.gang:
                continue
            assert pod.shape.name in self.blocked_by, (
                f"{pod} fits, and is {self.queue.state_of(uid)}"
            )
        # In the end the flush brings out everything that events did not.
        self.closed.clear()
        self.queue.activate(list(self.known), self.now)
        self.blocked_by.clear()
        for _ in range(12):
            self.now += 30
            while (pod := self.queue.pop(self.now)) is not None:
                self.known.pop(pod.uid)
                self.queue.remove(pod.uid)
        assert not self.known
        assert len(self.queue) == 0


TestQueueLives = QueueLife.TestCase
TestQueueLives.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
