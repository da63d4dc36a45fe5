"""Which events of the cluster follow from what is seen of nodes and bound pods."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.configuration.reading import default_configuration
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.process import SchedulerProcess
from kube.cache import Change, Event
from kube.connection import Connection
from kube.kept_client import KeptClient
from tests.cluster.scheduler.making import make_node, make_pod

_PREFIX = "scheduling.koordinator.sh"
_LABEL, _LESS = Action.UPDATE_POD_LABEL, Action.UPDATE_POD_SCALE_DOWN


class _Bed:
    """heard: the events since the last look at them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
        process = SchedulerProcess(
            nowhere, default_configuration(), seed=1, clock=lambda: 1000.0
        )  # fmt: skip
        self.process, self.source = process, process.source
        self._heard: list[ClusterEvent] = []

        def hear(queue: object, event: ClusterEvent, now: float) -> int:
            self._heard.append(event)
            return 0

        monkeypatch.setattr(type(process.queue), "cluster_event", hear)
        self.node(None, make_node("n"))
        self.heard()

    def node(self, old: SchedulingNode | None, new: SchedulingNode) -> None:
        change = Change.ADDED if old is None else Change.MODIFIED
        self.source.node_event(Event(change, old, new))

    def pod(self, old: SchedulingPod | None, new: SchedulingPod) -> None:
        change = Change.ADDED if old is None else Change.MODIFIED
        self.source.pod_event(Event(change, old, new))

    def heard(self) -> list[tuple[str, Action, object, object]]:
        found = [(each.kind, each.action, each.old, each.new) for each in self._heard]
        self._heard.clear()
        return found


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> _Bed:
    return _Bed(monkeypatch)


def _pod(**more: Any) -> SchedulingPod:
    made: dict[str, Any] = {
        "requests": {"cpu": "2", "memory": "2Gi"},
        "limits": {"cpu": "4", "memory": "4Gi"},
        "annotations": {
            f"{_PREFIX}/resource-status": '{"cpuset":"0-3"}',
            f"{_PREFIX}/load-estimated-scaling-factors": '{"cpu":80}',
            "other": "x",
        },
    }
    annotations = {**made["annotations"], **more.pop("annotations", {})}
    kept = {key: text for key, text in annotations.items() if text is not None}
    return make_pod("p", node="n", **{**made, "annotations": kept, **more})


_ESTIMATES = (
    "load-estimated-scaling-factors",
    "load-estimated-seconds-after-pod-scheduled",
    "load-estimated-seconds-after-initialized",
)


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({}, None),
        ({"labels": {"a": "b"}}, _LABEL),
        ({"requests": {"cpu": "1", "memory": "2Gi"}}, _LESS),
        ({"requests": {"cpu": "2", "memory": "1Gi"}}, _LESS),
        ({"requests": {"cpu": "3", "memory": "1Gi"}}, _LESS),
        ({"requests": {"cpu": "2"}}, _LESS),
        ({"requests": {"cpu": "3", "memory": "2Gi"}}, None),
        ({"limits": {"cpu": "3", "memory": "4Gi"}}, _LESS),
        ({"limits": {"cpu": "5", "memory": "4Gi"}}, None),
        ({"requests": {"cpu": "1"}, "labels": {"a": "b"}}, _LABEL | _LESS),
        ({"annotations": {"other": "y"}}, None),
        ({"annotations": {f"{_PREFIX}/resource-status": None}}, _LESS),
        ({"annotations": {f"{_PREFIX}/resource-status": '{"cpuset":"0-4"}'}}, _LESS),
        *(({"annotations": {f"{_PREFIX}/{name}": '{"cpu":90}'}}, _LESS) for name in _ESTIMATES),
        ({"annotations": {f"{_PREFIX}/{_ESTIMATES[0]}": None}}, _LESS),
    ],
)
def test_a_bound_pod_that_may_take_less_of_its_node_wakes_others(
    bed: _Bed, change: dict[str, Any], action: Action | None
) -> None:
    old, new = _pod(), _pod(**change)
    bed.pod(None, old)
    assert bed.heard() == [("Pod", Action.ADD, None, old)]
    bed.pod(old, new)
    assert bed.heard() == ([] if action is None else [("Pod", action, old, new)])


def _ending(pod: SchedulingPod) -> SchedulingPod:
    return replace(pod, metadata=replace(pod.metadata, deletion_timestamp="2026-01-01T00:00:00Z"))


def _phase(pod: SchedulingPod, phase: str) -> SchedulingPod:
    return replace(pod, status=replace(pod.status, phase=phase))


def test_a_pod_that_begins_to_end_does_not_count_for_the_spread(bed: _Bed) -> None:
    running, ending = _pod(), _ending(_pod())
    bed.pod(None, running)
    bed.heard()
    bed.pod(running, ending)
    assert bed.heard() == [("Pod", Action.UPDATE_OTHER, running, ending)]
    bed.pod(ending, ending)
    assert bed.heard() == []


@pytest.mark.parametrize("end", ["deleted", "Succeeded", "Failed"])
def test_a_pod_that_ended_leaves_its_room_once(bed: _Bed, end: str) -> None:
    pod = _pod()
    bed.pod(None, pod)
    bed.heard()
    last = pod if end == "deleted" else _phase(pod, end)
    for _ in range(2):
        if end == "deleted":
            bed.source.pod_event(Event(Change.DELETED, pod, pod))
        else:
            bed.pod(pod, last)
    assert bed.heard() == [("Pod", Action.DELETE, last, None)]
    assert not bed.process.tables.bookings


def test_a_pod_of_the_same_name_is_another_one(bed: _Bed) -> None:
    old = _pod()
    new = replace(old, metadata=replace(old.metadata, uid="later"))
    bed.pod(None, old)
    bed.heard()
    bed.pod(old, new)
    assert bed.heard() == [("Pod", Action.DELETE, old, None), ("Pod", Action.ADD, None, new)]
    assert set(bed.process.tables.bookings) == {"later"}


def test_nodes_come_change_and_go(bed: _Bed) -> None:
    first, other = make_node("m"), make_node("m", labels={"a": "b"}, unschedulable=True)
    bed.node(None, first)
    assert bed.heard() == [("Node", Action.ADD, None, first)]
    bed.node(first, first)
    assert bed.heard() == []
    bed.node(first, other)
    changed = Action.UPDATE_NODE_LABEL | Action.UPDATE_NODE_TAINT
    assert bed.heard() == [("Node", changed, first, other)]
    nodes = bed.process.tables.nodes
    row = nodes.row("m")
    assert row is not None and nodes.unschedulable[row]
    bed.source.node_event(Event(Change.DELETED, other, other))
    assert bed.heard() == [("Node", Action.DELETE, other, None)]
    assert nodes.row("m") is None
