"""Which devices a pod gets on one node: order, partitions, topology, joint allocation, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.keys import ANNOTATION_GPU_PARTITIONS
from cluster.scheduler.exact.devices import failures
from cluster.scheduler.exact.devices.allocate import Rules, allocate
from cluster.scheduler.exact.devices.candidates import Limits, Scoring, fullness
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.numa_hints import SAME_DEVICES, device_hints
from cluster.scheduler.exact.devices.partition import what_stays
from cluster.scheduler.exact.devices.templates import SharedTemplates, parse_templates
from cluster.scheduler.exact.numa import Hint
from cluster.scheduler.tables.devices.partitions import (
    PartitionRules,
    built_in_partitions,
    parse_partitions,
)
from tests.cluster.scheduler.devices.making import (
    GIB,
    a_gpu,
    a_nic,
    a_request,
    full,
    minors,
    node_devices,
    whole_gpus,
)

EIGHT = [a_gpu(minor) for minor in range(8)]
# NUMA 0: switch A {0,1}, B {2,3}; NUMA 1: C {4,5}, D {6,7}.
TREE = [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2])) for minor in range(8)]
H100 = PartitionRules(built_in_partitions("nvidia", "H100"))
H100_MANDATORY = PartitionRules(H100.table, mandatory=True)


# --- by score and minor --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "used", "expected"),
    [
        ({"nvidia.com/gpu": 2}, (), [0, 1]),
        ({"nvidia.com/gpu": 2}, (0, 2), [1, 3]),
        ({"nvidia.com/gpu": 8}, (), list(range(8))),
        ({"nvidia.com/gpu": 8}, (0,), "Insufficient gpu devices"),
        ({"nvidia.com/gpu": 9}, (), "Insufficient gpu devices"),
        ({"rdma": 100}, (), "Insufficient rdma devices"),
        ({"gpu.shared": 3, "gpu-memory": "120Gi"}, (0,), [1, 2, 3]),
        ({"gpu-memory": "81Gi"}, (), "Insufficient gpu devices"),
    ],
)
def test_whole_and_shared_gpus_by_minor(
    requests: Any, used: tuple[int, ...], expected: Any
) -> None:
    devices = node_devices(EIGHT, held=whole_gpus(*used))
    request = a_request(requests)
    (type_,) = request.types
    assert minors(allocate(devices, request), type_) == expected


def test_a_type_that_the_node_lacks_cannot_be_resolved_by_eviction() -> None:
    request = a_request({"rdma": 100})
    assert allocate(node_devices(EIGHT), request) == Failure("Insufficient rdma devices", False)
    held = {"rdma": {0: {"rdma": "100"}}}
    used = node_devices([a_nic(0)], held=held)
    assert allocate(used, request) == Failure("Insufficient rdma devices", True)


def test_gpu_memory_is_written_in_both_units() -> None:
    by_ratio = allocate(node_devices(EIGHT), a_request({"gpu": 30}))
    assert not isinstance(by_ratio, Failure)
    (gpu,) = by_ratio["gpu"]
    assert {name: str(amount) for name, amount in gpu.resources.items()} == {
        full("gpu-core"): "30",
        full("gpu-memory-ratio"): "30",
        full("gpu-memory"): "24Gi",
    }
    assert gpu.id == "GPU-0"
    by_bytes = allocate(node_devices(EIGHT), a_request({"gpu-memory": "10Gi"}))
    assert not isinstance(by_bytes, Failure)
    ratio = by_bytes["gpu"][0].resources[full("gpu-memory-ratio")]
    assert ratio.value() == 12  # 12.5 % rounded down


def test_memory_in_bytes_is_kept_free_although_its_ratio_rounds_to_nothing() -> None:
    held = {"gpu": {0: {"gpu-memory": "500Mi"}}}  # 0.6 %
    devices = node_devices([a_gpu(0)], held=held)
    assert minors(allocate(devices, a_request({"nvidia.com/gpu": 1}))) == "Insufficient gpu devices"


@pytest.mark.parametrize(("most", "expected"), [(False, [1]), (True, [0])])
def test_a_share_goes_to_the_emptiest_or_fullest_gpu(most: bool, expected: list[int]) -> None:
    held = {"gpu": {0: {"gpu-memory-ratio": "40", "gpu-core": "40"}}}
    for gpus in ([a_gpu(0), a_gpu(1)], [a_gpu(n, at=(0, "A")) for n in range(2)]):
        devices = node_devices(gpus, held=held)
        rules = Rules(scoring=Scoring(most=most))
        assert minors(allocate(devices, a_request({"gpu": 30}), rules=rules)) == expected


def test_unhealthy_and_deselected_gpus_are_not_given() -> None:
    gpus = [a_gpu(0, health=False), a_gpu(1, labels={"model": "A"}), a_gpu(2)]
    devices = node_devices(gpus)
    assert minors(allocate(devices, a_request({"gpu": 100}))) == [1]
    hint = {"gpu": {"selector": {"matchExpressions": [{"key": "model", "operator": "Exists"}]}}}
    assert minors(allocate(devices, a_request({"gpu": 100}, hint=hint))) == [1]
    two = allocate(devices, a_request({"gpu": 200}, hint=hint))
    assert minors(two) == "Insufficient gpu devices"


def test_pods_without_a_known_device_keep_devices_free() -> None:
    devices = node_devices(EIGHT)
    shy = replace(devices, unattributed={"gpu": 3})
    assert minors(allocate(shy, a_request({"nvidia.com/gpu": 5}))) == [0, 1, 2, 3, 4]
    assert isinstance(allocate(shy, a_request({"nvidia.com/gpu": 6})), Failure)


# --- RDMA: all, counts, functions, exclusive switches -------------------------------------------


NICS = [a_nic(n, at=(n // 2, "AB"[n // 2]), labels={"speed": str(n % 2)}) for n in range(4)]


@pytest.mark.parametrize(
    ("amount", "hint", "expected"),
    [
        (1, {"allocateStrategy": "ApplyForAll"}, [0, 1, 2, 3]),
        (
            1,
            {"allocateStrategy": "ApplyForAll", "selector": {"matchLabels": {"speed": "1"}}},
            [1, 3],
        ),
        (
            1,
            {"allocateStrategy": "ApplyForAll", "selector": {"matchLabels": {"speed": "9"}}},
            "Insufficient rdma devices",
        ),
        (3, {"allocateStrategy": "RequestsAsCount"}, [0, 1, 2]),
        (5, {"allocateStrategy": "RequestsAsCount"}, "Insufficient rdma devices"),
        (200, {"requiredTopologyScope": "PCIe"}, [0, 1]),
        (300, {"requiredTopologyScope": "PCIe"}, "Insufficient Topology Scoped rdma Devices"),
        (100, {"requiredTopologyScope": "Device"}, [0]),
        (100, {"vfSelector": {}}, "Insufficient rdma VirtualFunctions"),
    ],
)
def test_rdma_devices(amount: int, hint: Any, expected: Any) -> None:
    request = a_request({"rdma": amount}, hint={"rdma": hint})
    assert minors(allocate(node_devices(NICS), request), "rdma") == expected


def test_the_free_virtual_function_with_the_lowest_bus_id_is_given() -> None:
    nic = a_nic(0, functions=["0000:1f:00.3", "0000:1f:00.2", "0000:1f:00.10"])
    hint = {"rdma": {"vfSelector": {"matchLabels": {"type": "fast"}}}}
    request = a_request({"rdma": 1}, hint=hint)
    found = allocate(node_devices([nic]), request)
    assert not isinstance(found, Failure)
    (rdma,) = found["rdma"]
    assert rdma.extension is not None
    assert [(vf.bus_id, vf.minor) for vf in rdma.extension.vfs] == [("0000:1f:00.10", -1)]
    slow = {"rdma": {"vfSelector": {"matchLabels": {"type": "slow"}}}}
    none = allocate(node_devices([nic]), a_request({"rdma": 1}, hint=slow))
    assert none == failures.NO_FUNCTIONS["rdma"]


def test_a_pod_that_wants_its_switch_alone_gets_an_empty_one() -> None:
    hint = {"rdma": {"exclusivePolicy": "PCIeLevel"}}
    devices = node_devices(NICS, held={"rdma": {1: {"rdma": "1"}}})
    assert minors(allocate(devices, a_request({"rdma": 1}, hint=hint)), "rdma") == [2]
    assert minors(allocate(devices, a_request({"rdma": 1})), "rdma") == [0]
    both = node_devices(NICS, held={"rdma": {1: {"rdma": "1"}, 2: {"rdma": "1"}}})
    assert isinstance(allocate(both, a_request({"rdma": 1}, hint=hint)), Failure)


# --- partitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "used", "expected"),
    [
        (2, (0,), [2, 3]),  # keeps 4-7 whole: 100 + 2, against 2
        (2, (), [0, 1]),
        (2, (4,), [6, 7]),
        (1, (0,), [1]),
        (1, (0, 1), [2]),
        (4, (0,), [4, 5, 6, 7]),
        (4, (0, 4), "Insufficient Partitioned GPU Devices"),
        (8, (), list(range(8))),
        (3, (), "node(s) Unsupported number of GPU requests"),
    ],
)
def test_the_partition_that_leaves_the_most_is_chosen(
    count: int, used: tuple[int, ...], expected: Any
) -> None:
    devices = node_devices(EIGHT, held=whole_gpus(*used), rules=H100_MANDATORY)
    assert minors(allocate(devices, a_request({"nvidia.com/gpu": count}))) == expected


def test_without_demand_a_partition_is_a_preference() -> None:
    request = a_request({"nvidia.com/gpu": 2})
    odd = node_devices(EIGHT, held=whole_gpus(0, 2, 4, 6), rules=H100)
    assert minors(allocate(odd, request)) == [1, 3]
    demanded = a_request({"nvidia.com/gpu": 2}, partition={})
    assert allocate(odd, demanded) == failures.NO_PARTITION
    none = node_devices(EIGHT)
    assert allocate(none, demanded) == failures.NO_PARTITION_TABLE


def test_shared_gpus_use_no_partition() -> None:
    request = a_request({"gpu": 50}, partition={"allocatePolicy": "Restricted"})
    assert minors(allocate(node_devices(EIGHT), request)) == [0]


_RINGS = parse_partitions(
    '{"2":[{"minors":[0,1],"ringBusBandwidth":"100Gi","allocationScore":1},'
    '{"minors":[2,3],"ringBusBandwidth":"400Gi","allocationScore":9},'
    '{"minors":[4,5],"ringBusBandwidth":"200Gi","allocationScore":5}]}',
    obj="Device n1",
)


@pytest.mark.parametrize(
    ("used", "spec", "expected"),
    [
        ((), {}, [2, 3]),  # the highest score first
        ((2,), {}, [4, 5]),
        ((2, 4), {}, [0, 1]),
        ((2, 4), {"ringBusBandwidth": "150Gi"}, "Insufficient Partitioned GPU Devices"),
        ((), {"allocatePolicy": "Restricted"}, [2, 3]),
        ((2,), {"allocatePolicy": "Restricted"}, "Insufficient Partitioned GPU Devices"),
    ],
)
def test_partitions_with_the_highest_score_come_first(
    used: tuple[int, ...], spec: Any, expected: Any
) -> None:
    devices = node_devices(EIGHT, held=whole_gpus(*used), rules=PartitionRules(_RINGS))
    request = a_request({"nvidia.com/gpu": 2}, partition=spec)
    assert minors(allocate(devices, request)) == expected


def _weight_of_rest(free: set[int], count: int) -> int:
    """Return what stays of an H100's partitions, counted as the reference words it."""
    total = 0
    for size, weight in ((8, 10000), (4, 100), (2, 1)):
        for first in range(0, 8, size):
            if size >= count and set(range(first, first + size)) <= free:
                total += weight
    return total


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ((1, 4, 5, 6, 7), 2, 100 + 2),  # after 2 and 3
        ((1, 2, 3, 6, 7), 2, 2),  # after 4 and 5
        ((1, 2, 3, 6, 7), 4, 0),
        ((4, 5, 6, 7), 4, 100),
        (tuple(range(8)), 1, 10_000 + 2 * 100 + 4),
    ],
)
def test_what_stays_of_partitions(free: tuple[int, ...], count: int, expected: int) -> None:
    assert H100.table is not None
    assert what_stays(H100.table, sum(1 << minor for minor in free), count) == expected


