"""The scheduling queue: the members of a gang are tried, held up and backed off together."""

from __future__ import annotations

from cluster.scheduler.cycle.waiting import QueueState
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


def test_a_new_or_edited_member_waits_until_its_gang_has_backed_off() -> None:
    """Tried before the others, it would hold a node until they are tried again."""
    q = queue()
    gang_of(q, "g", ["small", "small"])
    assert [pop(q) for _ in range(2)] == ["g-0", "g-1"]
    q.fail_gangs("g-1", ["g"], ["g-0"], now=0)
    q.add(pending("g-2", "small", gang="g"), now=0.1)
    q.add(pending("g-0", "big", gang="g"), now=0.2)
    q.add(pending("other", "small"), now=0.3)
    assert popped(q, 0.9) == ["other"]
    assert sorted(popped(q, 1.0)) == ["g-0", "g-1", "g-2"]


def test_a_new_member_of_a_gang_that_is_being_tried_comes_along() -> None:
    q = queue()
    gang_of(q, "g", ["small", "small"])
    assert pop(q) == "g-0"
    q.add(pending("g-2", "small", gang="g"), now=0.1)
    assert popped(q, 0.1) == ["g-1", "g-2"]


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


def test_members_that_fail_one_after_another_are_tried_at_one_time_and_move_no_others() -> None:
    """As when the API server refuses the bindings of a whole gang."""
    q = queue()
    names = [f"g-{number}" for number in range(6)]
    gang_of(q, "g", ["small"] * 6)
    assert [pop(q) for _ in names[:5]] == names[:5]
    held_up = [q.fail_gangs(name, ["g"], [], now=0.1 * at) for at, name in enumerate(names[:5])]
    # The one that was not tried waits with the first; the others have errors of their own.
    assert held_up == [("g-5",), (), (), (), ()]
    came = q.incoming["ScheduleAttemptFailure", "backoff"]
    assert came == len(names)
    assert popped(q, 0.9) == []
    assert sorted(popped(q, 1.0)) == names


def test_a_member_that_fails_much_later_has_the_others_wait_for_it() -> None:
    q = queue()
    gang_of(q, "g", ["small"] * 2)
    assert [pop(q) for _ in range(2)] == ["g-0", "g-1"]
    q.fail_gangs("g-0", ["g"], [], now=0.0)
    q.fail_gangs("g-1", ["g"], [], now=0.9)
    assert popped(q, 1.8) == []
    assert sorted(popped(q, 1.9)) == ["g-0", "g-1"]


def test_members_that_an_event_wakes_wait_for_the_one_that_had_an_error() -> None:
    """Tried before, they would keep nodes from other pods until it is tried again."""
    q = queue()
    gang_of(q, "g", ["small", "big", "small"])
    gang_of(q, "h", ["small"])
    assert [pop(q) for _ in range(2)] == ["g-0", "g-1"]
    # Meanwhile extenders are asked about g-0.
    q.refuse_gangs("g-1", {"Fit"}, ["g", "h"], [], now=0)
    q.fail_gangs("g-0", ["g", "h"], [], now=5.0)
    assert counts(q) == (0, 1, 3, 0)
    assert q.cluster_event(FREED, now=5.5) == 3
    assert counts(q) == (0, 4, 0, 0)
    assert popped(q, 5.9) == []
    assert popped(q, 6.0) == ["g-0", "g-1", "g-2", "h-0"]


def test_what_members_wait_for_together_is_asked_about_once() -> None:
    """Members of a gang that is not strict can all differ, and wait for all refused ones."""
    asked: list[str] = []

    def hint(pod: Pod, old: object, new: object) -> bool:
        asked.append(pod.uid)
        return False

    q = queue(hint=hint)
    gang_of(q, "g", [f"shape-{number}" for number in range(6)])
    popped(q)
    for number in range(3):
        q.refuse(f"g-{number}", {"Fit"}, now=0)
    q.return_waiting([f"g-{number}" for number in range(3, 6)], ["g"], now=0)
    assert q.cluster_event(FREED, now=20) == 0
    assert sorted(asked) == sorted([*("g-0", "g-1", "g-2") * 2])


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


def test_the_back_off_of_a_gang_grows_with_each_refusal() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    for pause in (1, 2, 4):
        now = 100 * pause
        popped(q, now)
        q.refuse_gangs("g-1", {"Fit"}, ["g"], ["g-0"], now=now)
        q.cluster_event(FREED, now=now)
        q.advance(now + pause - 0.5)
        assert counts(q) == (0, 2, 0, 0)
        q.advance(now + pause)
        assert counts(q) == (2, 0, 0, 0)


def test_the_refused_member_of_a_gang_is_tried_first_when_it_may_be_helped() -> None:
    q = queue()
    gang_of(q, "g", ["same", "same", "same"])
    popped(q)
    q.refuse_gangs("g-1", {"Fit"}, ["g"], ["g-0"], now=0)
    assert q.state_of("g-2") is QueueState.IN_FLIGHT
    q.cluster_event(FREED, now=20)
    assert popped(q, 20) == ["g-1", "g-0"]


def test_members_give_their_nodes_back_although_the_refused_one_is_gone() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big"])
    popped(q)
    q.remove("g-1")
    q.refuse_gangs("g-1", {"Fit"}, ["g"], ["g-0"], now=0)
    assert counts(q) == (0, 0, 1, 0)
    assert q.activate(["g-0"], now=1) == 1


def test_a_member_that_leaves_wakes_those_that_it_held_up_and_no_others() -> None:
    q = queue()
    gang_of(q, "g", ["small", "big", "other"])
    popped(q)
    q.refuse_gangs("g-1", {"Taints"}, ["g"], ["g-0"], now=0)
    q.remove("g-2")
    q.release("g-2", ["g"], now=20)
    assert counts(q) == (0, 0, 2, 0)
    q.remove("g-1")
    q.release("g-1", ["g"], now=20)
    assert counts(q) == (1, 0, 0, 0)


def test_a_new_member_backs_off_with_those_that_are_left() -> None:
    q = queue()
    gang_of(q, "g", ["a", "b", "c"])
    popped(q)
    for number in range(3):
        q.fail(f"g-{number}", now=0)
    q.remove("g-1")
    q.add(pending("g-3", "d", gang="g"), now=0.5)
    assert counts(q) == (0, 3, 0, 0)
    # Once one of them is tried, a new member comes along with it.
    q.activate(["g-0"], now=0.5)
    q.add(pending("g-4", "e", gang="g"), now=0.5)
    assert counts(q) == (2, 2, 0, 0)


def test_members_that_join_refused_ones_are_counted_once() -> None:
    q = queue()
    gang_of(q, "g", ["same", "same"])
    popped(q)
    q.refuse_gangs("g-0", {"Fit"}, ["g"], ["g-1"], now=0)
    q.incoming.clear()
    for number in (2, 3, 4):
        q.add(pending(f"g-{number}", "same", gang="g"), now=0.5)
    # The first one wakes those that were refused, which back off with it.
    assert counts(q) == (0, 5, 0, 0)
    assert q.incoming == {("UnschedulablePodAdd", "backoff"): 5}
