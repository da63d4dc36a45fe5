"""Disks: bytes read and written, and how busy they are. File systems: size and use.

A disk is a whole one: no partition, no volume or array on top of others, which would count the same
bytes again, and no loop or memory device. Sources: docs/facts/kernel.md, "Block devices".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from koordlet.measurement.collecting import Round, Unavailable
from koordlet.measurement.counters import RateSeries
from koordlet.measurement.series import Metric, Series
from linux.block_devices import BlockDevices, read_block_devices
from linux.diskstats import parse_diskstats
from linux.host import Host
from linux.procfs import parse_mountinfo

_MOST_BYTES_S: Final = 1e12
"""A rate above it is a defect of a counter and no sample: the fastest NVMe disks reach 15e9."""
_NODE_ROOT: Final = "/proc/1/root"
"""The mounts of the node's first process, for those that this process does not see at the same
path, because it is in a container or a sandbox. Needs CAP_SYS_PTRACE."""


class _Disk(NamedTuple):
    """The series of one disk."""

    read: RateSeries
    written: RateSeries
    busy: RateSeries


def _disk(name: str, interval_s: float) -> _Disk:
    return _Disk(
        RateSeries(Series(Metric.NODE_DISK_READ, name), interval_s, most=_MOST_BYTES_S),
        RateSeries(Series(Metric.NODE_DISK_WRITE, name), interval_s, most=_MOST_BYTES_S),
        RateSeries(Series(Metric.NODE_DISK_BUSY, name), interval_s, most=1.0, unit=1e-3),
    )


class DiskCollector:
    """Bytes per second and busy ratio of each disk."""

    name = "disks"
    gate = None

    def __init__(
        self, host: Host, *, sys_root: str = "/sys", interval_s: float = 1.0,
        retention_s: float = 330.0,
    ) -> None:  # fmt: skip
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._sys_root = sys_root
        self._devices: frozenset[str] = frozenset()
        self._disks: dict[str, _Disk] = {}

    def sample(self, round_: Round) -> dict[Series, float]:
        # Not a file that stays open: the kernel gives a page of it with each read.
        try:
            counters = parse_diskstats(self._host.read("/proc/diskstats"))
        except FileNotFoundError:
            raise Unavailable("this kernel has no /proc/diskstats") from None
        at = round_.clock()
        if counters.keys() != self._devices:
            self._follow(frozenset(counters))
        samples: dict[Series, float] = {}
        for name, disk in self._disks.items():
            found = counters[name]
            disk.read.add(samples, found.read_bytes, at)
            disk.written.add(samples, found.written_bytes, at)
            disk.busy.add(samples, found.busy_ms, at)
        return samples

    def close(self) -> None:
        self._devices = frozenset()
        self._disks = {}

    def _follow(self, devices: frozenset[str]) -> None:
        """Find out which of the devices are disks; the counters of those known go on."""
        # /proc/diskstats has the device's own name, sysfs a "!" for each slash in it.
        known = _block_devices(self._host, self._sys_root).disks()
        disks = {name.replace("!", "/") for name in known}
        self._disks = {
            name: self._disks.get(name) or _disk(name, self.interval_s)
            for name in sorted(disks & devices)
        }
        self._devices = devices


class Space(NamedTuple):
    """A file system's size, and what is used of it, in bytes."""

    size_bytes: int
    used_bytes: int


def local_space(path: str) -> Space:
    """Return the space of the file system at `path`; OSError."""
    found = os.statvfs(path)
    return Space(found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize)


class FileSystemCollector:
    """Size and use of the file systems on block devices.

    Each is counted once, at its first mount point: pods add bind mounts by the hundred. Network
    and FUSE file systems are left out, because a server that does not answer would stall the round.
    """

    name = "filesystems"
    gate = None

    def __init__(
        self, host: Host, space: Callable[[str], Space], *, sys_root: str = "/sys",
        interval_s: float = 60.0, retention_s: float = 3660.0,
    ) -> None:  # fmt: skip
        """space: from a path of the node to its file system's space."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._space = space
        self._sys_root = sys_root

    def sample(self, round_: Round) -> dict[Series, float]:
        devices = _block_devices(self._host, self._sys_root)
        seen: set[str] = set()
        own = self._own_mounts()
        samples: dict[Series, float] = {}
        for mount in parse_mountinfo(self._host.read("/proc/1/mountinfo")):
            if mount.device in seen or mount.type.startswith("fuse"):
                continue
            device = devices.find(mount.device) or devices.find(mount.source)
            if device is None:
                continue
            seen.add(mount.device)
            try:
                same = (mount.point, mount.device) in own
                space = self._space(mount.point if same else f"{_NODE_ROOT}{mount.point}")
            except OSError as error:
                round_.problem(f"file system at {mount.point}: {error}")
                continue
            samples[Series(Metric.NODE_FILESYSTEM_SIZE, mount.point)] = space.size_bytes
            samples[Series(Metric.NODE_FILESYSTEM_USED, mount.point)] = max(space.used_bytes, 0)
        return samples

    def close(self) -> None:
        """Nothing stays open."""

    def _own_mounts(self) -> set[tuple[str, str]]:
        """Return the mount points and file systems that this process sees; those that it sees at
        the node's path need no detour."""
        mounts = parse_mountinfo(self._host.read("/proc/self/mountinfo"))
        return {(mount.point, mount.device) for mount in mounts}


def _block_devices(host: Host, sys_root: str) -> BlockDevices:
    try:
        return read_block_devices(host, sys_root=sys_root)
    except FileNotFoundError:
        raise Unavailable(f"this kernel has no block devices in {sys_root}/class/block") from None