@given(st.sets(st.integers(0, 7)), st.sampled_from([1, 2, 4, 8]))
def test_no_other_partition_would_leave_more(used: set[int], count: int) -> None:
    devices = node_devices(EIGHT, held=whole_gpus(*used), rules=H100_MANDATORY)
    found = minors(allocate(devices, a_request({"nvidia.com/gpu": count})))
    free = set(range(8)) - used
    options = [
        set(range(first, first + count))
        for first in range(0, 8, count)
        if set(range(first, first + count)) <= free
    ]
    if not options:
        few = len(free) < count
        assert found == f"Insufficient {'gpu devices' if few else 'Partitioned GPU Devices'}"
        return
    assert set(found) in options
    best = max(_weight_of_rest(free - option, count) for option in options)
    assert _weight_of_rest(free - set(found), count) == best


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("null", "expected"),
        ("[", "not valid JSON"),
        ('{"x":[]}', "number of GPUs"),
        ('{"0":[]}', "number of GPUs"),
        ('{"2":[{"minors":[0]}]}', "2 different minors"),
        ('{"2":[{"minors":[1,1]}]}', "2 different minors"),
        ('{"1":[{"minors":[64]}]}', "minors"),
        ('{"1":[{"minors":[-1]}]}', "minors"),
        ('{"1":[{"minors":[0],"allocationScore":"high"}]}', "allocationScore"),
        ('{"1":[' + ",".join(['{"minors":[0]}'] * 2000) + "]}", "more than"),
    ],
)
def test_a_bad_partition_table_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="Device n1") as error:
        parse_partitions(text, obj="Device n1")
    assert ANNOTATION_GPU_PARTITIONS in str(error.value) and part in str(error.value)


