"""Gangs over the queue: who waits, who is bound, who gives a node back, and why."""

from __future__ import annotations

import pytest

from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent, EventTable, Registration
from cluster.scheduler.cycle.permit import Decision, Decisions, Permit, bind_annotations, gang_gate
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.tables.gang_definitions import GangDefinition, GangMode
from cluster.scheduler.tables.gangs import Gangs, Step
from tests.cluster.scheduler.pending import FakeShape, pending

FIT = {"Fit"}
FREED = ClusterEvent(POD, Action.DELETE)


class Scheduler:
    """A permit with its queue and gangs. Pods of shape "none" find no node."""

    def __init__(self) -> None:
        self.gangs = Gangs()
        self.queue: SchedulingQueue[FakeShape] = SchedulingQueue(
            EventTable({"Fit": [Registration(POD, Action.DELETE)]}), gates=[gang_gate(self.gangs)]
        )
        self.permit = Permit(self.queue, self.gangs)
        self.now = 0.0

    def add(self, gang: str, *shapes: str, first: int = 0) -> None:
        for number, shape in enumerate(shapes, first):
            assert not self.permit.add(pending(f"{gang}-{number}", shape, gang=gang), self.now)

    def step(self) -> Decisions:
        """Try one pod."""
        pod = self.permit.pop(self.now)
        assert pod is not None
        if pod.shape.name == "none":
            return self.permit.refused(pod.uid, FIT, "0/3 nodes are available", self.now)
        return self.permit.placed(pod.uid, self.now)

    def steps(self, count: int) -> Decisions:
        return tuple(decision for _ in range(count) for decision in self.step())

    def places(self, *uids: str) -> list[str]:
        places = [self.queue.state_of(uid) for uid in uids]
        return ["gone" if place is None else place.value for place in places]


def gang(
    name: str,
    minimum: int,
    *group: str,
    mode: GangMode = GangMode.STRICT,
    policy: GangMatchPolicy = GangMatchPolicy.ONCE_SATISFIED,
    wait_s: float = 600.0,
) -> GangDefinition:
    return GangDefinition(
        id=name,
        min_member=minimum,
        total=minimum,
        mode=mode,
        wait_s=wait_s,
        group=tuple(sorted({name, *group})),
        match_policy=policy,
    )


def one(decisions: Decisions) -> Decision:
    (decision,) = decisions
    return decision


def test_a_pod_without_a_gang_is_allowed_at_once_and_loses_copied_annotations() -> None:
    s = Scheduler()
    s.add("", "a")
    decision = one(s.step())
    assert decision.allow == ("-0",)
    assert set(decision.annotations.values()) == {None}
    assert len(decision.annotations) == 4


def test_members_are_gated_with_a_reason_until_the_gang_is_complete() -> None:
    s = Scheduler()
    s.add("g", "a", "a")
    reasons = {gated.pod.uid: gated.reason for gated in s.queue.take_gated()}
    assert set(reasons) == {"g-0", "g-1"}
    assert reasons["g-0"].startswith("gang g has no minimum: there is no valid PodGroup g")
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", first=2)
    assert s.places("g-0", "g-1", "g-2") == ["active"] * 3


def test_the_reason_of_a_gated_member_does_not_change_with_each_pod() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 4), s.now)
    s.add("g", "a", "a", "a")
    reasons = [gated.reason for gated in s.queue.take_gated()]
    assert reasons == ["gang g waits until gang g has at least 4 pods"] * 3


def test_all_members_are_allowed_when_the_last_has_a_node() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", "a", "a")
    assert s.steps(2) == ()
    assert s.permit.waiting_groups() == 1
    decision = one(s.step())
    assert sorted(decision.allow) == ["g-0", "g-1", "g-2"]
    assert decision.annotations == bind_annotations("g", 3)
    assert decision.annotations["internal.scheduling.koordinator.sh/bind-gang-group-id"] == "g"
    assert decision.annotations["scheduling.koordinator.sh/bind-gang-member-count"] == "3"
    assert s.permit.waiting_groups() == 0


