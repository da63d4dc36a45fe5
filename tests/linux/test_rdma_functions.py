"""RDMA functions of a machine: one for each controller, with a minor of its own."""

from __future__ import annotations

import pytest

from linux.pci import Place, read_place, virtual_functions
from linux.rdma import RdmaFunction, read_rdma_functions
from tests.simulated import DEBIAN_12_V2, SimulatedKernel
from tests.simulated.devices import put_rdma_function
from tests.simulated.vfs import Link, text


@pytest.fixture
def kernel() -> SimulatedKernel:
    return SimulatedKernel(DEBIAN_12_V2)


def test_a_function_with_its_virtual_functions(kernel: SimulatedKernel) -> None:
    put_rdma_function(kernel, "0000:3b:00.0", "mlx5_2")
    for number, address in ((10, "0000:3b:01.2"), (2, "0000:3b:00.2")):
        put_rdma_function(kernel, address, f"mlx5_{number + 10}", physical="0000:3b:00.0")
        kernel.sysfs.put(
            f"devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/virtfn{number}", Link(f"../{address}")
        )
    assert read_rdma_functions(kernel) == (
        RdmaFunction(
            "0000:3b:00.0", "mlx5_2", 2, True, Place(1, "pci0000:3a"),
            ("0000:3b:00.2", "0000:3b:01.2"),
        ),
    )  # fmt: skip


def test_minors_never_collide(kernel: SimulatedKernel) -> None:
    put_rdma_function(kernel, "0000:01:00.0", "mlx4_0")
    put_rdma_function(kernel, "0000:02:00.0", "mlx5_0")
    put_rdma_function(kernel, "0000:03:00.0", "bnxt_re0")
    put_rdma_function(kernel, "0000:04:00.0", "mlx5_1")
    found = {one.name: one.minor for one in read_rdma_functions(kernel)}
    assert found == {"mlx4_0": 0, "mlx5_1": 1, "mlx5_0": 2, "bnxt_re0": 3}


@pytest.mark.parametrize(
    ("states", "active"),
    [(("4: ACTIVE",), True), (("4: ACTIVE", "1: DOWN"), False), ((), False), (("2: INIT",), False)],
)
def test_every_port_must_be_active(
    kernel: SimulatedKernel, states: tuple[str, ...], active: bool
) -> None:
    put_rdma_function(kernel, "0000:01:00.0", "mlx5_0", states=states)
    assert [one.active for one in read_rdma_functions(kernel)] == [active]


def test_other_controllers_and_devices_in_software_are_left_out(kernel: SimulatedKernel) -> None:
    put_rdma_function(kernel, "0000:01:00.0", "qib0", kind="0x0c0600")
    kernel.sysfs.put("class/infiniband/rxe0/ports/1/state", text("4: ACTIVE\n"))
    assert read_rdma_functions(kernel) == ()


def test_a_machine_without_rdma_has_none(kernel: SimulatedKernel) -> None:
    assert read_rdma_functions(kernel) == ()
    assert virtual_functions(kernel, "0000:01:00.0") == ()


@pytest.mark.parametrize(
    ("node", "root", "place"),
    [("-1", "pci0000:3a", Place(0, "pci0000:3a")), ("1", "pci10000:e1", Place(1, "pci10000:e1")),
     ("x", "platform", Place(0, ""))],
)  # fmt: skip
def test_places(kernel: SimulatedKernel, node: str, root: str, place: Place) -> None:
    put_rdma_function(kernel, "0000:01:00.0", node=node, root=root)
    assert read_place(kernel, "0000:01:00.0") == place
    assert read_place(kernel, "0000:99:00.0") == Place(0, "")
