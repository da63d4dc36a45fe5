"""What enters the store leaves it again."""

from __future__ import annotations

from runtime_proxy.model import Container, Pod
from runtime_proxy.store import NoJournal, Store


def store() -> Store:
    filled = Store(NoJournal())
    filled.put_pod(Pod(id="p"))
    for name in ("a", "b"):
        filled.put_container(Container(id=name, pod_id="p"))
    return filled


def test_a_removed_pod_takes_its_containers_along() -> None:
    filled = store()
    filled.drop_pod("p")
    assert filled.sizes == (0, 0)
    assert list(filled.containers_of("p")) == []


def test_a_stop_is_reported_once() -> None:
    filled = store()
    assert filled.stop_container("a") is not None
    assert filled.stop_container("a") is None
    assert filled.stop_container("unknown") is None
    assert filled.stop_pod("p") is not None
    assert filled.stop_pod("p") is None


def test_a_sweep_drops_what_is_gone_and_keeps_what_came_after_the_list() -> None:
    filled = store()
    births = filled.births
    filled.put_container(Container(id="young", pod_id="p"))
    lost_pods, lost_containers = filled.sweep(pods={"p"}, containers={"a"}, births=births)
    assert (lost_pods, [c.id for c in lost_containers]) == ([], ["b"])
    assert [c.id for c in filled.containers_of("p")] == ["a", "young"]
    lost_pods, _ = filled.sweep(pods=set(), containers={"a", "young"}, births=filled.births)
    assert [p.id for p in lost_pods] == ["p"]
    assert filled.sizes == (0, 0)
