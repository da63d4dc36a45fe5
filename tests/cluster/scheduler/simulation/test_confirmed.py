"""What a simulation makes of a binding: the objects as the watch would show them afterwards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.errors import InputError
from apis.storage import PersistentVolume, PersistentVolumeClaim
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.configuration.reading import default_configuration
from cluster.scheduler.simulation.objects import FileObject
from cluster.scheduler.simulation.simulation import PodResult, Simulation
from cluster.scheduler.simulation.volumes import confirm_volumes
from cluster.scheduler.tables.booking import PlannedVolumes
from tests.cluster.scheduler.simulation.dumps import node, pod

Tree = dict[str, Any]
_ZONE = "topology.kubernetes.io/zone"


def _file_object(tree: Tree, where: str = "f") -> FileObject:
    group, slash, _ = tree["apiVersion"].partition("/")
    meta = tree["metadata"]
    return FileObject(
        group if slash else "", tree["kind"], meta.get("namespace", ""), meta["name"],
        msgspec.json.encode(tree), where,
    )  # fmt: skip


def _simulated(*objects: Tree) -> Simulation:
    simulation = Simulation(default_configuration(), seed=0, now=1_767_225_600.0)
    assert simulation.load([_file_object(each) for each in objects]) == ()
    return simulation


def _claim(name: str, **spec: Any) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            **spec,
        },
    }


def _volume(name: str) -> Tree:
    spec = {"capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOnce"]}
    return {
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec
    }  # fmt: skip


_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "disk"},
    "provisioner": "disk.example.com",
    "volumeBindingMode": "WaitForFirstConsumer",
}


def _bound(
    simulation: Simulation, *, binds: tuple[tuple[str, str], ...] = (), provisions: str = ""
) -> None:
    planned = PlannedVolumes(binds=binds, provisions=(provisions,) if provisions else ())
    confirm_volumes(simulation.core, Placement("ns", "p", "u", "n1", volumes=planned))


def _is_bound(claim: PersistentVolumeClaim, volume: PersistentVolume) -> bool:
    reference = volume.spec.claim_ref
    return (
        claim.is_bound
        and claim.spec.volume_name == volume.metadata.name
        and claim.metadata.annotations.get("pv.kubernetes.io/bind-completed") == "yes"
        and claim.status.phase == volume.status.phase == "Bound"
        and reference is not None
        and (reference.kind, reference.api_version) == ("PersistentVolumeClaim", "v1")
        and (reference.namespace, reference.name, reference.uid)
        == (claim.metadata.namespace, claim.metadata.name, claim.metadata.uid)
    )


def test_a_claim_and_its_volume_are_bound_to_each_other() -> None:
    simulation = _simulated(node("n1"), _claim("c"), _claim("d"), _volume("v"))
    volumes = simulation.core.volumes
    absent = (("ns/none", "v"), ("ns/c", "none"))
    _bound(simulation, binds=(*absent, ("ns/c", "v")))
    claim, volume = volumes.claims.items["ns/c"], volumes.volumes.items["v"]
    assert _is_bound(claim, volume)
    assert volume.spec.capacity["storage"].value() == 2 << 30
    assert not volumes.claims.items["ns/d"].is_bound


@pytest.mark.parametrize("zone", ["z1", None])
def test_a_volume_is_made_for_a_claim_in_the_zone_of_the_node(zone: str | None) -> None:
    where = node("n1")
    if zone is not None:
        where["metadata"]["labels"][_ZONE] = zone
    claim = _claim("c", storageClassName="disk", volumeMode="Block")
    simulation = _simulated(where, _CLASS, claim)
    _bound(simulation, provisions="ns/none")
    _bound(simulation, provisions="ns/c")
    volumes = simulation.core.volumes
    (made,) = volumes.volumes.items.values()
    stored = volumes.claims.items["ns/c"]
    assert _is_bound(stored, made)
    assert made.metadata.name == made.metadata.uid == "simulated-ns-c"
    spec = made.spec
    assert spec.capacity == stored.spec.resources.requests
    assert (spec.access_modes, spec.volume_mode) == (("ReadWriteOnce",), "Block")
    assert spec.storage_class_name == "disk"
    assert spec.csi is not None
    assert (spec.csi.driver, spec.csi.volume_handle) == ("disk.example.com", "simulated-ns-c")
    if zone is None:
        assert spec.node_affinity is None
    else:
        assert spec.node_affinity is not None and spec.node_affinity.required is not None
        (term,) = spec.node_affinity.required.node_selector_terms
        (only,) = term.match_expressions
        assert (only.key, only.operator, only.values) == (_ZONE, "In", (zone,))


def test_a_volume_of_an_unknown_class_has_no_driver() -> None:
    simulation = _simulated(node("n1"), _claim("c", storageClassName="none"))
    _bound(simulation, provisions="ns/c")
    (made,) = simulation.core.volumes.volumes.items.values()
    assert made.spec.csi is None


def test_a_binding_is_shown_on_the_pod_with_what_it_records() -> None:
    waiting = pod("p", metadata={"annotations": {"old": "x", "kept": "y"}, "labels": {"a": "b"}})
    simulation = _simulated(node("n1"), waiting)
    uid = simulation.core.pods.items["default/p"].metadata.uid
    made = Placement(
        "default", "p", uid, "n1", annotations={"new": "z"}, labels={"c": "d"},
        removed_annotations=("old",),
    )  # fmt: skip
    for placement in (
        made,
        Placement("default", "p", "other", "n2"),
        Placement("x", "p", "u", "n"),
    ):
        simulation.bind(placement)
    assert simulation._confirm()
    assert not simulation._confirm()
    bound = simulation.core.pods.items["default/p"]
    assert bound.spec.node_name == "n1"
    assert bound.metadata.annotations == {"kept": "y", "new": "z"}
    assert bound.metadata.labels == {"a": "b", "c": "d"}
    (condition,) = bound.status.conditions
    assert (condition.type, condition.status) == ("PodScheduled", "True")
    assert condition.last_transition_time == "2026-01-01T00:00:00Z"


def test_a_reservation_of_the_same_name_that_came_later_is_left_alone() -> None:
    reservation = {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Reservation",
        "metadata": {"name": "r", "uid": "u", "annotations": {"old": "x", "kept": "y"}},
        "spec": {"template": {"spec": {"containers": []}}, "owners": [{}], "ttl": "1h"},
    }
    simulation = _simulated(node("n1"), reservation)
    reservations = simulation.core.reservations.items
    for uid, phase in (("other", ""), ("u", "Available")):
        simulation.reserve(
            ReservationPlacement("r", uid, "n1", {"cpu": "4"}, {"new": "z", "old": None})
        )
        assert simulation._confirm()
        assert reservations["r"].status.phase == phase
    found = reservations["r"]
    assert found.metadata.annotations == {"kept": "y", "new": "z"}
    assert found.status.node_name == "n1"
    assert {name: str(each) for name, each in found.status.allocatable.items()} == {"cpu": "4"}
    (condition,) = found.status.conditions
    assert (condition.type, condition.status) == ("Scheduled", "True")
    assert condition.last_transition_time == "2026-01-01T00:00:00Z"


def test_results_say_what_became_of_each_pod() -> None:
    gated = pod("gated", schedulingGates=[{"name": "g"}])
    important = pod("important", "6", priority=9)
    simulation = _simulated(
        node("n1"), gated, pod("huge", "9"), important, pod("running", "6", on="n1", priority=1)
    )
    simulation.run()
    assert dict(simulation.evicted) == {"default/running": "n1"}
    found = {
        name: simulation.result(f"default/{name}", was="before")
        for name in ("gated", "huge", "important", "running")
    }
    assert found["running"] == PodResult(
        "default/running", "evicted", "", "before", "evicted for a more important pod", None
    )
    assert {name: (each.state, each.node) for name, each in found.items()} == {
        "gated": ("gated", ""),
        "huge": ("unschedulable", ""),
        "important": ("placed", "n1"),
        "running": ("evicted", ""),
    }
    assert found["important"].message == ""
    assert "Insufficient cpu" in found["huge"].message
    assert found["gated"].message
    assert found["huge"].explained is not None
    with pytest.raises(KeyError):
        simulation.result("default/none")


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (_file_object(node("n1"), "g"), "g: Node n1: metadata.name = 'n1': stands in f too"),
        (
            FileObject("", "Pod", "", "p", b'{"metadata":{"name":"p"}}', "g"),
            "g: Pod p: metadata.namespace = '': is missing",
        ),
    ],
)
def test_an_object_without_a_place_of_its_own_is_an_error(second: FileObject, text: str) -> None:
    simulation = Simulation(default_configuration(), seed=0, now=0.0)
    with pytest.raises(InputError) as caught:
        simulation.load([_file_object(node("n1")), second])
    assert str(caught.value) == text
