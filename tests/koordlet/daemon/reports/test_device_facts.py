"""What the Device object is made from: gates, files, GPUs that do not answer, RDMA."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from koordlet.configuration.config import Config, Reports
from koordlet.daemon.reports.device_facts import DeviceFacts
from koordlet.measurement.accelerators.nvml import Answer, Gpu, GpuUsage
from tests.simulated import DEBIAN_12_V2, SimulatedKernel
from tests.simulated.devices import put_rdma_function
from tests.simulated.vfs import text

DIRECTORY = "/var/run/koordlet/xpu-device-infos"
ANSWER = Answer("570", (GpuUsage(Gpu("GPU-0", 0, "A10", 1, "0000:3b:00.0"), ()),), ())


@dataclass
class Node:
    gates: set[str] = field(default_factory=lambda: {"Accelerators", "RDMADevices"})
    answer: Answer | None = None
    now: float = 0.0
    files_only: bool = False

    def __post_init__(self) -> None:
        self.kernel = SimulatedKernel(DEBIAN_12_V2)
        put_rdma_function(self.kernel, "0000:3b:00.0", "mlx5_0")
        self.facts = DeviceFacts(
            Config(reports=Reports(accelerators_from_files_only=self.files_only)),
            self.kernel,
            gpus=lambda: self.answer,
            gate=lambda name: name in self.gates,
            monotonic=lambda: self.now,
        )

    def load_driver(self) -> None:
        self.kernel.add_device("/dev/nvidiactl", "c", 195, 255)

    def put_file(self, name: str, *devices: dict[str, Any]) -> None:
        self.kernel.root.put(f"{DIRECTORY}/{name}", text(json.dumps(devices)))

    def ids(self) -> list[str]:
        kept = self.facts.gather()
        assert kept is not None
        return [device.id for device in kept.wanted.devices]


@pytest.mark.parametrize(
    ("gates", "ids"),
    [
        ({"Accelerators", "RDMADevices"}, ["GPU-0", "0000:3b:00.0"]),
        ({"Accelerators"}, ["GPU-0"]),
        ({"RDMADevices"}, ["0000:3b:00.0"]),
    ],
)
def test_each_gate_stands_alone(gates: set[str], ids: list[str]) -> None:
    node = Node(gates, ANSWER)
    node.load_driver()
    assert node.ids() == ids


def test_without_gates_nothing_is_reported() -> None:
    assert Node(set(), ANSWER).facts.gather() is None


def test_a_driver_that_does_not_answer_leaves_the_object_as_it_is() -> None:
    node = Node()
    node.load_driver()
    assert node.facts.gather() is None
    node.answer = ANSWER
    assert "GPU-0" in node.ids()


def test_without_a_driver_there_are_no_gpus() -> None:
    assert Node().ids() == ["0000:3b:00.0"]


def test_files_come_before_nvml_and_may_be_the_only_source() -> None:
    node = Node({"Accelerators"}, ANSWER)
    node.put_file("npu", {"uuid": "npu-0", "minor": "0"}, {"uuid": "", "minor": "1"})
    assert node.ids() == ["npu-0"]
    kept = node.facts.gather()
    assert kept is not None and "device 1" in kept.problems[0]
    only = Node({"Accelerators"}, ANSWER, files_only=True)
    only.load_driver()
    assert only.ids() == []


def test_an_unchanged_machine_gives_an_equal_value() -> None:
    node = Node({"Accelerators"}, ANSWER)
    first = node.facts.gather()
    assert node.facts.gather() is first


def test_rdma_is_read_again_after_ten_seconds() -> None:
    node = Node({"RDMADevices"})
    assert node.ids() == ["0000:3b:00.0"]
    put_rdma_function(node.kernel, "0000:3c:00.0", "mlx5_1")
    node.now = 9.0
    assert node.ids() == ["0000:3b:00.0"]
    node.now = 10.0
    assert node.ids() == ["0000:3b:00.0", "0000:3c:00.0"]
