"""Pods whose scheduling hint asks for the devices that are recorded on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.keys import ANNOTATION_DEVICE_ALLOCATED, LABEL_GPU_MODEL, LABEL_GPU_PARTITION_POLICY
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.exact.devices import failures
from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.hinted import narrowed
from cluster.scheduler.plugins.devices.settings import Settings
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import enabled, file
from tests.cluster.scheduler.devices.clusters import a_cluster, eight, hold, texts
from tests.cluster.scheduler.devices.making import (
    SHAPES,
    a_booking,
    a_device_object,
    a_gpu,
    a_nic,
    a_shape,
    device_annotations,
    full,
    minors,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node, make_pod

_HINT = "internal.scheduling.koordinator.sh/scheduling-hint"
_FOLLOWS = Settings(follows_hints=True)
_WHOLE = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
_SHORT = ["Insufficient gpu devices"]


def _recorded(*gpus: int, resources: dict[str, str] | None = None) -> dict[str, Any]:
    return {"gpu": [{"minor": minor, "resources": resources or _WHOLE} for minor in gpus]}


def _pod(
    requests: dict[str, Any],
    recorded: dict[str, Any] | str,
    *,
    hint: dict[str, Any] | None = None,
    devices: dict[str, Any] | None = None,
) -> PodShape:
    """Return a pod. hint: beside or instead of the extension. devices: its device-allocate-hint."""
    text = recorded if isinstance(recorded, str) else json.dumps(recorded)
    hint = {"extensions": {"DeviceShare": {}}} | (hint or {})
    annotations = {_HINT: json.dumps(hint), ANNOTATION_DEVICE_ALLOCATED: text}
    annotations |= device_annotations(hint=devices)
    amounts = {full(name): str(amount) for name, amount in requests.items()}
    return SHAPES.of(make_pod("p", requests=amounts, annotations=annotations))


def test_a_pod_gets_the_devices_that_are_recorded_on_it() -> None:
    tables, devices = a_cluster(n1=eight(at=True), n2=eight()[:4], n3=eight(), n4=None)
    hold(tables, "n3", 6)
    shape = _pod({"gpu": 200}, _recorded(5, 6))
    assert texts(shape, tables, devices, _FOLLOWS) == [[], _SHORT, _SHORT, _SHORT]
    allocator = DeviceShareAllocator(devices, _FOLLOWS)
    found = allocator.allocate(shape, tables, 0, NO_ALLOCATION)
    assert isinstance(found, Allocation) and minors(found.devices) == [5, 6]
    # What kubelet would serve by itself is not what is recorded.
    counted = _pod({"nvidia.com/gpu": 2}, _recorded(5, 6))
    assert texts(counted, tables, devices, _FOLLOWS)[3] == _SHORT


@pytest.mark.parametrize(
    ("settings", "hint"),
    [(Settings(), {}), (_FOLLOWS, {"extensions": {"NodeNUMAResource": {}}})],
)
def test_recorded_devices_count_only_where_profile_and_hint_ask_for_them(
    settings: Settings, hint: dict[str, Any]
) -> None:
    tables, devices = a_cluster(n1=eight())
    shape = _pod({"gpu": 200}, _recorded(5, 6), hint=hint)
    found = DeviceShareAllocator(devices, settings).allocate(shape, tables, 0, NO_ALLOCATION)
    assert isinstance(found, Allocation) and minors(found.devices) == [0, 1]


def test_no_more_is_taken_of_a_device_than_is_recorded() -> None:
    tables, devices = a_cluster(n1=eight())
    half = {full("gpu-core"): "50", full("gpu-memory-ratio"): "50"}
    recorded = _recorded(3, resources=half)
    assert texts(_pod({"gpu": 50}, recorded), tables, devices, _FOLLOWS) == [[]]
    assert texts(_pod({"gpu": 60}, recorded), tables, devices, _FOLLOWS) == [_SHORT]


def test_a_record_of_fewer_devices_than_requested_holds_the_pod_back() -> None:
    tables, devices = a_cluster(n1=eight())
    assert texts(_pod({"gpu": 300}, _recorded(5, 6)), tables, devices, _FOLLOWS) == [_SHORT]


def test_types_that_are_not_recorded_are_chosen_freely() -> None:
    tables, devices = a_cluster(n1=[*eight(), a_nic(0), a_nic(1)])
    shape = _pod({"gpu": 100, "rdma": 100}, _recorded(7) | {"rdma": []})
    assert texts(shape, tables, devices, _FOLLOWS) == [[]]
    found = DeviceShareAllocator(devices, _FOLLOWS).allocate(shape, tables, 0, NO_ALLOCATION)
    assert isinstance(found, Allocation)
    assert (minors(found.devices), minors(found.devices, "rdma")) == ([7], [0])


def test_the_recorded_virtual_function_is_given() -> None:
    tables, devices = a_cluster(n1=[a_nic(0, functions=["0.0", "0.1"])])

    def recorded(bus_id: str) -> dict[str, Any]:
        one = {"minor": 0, "resources": {full("rdma"): "1"}}
        return {"rdma": [one | {"extension": {"vfs": [{"minor": -1, "busID": bus_id}]}}]}

    def pod(bus_id: str) -> PodShape:
        return _pod({"rdma": 1}, recorded(bus_id), devices={"rdma": {"vfSelector": {}}})

    allocator = DeviceShareAllocator(devices, _FOLLOWS)
    found = allocator.allocate(pod("0.1"), tables, 0, NO_ALLOCATION)
    assert isinstance(found, Allocation)
    extension = found.devices["rdma"][0].extension
    assert extension is not None and [one.bus_id for one in extension.vfs] == ["0.1"]
    tables.place(a_booking("other", pod("0.1"), "n1", parsed_allocation(recorded("0.1"))))
    taken = ["Insufficient rdma VirtualFunctions"]
    assert texts(pod("0.1"), tables, devices, _FOLLOWS) == [taken]
    assert texts(pod("0.0"), tables, devices, _FOLLOWS) == [[]]


def test_recorded_devices_have_to_be_what_the_node_demands() -> None:
    tables, devices = a_cluster(n1=eight())
    labels = {LABEL_GPU_MODEL: "H100", LABEL_GPU_PARTITION_POLICY: "Honor"}
    tables.upsert_node(make_node("n1", labels=labels))
    partition = ["Insufficient Partitioned GPU Devices"]
    assert texts(_pod({"gpu": 200}, _recorded(1, 2)), tables, devices, _FOLLOWS) == [partition]
    assert texts(_pod({"gpu": 200}, _recorded(2, 3)), tables, devices, _FOLLOWS) == [[]]


def test_recorded_devices_may_be_those_of_the_pods_reservation() -> None:
    tables, devices = a_cluster(n1=eight())
    tables.place(a_booking("r", a_shape({"gpu": 200}), "n1", parsed_allocation(_recorded(4, 5))))
    allocator = DeviceShareAllocator(devices, _FOLLOWS)
    shape = _pod({"gpu": 100}, _recorded(5))
    inside = allocator.allocate(shape, tables, 0, Allocation(reservation="r"))
    assert isinstance(inside, Allocation) and minors(inside.devices) == [5]
    assert not isinstance(allocator.allocate(shape, tables, 0, NO_ALLOCATION), Allocation)


def test_a_numa_policy_gets_hints_for_recorded_devices_only() -> None:
    tables, devices = a_cluster(n1=eight(at=True))
    hints = DeviceShareAllocator(devices, _FOLLOWS).hints(
        _pod({"gpu": 100}, _recorded(6)), tables, 0, (0b01, 0b10, 0b11)
    )
    assert hints is not None and set(hints) == {0b10, 0b11}


def test_a_record_that_cannot_be_read_refuses_the_pod() -> None:
    with pytest.raises(Refusal, match="device-allocated"):
        SchedulingHintNodes().check(_pod({"gpu": 100}, "{"), Tables())


def _scheduling(*plugins: str) -> Scheduling:
    points = {
        "preFilter": enabled(*plugins),
        "filter": enabled("DeviceShare"),
        "reserve": enabled("DeviceShare"),
    }
    profile = {"schedulerName": "koord-scheduler", "plugins": points}
    text = json.dumps(file(profiles=[profile]))
    tables = Tables()
    made = make_plugins(read_configuration(text, obj="test"), tables)
    for name in ("n1", "n2"):
        tables.upsert_node(make_node(name, allocatable={full("gpu"): "800"}))
        assert not made.devices.set_device(a_device_object(name, [a_gpu(n) for n in range(8)]))
    return Scheduling(tables, made.profiles, seed=1)


def _schedule(scheduling: Scheduling, name: str, shape: PodShape) -> Placed | Unplaced:
    return scheduling.schedule(
        key=f"default/{name}", uid=name, shape=shape, profile="koord-scheduler", now=1.5e9
    )


def test_a_profile_with_the_plugin_follows_the_hint() -> None:
    shape = _pod({"gpu": 100}, _recorded(6), hint={"nodeNames": ["n2"]})
    without = _schedule(_scheduling("DeviceShare"), "a", shape)
    assert isinstance(without, Placed) and minors(without.booking.allocation.devices) == [0]
    scheduling = _scheduling("SchedulingHint", "DeviceShare")
    placed = _schedule(scheduling, "a", shape)
    assert isinstance(placed, Placed) and placed.booking.node == "n2"
    assert minors(placed.booking.allocation.devices) == [6]
    again = _schedule(scheduling, "b", shape)
    assert isinstance(again, Unplaced)
    assert "1 Insufficient gpu devices" in again.diagnosis.message


def test_a_hint_narrows_what_a_reservation_holds() -> None:
    reserved = Limits(
        numa=frozenset({1}),
        required={"gpu": {0: {"a": 7, "b": 7}, 1: {"a": 3}}, "rdma": {0: {"rdma": 1}}},
        functions={("rdma", 0): frozenset({"0.0"})},
    )
    hint = Limits(
        required={"gpu": {1: {"a": 5, "b": 5}, 2: {"a": 9}}, "fpga": {0: {"fpga": 1}}},
        functions={("rdma", 1): frozenset({"1.0"})},
    )
    assert narrowed(reserved, hint) == Limits(
        numa=frozenset({1}),
        required={
            "gpu": {1: {"a": 3, "b": 0}},
            "rdma": {0: {"rdma": 1}},
            "fpga": {0: {"fpga": 1}},
        },
        functions={("rdma", 1): frozenset({"1.0"})},
    )
    assert narrowed(reserved, NO_LIMITS) is reserved


def test_devices_are_chosen_for_pods_that_no_kubelet_serves() -> None:
    _, devices = a_cluster(n1=None)
    allocator = DeviceShareAllocator(devices)
    assert allocator.choose(a_shape({"cpu": 1}), 0) == {}
    assert allocator.choose(a_shape({"nvidia.com/gpu": 1}), 0) == {}
    assert allocator.choose(a_shape({"gpu": 100}), 0) == failures.NO_DEVICES["gpu"]
    counted = _pod({"nvidia.com/gpu": 1}, _recorded(0))
    assert allocator.choose(counted, 0) == {}
    follows = DeviceShareAllocator(devices, _FOLLOWS)
    assert follows.choose(counted, 0) == failures.NO_DEVICES["gpu"]