# --- topology ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "used", "scope", "expected"),
    [
        (1, (4, 5), "", [6]),  # D is empty, but its NUMA node is in use
        (1, (0,), "", [1]),  # A is in use: node, NUMA 0 and A are not empty
        (2, (0,), "", [2, 3]),  # A has one left; B shares the used NUMA node
        (4, (0,), "", [4, 5, 6, 7]),
        (5, (0,), "", [1, 2, 3, 4, 5]),
        (2, (0, 2, 4, 6), "", [1, 3]),
        (2, (0, 2, 4, 6), "NUMANode", [1, 3]),
        (2, (0, 2, 4, 6), "PCIe", "Insufficient Topology Scoped GPU Devices"),
        (5, (), "NUMANode", "Insufficient Topology Scoped GPU Devices"),
        (5, (), "Node", [0, 1, 2, 3, 4]),
        (1, (), "Device", [0]),
        (2, (), "Device", "Insufficient Topology Scoped GPU Devices"),
    ],
)
def test_gpus_are_close_together(
    count: int, used: tuple[int, ...], scope: str, expected: Any
) -> None:
    devices = node_devices(TREE, held=whole_gpus(*used))
    hint = {"gpu": {"requiredTopologyScope": scope}}
    assert minors(allocate(devices, a_request({"nvidia.com/gpu": count}, hint=hint))) == expected


