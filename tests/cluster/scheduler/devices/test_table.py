"""The device table: what bookings leave of devices, through any order of events."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.keys import (
    ANNOTATION_GPU_PARTITIONS,
    LABEL_GPU_MODEL,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
)
from apis.quantity import parse_quantity
from cluster.scheduler.exact.devices.allocate import allocate
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.tables.devices.columns import NO_SEGMENT
from cluster.scheduler.tables.devices.inventory import (
    DeviceUnit,
    FunctionGroup,
    NodeInventory,
    device_amounts,
    read_inventory,
    without_health,
)
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from cluster.scheduler.tables.devices.table import NO_SLOT, DeviceTable
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices.making import (
    GIB,
    a_booking,
    a_device,
    a_device_object,
    a_gpu,
    a_nic,
    a_shape,
    full,
    minors,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node

CORE, MEMORY, RATIO = full("gpu-core"), full("gpu-memory"), full("gpu-memory-ratio")


def a_table(*nodes: str) -> tuple[Tables, DeviceTable]:
    tables = Tables()
    devices = DeviceTable(tables.nodes)
    tables.add_part(devices)
    for name in nodes:
        tables.upsert_node(make_node(name))
    return tables, devices


def gpu(minor: int, **resources: int | str) -> dict[str, Any]:
    return {
        "minor": minor,
        "resources": {full(name.replace("_", "-")): str(a) for name, a in resources.items()},
    }


def free_of(devices: DeviceTable, row: int, type_: str = "gpu") -> dict[int, dict[str, int]]:
    view = devices.view(row)
    assert view is not None
    return {state.unit.minor: dict(state.free) for state in view.states[type_]}


def columns_of(devices: DeviceTable) -> dict[str, Any]:
    """Return every column that bookings change."""
    return {
        f"{type_}.{name}": getattr(columns, name).tolist()
        for type_, columns in devices.columns.items()
        for name in ("free", "holders", "closed", "unattributed")
    }


def all_columns_of(devices: DeviceTable) -> dict[str, Any]:
    """Return every column, with those that Device objects alone change."""
    return columns_of(devices) | {
        f"{type_}.{name}": getattr(columns, name).tolist()
        for type_, columns in devices.columns.items()
        for name in ("present", "total", "free_functions", "numa", "pcie", "unknown_switch")
    }


def test_bookings_take_from_devices_and_give_back() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0), a_gpu(1)]))
    before = columns_of(devices)
    shape = a_shape({"gpu": 50})
    allocation = parsed_allocation({"gpu": [gpu(1, gpu_core=50, gpu_memory_ratio=50)]})
    tables.place(a_booking("a", shape, "n1", allocation))
    assert free_of(devices, 0)[1] == {CORE: 50, RATIO: 50, MEMORY: 40 * GIB}
    tables.place(a_booking("a", shape, "n1", allocation))  # the same pod, confirmed
    assert free_of(devices, 0)[1] == {CORE: 50, RATIO: 50, MEMORY: 40 * GIB}
    tables.remove("a")
    assert columns_of(devices) == before


def test_two_pods_of_one_name_are_booked_both() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0), a_gpu(1)]))
    shape = a_shape({"gpu": 100})
    for uid, minor in (("old", 0), ("new", 1)):
        allocation = parsed_allocation({"gpu": [gpu(minor, gpu_core=100, gpu_memory_ratio=100)]})
        booking = a_booking(uid, shape, "n1", allocation)
        tables.place(type(booking)("default/web-0", uid, shape, "n1", booking.allocation))
    tables.remove("old")
    assert free_of(devices, 0)[0][CORE] == 100 and free_of(devices, 0)[1][CORE] == 0


def test_old_resource_names_of_an_allocation_count() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0)]))
    old = {"gpu": [{"minor": 0, "resources": {"kubernetes.io/gpu-memory-ratio": "25"}}]}
    tables.place(a_booking("a", a_shape({"gpu": 25}), "n1", parsed_allocation(old)))
    assert free_of(devices, 0)[0] == {CORE: 100, RATIO: 75, MEMORY: 60 * GIB}


def test_a_device_may_come_after_its_node_and_its_pods() -> None:
    tables, devices = a_table()
    allocation = parsed_allocation({"gpu": [gpu(0, gpu_core=100, gpu_memory_ratio=100)]})
    tables.place(a_booking("a", a_shape({"gpu": 100}), "n1", allocation))
    tables.upsert_node(make_node("n1"))
    assert devices.view(0) is None
    devices.set_device(a_device_object("n1", [a_gpu(0), a_gpu(1)]))
    assert [free[CORE] for free in free_of(devices, 0).values()] == [0, 100]


def test_a_deleted_device_gives_nothing_and_keeps_its_bookings() -> None:
    tables, devices = a_table("n1", "n2")
    device = a_device_object("n1", [a_gpu(0), a_gpu(1)])
    devices.set_device(device)
    allocation = parsed_allocation({"gpu": [gpu(0, gpu_core=100, gpu_memory_ratio=100)]})
    tables.place(a_booking("a", a_shape({"gpu": 100}), "n1", allocation))
    before = columns_of(devices)
    version = tables.nodes.version
    devices.delete_device("n1")
    assert tables.nodes.version > version  # what was decided about the node is decided again
    view = devices.view(0)
    assert view is not None and not any(state.unit.healthy for state in view.states["gpu"])
    devices.set_device(device)
    assert columns_of(devices) == before
    devices.delete_device("n1")
    tables.delete_node("n1")
    tables.upsert_node(make_node("n3"))  # takes the row
    assert devices.slots(slice(0, 2)).tolist() == [NO_SLOT, NO_SLOT]


def test_a_row_that_is_used_again_has_the_new_nodes_devices() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0)]))
    devices.set_device(a_device_object("n2", [a_gpu(3)]))
    tables.delete_node("n1")
    tables.upsert_node(make_node("n2"))
    assert list(free_of(devices, 0)) == [3]


def test_a_slot_serves_another_node_once_node_and_device_are_gone() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", NODE))
    exclusive = a_shape({"rdma": 1}, hint={"rdma": {"exclusivePolicy": "PCIeLevel"}})
    nic = {
        "minor": 1,
        "resources": {full("rdma"): "1"},
        "extension": {"vfs": [{"minor": -1, "busID": "1.0"}]},
    }
    tables.place(a_booking("a", exclusive, "n1", parsed_allocation({"rdma": [nic]})))
    tables.place(a_booking("b", a_shape({"gpu": 100}), "n1", {}))
    held = all_columns_of(devices)
    assert devices.columns["rdma"].closed[0].any() and devices.columns["gpu"].unattributed[0]
    tables.delete_node("n1")
    devices.delete_device("n1")
    devices.delete_device("n1")
    devices.set_templates({})
    tables.upsert_node(make_node("n2"))
    small = a_device_object("n2", [a_gpu(5, at=(0, "A"))])
    devices.set_device(small)
    _, fresh = a_table("n2")
    fresh.set_device(small)
    assert all_columns_of(devices) == all_columns_of(fresh)
    assert devices.slots(slice(0, 1)).tolist() == [0]
    # What waits for the first node counts when it comes back, and its Device after it.
    tables.delete_node("n2")
    devices.delete_device("n2")
    tables.upsert_node(make_node("n1"))
    assert devices.view(0) is None and devices.holding(0, {}) == {}
    devices.set_device(a_device_object("n1", NODE))
    assert all_columns_of(devices) == held


def test_columns_say_where_devices_are_and_what_functions_they_have() -> None:
    _, devices = a_table("n1")
    devices.set_device(
        a_device_object(
            "n1",
            [
                a_gpu(3, at=(1, "B"), memory="2Gi"),
                a_gpu(7, labels={"model": "x"}),
                a_nic(0, at=(1, "A"), functions=["0.1", "0.0"]),
                a_nic(2, at=(0, "B"), functions=["2.0"]),
            ],
        )
    )
    gpus, nics = devices.columns["gpu"], devices.columns["rdma"]
    assert gpus.minor[0, :3].tolist() == [3, 7, 0]
    assert gpus.present[0].tolist() == [True, True, *[False] * (gpus.present.shape[1] - 2)]
    assert gpus.total[0, 0].tolist() == [
        {CORE: 100, MEMORY: 2 * GIB, RATIO: 100}.get(name, 0) for name in gpus.resources
    ]
    assert gpus.label_sets[gpus.labels[0, 1]] == {"model": "x"}
    # Parts are numbered over all types; a device without topology is in none.
    assert gpus.numa[0, :3].tolist() == [2, NO_SEGMENT, NO_SEGMENT]
    assert gpus.pcie[0, :3].tolist() == [3, NO_SEGMENT, NO_SEGMENT]
    assert nics.numa[0, :3].tolist() == [2, 1, NO_SEGMENT]
    assert nics.pcie[0, :3].tolist() == [2, 1, NO_SEGMENT]
    assert nics.free_functions[0, :3].tolist() == [2, 1, 0]
    assert gpus.unknown_switch[0] and not nics.unknown_switch[0]


def test_partition_rules_follow_the_device_and_the_labels_of_the_node() -> None:
    tables, devices = a_table("n1")

    def rules() -> tuple[bool, bool]:
        """Return whether there are partitions, and whether they are mandatory."""
        (slot,) = devices.slots(slice(0, 1)).tolist()
        found = devices.rules(slot)
        view = devices.view(0)
        assert view is not None and view.partitions == found
        return found.table is not None, found.mandatory

    plain = a_device_object("n1", [a_gpu(0)])
    devices.set_device(plain)
    assert rules() == (False, False)
    model = {LABEL_GPU_VENDOR: "nvidia", LABEL_GPU_MODEL: "H100"}
    tables.upsert_node(make_node("n1", labels=model))
    assert rules() == (True, False)
    tables.upsert_node(make_node("n1", labels=model | {LABEL_GPU_PARTITION_POLICY: "Honor"}))
    assert rules() == (True, True)
    unreadable = {ANNOTATION_GPU_PARTITIONS: "[1"}
    devices.set_device(a_device_object("n1", [a_gpu(0)], annotations=unreadable))
    assert rules() == (False, False)
    devices.set_device(
        a_device_object(
            "n1",
            [a_gpu(0)],
            annotations=unreadable,
            labels={LABEL_GPU_PARTITION_POLICY: "Honor"},
        )
    )
    assert rules() == (False, True)
    devices.set_device(plain)
    assert rules() == (True, True)


def test_a_bad_device_costs_itself_only() -> None:
    _, devices = a_table("n1")
    good = a_gpu(0)
    bad: list[dict[str, Any]] = [
        {"type": "gpu", "health": True},
        a_gpu(-1),
        a_gpu(0, memory="1Gi"),
        a_gpu(2, memory="-1Gi"),
        {"type": "tpu", "minor": 9, "health": True},
    ]
    errors = devices.set_device(
        a_device_object("n1", [good, *bad, a_gpu(1)], annotations={ANNOTATION_GPU_PARTITIONS: "[1"})
    )
    assert list(free_of(devices, 0)) == [0, 1]
    text = [str(error) for error in errors]
    assert len(text) == 5 and all("Device n1" in one for one in text)
    for part in (".minor", "must not be negative", "another gpu", ANNOTATION_GPU_PARTITIONS):
        assert any(part in one for one in text), part


def test_no_node_makes_the_columns_of_all_nodes_wide() -> None:
    _, devices = a_table("n1")
    errors = devices.set_device(a_device_object("n1", [a_gpu(n) for n in range(500)]))
    assert len(errors) == 500 - 64
    assert devices.columns["gpu"].present.shape[1] == 64


def test_many_nodes_with_devices_keep_their_columns_apart() -> None:
    _, devices = a_table(*(f"n{n}" for n in range(100)))
    for number in range(0, 100, 3):
        devices.set_device(a_device_object(f"n{number}", [a_gpu(m) for m in range(number % 12)]))
    slots = devices.slots(slice(0, 100))
    for number in range(100):
        if number % 3:
            assert slots[number] == NO_SLOT
        else:
            count = np.count_nonzero(devices.columns["gpu"].present[slots[number]])
            assert count == number % 12


# --- reservations ------------------------------------------------------------------------------


def test_a_reservation_and_its_owner_count_once() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0), a_gpu(1)]))
    half = {"gpu": [gpu(0, gpu_core=50, gpu_memory_ratio=50)]}
    shape = a_shape({"gpu": 50})
    tables.place(a_booking("r", shape, "n1", parsed_allocation(half)))
    part = {"gpu": [gpu(0, gpu_core=20, gpu_memory_ratio=20)]}
    owner = a_booking("o", a_shape({"gpu": 20}), "n1", parsed_allocation(part), reservation="r")
    tables.place(owner)
    assert free_of(devices, 0)[0][RATIO] == 50  # for strangers the whole reservation is taken
    left = devices.remainder(0, "r")
    assert left["gpu"][0] == {CORE: 30, RATIO: 30, MEMORY: 24 * GIB}
    seen_by_owners = devices.view(0, without={"r"})
    assert seen_by_owners is not None and seen_by_owners.states["gpu"][0].free[RATIO] == 80
    tables.remove("r")
    assert free_of(devices, 0)[0][RATIO] == 80
    tables.place(a_booking("r", shape, "n1", parsed_allocation(half)))
    tables.remove("o")
    assert free_of(devices, 0)[0][RATIO] == 50
    assert devices.remainder(0, "r")["gpu"][0][RATIO] == 50


def test_victims_count_as_free_in_a_view() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0)]))
    whole = parsed_allocation({"gpu": [gpu(0, gpu_core=100, gpu_memory_ratio=100)]})
    shape = a_shape({"gpu": 100})
    tables.place(a_booking("victim", shape, "n1", whole))
    request = shape.derived(device_request)
    assert isinstance(request, DeviceRequest)
    for without, expected in ((set(), "Insufficient gpu devices"), ({"victim"}, [0])):
        view = devices.view(0, without=without)
        assert view is not None and minors(allocate(view, request)) == expected


# --- properties ----------------------------------------------------------------------------------

REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gpu": 100}, {}),
    ({"gpu": 30}, {}),
    ({"gpu": 200}, {}),
    ({"gpu-memory": "17Gi"}, {}),
    ({"gpu-memory": 1}, {}),
    ({"gpu.shared": 2, "gpu-memory-ratio": 66}, {}),
    ({"gpu-memory-ratio": 100}, {"partition": {}}),
    ({"gpu": 100, "rdma": 1}, {"joint": {"deviceTypes": ["gpu", "rdma"]}}),
    ({"rdma": 1}, {"hint": {"rdma": {"vfSelector": {}}}}),
    ({"rdma": 50}, {}),
    ({"rdma": 1}, {"hint": {"rdma": {"exclusivePolicy": "PCIeLevel"}}}),
    ({"rdma": 1}, {"hint": {"rdma": {"allocateStrategy": "ApplyForAll"}}}),
]
NODE = [
    *(a_gpu(n, at=(n // 2, "AB"[n // 2]), memory="80Gi" if n else "7777777777") for n in range(4)),
    *(a_nic(n, at=(n // 2, "AB"[n // 2]), functions=[f"{n}.1", f"{n}.0"]) for n in range(4)),
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, len(REQUESTS) - 1)),
        st.tuples(st.just("remove"), st.integers(0, 20)),
        st.tuples(st.just("sick"), st.integers(0, len(NODE))),
    ),
    max_size=24,
)


@given(STEPS)
def test_no_device_is_given_twice_and_the_columns_equal_a_rebuild(
    steps: list[tuple[str, int]],
) -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", NODE))
    current = NODE
    placed: list[str] = []
    for number, (step, choice) in enumerate(steps):
        if step == "place":
            requests, extra = REQUESTS[choice]
            shape = a_shape(requests, **extra)
            request = shape.derived(device_request)
            view = devices.view(0)
            assert view is not None and isinstance(request, DeviceRequest)
            found = allocate(view, request)
            if not isinstance(found, Failure):
                tables.place(a_booking(f"p{number}", shape, "n1", found))
                placed.append(f"p{number}")
                _nothing_is_overbooked(tables, current)
        elif step == "remove" and placed:
            tables.remove(placed.pop(choice % len(placed)))
        elif step == "sick":
            current = [
                {**device, "health": False} if index == choice else device
                for index, device in enumerate(NODE)
            ]
            devices.set_device(a_device_object("n1", current))
        _columns_equal_the_view(devices)
    rebuilt_tables, rebuilt = a_table("n1")
    for booking in reversed(list(tables.bookings.values())):
        rebuilt_tables.place(booking)
    rebuilt.set_device(a_device_object("n1", current))
    assert columns_of(rebuilt) == columns_of(devices)
    for uid in placed:
        tables.remove(uid)
    _, empty = a_table("n1")
    empty.set_device(a_device_object("n1", current))
    assert columns_of(devices) == columns_of(empty)


def _nothing_is_overbooked(tables: Tables, current: list[dict[str, Any]]) -> None:
    """Add up what the allocations say, without the table."""
    held: dict[tuple[str, int, str], int] = {}
    functions: list[tuple[str, int, str]] = []
    for booking in tables.bookings.values():
        for type_, allocated in booking.allocation.devices.items():
            for one in allocated:
                for name, amount in one.resources.items():
                    key = type_, one.minor, name
                    held[key] = held.get(key, 0) + amount.value()
                if one.extension is not None:
                    functions += [(type_, one.minor, vf.bus_id) for vf in one.extension.vfs]
    assert len(functions) == len(set(functions))
    capacity = {
        (device["type"], device["minor"], name): amount
        for device in current
        for name, amount in device["resources"].items()
    }
    for key, total in held.items():
        assert total <= parse_quantity(capacity[key]).value(), key


def _columns_equal_the_view(devices: DeviceTable) -> None:
    view = devices.view(0)
    assert view is not None
    for type_, states in view.states.items():
        columns = devices.columns[type_]
        for index, state in enumerate(states):
            for name, amount in state.free.items():
                assert columns.free[0, index, columns.column[name]] == amount
            assert bool(columns.holders[0, index]) == state.used
            assert bool(columns.closed[0, index]) == state.closed


def test_a_pod_without_an_annotation_keeps_devices_free() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(n) for n in range(4)]))
    tables.place(a_booking("a", a_shape({"nvidia.com/gpu": 3}), "n1", {}))
    assert devices.columns["gpu"].unattributed[0] == 3
    view = devices.view(0)
    assert view is not None and view.unattributed == {"gpu": 3}
    tables.remove("a")
    assert devices.columns["gpu"].unattributed[0] == 0


@pytest.mark.parametrize("minor", [7, 2**31 - 1])
def test_an_allocation_of_an_unknown_minor_takes_nothing(minor: int) -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0)]))
    before = columns_of(devices)
    allocation = parsed_allocation({"gpu": [gpu(minor, gpu_core=100)], "tpu": [{"minor": 0}]})
    tables.place(a_booking("a", a_shape({"gpu": 100}), "n1", allocation))
    assert columns_of(devices) == before
    tables.remove("a")
    assert columns_of(devices) == before


def test_label_sets_that_no_device_has_are_dropped() -> None:
    _, devices = a_table("n1")
    for number in range(3000):
        devices.set_device(a_device_object("n1", [a_gpu(0, labels={"serial": str(number)})]))
    columns = devices.columns["gpu"]
    assert len(columns.label_sets) < 1100
    assert columns.label_sets[columns.labels[0, 0]] == {"serial": "2999"}
    assert json.dumps(columns.label_sets[0]) == "{}"


def test_an_allocation_of_a_device_of_unknown_memory_holds_what_it_says() -> None:
    _, devices = a_table("n1")
    gpu_without_memory = a_device("gpu", 0, {"gpu-core": "100", "gpu-memory-ratio": "100"})
    devices.set_device(a_device_object("n1", [gpu_without_memory, a_gpu(1)]))
    for at, amounts, held in (
        (0, {"gpu_memory_ratio": 100}, {RATIO: 100}),
        (0, {"gpu_memory": 7}, {MEMORY: 7}),
        (1, {"gpu_memory_ratio": 50}, {RATIO: 50, MEMORY: 40 * GIB}),
        (1, {"gpu_memory": 20 * GIB}, {RATIO: 25, MEMORY: 20 * GIB}),
        (1, {"gpu_memory": 20 * GIB, "gpu_memory_ratio": 1}, {RATIO: 1, MEMORY: 20 * GIB}),
        (1, {"gpu_core": 0}, {}),
        (9, {"gpu_memory_ratio": 100}, {RATIO: 100}),
    ):
        allocation = parsed_allocation({"gpu": [gpu(at, **amounts)]})
        found = devices.holding(0, allocation)
        assert {place: dict(share.amounts) for place, share in found.items()} == {("gpu", at): held}
    # Two parts of one device are added up.
    twice = parsed_allocation({"gpu": [gpu(1, gpu_core=20), gpu(1, gpu_core=30)]})
    assert devices.holding(0, twice)["gpu", 1].amounts == {CORE: 50}


def test_a_device_object_as_a_whole() -> None:
    inventory, errors = read_inventory(
        a_device_object(
            "n1",
            [
                a_gpu(1, at=(1, "B"), labels={"model": "x"}),
                a_gpu(0, health=False),
                a_nic(3, at=(0, ""), functions=["3.1", "3.0"]),
                {"type": "tpu", "minor": 0, "health": True},
            ],
            labels={
                LABEL_GPU_VENDOR: "nvidia",
                LABEL_GPU_MODEL: "H100",
                LABEL_GPU_PARTITION_POLICY: "Honor",
            },
        )
    )
    assert errors == ()
    assert inventory == NodeInventory(
        units={
            "gpu": (
                DeviceUnit(
                    type="gpu",
                    minor=0,
                    id="GPU-0",
                    healthy=False,
                    total={},
                    has_topology=False,
                    numa=-1,
                    pcie="",
                    labels={},
                    function_groups=(),
                ),
                DeviceUnit(
                    type="gpu",
                    minor=1,
                    id="GPU-1",
                    healthy=True,
                    total={CORE: 100, MEMORY: 80 * GIB, RATIO: 100},
                    has_topology=True,
                    numa=1,
                    pcie="B",
                    labels={"model": "x"},
                    function_groups=(),
                ),
            ),
            "rdma": (
                DeviceUnit(
                    type="rdma",
                    minor=3,
                    id="mlx-3",
                    healthy=True,
                    total={full("rdma"): 100},
                    has_topology=True,
                    numa=0,
                    pcie="",
                    labels={},
                    function_groups=(FunctionGroup({"type": "fast"}, (("3.0", -1), ("3.1", -1))),),
                ),
            ),
        },
        vendor="nvidia",
        model="H100",
        partitions=None,
        partitions_unreadable=False,
        partition_policy="Honor",
    )
    (gpu_0, gpu_1), (nic,) = inventory.units["gpu"], inventory.units["rdma"]
    assert (gpu_0.switch, gpu_1.switch, nic.switch) == (None, (1, "B"), None)
    assert nic.functions == {"3.0", "3.1"}
    gone = without_health(inventory)
    assert not any(unit.healthy or unit.total for units in gone.units.values() for unit in units)
    assert replace(gone, units=inventory.units) == inventory


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"type": "gpu", "health": True}, ".minor = '(absent)': a device needs a minor number"),
        (a_gpu(-1), ".minor = '-1': must not be negative"),
        (a_gpu(0), ".minor = '0': another gpu device has this minor number"),
        (a_gpu(1, memory="-1Gi"), f".resources.{MEMORY} = '-1Gi': must not be negative"),
    ],
)
def test_a_device_that_cannot_be_used_is_named(device: dict[str, Any], message: str) -> None:
    _, errors = read_inventory(a_device_object("n1", [a_gpu(0), device]))
    assert [str(error) for error in errors] == [f"Device n1: spec.devices[1]{message}"]


def test_an_old_name_of_an_amount_counts_where_the_present_one_is_absent() -> None:
    old = "kubernetes.io/gpu-memory-ratio"
    both = device_amounts({old: parse_quantity("5"), RATIO: parse_quantity("7")})
    assert both == {RATIO: 7}
    assert device_amounts({old: parse_quantity("5")}) == {RATIO: 5}


def test_devices_wait_for_a_node_that_comes_back() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_gpu(0)]))
    tables.delete_node("n1")
    tables.upsert_node(make_node("n2"))
    assert devices.view(0) is None
    tables.upsert_node(make_node("n1"))
    assert list(free_of(devices, 1)) == [0]
    assert devices.slots(slice(0, 2)).tolist() == [NO_SLOT, 0]


def test_only_the_switch_of_an_exclusive_pod_is_closed() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", NODE))
    exclusive = a_shape({"rdma": 1}, hint={"rdma": {"exclusivePolicy": "PCIeLevel"}})
    nic = {"minor": 1, "resources": {full("rdma"): "1"}}
    tables.place(a_booking("a", exclusive, "n1", parsed_allocation({"rdma": [nic]})))
    view = devices.view(0)
    assert view is not None
    assert [state.closed for state in view.states["rdma"]] == [True, True, False, False]
    assert not any(state.closed for state in view.states["gpu"])
    assert devices.columns["rdma"].closed[0, :4].tolist() == [1, 1, 0, 0]
    tables.remove("a")
    assert not devices.columns["rdma"].closed.any()


def test_a_reservation_and_an_owner_with_other_devices_hold_both() -> None:
    tables, devices = a_table("n1")
    devices.set_device(a_device_object("n1", [a_nic(n, functions=[f"{n}.0"]) for n in range(3)]))

    def nics(*minors: int) -> Any:
        return parsed_allocation(
            {
                "rdma": [
                    {
                        "minor": minor,
                        "resources": {full("rdma"): "10"},
                        "extension": {"vfs": [{"minor": -1, "busID": f"{minor}.0"}]},
                    }
                    for minor in minors
                ]
            }
        )

    shape = a_shape({"rdma": 10})
    tables.place(a_booking("r", shape, "n1", nics(0, 1)))
    tables.place(a_booking("o", shape, "n1", nics(1, 2), reservation="r"))
    view = devices.view(0)
    assert view is not None
    assert {
        state.unit.minor: (state.used, set(state.functions_used)) for state in view.states["rdma"]
    } == {0: (True, {"0.0"}), 1: (True, {"1.0"}), 2: (True, {"2.0"})}
    assert list(free_of(devices, 0, "rdma").values()) == [{full("rdma"): 90}] * 3
    assert devices.columns["rdma"].free_functions[0, :3].tolist() == [0, 0, 0]
    assert {minor: dict(left) for minor, left in devices.remainder(0, "r")["rdma"].items()} == {
        0: {full("rdma"): 10},
        1: {full("rdma"): 0},
    }
    tables.remove("r")
    assert list(devices.columns["rdma"].free_functions[0, :3]) == [1, 0, 0]
