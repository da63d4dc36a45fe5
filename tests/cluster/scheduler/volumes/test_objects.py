"""What the tables keep of claims, volumes and classes, as whole values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.decode import json_decoder
from apis.meta import LabelSelector
from apis.storage import StorageClass, decode_claim, decode_volume
from cluster.scheduler.tables.volumes.objects import (
    ZONE_LABELS,
    Attached,
    Claim,
    Class,
    Volume,
    attached_by_provisioner,
    claim_of,
    class_of,
    volume_of,
)
from cluster.scheduler.tables.volumes.places import place_of_selector

_decode_class = json_decoder(StorageClass)


def _volume(spec: dict[str, Any], **tree: Any) -> Volume:
    metadata = {"name": "v"} | tree.pop("metadata", {})
    return volume_of(
        decode_volume(msgspec.json.encode({"metadata": metadata, "spec": spec} | tree))
    )


def test_a_claim_that_says_everything() -> None:
    claim = {
        "metadata": {
            "name": "c",
            "namespace": "ns",
            "uid": "u",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {
                "volume.kubernetes.io/selected-node": "n1",
                "pv.kubernetes.io/bind-completed": "yes",
            },
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": "o", "uid": "1"},
                {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "2", "controller": True},
            ],
        },
        "spec": {
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "fast",
            "volumeMode": "Block",
            "volumeName": "v",
            "selector": {"matchLabels": {"a": "b"}},
        },
        "status": {"phase": "Lost"},
    }
    assert claim_of(decode_claim(msgspec.json.encode(claim))) == Claim(
        key="ns/c",
        uid="u",
        class_name="fast",
        modes=frozenset({"ReadWriteOnce", "ReadOnlyMany"}),
        volume_mode="Block",
        size=1 << 30,
        sized=True,
        selector=LabelSelector(match_labels={"a": "b"}),
        volume="v",
        bound=True,
        lost=True,
        deleting=True,
        selected_node="n1",
        owner="2",
    )


def test_a_claim_that_says_nothing() -> None:
    claim = {"metadata": {"name": "c", "namespace": "ns"}, "spec": {}}
    assert claim_of(decode_claim(msgspec.json.encode(claim))) == Claim(
        key="ns/c",
        uid="",
        class_name="",
        modes=frozenset(),
        volume_mode="Filesystem",
        size=0,
        sized=False,
        selector=None,
        volume="",
        bound=False,
        lost=False,
        deleting=False,
        selected_node="",
        owner="",
    )


def test_a_volume_that_says_everything() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    volume = _volume(
        {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "2Gi"},
            "storageClassName": "fast",
            "volumeMode": "Block",
            "claimRef": {"namespace": "ns", "name": "c", "uid": "u"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
            "csi": {"driver": "csi.test", "volumeHandle": "h"},
        },
        metadata={
            "labels": {
                "topology.kubernetes.io/zone": "z1__ z2",
                "topology.kubernetes.io/region": "r__",
                "a": "b",
            },
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        status={"phase": "Available"},
    )
    assert volume == Volume(
        name="v",
        class_name="fast",
        modes=frozenset({"ReadWriteOnce"}),
        volume_mode="Block",
        size=2 << 30,
        claim="ns/c",
        claim_uid="u",
        available=True,
        deleting=True,
        labels=(
            ("a", "b"),
            ("topology.kubernetes.io/region", "r__"),
            ("topology.kubernetes.io/zone", "z1__ z2"),
        ),
        place=place_of_selector(LabelSelector(match_labels={"zone": "a"})),
        # A label with an empty zone cannot be read.
        zones=(("topology.kubernetes.io/zone", frozenset({"z1", "z2"})),),
        attached=Attached("csi.test", "h"),
    )


def test_a_volume_that_says_nothing() -> None:
    assert _volume({}) == Volume(
        name="v",
        class_name="",
        modes=frozenset(),
        volume_mode="Filesystem",
        size=0,
        claim="",
        claim_uid="",
        available=False,
        deleting=False,
        labels=(),
        place=None,
        zones=(),
        attached=None,
    )


@pytest.mark.parametrize(
    ("source", "attached"),
    [
        (
            {"awsElasticBlockStore": {"volumeID": "d"}},
            Attached("ebs.csi.aws.com", "d", "kubernetes.io/aws-ebs"),
        ),
        (
            {"gcePersistentDisk": {"pdName": "d"}},
            Attached("pd.csi.storage.gke.io", "d", "kubernetes.io/gce-pd"),
        ),
        (
            {"azureDisk": {"diskName": "n", "diskURI": "d"}},
            Attached("disk.csi.azure.com", "d", "kubernetes.io/azure-disk"),
        ),
        (
            {"cinder": {"volumeID": "d"}},
            Attached("cinder.csi.openstack.org", "d", "kubernetes.io/cinder"),
        ),
        (
            {"portworxVolume": {"volumeID": "d"}},
            Attached("pxd.portworx.com", "d", "kubernetes.io/portworx-volume"),
        ),
        ({"nfs": {"server": "s", "path": "/p"}}, None),
    ],
)
def test_volumes_of_in_tree_plugins_take_places_of_the_drivers_that_replace_them(
    source: dict[str, Any], attached: Attached | None
) -> None:
    assert _volume(source).attached == attached
    if attached is not None:
        made = attached_by_provisioner(attached.plugin, "ns/c")
        assert made == attached._replace(handle="claim:ns/c")


def test_a_volume_of_another_provisioner_is_known_by_its_claim() -> None:
    assert attached_by_provisioner("csi.test", "ns/c") == Attached("csi.test", "claim:ns/c")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"provisioner": "csi.test", "volumeBindingMode": "WaitForFirstConsumer"},
            Class("k", waits=True, provisioner="csi.test", topologies=None),
        ),
        (
            {"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "Immediate"},
            Class("k", waits=False, provisioner="", topologies=None),
        ),
    ],
)
def test_classes(fields: dict[str, Any], expected: Class) -> None:
    made = {"metadata": {"name": "k"}, **fields}
    assert class_of(_decode_class(msgspec.json.encode(made))) == expected


@pytest.mark.parametrize(
    ("label", "zones"),
    [
        ("failure-domain.beta.kubernetes.io/zone", frozenset({"a", "b"})),
        ("failure-domain.beta.kubernetes.io/region", frozenset({"a", "b"})),
        ("topology.kubernetes.io/zone", frozenset({"a", "b"})),
        ("topology.kubernetes.io/region", frozenset({"a", "b"})),
        ("zone", None),
    ],
)
def test_labels_of_volumes_that_say_where_their_nodes_are(
    label: str, zones: frozenset[str] | None
) -> None:
    volume = _volume({}, metadata={"labels": {label: "a__b"}})
    assert dict(volume.zones) == ({} if zones is None else {label: zones})
    kind = label.rpartition("/")[2]
    assert ZONE_LABELS.get(label) == (None if zones is None else f"topology.kubernetes.io/{kind}")
