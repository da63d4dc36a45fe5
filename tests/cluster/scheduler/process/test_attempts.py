"""What becomes of a member that waits on its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.attempts import Attempts
from cluster.scheduler.binding.events import Event
from cluster.scheduler.binding.placement import Bound, Placement, Refused, Why
from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.events import NODE, POD, Action, ClusterEvent
from cluster.scheduler.cycle.gang_plans import PlanOutdated
from cluster.scheduler.cycle.headroom import headroom_of
from cluster.scheduler.cycle.permit import Permit, gang_gate
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.metrics import SchedulerMetrics
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.registrations import registrations
from cluster.scheduler.tables.gang_definitions import (
    GangDefaults,
    GangDefinition,
    GangMode,
    gang_from_pod,
)
from cluster.scheduler.tables.gangs import Gangs
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_GANG = {
    "gang.scheduling.koordinator.sh/name": "g",
    "gang.scheduling.koordinator.sh/min-available": "2",
    "gang.scheduling.koordinator.sh/mode": "NonStrict",
}


class _Writers:
    def __init__(self) -> None:
        self.bound: list[str] = []
        self.placements: dict[str, Placement] = {}
        self.settled_pods: list[str] = []
        self.events: list[Event] = []

    def bind(self, placement: Placement) -> None:
        self.bound.append(placement.name)
        self.placements[placement.name] = placement

    def status(self, *_: Any) -> None: ...
    def event(self, event: Event) -> None:
        self.events.append(event)

    def evict(self, *_: Any) -> None: ...
    def settled(self, placement: Any) -> None:
        self.settled_pods.append(placement.name)

    def reserve(self, *_: Any) -> None: ...
    def refuse_reservation(self, *_: Any) -> None: ...


class _Bed:
    def __init__(self) -> None:
        self.tables = Tables()
        self.pods: dict[str, SchedulingPod] = {}
        """As the watch shows them, where a test looks at that."""
        gangs = Gangs()
        self.queue: SchedulingQueue[PodShape] = SchedulingQueue(
            registrations(), gates=(gang_gate(gangs),)
        )
        self.permit: Permit[PodShape] = Permit(self.queue, gangs)
        self.writers = _Writers()
        profile = Profile("koord-scheduler", filters=(NodeResourcesFit(),))
        self.attempts = Attempts(
            Scheduling(self.tables, {"koord-scheduler": profile}, seed=1),
            self.queue,
            self.permit,
            SchedulerMetrics(self.queue),
            self.writers,
            clock=lambda: 0.0,
            pod_of=self.pods.get,
        )
        self._shapes = Shapes()

    def add(self, name: str, cpu: str, *, gang: bool = False, priority: int = 0) -> None:
        pod = make_pod(
            name,
            requests={"cpu": cpu},
            annotations=_GANG if gang else {},
            schedulerName="koord-scheduler",
            priority=priority,
        )
        pending = PendingPod(
            key=f"default/{name}",
            uid=name,
            priority=priority,
            shape=self._shapes.of(pod),
            created=0.0,
            gang="default/g" if gang else "",
        )
        defines = gang_from_pod(pod.metadata, GangDefaults()).definition if gang else None
        self.permit.add(pending, 0.0, defines=defines)


def test_a_member_that_is_deleted_while_it_waits_leaves_its_room_to_others() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("late", "1", gang=True, priority=9)
    bed.add("waits", "3", gang=True, priority=8)
    bed.add("other", "2")
    # One member meets an error and backs off, so that the next one waits for it on the node.
    popped = bed.permit.pop(0.0)
    assert popped is not None and popped.uid == "late"
    bed.permit.failed("late", "an error", 0.0)
    assert bed.attempts.next(0.0)
    assert list(bed.tables.bookings) == ["waits"]
    assert bed.writers.bound == []
    assert bed.attempts.next(0.0)
    assert bed.queue.state_of("other") is QueueState.UNSCHEDULABLE
    bed.attempts.follow(bed.permit.gone("waits", 0.0))
    bed.attempts.forget("waits")
    assert not bed.tables.bookings
    assert bed.attempts.held == 0
    assert bed.queue.state_of("other") is not QueueState.UNSCHEDULABLE
    assert bed.attempts.next(2.0)
    assert bed.writers.bound == ["other"]


def test_a_gang_that_is_known_not_to_fit_books_no_node_even_for_a_moment() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "3"}))
    for number in range(2):
        bed.add(f"member-{number}", "2", gang=True, priority=5)
    version = bed.tables.nodes.version
    while bed.attempts.next(0.0):
        assert bed.tables.nodes.version == version
    assert bed.queue.state_of("member-1") is QueueState.UNSCHEDULABLE
    # A node that has room for the rest has both tried.
    bed.tables.upsert_node(make_node("m", allocatable={"cpu": "2"}))
    bed.queue.cluster_event(ClusterEvent(NODE, Action.ADD), 0.0)
    while bed.attempts.next(20.0):
        pass
    assert sorted(bed.writers.bound) == ["member-0", "member-1"]


def _node_comes(bed: _Bed) -> None:
    bed.tables.upsert_node(make_node("m", allocatable={"cpu": "2"}))
    bed.queue.cluster_event(ClusterEvent(NODE, Action.ADD), 0.0)


def _node_grows(bed: _Bed) -> None:
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "5"}))
    bed.queue.cluster_event(ClusterEvent(NODE, Action.UPDATE_NODE_ALLOCATABLE), 0.0)


def _pod_ends(bed: _Bed) -> None:
    bed.tables.remove("other")
    bed.queue.cluster_event(ClusterEvent(POD, Action.DELETE, old=make_pod("other")), 0.0)


def _members_ask_for_less(bed: _Bed) -> None:
    for number in range(3):
        bed.add(f"member-{number}", "1500m", gang=True)


def _members_that_need_less_come(bed: _Bed) -> None:
    for name in ("late-0", "late-1"):
        bed.add(name, "1500m", gang=True, priority=1)


def _fewer_are_needed(bed: _Bed) -> None:
    mode, policy = GangMode.NON_STRICT, GangMatchPolicy.ONCE_SATISFIED
    definition = GangDefinition("default/g", 1, 3, mode, 600.0, ("default/g",), policy)
    bed.attempts.follow(bed.permit.define(definition, 0.0))


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        (_node_comes, 2),
        (_node_grows, 2),
        (_pod_ends, 2),
        (_members_ask_for_less, 2),
        (_members_that_need_less_come, 2),
        (_fewer_are_needed, 1),
    ],
)
def test_what_makes_room_for_a_gang_that_is_not_strict_has_it_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[_Bed], None], bound: int
) -> None:
    counted = 0

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return headroom_of(*args)

    monkeypatch.setattr("cluster.scheduler.cycle.gang_plans.headroom_of", counting)
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("other", "1")
    while bed.attempts.next(0.0):
        pass
    assert bed.writers.bound == ["other"]
    for number in range(3):
        bed.add(f"member-{number}", "2", gang=True)
    for _ in range(3):
        assert bed.attempts.next(0.0)
    # Two of the members need room together, and there is room for one: that is found out once.
    assert bed.writers.bound == ["other"]
    assert counted == 1
    change(bed)
    # Back-offs end meanwhile.
    for now in range(1, 60):
        bed.attempts.next(float(now))
    assert len(bed.writers.bound) == 1 + bound


@pytest.mark.parametrize("why", [Why.DELETED, Why.OTHER_UID])
def test_a_pod_that_is_gone_before_its_binding_leaves_its_room_to_others(why: Why) -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("first", "3", priority=9)
    bed.add("other", "2")
    while bed.attempts.next(0.0):
        pass
    assert bed.queue.state_of("other") is QueueState.UNSCHEDULABLE
    bed.attempts.bound(bed.writers.placements["first"], Refused(why, "not found"))
    assert not bed.tables.bookings
    assert bed.attempts.next(2.0)
    assert bed.writers.bound == ["first", "other"]


def test_a_pod_whose_node_stays_locked_is_tried_on_another_node_first() -> None:
    bed = _Bed()
    for name in ("a", "b"):
        bed.tables.upsert_node(make_node(name, allocatable={"cpu": "100"}))
    now = 0.0
    for number in range(10):
        name = f"p{number}"
        bed.add(name, "1")
        nodes = []
        for _ in range(3):
            now += 20
            assert bed.attempts.next(now)
            nodes.append(bed.writers.placements[name].node)
            refused = Refused(Why.LOCKED, "held until pod other/p has its devices")
            bed.attempts.bound(bed.writers.placements[name], refused)
        assert nodes in (["a", "b", "a"], ["b", "a", "b"])
        bed.attempts.follow(bed.permit.gone(name, now))
        bed.attempts.forget(name)
    # Without another node the pod waits for the same one again.
    bed.tables.delete_node("b")
    bed.add("last", "1")
    for _ in range(2):
        now += 20
        assert bed.attempts.next(now)
        assert bed.writers.placements["last"].node == "a"
        bed.attempts.bound(bed.writers.placements.pop("last"), Refused(Why.LOCKED, "held"))


def test_a_pod_with_a_finalizer_that_is_deleted_before_its_binding_keeps_no_room() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("first", "3", priority=9)
    bed.add("other", "2")
    while bed.attempts.next(0.0):
        pass
    pod = make_pod("first", schedulerName="koord-scheduler")
    uid = msgspec.structs.replace(pod.metadata, uid="first")
    bed.pods["default/first"] = msgspec.structs.replace(pod, metadata=uid)
    # The watch shows the deletion; the object stays, and never gets a node.
    bed.attempts.follow(bed.permit.gone("first", 0.0))
    bed.attempts.forget("first")
    assert list(bed.tables.bookings) == ["first"]
    bed.attempts.bound(bed.writers.placements["first"], Refused(Why.DELETED, "being deleted"))
    assert not bed.tables.bookings
    assert bed.attempts.next(2.0)
    assert bed.writers.bound == ["first", "other"]


@pytest.mark.parametrize("step", ["expire", "pop", "take_gated", "_attempt", "abandon"])
def test_a_fault_in_one_step_does_not_end_scheduling(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("first", "1")
    broken = {"expire": bed.permit, "pop": bed.permit, "take_gated": bed.queue}.get(
        step, bed.attempts
    )

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(broken, step, fails)
        if step == "abandon":
            patch.setattr(bed.attempts, "_attempt", fails)
        for _ in range(3):
            bed.attempts.next(0.0)
    assert bed.attempts.faults.count > 0
    bed.add("second", "1")
    while bed.attempts.next(20.0):
        pass
    assert "second" in bed.writers.bound


def test_a_pod_that_is_bound_is_settled_and_has_an_event() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("first", "3")
    assert bed.attempts.next(0.0)
    assert (bed.attempts.waits_on("first"), bed.attempts.held) == ("n", 1)
    assert bed.attempts.profile_of("first") == "koord-scheduler"
    pending = bed.queue.pod("first")
    assert pending is not None
    bed.attempts.evictions._nominator.nominate(pending, "n")
    bed.attempts.bound(bed.writers.placements["first"], Bound())
    assert bed.writers.settled_pods == ["first"]
    (event,) = bed.writers.events
    assert (event.reason, event.about.uid, event.controller) == (
        "Scheduled",
        "first",
        "koord-scheduler",
    )
    assert event.note == "Successfully assigned default/first to n"
    # It is promised its node no longer, and nothing is known of an attempt.
    assert bed.attempts.evictions._nominator.node_of("first") == ""
    assert (bed.attempts.waits_on("first"), bed.attempts.held) == ("", 0)
    assert bed.attempts.profile_of("first") == ""
    assert list(bed.tables.bookings) == ["first"]
    assert bed.queue.state_of("first") is None


def test_a_binding_that_succeeds_after_its_pod_was_forgotten_is_settled() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("first", "3")
    assert bed.attempts.next(0.0)
    bed.attempts.forget("first")
    bed.attempts.bound(bed.writers.placements["first"], Bound())
    assert bed.writers.settled_pods == ["first"]
    assert not bed.writers.events


def test_an_attempt_that_is_taken_back_wakes_those_alone_that_were_refused_after_it() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("before", "5", priority=9)
    bed.add("first", "3", priority=8)
    bed.add("after", "2")
    while bed.attempts.next(0.0):
        pass
    bed.attempts.bound(bed.writers.placements["first"], Refused(Why.FAILING, "etcd is slow"))
    assert not bed.tables.bookings
    states = [bed.queue.state_of(uid) for uid in ("before", "first", "after")]
    assert states == [QueueState.UNSCHEDULABLE, QueueState.BACKOFF, QueueState.BACKOFF]


def test_a_pod_that_another_program_binds_while_it_waits_keeps_its_booking() -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    bed.add("waits", "1", gang=True, priority=9)
    bed.add("late", "1", gang=True, priority=8)
    assert bed.attempts.next(0.0)
    assert bed.attempts.held == 1
    bed.attempts.seen_bound("waits")
    assert bed.attempts.held == 0
    assert list(bed.tables.bookings) == ["waits"]
    # A binding that is under way goes on.
    bed.add("alone", "1")
    while bed.attempts.next(0.0):
        pass
    held = bed.attempts.held
    bed.attempts.seen_bound("alone")
    assert bed.attempts.held == held


def test_a_member_whose_plan_does_not_hold_any_more_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = _Bed()
    bed.tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    for name in ("first", "second"):
        bed.add(name, "1", gang=True)

    def outdated(*_: Any) -> str:
        raise PlanOutdated("gang default/g was gathered before this pod came")

    with monkeypatch.context() as patch:
        patch.setattr(bed.attempts._plans, "node_for", outdated)
        assert bed.attempts.next(0.0)
    assert bed.queue.state_of("first") is QueueState.BACKOFF
    assert not bed.attempts.faults.count
    while bed.attempts.next(5.0):
        pass
    assert sorted(bed.writers.bound) == ["first", "second"]
