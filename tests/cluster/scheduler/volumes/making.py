"""Claims, volumes and their classes for tests, as JSON and in tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from apis.decode import json_decoder
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from apis.storage import (
    CSINode,
    CSIStorageCapacity,
    StorageClass,
    decode_claim,
    decode_volume,
)
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.plugins.volumes.limits import NodeVolumeLimits
from cluster.scheduler.plugins.volumes.restrictions import VolumeRestrictions
from cluster.scheduler.plugins.volumes.zone import VolumeZone
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.attachments import limits_of
from cluster.scheduler.tables.volumes.objects import (
    claim_of,
    class_of,
    largest_volume,
    volume_of,
)
from cluster.scheduler.tables.volumes.places import place_of_selector
from tests.cluster.scheduler.making import make_node, make_pod

Tree = dict[str, Any]

HOST = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
PROFILE = Profile(
    "s",
    filters=(VolumeRestrictions(), NodeVolumeLimits(), VolumeBinding(), VolumeZone()),
    allocators=(VolumeBinding(),),
)

_decode_class = json_decoder(StorageClass)
_decode_csi_node = json_decoder(CSINode)
_decode_capacity = json_decoder(CSIStorageCapacity)


def claim_json(
    name: str,
    *,
    class_name: str | None = "wait",
    size: str = "1Gi",
    modes: Iterable[str] = ("ReadWriteOnce",),
    volume: str = "",
    annotations: dict[str, str] | None = None,
    selector: Tree | None = None,
    phase: str = "",
    **more: Any,
) -> Tree:
    """Return a claim; one with a volume is bound to it."""
    annotations = dict(annotations or {})
    if volume:
        annotations["pv.kubernetes.io/bind-completed"] = "yes"
    spec: Tree = {
        "accessModes": list(modes),
        "resources": {"requests": {"storage": size}},
    }
    if class_name is not None:
        spec["storageClassName"] = class_name
    if volume:
        spec["volumeName"] = volume
    if selector is not None:
        spec["selector"] = selector
    metadata = {"name": name, "namespace": "default", "annotations": annotations}
    return {
        "metadata": metadata | more.pop("metadata", {}),
        "spec": spec | more,
        "status": {"phase": phase},
    }


def volume_json(
    name: str,
    *,
    class_name: str = "wait",
    size: str = "1Gi",
    modes: Iterable[str] = ("ReadWriteOnce",),
    claim: str = "",
    labels: dict[str, str] | None = None,
    terms: list[Tree] | None = None,
    csi: tuple[str, str] | None = None,
    **more: Any,
) -> Tree:
    """Return a volume. terms: where it can be reached, everywhere if None. claim: its claim."""
    spec: Tree = {
        "accessModes": list(modes),
        "capacity": {"storage": size},
        "storageClassName": class_name,
    }
    if csi is not None:
        spec["csi"] = {"driver": csi[0], "volumeHandle": csi[1]}
    if terms is not None:
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
    if claim:
        spec["claimRef"] = {"namespace": "default", "name": claim}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec | more,
        "status": {"phase": "Bound" if claim else "Available"},
    }


def on(key: str, *values: str) -> list[Tree]:
    """Return the terms of a place: nodes whose label has one of the values."""
    return [{"matchExpressions": [{"key": key, "operator": "In", "values": list(values)}]}]


class Cluster:
    """Tables that are filled object by object, as an API server would show them."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        self.evaluator = Evaluator(PROFILE, self.tables)
        self.scheduling = Scheduling(self.tables, {"s": PROFILE}, seed=1)

    def node(self, name: str, *, zone: str = "", labels: dict[str, str] | None = None) -> None:
        zones = {ZONE: zone} if zone else {}
        node: SchedulingNode = make_node(name, labels={**zones, **(labels or {})})
        self.tables.upsert_node(node)

    def claim(self, name: str, **fields: Any) -> None:
        claim = claim_json(name, **fields)
        self.tables.volumes.set_claim(claim_of(decode_claim(msgspec.json.encode(claim))))

    def volume(self, name: str, **fields: Any) -> None:
        volume = volume_json(name, **fields)
        self.tables.volumes.set_volume(volume_of(decode_volume(msgspec.json.encode(volume))))

    def storage_class(
        self,
        name: str,
        *,
        provisioner: str = "kubernetes.io/no-provisioner",
        mode: str = "WaitForFirstConsumer",
        topologies: list[Tree] | None = None,
    ) -> None:
        made = {
            "metadata": {"name": name},
            "provisioner": provisioner,
            "volumeBindingMode": mode,
            "allowedTopologies": topologies or [],
        }
        self.tables.volumes.set_class(class_of(_decode_class(msgspec.json.encode(made))))

    def csi_node(self, name: str, migrated: str = "", **limits: int) -> None:
        """Take a CSINode; limits: driver, with "_" for ".", and how many volumes it attaches."""
        made = {
            "metadata": {
                "name": name,
                "annotations": {"storage.alpha.kubernetes.io/migrated-plugins": migrated},
            },
            "spec": {
                "drivers": [
                    {"name": driver.replace("_", "."), "allocatable": {"count": count}}
                    for driver, count in limits.items()
                ]
            },
        }
        decoded = _decode_csi_node(msgspec.json.encode(made))
        self.tables.attachments.set_limits(name, limits_of(decoded))

    def capacity(
        self, name: str, class_name: str, left: str, labels: dict[str, str], **more: str
    ) -> None:
        made = {
            "metadata": {"name": name},
            "storageClassName": class_name,
            "nodeTopology": {"matchLabels": labels},
            "capacity": left,
            **more,
        }
        report = _decode_capacity(msgspec.json.encode(made))
        assert report.node_topology is not None
        self.tables.volumes.set_storage(
            name, class_name, place_of_selector(report.node_topology), largest_volume(report)
        )

    def place(self, pod: SchedulingPod) -> Placed | Unplaced:
        """Schedule a pod; a placement is in force."""
        return self.scheduling.schedule(
            key=f"default/{pod.metadata.name}",
            uid=pod.metadata.uid,
            shape=self.shapes.of(pod),
            profile="s",
            now=0.0,
        )

    def node_of(self, pod: SchedulingPod) -> str:
        """Schedule a pod; return its node, or the message of its refusal."""
        outcome = self.place(pod)
        if isinstance(outcome, Placed):
            return outcome.booking.node
        return outcome.diagnosis.message

    def feasible(self, pod: SchedulingPod) -> set[str]:
        """Return the names of the nodes that take a pod."""
        evaluation = self.evaluator.evaluate(self.shapes.of(pod))
        return {self.tables.nodes.name(int(row)) for row in evaluation.feasible}


def pod_with(name: str, *claims: str, node: str = "", **spec: Any) -> SchedulingPod:
    """Return a pod with these claims."""
    volumes = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    return make_pod(name, node=node, volumes=volumes + spec.pop("volumes", []), **spec)
