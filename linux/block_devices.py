"""Block devices from sysfs: which disks a partition, a logical volume or a mount lies on.

A partition names its disk by the directory that it lies in; device numbers say nothing about that.
A device of the device mapper (LVM, LUKS, multipath) or an array lists what it is made of in
`slaves`, which may be several. Files: docs/facts/kernel.md, "Block devices".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from linux.host import Host

_MEMORY: Final = ("loop", "ram", "zram")
"""Devices that are a file or memory: their transfers are counted elsewhere, or reach no disk."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A block device.

    name: the kernel's, such as nvme0n1p2. number: "major:minor". partition_of: the disk's name, ""
    unless this is a partition. made_of: names of the devices below, for the device mapper and
    arrays. mapper: the device mapper's name, "" for other devices. lvm: a logical volume.
    """

    name: str
    number: str
    partition_of: str = ""
    made_of: tuple[str, ...] = ()
    mapper: str = ""
    lvm: bool = False


@dataclass(frozen=True, slots=True)
class BlockDevices:
    """All block devices of a machine at one moment, by name."""

    by_name: Mapping[str, BlockDevice]

    def disks_below(self, name: str) -> tuple[str, ...]:
        """Return the names of the whole disks that the device lies on, sorted; () if unknown."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [name]
        while waiting:
            device = self.by_name.get(waiting.pop())
            if device is None or device.name in seen:
                continue
            seen.add(device.name)
            if device.partition_of:
                waiting.append(device.partition_of)
            elif device.made_of:
                waiting += device.made_of
            else:
                found.add(device.name)
        return tuple(sorted(found))

    def disks(self) -> tuple[str, ...]:
        """Return the names of all disks, sorted: no partitions, no devices made of others, no
        memory devices."""
        return tuple(
            sorted(
                name
                for name, device in self.by_name.items()
                if not device.partition_of and not device.made_of and not name.startswith(_MEMORY)
            )
        )

    def find(self, source: str) -> BlockDevice | None:
        """Return the device of a number ("8:1"), a name ("sda1"), or a path: /dev/sda1,
        /dev/mapper/<name>, /dev/<volume group>/<logical volume>."""
        device = self.by_name.get(source.removeprefix("/dev/").replace("/", "!"))
        if device is not None:
            return device
        mapper = ""
        if source.startswith("/dev/"):
            first, _, second = source.removeprefix("/dev/").partition("/")
            mapper = second if first == "mapper" else _mapper_name(first, second) if second else ""
        for device in self.by_name.values():
            if device.number == source or (mapper and device.mapper == mapper):
                return device
        return None

    def paths_of(self, device: BlockDevice) -> tuple[str, ...]:
        """Return the paths below /dev under which a device is known, as `find` takes them."""
        paths = [f"/dev/{device.name.replace('!', '/')}"]
        if device.mapper:
            paths.append(f"/dev/mapper/{device.mapper}")
        if device.lvm and (group := volume_group(device.mapper)):
            volume = device.mapper[len(_mapper_name(group, "")) :].replace("--", "-")
            paths.append(f"/dev/{group}/{volume}")
        return tuple(paths)

    def volume_groups(self) -> frozenset[str]:
        """Return the LVM volume groups with an active logical volume."""
        groups = (volume_group(each.mapper) for each in self.by_name.values() if each.lvm)
        return frozenset(group for group in groups if group)

    def volume_group_disks(self, group: str) -> tuple[str, ...]:
        """Return the disks that the active logical volumes of an LVM volume group lie on."""
        found: set[str] = set()
        for device in self.by_name.values():
            if device.lvm and volume_group(device.mapper) == group:
                found.update(self.disks_below(device.name))
        return tuple(sorted(found))


def volume_group(mapper: str) -> str:
    """Return the volume group in a logical volume's mapper name; "" if there is none.

    `<group>-<volume>`: a dash inside either name is doubled.
    """
    at = 0
    while (at := mapper.find("-", at)) >= 0:
        if mapper[at + 1 : at + 2] != "-":
            return mapper[:at].replace("--", "-")
        at += 2
    return ""


def _mapper_name(group: str, volume: str) -> str:
    return f"{group.replace('-', '--')}-{volume.replace('-', '--')}"


def read_block_devices(host: Host, *, sys_root: str = "/sys") -> BlockDevices:
    """Read all block devices; OSError when sysfs has none to list.

    A device that vanishes meanwhile is left out.
    """
    base = f"{sys_root}/class/block"
    found: dict[str, BlockDevice] = {}
    for name in sorted(host.listdir(base)):
        try:
            number = host.read(f"{base}/{name}/dev").decode("ascii", "replace").strip()
            path = host.readlink(f"{base}/{name}").split("/")
        except OSError:
            continue
        mapper = _text(host, f"{base}/{name}/dm/name")
        found[name] = BlockDevice(
            name=name,
            number=number,
            partition_of=path[-2] if _text(host, f"{base}/{name}/partition") else "",
            made_of=_names(host, f"{base}/{name}/slaves"),
            mapper=mapper,
            lvm=bool(mapper) and _text(host, f"{base}/{name}/dm/uuid").startswith("LVM-"),
        )
    return BlockDevices(found)


def _text(host: Host, path: str) -> str:
    try:
        return host.read(path).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _names(host: Host, path: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(host.listdir(path)))
    except OSError:
        return ()
