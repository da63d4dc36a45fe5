"""The Device object's content, field by field as upstream's table has it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis import keys
from apis.decode import encode
from apis.quantity import parse_quantity
from koordlet.measurement.accelerators.nvml import Answer, Gpu, GpuUsage
from koordlet.measurement.accelerators.xpu import PeerLink, Xpu, XpuStatus, XpuTopology
from koordlet.reporters.device_spec import device_content
from linux.pci import Place
from linux.rdma import RdmaFunction

PLACES = {"0000:3b:00.0": Place(1, "pci0000:3a")}


def gpu(minor: int = 0, **changes: Any) -> Gpu:
    made = Gpu(f"GPU-{minor}", minor, "NVIDIA H100 80GB HBM3", 80 << 30, "0000:3b:00.0")
    return made._replace(**changes)


def answer(*gpus: Gpu) -> Answer:
    return Answer("570.86.10", tuple(GpuUsage(one, ()) for one in gpus), ())


def plain(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
    content = device_content(*arguments, **options)
    devices: list[dict[str, Any]] = json.loads(encode(content.devices))
    return devices


GPU_PLAIN = {
    "type": "gpu", "id": "GPU-0", "minor": 0, "health": True,
    "resources": {
        "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "80Gi",
        "koordinator.sh/gpu-memory-ratio": "100",
    },
    "topology": {"socketID": -1, "nodeID": 1, "pcieID": "pci0000:3a", "busID": "0000:3b:00.0"},
}  # fmt: skip


def test_a_gpu() -> None:
    assert plain(answer(gpu()), (), (), PLACES) == [GPU_PLAIN]


def test_a_gpu_without_a_root_has_no_topology() -> None:
    (device,) = plain(answer(gpu()), (), (), {})
    assert "topology" not in device


def test_an_unhealthy_gpu_has_a_condition() -> None:
    sick = gpu(error_code="Xid79", error="critical error 79")
    (device,) = plain(answer(sick), (), (), PLACES)
    assert device["health"] is False
    assert device["conditions"] == [
        {"type": "Healthy", "status": "False", "reason": "Xid79", "message": "critical error 79"}
    ]


@pytest.mark.parametrize(
    ("names", "model"),
    [
        (("NVIDIA H100 80GB HBM3",) * 2, "H100-80GB-HBM3"),
        (("Tesla T4",), "Tesla-T4"),
        (("NVIDIA A10", "NVIDIA A100"), None),
        (("",), None),
        (("odd(name)",), None),
    ],
)
def test_gpu_labels(names: tuple[str, ...], model: str | None) -> None:
    gpus = [gpu(minor, name=name) for minor, name in enumerate(names)]
    labels = device_content(answer(*gpus), (), (), PLACES).labels
    assert labels.get(keys.LABEL_GPU_MODEL) == model
    assert labels[keys.LABEL_GPU_VENDOR] == "nvidia"
    assert labels[keys.LABEL_GPU_DRIVER_VERSION] == "570.86.10"


def xpu(minor: int = 0, **changes: Any) -> Xpu:
    return Xpu("huawei", "Ascend-910B", f"u-{minor}", minor, {})._replace(**changes)


def test_an_accelerator_of_a_file() -> None:
    resources = {name: parse_quantity(5) for name in ("gpu-memory", "gpu-core", "npu", "a.b/c")}
    at = XpuTopology(-1, "pci0000:3a", "0000:3b:00.0")
    sick = XpuStatus(False, "E100", "fan")
    (device,) = plain(None, [xpu(resources=resources, topology=at, status=sick)], (), {})
    assert device == {
        "type": "gpu", "id": "u-0", "minor": 0, "health": False,
        "resources": {
            "koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu-memory": "5",
            "koordinator.sh/gpu-core": "5", "npu": "5", "a.b/c": "5",
        },
        "topology": {"socketID": -1, "nodeID": -1, "pcieID": "pci0000:3a", "busID": "0000:3b:00.0"},
        "conditions": [
            {"type": "Healthy", "status": "False", "reason": "E100", "message": "fan"}
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (XpuStatus(True, "", ""), "DeviceHealthy", "device is healthy"),
        (XpuStatus(False, "", ""), "Unknown", "device is unhealthy"),
        (XpuStatus(False, "0x12-3", "fan"), "Unknown", "fan (code 0x12-3)"),
    ],
)
def test_conditions_are_such_as_the_api_server_takes(
    status: XpuStatus, reason: str, message: str
) -> None:
    (device,) = plain(None, [xpu(status=status)], (), {})
    (condition,) = device["conditions"]
    assert (condition["reason"], condition["message"]) == (reason, message)


def linked(*pairs: tuple[int, tuple[int, ...]], honor: bool = False) -> list[Xpu]:
    return [
        xpu(minor, topology=XpuTopology(0, "p", "b", (PeerLink(peers, "HCCS"),), honor))
        for minor, peers in pairs
    ]


def test_linked_devices_form_partitions_once_each() -> None:
    content = device_content(None, linked((0, (1,)), (1, (0,)), (2, (0, 1))), (), {})
    assert json.loads(content.annotations[keys.ANNOTATION_GPU_PARTITIONS]) == {
        "2": [{"minors": [0, 1], "gpuLinkType": "HCCS", "allocationScore": 1}],
        "3": [{"minors": [0, 1, 2], "gpuLinkType": "HCCS", "allocationScore": 1}],
    }
    assert content.labels[keys.LABEL_GPU_PARTITION_POLICY] == "Prefer"
    honored = device_content(None, linked((0, (1,)), honor=True), (), {})
    assert honored.labels[keys.LABEL_GPU_PARTITION_POLICY] == "Honor"
    assert device_content(None, [xpu()], (), {}).annotations == {}


def test_an_rdma_function() -> None:
    function = RdmaFunction(
        "0000:3b:00.0", "mlx5_2", 2, True, PLACES["0000:3b:00.0"], ("0000:3b:01.2", "0000:3b:00.3")
    )
    assert plain(None, (), [function], {}) == [
        {
            "type": "rdma", "id": "0000:3b:00.0", "minor": 2, "health": True,
            "resources": {"koordinator.sh/rdma": "100"},
            "topology": {
                "socketID": -1, "nodeID": 1, "pcieID": "pci0000:3a", "busID": "0000:3b:00.0"
            },
            "vfGroups": [
                {"vfs": [{"minor": -1, "busID": "0000:3b:00.3"},
                         {"minor": -1, "busID": "0000:3b:01.2"}]}
            ],
        }
    ]  # fmt: skip


def test_files_come_before_nvml_and_devices_are_sorted() -> None:
    function = RdmaFunction("0000:01:00.0", "mlx5_0", 0, False, Place(0, ""))
    both = plain(answer(gpu()), [xpu(2), xpu(1)], [function], PLACES)
    assert [(device["type"], device["minor"]) for device in both] == [
        ("gpu", 1), ("gpu", 2), ("rdma", 0),
    ]  # fmt: skip
    assert plain(answer(gpu()), (), (), PLACES, files_only=True) == []
    assert device_content(None, (), (), {}) == ((), {}, {})
