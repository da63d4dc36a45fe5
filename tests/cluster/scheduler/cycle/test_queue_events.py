"""The scheduling queue: which change of the cluster has a refused pod tried again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.cycle.events import (
    NODE,
    POD,
    Action,
    ClusterEvent,
    EventTable,
    Registration,
    event_name,
)
from cluster.scheduler.cycle.in_flight import MOST_EVENTS, InFlight
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.cycle.waking import STATE_INTERVAL_S
from tests.cluster.scheduler.cycle.queues import (
    FREED,
    TAINT_GONE,
    Queue,
    counts,
    pop,
    queue,
)
from tests.cluster.scheduler.pending import Pod, pending


@pytest.mark.parametrize(
    ("plugins", "event", "moved"),
    [
        ({"Fit"}, FREED, 1),
        ({"Fit"}, TAINT_GONE, 0),
        ({"Taints"}, FREED, 0),
        ({"Taints"}, TAINT_GONE, 1),
        ({"Fit", "Taints"}, FREED, 1),
        ({"Fit", "Taints"}, ClusterEvent(NODE, Action.ADD, new="n"), 1),
        ({"Coscheduling"}, FREED, 0),
        ({"Unknown"}, FREED, 0),
        ({"Taints"}, ClusterEvent(NODE, Action.UPDATE_NODE_LABEL | Action.UPDATE_NODE_TAINT), 1),
        ({"Fit"}, ClusterEvent("Secret", Action.DELETE), 0),
    ],
)
def test_only_events_of_a_refusing_plugin_move_a_pod(
    plugins: set[str], event: ClusterEvent, moved: int
) -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.refuse("a", plugins, now=0)
    assert q.cluster_event(event, now=20) == moved
    assert counts(q) == (moved, 0, 1 - moved, 0)


def test_a_registration_of_any_kind_meets_every_kind() -> None:
    table = EventTable({"All": [Registration("*", Action.ALL)]})
    assert table.interest("Anything", Action.UPDATE_OTHER) == {"All": (None,)}


def test_a_hint_sees_the_pod_and_the_object_before_and_after() -> None:
    seen: list[Any] = []

    def hint(pod: Pod, old: Any, new: Any) -> bool:
        seen.append((pod.uid, old, new))
        return False

    q = queue(hint=hint)
    q.add(pending("a"), now=0)
    pop(q)
    q.refuse("a", {"Fit"}, now=0)
    assert q.cluster_event(FREED, now=20) == 0
    assert seen == [("a", "a pod", None)]


def test_a_hint_that_fails_lets_the_pod_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    def hint(pod: Pod, old: Any, new: Any) -> bool:
        raise TypeError("no such field")

    q = queue(hint=hint)
    q.add(pending("a"), now=0)
    pop(q)
    q.refuse("a", {"Fit"}, now=0)
    assert q.cluster_event(FREED, now=20) == 1
    assert "plugin Fit" in caplog.text


def test_a_hint_by_state_is_asked_once_about_many_changes() -> None:
    asked: list[tuple[float, Any, Any]] = []
    now, has_room = 0.0, False

    def hint(pod: Pod, old: Any, new: Any) -> bool:
        asked.append((now, old, new))
        return has_room

    rows = [Registration(POD, Action.DELETE, hint, by_state=True)]
    q: Queue = SchedulingQueue(EventTable({"Quota": rows}))
    q.add(pending("a"), now)
    pop(q)
    q.refuse("a", {"Quota"}, now)
    now = 20.0
    for _ in range(5):
        assert q.cluster_event(FREED, now) == 0
    assert asked == []
    q.advance(now)
    # Right after a question the next one waits, and `next_time` says for how long.
    q.cluster_event(FREED, now)
    q.advance(now)
    assert asked == [(20.0, None, None)]
    assert q.next_time() == now + STATE_INTERVAL_S
    has_room = True
    now += STATE_INTERVAL_S
    q.advance(now)
    assert len(asked) == 2 and q.state_of("a") is QueueState.ACTIVE


def test_a_hint_by_state_is_asked_at_once_where_pods_are_excepted() -> None:
    rows = [Registration(POD, Action.DELETE, lambda *_: True, by_state=True)]
    q: Queue = SchedulingQueue(EventTable({"Quota": rows}))
    for name in ("a", "b"):
        q.add(pending(name, name), 0.0)
        pop(q)
        q.refuse(name, {"Quota"}, 0.0)
    # "a" was refused by an attempt before the placement that is taken back.
    assert q.cluster_event(replace(FREED, undoes=q.order("a")), 20.0) == 1
    q.advance(20.0)
    assert q.state_of("a") is QueueState.UNSCHEDULABLE and q.state_of("b") is QueueState.ACTIVE


def test_after_a_flood_of_changes_a_refused_pod_is_tried_again_without_questions() -> None:
    asked: list[object] = []

    def hint(*objects: object) -> bool:
        asked.append(objects)
        return False

    q = queue(hint=hint)
    for name, changes in (("a", MOST_EVENTS), ("b", MOST_EVENTS + 1)):
        asked.clear()
        q.add(pending(name), 0.0)
        assert pop(q) == name
        for _ in range(changes):
            q.cluster_event(FREED, 0.0)
        asked.clear()
        q.refuse(name, {"Fit"}, 0.0)
        helped = changes > MOST_EVENTS
        assert len(asked) == (0 if helped else MOST_EVENTS)
        assert q.state_of(name) is (QueueState.BACKOFF if helped else QueueState.UNSCHEDULABLE)
        q.remove(name)


def test_an_event_during_the_attempt_counts_when_the_pod_is_refused() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.cluster_event(FREED, now=0)
    q.refuse("a", {"Fit"}, now=0)
    assert q.state_of("a") is QueueState.BACKOFF


def test_an_event_before_the_attempt_does_not_count() -> None:
    q = queue()
    q.add(pending("other", "b"), now=0)
    q.add(pending("a"), now=0)
    pop(q)
    q.cluster_event(FREED, now=0)
    pop(q)
    q.cluster_event(TAINT_GONE, now=0)
    q.refuse("a", {"Fit"}, now=0)
    assert q.state_of("a") is QueueState.UNSCHEDULABLE


def test_events_are_kept_while_a_pod_is_in_flight_and_bounded() -> None:
    flights: InFlight[str] = InFlight(most_events=3)
    flights.record(FREED)
    assert flights.events_kept == 0
    flights.start("long", "long")
    for _ in range(2):
        flights.record(FREED)
    flights.start("short", "short")
    for _ in range(3):
        flights.record(TAINT_GONE)
    assert flights.events_kept == 3
    short, long = flights.land("short"), flights.land("long")
    assert short is not None and short.events == (TAINT_GONE,) * 3
    assert long is not None and long.events is None  # two were dropped
    assert flights.events_kept == 0


def test_an_unschedulable_pod_is_tried_again_after_five_minutes() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.refuse("a", {"Fit"}, now=0)
    q.advance(299)
    assert q.state_of("a") is QueueState.UNSCHEDULABLE
    due = q.next_time()
    assert due is not None and 299 < due <= 330
    q.advance(due)
    assert q.state_of("a") is QueueState.ACTIVE
    assert q.next_time() is None


def test_each_pod_in_flight_has_the_changes_since_it_left() -> None:
    flights: InFlight[str] = InFlight()
    flights.start("first", "1")
    flights.record(FREED)
    flights.start("second", "2")
    flights.record(TAINT_GONE)
    flights.start("third", "3")
    first = flights.land("first")
    assert first is not None
    assert (first.entry, first.events) == ("1", (FREED, TAINT_GONE))
    # What the second one has seen is not kept any longer.
    assert flights.events_kept == 1
    flights.record(FREED)
    second, third = flights.land("second"), flights.land("third")
    assert second is not None and second.events == (TAINT_GONE, FREED)
    assert third is not None and third.events == (FREED,)
    flights.start("fourth", "4")
    flights.record(FREED)
    fourth = flights.land("fourth")
    assert fourth is not None and fourth.events == (FREED,)
    assert flights.land("fourth") is None


def test_as_many_changes_are_kept_as_the_limit_says() -> None:
    flights: InFlight[str] = InFlight(most_events=2)
    for uid in ("a", "b"):
        flights.start(uid, uid)
    flights.record(FREED)
    flights.record(FREED)
    kept = flights.land("a")
    assert kept is not None and kept.events == (FREED, FREED)
    flights.record(FREED)
    dropped = flights.land("b")
    assert dropped is not None and dropped.events is None


def test_a_pod_that_waits_long_is_looked_at_every_30_seconds() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.refuse("a", {"Fit"}, now=0)
    assert q.next_time() == 30
    q.add(pending("b", "another"), now=10)
    pop(q, 10)
    q.refuse("b", {"Fit"}, now=10)
    q.advance(300)
    assert q.state_of("a") is QueueState.ACTIVE
    assert q.next_time() == 330
    q.advance(329)
    assert q.state_of("b") is QueueState.UNSCHEDULABLE
    q.advance(330)
    assert q.state_of("b") is QueueState.ACTIVE
    assert q.next_time() is None


def test_events_are_dropped_when_the_last_pod_lands() -> None:
    flights: InFlight[str] = InFlight()
    flights.start("a", "a")
    flights.start("b", "b")
    flights.record(FREED)
    flights.drop("a")
    assert flights.events_kept == 1
    assert len(flights) == 1
    flights.drop("b")
    assert flights.events_kept == 0


@pytest.mark.parametrize(
    ("kind", "action", "name"),
    [
        (POD, Action.DELETE, "AssignedPodDelete"),
        (NODE, Action.ADD, "NodeAdd"),
        (NODE, Action.UPDATE_NODE_TAINT, "NodeUpdateNodeTaint"),
        (NODE, Action.UPDATE_NODE_ALLOCATABLE, "NodeUpdateNodeAllocatable"),
        (NODE, Action.UPDATE_NODE_LABEL | Action.UPDATE_OTHER, "NodeUpdateNodeLabel"),
        ("ElasticQuota", Action.UPDATE_OTHER, "ElasticQuotaUpdate"),
    ],
)
def test_changes_have_the_names_of_kube_scheduler(kind: str, action: Action, name: str) -> None:
    assert event_name(kind, action) == name
