"""The scheduling queue: order, back-off, replicas, edits and gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.cycle.waiting import Backoff, QueueState
from tests.cluster.scheduler.cycle.queues import (
    FREED,
    TAINT_GONE,
    Queue,
    counts,
    pop,
    popped,
    queue,
)
from tests.cluster.scheduler.pending import Pod, pending


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


def test_attempts_are_numbered_in_their_order() -> None:
    q = queue()
    for name in ("a", "b"):
        q.add(pending(name), now=7)
    assert (q.order("a"), q.tries("a")) == (0, (0, 7.0))
    assert popped(q, 8) == ["a", "b"]
    assert (q.order("a"), q.order("b"), q.tries("b")) == (1, 2, (1, 7.0))
    assert (q.order("unknown"), q.tries("unknown")) == (0, (0, 0.0))


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
    assert q.state_of("refused") is QueueState.BACKOFF
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


def test_a_pod_refused_alone_waits_for_other_changes_than_its_replicas() -> None:
    q = queue()
    refused_replicas(q, 2)
    q.add(pending("a-2"), now=0)
    q.refuse_alone(pop(q), {"Taints"}, now=0)
    assert q.cluster_event(FREED, now=20) == 2
    assert q.state_of("a-2") is QueueState.UNSCHEDULABLE
    assert q.cluster_event(TAINT_GONE, now=20) == 1


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
    pod = q.pop(0)
    assert pod is not None
    assert pod.shape.name == "smaller"
    assert q.tries("a") == (2, 0.0)


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
