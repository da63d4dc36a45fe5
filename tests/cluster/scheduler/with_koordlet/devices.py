"""One node with devices and three programs.

koordlet reports the devices, the manager offers what koordlet reported, the scheduler binds pods,
and koordlet puts into force what the scheduler wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import yaml
from hypothesis import strategies as st

from apis.decode import decode_object, to_plain
from apis.device import Device
from apis.keys import NVIDIA_GPU
from cluster.manager.devices import gpu_labels, gpu_resources, rdma_resources
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.exact.devices.templates import DATA_KEY, parse_templates
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.sources.bookings import booking_of
from cluster.scheduler.tables.devices.node import NodeDevices
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from hooks.facts import KernelFacts
from hooks.policies import gpu_env, rdma_device
from koordlet.measurement.accelerators.nvml import Answer, Gpu, GpuUsage
from koordlet.measurement.accelerators.xpu import Xpu, parse_xpus
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.device_spec import device_content
from linux.pci import Place
from linux.rdma import RdmaFunction
from linux.resources import DeviceNode
from tests.cluster.scheduler.configuration.files import chart_file, load
from tests.cluster.scheduler.making import make_node, make_pod
from tests.hooks.making import a_container, a_pod, decide, node, values

NAME = "n1"
GIB = 1 << 30
NOON = "2026-01-01T12:00:00Z"


@dataclass(frozen=True, slots=True)
class Found:
    """What koordlet finds: GPUs by NVML or accelerators by files, and RDMA functions."""

    gpus: tuple[Gpu, ...] = ()
    xpus: tuple[Xpu, ...] = ()
    rdma: tuple[RdmaFunction, ...] = ()
    places: Mapping[str, Place] = msgspec.field(default_factory=dict)

    def content(self) -> Any:
        answer = Answer("570.86.10", tuple(GpuUsage(gpu, ()) for gpu in self.gpus), ())
        return device_content(answer if self.gpus else None, self.xpus, self.rdma, self.places)

    def kernel(self) -> KernelFacts:
        """Return the device nodes of these devices."""
        addresses = [address for nic in self.rdma for address in (nic.address, *nic.virtual)]
        return KernelFacts(
            gpus={gpu.minor: _node(f"nvidia{gpu.minor}", gpu.minor) for gpu in self.gpus},
            gpu_control=(_node("nvidiactl", 255),),
            rdma={
                address: _node(f"infiniband/uverbs{number}", number)
                for number, address in enumerate(addresses)
            },
            rdma_cm=_node("infiniband/rdma_cm", 254),
        )


def _node(name: str, minor: int) -> DeviceNode:
    return DeviceNode(f"/dev/{name}", "c", 195, minor, 0o666)


def uuid_of(minor: int) -> str:
    return f"GPU-0000000{minor}-aaaa-bbbb-cccc-dddddddddddd"


def bus_of(minor: int) -> str:
    return f"0000:{16 + minor:02x}:00.0"


@st.composite
def gpu_machines(draw: st.DrawFn) -> Found:
    """Up to eight GPUs on up to two NUMA nodes, two to a PCIe root; some broken, some of them lost
    from the bus; with up to two RDMA functions beside them."""
    count = draw(st.integers(1, 8))
    name = draw(st.sampled_from(["NVIDIA A10", "NVIDIA H100 80GB HBM3", "NVIDIA H800"]))
    gpus = []
    places = {}
    for minor in range(count):
        state = draw(st.sampled_from(["sound"] * 5 + ["broken", "lost"]))
        code = {"sound": "", "broken": "Xid79", "lost": "Unknown"}[state]
        memory = 0 if state == "lost" else 80 * GIB - 12345
        gpus.append(Gpu(uuid_of(minor), minor, name, memory, bus_of(minor), code, code))
        places[bus_of(minor)] = Place(minor // 4, f"pci0000:{minor // 2:02x}")
    if draw(st.booleans()) and count == 1:
        places = {}  # a virtual machine that shows no root complex
    return Found(tuple(gpus), (), draw(rdma_functions()), places)


@st.composite
def rdma_functions(draw: st.DrawFn) -> tuple[RdmaFunction, ...]:
    return tuple(
        RdmaFunction(
            address=f"0000:{0x80 + number:02x}:00.0",
            name=f"mlx5_{number}",
            minor=number,
            active=draw(st.sampled_from([True, True, True, False])),
            place=Place(number, f"pci0000:{2 * number:02x}"),
            virtual=tuple(
                f"0000:{0x80 + number:02x}:01.{one}" for one in range(draw(st.integers(0, 3)))
            ),
        )
        for number in range(draw(st.integers(0, 2)))
    )


@st.composite
def npu_machines(draw: st.DrawFn) -> Found:
    """Accelerators that a file describes, in pairs that are linked; in the words of the file."""
    count = draw(st.integers(1, 4))
    honored = draw(st.booleans())
    elements = []
    for minor in range(count):
        links = [{"peerMinor": "", "type": "HCCS"}]
        if minor ^ 1 < count:
            links.append({"peerMinor": str(minor ^ 1), "type": "HCCS"})
        element: dict[str, Any] = {
            "vendor": "huawei",
            "model": "Ascend-910B3",
            "uuid": f"185011D4-{minor}",
            "minor": str(minor),
            "resources": {
                "huawei.com/npu-core": 20,
                "huawei.com/npu-cpu": 7,
                "gpu-memory": "64Gi",
            },
            "topology": {
                "p2pLinks": links,
                "mustHonorPartition": honored,
                "nodeID": draw(st.sampled_from(["", "0"])),
                "pcieID": f"pci0000:{minor:02x}",
                "busID": bus_of(minor),
            },
        }
        if draw(st.booleans()):
            healthy = draw(st.booleans())
            element["status"] = {"healthy": healthy, "errCode": "" if healthy else "E1"}
        elements.append(element)
    problems: list[str] = []
    xpus = parse_xpus(json.dumps(elements).encode(), "ic-device", problems)
    assert not problems
    return Found((), tuple(xpus))


class BothSides:
    """stored: the Device as the API server has it. held: what is allocated, by pod."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.stored: dict[str, Any] = {}
        self.annotations: dict[str, dict[str, str]] = {}
        self.tables = Tables()
        self._plugins = make_plugins(load(chart_file()), self.tables)
        with open("deploy/scheduler/25-gpu-templates.yaml", encoding="utf-8") as file:
            data = yaml.safe_load(file)["data"][DATA_KEY]
        text = json.dumps(yaml.safe_load(data))
        self._plugins.devices.set_templates(parse_templates(text, obj="templates"))
        self._profile = next(iter(self._plugins.profiles))
        self._scheduling = Scheduling(self.tables, self._plugins.profiles, seed=1)
        self._shapes = Shapes()
        self._pods: dict[str, Any] = {}
        self.report(found)

    # --- koordlet reports, the manager offers, the scheduler reads -------------------------------

    def report(self, found: Found) -> None:
        """Let koordlet report a machine, and everybody read it."""
        self.found = found
        kept = KeptDevice(found.content(), NOON)
        device = kept.merge(self.stored or kept.create(NAME, "uid-1"))
        self.stored = json.loads(json.dumps(device))
        self.device = decode_object(self.stored, Device, obj=f"Device {NAME}")
        offered = {
            **gpu_resources(self.device, share_counts=True),
            **rdma_resources(self.device),
        }
        amounts: dict[str, str] = to_plain(offered)
        # kubelet's device plugin counts healthy GPUs too.
        amounts[NVIDIA_GPU] = str(sum(gpu.healthy for gpu in found.gpus))
        self.tables.upsert_node(
            make_node(NAME, labels=gpu_labels(self.device), allocatable=amounts)
        )
        errors = self._plugins.devices.set_device(self.device)
        assert not errors, errors

    @property
    def view(self) -> NodeDevices:
        """The devices as the scheduler knows them."""
        return _view(self._plugins.devices, self.tables)

    # --- the scheduler writes, koordlet puts into force ------------------------------------------

    def schedule(
        self, name: str, requests: Mapping[str, str], annotations: Mapping[str, str]
    ) -> bool:
        """Bind a pod if the node takes it; koordlet sees its annotations."""
        pod = make_pod(name, requests=dict(requests), annotations=dict(annotations))
        result = self._scheduling.schedule(
            key=f"default/{name}",
            uid=pod.metadata.uid,
            shape=self._shapes.of(pod),
            profile=self._profile,
            now=0.0,
        )
        if not isinstance(result, Placed):
            return False
        written = {k: v for k, v in result.recorded.annotations.items() if v is not None}
        self.annotations[name] = {**annotations, **written}
        self._pods[name] = make_pod(
            name, requests=dict(requests), annotations=self.annotations[name], node=NAME
        )
        return True

    def in_force(self, name: str) -> dict[str, Any]:
        """Return what koordlet gives a container of the pod, by resource and key."""
        pod = a_pod("LS", name=name, annotations=self.annotations[name])
        inputs = node(kernel=self.found.kernel())
        decision = decide(a_container(pod), inputs, gpu_env.POLICY, rdma_device.POLICY)
        assert not decision.faults, decision.faults
        return values(decision)

    def restarted(self) -> NodeDevices:
        """Return the devices as a new scheduler knows them, from the objects alone."""
        tables = Tables()
        table = DeviceTable(tables.nodes)
        tables.add_part(table)
        tables.upsert_node(make_node(NAME, labels=gpu_labels(self.device)))
        table.set_device(self.device)
        for pod in self._pods.values():
            read = booking_of(pod, self._shapes.of(pod))
            assert not read.problems, read.problems
            tables.place(read.booking)
        return _view(table, tables)


def _view(table: DeviceTable, tables: Tables) -> NodeDevices:
    row = tables.nodes.row(NAME)
    assert row is not None
    view = table.view(row)
    assert view is not None
    return view
