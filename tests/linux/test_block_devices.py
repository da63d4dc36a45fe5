"""Which disks a partition, a logical volume, an array or a mount lies on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from linux.block_devices import BlockDevices, read_block_devices, volume_group
from linux.local import LocalHost
from linux.procfs import Mounted, parse_mountinfo
from tests.simulated import DEBIAN_12_V2, SimulatedKernel
from tests.simulated.devices import put_disk


@pytest.fixture
def devices() -> BlockDevices:
    """An NVMe and two SATA disks, a volume group over three PVs, LUKS, an array and a loop."""
    kernel = SimulatedKernel(DEBIAN_12_V2)
    put_disk(kernel, "nvme0n1", "259:0")
    put_disk(kernel, "nvme0n1p1", "259:1", disk="nvme0n1")
    put_disk(kernel, "nvme0n1p17", "259:17", disk="nvme0n1")
    put_disk(kernel, "sda", "8:0")
    put_disk(kernel, "sda1", "8:1", disk="sda")
    put_disk(kernel, "sdb", "8:16")
    put_disk(kernel, "dm-0", "252:0", slaves=("sda1", "sdb"), mapper="my--vg-data", lvm=True)
    put_disk(kernel, "dm-1", "252:1", slaves=("nvme0n1p17",), mapper="my--vg-log--1", lvm=True)
    put_disk(kernel, "dm-2", "252:2", slaves=("dm-0",), mapper="secret")
    put_disk(kernel, "md0", "9:0", slaves=("sda", "sdb"))
    put_disk(kernel, "loop0", "7:0")
    put_disk(kernel, "cciss!c0d0", "104:0")
    return read_block_devices(kernel)


@pytest.mark.parametrize(
    ("name", "disks"),
    [
        ("nvme0n1p17", ("nvme0n1",)),  # minor 17 is not of a disk with minor 16
        ("sdb", ("sdb",)),
        ("dm-0", ("sda", "sdb")),
        ("dm-2", ("sda", "sdb")),
        ("md0", ("sda", "sdb")),
        ("unknown", ()),
    ],
)
def test_disks_below_a_device(devices: BlockDevices, name: str, disks: tuple[str, ...]) -> None:
    assert devices.disks_below(name) == disks


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/dev/sda1", "sda1"), ("8:16", "sdb"), ("/dev/mapper/my--vg-data", "dm-0"),
        ("/dev/my-vg/log-1", "dm-1"), ("/dev/mapper/secret", "dm-2"),
        ("/dev/cciss/c0d0", "cciss!c0d0"), ("/dev/my-vg/nothing", None), ("tmpfs", None),
        ("", None), ("/dev/", None),
    ],
)  # fmt: skip
def test_a_device_is_found(devices: BlockDevices, source: str, name: str | None) -> None:
    found = devices.find(source)
    assert (found.name if found else None) == name


def test_disks_and_volume_groups(devices: BlockDevices) -> None:
    assert devices.disks() == ("cciss!c0d0", "nvme0n1", "sda", "sdb")
    assert devices.volume_group_disks("my-vg") == ("nvme0n1", "sda", "sdb")
    assert devices.volume_group_disks("secret") == ()


@pytest.mark.parametrize(
    ("mapper", "group"),
    [("vg-lv", "vg"), ("my--vg-lv", "my-vg"), ("vg-lv--x", "vg"), ("vg---lv", "vg-"),
     ("vg", ""), ("", ""), ("a--b", "")],
)  # fmt: skip
def test_the_volume_group_of_a_name(mapper: str, group: str) -> None:
    assert volume_group(mapper) == group


MOUNTINFO = rb"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,discard
30 27 252:1 / /var/log rw - xfs /dev/mapper/my--vg-log--1 rw
31 27 0:45 /sub /data\040two rw - btrfs /dev/sdb rw,subvol=/sub
32 30 0:46 / /var/log rw - tmpfs tmpfs rw
33 27 252:0 / /srv rw - ext4 /dev/mapper/my--vg-data rw
odd line
"""


def test_mounts_are_read_in_their_order() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    assert mounts[3] == Mounted("/data two", "0:45", "btrfs", "/dev/sdb")
    points = ["/proc", "/", "/var/log", "/data two", "/var/log", "/srv"]
    assert [mount.point for mount in mounts] == points


def test_a_circle_of_devices_ends() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    put_disk(kernel, "dm-0", "252:0", slaves=("dm-1",))
    put_disk(kernel, "dm-1", "252:1", slaves=("dm-0",))
    assert read_block_devices(kernel).disks_below("dm-0") == ()


def test_a_device_that_vanishes_is_left_out() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    put_disk(kernel, "sda", "8:0")
    put_disk(kernel, "sdb", "8:16")
    kernel.sysfs.remove("devices/virtual/block/sdb/dev")
    assert set(read_block_devices(kernel).by_name) == {"sda"}


def test_this_machine() -> None:
    devices = read_block_devices(LocalHost())
    assert set(devices.by_name) == set(os.listdir("/sys/class/block"))
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_bytes())
    for mount in mounts:
        device = devices.find(mount.device) or devices.find(mount.source)
        if device is not None:
            assert set(devices.disks_below(device.name)) <= set(devices.by_name)
