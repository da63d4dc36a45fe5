"""What follows from a preemption: victims, nominations, and who gets the room."""

from __future__ import annotations

import pytest

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.cycle.waiting import QueueState
from tests.cluster.scheduler.beds.core import Bed


def _full() -> Bed:
    """Return two nodes of 4 CPUs with two pods of 2 each, of priority 1."""
    bed = Bed()
    for node in ("a", "b"):
        bed.node(node, 4)
        for number in range(2):
            bed.pod(f"{node}{number}", 2, 1, node=node)
    return bed


def test_victims_are_evicted_and_the_pod_gets_the_room_when_they_are_gone() -> None:
    bed = _full()
    bed.pod("new", 3, 10)
    bed.run()
    node = bed.nominated["new"]
    assert bed.evicted() == [f"{node}0", f"{node}1"]
    assert "nodes are available: 2 Insufficient cpu." in bed.messages["new"]
    about = [event for event in bed.events if event.reason == "Preempted"]
    assert [event.about.name for event in about] == [f"{node}0", f"{node}1"]
    assert about[0].related is not None
    assert about[0].related.name == "new"
    # While the victims end, nothing more is evicted, however often the pod is tried.
    bed.gone(f"{node}0")
    bed.run(30.0)
    assert len(bed.victims) == 2
    assert "not eligible due to a terminating pod on the nominated node" in bed.messages["new"]
    # A less important pod that would fit into the room does not get it.
    bed.pod("small", 2, 1)
    bed.run()
    assert bed.node_of("small") == ""
    bed.gone(f"{node}1")
    bed.run(30.0)
    assert bed.node_of("new") == node
    assert len(bed.core.attempts.evictions) == 0
    assert len(bed.core.scheduling.nominator) == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_pod_that_is_not_bound_shows_its_nomination_or_the_end_of_it(elsewhere: bool) -> None:
    """The binding has dropped a status with the nomination that still waited."""
    bed = _full()
    bed.pod("new", 3, 10)
    bed.run()
    node = bed.nominated.pop("new")
    other = "b" if node == "a" else "a"
    free = other if elsewhere else node
    for number in range(2):
        bed.gone(f"{free}{number}")
    bed.now += 30.0
    assert not bed.core.schedule_for(10.0)
    (placement,) = bed.placements
    assert (placement.name, placement.node) == ("new", free)
    assert "new" not in bed.nominated
    bed.core.attempts.bound(placement, Refused(Why.CONFLICT, "it changed"))
    assert bed.messages["new"] == "it changed"
    assert bed.nominated["new"] == ("" if elsewhere else node)


def test_a_less_important_pod_takes_what_is_left_beside_the_nominated_one() -> None:
    bed = _full()
    bed.pod("new", 2, 10)
    bed.run()
    node = bed.nominated["new"]
    (victim,) = bed.evicted()
    bed.gone(victim)
    other = next(name for name in (f"{node}0", f"{node}1") if name in bed.pods)
    # Without its nomination, the room would go to the pod that is tried first.
    bed.pod("low", 2, 5)
    bed.gone(other)
    bed.run()
    assert bed.node_of("new") == bed.node_of("low") == node


def test_pods_of_equal_priority_each_make_room_for_themselves() -> None:
    bed = _full()
    for name in ("x", "y"):
        bed.pod(name, 4, 10)
    bed.run()
    assert {bed.nominated["x"], bed.nominated["y"]} == {"a", "b"}
    assert bed.evicted() == ["a0", "a1", "b0", "b1"]
    for victim in bed.evicted():
        bed.gone(victim)
    bed.run(30.0)
    assert {bed.node_of("x"), bed.node_of("y")} == {"a", "b"}


def test_a_pod_that_must_not_preempt_says_so() -> None:
    bed = _full()
    bed.pod("new", 3, 10, preemptionPolicy="Never")
    bed.run()
    assert bed.victims == []
    assert "preemption: not eligible due to preemptionPolicy=Never." in bed.messages["new"]


def test_the_node_whose_budget_allows_it_is_freed() -> None:
    bed = _full()
    for name in ("a0", "a1"):
        bed.pods[name]["metadata"]["labels"] = {"app": "kept"}
        bed.change(name)
    bed.budget("kept", "kept", 1)
    bed.pod("new", 4, 10)
    bed.run()
    assert bed.evicted() == ["b0", "b1"]


