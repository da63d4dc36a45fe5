"""A running pod is resized in place: what it counts with, and when its room is free for others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.configuration.files import enabled, file

INFEASIBLE = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
Resize = Callable[..., None]


def _resize(bed: Bed, name: str, *, asks: int, has: int, infeasible: bool = False) -> None:
    """Show a pod that asks for CPUs, while kubelet has given it others."""
    pod = bed.pods[name]
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = str(asks)
    given: dict[str, Any] = {"cpu": str(has)}
    pod["status"] = {
        "containerStatuses": [
            {"name": "c", "allocatedResources": given, "resources": {"requests": given}}
        ]
    }
    if infeasible:
        pod["status"]["conditions"] = [INFEASIBLE]
    bed.change(name)


def _resize_whole(bed: Bed, name: str, *, asks: int, has: int, infeasible: bool = False) -> None:
    """Show a pod that itself asks for CPUs (`spec.resources`), while it has others."""
    pod = bed.pods[name]
    pod["spec"]["resources"] = {"requests": {"cpu": str(asks)}}
    given = {"cpu": str(has)}
    pod["status"] = {"allocatedResources": given, "resources": {"requests": given}}
    if infeasible:
        pod["status"]["conditions"] = [INFEASIBLE]
    bed.change(name)


@pytest.mark.parametrize("resize", [_resize, _resize_whole])
@pytest.mark.parametrize(
    ("asks", "has", "infeasible", "room"),
    [
        # Until kubelet has carried it out, a smaller request frees nothing, a larger one counts.
        (1, 3, False, 1),
        (1, 1, False, 3),
        (3, 1, False, 1),
        # A larger request that the node cannot fulfil does not count.
        (9, 3, True, 1),
    ],
)
def test_a_resized_pod_counts_with_the_larger_of_what_it_asks_for_and_what_it_has(
    resize: Resize, asks: int, has: int, infeasible: bool, room: int
) -> None:
    bed = Bed()
    bed.node("n", 4)
    bed.pod("runs", 1, 0, node="n")
    resize(bed, "runs", asks=asks, has=has, infeasible=infeasible)
    for number in range(4):
        bed.pod(f"new{number}", 1, 0)
    bed.run()
    assert sum(bool(bed.node_of(f"new{number}")) for number in range(4)) == room


def test_what_was_allocated_counts_only_beside_what_is_in_force() -> None:
    """As in kube-scheduler 1.36, which else looks at what the pod asks for alone."""
    bed = Bed()
    bed.node("n", 4)
    bed.pod("runs", 1, 0, node="n")
    _resize(bed, "runs", asks=1, has=3)
    del bed.pods["runs"]["status"]["containerStatuses"][0]["resources"]
    bed.change("runs")
    bed.pod("new", 3, 0)
    bed.run()
    assert bed.node_of("new") == "n"


@pytest.mark.parametrize("resize", [_resize, _resize_whole])
def test_scores_count_a_resized_pod_as_the_filters_do(resize: Resize) -> None:
    """As kube-scheduler: else the fuller node would look like the emptier one."""
    bed = Bed()
    for node in ("resized", "other"):
        bed.node(node, 16)
        bed.pod(f"on-{node}", 4, 0, node=node)
    resize(bed, "on-resized", asks=1, has=8)
    bed.pod("new", 1, 0)
    bed.run()
    assert bed.node_of("new") == "other"
    (shape,) = (b.shape for b in bed.core.tables.bookings.values() if b.uid == "u-on-resized")
    assert shape.scored["cpu"] == shape.requests["cpu"] == 8000


@pytest.mark.parametrize("resize", [_resize, _resize_whole])
def test_a_pod_is_tried_again_when_another_one_has_shrunk(resize: Resize) -> None:
    bed = Bed()
    bed.node("n", 4)
    bed.pod("runs", 1, 0, node="n")
    resize(bed, "runs", asks=4, has=4)
    bed.pod("waits", 2, 0)
    bed.run()
    order = bed.core.queue.order("u-waits")
    resize(bed, "runs", asks=1, has=4)
    bed.run(20.0)
    assert bed.core.queue.order("u-waits") == order
    resize(bed, "runs", asks=1, has=1)
    bed.run(20.0)
    assert bed.node_of("waits") == "n"


@pytest.mark.parametrize("shrinks", ["requests", "limits"])
def test_a_pod_is_tried_again_when_another_one_is_expected_to_use_less(shrinks: str) -> None:
    plugins = {"filter": enabled("LoadAwareScheduling"), "reserve": enabled("LoadAwareScheduling")}
    profile = {"schedulerName": "koord-scheduler", "plugins": plugins}
    bed = Bed(json.dumps(file(profiles=[profile])))
    bed.node("n", 10)
    used = {"nodeUsage": {"resources": {"cpu": "0", "memory": "0"}}}
    status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": used}
    reports = next(each for each in bed.core.caches if each.resource.kind == "NodeMetric")
    bed.show(reports, "ADDED", {"metadata": {"name": "n"}, "status": status})
    # The report lacks the pod, which counts with 85 % of 8 CPUs, more than the threshold of 65 %.
    bed.pod("runs", 8 if shrinks == "requests" else 1, 0, node="n")
    resources = bed.pods["runs"]["spec"]["containers"][0]["resources"]
    resources.setdefault(shrinks, {})["cpu"] = "8"
    bed.change("runs")
    bed.pod("waits", 1, 0)
    bed.run()
    assert "node(s) cpu usage exceed threshold" in bed.messages["waits"]
    resources[shrinks]["cpu"] = "2"
    bed.change("runs")
    bed.run(20.0)
    assert bed.node_of("waits") == "n"
