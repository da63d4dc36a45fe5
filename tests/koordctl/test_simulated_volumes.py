"""`koordctl simulate` with claims: volumes are given once, and where their pods can reach them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster.scheduler.simulation.dumps import (
    Tree,
    node,
    pod,
    workload,
)
from tests.cluster.scheduler.volumes.making import HOST, claim_json, volume_json
from tests.cluster.scheduler.volumes.making import on as terms_on
from tests.koordctl.simulated import (
    Cluster,
    claim_of,
    states_of,
    storage_class,
    volume_of,
    with_data,
)


def test_a_volume_is_used_once_and_a_provisioned_one_keeps_its_zone(cluster: Cluster) -> None:
    nodes = [node("n1"), node("n2", cpu=4)]
    for number, each in enumerate(nodes):
        each["metadata"]["labels"]["topology.kubernetes.io/zone"] = f"z{number}"

    def claim(name: str, storage_class: str) -> Tree:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": storage_class,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }

    classes = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": provisioner,
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        for name, provisioner in (
            ("local", "kubernetes.io/no-provisioner"),
            ("disk", "disk.example.com"),
        )
    ]
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "pv"},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "local",
        },
        "status": {"phase": "Available"},
    }
    claims = [claim("c0", "local"), claim("c1", "local"), claim("shared", "disk")]

    def using(name: str, used: str, cpu: str) -> Tree:
        source = {"name": "v", "persistentVolumeClaim": {"claimName": used}}
        return pod(name, cpu, volumes=[source])

    # One volume for two claims. The shared one is made with its first pod, which fits into the
    # first zone alone; the second pod would go to the emptier node of the other zone.
    pods = (
        using("a", "c0", "1"),
        using("b", "c1", "1"),
        using("first", "shared", "5"),
        using("second", "shared", "1"),
    )
    cluster.write(*nodes, *classes, volume, *claims, pod("x", "1", on="n1"))
    found = cluster.ask("--pods", cluster.pods(*pods))
    states = states_of(found)
    assert sorted((states["default/a"], states["default/b"]))[1] == "unschedulable"
    assert states["default/first"] == "n1"
    assert states["default/second"] == "n1"


def test_volumes_are_given_once_and_claims_are_made_from_templates(cluster: Cluster) -> None:
    def volume(name: str, on: str) -> Tree:
        made = volume_json(name, class_name="local", terms=terms_on(HOST, on))
        return {"apiVersion": "v1", "kind": "PersistentVolume", **made}

    storage_class = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": "local",
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }
    volumes = (volume("a", "n1"), volume("b", "n2"), volume("c", "n2"))
    cluster.write(node("n1"), node("n2"), node("n3"), storage_class, *volumes)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    replicas = workload("StatefulSet", "web", 3)
    replicas["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    states = states_of(cluster.ask("--pods", cluster.pods(replicas)))
    assert Counter(states.values()) == {"n1": 1, "n2": 2}
    ephemeral = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    found = cluster.ask("--pods", cluster.pods(replicas, pod("late", volumes=[ephemeral])))
    states = states_of(found)
    assert Counter(states.values()) == {"n1": 1, "n2": 2, "unschedulable": 1}
    (refused,) = (each for each in found["pods"] if each["state"] == "unschedulable")
    assert "3 node(s) didn't find available persistent volumes to bind" in refused["message"]
    del replicas["spec"]["volumeClaimTemplates"][0]["metadata"]
    status, _, errors = cluster.run("--pods", cluster.pods(replicas))
    assert status == 2
    assert "spec.volumeClaimTemplates[0].metadata.name" in errors


def test_a_replica_goes_to_the_volume_that_its_claim_has(cluster: Cluster) -> None:
    cluster.write(
        node("n1"),
        node("n2"),
        pod("x", "6", on="n2"),
        storage_class("disk", "disk.example.com"),
        claim_of("data-web-0", class_name="disk", volume="a"),
        volume_of("a", class_name="disk", claim="data-web-0", terms=terms_on(HOST, "n2")),
    )
    states = states_of(cluster.ask("--pods", cluster.pods(with_data(2))))
    # The second replica gets a new claim, and the emptier node.
    assert states == {"default/web-0": "n2", "default/web-1": "n1"}


@pytest.mark.parametrize(
    ("class_name", "annotations", "state"),
    [
        (None, {}, "n1"),
        ("", {}, "unschedulable"),
        (None, {"volume.beta.kubernetes.io/storage-class": ""}, "unschedulable"),
    ],
)
def test_a_claim_of_the_file_that_names_no_class_gets_the_default_one(
    cluster: Cluster, class_name: str | None, annotations: dict[str, str], state: str
) -> None:
    cluster.write(node("n1"), storage_class("disk", "disk.example.com", default=True))
    claim = claim_of("c", class_name=class_name, annotations=annotations)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    found = cluster.ask("--pods", cluster.pods(claim, pod("a", volumes=volumes)))
    assert states_of(found) == {"default/a": state}


@pytest.mark.parametrize(
    ("classes", "state"),
    [
        # The newest of several default classes counts.
        ({"a": "2026-01-01T00:00:00Z", "b": "2026-01-02T00:00:00Z"}, "n1"),
        ({"a": "2026-01-03T00:00:00Z", "b": "2026-01-02T00:00:00Z"}, "unschedulable"),
        ({"b": "2026-01-02T00:00:00Z", "a": "2026-01-02T00:00:00Z"}, "unschedulable"),
        ({"b": "2026-01-02T00:00:00Z", "a": None}, "n1"),
    ],
)
def test_of_several_default_classes_the_newest_counts(
    cluster: Cluster, classes: dict[str, str | None], state: str
) -> None:
    made = []
    for name, created in classes.items():
        # Nothing provisions volumes of class a.
        provisioner = "disk.example.com" if name == "b" else "kubernetes.io/no-provisioner"
        made.append(storage_class(name, provisioner, default=True))
        made[-1]["metadata"]["creationTimestamp"] = created
    cluster.write(node("n1"), *made)
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    claim = claim_of("c", class_name=None)
    found = cluster.ask("--pods", cluster.pods(claim, pod("a", volumes=volumes)))
    assert states_of(found) == {"default/a": state}


def test_a_claim_and_its_volume_that_the_cluster_has_stay_bound(cluster: Cluster) -> None:
    cluster.write(
        node("n1"),
        node("n2"),
        pod("x", "6", on="n2"),
        storage_class("disk", "disk.example.com"),
        claim_of("c", class_name="disk", volume="a"),
        volume_of("a", class_name="disk", claim="c", terms=terms_on(HOST, "n2")),
    )
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]
    # The manifests that they were made from, and one that is new.
    pods = cluster.pods(
        claim_of("c", class_name="disk"),
        volume_of("a", class_name="disk", terms=terms_on(HOST, "n2")),
        claim_of("new", class_name="disk"),
        pod("web", volumes=volumes),
        pod("other", volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "new"}}]),
    )
    found = cluster.ask("--pods", pods)
    assert states_of(found) == {"default/web": "n2", "default/other": "n1"}
    notes = [note.partition(": ")[2] for note in found["notes"] if "as the cluster has it" in note]
    assert notes == [
        "PersistentVolumeClaim default/c counts as the cluster has it",
        "PersistentVolume a counts as the cluster has it",
    ]


def test_each_of_the_pods_that_are_counted_has_claims_of_its_own(cluster: Cluster) -> None:
    pinned = (
        volume_of(f"v{number}", class_name="local", terms=terms_on(HOST, name))
        for number, name in enumerate(("n1", "n2", "n2"))
    )
    cluster.write(
        node("n1", cpu=3),
        node("n2", cpu=2),
        storage_class("disk", "disk.example.com"),
        storage_class("local", "kubernetes.io/no-provisioner", default=True),
        # Of the first replica; the pods that are counted have other claims.
        claim_of("data-web-0", class_name="disk", volume="a"),
        volume_of("a", class_name="disk", claim="data-web-0", terms=terms_on(HOST, "n2")),
        *pinned,
    )
    template = {"spec": claim_json("c", class_name=None)["spec"]}
    ephemeral = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": template}}
    pods = (with_data(2), pod("late", "100m", volumes=[ephemeral]))
    found = cluster.ask("--pods", cluster.pods(*pods), "--capacity")
    counted = {each["pod"]: each["nodes"] for each in found["capacity"]}
    # The replicas are one question.
    assert counted == {"default/web-0": {"n1": 3, "n2": 2}, "default/late": {"n2": 2, "n1": 1}}


@pytest.mark.parametrize("kind", ["persistentVolumeClaim", "ephemeral"])
def test_volumes_of_pods_that_are_placed_again_are_attached_nowhere(
    cluster: Cluster, kind: str
) -> None:
    driver = "disk.example.com"
    limits = {"drivers": [{"name": driver, "nodeID": "n1", "allocatable": {"count": 1}}]}
    storage = {"apiVersion": "storage.k8s.io/v1"}
    attachment = {
        "attacher": driver,
        "nodeName": "n1",
        "source": {"persistentVolumeName": "a"},
    }
    source: Tree = {"claimName": "old-v"}
    owner = {"kind": "Pod", "name": "old", "uid": "uid-old", "controller": True}
    if kind == "ephemeral":
        source = {"volumeClaimTemplate": {"spec": {}}}
    other = [{"name": "v", "persistentVolumeClaim": {"claimName": "other"}}]
    cluster.write(
        node("n1"),
        node("n2"),
        {**storage, "kind": "CSINode", "metadata": {"name": "n1"}, "spec": limits},
        {
            **storage,
            "kind": "VolumeAttachment",
            "metadata": {"name": "attached"},
            "spec": attachment,
        },
        storage_class("disk", driver),
        claim_of("old-v", class_name="disk", volume="a", metadata={"ownerReferences": [owner]}),
        volume_of("a", class_name="disk", claim="old-v", csi=(driver, "a")),
        # The one place on n1 is needed for the other volume, which n1 alone reaches.
        claim_of("other", class_name="disk", volume="b"),
        volume_of(
            "b", class_name="disk", claim="other", csi=(driver, "b"), terms=terms_on(HOST, "n1")
        ),
        pod("needs", volumes=other, priority=1),
        pod("old", on="n1", volumes=[{"name": "v", kind: source}]),
    )
    assert states_of(cluster.ask()) == {"default/needs": "n1", "default/old": "n2"}
