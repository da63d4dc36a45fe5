"""koordlet's reports on a real API server, bindings by them, and the containers' values by these.

The machine is a set of facts; both reports pass the validation of the CRDs.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from apis.cpuset import CpuSet
from apis.decode import decode_object, to_plain
from apis.device import Device
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_QOS_CLASS,
)
from apis.qos import KubeQoS
from apis.topology import parse_node_cpu_facts
from cluster.manager.devices import gpu_labels, gpu_resources, rdma_resources
from hooks.facts import NodeMeta
from hooks.policies import cpuset_allocator, gpu_env, rdma_device
from hooks.subject import Pod, make_pod
from koordlet.measurement.accelerators.nvml import Gpu
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.keeping import Kept
from koordlet.reporters.stored import StoredObject
from koordlet.reporters.topology import Facts, KeptTopology, topology
from koordlet.sources.kubelet_settings import KubeletSettings
from kube.client import Client, encode_object
from kube.resources import DEVICES, NODE_RESOURCE_TOPOLOGIES, NODES, PODS
from linux.cpus import Cpu
from linux.numa_memory import CpuKind, NumaMemory
from linux.pci import Place
from linux.rdma import RdmaFunction
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import read
from tests.cluster.scheduler.beds.on_api_server import make_node, play, pods, scheduler
from tests.cluster.scheduler.configuration.files import chart_file
from tests.cluster.scheduler.with_koordlet.devices import GIB, NOON, Found, bus_of, uuid_of
from tests.hooks.making import a_container, decide, node, values

pytestmark = pytest.mark.apiserver

NAME = "both-n1"
RESERVATION = {ANNOTATION_NODE_RESERVATION: '{"resources":{"cpu":"2"}}'}
CPUS = tuple(
    Cpu(cpu=core + 8 * thread, core=core, socket=core // 4, node=core // 4, l3=core // 4)
    for core in range(8)
    for thread in range(2)
)
FUNCTIONS = ("0000:80:01.0", "0000:80:01.1")
DEVICES_FOUND = Found(
    gpus=tuple(
        Gpu(uuid_of(n), n, "NVIDIA H100 80GB HBM3", 80 * GIB, bus_of(n), code, code)
        for n, code in enumerate(["", "Xid79", "", ""])
    ),
    rdma=(RdmaFunction("0000:80:00.0", "mlx5_0", 0, True, Place(1, "pci0000:01"), FUNCTIONS),),
    places={bus_of(n): Place(n // 2, f"pci0000:{n // 2:02x}") for n in range(4)},
)


class Koordlet:
    """koordlet's reporters of one node, over the API server."""

    def __init__(self, client: Client, node_uid: str) -> None:
        self._client = client
        self._node_uid = node_uid
        self._topology = StoredObject(NODE_RESOURCE_TOPOLOGIES, NAME)
        self._device = StoredObject(DEVICES, NAME)
        self.running: tuple[Pod, ...] = ()

    async def report(self) -> bool:
        """Write both objects; return whether one of them had to be written."""
        wanted = topology(
            Facts(
                cpus=CPUS,
                memory={n: NumaMemory(32 * GIB, {"2Mi": 0, "1Gi": 0}) for n in (0, 1)},
                kind=CpuKind("Xeon", "GenuineIntel", True, False, "fff"),
                kubelet=KubeletSettings("static", {}, CpuSet.parse("7")),
                exclusive={"theirs": CpuSet.parse("6,14")},
                pods=self.running,
                node=NodeMeta(NAME, annotations=RESERVATION),
            )
        )
        first = await self._write(self._topology, KeptTopology(wanted))
        second = await self._write(self._device, KeptDevice(DEVICES_FOUND.content(), NOON))
        return first or second

    async def _write(self, stored: StoredObject, kept: Kept) -> bool:
        return await stored.write(
            self._client, lambda known: kept.merge(known or kept.create(NAME, self._node_uid))
        )

    def start(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Let a bound pod run; return what its container gets."""
        meta = pod["metadata"]
        here = make_pod(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            labels=meta.get("labels", {}),
            annotations=meta.get("annotations", {}),
            kube_qos=KubeQoS.GUARANTEED,
            phase="Running",
        )
        self.running = (*self.running, here)
        decision = decide(
            a_container(here),
            node(kernel=DEVICES_FOUND.kernel()),
            cpuset_allocator.POLICY,
            gpu_env.POLICY,
            rdma_device.POLICY,
        )
        assert not decision.faults, decision.faults
        return values(decision)


async def _offer(client: Client) -> None:
    """Do the manager's part: what healthy devices amount to becomes allocatable."""
    device = decode_object(await read(client, DEVICES, NAME), Device, obj=NAME)
    amounts = to_plain({**gpu_resources(device, share_counts=False), **rdma_resources(device)})
    status = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
    await client.patch(NODES, NAME, status, subresource="status")
    labels = msgspec.json.encode({"metadata": {"labels": gpu_labels(device)}})
    await client.patch(NODES, NAME, labels)


async def _bound(client: Client, name: str, amounts: dict[str, str], **metadata: Any) -> Any:
    """Create a pod and wait until it is bound; return it."""
    container = {
        "name": "main",
        "image": "x",
        "resources": {"requests": amounts, "limits": amounts},
    }
    body = {
        "metadata": {"name": name, **metadata},
        "spec": {
            "schedulerName": "koord-scheduler",
            "automountServiceAccountToken": False,
            "containers": [container],
        },
    }
    await client.create(PODS, encode_object(PODS, body), namespace="default")

    async def bound() -> dict[str, Any] | None:
        for pod in await pods(client):
            if pod["metadata"]["name"] == name and pod["spec"].get("nodeName"):
                return pod
        return None

    return await eventually(bound, seconds=60)


async def _reports_bindings_and_containers_agree(server: ApiServer, client: Client) -> None:
    await make_node(client, NAME, cpu=16, annotations=RESERVATION)
    uid = (await read(client, NODES, NAME))["metadata"]["uid"]
    koordlet = Koordlet(client, uid)
    assert await koordlet.report()
    assert not await koordlet.report(), "an unchanged machine is written once"
    await _offer(client)
    configuration = chart_file() | {"leaderElection": {"leaderElect": False}}
    # Kubelet's CPU 7, its pod's 6 and 14, and two for the reservation: the first core.
    kept = CpuSet.parse("0,6-8,14")
    lsr = {"labels": {LABEL_QOS_CLASS: "LSR"}}
    async with scheduler(server.connection(), json.dumps(configuration)):
        owned: list[CpuSet] = []
        for number in range(3):
            amounts = {"cpu": "2", "memory": "1Gi"}
            pod = await _bound(client, f"lsr-{number}", amounts, **lsr)
            recorded = json.loads(pod["metadata"]["annotations"][ANNOTATION_RESOURCE_STATUS])
            cpus = koordlet.start(pod)["cpuset.cpus"]
            assert str(cpus) == recorded["cpuset"]
            assert len(cpus) == 2 and not cpus & kept
            assert not any(cpus & other for other in owned)
            owned.append(cpus)
            assert await koordlet.report()
        stored = await read(client, NODE_RESOURCE_TOPOLOGIES, NAME)
        facts = parse_node_cpu_facts(stored["metadata"]["annotations"], obj=NAME)
        pools = CpuSet.union(pool.cpus for pool in facts.shared_pools)
        everything = CpuSet(cpu.cpu for cpu in CPUS)
        assert pools == everything - CpuSet.parse("0,6,8,14") - CpuSet.union(owned)

        two = {"koordinator.sh/gpu": "200", "koordinator.sh/rdma": "1", "cpu": "1"}
        hint = {"scheduling.koordinator.sh/device-allocate-hint": '{"rdma":{"vfSelector":{}}}'}
        given = koordlet.start(await _bound(client, "gpus", two, annotations=hint))
        # GPU 1 is broken; 2 and 3 are linked.
        assert given["env:NVIDIA_VISIBLE_DEVICES"] == f"{uuid_of(2)},{uuid_of(3)}"
        assert DEVICES_FOUND.kernel().rdma[FUNCTIONS[0]] in given.values()
        one = {"koordinator.sh/gpu": "100", "cpu": "1"}
        given = koordlet.start(await _bound(client, "gpu", one))
        assert given["env:NVIDIA_VISIBLE_DEVICES"] == uuid_of(0)


def test_reports_bindings_and_containers_agree(server: ApiServer) -> None:
    play(server, _reports_bindings_and_containers_agree)