def test_a_more_important_pod_takes_over_a_node_and_the_former_nomination_ends() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("old", 4, 1, node="a")
    bed.pod("first", 4, 5)
    bed.run()
    bed.pod("second", 4, 9)
    bed.run()
    assert bed.nominated == {"first": "", "second": "a"}
    # The watch does not show its condition yet.
    assert "1 Insufficient cpu" in bed.messages["first"]
    assert bed.core.scheduling.nominator.node_of("u-first") == ""
    assert bed.evicted() == ["old"]
    bed.gone("old")
    bed.run(30.0)
    assert bed.node_of("second") == "a"
    assert bed.node_of("first") == ""


def test_a_nomination_is_read_back_after_a_restart() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("new", 4, 10, nominated="a")
    bed.pod("low", 4, 5)
    bed.core.queue.remove("u-new")
    bed.run()
    assert bed.node_of("low") == ""
    assert bed.core.queue.state_of("u-low") is QueueState.UNSCHEDULABLE
    # The nomination ends with the pod, and the room is given to the next.
    bed.gone("new")
    bed.run(30.0)
    assert bed.node_of("low") == "a"


def _shows(bed: Bed, name: str, node: str) -> None:
    bed.pods[name]["status"] = {"nominatedNodeName": node} if node else {}
    bed.change(name)


def test_a_node_that_an_autoscaler_nominates_is_kept_for_the_pod_and_tried_first() -> None:
    """As kube-scheduler 1.36 does, also where another node has a higher score."""
    bed = Bed()
    bed.pod("new", 2, 10, schedulingGates=[{"name": "later"}])
    bed.run()
    _shows(bed, "new", "b")
    for node, cpu in (("b", 4), ("c", 16)):
        bed.node(node, cpu)
    bed.pod("low", 4, 1, nodeSelector={"kubernetes.io/hostname": "b"})
    bed.run(20.0)
    assert bed.node_of("low") == ""
    bed.pods["new"]["spec"]["schedulingGates"] = []
    bed.change("new")
    bed.run(20.0)
    assert bed.node_of("new") == "b"


def test_a_nomination_that_its_writer_takes_back_keeps_no_room() -> None:
    bed = Bed()
    bed.node("b", 4)
    bed.pod("new", 8, 10)
    bed.run()
    _shows(bed, "new", "b")
    bed.pod("low", 4, 1)
    assert bed.core.scheduling.nominator.node_of("u-new") == "b"
    _shows(bed, "new", "")
    bed.run(20.0)
    assert bed.node_of("low") == "b"


def test_an_echo_of_an_earlier_nomination_does_not_replace_the_present_one() -> None:
    bed = _full()
    bed.pod("new", 3, 10)
    bed.run()
    first = bed.nominated["new"]
    other = "b" if first == "a" else "a"
    nominator = bed.core.scheduling.nominator
    pod = bed.core.queue.pod("u-new")
    assert pod is not None
    nominator.nominate(pod, other)
    for shown in (first, "", first):
        _shows(bed, "new", shown)
        assert nominator.node_of("u-new") == other


def test_a_victim_that_ends_already_is_waited_for_after_a_restart() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("old", 4, 1, node="a")
    bed.pods["old"]["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    bed.pods["old"]["status"] = {
        "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        ]
    }
    bed.change("old")
    bed.pod("new", 4, 10, nominated="a")
    bed.run()
    assert bed.victims == []
    assert "not eligible due to a terminating pod" in bed.messages["new"]


def test_an_eviction_that_is_refused_ends_the_nomination_and_is_tried_again() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("old", 4, 1, node="a")
    bed.pod("new", 4, 10)
    bed.run()
    (victim,) = bed.victims
    bed.core.attempts.preemptions.evicted(victim, Refused(Why.FORBIDDEN, "no right"))
    assert len(bed.core.scheduling.nominator) == 0
    assert bed.nominated == {"new": ""}
    # As after an error, the time is waited for although no other pod is to be tried.
    bed.run(0.0)
    assert len(bed.victims) == 1
    bed.run(30.0)
    assert len(bed.victims) == 2


def test_replicas_do_not_try_to_evict_a_protected_pod_one_after_another() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("old", 4, 1, node="a")
    for number in range(3):
        bed.pod(f"new{number}", 4, 10)
    bed.pod("other", 4, 5)
    bed.run()
    bed.core.attempts.preemptions.evicted(bed.victims[0], Refused(Why.FORBIDDEN, "no right"))
    bed.run(0.1)
    # A pod of another kind may make room for itself in another way.
    assert [pod.name for pod in bed.victims] == ["old", "old"]
    assert bed.nominated["other"] == "a"


