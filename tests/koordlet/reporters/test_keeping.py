"""Objects that are kept as the machine is: when the API server is asked, and what faults cost."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from hooks.facts import NodeMeta
from koordlet.reporters.keeping import Keeper
from koordlet.reporters.topology import Facts, KeptTopology, topology
from koordlet.sources.kubelet_settings import KubeletSettings
from koordlet.sources.polling import SourceError
from kube.client import Client
from kube.resources import NODE_RESOURCE_TOPOLOGIES
from linux.cpus import Cpu
from linux.numa_memory import CpuKind, NumaMemory
from service.events import Events
from tests.koordlet.reporters.bed import Objects, Plain, with_server

PATH = "/apis/topology.node.k8s.io/v1alpha1/noderesourcetopologies/n1"
POOLS = "node.koordinator.sh/cpu-shared-pools"


class Node:
    """A node of two CPUs, and the keeper of its topology."""

    def __init__(self, directory: str = "") -> None:
        self.now = 1000.0
        self.events = Events()
        self.fault: Exception | None = None
        self.facts = Facts(
            cpus=tuple(Cpu(cpu=cpu, core=cpu, socket=0, node=0, l3=0) for cpu in range(2)),
            memory={0: NumaMemory(2**30, {})},
            kind=CpuKind(),
            kubelet=KubeletSettings(),
            exclusive={},
            pods=(),
            node=NodeMeta("n1"),
        )
        self.keeper = Keeper(
            NODE_RESOURCE_TOPOLOGIES,
            "n1",
            self.gather,
            interval_s=3.0,
            workers=ThreadPoolExecutor(1),
            events=self.events,
            directory=directory,
            monotonic=lambda: self.now,
        )

    def gather(self) -> KeptTopology:
        if self.fault is not None:
            raise self.fault
        return KeptTopology(topology(self.facts))

    def change(self, **fields: Any) -> None:
        self.facts = msgspec.structs.replace(self.facts, **fields)

    def reserve(self, cpus: str) -> None:
        text = json.dumps({"reservedCPUs": cpus})
        self.change(node=NodeMeta("n1", annotations={"node.koordinator.sh/reservation": text}))

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.latest()]


def with_node(server: Objects) -> None:
    server.put("/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "uid-1"}})


def pool(server: Objects) -> object:
    annotations = server.objects[PATH]["metadata"]["annotations"]
    return [each["cpuset"] for each in json.loads(annotations[POOLS])]


def writes(server: Objects) -> int:
    return len(server.named("POST")) + len(server.named("PATCH"))


def test_the_object_is_created_once_and_then_nothing_is_asked() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        assert await node.keeper.round(client) == 3.0
        stored = server.objects[PATH]
        assert stored["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        assert (stored["kind"], pool(server)) == ("NodeResourceTopology", ["0-1"])
        server.requests.clear()
        for _ in range(20):
            await node.keeper.round(client)
        assert server.requests == []
        node.now += 316  # five minutes, and a twentieth at most
        await node.keeper.round(client)
        assert [method for method, _, _ in server.requests] == ["GET"]

    with_server(test)


def test_a_change_of_the_machine_is_one_patch_with_what_differs() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        await node.keeper.round(client)
        server.requests.clear()
        node.reserve("0")
        await node.keeper.round(client)
        assert pool(server) == ["1"]
        (patch,) = server.named("PATCH")
        assert set(patch) == {"metadata"}
        assert set(patch["metadata"]["annotations"]) == {
            POOLS,
            "node.koordinator.sh/be-cpu-shared-pools",
            "node.koordinator.sh/reservation",
        }

    with_server(test)


def test_what_another_writer_removed_comes_back_and_what_it_added_stays() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        await node.keeper.round(client)
        stored = server.objects[PATH]
        kept = {"annotations": {"example.com/a": "b"}}
        server.put(PATH, {**stored, "metadata": {**stored["metadata"], **kept}})
        node.keeper.look_again()
        await node.keeper.round(client)
        assert pool(server) == ["0-1"]
        assert server.objects[PATH]["metadata"]["annotations"]["example.com/a"] == "b"

    with_server(test)


def test_a_write_by_another_client_in_the_middle_is_not_overwritten() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        await node.keeper.round(client)
        batch: Plain = {"name": "kubernetes.io/batch-cpu", "capacity": "1"}

        def manager() -> None:
            stored = server.objects[PATH]
            (zone,) = stored["zones"]
            server.put(
                PATH, {**stored, "zones": [{**zone, "resources": [*zone["resources"], batch]}]}
            )

        server.before_patch = manager
        node.change(memory={0: NumaMemory(2**31, {})})
        await node.keeper.round(client)
        (zone,) = server.objects[PATH]["zones"]
        by_name = {each["name"]: each for each in zone["resources"]}
        assert by_name["kubernetes.io/batch-cpu"] == batch
        assert by_name["memory"]["capacity"] == "2Gi"

    with_server(test)


def test_without_a_node_nothing_is_created() -> None:
    async def test(server: Objects, client: Client) -> None:
        node = Node()
        await node.keeper.round(client)
        assert PATH not in server.objects
        assert "404" in node.keeper.problem
        with_node(server)
        await node.keeper.round(client)
        assert (PATH in server.objects, node.keeper.problem) == (True, "")

    with_server(test)


def test_what_cannot_be_read_leaves_the_object_and_is_said_once() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        await node.keeper.round(client)
        before = server.objects[PATH]
        node.fault = SourceError("kubelet answered 403")
        for _ in range(3):
            assert await node.keeper.round(client) == 3.0
        assert node.keeper.problem == "kubelet answered 403"
        assert server.objects[PATH] == before
        node.fault = None
        await node.keeper.round(client)
        assert node.kinds() == ["report-failed", "report-back"]

    with_server(test)


def test_a_bad_annotation_is_reported_once() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        node.reserve("zero")
        for _ in range(3):
            await node.keeper.round(client)
            node.keeper.look_again()
        (event,) = node.events.latest()
        assert (event.kind, event.count) == ("bad-object", 1)
        assert pool(server) == ["0-1"]

    with_server(test)


def test_a_server_that_is_away_is_asked_less_and_less() -> None:
    async def test(server: Objects, client: Client) -> None:
        with_node(server)
        node = Node()
        server.refusals = [503] * 8
        pauses = [await node.keeper.round(client) for _ in range(8)]
        assert pauses[7] > pauses[0]
        assert max(pauses) <= 60
        await node.keeper.round(client)
        assert pool(server) == ["0-1"]
        assert writes(server) == 1

    with_server(test)


def test_without_an_api_server_the_object_is_a_file(tmp_path: Path) -> None:
    import asyncio

    node = Node(str(tmp_path))
    asyncio.run(node.keeper.round(None))
    assert node.keeper.writes == 1
    manifest = json.loads((tmp_path / "noderesourcetopology.json").read_text())
    assert manifest["apiVersion"] == "topology.node.k8s.io/v1alpha1"
    assert "ownerReferences" not in manifest["metadata"]
    assert [zone["name"] for zone in manifest["zones"]] == ["node-0"]
