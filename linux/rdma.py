"""RDMA devices: the device nodes of a PCI address, and the functions that a node offers.

An address without a verbs device is left out. Paths: docs/facts/kernel.md, "Devices".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from linux import pci
from linux.device_nodes import device_node
from linux.host import Host
from linux.resources import DeviceNode

_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


def read_rdma(
    host: Host, *, sys_root: str = "/sys", dev_root: str = "/dev"
) -> tuple[dict[str, DeviceNode], DeviceNode | None]:
    """Return (PCI address -> its verbs device node, the connection manager's node if any)."""
    found: dict[str, DeviceNode] = {}
    verbs_class = f"{sys_root}/class/infiniband_verbs"
    try:
        names = host.listdir(verbs_class)
    except OSError:
        names = []
    for name in sorted(names):
        if not name.startswith("uverbs"):
            continue
        try:
            address = host.readlink(f"{verbs_class}/{name}/device").rpartition("/")[2]
        except OSError:
            continue
        node = device_node(host, f"{dev_root}/infiniband/{name}")
        if node is not None and _ADDRESS.fullmatch(address):
            found.setdefault(address, node)
    return found, device_node(host, f"{dev_root}/infiniband/rdma_cm")


class RdmaFunction(NamedTuple):
    """A network controller with RDMA, and not a virtual function of another.

    name: the first of its RDMA devices, such as mlx5_0. minor: unique on the machine. active: every
    port is. virtual: the addresses of its virtual functions.
    """

    address: str
    name: str
    minor: int
    active: bool
    place: pci.Place
    virtual: tuple[str, ...] = ()


_MELLANOX = re.compile(r"mlx\d+_(\d{1,4})", re.ASCII)


def read_rdma_functions(host: Host, *, sys_root: str = "/sys") -> tuple[RdmaFunction, ...]:
    """Return the RDMA functions, by address; none on a machine without RDMA.

    The minor is the number in an mlx device's name, as upstream has it. Other drivers' devices, and
    those whose number is taken, get the least free number in the order of their addresses.
    """
    by_address: dict[str, list[str]] = {}
    base = f"{sys_root}/class/infiniband"
    try:
        names = host.listdir(base)
    except OSError:
        return ()
    for name in names:
        try:
            address = host.readlink(f"{base}/{name}/device").rpartition("/")[2]
        except OSError:
            continue  # a device in software (rxe, siw) has no PCI function
        if _ADDRESS.fullmatch(address):
            by_address.setdefault(address, []).append(name)
    chosen = {
        address: min(own)
        for address, own in sorted(by_address.items())
        if pci.read_class(host, address, sys_root=sys_root).startswith(pci.NETWORK_CLASS)
        and not pci.is_virtual_function(host, address, sys_root=sys_root)
    }
    minors = _minors(chosen)
    return tuple(
        RdmaFunction(
            address=address,
            name=name,
            minor=minors[address],
            active=all(_active(host, f"{base}/{one}") for one in by_address[address]),
            place=pci.read_place(host, address, sys_root=sys_root),
            virtual=pci.virtual_functions(host, address, sys_root=sys_root),
        )
        for address, name in chosen.items()
    )


def _minors(chosen: dict[str, str]) -> dict[str, int]:
    minors: dict[str, int] = {}
    waiting: list[str] = []
    for address, name in chosen.items():
        shape = _MELLANOX.fullmatch(name)
        if shape and int(shape[1]) not in minors.values():
            minors[address] = int(shape[1])
        else:
            waiting.append(address)
    free = 0
    for address in waiting:
        while free in minors.values():
            free += 1
        minors[address] = free
    return minors


def _active(host: Host, device: str) -> bool:
    """Return whether every port of the RDMA device is active; one without ports is not."""
    try:
        ports = host.listdir(f"{device}/ports")
        states = [host.read(f"{device}/ports/{port}/state") for port in ports]
    except OSError:
        return False
    # "4: ACTIVE"; a port that goes down through "5: ACTIVE_DEFER" still carries traffic.
    return bool(states) and all(b"ACTIVE" in state for state in states)
