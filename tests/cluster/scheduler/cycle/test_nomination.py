"""Nominated pods by node."""

from __future__ import annotations

from cluster.scheduler.cycle.nomination import Nominator
from tests.cluster.scheduler.pending import FakeShape, pending


def test_a_pod_is_nominated_for_one_node_at_a_time() -> None:
    nominator: Nominator[FakeShape] = Nominator()
    pod = pending("a")
    nominator.nominate(pod, "n1")
    nominator.nominate(pod, "n2")
    assert nominator.at_least("n1", 0) == ()
    assert nominator.at_least("n2", 0) == (pod,)
    assert nominator.node_of("a") == "n2"
    assert list(nominator.nodes()) == ["n2"]
    assert nominator.withdraw("a") == "n2"
    assert nominator.withdraw("a") == ""
    assert (len(nominator), list(nominator.nodes())) == (0, [])


def test_nominated_pods_are_selected_by_priority_and_sorted_by_it() -> None:
    nominator: Nominator[FakeShape] = Nominator()
    for name, priority, created in (("low", 1, 0.0), ("late", 5, 9.0), ("early", 5, 3.0)):
        nominator.nominate(pending(name, priority=priority, created=created), "n")
    assert [pod.uid for pod in nominator.at_least("n", 1)] == ["early", "late", "low"]
    assert [pod.uid for pod in nominator.at_least("n", 5)] == ["early", "late"]
    assert [pod.uid for pod in nominator.below("n", 5)] == ["low"]


def test_an_edited_pod_stays_nominated_as_it_is_now() -> None:
    nominator: Nominator[FakeShape] = Nominator()
    nominator.nominate(pending("a", "old"), "n")
    nominator.update(pending("a", "new"))
    nominator.update(pending("stranger"))
    assert [pod.shape.name for pod in nominator.at_least("n", 0)] == ["new"]
    assert len(nominator) == 1


def test_pods_that_another_scheduler_nominated_count_above_the_pod_s_own_priority_alone() -> None:
    nominator: Nominator[FakeShape] = Nominator()
    nominator.nominated_by_other(pending("theirs", priority=5), "n")
    nominator.nominate(pending("ours", priority=5), "n")
    for priority, counting in ((4, ["ours", "theirs"]), (5, ["ours"]), (6, [])):
        assert [pod.uid for pod in nominator.at_least("n", priority)] == counting
    # Only its scheduler ends a nomination.
    assert [pod.uid for pod in nominator.below("n", 6)] == ["ours"]
    nominator.nominate(pending("theirs", priority=5), "n")
    assert [pod.uid for pod in nominator.at_least("n", 5)] == ["ours", "theirs"]
    nominator.nominated_by_other(pending("theirs", priority=5), "n")
    nominator.withdraw("theirs")
    assert [pod.uid for pod in nominator.at_least("n", 0)] == ["ours"]