def test_a_partition_is_chosen_within_the_scope() -> None:
    table = parse_partitions(
        '{"2":[{"minors":[3,4],"allocationScore":9},{"minors":[4,5],"allocationScore":1}]}',
        obj="Device n1",
    )
    devices = node_devices(TREE, rules=PartitionRules(table=table, mandatory=True))
    near = {"gpu": {"requiredTopologyScope": "NUMANode"}}
    assert minors(allocate(devices, a_request({"gpu": 200}))) == [3, 4]
    assert minors(allocate(devices, a_request({"gpu": 200}, hint=near))) == [4, 5]


def test_a_scope_needs_the_topology_of_every_gpu() -> None:
    hint = {"gpu": {"requiredTopologyScope": "NUMANode"}}
    partly = node_devices([*TREE[:7], a_gpu(7)])
    assert allocate(partly, a_request({"gpu": 100}, hint=hint)) == failures.NO_TOPOLOGY["gpu"]
    assert minors(allocate(partly, a_request({"gpu": 100}))) == [0]
    several = a_request({"gpu.shared": 2, "gpu-memory-ratio": 100}, hint=hint)
    assert allocate(node_devices(TREE), several) == failures.SEVERAL_SHARES


@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from("AB")), min_size=1, max_size=8),
    st.data(),
)
def test_no_deeper_or_fuller_part_of_the_machine_could_serve(
    places: list[tuple[int, str]], data: st.DataObject
) -> None:
    # A switch belongs to one NUMA node.
    places = [(numa, f"{numa}{pcie}") for numa, pcie in places]
    used = data.draw(st.sets(st.integers(0, len(places) - 1)))
    count = data.draw(st.integers(1, len(places)))
    gpus = [a_gpu(minor, at=place) for minor, place in enumerate(places)]
    devices = node_devices(gpus, held=whole_gpus(*used))
    found = minors(allocate(devices, a_request({"nvidia.com/gpu": count})))
    free = set(range(len(places))) - used
    if len(free) < count:
        assert found == "Insufficient gpu devices"
        return
    everything = set(range(len(places)))
    parts = [(1, everything)]
    for numa in (0, 1):
        parts.append((2, {m for m in everything if places[m][0] == numa}))
    for pcie in {place[1] for place in places}:
        parts.append((3, {m for m in everything if places[m][1] == pcie}))

    def worth(part: tuple[int, set[int]]) -> tuple[int, int]:
        depth, members = part
        above = [other for level, other in parts if level <= depth and members <= other]
        return depth, min(depth, sum(bool(other & used) for other in _chain(above, members)))

    able = [part for part in parts if len(part[1] & free) >= count]
    best = max(map(worth, able))
    assert isinstance(found, list) and set(found) <= free and len(found) == count
    assert best in {worth(part) for part in able if set(found) <= part[1]}


