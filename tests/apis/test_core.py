"""Requests, limits and classes of pods, as Kubernetes and Koordinator count them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.core import (
    Pod,
    compute_kube_qos,
    is_active,
    is_terminated,
    kube_qos,
    pod_priority_class_with_default,
    pod_requests,
)
from apis.decode import dec_hook
from apis.qos import KubeQoS, PriorityClass, QoSClass, qos_class_with_default


def pod(spec: dict[str, Any], **others: Any) -> Pod:
    return msgspec.convert({"spec": spec, **others}, Pod, dec_hook=dec_hook)


def container(name: str, cpu: str, *, restart: str | None = None, limit: str = "") -> Any:
    resources: dict[str, Any] = {"requests": {"cpu": cpu}} if cpu else {}
    if limit:
        resources["limits"] = {"cpu": limit}
    return {"name": name, "resources": resources, "restartPolicy": restart}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [container("a", "1"), container("b", "500m")]}, "1500m"),
        # The init container needs more than all others together.
        ({"containers": [container("a", "1")], "initContainers": [container("i", "3")]}, "3"),
        # A sidecar runs beside the containers ...
        (
            {
                "containers": [container("a", "1")],
                "initContainers": [container("s", "2", restart="Always"), container("i", "2")],
            },
            # ... and beside init containers that start after it.
            "4",
        ),
        (
            {
                "containers": [container("a", "3")],
                "initContainers": [container("i", "2"), container("s", "2", restart="Always")],
            },
            "5",
        ),
        ({"containers": [container("a", "1")], "overhead": {"cpu": "250m"}}, "1250m"),
        (
            {
                "containers": [container("a", "1")],
                "resources": {"requests": {"cpu": "6"}},
                "overhead": {"cpu": "1"},
            },
            "7",
        ),
    ],
)
def test_pod_requests_follow_the_kubernetes_rule(spec: dict[str, Any], expected: str) -> None:
    assert str(pod_requests(pod(spec))["cpu"]) == expected


def test_a_resize_under_way_counts_with_the_largest_amount() -> None:
    status = {
        "containerStatuses": [
            {
                "name": "a",
                "allocatedResources": {"cpu": "2"},
                "resources": {"requests": {"cpu": "3"}},
            }
        ]
    }
    spec = {"containers": [container("a", "1")]}
    assert str(pod_requests(pod(spec, status=status))["cpu"]) == "3"
    wanted = {"containers": [container("a", "9")]}
    assert str(pod_requests(pod(wanted, status=status))["cpu"]) == "9"
    infeasible = {**status, "resize": "Infeasible"}
    assert str(pod_requests(pod(wanted, status=infeasible))["cpu"]) == "3"


BOTH = {"cpu": "1", "memory": "1Gi"}


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        ([{"name": "a"}], KubeQoS.BESTEFFORT),
        ([{"name": "a", "resources": {"requests": {"cpu": "0"}}}], KubeQoS.BESTEFFORT),
        ([{"name": "a", "resources": {"requests": {"example.com/x": "1"}}}], KubeQoS.BESTEFFORT),
        ([{"name": "a", "resources": {"requests": BOTH}}], KubeQoS.BURSTABLE),
        ([{"name": "a", "resources": {"requests": BOTH, "limits": BOTH}}], KubeQoS.GUARANTEED),
        (
            [
                {"name": "a", "resources": {"requests": BOTH, "limits": BOTH}},
                {"name": "b"},
            ],
            KubeQoS.BURSTABLE,
        ),
        (
            [{"name": "a", "resources": {"requests": BOTH, "limits": {**BOTH, "cpu": "2"}}}],
            KubeQoS.BURSTABLE,
        ),
    ],
)
def test_the_kubernetes_class_follows_from_requests_and_limits(
    containers: list[Any], expected: KubeQoS
) -> None:
    assert compute_kube_qos(pod({"containers": containers}).spec) is expected


def test_the_status_class_wins_when_it_is_known() -> None:
    assert kube_qos(pod({}, status={"qosClass": "Guaranteed"})) is KubeQoS.GUARANTEED
    assert kube_qos(pod({}, status={"qosClass": "Best"})) is KubeQoS.BESTEFFORT


@pytest.mark.parametrize(
    ("labels", "priority", "qos", "cls"),
    [
        ({}, None, QoSClass.BE, PriorityClass.BATCH),
        ({"koordinator.sh/qosClass": "LS"}, None, QoSClass.LS, PriorityClass.PROD),
        ({"koordinator.sh/qosClass": "ls"}, 7100, QoSClass.BE, PriorityClass.MID),
        (
            {"koordinator.sh/priority-class": "koord-free"},
            9000,
            QoSClass.BE,
            PriorityClass.FREE,
        ),
        # An unknown label hides the priority; what remains is the QoS class's.
        ({"koordinator.sh/priority-class": "gold"}, 7000, QoSClass.BE, PriorityClass.BATCH),
        ({}, 8500, QoSClass.BE, PriorityClass.BATCH),
    ],
)
def test_classes_of_a_pod(
    labels: dict[str, str],
    priority: int | None,
    qos: QoSClass,
    cls: PriorityClass,
) -> None:
    one = pod({"priority": priority}, metadata={"labels": labels})
    assert qos_class_with_default(labels, kube_qos(one)) is qos
    assert pod_priority_class_with_default(one) is cls


@pytest.mark.parametrize(
    ("phase", "active", "terminated"),
    [
        ("Pending", True, False),
        ("Running", True, False),
        ("Succeeded", False, True),
        ("Failed", False, True),
        ("Unknown", False, False),
        ("", False, False),
    ],
)
def test_which_phases_are_active(phase: str, active: bool, terminated: bool) -> None:
    one = pod({}, status={"phase": phase})
    assert (is_active(one), is_terminated(one)) == (active, terminated)
