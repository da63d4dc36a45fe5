"""GPUs, NPUs and RDMA functions over both sides.

What koordlet finds on the machine is what the manager offers and the scheduler gives out, and a
pod's containers get exactly that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from apis.device import DeviceAllocation, parse_device_allocated
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    HUAWEI_NPU_CORE,
    HUAWEI_NPU_CPU,
)
from cluster.scheduler.tables.devices.node import DeviceState
from tests.cluster.scheduler.devices.making import device_annotations, full
from tests.cluster.scheduler.with_koordlet.devices import (
    GIB,
    BothSides,
    Found,
    gpu_machines,
    npu_machines,
    rdma_functions,
    uuid_of,
)

WHOLE = 100
VIRTUAL = device_annotations(hint={"rdma": {"vfSelector": {}}})
SAME_PCIE = device_annotations(joint={"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})
Request = tuple[dict[str, str], dict[str, str]]
"""Requests with their short names, and annotations."""

gpu_requests = st.sampled_from(
    [
        ({"nvidia.com/gpu": "1"}, {}),
        ({"gpu": "200"}, {}),
        ({"gpu": "400"}, {}),
        ({"gpu": "25"}, {}),
        ({"gpu-memory": "24Gi"}, {}),
        ({"gpu-core": "50", "gpu-memory-ratio": "50"}, {}),
        ({"gpu.shared": "2", "gpu-memory-ratio": "100"}, {}),
        ({"gpu": "100", "rdma": "100"}, SAME_PCIE),
        ({"rdma": "1"}, VIRTUAL),
        ({"rdma": "200"}, {}),
    ]
)
npu_requests: st.SearchStrategy[Request] = st.sampled_from(
    [
        ({"huawei.com/npu-core": "20", "gpu-memory-ratio": "100"}, {}),
        ({"huawei.com/npu-core": "40", "gpu-memory-ratio": "200"}, {}),
        (
            {
                "gpu.shared": "1",
                "huawei.com/npu-core": "10",
                "huawei.com/npu-cpu": "3",
                "gpu-memory": "32Gi",
            },
            {},
        ),
    ]
)


def states(both: BothSides, type_: str) -> tuple[DeviceState, ...]:
    return both.view.states.get(type_, ())


@given(gpu_machines())
@settings(max_examples=20)
def test_gpus_and_nics_are_read_as_they_were_found(found: Found) -> None:
    both = BothSides(found)
    read = states(both, "gpu")
    assert [one.unit.minor for one in read] == [gpu.minor for gpu in found.gpus]
    for state, gpu in zip(read, found.gpus, strict=True):
        unit = state.unit
        assert (unit.id, unit.healthy) == (gpu.uuid, gpu.healthy)
        assert unit.total == (
            {GPU_CORE: WHOLE, GPU_MEMORY: gpu.memory_bytes, GPU_MEMORY_RATIO: WHOLE}
            if gpu.healthy
            else {}
        )
        place = found.places.get(gpu.bus_id)
        assert unit.has_topology == (place is not None)
        if place is not None:
            assert unit.switch == (place.numa_node, place.root)
    assert both.view.vendor == "nvidia"
    assert both.view.model == found.gpus[0].name.removeprefix("NVIDIA ").replace(" ", "-")
    # Halves, quarters and pairs are known of the models that have them.
    linked = not found.gpus[0].name.endswith("A10")
    assert (both.view.partitions.table is not None) == linked
    for state, nic in zip(states(both, "rdma"), found.rdma, strict=True):
        unit = state.unit
        assert (unit.minor, unit.id, unit.healthy) == (nic.minor, nic.address, nic.active)
        assert unit.switch == (nic.place.numa_node, nic.place.root)
        assert unit.functions == frozenset(nic.virtual)


@given(npu_machines())
@settings(max_examples=15)
def test_accelerators_of_files_are_read_as_the_file_says(found: Found) -> None:
    both = BothSides(found)
    for state, xpu in zip(states(both, "gpu"), found.xpus, strict=True):
        unit = state.unit
        healthy = xpu.status is None or xpu.status.healthy
        assert (unit.minor, unit.id, unit.healthy) == (xpu.minor, xpu.uuid, healthy)
        assert xpu.topology is not None
        assert unit.switch == (xpu.topology.numa_node, xpu.topology.pcie_root)
        assert unit.total == (
            {
                HUAWEI_NPU_CORE: 20,
                HUAWEI_NPU_CPU: 7,
                GPU_MEMORY: 64 * GIB,
                GPU_MEMORY_RATIO: WHOLE,
            }
            if healthy
            else {}
        )
    assert (both.view.vendor, both.view.model) == ("huawei", "Ascend-910B3")
    rules = both.view.partitions
    assert rules.table is not None and found.xpus[0].topology is not None
    assert rules.mandatory == found.xpus[0].topology.must_honor_partition
    partitions = [one for groups in rules.table.values() for group in groups for one in group]
    assert {one.minors for one in partitions} == linked(found)


def linked(found: Found) -> set[tuple[int, ...]]:
    """Return the groups of devices that are linked, each alone included, from what was found."""
    return {
        tuple(sorted({xpu.minor, *link.minors}))
        for xpu in found.xpus
        if xpu.topology is not None
        for link in xpu.topology.links
    }


@given(gpu_machines(), st.lists(gpu_requests, max_size=8), st.data())
@settings(max_examples=25)
def test_gpus_and_nics_that_are_bound_reach_the_containers(
    found: Found, arriving: list[Request], data: st.DataObject
) -> None:
    both = BothSides(found)
    for number, (requests, further) in enumerate(arriving):
        name = f"p{number}"
        if both.schedule(name, {full(key): text for key, text in requests.items()}, further):
            allocated = allocations(both, name)
            check_gpus(both, name, allocated.get("gpu", ()))
            check_rdma(both, name, allocated.get("rdma", ()))
        check_sums(both)
    if found.gpus[0].healthy:
        # A GPU that breaks later keeps its pods, and gets no new one.
        broken = (found.gpus[0]._replace(error_code="Xid79"), *found.gpus[1:])
        both.report(Found(broken, (), found.rdma, found.places))
        if both.schedule("late", {full("gpu"): "100"}, {}):
            assert [one.minor for one in allocations(both, "late")["gpu"]] != [0]
        check_sums(both)


@given(npu_machines(), st.lists(npu_requests, max_size=6))
@settings(max_examples=20)
def test_npus_that_are_bound_are_whole_groups_or_templates(
    found: Found, arriving: list[Request]
) -> None:
    both = BothSides(found)
    for number, (requests, further) in enumerate(arriving):
        name = f"p{number}"
        if not both.schedule(name, {full(k): text for k, text in requests.items()}, further):
            continue
        given_npus = allocations(both, name)["gpu"]
        minors = tuple(npu.minor for npu in given_npus)
        by_minor = {xpu.minor: xpu for xpu in found.xpus}
        for npu in given_npus:
            xpu = by_minor[npu.minor]
            assert npu.id == xpu.uuid
            assert xpu.status is None or xpu.status.healthy
        if "gpu.shared" in requests:
            (npu,) = given_npus
            assert npu.extension is not None
            assert npu.extension.gpu_shared_resource_template == "vir10_3c_32g"
        elif both.view.partitions.mandatory:
            assert minors in linked(found)
        visible = both.in_force(name)["env:NVIDIA_VISIBLE_DEVICES"]
        assert visible == ",".join(map(str, minors))
        check_sums(both)


@given(rdma_functions(), st.integers(1, 6))
@settings(max_examples=20)
def test_virtual_functions_run_out_when_each_is_given(rdma: Any, pods: int) -> None:
    both = BothSides(Found((), (), rdma))
    there = sum(len(nic.virtual) for nic in rdma if nic.active)
    bound = [
        number
        for number in range(pods)
        if both.schedule(f"p{number}", {full("rdma"): "1"}, VIRTUAL)
    ]
    assert len(bound) == min(pods, there)


def allocations(both: BothSides, name: str) -> Mapping[str, tuple[DeviceAllocation, ...]]:
    text = both.annotations[name].get(ANNOTATION_DEVICE_ALLOCATED)
    assert text is not None
    assert json.loads(text)
    return parse_device_allocated(text, obj=name)


def check_gpus(both: BothSides, name: str, gpus: tuple[DeviceAllocation, ...]) -> None:
    healthy = {gpu.minor for gpu in both.found.gpus if gpu.healthy}
    in_force = both.in_force(name)
    assert {gpu.minor for gpu in gpus} <= healthy
    nodes = {key for key in in_force if key.startswith("device:/dev/nvidia")}
    if gpus:
        visible = in_force["env:NVIDIA_VISIBLE_DEVICES"].split(",")
        assert visible == [uuid_of(gpu.minor) for gpu in gpus]
        assert nodes == {
            "device:/dev/nvidiactl",
            *(f"device:/dev/nvidia{gpu.minor}" for gpu in gpus),
        }
    else:
        assert not nodes and "env:NVIDIA_VISIBLE_DEVICES" not in in_force


def check_rdma(both: BothSides, name: str, nics: tuple[DeviceAllocation, ...]) -> None:
    found = {nic.minor: nic for nic in both.found.rdma}
    kernel = both.found.kernel()
    wanted = set()
    for nic in nics:
        assert found[nic.minor].active
        assert nic.id == found[nic.minor].address
        functions = [one.bus_id for one in nic.extension.vfs] if nic.extension else []
        assert set(functions) <= set(found[nic.minor].virtual)
        wanted |= {f"device:{kernel.rdma[one].path}" for one in functions or [nic.id]}
    if wanted:
        wanted.add("device:/dev/infiniband/rdma_cm")
    assert wanted == {key for key in both.in_force(name) if key.startswith("device:/dev/infin")}


def check_sums(both: BothSides) -> None:
    """No device is given out twice, and a new scheduler reads the same from the annotations."""
    used: dict[tuple[str, int, str], int] = {}
    functions: list[str] = []
    for name in both.annotations:
        for type_, devices in allocations(both, name).items():
            for device in devices:
                for resource, quantity in device.resources.items():
                    key = type_, device.minor, resource
                    used[key] = used.get(key, 0) + quantity.value()
                if device.extension is not None:
                    functions += [one.bus_id for one in device.extension.vfs]
    assert len(functions) == len(set(functions))
    memory = {gpu.minor: gpu.memory_bytes for gpu in both.found.gpus}
    memory |= {xpu.minor: 64 * GIB for xpu in both.found.xpus}
    for (_, minor, resource), amount in used.items():
        most = {GPU_MEMORY: memory.get(minor, 0), HUAWEI_NPU_CORE: 20, HUAWEI_NPU_CPU: 7}
        assert amount <= most.get(resource, WHOLE)
    assert both.restarted().states == both.view.states
