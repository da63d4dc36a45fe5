"""What is written on a pod that gets devices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from apis.device import parse_device_allocated
from apis.keys import (
    ANNOTATION_CAMBRICON_LOCK,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_GPU_MINORS,
    ANNOTATION_HAMI_LOCK,
    LABEL_GPU_VENDOR,
    LABEL_HAMI_VGPU_NODE,
)
from cluster.scheduler.cycle.scheduling import Placed
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.records import (
    adapted_record,
    device_allocated,
    supports,
)
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.settings import Settings
from cluster.scheduler.tables.booking import NO_ALLOCATION
from tests.cluster.scheduler.devices.clusters import (
    a_cluster,
    a_scheduling,
    eight,
    schedule,
)
from tests.cluster.scheduler.devices.making import (
    SHAPES,
    a_booking,
    a_device_object,
    a_gpu,
    a_nic,
    a_shape,
    full,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_pod


def test_the_allocation_is_written_as_readers_expect_it() -> None:
    shape = a_shape({"gpu": 50, "rdma": 1}, hint={"rdma": {"vfSelector": {}}})
    _, devices = a_cluster(n1=[a_gpu(0), a_nic(0, functions=["0000:1f:00.2"])])
    found = DeviceShareAllocator(devices).choose(shape, 0)
    assert not isinstance(found, Failure)
    assert json.loads(device_allocated(found)) == {
        "gpu": [
            {
                "minor": 0,
                "id": "GPU-0",
                "resources": {
                    "koordinator.sh/gpu-core": "50",
                    "koordinator.sh/gpu-memory": "40Gi",
                    "koordinator.sh/gpu-memory-ratio": "50",
                },
            }
        ],
        "rdma": [
            {
                "minor": 0,
                "id": "mlx-0",
                "resources": {"koordinator.sh/rdma": "1"},
                "extension": {"vfs": [{"minor": -1, "busID": "0000:1f:00.2"}]},
            }
        ],
    }


def _allocated(*gpus: int, template: str = "", ratio: int = 100) -> Any:
    entry: dict[str, Any] = {
        "resources": {
            full("gpu-core"): str(ratio),
            full("gpu-memory"): "20Gi",
            full("gpu-memory-ratio"): str(ratio),
        }
    }
    if template:
        entry["extension"] = {"gpuSharedResourceTemplate": template}
    return parsed_allocation(
        {"gpu": [{"minor": minor, "id": f"GPU-{minor}", **entry} for minor in gpus]}
    )


NOW_NS = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("vendor", "model", "devices", "written", "lock"),
    [
        ("nvidia", "H100", _allocated(0, 1), {ANNOTATION_GPU_MINORS: "0,1"}, ""),
        (
            "huawei",
            "Ascend-910B",
            _allocated(0, 1),
            {"predicate-time": str(NOW_NS), "huawei.com/npu-core": "0,1"},
            "",
        ),
        (
            "huawei",
            "Ascend-310P",
            _allocated(3, template="vir02"),
            {"huawei.com/npu-core": "3-vir02"},
            "",
        ),
        (
            "huawei",
            "Ascend-310P3-300I-DUO",
            _allocated(0, 1),
            {"huawei.com/Ascend310P": "Ascend310P-0,Ascend310P-1"},
            "",
        ),
        (
            "cambricon",
            "MLU370",
            _allocated(2, ratio=25),
            {"CAMBRICON_DSMLU_ASSIGHED": "false", "CAMBRICON_DSMLU_PROFILE": "2_25_80"},
            ANNOTATION_CAMBRICON_LOCK,
        ),
        (
            "metax",
            "C500",
            _allocated(0, ratio=40),
            {
                "metax-tech.com/gpu-devices-allocated": (
                    '[[{"compute":40,"uuid":"GPU-0","vRam":20480}]]'
                )
            },
            ANNOTATION_HAMI_LOCK,
        ),
    ],
)
def test_annotations_of_vendors(
    vendor: str, model: str, devices: Any, written: dict[str, str], lock: str
) -> None:
    record = adapted_record(
        devices, node="n1", vendor=vendor, model=model, isolation="HAMi-core", now_ns=NOW_NS
    )
    assert written.items() <= record.annotations.items()
    assert record.annotations["scheduling.koordinator.sh/bind-timestamp"] == str(NOW_NS)
    assert ANNOTATION_DEVICE_ALLOCATED in record.annotations
    assert record.labels == {LABEL_HAMI_VGPU_NODE: "n1"}
    assert record.lock == lock


@pytest.mark.parametrize(
    ("vendor", "gpus", "supported"),
    [("cambricon", 1, True), ("cambricon", 2, False), ("huawei", 2, True), ("", 8, True)],
)
def test_how_many_gpus_a_vendors_plugin_can_give(vendor: str, gpus: int, supported: bool) -> None:
    assert supports(vendor, gpus) is supported


def test_a_gpu_without_a_share_of_its_cores_has_all_of_them() -> None:
    resources = {full("gpu-memory-ratio"): "100"}
    whole = parsed_allocation({"gpu": [{"minor": 2, "id": "GPU-2", "resources": resources}]})
    for vendor, key, text in (
        ("cambricon", "CAMBRICON_DSMLU_PROFILE", "2_100_0"),
        (
            "metax",
            "metax-tech.com/gpu-devices-allocated",
            '[[{"compute":100,"uuid":"GPU-2","vRam":0}]]',
        ),
    ):
        record = adapted_record(
            whole, node="n1", vendor=vendor, model="", isolation="", now_ns=NOW_NS
        )
        assert record.annotations[key] == text


def test_without_a_gpu_only_the_time_of_binding_is_added() -> None:
    rdma = parsed_allocation({"rdma": [{"minor": 0, "resources": {full("rdma"): "1"}}]})
    record = adapted_record(rdma, node="n1", vendor="x", model="", isolation="", now_ns=5)
    assert set(record.annotations) == {
        ANNOTATION_DEVICE_ALLOCATED,
        "scheduling.koordinator.sh/bind-timestamp",
    }
    assert not record.labels and not record.lock


def test_the_gate_decides_about_vendors_annotations() -> None:
    for adaption in (False, True):
        tables, devices = a_cluster(n1=[])
        device = a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: "huawei"})
        devices.set_device(device)
        scheduling = a_scheduling(tables, devices, adaption=adaption)
        placed = schedule(scheduling, "p", a_shape({"gpu": 100}))
        assert isinstance(placed, Placed)
        assert ("huawei.com/npu-core" in placed.recorded.annotations) is adaption
        assert (ANNOTATION_GPU_MINORS in placed.recorded.annotations) is adaption


def test_an_allocation_survives_its_annotation() -> None:
    text = device_allocated(_allocated(0, 3, template="vir01"))
    assert parse_device_allocated(text, obj="Pod") == _allocated(0, 3, template="vir01")
    assert msgspec.json.decode(text)["gpu"][0]["minor"] == 0


def test_devices_that_a_pod_claims_by_itself_are_taken_away() -> None:
    tables, devices = a_cluster(n1=None)
    claimed = {ANNOTATION_DEVICE_ALLOCATED: '{"gpu":[{"minor":0}]}'}
    allocator = DeviceShareAllocator(devices)
    for requests in ({"cpu": "1"}, {"nvidia.com/gpu": "1"}):
        shape = SHAPES.of(make_pod("p", requests=requests, annotations=claimed))
        assert allocator.applies(shape, tables)
        assert allocator.allocate(shape, tables, 0, NO_ALLOCATION) is NO_ALLOCATION
        recorded = allocator.record(a_booking("p", shape, "n1", {}), tables)
        assert recorded.annotations == {ANNOTATION_DEVICE_ALLOCATED: None}
    assert not allocator.applies(a_shape({"cpu": 1}), tables)


def test_the_lock_of_a_node_is_named_for_vendors_that_need_it() -> None:
    for vendor, lock in (("metax", ANNOTATION_HAMI_LOCK), ("nvidia", "")):
        tables, devices = a_cluster(n1=[])
        devices.set_device(a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: vendor}))
        allocator = DeviceShareAllocator(devices, Settings(adaption=True))
        shape = a_shape({"gpu": 100})
        found = allocator.choose(shape, 0)
        assert not isinstance(found, Failure)
        booking = a_booking("p", shape, "n1", found)
        recorded = allocator.record(replace(booking, start=12.5), tables)
        assert recorded.lock == lock
        when = recorded.annotations["scheduling.koordinator.sh/bind-timestamp"]
        assert when == "12500000000"
        assert allocator.record(a_booking("p", shape, "n1", {}), tables).lock == ""
        assert DeviceShareAllocator(devices).record(booking, tables).lock == ""
