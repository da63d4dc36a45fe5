"""Objects about volumes as they are watched: which nodes take a pod after each change."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from cluster.scheduler.cycle.events import Action
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.sources.volumes import VolumeSource
from kube.client import Client
from tests.cluster.scheduler.sources.heard import HeardQueue
from tests.cluster.scheduler.volumes.making import (
    HOST,
    ZONE,
    Cluster,
    claim_json,
    on,
    pod_with,
    volume_json,
)

_ACTIONS = {
    "ADDED": Action.ADD,
    "MODIFIED": Action.UPDATE_OTHER,
    "DELETED": Action.DELETE,
}
_CLASS = {"provisioner": "csi.test", "volumeBindingMode": "WaitForFirstConsumer"}
_CAPACITY = {
    "storageClassName": "made",
    "nodeTopology": {"matchLabels": {ZONE: "a"}},
    "capacity": "9Gi",
}
_BOTH = {"n0", "n1"}


class _Bed:
    """Nodes n0 in zone a and n1 in zone b, and the caches of a source."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.cluster.node("n0", zone="a")
        self.cluster.node("n1", zone="b")
        self.queue = HeardQueue()

        async def make() -> VolumeSource:
            tables = self.cluster.tables
            return VolumeSource(cast(Client, None), tables, self.queue, clock=lambda: 0.0)

        source = asyncio.run(make())
        self._caches = {each.resource.kind: each for each in source.caches}
        self._version = 0

    def event(self, change: str, kind: str, obj: dict[str, Any], name: str = "") -> None:
        """Take an event, which must reach the queue as one of its kind."""
        self._version += 1
        metadata = {"name": name} | obj.get("metadata", {})
        metadata["resourceVersion"] = str(self._version)
        line = {"type": change, "object": obj | {"metadata": metadata}}
        self._caches[kind].take(msgspec.json.encode(line))
        (event,) = self.queue.events
        assert (event.kind, event.action) == (kind, _ACTIONS[change])
        assert (event.old is None, event.new is None) == (change == "ADDED", change == "DELETED")
        self.queue.events.clear()

    def nodes(self, claim: str = "c") -> set[str]:
        """Return which nodes take a pod with a claim."""
        try:
            return self.cluster.feasible(pod_with("p", claim))
        except Refusal:
            return set()


@pytest.fixture
def bed() -> _Bed:
    bed = _Bed()
    bed.event("ADDED", "StorageClass", _CLASS, "made")
    bed.event("ADDED", "PersistentVolumeClaim", claim_json("c", class_name="made", size="5Gi"))
    assert bed.nodes() == _BOTH
    return bed


def test_a_claim_and_its_class_are_needed(bed: _Bed) -> None:
    bed.event("DELETED", "StorageClass", _CLASS, "made")
    assert bed.nodes() == set()
    bed.event("ADDED", "StorageClass", _CLASS, "made")
    assert bed.nodes() == _BOTH
    bed.event("DELETED", "PersistentVolumeClaim", claim_json("c", class_name="made", size="5Gi"))
    assert bed.nodes() == set()


def test_a_class_that_binds_at_once_leaves_nothing_to_choose(bed: _Bed) -> None:
    bed.event("MODIFIED", "StorageClass", _CLASS | {"volumeBindingMode": "Immediate"}, "made")
    assert bed.nodes() == set()


def test_a_volume_is_chosen_while_it_exists(bed: _Bed) -> None:
    static = {**_CLASS, "provisioner": "kubernetes.io/no-provisioner"}
    bed.event("ADDED", "StorageClass", static, "wait")
    bed.event("ADDED", "PersistentVolumeClaim", claim_json("d"))
    assert bed.nodes("d") == set()
    bed.event("ADDED", "PersistentVolume", volume_json("v", terms=on(HOST, "n0")))
    assert bed.nodes("d") == {"n0"}
    bed.event("MODIFIED", "PersistentVolume", volume_json("v", terms=on(HOST, "n1")))
    assert bed.nodes("d") == {"n1"}
    bed.event("DELETED", "PersistentVolume", volume_json("v", terms=on(HOST, "n1")))
    assert bed.nodes("d") == set()


def test_storage_counts_where_its_driver_reports_it(bed: _Bed) -> None:
    bed.event("ADDED", "CSIStorageCapacity", _CAPACITY, "s")
    assert bed.nodes() == _BOTH
    bed.event("ADDED", "CSIDriver", {"spec": {"storageCapacity": False}}, "csi.test")
    assert bed.nodes() == _BOTH
    bed.event("MODIFIED", "CSIDriver", {"spec": {"storageCapacity": True}}, "csi.test")
    assert bed.nodes() == {"n0"}
    bed.event("MODIFIED", "CSIStorageCapacity", _CAPACITY | {"capacity": "1Gi"}, "s")
    assert bed.nodes() == set()
    bed.event("MODIFIED", "CSIStorageCapacity", _CAPACITY, "s")
    assert bed.nodes() == {"n0"}
    bed.event("MODIFIED", "CSIStorageCapacity", _CAPACITY | {"nodeTopology": None}, "s")
    assert bed.nodes() == set()
    bed.event("MODIFIED", "CSIStorageCapacity", _CAPACITY, "s")
    bed.event("DELETED", "CSIStorageCapacity", _CAPACITY, "s")
    assert bed.nodes() == set()
    bed.event("DELETED", "CSIDriver", {"spec": {"storageCapacity": True}}, "csi.test")
    assert bed.nodes() == _BOTH


def test_attached_volumes_count_up_to_the_limit_of_the_node(bed: _Bed) -> None:
    def limit(count: int) -> dict[str, Any]:
        return {"spec": {"drivers": [{"name": "csi.test", "allocatable": {"count": count}}]}}

    bed.event("ADDED", "CSINode", limit(0), "n0")
    assert bed.nodes() == {"n1"}
    bed.event("MODIFIED", "CSINode", limit(1), "n0")
    assert bed.nodes() == _BOTH
    bed.event("ADDED", "PersistentVolume", volume_json("other", csi=("csi.test", "h")))
    attachment = {
        "spec": {
            "attacher": "csi.test",
            "nodeName": "n0",
            "source": {"persistentVolumeName": "other"},
        }
    }
    bed.event("ADDED", "VolumeAttachment", attachment, "a")
    assert bed.nodes() == {"n1"}
    bed.event("DELETED", "VolumeAttachment", attachment, "a")
    assert bed.nodes() == _BOTH
    # A volume that is written into the pod has no PersistentVolume.
    inline = {"spec": attachment["spec"] | {"source": {}}}
    bed.event("ADDED", "VolumeAttachment", inline, "b")
    assert bed.nodes() == _BOTH
    bed.event("MODIFIED", "CSINode", limit(0), "n0")
    bed.event("DELETED", "CSINode", limit(0), "n0")
    assert bed.nodes() == _BOTH
