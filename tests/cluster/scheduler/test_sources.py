"""Which changes of pods and nodes concern pods that wait."""

from __future__ import annotations

import msgspec
import pytest

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.events import Action
from cluster.scheduler.sources.bookings import booking_of
from cluster.scheduler.sources.cluster import node_actions, pod_actions, shrink_pod
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_node, make_pod

_PREFIX = "scheduling.koordinator.sh"


def test_a_heartbeat_of_a_node_concerns_no_pod() -> None:
    assert not node_actions(make_node("n"), make_node("n"))


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({"allocatable": {"cpu": "17"}}, Action.UPDATE_NODE_ALLOCATABLE),
        ({"labels": {"a": "b"}}, Action.UPDATE_NODE_LABEL),
        ({"annotations": {"a": "b"}}, Action.UPDATE_NODE_ANNOTATION),
        ({"taints": [{"key": "a", "effect": "NoSchedule"}]}, Action.UPDATE_NODE_TAINT),
        ({"unschedulable": True}, Action.UPDATE_NODE_TAINT),
        ({"images": [{"names": ["a"], "sizeBytes": 1}]}, Action.UPDATE_OTHER),
    ],
)
def test_changes_of_a_node(change: dict[str, object], action: Action) -> None:
    assert node_actions(make_node("n"), make_node("n", **change)) == action  # type: ignore[arg-type]


def _with_status(pod: SchedulingPod, **status: str) -> SchedulingPod:
    return msgspec.structs.replace(pod, status=msgspec.structs.replace(pod.status, **status))


def test_a_new_status_of_a_bound_pod_concerns_no_pod() -> None:
    pod = make_pod("p", node="n")
    assert not pod_actions(pod, _with_status(pod, phase="Running"))
    assert pod_actions(pod, make_pod("p", node="n", labels={"a": "b"})) == Action.UPDATE_POD_LABEL


def test_an_annotation_that_cannot_be_read_costs_its_own_part_of_the_booking() -> None:
    pod = make_pod(
        "p",
        node="n",
        annotations={
            f"{_PREFIX}/resource-status": '{"cpuset":"0-x"}',
            f"{_PREFIX}/device-allocated": '{"gpu":[{"minor":3}]}',
            f"{_PREFIX}/reservation-allocated": "[]",
        },
    )
    read = booking_of(pod, Shapes().of(pod))
    assert not read.booking.allocation.cpus
    assert [device.minor for device in read.booking.allocation.devices["gpu"]] == [3]
    assert len(read.problems) == 2
    assert all("Pod default/p" in str(problem) for problem in read.problems)


def test_a_huge_annotation_is_dropped_before_the_pod_is_kept() -> None:
    pod = make_pod("p", annotations={f"{_PREFIX}/a": "x" * 2**20, f"{_PREFIX}/b": "y"})
    assert shrink_pod(pod).metadata.annotations == {f"{_PREFIX}/b": "y"}
