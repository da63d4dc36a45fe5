"""Reservations in simulations: they get nodes, and pods use them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.simulation.objects import FileObject
from cluster.scheduler.simulation.simulation import Simulation
from tests.cluster.scheduler.simulation.dumps import Tree, node, pod

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: default-scheduler
  plugins:
    filter: {enabled: [{name: Reservation}]}
    preScore: {enabled: [{name: Reservation}]}
    score: {enabled: [{name: Reservation, weight: 5000}]}
    reserve: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
""",
    obj="test",
)
_USES = "scheduling.koordinator.sh/reservation-allocated"


def _reservation(name: str, cpu: str, **spec: Any) -> Tree:
    resources = {"requests": {"cpu": cpu}}
    return {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Reservation",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "template": {"spec": {"containers": [{"name": "c", "resources": resources}]}},
            "owners": [{"labelSelector": {"matchLabels": {"app": "web"}}}],
            "ttl": "24h",
            "allocateOnce": False,
            **spec,
        },
        "status": {"phase": "Pending"},
    }


def _simulated(*trees: Tree) -> Simulation:
    simulation = Simulation(_CONFIGURATION, seed=1, now=1_800_000_000.0)
    notes = simulation.load(
        FileObject(
            tree["apiVersion"].rpartition("/")[0],
            tree["kind"],
            tree["metadata"].get("namespace", ""),
            tree["metadata"]["name"],
            msgspec.json.encode(tree),
            "test",
        )
        for tree in trees
    )
    assert not notes
    simulation.run()
    return simulation


_WEB = {"labels": {"app": "web"}}


def _uses(simulation: Simulation, name: str) -> str:
    found = simulation.core.pods.get(name, namespace="default")
    assert found is not None
    text = found.metadata.annotations.get(_USES)
    return json.loads(text)["name"] if text else ""


def test_a_reservation_gets_a_node_and_its_owner_uses_it() -> None:
    simulation = _simulated(
        node("n0", 4),
        _reservation("r", "3"),
        pod("web", "3", metadata=_WEB, priority=-1),
        pod("other", "2", priority=-1),
    )
    reservation = simulation.core.reservations.get("r")
    assert reservation is not None
    assert (reservation.status.phase, reservation.status.node_name) == ("Available", "n0")
    assert simulation.result("default/web").state == "placed"
    assert _uses(simulation, "web") == "r"
    assert simulation.result("default/other").state == "unschedulable"


def test_a_reservation_takes_over_a_running_pod() -> None:
    simulation = _simulated(
        node("n0", 4),
        pod("old", "3", on="n0", metadata=_WEB),
        _reservation("r", "3", preAllocation=True, allocatePolicy="Restricted"),
        pod("small", "1", priority=-1),
        pod("large", "2", priority=-1),
    )
    assert _uses(simulation, "old") == "r"
    assert simulation.result("default/small").state == "placed"
    assert simulation.result("default/large").state == "unschedulable"
