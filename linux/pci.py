"""PCI devices in sysfs: where a device is attached, and its virtual functions.

Files: docs/facts/kernel.md, "Devices".
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from linux.host import Host

_ROOT: Final = re.compile(r"pci[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}")
"""A root complex in a device's path. The domain has more than four digits behind Intel's VMD."""
_VIRTUAL: Final = re.compile(r"virtfn(\d{1,5})", re.ASCII)
NETWORK_CLASS: Final = "0x02"
"""How the class of a network controller begins, InfiniBand's included."""


class Place(NamedTuple):
    """Where a device is attached. numa_node: 0 where the firmware does not say. root: the PCIe root
    complex, such as pci0000:3a; "" where there is none."""

    numa_node: int
    root: str


def _directory(address: str, sys_root: str) -> str:
    return f"{sys_root}/bus/pci/devices/{address}"


def read_place(host: Host, address: str, *, sys_root: str = "/sys") -> Place:
    """Return where the device is attached; a device that is not there is at Place(0, "")."""
    directory = _directory(address, sys_root)
    try:
        node = int(host.read(f"{directory}/numa_node"))
    except (OSError, ValueError):
        node = 0
    try:
        root = _ROOT.search(host.readlink(directory))
    except OSError:
        root = None
    return Place(max(node, 0), root[0] if root else "")


def read_class(host: Host, address: str, *, sys_root: str = "/sys") -> str:
    """Return the device's class, such as 0x020000; "" if there is none."""
    try:
        return (
            host.read(f"{_directory(address, sys_root)}/class").decode("ascii", "replace").strip()
        )
    except OSError:
        return ""


def is_virtual_function(host: Host, address: str, *, sys_root: str = "/sys") -> bool:
    """Return whether the device is a virtual function of another."""
    try:
        host.readlink(f"{_directory(address, sys_root)}/physfn")
    except OSError:
        return False
    return True


def virtual_functions(host: Host, address: str, *, sys_root: str = "/sys") -> tuple[str, ...]:
    """Return the addresses of the device's virtual functions, in the order of their numbers."""
    directory = _directory(address, sys_root)
    found: list[tuple[int, str]] = []
    try:
        names = host.listdir(directory)
    except OSError:
        return ()
    for name in names:
        shape = _VIRTUAL.fullmatch(name)
        if shape is None:
            continue
        try:
            target = host.readlink(f"{directory}/{name}").rpartition("/")[2]
        except OSError:
            continue
        found.append((int(shape[1]), target))
    return tuple(target for _, target in sorted(found))
