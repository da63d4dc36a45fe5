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
from apis.quantity import parse_quantity


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


def _resized(name: str, *, allocated: str = "", in_force: str = "") -> dict[str, Any]:
    """Return the status of a container, or with the name "" that of a pod."""
    status: dict[str, Any] = {"name": name} if name else {}
    if allocated:
        status["allocatedResources"] = {"cpu": allocated}
    if in_force:
        status["resources"] = {"requests": {"cpu": in_force}}
    return status


INFEASIBLE = {
    "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]
}
DEFERRED = {"conditions": [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        # The sum of what each container counts with, not the largest of three sums.
        (
            {
                "containerStatuses": [
                    _resized("a", allocated="3", in_force="1"),
                    _resized("b", allocated="1", in_force="4"),
                ]
            },
            "8",
        ),
        # The sidecar counts as containers do.
        ({"initContainerStatuses": [_resized("s", allocated="2", in_force="5")]}, "9"),
        ({"initContainerStatuses": [_resized("s", in_force="0")], **INFEASIBLE}, "4"),
        # An ordinary init container is not resized: it counts with what it asks for.
        ({"initContainerStatuses": [_resized("i", allocated="9", in_force="9")]}, "5"),
        ({"initContainerStatuses": [_resized("i", in_force="1")], **INFEASIBLE}, "5"),
        # What the status says of the pod itself counts only for requests of the pod itself.
        (_resized("", allocated="9", in_force="9"), "5"),
    ],
)
def test_each_container_counts_with_its_own_resize(status: dict[str, Any], expected: str) -> None:
    spec = {
        "containers": [container("a", "1"), container("b", "1")],
        "initContainers": [container("s", "1", restart="Always"), container("i", "4")],
    }
    assert str(pod_requests(pod(spec, status=status))["cpu"]) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, "4"),
        (_resized("", allocated="6", in_force="5"), "6"),
        (_resized("", allocated="5", in_force="6"), "6"),
        (_resized("", allocated="1", in_force="2"), "4"),
        (_resized("", in_force="6"), "6"),
        ({**_resized("", allocated="1", in_force="2"), **DEFERRED}, "4"),
        ({**_resized("", allocated="1", in_force="2"), **INFEASIBLE}, "2"),
        # Without what is in force, nothing of the status counts.
        (_resized("", allocated="6"), "4"),
        ({**_resized("", allocated="1"), **INFEASIBLE}, "4"),
        # With what is in force, but nothing of it known, an infeasible wish leaves nothing.
        ({"resources": {}, **INFEASIBLE}, "0"),
        # The containers' own resize does not count beside the pod's requests.
        ({"containerStatuses": [_resized("a", allocated="9", in_force="9")]}, "4"),
    ],
)
def test_requests_of_the_pod_itself_count_with_their_resize(
    status: dict[str, Any], expected: str
) -> None:
    """As in kube-scheduler 1.36."""
    spec = {"containers": [container("a", "1")], "resources": {"requests": {"cpu": "4"}}}
    assert pod_requests(pod(spec, status=status))["cpu"] == parse_quantity(expected)
    with_overhead = {**spec, "overhead": {"cpu": "1"}}
    total = pod_requests(pod(with_overhead, status=status))["cpu"]
    assert total == parse_quantity(expected) + parse_quantity("1")


def test_what_the_pod_itself_does_not_request_is_the_sum_of_its_containers() -> None:
    amounts = {"cpu": "6", "memory": "7Gi", "ephemeral-storage": "8Gi"}
    spec = {
        "containers": [
            {"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
        ],
        "resources": {"requests": {"cpu": "4", "example.com/x": "1"}},
    }
    status = {"resources": {"requests": amounts}, "allocatedResources": amounts}
    requests = pod_requests(pod(spec, status=status))
    assert {name: str(amount) for name, amount in requests.items()} == {"cpu": "6", "memory": "1Gi"}


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