def test_members_that_are_allowed_do_not_wait_any_more() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, mode=GangMode.NON_STRICT, wait_s=60.0), s.now)
    s.add("g", "a", "a")
    s.step()
    assert s.permit.next_time() == 60.0
    assert one(s.step()).allow == ("g-0", "g-1")
    assert s.permit.next_time() is None
    assert s.permit.expire(61.0) == ()


def test_an_edit_of_a_member_that_waits_changes_nothing() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", "a", "a")
    s.step()
    assert not s.permit.add(pending("g-0", "edited", gang="g"), s.now)
    assert s.places("g-0") == ["in flight"]
    assert sorted(one(s.steps(2)).allow) == ["g-0", "g-1", "g-2"]


def test_a_member_that_another_program_binds_counts_for_those_that_wait() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3, policy=GangMatchPolicy.WAITING_AND_RUNNING), s.now)
    s.add("g", "a", "a", "a")
    s.steps(2)
    assert s.permit.bound("g-0", s.now, gang="g") == ()
    assert s.places("g-0", "g-1") == ["gone", "in flight"]
    decision = one(s.step())
    assert sorted(decision.allow) == ["g-1", "g-2"]
    assert decision.annotations == bind_annotations("g", 2)


def test_a_pod_that_is_bound_without_its_gang_leaves_it() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2), s.now)
    s.add("g", "a", "a")
    s.step()
    # With one member less the gang is not complete.
    decision = one(s.permit.bound("g-1", s.now, gang=""))
    assert decision.give_back == ("g-0",)
    assert s.permit.bound("alone", s.now) == ()


def test_what_a_gang_needs_is_the_same_object_as_long_as_nothing_changes() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2), s.now)
    s.add("g", "a", "a")
    first = s.permit.wanted("g-0")
    assert [pod.uid for pod in first[0].pods] == ["g-0", "g-1"]
    assert s.permit.wanted("g-1") is first
    s.permit.add(pending("g-1", "edited", gang="g"), s.now)
    assert s.permit.wanted("g-0") is not first
    assert s.permit.unbound("unknown") == ()


def test_a_strict_gang_gives_its_nodes_back_at_once() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 4), s.now)
    s.add("g", "a", "a", "none", "a")
    assert s.steps(2) == ()
    decision = one(s.step())
    assert decision.allow == ()
    assert sorted(decision.give_back) == ["g-0", "g-1"]
    assert decision.held_up == ("g-3",)
    assert decision.gangs == ("g",)
    assert decision.message == (
        'GangGroup "g" gets rejected due to member Pod "default/g-2" is unschedulable with reason'
        ' "0/3 nodes are available", alreadyWaitForBound: 2'
    )
    assert s.places("g-0", "g-1", "g-2", "g-3") == ["unschedulable"] * 4
    assert s.permit.next_time() is None


def test_a_nonstrict_gang_keeps_its_nodes_until_all_were_tried() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3, mode=GangMode.NON_STRICT), s.now)
    s.add("g", "a", "none", "a")
    assert s.steps(2) == ()
    assert s.places("g-0", "g-1", "g-2") == ["in flight", "unschedulable", "active"]
    decision = one(s.step())
    assert sorted(decision.give_back) == ["g-0", "g-2"]
    assert s.places("g-0", "g-1", "g-2") == ["unschedulable"] * 3


def test_a_nonstrict_gang_is_allowed_without_the_member_that_found_no_node() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, mode=GangMode.NON_STRICT), s.now)
    s.add("g", "a", "none", "a")
    decisions = s.steps(3)
    assert sorted(one(decisions).allow) == ["g-0", "g-2"]


def test_nodes_that_a_gang_gave_back_do_not_wake_it_nor_pods_refused_before() -> None:
    s = Scheduler()
    s.add("", "none")
    s.step()
    s.permit.define(gang("g", 2), s.now)
    s.add("g", "a", "none")
    s.step()
    s.permit.add(pending("meanwhile", "none", priority=9), s.now)
    s.step()
    decision = one(s.step())
    event = ClusterEvent(POD, Action.DELETE, undoes=decision.undoes, gangs=decision.gangs)
    assert s.queue.cluster_event(event, now=50) == 1
    assert s.places("-0", "g-0", "g-1", "meanwhile") == ["unschedulable"] * 3 + ["active"]


