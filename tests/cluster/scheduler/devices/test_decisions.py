"""Whole decisions of DeviceShare: reservations, NUMA nodes, templates, the other plugins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apis.device import parse_device_allocated
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    LABEL_GPU_MODEL,
    LABEL_GPU_VENDOR,
)
from cluster.scheduler.configuration.arguments import ResourceSpec
from cluster.scheduler.configuration.koordinator_arguments import (
    AllocationStrategy,
    DeviceShareArgs,
    GPUShareUnsupportedModel,
    ScoringStrategy,
)
from cluster.scheduler.cycle.scheduling import Placed, Unplaced
from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.exact.devices.records import (
    device_allocated,
)
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter
from cluster.scheduler.plugins.devices.settings import Settings, settings_of
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices.clusters import (
    a_cluster,
    a_scheduling,
    eight,
    schedule,
    texts,
)
from tests.cluster.scheduler.devices.making import (
    a_booking,
    a_device_object,
    a_gpu,
    a_shape,
    full,
    minors,
    parsed_allocation,
)


def test_pods_fill_all_gpus_and_no_more() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight(at=True), n3=None)
    scheduling = a_scheduling(tables, devices)
    given_out: list[tuple[str, int]] = []
    for number in range(8):
        placed = schedule(scheduling, f"p{number}", a_shape({"gpu": 200}))
        assert isinstance(placed, Placed)
        text = placed.recorded.annotations[ANNOTATION_DEVICE_ALLOCATED]
        assert text is not None
        allocated = parse_device_allocated(text, obj="Pod")
        assert allocated == placed.booking.allocation.devices
        given_out += [(placed.booking.node, gpu.minor) for gpu in allocated["gpu"]]
    assert len(set(given_out)) == 16
    refused = schedule(scheduling, "p8", a_shape({"gpu": 200}))
    assert isinstance(refused, Unplaced)
    tables.remove("p3")
    assert isinstance(schedule(scheduling, "p9", a_shape({"gpu": 200})), Placed)


def test_an_owner_takes_what_its_reservation_holds_first() -> None:
    tables, devices = a_cluster(n1=eight())
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    held = parsed_allocation({"gpu": [{"minor": 5, "resources": resources}]})
    tables.place(a_booking("r", a_shape({"gpu": 100}), "n1", held))
    allocator = DeviceShareAllocator(devices)
    shape = a_shape({"gpu": 100})
    owned = allocator.allocate(shape, tables, 0, Allocation(reservation="r"))
    assert isinstance(owned, Allocation) and minors(owned.devices) == [5]
    stranger = allocator.allocate(shape, tables, 0, NO_ALLOCATION)
    assert isinstance(stranger, Allocation) and minors(stranger.devices) == [0]


def test_devices_come_from_the_pods_numa_nodes() -> None:
    tables, devices = a_cluster(n1=eight(at=True))
    shape = a_shape({"gpu": 100})
    on_one = Allocation(numa=((1, {"cpu": 4000}),))
    aligned = DeviceShareAllocator(devices).allocate(shape, tables, 0, on_one)
    assert isinstance(aligned, Allocation) and minors(aligned.devices) == [4]
    assert aligned.numa == on_one.numa
    free = DeviceShareAllocator(devices, Settings(align=False))
    anywhere = free.allocate(shape, tables, 0, on_one)
    assert isinstance(anywhere, Allocation) and minors(anywhere.devices) == [0]


class _Reserved(Restoring):
    """Two reservations on the first node that every pod may use."""

    def rows(self, pod: PodShape, tables: Tables) -> NDArray[np.int64]:
        return np.array([0])

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        return ("unknown", "r")


def test_what_is_reserved_for_a_pod_does_not_hold_its_node_back() -> None:
    tables, devices = a_cluster(n1=eight()[:1], n2=eight()[:1], n3=[])
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    held = parsed_allocation({"gpu": [{"minor": 0, "resources": resources}]})
    for uid, node in (("r", "n1"), ("s", "n2")):
        tables.place(a_booking(uid, a_shape({"gpu": 100}), node, held))
    rows = slice(0, 3)
    shape = a_shape({"gpu": 100})
    alone = DeviceShareFilter(devices).filter(shape, tables, rows)
    assert (alone != 0).tolist() == [True, True, True]
    beside = DeviceShareFilter(devices, restored=_Reserved()).filter(shape, tables, rows)
    assert (beside != 0).tolist() == [False, True, True]
    two = DeviceShareFilter(devices, restored=_Reserved())
    assert two.filter(a_shape({"gpu": 200}), tables, rows).all()


def test_hints_for_the_numa_policy() -> None:
    tables, devices = a_cluster(n1=eight(at=True), n2=eight(), n3=None)
    provider = DeviceShareAllocator(devices)
    shape = a_shape({"gpu": 400})
    sets = (0b01, 0b10, 0b11, 0b100, 0b101)
    hints = [provider.hints(shape, tables, row, sets) for row in range(3)]
    assert hints[0] is not None and set(hints[0]) == {0b01, 0b10, 0b11, 0b101}
    assert [mask for mask, hint in hints[0].items() if hint.preferred] == [0b01, 0b10, 0b101]
    assert hints[1:] == [None, None]
    assert provider.hints(a_shape({"cpu": 1}), tables, 0, sets) is None
    free = DeviceShareAllocator(devices, Settings(align=False))
    assert free.hints(shape, tables, 0, sets) is None


def test_templates_come_from_the_table() -> None:
    tables, devices = a_cluster(n1=[])
    npu = a_gpu(0, memory="21Gi", resources={"huawei.com/npu-core": "8"})
    labels = {LABEL_GPU_VENDOR: "huawei", LABEL_GPU_MODEL: "Ascend-310P"}
    devices.set_device(a_device_object("n1", [npu], labels=labels))
    shape = a_shape({"huawei.com/npu-core": 2, "gpu-memory-ratio": 25})
    assert texts(shape, tables, devices) == [["no matched GPU shared resource template"]]
    version = tables.nodes.version
    amounts = {"huawei.com/npu-core": 2, full("gpu-memory-ratio"): 25}
    devices.set_templates({"huawei-Ascend-310P": {"vir02": amounts}})
    assert tables.nodes.version > version
    assert texts(shape, tables, devices) == [[]]
    found = DeviceShareAllocator(devices).choose(shape, 0)
    assert '"gpuSharedResourceTemplate":"vir02"' in device_allocated(found)  # type: ignore[arg-type]


def test_arguments_become_settings() -> None:
    arguments = DeviceShareArgs(
        scoring_strategy=ScoringStrategy(
            type=AllocationStrategy.MOST_ALLOCATED, resources=(ResourceSpec(name="r", weight=3),)
        ),
        disable_device_numa_topology_alignment=True,
        gpu_share_unsupported_models=(GPUShareUnsupportedModel(vendor="v", model="m"),),
    )
    assert settings_of(arguments, adaption=True) == Settings(
        scoring=Scoring({"r": 3}, most=True),
        unshareable=(("v", "m"),),
        align=False,
        adaption=True,
    )
    assert settings_of(DeviceShareArgs()) == Settings()
