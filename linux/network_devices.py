"""Network devices of the node: which one leads to the rest of the network, and how fast it is.

Facts: docs/facts/kernel.md, "Network interfaces" and "Traffic control".
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final

import msgspec

from linux.host import Host

_ROUTES: Final = "/proc/1/net"  # of the node's own namespace
_DEVICES: Final = "/sys/class/net"
_UP: Final = 0x1  # RTF_UP, of a route
_REJECT: Final = 0x200  # RTF_REJECT: the route refuses packets
_MEGABIT: Final = 1_000_000  # bits; the unit of sysfs' `speed`


class NetworkDevice(msgspec.Struct, frozen=True):
    """A device. index: the kernel's number; a device that is made again has another one.
    bits: its speed per second, 0 when unknown. mtu: bytes."""

    name: str
    index: int
    bits: int
    mtu: int


def default_device(host: Host) -> str:
    """Return the device of the default route of IPv4, or of IPv6 if there is none; "" without any.

    Of several, the one with the least metric. Raises OSError.
    """
    found = _least(_ipv4_defaults(host.read(f"{_ROUTES}/route")))
    if not found:
        try:
            found = _least(_ipv6_defaults(host.read(f"{_ROUTES}/ipv6_route")))
        except FileNotFoundError:
            return ""  # a kernel without IPv6
    return found


def network_device(host: Host, name: str) -> NetworkDevice:
    """Return the device. Raises OSError, with ENOENT when it is not there, and ValueError."""
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a name of a network device")
    folder = f"{_DEVICES}/{name}"
    return NetworkDevice(
        name,
        index=int(host.read(f"{folder}/ifindex")),
        bits=_speed(host, folder),
        mtu=int(host.read(f"{folder}/mtu")),
    )


def device_name(index: int) -> str:
    """Return the name of a device of this thread's network namespace, by the kernel's number."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return f"device {index}"  # it has vanished


def _speed(host: Host, folder: str) -> int:
    try:
        return max(int(host.read(f"{folder}/speed")), 0) * _MEGABIT
    except (OSError, ValueError):
        return 0  # EINVAL: the device is down, or has no speed


def _least(defaults: Iterable[tuple[int, str]]) -> str:
    return min(defaults, key=lambda each: each[0], default=(0, ""))[1]


def _ipv4_defaults(content: bytes) -> list[tuple[int, str]]:
    """Return metric and device of each default route."""
    found = []
    for line in content.decode("utf-8", "replace").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        device, destination, _, flags, _, _, metric, mask = fields[:8]
        if int(destination, 16) == 0 == int(mask, 16) and _usable(device, flags):
            found.append((int(metric), device))
    return found


def _ipv6_defaults(content: bytes) -> list[tuple[int, str]]:
    found = []
    for line in content.decode("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) < 10:
            continue
        destination, length, metric, flags, device = (fields[at] for at in (0, 1, 5, 8, 9))
        if int(destination, 16) == 0 == int(length, 16) and _usable(device, flags):
            found.append((int(metric, 16), device))
    return found


def _usable(device: str, flags: str) -> bool:
    bits = int(flags, 16)
    return bool(bits & _UP) and not bits & _REJECT and device not in ("lo", "*")