def test_other_pods_and_gangs_are_tried_while_a_gang_waits() -> None:
    s = Scheduler()
    for name in ("g", "h"):
        s.permit.define(gang(name, 2), s.now)
        s.add(name, "a", "a")
    s.step()
    s.permit.add(pending("important", priority=9), s.now)
    assert one(s.step()).allow == ("important",)
    assert sorted(one(s.step()).allow) == ["g-0", "g-1"]
    assert sorted(one(s.steps(2)).allow) == ["h-0", "h-1"]


def test_a_group_is_allowed_together() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, "h"), s.now)
    s.add("g", "a", "a")
    assert s.places("g-0") == ["gated"]
    s.permit.define(gang("h", 1, "g"), s.now)
    s.add("h", "a")
    decision = one(s.steps(3))
    assert sorted(decision.allow) == ["g-0", "g-1", "h-0"]
    assert decision.annotations == bind_annotations("g,h", 3)


def test_a_refused_member_of_a_group_takes_the_other_gangs_with_it() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 1, "h"), s.now)
    s.permit.define(gang("h", 2, "g"), s.now)
    s.add("g", "a")
    s.add("h", "none", "a")
    decision = one(s.steps(2))
    assert (decision.give_back, decision.held_up) == (("g-0",), ("h-1",))
    assert s.queue.count(QueueState.UNSCHEDULABLE) == 3


@pytest.mark.parametrize(
    ("policy", "allowed"),
    [
        (GangMatchPolicy.ONCE_SATISFIED, True),
        (GangMatchPolicy.WAITING_AND_RUNNING, True),
        (GangMatchPolicy.ONLY_WAITING, False),
    ],
)
def test_a_member_that_comes_after_the_others_were_bound(
    policy: GangMatchPolicy, allowed: bool
) -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, policy=policy), s.now)
    s.add("g", "a", "a")
    for uid in one(s.steps(2)).allow:
        s.permit.bound(uid, s.now)
    s.add("g", "a", first=2)
    decision = one(s.step())
    assert decision.allow == (("g-2",) if allowed else ())
    assert decision.give_back == (() if allowed else ("g-2",))


def test_terminated_members_do_not_count_as_running() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, policy=GangMatchPolicy.WAITING_AND_RUNNING), s.now)
    s.add("g", "a", "a")
    for uid in one(s.steps(2)).allow:
        s.permit.bound(uid, s.now)
        s.permit.gone(uid, s.now)
    s.add("g", "a", first=2)
    assert s.places("g-2") == ["gated"]
    s.add("g", "a", first=3)
    assert s.step() == ()
    assert sorted(one(s.step()).allow) == ["g-2", "g-3"]


def test_bound_pods_seen_after_a_restart_count() -> None:
    s = Scheduler()
    definition = gang("g", 3)
    s.permit.bound("old", s.now, gang="g", defines=definition)
    s.add("g", "a")
    assert one(s.step()).allow == ("g-0",)


@pytest.mark.parametrize("mode", list(GangMode))
def test_a_wait_ends_at_its_time_and_not_before_even_above_15_minutes(mode: GangMode) -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3, mode=mode, wait_s=7200.0), s.now)
    s.add("g", "a", "a", "a")
    s.step()
    s.now = 5.0
    s.step()
    assert s.permit.next_time() == 7200.0
    assert s.permit.expire(7199.0) == ()
    decision = one(s.permit.expire(7200.0))
    strict = mode is GangMode.STRICT
    assert sorted(decision.give_back) == (["g-0", "g-1"] if strict else ["g-0"])
    assert "time limit" in decision.message
    # g-2 is still to be tried, and the others are tried with it.
    assert s.places("g-0", "g-2") == ["backoff", "active"]


def test_an_error_of_one_member_makes_a_strict_gang_give_back() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", "a", "a")
    s.step()
    pod = s.permit.pop(s.now)
    assert pod is not None
    decision = one(s.permit.failed(pod.uid, "etcd is slow", s.now))
    assert (decision.give_back, decision.held_up) == (("g-0",), ("g-2",))
    assert "etcd is slow" in decision.message
    # Neither those that have given back nor those that were not tried take nodes meanwhile.
    assert s.places("g-0", "g-1", "g-2") == ["backoff"] * 3
    assert s.permit.pop(s.now) is None
    s.now = 5.0
    assert sorted(one(s.steps(3)).allow) == ["g-0", "g-1", "g-2"]


