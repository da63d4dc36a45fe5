"""Pods are placed where kubelets declare the features that they need."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.tables.declared_features import declared
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.making import make_pod

_RESTARTS_ALL = "RestartAllContainersOnContainerExits"
_USERS = "UserNamespacesHostNetworkSupport"


def _containers(action: str) -> list[dict[str, Any]]:
    exits = {"operator": "In", "values": [42]}
    rules = [{"action": "Restart", "exitCodes": exits}, {"action": action, "exitCodes": exits}]
    return [{"name": "a"}, {"name": "b", "restartPolicy": "Never", "restartPolicyRules": rules}]


_RESTARTING: dict[str, Any] = {"containers": _containers("RestartAllContainers")}
_OWN_USERS = {"hostNetwork": True, "hostUsers": False}


def _show(bed: Bed, kind: str, name: str, *features: str) -> None:
    node = {
        "metadata": {"name": name},
        "status": {"allocatable": {"cpu": "4", "pods": "9"}, "declaredFeatures": features},
    }
    bed.show(bed.core.nodes, kind, node)


@pytest.mark.parametrize(
    ("spec", "node"),
    [
        (_RESTARTING, "restarts"),
        ({"containers": [], "initContainers": _containers("RestartAllContainers")}, "restarts"),
        (_OWN_USERS, "users"),
        (_RESTARTING | _OWN_USERS, ""),
    ],
)
def test_a_pod_goes_where_all_that_it_needs_is_declared(spec: dict[str, Any], node: str) -> None:
    bed = Bed()
    _show(bed, "ADDED", "none", "GuaranteedQoSPodCPUResize")
    _show(bed, "ADDED", "restarts", "Other", _RESTARTS_ALL)
    _show(bed, "ADDED", "users", _USERS)
    bed.pod("p", 0, 0, **spec)
    bed.run()
    assert bed.node_of("p") == node
    if not node:
        assert bed.messages["p"].startswith(
            "0/3 nodes are available: 3 node(s) didn't match Pod's required features."
        )


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": _containers("Restart")},
        {"hostNetwork": True, "hostUsers": True},
        {"hostNetwork": True},
        {"hostUsers": False},
    ],
)
def test_other_pods_need_no_declared_feature(spec: dict[str, Any]) -> None:
    bed = Bed()
    _show(bed, "ADDED", "none")
    bed.pod("p", 0, 0, **spec)
    bed.run()
    assert bed.node_of("p") == "none"


def test_a_refused_pod_is_tried_again_when_a_node_declares_the_feature() -> None:
    bed = Bed()
    _show(bed, "ADDED", "n")
    bed.pod("old", 4, 0, node="n")
    bed.pod("p", 0, 9, **_RESTARTING)
    bed.run()
    # No eviction gives a node a feature.
    assert "1 Preemption is not helpful for scheduling." in bed.messages["p"]
    assert bed.evicted() == []
    bed.run(20.0)
    assert bed.core.queue.state_of("u-p") is QueueState.UNSCHEDULABLE
    _show(bed, "MODIFIED", "n", _RESTARTS_ALL)
    bed.run()
    assert bed.node_of("p") == "n"


def test_pods_that_need_other_features_have_other_shapes() -> None:
    shapes = Shapes()
    specs: list[dict[str, Any]] = [
        {"hostNetwork": True},
        {"hostNetwork": True, "hostUsers": False},
        {"hostNetwork": True, "containers": _containers("Restart")},
        {"hostNetwork": True, "containers": _containers("RestartAllContainers")},
    ]
    assert len({id(shape) for shape in [shapes.of(make_pod("p", **spec)) for spec in specs]}) == 4


def test_features_that_nothing_needs_are_not_kept() -> None:
    known = declared([_RESTARTS_ALL]), declared([_USERS])
    assert declared(["Unknown"]) == declared([]) == 0
    assert declared([_RESTARTS_ALL, "Unknown", _USERS]) == sum(known) == known[0] | known[1]
