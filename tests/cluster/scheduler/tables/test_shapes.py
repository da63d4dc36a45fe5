"""What of a pod its shape has: claims, disks, ports, owners, and what its content tells apart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.scheduling_pod import SchedulingPod, decode_scheduling_pod
from cluster.scheduler.tables.shapes import PodClaim, PodDisk, PodShape, Shapes
from tests.cluster.scheduler.making import make_pod


def _shape(**spec: Any) -> PodShape:
    return Shapes().of(make_pod("p", **spec))


def test_disks_are_what_other_pods_may_conflict_with() -> None:
    shape = _shape(
        volumes=[
            {"name": "a", "gcePersistentDisk": {"pdName": "disk", "readOnly": True}},
            {"name": "b", "awsElasticBlockStore": {"volumeID": "vol", "readOnly": True}},
            {"name": "c", "iscsi": {"iqn": "iqn.x", "targetPortal": "t", "lun": 0}},
            {
                "name": "d",
                "rbd": {"monitors": ["m1", "m2"], "image": "i", "pool": "q", "readOnly": True},
            },
            {"name": "e", "emptyDir": {}},
        ]
    )
    assert shape.disks == (
        PodDisk("gce", "disk", True),
        PodDisk("aws", "vol", False),
        PodDisk("iscsi", "iqn.x", False),
        PodDisk("rbd", "q/i", True, ("m1", "m2")),
    )


def test_claims_are_named_once_and_an_ephemeral_one_belongs_to_its_pod() -> None:
    shape = _shape(
        volumes=[
            {"name": "a", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}},
        ]
    )
    assert shape.claims == (
        PodClaim("data"),
        PodClaim("p-scratch", "p", "uid-default-p"),
    )


def test_images_of_containers_and_of_volumes() -> None:
    shape = _shape(
        containers=[{"name": "a", "image": "one"}],
        initContainers=[{"name": "b", "image": "two"}],
        volumes=[{"name": "v", "image": {"reference": "three"}}, {"name": "w", "emptyDir": {}}],
    )
    assert (shape.images, shape.image_volumes) == (("one", "two"), ("three",))


def test_host_ports_of_containers_and_sidecars_are_held() -> None:
    def container(name: str, host_port: int, **more: str) -> dict[str, Any]:
        return {"name": name, "ports": [{"containerPort": 1, "hostPort": host_port}], **more}

    shape = _shape(
        containers=[container("a", 80), container("b", 0)],
        initContainers=[container("s", 90, restartPolicy="Always"), container("i", 91)],
    )
    assert [port.host_port for port in shape.ports] == [80, 90]


def test_limits_are_summed_as_requests_are() -> None:
    shape = _shape(
        containers=[
            {"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1"}}},
            {"name": "b", "resources": {"limits": {"cpu": "2"}}},
        ],
        initContainers=[{"name": "i", "resources": {"limits": {"cpu": "5"}}}],
        overhead={"cpu": "100m"},
    )
    assert shape.limits == {"cpu": 5100, "memory": 1}
    whole = _shape(limits={"cpu": "1"}, resources={"limits": {"cpu": "3"}})
    assert whole.limits["cpu"] == 3000


def _changed(pod: SchedulingPod, **meta: Any) -> SchedulingPod:
    return msgspec.structs.replace(pod, metadata=msgspec.structs.replace(pod.metadata, **meta))


def _with_status(status: dict[str, Any], **spec: Any) -> SchedulingPod:
    tree = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}],
            **spec,
        },
        "status": status,
    }
    return decode_scheduling_pod(msgspec.json.encode(tree))


@pytest.mark.parametrize(
    ("status", "cpu"),
    [
        ({}, 1000),
        ({"resources": {"requests": {"cpu": "1"}}}, 1000),
        ({"resources": {"requests": {"cpu": "3"}}}, 3000),
        (
            {
                "resources": {"requests": {"cpu": "1"}},
                "allocatedResources": {"cpu": "2"},
            },
            2000,
        ),
    ],
)
def test_a_container_that_is_being_resized_has_a_shape_of_its_own(
    status: dict[str, Any], cpu: int
) -> None:
    shapes = Shapes()
    plain = shapes.of(_with_status({}))
    shape = shapes.of(_with_status({"containerStatuses": [{"name": "c", **status}]}))
    assert shape.requests == {"cpu": cpu}
    assert (shape is plain) == (cpu == 1000)


def test_a_controller_is_the_owner_of_its_pods() -> None:
    tree = {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "uid": "u",
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "1"},
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": "r",
                    "uid": "2",
                    "controller": True,
                },
            ],
        },
        "spec": {"containers": [{"name": "c"}]},
    }
    shape = Shapes().of(decode_scheduling_pod(msgspec.json.encode(tree)))
    assert (shape.owner_kind, shape.owner) == ("ReplicaSet", "2")
    alone = _shape()
    assert (alone.owner_kind, alone.owner) == ("", "")


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "data"}}]},
        {"volumes": [{"name": "a", "gcePersistentDisk": {"pdName": "disk"}}]},
        {"volumes": [{"name": "a", "image": {"reference": "x"}}]},
        {"schedulerName": "other"},
        {"priority": 7},
        {"preemptionPolicy": "Never"},
        {"nodeSelector": {"a": "b"}},
        {"affinity": {"podAffinity": {}}},
        {"tolerations": [{"operator": "Exists"}]},
        {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ]
        },
        {"schedulingGates": [{"name": "g"}]},
        {"resourceClaims": [{"name": "r"}]},
        {"overhead": {"cpu": "1"}},
        {"resources": {"requests": {"cpu": "1"}}},
        {"hostNetwork": True},
        {"labels": {"a": "b"}},
        {"annotations": {"koordinator.sh/a": "b"}},
        {"containers": [{"name": "c", "image": "i"}]},
        {"containers": [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 1}]}]},
        {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1"}}}]},
        {"initContainers": [{"name": "i"}]},
    ],
)
def test_what_a_decision_may_depend_on_tells_shapes_apart(spec: dict[str, Any]) -> None:
    shapes = Shapes()
    plain = shapes.of(make_pod("p"))
    other = shapes.of(make_pod("q", **spec))
    assert other is not plain
    assert shapes.of(make_pod("r")) is plain