def test_a_failed_binding_of_a_satisfied_gang_affects_that_pod_alone() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2), s.now)
    s.add("g", "a", "a")
    s.steps(2)
    assert s.permit.bound("g-0", s.now) == ()
    assert s.permit.failed("g-1", "conflict", s.now) == ()
    s.now = 2.0
    assert one(s.step()).allow == ("g-1",)


def test_a_gang_that_is_not_complete_any_more_gives_back() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", "a", "a")
    s.step()
    decision = one(s.permit.gone("g-2", s.now))
    assert decision.give_back == ("g-0",)
    assert "gang g waits until gang g has at least 3 pods" in decision.message
    assert s.permit.pop(s.now + 60) is None
    assert s.places("g-1") == ["gated"]


def test_a_deleted_pod_group_gives_back_and_a_new_one_starts_over() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2), s.now)
    s.add("g", "a", "a")
    s.step()
    assert one(s.permit.undefine("g", s.now)).give_back == ("g-0",)
    assert s.permit.pop(s.now) is None
    s.permit.define(gang("g", 2), s.now)
    assert sorted(one(s.steps(2)).allow) == ["g-0", "g-1"]


def test_a_lower_minimum_allows_the_members_that_wait() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 3), s.now)
    s.add("g", "a", "a", "a")
    s.steps(2)
    assert sorted(one(s.permit.define(gang("g", 2), s.now)).allow) == ["g-0", "g-1"]


def test_a_repeated_pod_group_event_does_not_make_refused_pods_active() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 1), s.now)
    s.add("g", "none")
    s.step()
    s.permit.define(gang("g", 1), s.now)
    assert s.places("g-0") == ["unschedulable"]


def test_a_changed_group_moves_the_gang() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 1, "h"), s.now)
    s.permit.define(gang("h", 2, "g"), s.now)
    s.add("g", "a")
    s.add("h", "a", "a")
    assert s.step() == ()
    # g does not wait for h any more; h still names g, which has enough.
    assert one(s.permit.define(gang("g", 1), s.now)).allow == ("g-0",)


def test_a_gang_that_is_named_by_another_without_naming_it_back_does_not_wait_for_it() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2, "h"), s.now)
    s.permit.define(gang("h", 2), s.now)
    s.add("g", "a")
    s.add("h", "a", "a")
    assert s.step() == ()
    assert sorted(one(s.step()).allow) == ["h-0", "h-1"]
    assert s.places("g-0") == ["gated"]


def test_a_pod_that_changes_its_gang_gives_its_node_back() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 2), s.now)
    s.permit.define(gang("h", 1), s.now)
    s.add("g", "a", "a")
    s.step()
    decision = one(s.permit.add(pending("g-0", gang="h"), s.now))
    assert decision.give_back == ("g-0",)
    assert one(s.step()).allow == ("g-0",)
    known = s.gangs.get("g")
    assert known is not None and len(known) == 1


def test_an_annotation_gang_is_defined_by_its_first_pod_and_ends_with_its_last() -> None:
    s = Scheduler()
    s.permit.add(pending("a", gang="g"), s.now, defines=gang("g", 2))
    s.permit.add(pending("b", gang="g"), s.now, defines=gang("g", 9))
    s.permit.gone("a", s.now)
    known = s.gangs.get("g")
    assert known is not None and known.definition == gang("g", 2)
    s.permit.gone("b", s.now)
    assert s.gangs.get("g") is None
    s.permit.add(pending("c", gang="g"), s.now, defines=gang("g", 1))
    assert one(s.step()).allow == ("c",)


def test_a_pod_with_room_made_by_preemption_waits_alone() -> None:
    s = Scheduler()
    s.permit.define(gang("g", 1, mode=GangMode.NON_STRICT), s.now)
    s.add("g", "none")
    pod = s.permit.pop(s.now)
    assert pod is not None
    assert s.permit.refused_alone("g-0", FIT, s.now) == ()
    assert s.gangs.step("g-0") is Step.PENDING
    assert s.queue.cluster_event(FREED, now=20) == 1