def _chain(above: list[set[int]], members: set[int]) -> list[set[int]]:
    return [other for other in above if members <= other]


# --- several types -------------------------------------------------------------------------------

JOINT = {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}
NEAR = {"deviceTypes": ["gpu", "rdma"]}
FOUR_NICS = [a_nic(n, at=(n // 2, "ABCD"[n])) for n in range(4)]


@pytest.mark.parametrize(
    ("requests", "joint", "held", "gpus", "nics"),
    [
        ({"gpu": 100, "rdma": 1}, JOINT, {}, [0], [0]),
        ({"gpu": 400, "rdma": 1}, JOINT, {}, [0, 1, 2, 3], [0, 1]),
        ({"gpu": 800, "rdma": 100}, JOINT, {}, list(range(8)), [0, 1, 2, 3]),
        ({"gpu": 400, "rdma": 1}, NEAR, {}, [0, 1, 2, 3], [0, 1]),
        # NIC 0 is taken, so the GPU comes from a switch with a free one.
        ({"gpu": 100, "rdma": 100}, JOINT, {"rdma": {0: {"rdma": "100"}}}, [2], [1]),
        ({"gpu": 100, "rdma": 100}, NEAR, {"rdma": {0: {"rdma": "100"}}}, [0], [1]),
        (
            {"gpu": 800, "rdma": 100},
            JOINT,
            {"rdma": {0: {"rdma": "100"}}},
            "node(s) Device Joint-Allocate rules violation",
            None,
        ),
        # Two NICs cannot be on the switch of one GPU.
        (
            {"gpu": 100, "rdma": 200},
            JOINT,
            {},
            "node(s) Device Joint-Allocate rules violation",
            None,
        ),
        ({"gpu": 100, "rdma": 200}, NEAR, {}, [0], [0, 1]),
        ({"gpu": 100, "rdma": 100}, None, whole_gpus(0, 1), [2], [0]),
    ],
)
def test_gpus_and_rdma_on_the_same_switches(
    requests: Any, joint: Any, held: Any, gpus: Any, nics: Any
) -> None:
    devices = node_devices([*TREE, *FOUR_NICS], held=held)
    found = allocate(devices, a_request(requests, joint=joint))
    assert minors(found) == gpus
    if nics is not None:
        assert minors(found, "rdma") == nics


def test_a_partition_on_other_switches_is_no_joint_allocation() -> None:
    joint = {"deviceTypes": ["rdma", "gpu"], "requiredScope": "SamePCIe"}
    request = a_request({"gpu": 100, "rdma": 200}, joint=joint)
    devices = node_devices([*TREE, *FOUR_NICS])
    assert minors(allocate(devices, request)) == [0, 2]
    # A partition of one GPU cannot be on the switches of both NICs.
    bound = node_devices([*TREE, *FOUR_NICS], rules=H100_MANDATORY)
    assert allocate(bound, request) == failures.NOT_JOINT


def test_gpus_follow_the_primary_too() -> None:
    joint = {"deviceTypes": ["rdma", "gpu"]}
    devices = node_devices([*TREE, *FOUR_NICS], held={"rdma": {0: {"rdma": "100"}}})
    found = allocate(devices, a_request({"gpu": 100, "rdma": 100}, joint=joint))
    assert (minors(found), minors(found, "rdma")) == ([2], [1])


@pytest.mark.parametrize(
    ("machine", "used", "partition", "expected"),
    [
        ([*TREE, *FOUR_NICS], range(8), None, failures.INSUFFICIENT["gpu"]),
        (TREE, (), None, failures.NO_DEVICES["rdma"]),
        # What demands partitions, and has no table of them, is missing whatever is near.
        (TREE, (), {}, failures.NO_PARTITION_TABLE),
    ],
)
def test_a_type_that_fails_alone_says_its_own_reason(
    machine: Any, used: Any, partition: Any, expected: Failure
) -> None:
    devices = node_devices(machine, held=whole_gpus(*used))
    request = a_request({"gpu": 100, "rdma": 100}, joint=JOINT, partition=partition)
    assert allocate(devices, request) == expected


def test_functions_are_not_what_is_short_where_an_unknown_pod_has_the_device() -> None:
    devices = node_devices([a_nic(0)])
    request = a_request({"rdma": 1}, hint={"rdma": {"vfSelector": {}}})
    assert allocate(devices, request) == failures.NO_FUNCTIONS["rdma"]
    shy = replace(devices, unattributed={"rdma": 1})
    assert allocate(shy, request) == failures.INSUFFICIENT["rdma"]


# --- limits --------------------------------------------------------------------------------------


def test_a_numa_affinity_limits_devices() -> None:
    devices = node_devices(TREE, held=whole_gpus(4, 5))
    on_one = Limits(numa={1})
    assert minors(allocate(devices, a_request({"gpu": 200}), limits=on_one)) == [6, 7]
    found = allocate(devices, a_request({"gpu": 300}), limits=on_one)
    assert found == failures.NOT_ON_NUMA_NODES
    unknown = node_devices([a_gpu(0), a_gpu(1, at=(-1, "A"))])
    assert minors(allocate(unknown, a_request({"gpu": 100}), limits=on_one)) == [1]


@pytest.mark.parametrize("gpus", [EIGHT, TREE])
def test_preferred_and_required_minors(gpus: Any) -> None:
    devices = node_devices(gpus)
    preferred = Limits(preferred={"gpu": {5, 6}})
    assert minors(allocate(devices, a_request({"gpu": 100}), limits=preferred)) == [5]
    assert minors(allocate(devices, a_request({"gpu": 50}), limits=preferred)) == [5]
    amounts = {full("gpu-core"): 100, full("gpu-memory-ratio"): 100, full("gpu-memory"): 80 * GIB}
    required = Limits(required={"gpu": {3: amounts, 6: dict.fromkeys(amounts, 0)}})
    assert minors(allocate(devices, a_request({"gpu": 100}), limits=required)) == [3]
    found = allocate(devices, a_request({"gpu": 200}), limits=required)
    assert found == failures.INSUFFICIENT["gpu"]
    exhausted = Limits(required={"gpu": {}})
    assert isinstance(allocate(devices, a_request({"gpu": 100}), limits=exhausted), Failure)


def test_required_minors_hold_for_partitions_too() -> None:
    amounts = {full("gpu-core"): 100, full("gpu-memory-ratio"): 100, full("gpu-memory"): 80 * GIB}
    required = Limits(required={"gpu": dict.fromkeys((3, 4, 5), amounts)})
    devices = node_devices(EIGHT, rules=H100_MANDATORY)
    assert minors(allocate(devices, a_request({"gpu": 200}), limits=required)) == [4, 5]


def test_hints_say_which_numa_nodes_would_do() -> None:
    devices = node_devices(TREE, held=whole_gpus(4))
    assert device_hints(devices, a_request({"gpu": 400})) == {
        0b01: Hint(True, SAME_DEVICES),
        0b11: Hint(False, SAME_DEVICES),
    }
    assert device_hints(devices, a_request({"gpu": 700})) == {0b11: Hint(True, SAME_DEVICES)}
    assert device_hints(devices, a_request({"gpu": 800})) == {}
    # Four GPUs fit on one NUMA node of the empty machine, so two are not what is preferred.
    scattered = node_devices(TREE, held=whole_gpus(0, 4))
    assert device_hints(scattered, a_request({"gpu": 400})) == {0b11: Hint(False, SAME_DEVICES)}
    assert device_hints(node_devices(EIGHT), a_request({"gpu": 100})) is None
    unknown = [a_gpu(minor, at=(-1, "A")) for minor in range(2)]
    assert device_hints(node_devices(unknown), a_request({"gpu": 100})) is None


def test_a_set_with_other_devices_than_without_a_policy_scores_less() -> None:
    devices = node_devices(TREE)
    found = device_hints(devices, a_request({"gpu": 200}))
    assert found == {
        0b01: Hint(True, SAME_DEVICES),
        0b10: Hint(True, 0),
        0b11: Hint(False, SAME_DEVICES),
    }


# --- templates -----------------------------------------------------------------------------------

_NPU = {"huawei.com/npu-core": "20", "huawei.com/npu-cpu": "7"}
_TEMPLATES = parse_templates(
    '{"huawei-Ascend-310P":{"vir01":{"huawei.com/npu-core":1,"huawei.com/npu-cpu":1,'
    '"koordinator.sh/gpu-memory":"3Gi"},"vir02":{"huawei.com/npu-core":2,"huawei.com/npu-cpu":2,'
    '"koordinator.sh/gpu-memory":"6Gi"}}}',
    obj="ConfigMap koordinator-system/gpu-shared-resource-templates",
)


@pytest.mark.parametrize(
    ("cores", "cpus", "memory", "expected"),
    [(1, 1, "3Gi", "vir01"), (2, 2, "6Gi", "vir02"), (2, 1, "6Gi", None), (1, 1, "4Gi", None)],
)
def test_a_shared_npu_is_exactly_one_template(
    cores: int, cpus: int, memory: str, expected: str | None
) -> None:
    npu = a_gpu(0, memory="21Gi", resources=_NPU)
    devices = node_devices([npu], vendor="huawei", model="Ascend-310P")
    request = a_request(
        {
            "gpu.shared": 1,
            "huawei.com/npu-core": cores,
            "huawei.com/npu-cpu": cpus,
            "gpu-memory": memory,
        }
    )
    rules = Rules(templates=SharedTemplates(_TEMPLATES))
    found = allocate(devices, request, rules=rules)
    if expected is None:
        assert found == failures.NO_TEMPLATE
    else:
        assert not isinstance(found, Failure)
        extension = found["gpu"][0].extension
        assert extension is not None and extension.gpu_shared_resource_template == expected
    other = node_devices([npu], vendor="huawei", model="Ascend-910B")
    assert allocate(other, request, rules=rules) == failures.NO_TEMPLATE


# --- score of a device ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "requested", "expected"),
    [
        (False, 30, (3 * (100 - 80) + 80) // 4),
        (True, 30, (3 * 80 + 20) // 4),
        (False, 60, 80 // 4),  # 110 of 100: nothing for this resource
        (True, 60, 20 // 4),
    ],
)
def test_fullness_is_a_weighted_mean(most: bool, requested: int, expected: int) -> None:
    scoring = Scoring(weights={"r": 3, "m": 1, "absent": 9}, most=most)
    total, free = {"r": 100, "m": 100}, {"r": 50, "m": 80}
    assert fullness(total, free, {"r": requested}, scoring) == expected


@pytest.mark.parametrize(
    ("vendor", "model", "known"),
    [
        ("nvidia", "H100", True),
        ("", "H100", True),
        ("nvidia", "H100-80GB-HBM3", True),
        ("nvidia", "H800", True),
        ("nvidia", "H20", True),
        ("nvidia", "A100", False),
        ("huawei", "H100", False),
    ],
)
def test_eight_linked_gpus_are_divided_in_halves_quarters_and_ones(
    vendor: str, model: str, known: bool
) -> None:
    table = built_in_partitions(vendor, model)
    assert (table is not None) == known
    for size, groups in (table or {}).items():
        # All are equally good.
        (group,) = groups
        assert [each.minors for each in group] == [
            tuple(range(at, at + size)) for at in range(0, 8, size)
        ]
    assert list(table or ()) == ([1, 2, 4, 8] if known else [])
