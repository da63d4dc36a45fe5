"""Accelerators that other programs describe in files: NPUs and others that NVML does not know.

Each file of the directory is a JSON array of devices. A bad device is left out alone, and a bad
file leaves the others; both are named. Of two devices with one UUID, or one minor, the first
counts, in the order of the files' names. Format: docs/facts/koordlet.md, "Accelerator files".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from apis.quantity import Quantity, parse_quantity
from linux.host import Host

DIRECTORY: Final = "/var/run/koordlet/xpu-device-infos"
"""Upstream's default of the flag xpu-device-infos-dir."""
_MOST_FILES: Final = 64
"""Files of the directory that are read. Chosen: one program writes one file."""
_MOST_BYTES: Final = 1 << 20
"""Of one file. Chosen: a machine has 16 accelerators, each of some 500 bytes."""
_MOST_MINOR: Final = 2**31 - 1
"""The Device object's minor has 32 bits."""


class _PeerLink(msgspec.Struct, frozen=True, rename="camel"):
    peer_minor: str = ""
    type: str = ""


class _Topology(msgspec.Struct, frozen=True, rename="camel"):
    p2p_links: list[_PeerLink] | None = None
    must_honor_partition: bool = False
    socket_id: str = msgspec.field(name="socketID", default="")
    node_id: str = msgspec.field(name="nodeID", default="")
    pcie_id: str = msgspec.field(name="pcieID", default="")
    bus_id: str = msgspec.field(name="busID", default="")


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    healthy: bool = False
    err_code: str = ""
    err_message: str = ""


class _Device(msgspec.Struct, frozen=True, rename="camel"):
    vendor: str = ""
    model: str = ""
    uuid: str = ""
    minor: str = ""
    resources: dict[str, Any] | None = None
    topology: _Topology | None = None
    status: _Status | None = None


class PeerLink(NamedTuple):
    """A direct link to other devices."""

    minors: tuple[int, ...]
    type: str


class XpuTopology(NamedTuple):
    """Where a device is attached. numa_node: -1 if the file does not say."""

    numa_node: int
    pcie_root: str
    bus_id: str
    links: tuple[PeerLink, ...] = ()
    must_honor_partition: bool = False


class XpuStatus(NamedTuple):
    healthy: bool
    error_code: str
    error: str


class Xpu(NamedTuple):
    """A device of a file. topology, status: None where the file has none."""

    vendor: str
    model: str
    uuid: str
    minor: int
    resources: dict[str, Quantity]
    topology: XpuTopology | None = None
    status: XpuStatus | None = None


def read_xpus(host: Host, directory: str = DIRECTORY) -> tuple[tuple[Xpu, ...], tuple[str, ...]]:
    """Return the devices of all files, by minor, and what was left out and why, for people.

    A directory that does not exist has no devices.
    """
    try:
        names = sorted(host.listdir(directory))
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        return (), (f"{directory}: {error}",)
    problems: list[str] = []
    if len(names) > _MOST_FILES:
        problems.append(f"{directory} has {len(names)} files: the first {_MOST_FILES} are read")
    found: list[Xpu] = []
    for name in names[:_MOST_FILES]:
        path = f"{directory}/{name}"
        if host.is_dir(path):
            continue
        try:
            found += parse_xpus(host.read(path), path, problems)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    return tuple(sorted(_unique(found, problems), key=lambda one: one.minor)), tuple(problems)


def parse_xpus(content: bytes, path: str, problems: list[str]) -> list[Xpu]:
    """Return the devices of one file; ValueError for a file that is not an array. Adds what is left
    out to `problems`."""
    if len(content) > _MOST_BYTES:
        raise ValueError(f"longer than {_MOST_BYTES} bytes")
    elements = msgspec.json.decode(content)
    if not isinstance(elements, list):
        raise ValueError("not a JSON array of devices")
    found: list[Xpu] = []
    for index, element in enumerate(elements):
        where = f"{path}: device {index}"
        try:
            found.append(_xpu(msgspec.convert(element, _Device), where, problems))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return found


def _xpu(device: _Device, where: str, problems: list[str]) -> Xpu:
    if not device.uuid:
        raise ValueError("uuid is missing")
    resources: dict[str, Quantity] = {}
    for name, amount in (device.resources or {}).items():
        try:
            resources[name] = parse_quantity(amount)
        except (ValueError, TypeError) as error:
            problems.append(f"{where}: resources.{name}: {error}")
    status = device.status
    return Xpu(
        vendor=device.vendor,
        model=device.model,
        uuid=device.uuid,
        minor=_minor(device.minor),
        resources=resources,
        topology=None if device.topology is None else _topology(device.topology),
        status=None
        if status is None
        else XpuStatus(status.healthy, status.err_code, status.err_message),
    )


def _topology(topology: _Topology) -> XpuTopology:
    links = tuple(
        PeerLink(tuple(_minor(one) for one in link.peer_minor.split(",") if one.strip()), link.type)
        for link in topology.p2p_links or ()
    )
    try:
        node = int(topology.node_id or "-1")
    except ValueError:
        raise ValueError(f"topology.nodeID {topology.node_id[:32]!r} is not a number") from None
    return XpuTopology(
        node, topology.pcie_id, topology.bus_id, links, topology.must_honor_partition
    )


def _minor(text: str) -> int:
    if not text.strip().isdecimal() or int(text) > _MOST_MINOR:
        raise ValueError(f"minor {text[:32]!r} is not a number from 0 to {_MOST_MINOR}")
    return int(text)


def _unique(found: Sequence[Xpu], problems: list[str]) -> list[Xpu]:
    kept: list[Xpu] = []
    for xpu in found:
        other = next((one for one in kept if one.uuid == xpu.uuid or one.minor == xpu.minor), None)
        if other is None:
            kept.append(xpu)
        else:
            problems.append(
                f"device {xpu.uuid} (minor {xpu.minor}) is left out beside {other.uuid} "
                f"(minor {other.minor})"
            )
    return kept
