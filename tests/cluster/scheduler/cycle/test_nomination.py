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
