"""From a node's load to its batch resources: koordlet's reports on a real API server, and the
manager that reads them. koordlet has the rights of its manifest and no others."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apis.cpuset import CpuSet
from apis.quantity import parse_quantity
from hooks.facts import NodeMeta
from hooks.subject import Pod
from koordlet.daemon.reports.predicting import Predicting
from koordlet.daemon.reports.reporting import Reporting
from koordlet.manifests import files
from koordlet.measurement.accelerators.xpu import PeerLink, Xpu, XpuStatus, XpuTopology
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategy import NodeAmounts
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.device_spec import DeviceContent, device_content
from koordlet.reporters.keeping import Keeper
from koordlet.reporters.topology import Facts, KeptTopology, topology
from koordlet.sources.kubelet_settings import KubeletSettings
from kube.client import ApiError, Client, encode_object
from kube.resources import DEVICES, NODE_METRICS, NODE_RESOURCE_TOPOLOGIES, NODES
from linux.cpus import Cpu
from linux.numa_memory import CpuKind, NumaMemory
from linux.pci import Place
from linux.rdma import RdmaFunction
from service.events import Events
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import NAMESPACE, grant, manager, read, set_config
from tests.koordlet.configured import configured
from tests.koordlet.measured import Measured
from tests.koordlet.prediction.pods import GIB, pod
from tests.koordlet.reporters.test_whole_objects import (
    whole_device,
    whole_node_metric,
    whole_topology,
)

pytestmark = pytest.mark.apiserver

NAME, OTHER, WHOLE = "n1", "n2", "n3"
BATCH_CPU = "kubernetes.io/batch-cpu"
MID_CPU = "kubernetes.io/mid-cpu"


class Node:
    """A node of 16 CPUs and 64 GiB whose load a test sets."""

    def __init__(self, folder: Path, name: str = NAME) -> None:
        self.measured = Measured(now=time.monotonic())
        self.pods: list[tuple[Pod, bool]] = []
        self.facts = Facts(
            cpus=tuple(
                Cpu(cpu=cpu, core=cpu // 2, socket=cpu // 8, node=cpu // 8, l3=cpu // 8)
                for cpu in range(16)
            ),
            memory={number: NumaMemory(32 * GIB, {"2Mi": 0, "1Gi": 0}) for number in range(2)},
            kind=CpuKind("A CPU", "GenuineIntel", True, True, "fff"),
            kubelet=KubeletSettings("static", {"full-pcpus-only": "true"}, CpuSet([0, 1])),
            exclusive={},
            pods=(),
            node=NodeMeta(NAME),
        )
        self.devices: KeptDevice | None = None
        config = configured(nodeName=name, runDir=str(folder), kubernetes={"enabled": True})
        events, workers = Events(), ThreadPoolExecutor(1)
        self.predicting = Predicting(
            config,
            measurements=lambda: self.measured,
            pods=lambda: self.pods,
            host_apps=lambda: (),
            node=lambda: None,
            node_amounts=lambda: NodeAmounts(16_000, 64 * GIB),
            events=events,
            workers=workers,
        )
        self.reporting = Reporting(
            config,
            measurements=lambda: self.measured,
            pods=lambda: self.pods,
            host_apps=lambda: (),
            gpus=dict,
            gate=lambda _: False,
            keep=lambda _: None,
            topology=lambda: KeptTopology(topology(self.facts)),
            devices=lambda: self.devices,
            predicting=self.predicting,
            events=events,
            workers=workers,
        )

    def load(self, cpu: float, memory: float, *, system: float = 0.5) -> None:
        for metric, value in (
            (Metric.NODE_CPU, cpu),
            (Metric.NODE_MEMORY, memory),
            (Metric.SYSTEM_CPU, system),
            (Metric.SYSTEM_MEMORY, float(GIB)),
        ):
            self.measured.constant(Series(metric), value)

    def use(self, uid: str, cpu: float, memory: float) -> None:
        self.measured.constant(Series(Metric.POD_CPU, uid), cpu)
        self.measured.constant(Series(Metric.POD_MEMORY, uid), memory)

    async def report(self, client: Client) -> None:
        await self.reporting.node_metric.round(client)
        assert self.reporting.node_metric.problem == ""


async def prepare(client: Client, name: str = NAME) -> None:
    """A node of a cluster with co-location, and koordlet's rights."""
    try:
        await grant(client, "koordlet", *files(NAMESPACE)["rbac.yaml"])
    except ApiError as error:
        if not error.already_exists:  # made by another test on this server
            raise
    await client.create(NODES, encode_object(NODES, {"metadata": {"name": name}}))
    amounts = {"cpu": "16", "memory": "64Gi", "pods": "110"}
    patch = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
    await client.patch(NODES, name, patch, subresource="status")
    await set_config(client, {"colocation-config": json.dumps({"enable": True})})


