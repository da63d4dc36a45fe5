"""Devices that a test adds to the simulated /sys: disks and RDMA functions; and mounts."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulated.kernel import SimulatedKernel
from tests.simulated.vfs import File, Folder, Link, Node, text


def put_disk(
    kernel: SimulatedKernel, name: str, number: str, *, disk: str = "",
    slaves: tuple[str, ...] = (), mapper: str = "", lvm: bool = False,
) -> None:  # fmt: skip
    """Add a block device to the simulated sysfs."""
    base = f"devices/virtual/block/{disk}/{name}" if disk else f"devices/virtual/block/{name}"
    kernel.sysfs.put(f"{base}/dev", text(f"{number}\n"))
    if disk:
        kernel.sysfs.put(f"{base}/partition", text("1\n"))
    kernel.sysfs.put(f"{base}/slaves", Folder(closed=True))
    for slave in slaves:
        kernel.sysfs.put(f"{base}/slaves/{slave}", Link(f"../../{slave}"))
    if mapper:
        kernel.sysfs.put(f"{base}/dm/name", text(f"{mapper}\n"))
        kernel.sysfs.put(f"{base}/dm/uuid", text("LVM-abc\n" if lvm else "CRYPT-abc\n"))
    kernel.sysfs.put(f"class/block/{name}", Link(f"../../{base}"))


def put_mountinfo(kernel: SimulatedKernel, lines: Callable[[], str]) -> None:
    """Give the node's first process the mounts that `lines` returns."""
    processes = kernel.proc.root.dynamic
    assert processes is not None

    def with_mounts() -> dict[str, Node]:
        folders = processes()
        first = folders["1"]
        assert isinstance(first, Folder)
        first.entries["mountinfo"] = File(lines)
        return folders

    kernel.proc.root.dynamic = with_mounts


def mount_line(point: str, device: str, kind: str = "ext4", source: str = "/dev/none") -> str:
    """Return a line of mountinfo. device: "major:minor"."""
    return f"36 35 {device} / {point} rw,noatime shared:1 - {kind} {source} rw\n"


def put_rdma_function(
    kernel: SimulatedKernel, address: str, *names: str, states: tuple[str, ...] = ("4: ACTIVE",),
    kind: str = "0x020700", node: str = "1", root: str = "pci0000:3a", physical: str = "",
) -> None:  # fmt: skip
    """Add a PCI function with RDMA devices."""
    base = f"devices/{root}/0000:3a:00.0/{address}"
    kernel.sysfs.put(f"{base}/class", text(f"{kind}\n"))
    kernel.sysfs.put(f"{base}/numa_node", text(f"{node}\n"))
    kernel.sysfs.put(f"bus/pci/devices/{address}", Link(f"../../../{base}"))
    if physical:
        kernel.sysfs.put(f"{base}/physfn", Link(f"../{physical}"))
    for name in names:
        rdma = f"{base}/infiniband/{name}"
        for port, state in enumerate(states, 1):
            kernel.sysfs.put(f"{rdma}/ports/{port}/state", text(f"{state}\n"))
        kernel.sysfs.put(f"{rdma}/device", Link(f"../../../{address}"))
        kernel.sysfs.put(f"class/infiniband/{name}", Link(f"../../{rdma}"))