def test_an_eviction_that_is_refused_uses_up_no_budget() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("old", 4, 1, node="a", app="kept")
    bed.budget("kept", "kept", 1)
    bed.pod("new", 4, 10)
    bed.run()
    budgets = bed.core.scheduling.budgets
    (budget,) = budgets.of(bed.core.tables.bookings["u-old"].shape)
    assert budgets.allowed(budget) == 0
    bed.core.attempts.preemptions.evicted(bed.victims[0], Refused(Why.FORBIDDEN, "no right"))
    assert budgets.allowed(budget) == 1


def test_a_nomination_that_helps_no_more_is_taken_back() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("new", 4, 10, nominated="a")
    bed.pod("other", 4, 50, node="a")
    bed.run()
    assert bed.nominated == {"new": ""}
    assert "1 No preemption victims found for incoming pod" in bed.messages["new"]


def test_a_victim_that_waits_for_its_gang_gives_its_node_back_and_is_not_deleted() -> None:
    bed = Bed()
    for node in ("a", "b"):
        bed.node(node, 4)
    for number in range(2):
        bed.pod(f"g{number}", 3, 1, gang=2)
    # One member is tried, and waits on its node for the other.
    bed.core.attempts.next(bed.now)
    (waiting,) = (uid for uid in ("u-g0", "u-g1") if bed.core.attempts.waits_on(uid))
    node = bed.core.attempts.waits_on(waiting)
    bed.pod("large", 4, 50, node="b" if node == "a" else "a")
    bed.pod("new", 4, 10)
    bed.core.attempts.next(bed.now)
    assert bed.victims == []
    assert not bed.core.attempts.waits_on(waiting)
    assert "preempted by pod default/new" in bed.messages[waiting.removeprefix("u-")]
    bed.run(30.0)
    assert bed.node_of("new") == node


def test_victims_that_wait_for_one_gang_all_give_their_nodes_back_and_none_is_deleted() -> None:
    bed = Bed()
    bed.node("a", 6)
    for number in range(3):
        bed.pod(f"g{number}", 2, 1, gang=3)
    # Two members are tried, and wait on the node for the third.
    bed.core.attempts.next(bed.now)
    bed.core.attempts.next(bed.now)
    assert bed.core.attempts.held == 2
    bed.pod("new", 6, 10)
    bed.core.attempts.next(bed.now)
    assert bed.victims == []
    assert bed.core.attempts.held == 0
    bed.run(30.0)
    assert bed.node_of("new") == "a"


def test_a_member_that_needs_others_evicts_no_pod_by_itself() -> None:
    bed = _full()
    bed.pod("g0", 2, 10, gang=2)
    bed.pod("g1", 9, 10, gang=2)
    bed.run()
    assert bed.victims == []
    assert "not eligible due to other members of the gang" in bed.messages["g0"]


def test_the_last_member_that_a_gang_lacks_preempts_as_any_pod_does() -> None:
    bed = _full()
    bed.pod("g0", 2, 10, gang=2, node="a")
    bed.pod("g1", 2, 10, gang=2)
    bed.run()
    assert len(bed.victims) == 1


def test_a_pod_that_is_gated_again_keeps_no_node_from_others() -> None:
    bed = Bed()
    bed.node("a", 4)
    bed.pod("g0", 4, 10, gang=2, nominated="a")
    bed.pod("low", 4, 5)
    bed.run()
    bed.run(30.0)
    assert bed.nominated == {"g0": ""}
    assert bed.node_of("low") == "a"


def test_a_nominated_pod_whose_node_is_full_takes_none_that_is_promised_to_others() -> None:
    bed = Bed()
    for name in ("n0", "n1", "n2"):
        bed.node(name, 4)
    for name, priority, node in (("new", 10, "n0"), ("other", 5, "n0"), ("elsewhere", 5, "n1")):
        bed.pod(name, 4, priority, nominated=node)
    bed.run()
    assert [bed.node_of(name) for name in ("new", "other", "elsewhere")] == ["n0", "n2", "n1"]


def test_a_pod_whose_term_selects_namespaces_is_tried_when_one_gets_other_labels() -> None:
    bed = Bed()
    bed.node("n0", 4)
    cache = next(c for c in bed.core.caches if c.resource.kind == "Namespace")

    def namespace(team: str) -> None:
        bed.show(cache, "MODIFIED", {"metadata": {"name": "default", "labels": {"team": team}}})

    namespace("a")
    bed.pod("beside", 1, 0, app="x", node="n0")
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"app": "x"}},
        "namespaceSelector": {"matchLabels": {"team": "a"}},
    }
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    bed.pod("new", 1, 0, affinity=apart)
    bed.run()
    assert bed.node_of("new") == ""
    namespace("b")
    bed.run(30.0)
    assert bed.node_of("new") == "n0"