def test_load_becomes_batch_and_mid_resources_and_topology_is_kept(
    server: ApiServer, tmp_path: Path
) -> None:
    async def allocatable(client: Client) -> dict[str, str]:
        node = await read(client, NODES, NAME)
        amounts: dict[str, str] = node["status"]["allocatable"]
        return amounts

    async def scenario() -> None:
        node = Node(tmp_path)
        async with (
            server.client() as admin,
            server.client("koordlet") as koordlet,
            manager(server),
        ):
            await prepare(admin)
            await eventually(lambda: read(admin, NODE_METRICS, NAME))
            node.load(2.5, 5 * GIB)

            # 16000 - 40 % - system 500 - no pods = 9100
            await eventually(lambda: _may_report(koordlet), seconds=20)
            await node.report(koordlet)
            await eventually(lambda: _offers(allocatable(admin), BATCH_CPU, "9100"), seconds=30)

            # A prod pod that is old and trained: batch goes down, mid appears.
            node.pods = [(pod("p1", cpu_milli=8000, memory_bytes=16 * GIB), False)]
            node.use("p1", 2.0, 4 * GIB)
            node.load(4.5, 9 * GIB)
            for _ in range(800):
                node.predicting.train()
            await node.report(koordlet)
            metric = await read(admin, NODE_METRICS, NAME)
            status: dict[str, Any] = metric["status"]
            assert [each["name"] for each in status["podsMetric"]] == ["p1"]
            reclaimable = status["prodReclaimableMetric"]["resource"]["resources"]
            assert 0 < int(reclaimable["cpu"].removesuffix("m")) <= 5799
            # The pod is not an object of this cluster: its reported use counts.
            await eventually(lambda: _offers(allocatable(admin), BATCH_CPU, "7100"), seconds=30)
            await eventually(
                lambda: _offers(allocatable(admin), MID_CPU, reclaimable["cpu"][:-1]), seconds=30
            )

            keeper, _ = node.reporting.keepers
            await keeper.round(koordlet)
            assert keeper.problem == ""
            stored = await read(admin, NODE_RESOURCE_TOPOLOGIES, NAME)
            (owner,) = stored["metadata"]["ownerReferences"]
            assert owner["uid"] == (await read(admin, NODES, NAME))["metadata"]["uid"]
            assert stored["topologyPolicies"] == ["None"]
            # The manager adds batch resources to the zones, and koordlet leaves them there.
            await eventually(lambda: _zones_offer_batch(admin), seconds=30)
            keeper.look_again()
            await keeper.round(koordlet)
            node.facts = msgspec.structs.replace(node.facts, huge_pages=True)
            node.facts = msgspec.structs.replace(
                node.facts, memory={n: NumaMemory(32 * GIB, {"2Mi": GIB}) for n in range(2)}
            )
            await keeper.round(koordlet)
            assert (keeper.problem, keeper.writes) == ("", 2)
            assert await _zones_offer_batch(admin)
            stored = await read(admin, NODE_RESOURCE_TOPOLOGIES, NAME)
            amounts = {each["name"]: each for each in stored["zones"][1]["resources"]}
            assert (amounts["memory"]["capacity"], amounts["hugepages-2Mi"]["capacity"]) == (
                "31Gi",
                "1Gi",
            )

    asyncio.run(asyncio.wait_for(scenario(), 200))


