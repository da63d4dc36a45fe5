"""Both sides of the annotation device-allocated: the scheduler writes it, koordlet reads it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.device import parse_device_allocated
from apis.keys import ANNOTATION_DEVICE_ALLOCATED, LABEL_GPU_ISOLATION_PROVIDER
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.tables import Tables
from hooks.compat import GPU_MINOR_NUMBERS
from hooks.facts import KernelFacts
from hooks.policies import gpu_env, rdma_device
from linux.resources import DeviceNode
from tests.cluster.scheduler.devices.making import a_booking, a_device_object, a_gpu, a_nic, a_shape
from tests.cluster.scheduler.making import make_node
from tests.hooks.making import a_container, a_pod, decide, node, values

GIB = 1 << 30
HAMI = {LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"}
KERNEL = KernelFacts(
    gpus={n: DeviceNode(f"/dev/nvidia{n}", "c", 195, n, 0o666) for n in range(8)},
)


class Machine:
    """A node whose pods are scheduled and then started."""

    def __init__(self, devices: list[dict[str, Any]]) -> None:
        self.tables = Tables()
        self.devices = DeviceTable(self.tables.nodes)
        self.tables.add_part(self.devices)
        self.tables.upsert_node(make_node("n1"))
        self.devices.set_device(a_device_object("n1", devices))

    def start(
        self,
        name: str,
        requests: dict[str, Any],
        *,
        labels: dict[str, str] | None = None,
        compat: set[str] | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """Return what koordlet gives the container of a pod that was placed here."""
        shape = a_shape(requests, labels=labels, **extra)
        allocator = DeviceShareAllocator(self.devices)
        found = allocator.choose(shape, 0)
        assert not isinstance(found, Failure), found
        booking = a_booking(name, shape, "n1", found)
        self.tables.place(booking)
        written = allocator.record(booking, self.tables).annotations
        pod = a_pod("LS", name=name, labels=labels, annotations=written)
        inputs = node(kernel=KERNEL, compat=compat or ())
        return values(decide(a_container(pod), inputs, gpu_env.POLICY, rdma_device.POLICY))


def test_the_minors_reach_the_environment() -> None:
    machine = Machine([a_gpu(minor) for minor in range(4)])
    first = machine.start("a", {"gpu": 200}, compat={GPU_MINOR_NUMBERS})
    assert first["env:NVIDIA_VISIBLE_DEVICES"] == "0,1"
    assert {"device:/dev/nvidia0", "device:/dev/nvidia1"} <= first.keys()
    second = machine.start("b", {"nvidia.com/gpu": 2}, compat={GPU_MINOR_NUMBERS})
    assert second["env:NVIDIA_VISIBLE_DEVICES"] == "2,3"


def test_uuids_of_the_device_object_reach_the_environment() -> None:
    machine = Machine([a_gpu(minor) for minor in range(4)])
    assert machine.start("a", {"gpu": 200})["env:NVIDIA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"


@pytest.mark.parametrize(
    ("requests", "memory"),
    [
        ({"gpu": 25}, 20 * GIB),
        ({"gpu-memory": "8Gi"}, 8 * GIB),
        ({"gpu.shared": 2, "gpu-memory-ratio": 100}, 40 * GIB),
    ],
)
def test_shares_become_limits_of_hami_core(requests: dict[str, Any], memory: int) -> None:
    given_values = Machine([a_gpu(0), a_gpu(1)]).start("a", requests, labels=HAMI)
    assert given_values["env:CUDA_DEVICE_MEMORY_LIMIT"] == str(memory)


def test_a_virtual_function_is_named_by_its_address() -> None:
    hint: dict[str, Any] = {"rdma": {"vfSelector": {}}}
    machine = Machine([a_nic(0, functions=["0000:1f:00.2", "0000:1f:00.3"])])
    for name, address in (("a", "0000:1f:00.2"), ("b", "0000:1f:00.3")):
        shape = a_shape({"rdma": 1}, hint=hint)
        allocator = DeviceShareAllocator(machine.devices)
        found = allocator.choose(shape, 0)
        assert not isinstance(found, Failure)
        booking = a_booking(name, shape, "n1", found)
        machine.tables.place(booking)
        text = allocator.record(booking, machine.tables).annotations[ANNOTATION_DEVICE_ALLOCATED]
        assert text is not None
        (nic,) = parse_device_allocated(text, obj="Pod")["rdma"]
        assert nic.extension is not None and nic.extension.vfs[0].bus_id == address


@given(st.lists(st.integers(1, 3), max_size=6))
def test_no_two_containers_see_one_whole_gpu(counts: list[int]) -> None:
    machine = Machine([a_gpu(minor, at=(minor // 4, str(minor // 2))) for minor in range(8)])
    seen: list[str] = []
    for number, count in enumerate(counts):
        if len(seen) + count > 8:
            break
        given_values = machine.start(f"p{number}", {"nvidia.com/gpu": count})
        seen += given_values["env:NVIDIA_VISIBLE_DEVICES"].split(",")
    assert len(seen) == len(set(seen))
