"""What a pod requests of devices: sets of resource names, counts, hints, and bad annotations."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import LABEL_GPU_ISOLATION_PROVIDER
from apis.quantity import parse_quantity
from cluster.scheduler.tables.amounts import amounts_of
from cluster.scheduler.tables.devices.request import (
    BadDeviceRequest,
    Exclusive,
    PartitionRequest,
    Scope,
    parse_device_request,
)
from tests.cluster.scheduler.devices.making import GIB, HINT, JOINT, PARTITION, a_request, full

CORE, MEMORY, RATIO = full("gpu-core"), full("gpu-memory"), full("gpu-memory-ratio")
NPU_CORE, NPU_CPU, NPU_DVPP = (f"huawei.com/npu-{part}" for part in ("core", "cpu", "dvpp"))
WHOLE = {CORE: 100, RATIO: 100}


@pytest.mark.parametrize(
    ("requests", "count", "each", "shared"),
    [
        ({"nvidia.com/gpu": 1}, 1, WHOLE, False),
        ({"nvidia.com/gpu": 8}, 8, WHOLE, False),
        ({"amd.com/gpu": 2}, 2, WHOLE, False),
        ({"dcu.com/gpu": 3}, 3, WHOLE, False),
        ({"gpu": 50}, 1, {CORE: 50, RATIO: 50}, True),
        ({"gpu": 100}, 1, WHOLE, False),
        ({"gpu": 200}, 2, WHOLE, False),
        ({"gpu-memory": "40Gi"}, 1, {MEMORY: 40 * GIB}, True),
        ({"gpu-memory-ratio": 30}, 1, {RATIO: 30}, True),
        ({"gpu-memory-ratio": 400}, 4, {RATIO: 100}, False),
        ({"gpu-core": 30, "gpu-memory": "80Gi"}, 1, {CORE: 30, MEMORY: 80 * GIB}, True),
        ({"gpu-core": 50, "gpu-memory-ratio": 50}, 1, {CORE: 50, RATIO: 50}, True),
        ({"gpu-core": 200, "gpu-memory-ratio": 200}, 2, WHOLE, False),
        ({NPU_CORE: 20, "gpu-memory-ratio": 100}, 1, {NPU_CORE: 20, RATIO: 100}, False),
        ({"gpu.shared": 4, "gpu-memory": "160Gi"}, 4, {MEMORY: 40 * GIB}, True),
        ({"gpu.shared": 2, "gpu-memory-ratio": 100}, 2, {RATIO: 50}, True),
        ({"gpu.shared": 2, "gpu-memory-ratio": 200}, 2, {RATIO: 100}, False),
        (
            {"gpu.shared": 2, "gpu-core": 60, "gpu-memory-ratio": 100},
            2,
            {CORE: 30, RATIO: 50},
            True,
        ),
        (
            {"gpu.shared": 1, NPU_CORE: 2, NPU_CPU: 1, "gpu-memory": "3Gi"},
            1,
            {NPU_CORE: 2, NPU_CPU: 1, MEMORY: 3 * GIB},
            True,
        ),
        (
            {"gpu.shared": 1, NPU_CORE: 2, NPU_CPU: 1, NPU_DVPP: 100, "gpu-memory": "3Gi"},
            1,
            {NPU_CORE: 2, NPU_CPU: 1, NPU_DVPP: 100, MEMORY: 3 * GIB},
            True,
        ),
        ({"gpu": 100, "gpu-core": 0, "cpu": 4}, 1, WHOLE, False),  # zeros and other names
    ],
)
def test_sets_of_gpu_names_become_gpus_and_amounts_of_each(
    requests: Any, count: int, each: dict[str, int], shared: bool
) -> None:
    gpu = a_request(requests).types["gpu"]
    assert (gpu.count, dict(gpu.each), gpu.shared) == (count, each, shared)


def _refusal(requests: dict[str, Any], annotations: dict[str, str] | None = None) -> str:
    amounts = amounts_of({full(n): parse_quantity(amount) for n, amount in requests.items()})
    with pytest.raises(BadDeviceRequest) as error:
        parse_device_request(amounts, annotations or {}, {})
    return str(error.value)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ({"gpu-core": 50}, f"invalid resource device requests: [{CORE}]"),
        ({"gpu.shared": 1}, f"invalid resource device requests: [{full('gpu.shared')}]"),
        (
            {"gpu": 100, "nvidia.com/gpu": 1},
            f"invalid resource device requests: [{full('gpu')} nvidia.com/gpu]",
        ),
        (
            {"gpu-memory": "1Gi", "gpu-memory-ratio": 5},
            f"invalid resource device requests: [{MEMORY} {RATIO}]",
        ),
        ({"gpu": 150}, f"invalid resource unit {full('gpu')}: 150"),
        ({"gpu-memory-ratio": 101}, f"invalid resource unit {RATIO}: 101"),
        ({"gpu-core": 120, "gpu-memory": "1Gi"}, f"invalid resource unit {CORE}: 120"),
        ({"gpu-core": 120, "gpu-memory-ratio": 100}, f"invalid resource unit {CORE}: 120"),
        ({"gpu.shared": 3, "gpu-memory-ratio": 100}, f"invalid resource unit {RATIO}: 100"),
        ({"gpu.shared": 2, "gpu-memory-ratio": 202}, f"invalid resource unit {RATIO}: 202"),
        (
            {"gpu.shared": 2, "gpu-core": 201, "gpu-memory": "1Gi"},
            f"invalid resource unit {CORE}: 201",
        ),
        (
            {"gpu.shared": 2, NPU_CORE: 2, NPU_CPU: 2, "gpu-memory": "3Gi"},
            f"invalid resource unit {full('gpu.shared')}: 2",
        ),
        (
            {"gpu.shared": 1, NPU_CORE: 2, NPU_CPU: 1, NPU_DVPP: 101, "gpu-memory": "3Gi"},
            f"invalid resource unit {NPU_DVPP}: 101",
        ),
        ({"gpu.shared": 4, "gpu-memory": 3}, f"invalid resource unit {MEMORY}: 3"),
        ({"rdma": 150}, f"invalid resource unit {full('rdma')}: 150"),
        ({"fpga": 101}, f"invalid resource unit {full('fpga')}: 101"),
    ],
)
def test_other_sets_and_amounts_are_refused(requests: dict[str, Any], message: str) -> None:
    assert _refusal(requests) == message


@pytest.mark.parametrize(
    ("amount", "hint", "count", "each", "every"),
    [
        (100, {}, 1, 100, False),
        (30, {}, 1, 30, False),
        (300, {}, 3, 100, False),
        (300, {"allocateStrategy": "ApplyForAll"}, 3, 100, False),
        (1, {"allocateStrategy": "ApplyForAll"}, 0, 1, True),
        (4, {"allocateStrategy": "RequestsAsCount"}, 4, 1, False),
        (
            4,
            {"allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"},
            4,
            100,
            False,
        ),
    ],
)
def test_counts_of_rdma_devices(
    amount: int, hint: dict[str, str], count: int, each: int, every: bool
) -> None:
    rdma = a_request({"rdma": amount}, hint={"rdma": hint}).types["rdma"]
    assert (rdma.count, dict(rdma.each), rdma.every) == (count, {full("rdma"): each}, every)


def test_hints_joint_allocation_and_partition_are_read() -> None:
    request = a_request(
        {"gpu": 200, "rdma": 1, "fpga": 100},
        hint={
            "rdma": {"vfSelector": {}, "selector": {"matchLabels": {"speed": "200"}}},
            "gpu": {"requiredTopologyScope": "NUMANode"},
            "fpga": {"allocateStrategy": "ApplyForAll"},
        },
        joint={"deviceTypes": ["gpu", "fpga", "rdma", "tpu"], "requiredScope": "SamePCIe"},
        partition={"allocatePolicy": "Restricted", "ringBusBandwidth": "100Gi"},
        labels={LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"},
    )
    assert request.types["rdma"].functions is not None
    assert request.types["rdma"].functions.is_empty()
    assert request.types["gpu"].functions is None
    assert request.types["gpu"].scope is Scope.NUMA_NODE
    assert request.joint == ("gpu", "rdma") and request.same_pcie
    assert request.partition is not None
    assert (request.partition.restricted, request.partition.bandwidth) == (True, 100 * GIB)
    assert request.isolation == "HAMi-core"


def test_types_for_all_devices_and_single_types_are_not_joint() -> None:
    joint = {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}
    alone = a_request({"gpu": 100}, joint=joint)
    assert alone.joint == () and not alone.same_pcie
    hint = {"rdma": {"allocateStrategy": "ApplyForAll"}}
    assert a_request({"gpu": 100, "rdma": 1}, joint=joint, hint=hint).joint == ("gpu",)


@pytest.mark.parametrize(
    ("key", "text", "part"),
    [
        (HINT, "{", "not valid JSON"),
        (HINT, "[" * 5000, "not valid JSON"),
        (HINT, '{"rdma":{"allocateStrategy":"All"}}', "rdma.allocateStrategy = 'All'"),
        (HINT, '{"rdma":{"exclusivePolicy":"Node"}}', "rdma.exclusivePolicy = 'Node'"),
        (HINT, '{"rdma":{"requiredTopologyScope":"numa"}}', "rdma.requiredTopologyScope = 'numa'"),
        (HINT, '{"rdma":{"selector":{"matchLabels":{"a b":"c"}}}}', "rdma.selector"),
        (HINT, '{"rdma":{"vfSelector":{"matchLabels":[]}}}', "vfSelector"),
        (HINT, '{"rdma":7}', "rdma"),
        (HINT, '{"rdma":{"selector":"' + "x" * (1 << 20) + '"}}', "longer than"),
        (JOINT, '{"deviceTypes":"gpu"}', "deviceTypes"),
        (JOINT, '{"deviceTypes":["gpu","rdma"],"requiredScope":"SameNUMA"}', "requiredScope"),
        (PARTITION, '{"allocatePolicy":"Strict"}', "allocatePolicy = 'Strict'"),
        (PARTITION, '{"ringBusBandwidth":"fast"}', "ringBusBandwidth"),
    ],
)
def test_a_bad_annotation_refuses_the_pod_and_names_the_member(
    key: str, text: str, part: str
) -> None:
    message = _refusal({"gpu": 100, "rdma": 1}, {key: text})
    assert key in message and part in message
    assert len(message) < 1000
    assert parse_device_request({"cpu": 4}, {key: text}, {}) is None  # no device, no harm


@pytest.mark.parametrize("text", ["", "null", "{}"])
def test_an_empty_annotation_says_nothing(text: str) -> None:
    plain = parse_device_request({full("gpu"): 100}, {}, {})
    assert plain is not None
    if text != "{}":
        for key in (HINT, JOINT, PARTITION):
            assert parse_device_request({full("gpu"): 100}, {key: text}, {}) == plain
    demanded = parse_device_request({full("gpu"): 100}, {PARTITION: "{}"}, {})
    assert demanded is not None and demanded.partition is not None


def test_names_counted_by_vendors_are_marked() -> None:
    assert a_request({"nvidia.com/gpu": 1}).counted
    assert not a_request({"gpu": 100}).counted
    assert not a_request({"nvidia.com/gpu": 1, "rdma": 1}).counted


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("", Scope.NONE),
        ("Node", Scope.NODE),
        ("NUMANode", Scope.NUMA_NODE),
        ("PCIe", Scope.PCIE),
        ("Device", Scope.DEVICE),
    ],
)
def test_scopes_of_a_hint(text: str, scope: Scope) -> None:
    request = a_request({"rdma": 1}, hint={"rdma": {"requiredTopologyScope": text}})
    assert request.types["rdma"].scope is scope


@pytest.mark.parametrize(
    ("text", "exclusive"),
    [("", Exclusive.NONE), ("DeviceLevel", Exclusive.DEVICE), ("PCIeLevel", Exclusive.PCIE)],
)
def test_exclusive_policies_of_a_hint(text: str, exclusive: Exclusive) -> None:
    request = a_request({"rdma": 1}, hint={"rdma": {"exclusivePolicy": text}})
    assert request.types["rdma"].exclusive is exclusive


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, PartitionRequest(restricted=False, bandwidth=0)),
        ({"allocatePolicy": "BestEffort"}, PartitionRequest(restricted=False, bandwidth=0)),
        ({"allocatePolicy": "Restricted"}, PartitionRequest(restricted=True, bandwidth=0)),
        ({"ringBusBandwidth": "2Ki"}, PartitionRequest(restricted=False, bandwidth=2048)),
        ({"ringBusBandwidth": "-1"}, PartitionRequest(restricted=False, bandwidth=0)),
    ],
)
def test_partitions_that_a_pod_asks_for(spec: dict[str, str], expected: PartitionRequest) -> None:
    assert a_request({"gpu": 100}, partition=spec).partition == expected


_FIELD = 'metadata.annotations["{}"]'


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (
            HINT,
            '{"rdma":{"allocateStrategy":"All"}}',
            ".rdma.allocateStrategy = 'All': expected one of ApplyForAll, RequestsAsCount",
        ),
        (
            HINT,
            '{"rdma":{"exclusivePolicy":"Node"}}',
            ".rdma.exclusivePolicy = 'Node': expected one of DeviceLevel, PCIeLevel",
        ),
        (
            HINT,
            '{"rdma":{"requiredTopologyScope":"numa"}}',
            ".rdma.requiredTopologyScope = 'numa': expected one of Node, NUMANode, PCIe, Device",
        ),
        (
            JOINT,
            '{"requiredScope":"SameNUMA"}',
            ".requiredScope = 'SameNUMA': expected SamePCIe",
        ),
        (
            PARTITION,
            '{"allocatePolicy":"Strict"}',
            ".allocatePolicy = 'Strict': expected one of BestEffort, Restricted",
        ),
    ],
)
def test_the_message_says_what_was_expected(key: str, text: str, message: str) -> None:
    assert _refusal({"gpu": 100, "rdma": 1}, {key: text}) == _FIELD.format(key) + message


@pytest.mark.parametrize("requests", [{"nvidia.com/gpu": -1}, {"gpu": -100}, {"rdma": -1}])
def test_negative_amounts_are_refused(requests: dict[str, int]) -> None:
    ((name, amount),) = requests.items()
    assert _refusal(requests) == f"invalid resource unit {full(name)}: {amount}"