def devices(*codes: str) -> KeptDevice:
    """Accelerators of a file with these error codes, linked; and an RDMA function."""
    xpus = [
        Xpu(
            "huawei", "Ascend 910B", f"npu-{minor}", minor, {"gpu-memory": parse_quantity("64Gi")},
            XpuTopology(1, "pci0000:3a", f"0000:3{minor}:00.0", (PeerLink((0, 1), "HCCS"),)),
            XpuStatus(not code, code, ""),
        )
        for minor, code in enumerate(codes)
    ]  # fmt: skip
    function = RdmaFunction(
        "0000:4b:00.0", "mlx5_0", 0, True, Place(0, "pci0000:4a"), ("0000:4b:00.2",)
    )
    return KeptDevice(device_content(None, xpus, [function], {}), "2026-01-01T12:00:00Z")


def test_the_device_object_is_made_kept_and_not_written_without_a_change(
    server: ApiServer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        node = Node(tmp_path, OTHER)
        async with server.client() as admin, server.client("koordlet") as koordlet:
            await prepare(admin, OTHER)
            _, keeper = node.reporting.keepers
            node.devices = KeptDevice(DeviceContent((), {}, {}), "")
            await eventually(lambda: _may_create_devices(koordlet, keeper), seconds=20)
            assert (keeper.problem, keeper.writes) == ("", 0)
            node.devices = devices("", "0x12-odd")
            for _ in range(3):
                keeper.look_again()
                await keeper.round(koordlet)
                assert (keeper.problem, keeper.writes) == ("", 1)
            stored = await read(admin, DEVICES, OTHER)
            (owner,) = stored["metadata"]["ownerReferences"]
            assert owner["uid"] == (await read(admin, NODES, OTHER))["metadata"]["uid"]
            kinds = [(each["type"], each["minor"]) for each in stored["spec"]["devices"]]
            assert kinds == [("gpu", 0), ("gpu", 1), ("rdma", 0)]
            (condition,) = stored["spec"]["devices"][1]["conditions"]
            assert (condition["status"], condition["reason"]) == ("False", "Unknown")
            node.devices = devices("", "")
            await keeper.round(koordlet)
            assert (keeper.problem, keeper.writes) == ("", 2)

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_the_server_keeps_every_field_of_the_reports(server: ApiServer) -> None:
    """The CustomResourceDefinitions have all of them: a server drops what it does not know."""

    async def scenario() -> None:
        async with server.client() as admin:
            body = encode_object(NODE_METRICS, {"metadata": {"name": WHOLE}})
            await admin.create(NODE_METRICS, body)
            status = whole_node_metric()
            patch = msgspec.json.encode({"status": status})
            await admin.patch(NODE_METRICS, WHOLE, patch, subresource="status")
            assert (await read(admin, NODE_METRICS, WHOLE))["status"] == status
            for resource, made in (
                (NODE_RESOURCE_TOPOLOGIES, whole_topology()),
                (DEVICES, whole_device()),
            ):
                wanted = {**made, "metadata": {**made["metadata"], "name": WHOLE}}
                await admin.create(resource, encode_object(resource, wanted))
                stored = await read(admin, resource, WHOLE)
                for own in ("creationTimestamp", "generation", "resourceVersion", "uid"):
                    del stored["metadata"][own]
                stored["metadata"].pop("managedFields", None)
                assert {name: stored[name] for name in wanted} == wanted

    asyncio.run(asyncio.wait_for(scenario(), 100))


async def _may_report(client: Client) -> bool:
    """The authorizer knows a role a little after it was stored."""
    try:
        return await read(client, NODE_METRICS, NAME) is not None
    except Exception:  # noqa: BLE001 - asked again
        return False


async def _may_create_devices(client: Client, keeper: Keeper) -> bool:
    await keeper.round(client)
    return not keeper.problem


async def _offers(amounts: Any, resource: str, expected: str) -> bool:
    """Return whether the Node has that amount, in whatever notation."""
    found = (await amounts).get(resource)
    return found is not None and parse_quantity(found) == parse_quantity(expected)


async def _zones_offer_batch(client: Client) -> bool:
    stored = await read(client, NODE_RESOURCE_TOPOLOGIES, NAME)
    return all(
        any(each["name"] == BATCH_CPU for each in zone["resources"]) for zone in stored["zones"]
    )
