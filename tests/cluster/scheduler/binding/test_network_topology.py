"""The status of the ClusterNetworkTopology: written when it differs, and never twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from apis.decode import decode_object
from apis.network_topology import ClusterNetworkTopology
from cluster.scheduler.binding.network_topology import NetworkTopologyStatus
from cluster.scheduler.tables.network_topology import NetworkTopology, layers_of
from cluster.scheduler.tables.tables import Tables
from kube.client import ApiError
from kube.resources import CLUSTER_NETWORK_TOPOLOGIES
from tests.cluster.fake_api import FakeApi, in_virtual_time
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.tables.networks import RACKS, topology

PATH = CLUSTER_NETWORK_TOPOLOGIES.path(name="default")


class Bed:
    """Two racks with a node each, and the object on the API server; `shown` is as last seen."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.tables = Tables()
        self.network = NetworkTopology(self.tables.nodes)
        self.network.set(layers_of(topology(*RACKS)))
        for name, rack in (("n1", "r1"), ("n2", "r2")):
            self.add(name, rack)
        self.api.put(CLUSTER_NETWORK_TOPOLOGIES, msgspec.to_builtins(topology(*RACKS)))
        self.shown: ClusterNetworkTopology | None = None
        self.show()
        self.status = NetworkTopologyStatus(self.api.client(), self.network, lambda: self.shown)

    def add(self, name: str, rack: str) -> None:
        self.tables.upsert_node(make_node(name, labels={"spine": "s", "rack": rack}))

    def show(self) -> None:
        stored = self.api.objects[PATH]
        self.shown = decode_object(stored, ClusterNetworkTopology, obj="default")

    def racks(self) -> dict[str, int]:
        """Return the nodes of each rack in the stored status."""
        return {
            each["topologyInfo"]["topologyName"]: each["nodeNum"]
            for each in self.api.objects[PATH]["status"]["detailStatus"]
            if each["topologyInfo"]["topologyLayer"] == "RackLayer"
        }


def _play(scenario: Callable[[Bed], Awaitable[None]]) -> None:
    async def run() -> None:
        await scenario(Bed())

    in_virtual_time(run)


def test_the_status_is_written_once_for_each_change() -> None:
    async def scenario(bed: Bed) -> None:
        await bed.status.write()
        ((method, path, body),) = bed.api.writes
        assert (method, path) == ("PATCH", f"{PATH}/status")
        assert body["metadata"] == {"resourceVersion": "1"}
        assert list(body["status"]) == ["detailStatus"]
        assert bed.racks() == {"r1": 1, "r2": 1}
        bed.show()
        for _ in range(3):
            await bed.status.write()
        assert (len(bed.api.writes), bed.status.written) == (1, 1)
        bed.add("n3", "r2")
        await bed.status.write()
        assert bed.racks() == {"r1": 1, "r2": 2}
        assert bed.status.written == 2

    _play(scenario)


def test_a_status_that_another_client_changed_is_written_again() -> None:
    async def scenario(bed: Bed) -> None:
        await bed.status.write()
        bed.show()
        await bed.status.write()
        bed.api.put(CLUSTER_NETWORK_TOPOLOGIES, msgspec.to_builtins(topology(*RACKS)))
        bed.show()
        await bed.status.write()
        assert bed.racks() == {"r1": 1, "r2": 1}
        assert bed.status.written == 2

    _play(scenario)


@pytest.mark.parametrize("absent", ["the object", "its layers"])
def test_nothing_is_written_without_an_object_and_layers(absent: str) -> None:
    async def scenario(bed: Bed) -> None:
        if absent == "the object":
            bed.shown = None
        else:
            bed.network.set(None)
        await bed.status.write()
        assert not bed.api.writes

    _play(scenario)


def test_an_object_that_is_newer_than_seen_is_not_overwritten() -> None:
    async def scenario(bed: Bed) -> None:
        bed.api.put(CLUSTER_NETWORK_TOPOLOGIES, msgspec.to_builtins(topology(*RACKS)))
        with pytest.raises(ApiError):
            await bed.status.write()
        assert bed.status.written == 0

    _play(scenario)


def test_writing_goes_on_after_a_refusal_and_after_a_defect() -> None:
    async def scenario(bed: Bed) -> None:
        bed.api.refuse[PATH] = 500
        task = asyncio.create_task(bed.status.run())
        await asyncio.sleep(15)
        assert bed.api.writes
        assert bed.status.faults.count == 0
        del bed.api.refuse[PATH]
        shown = bed.shown
        assert shown is not None
        bed.shown = msgspec.structs.replace(shown, metadata=cast(Any, None))
        await asyncio.sleep(10)
        assert bed.status.faults.count == 1
        bed.shown = shown
        await asyncio.sleep(10)
        assert bed.racks() == {"r1": 1, "r2": 1}
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    _play(scenario)
