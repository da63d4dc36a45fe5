"""The scheduling queue: order, back-off, events, gates, pods in flight, and gangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.cycle.events import (
    NODE,
    POD,
    Action,
    ClusterEvent,
    EventTable,
    Hint,
    Registration,
    event_name,
)
from cluster.scheduler.cycle.in_flight import MOST_EVENTS, InFlight
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import Backoff, Gate, Place, scheduling_gates
from cluster.scheduler.cycle.waking import STATE_INTERVAL_S
from tests.cluster.scheduler.pending import FakeShape, Pod, pending

Queue = SchedulingQueue[FakeShape]

FREED = ClusterEvent(POD, Action.DELETE, old="a pod")
TAINT_GONE = ClusterEvent(NODE, Action.UPDATE_NODE_TAINT, old="tainted", new="clean")


def queue(*, hint: Hint | None = None, gate: Callable[[Pod], str | None] | None = None) -> Queue:
    gates: list[Gate[FakeShape]] = [Gate("SchedulingGates", scheduling_gates)]
    if gate is not None:
        gates.append(Gate("Coscheduling", gate))
    return SchedulingQueue(
        EventTable(
            {
                "Fit": [Registration(POD, Action.DELETE, hint), Registration(NODE, Action.ADD)],
                "Taints": [Registration(NODE, Action.ADD | Action.UPDATE_NODE_TAINT)],
                "Coscheduling": [],
            }
        ),
        gates=gates,
    )


def popped(q: Queue, now: float = 0.0) -> list[str]:
    """Pop every pod that is active or backs off after a refusal; they stay in flight."""
    names = []
    while (attempt := q.pop(now)) is not None:
        names.append(attempt.pod.uid)
    return names


def pop(q: Queue, now: float = 0.0) -> str:
    attempt = q.pop(now)
    assert attempt is not None
    return attempt.pod.uid


def counts(q: Queue) -> tuple[int, int, int, int]:
    """Active, backing off, unschedulable, gated."""
    return (
        q.count(Place.ACTIVE),
        q.count(Place.BACKOFF),
        q.count(Place.UNSCHEDULABLE),
        q.count(Place.GATED),
    )


def test_pods_leave_by_priority_then_by_age() -> None:
    q = queue()
    q.add(pending("young", created=5), now=9)
    q.add(pending("old", created=1), now=9)
    q.add(pending("important", created=7, priority=10), now=9)
    assert popped(q, 9) == ["important", "old", "young"]


def test_a_pod_that_is_put_off_waits_longer_each_time_and_no_event_hurries_it() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    now = 0.0
    for wait in (1.0, 2.0, 4.0):
        assert popped(q, now) == ["a"]
        q.refuse_alone("a", {"Fit"}, now)
        q.put_off("a", (), now)
        q.put_off("a", (), now + wait / 2)
        assert q.cluster_event(FREED, now) == 0
        assert popped(q, now + wait - 0.1) == []
        now += wait


def test_a_creation_time_in_the_future_counts_as_now() -> None:
    q = queue()
    q.add(pending("skewed", created=1e12), now=1)
    q.add(pending("later", created=2), now=2)
    assert popped(q, 2) == ["skewed", "later"]


def test_a_refused_pod_comes_after_pods_that_arrived_before_its_refusal() -> None:
    q = queue()
    q.add(pending("refused", created=1), now=1)
    pop(q, 2)
    q.add(pending("other", "b", created=3), now=3)
    q.refuse("refused", {"Fit"}, now=4)
    q.cluster_event(FREED, now=60)
    assert popped(q, 60) == ["other", "refused"]


@pytest.mark.parametrize(
    ("refusals", "seconds"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (5000, 10)]
)
def test_the_back_off_doubles_up_to_a_limit(refusals: int, seconds: float) -> None:
    assert Backoff().after(refusals) == seconds


def test_an_error_is_waited_out_even_when_nothing_else_is_to_be_done() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.fail("a", now=0)
    assert counts(q) == (0, 1, 0, 0)
    assert q.pop(now=0.9) is None
    assert q.next_time() == 1.0
    assert pop(q, 1.0) == "a"
    q.fail("a", now=1.0)
    assert q.pop(now=2.9) is None
    assert pop(q, 3.0) == "a"


def test_a_refusal_ends_the_row_of_errors() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    for now in (0, 10, 20):
        pop(q, now)
        q.fail("a", now)
    pop(q, 30)
    q.refuse("a", {"Fit"}, now=30)
    q.cluster_event(FREED, now=40)
    pop(q, 40)
    q.fail("a", now=40)
    assert pop(q, 41) == "a"


def test_a_back_off_after_a_refusal_ends_early_when_no_pod_is_active() -> None:
    q = queue()
    q.add(pending("refused"), now=0)
    pop(q)
    q.refuse("refused", {"Fit"}, now=0)
    q.cluster_event(FREED, now=0.1)
    assert q.place("refused") is Place.BACKOFF
    q.add(pending("new", "b", created=0.2), now=0.2)
    assert popped(q, 0.2) == ["new", "refused"]


def test_a_back_off_is_kept_while_other_pods_are_active() -> None:
    q = queue()
    q.add(pending("refused", priority=100), now=0)
    pop(q)
    q.refuse("refused", {"Fit"}, now=0)
    q.cluster_event(FREED, now=0.1)
    for number in range(3):
        q.add(pending(f"new-{number}", "b"), now=0.2)
    assert pop(q, 0.9) == "new-0"
    assert pop(q, 1.0) == "refused"


# --- events ------------------------------------------------------------------------------------


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
    assert len(asked) == 2 and q.place("a") is Place.ACTIVE


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
    assert q.place("a") is Place.UNSCHEDULABLE and q.place("b") is Place.ACTIVE


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
        assert q.place(name) is (Place.BACKOFF if helped else Place.UNSCHEDULABLE)
        q.remove(name)


def test_an_event_during_the_attempt_counts_when_the_pod_is_refused() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.cluster_event(FREED, now=0)
    q.refuse("a", {"Fit"}, now=0)
    assert q.place("a") is Place.BACKOFF


def test_an_event_before_the_attempt_does_not_count() -> None:
    q = queue()
    q.add(pending("other", "b"), now=0)
    q.add(pending("a"), now=0)
    pop(q)
    q.cluster_event(FREED, now=0)
    pop(q)
    q.cluster_event(TAINT_GONE, now=0)
    q.refuse("a", {"Fit"}, now=0)
    assert q.place("a") is Place.UNSCHEDULABLE


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
    assert q.place("a") is Place.UNSCHEDULABLE
    due = q.next_time()
    assert due is not None and 299 < due <= 330
    q.advance(due)
    assert q.place("a") is Place.ACTIVE
    assert q.next_time() is None


# --- pods of one shape -------------------------------------------------------------------------


def refused_replicas(q: Queue, count: int, now: float = 0.0) -> None:
    for number in range(count):
        q.add(pending(f"a-{number}"), now)
    for name in popped(q, now):
        q.refuse(name, {"Fit"}, now)


def test_one_refused_replica_holds_up_all_that_were_refused_before() -> None:
    q = queue()
    refused_replicas(q, 1000)
    assert q.cluster_event(FREED, now=20) == 1000
    assert counts(q) == (1000, 0, 0, 0)
    tried = pop(q, 20)
    q.refuse(tried, {"Taints"}, now=20)
    assert counts(q) == (0, 0, 1000, 0)
    # What the last refusal says holds for all of them.
    assert q.cluster_event(FREED, now=40) == 0
    assert q.cluster_event(TAINT_GONE, now=40) == 1000


def test_replicas_follow_one_that_was_placed() -> None:
    q = queue()
    refused_replicas(q, 3)
    q.cluster_event(FREED, now=20)
    assert pop(q, 20) == "a-0"
    q.remove("a-0")
    assert pop(q, 20) == "a-1"
    q.refuse("a-1", {"Fit"}, now=20)
    assert counts(q) == (0, 0, 2, 0)


def test_a_hint_is_asked_once_for_all_replicas() -> None:
    asked: list[str] = []

    def hint(pod: Pod, old: Any, new: Any) -> bool:
        asked.append(pod.uid)
        return True

    q = queue(hint=hint)
    refused_replicas(q, 50)
    assert q.cluster_event(FREED, now=20) == 50
    assert len(asked) == 1


def test_a_new_replica_is_tried_although_others_were_refused() -> None:
    q = queue()
    refused_replicas(q, 3)
    q.add(pending("new"), now=1)
    assert popped(q, 1) == ["new"]


def test_replicas_of_another_priority_wait_on_their_own() -> None:
    q = queue()
    refused_replicas(q, 2)
    q.add(pending("important", priority=5), now=0)
    q.refuse(pop(q), {"Taints"}, now=0)
    assert q.cluster_event(FREED, now=20) == 2
    assert popped(q, 20) == ["a-0", "a-1"]


def test_a_pod_refused_alone_leaves_its_replicas_active() -> None:
    q = queue()
    refused_replicas(q, 3)
    q.cluster_event(FREED, now=20)
    q.refuse_alone(pop(q, 20), {"Fit"}, now=20)
    assert counts(q) == (2, 0, 1, 0)
    assert popped(q, 20) == ["a-1", "a-2"]


def test_the_back_off_of_replicas_grows_with_each_try_and_not_with_each_replica() -> None:
    q = queue()
    refused_replicas(q, 100)
    q.cluster_event(FREED, now=0)
    assert counts(q) == (0, 100, 0, 0)
    q.advance(1)
    assert counts(q) == (100, 0, 0, 0)
    q.refuse(pop(q, 1), {"Fit"}, now=1)
    q.cluster_event(FREED, now=1)
    q.advance(2.9)
    assert counts(q) == (0, 100, 0, 0)
    q.advance(3)
    assert counts(q) == (100, 0, 0, 0)


# --- changes of pods ---------------------------------------------------------------------------


def test_an_edit_that_plugins_can_see_makes_a_refused_pod_active() -> None:
    q = queue()
    refused_replicas(q, 2)
    q.add(pending("a-0"), now=1)
    assert counts(q) == (0, 0, 2, 0)
    q.add(pending("a-0", "smaller"), now=1)
    assert counts(q) == (1, 0, 1, 0)


def test_a_pod_edited_during_its_attempt_is_tried_as_it_is_now() -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.add(pending("a", "smaller"), now=0)
    q.refuse("a", {"Fit"}, now=0)
    attempt = q.pop(0)
    assert attempt is not None
    assert (attempt.pod.shape.name, attempt.number) == ("smaller", 2)


@pytest.mark.parametrize("end", ["refuse", "refuse_alone", "fail"])
def test_a_pod_deleted_during_its_attempt_does_not_come_back(end: str) -> None:
    q = queue()
    q.add(pending("a"), now=0)
    pop(q)
    q.remove("a")
    if end == "fail":
        q.fail("a", now=0)
    else:
        getattr(q, end)("a", {"Fit"}, now=0)
    assert len(q) == 0
    assert counts(q) == (0, 0, 0, 0)
    assert popped(q, 1000) == []


def test_a_recreated_pod_of_the_same_name_is_another_pod() -> None:
    q = queue()
    old = pending("a")
    q.add(old, now=0)
    pop(q)
    q.remove("a")
    q.add(replace(old, uid="a2"), now=0)
    q.fail("a", now=0)
    assert popped(q, 0) == ["a2"]


# --- gates -------------------------------------------------------------------------------------


def test_a_scheduling_gate_keeps_a_pod_out_until_it_is_removed() -> None:
    q = queue()
    q.add(pending("a", gates=("example.com/quota", "example.com/x")), now=0)
    assert counts(q) == (0, 0, 0, 1)
    reason = "waiting for scheduling gates: [example.com/quota example.com/x]"
    assert [(g.plugin, g.reason) for g in q.take_gated()] == [("SchedulingGates", reason)]
    assert q.take_gated() == ()
    q.add(pending("a", gates=("example.com/x",)), now=1)
    assert [g.reason for g in q.take_gated()] == ["waiting for scheduling gates: [example.com/x]"]
    q.add(pending("a"), now=2)
    assert popped(q, 2) == ["a"]
    assert q.gate("a") is None


def test_a_gated_pod_is_tested_again_when_activated() -> None:
    closed = {"a"}
    q = queue(gate=lambda pod: "incomplete" if pod.uid in closed else None)
    q.add(pending("a"), now=0)
    assert q.activate(["a", "unknown"], now=1) == 0
    assert q.gate("a") is not None
    closed.clear()
    assert q.activate(["a"], now=2) == 1
    assert popped(q, 2) == ["a"]


def test_a_gate_that_closes_again_takes_the_pod_out_when_its_turn_comes() -> None:
    closed: set[str] = set()
    q = queue(gate=lambda pod: "incomplete" if pod.uid in closed else None)
    q.add(pending("a"), now=0)
    q.add(pending("b"), now=0)
    closed.add("a")
    assert popped(q, 0) == ["b"]
    assert counts(q) == (0, 0, 0, 1)
    q.remove("a")
    assert counts(q) == (0, 0, 0, 0)
    assert q.take_gated() == ()


def test_activation_skips_the_back_off_also_after_an_error() -> None:
    q = queue()
    for name, shape in (("refused", "a"), ("failed", "b")):
        q.add(pending(name, shape), now=0)
    popped(q)
    q.refuse("refused", {"Coscheduling"}, now=0)
    q.fail("failed", now=0)
    assert q.activate(["refused", "failed"], now=0) == 2
    assert sorted(popped(q, 0)) == ["failed", "refused"]


# --- gangs -------------------------------------------------------------------------------------


def test_members_of_a_gang_leave_in_a_row() -> None:
    q = queue()
    for number in range(2):
        for gang in ("default/b", "default/a"):
            q.add(pending(f"{gang}-{number}", gang=gang, created=number), now=5)
    assert popped(q, 5) == ["default/a-0", "default/a-1", "default/b-0", "default/b-1"]


def test_a_more_important_pod_leaves_between_the_members_of_a_gang() -> None:
    q = queue()
    for number in range(2):
        q.add(pending(f"g-{number}", gang="default/g"), now=0)
    assert pop(q) == "g-0"
    q.add(pending("important", priority=1), now=1)
    assert popped(q, 1) == ["important", "g-1"]


def gang_of(q: Queue, gang: str, shapes: list[str], now: float = 0.0) -> None:
    for number, shape in enumerate(shapes):
        q.add(pending(f"{gang}-{number}", shape, gang=gang), now)


def test_a_refused_member_holds_up_its_whole_gang_until_it_can_be_helped() -> None:
    q = queue()
    gang_of(q, "g", ["small", "small", "big", "small"])
    assert [pop(q) for _ in range(3)] == ["g-0", "g-1", "g-2"]
    assert q.untried(["g"]) == 1
    q.refuse_gangs("g-2", {"Taints"}, ["g"], ["g-0", "g-1"], now=0)
    assert counts(q) == (0, 0, 4, 0)
    assert q.untried(["g"]) == 0
    assert q.cluster_event(FREED, now=20) == 0
    assert q.cluster_event(TAINT_GONE, now=20) == 4
    assert q.untried(["g"]) == 4
    # The member that was refused is tried first.
    assert popped(q, 20) == ["g-2", "g-0", "g-1", "g-3"]


def test_a_gang_in_a_group_holds_up_the_others_of_the_group() -> None:
    q = queue()
    gang_of(q, "g", ["small"])
    gang_of(q, "h", ["small", "small"])
    gang_of(q, "other", ["small"])
    assert pop(q) == "g-0"
    q.refuse_gangs("g-0", {"Fit"}, ["g", "h"], [], now=0)
    assert counts(q) == (1, 0, 3, 0)
    assert popped(q) == ["other-0"]
    assert q.cluster_event(FREED, now=20) == 3


def test_a_new_member_makes_a_held_gang_active_with_it() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    pop(q)
    q.refuse_gangs("g-0", {"Fit"}, ["g"], [], now=0)
    q.add(pending("g-2", "small", gang="g"), now=0.5)
    assert counts(q) == (0, 3, 0, 0)
    q.advance(1)
    assert counts(q) == (3, 0, 0, 0)


def test_members_that_gave_their_nodes_back_wait_for_what_the_refused_one_waits_for() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    popped(q)
    q.refuse("g-1", {"Taints"}, now=0)
    q.return_waiting(["g-0"], ["g"], now=0)
    assert counts(q) == (0, 0, 2, 0)
    assert q.cluster_event(FREED, now=20) == 0
    assert q.cluster_event(TAINT_GONE, now=20) == 2


def test_members_that_gave_their_nodes_back_go_along_with_one_still_to_be_tried() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    assert pop(q) == "g-0"
    q.return_waiting(["g-0"], ["g"], now=0)
    assert counts(q) == (1, 1, 0, 0)
    assert popped(q, 0) == ["g-1", "g-0"]


def test_a_gang_backs_off_as_a_whole_after_an_error_of_one_member() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big", "small", "small"])
    assert [pop(q) for _ in range(2)] == ["g-0", "g-1"]
    q.fail_gangs("g-1", ["g"], ["g-0"], now=0)
    assert counts(q) == (0, 4, 0, 0)
    # No member is tried early: it would hold a node until g-1 is tried.
    assert popped(q, 0.9) == []
    # The member that had the error is tried first.
    assert popped(q, 1.0) == ["g-1", "g-2", "g-3", "g-0"]


def test_a_gang_waits_for_the_longest_back_off_of_its_members() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big", "small"])
    for now in (0.0, 1.0):
        assert pop(q, now) == "g-0"
        q.fail_gangs("g-0", ["g"], [], now)
    assert popped(q, 2.9) == []
    assert [pop(q, 3.0) for _ in range(3)] == ["g-0", "g-1", "g-2"]
    q.fail_gangs("g-0", ["g"], [], now=3.0)
    q.fail_gangs("g-1", ["g"], [], now=3.5)
    # Its time limit is over while others back off.
    q.return_waiting(["g-2"], ["g"], now=4.0)
    assert popped(q, 6.9) == []
    assert sorted(popped(q, 7.0)) == ["g-0", "g-1", "g-2"]


def test_members_that_gave_their_nodes_back_without_a_refusal_wait_for_activation() -> None:
    q = queue()
    gang_of(q, "g", ["small", "small"])
    popped(q)
    q.return_waiting(["g-0", "g-1"], ["g"], now=0)
    assert counts(q) == (0, 0, 2, 0)
    assert q.activate(["g-0"], now=1) == 2


def test_an_event_moves_all_that_wait_in_the_gang() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    popped(q)
    q.refuse("g-0", {"Fit"}, now=0)
    q.refuse("g-1", {"Taints"}, now=0)
    assert q.cluster_event(TAINT_GONE, now=20) == 2


def test_a_refusal_of_the_gang_ends_the_row_of_errors_too() -> None:
    q = queue()
    gang_of(q, "g", ["small"])
    for now in (0, 10, 20):
        pop(q, now)
        q.fail("g-0", now)
    pop(q, 30)
    q.refuse_gangs("g-0", {"Fit"}, ["g"], [], now=30)
    q.activate(["g-0"], now=40)
    pop(q, 40)
    q.fail("g-0", now=40)
    assert pop(q, 41) == "g-0"


def test_events_are_dropped_when_the_last_pod_lands() -> None:
    flights: InFlight[str] = InFlight()
    flights.start("a", "a")
    flights.start("b", "b")
    flights.record(FREED)
    flights.drop("a")
    assert flights.events_kept == 1
    assert list(flights) == ["b"]
    flights.drop("b")
    assert flights.events_kept == 0


def test_pods_that_come_to_a_place_are_counted_by_why() -> None:
    q = queue()
    for name in ("a", "b", "c"):
        q.add(pending(name), now=0.0)
    q.add(pending("gated", gates=("g",)), now=0.0)
    for name in popped(q):
        q.refuse(name, {"Fit"}, now=0.0)
    # They wait together, and each came there once.
    assert q.incoming == {
        ("UnschedulablePodAdd", "active"): 3,
        ("UnschedulablePodAdd", "unschedulable"): 1,
        ("ScheduleAttemptFailure", "unschedulable"): 3,
    }
    q.incoming.clear()
    q.cluster_event(FREED, now=0.5)
    q.advance(now=5.0)
    q.fail(pop(q, now=5.0), now=5.0)
    q.add(pending("gated"), now=5.0)
    assert q.incoming == {
        ("AssignedPodDelete", "backoff"): 3,
        ("BackoffComplete", "active"): 3,
        ("ScheduleAttemptFailure", "backoff"): 1,
        ("UnschedulablePodUpdatePodSchedulingGatesEliminated", "active"): 1,
    }


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
