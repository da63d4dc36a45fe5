"""Disks, file systems and interfaces: rates of what is there once, and nothing absurd."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.collecting import Collector, Unavailable
from koordlet.measurement.collectors.disks import (
    DiskCollector,
    FileSystemCollector,
    Space,
    local_space,
)
from koordlet.measurement.collectors.network import NetworkCollector
from koordlet.measurement.kernel_files import LocalFiles
from koordlet.measurement.series import Metric, Series
from linux.local import LocalHost
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.simulated import DEBIAN_12_V2, SimulatedKernel
from tests.simulated.vfs import File, Folder, Link, text

SIZE, USED = Metric.NODE_FILESYSTEM_SIZE, Metric.NODE_FILESYSTEM_USED
DISK = {"sda": "8:0", "sda1": "8:1", "dm-0": "252:0", "loop0": "7:0"}


class Machine:
    """A simulated machine whose counters a test sets: device or interface -> numbers."""

    def __init__(self) -> None:
        self.kernel = SimulatedKernel(DEBIAN_12_V2)
        self.disks: dict[str, tuple[int, int, int]] = {}
        self.interfaces: dict[str, tuple[int, int]] = {}
        self.kernel.proc.put("diskstats", File(self._diskstats))
        self.kernel.proc.put("1/net/dev", File(self._net_dev))
        self.kernel.proc.root.dynamic = None
        for name, number in DISK.items():
            base = f"devices/block/{'sda/' if name == 'sda1' else ''}{name}"
            self.kernel.sysfs.put(f"{base}/dev", text(number + "\n"))
            self.kernel.sysfs.put(f"{base}/slaves", Folder())
            self.kernel.sysfs.put(f"class/block/{name}", Link(f"../../{base}"))
        self.kernel.sysfs.put("devices/block/sda/sda1/partition", text("1\n"))
        self.kernel.sysfs.put("devices/block/dm-0/dm/name", text("vg-data\n"))
        self.kernel.sysfs.put("devices/block/dm-0/slaves/sda1", Link("../../sda/sda1"))

    def _diskstats(self) -> str:
        lines = ""
        for name, (read, written, busy_ms) in self.disks.items():
            number = DISK.get(name, "8:99").replace(":", " ")
            lines += f" {number} {name} 1 0 {read} 0 1 0 {written} 0 0 {busy_ms} 0\n"
        return lines

    def _net_dev(self) -> str:
        lines = "Inter-|\n face |bytes\n"
        for name, (received, sent) in self.interfaces.items():
            lines += f"{name}: {received} 0 0 0 0 0 0 0 {sent} 0 0 0 0 0 0 0\n"
        return lines

    def rounds(self, collector: Collector) -> Rounds:
        return Rounds.over(collector, self.kernel)


def test_a_disk_counts_once_however_many_devices_lie_on_it() -> None:
    machine = Machine()
    rounds = machine.rounds(DiskCollector(machine.kernel))
    machine.disks = dict.fromkeys(DISK, (0, 0, 0))
    assert rounds.next() == {}
    machine.disks = dict.fromkeys(DISK, (2048, 8, 500))
    assert rounds.next(2.0) == {
        Series(Metric.NODE_DISK_READ, "sda"): 2048 * 512 / 2,
        Series(Metric.NODE_DISK_WRITE, "sda"): 8 * 512 / 2,
        Series(Metric.NODE_DISK_BUSY, "sda"): 0.25,
    }


def test_a_disk_that_is_replaced_starts_again() -> None:
    machine = Machine()
    rounds = machine.rounds(DiskCollector(machine.kernel))
    machine.disks = {"sda": (10_000, 10_000, 900)}
    rounds.next()
    machine.disks = {}
    assert rounds.next() == {}
    machine.disks = {"sda": (20_000, 20_000, 1000)}
    assert rounds.next() == {}
    assert rounds.next()[Series(Metric.NODE_DISK_READ, "sda")] == 0.0


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64), st.integers(0, 2**64), st.integers(0, 2**32),
                  st.floats(0.001, 100)),
        max_size=8,
    )
)  # fmt: skip
def test_no_disk_rate_is_absurd(steps: list[tuple[int, int, int, float]]) -> None:
    machine = Machine()
    rounds = machine.rounds(DiskCollector(machine.kernel))
    for read, written, busy_ms, step_s in steps:
        machine.disks = {"sda": (read, written, busy_ms)}
        for series, value in rounds.next(step_s).items():
            most = 1.0 if series.metric is Metric.NODE_DISK_BUSY else 1e12
            assert 0 <= value <= most


MOUNTINFO = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:20 / /proc rw - proc proc rw
3 1 252:0 / /var/lib/data rw - xfs /dev/mapper/vg-data rw
4 1 8:1 /sub /var/lib/kubelet/pods/one/volumes/x rw - ext4 /dev/sda1 rw
5 1 8:0 / /fuse rw - fuseblk /dev/sda rw
"""


OWN_MOUNTINFO = """\
1 0 0:50 / / rw - overlay overlay rw
2 1 252:0 / /var/lib/data rw - xfs /dev/mapper/vg-data rw
"""


def test_each_file_system_counts_once_and_a_broken_one_alone_is_left_out() -> None:
    machine = Machine()
    machine.kernel.proc.put("1/mountinfo", text(MOUNTINFO))
    machine.kernel.proc.put("self/mountinfo", text(OWN_MOUNTINFO))
    asked: list[str] = []

    def space(path: str) -> Space:
        asked.append(path)
        if path.endswith("data"):
            raise OSError(errno.EIO, "broken")
        return Space(1000, 250)

    rounds = machine.rounds(FileSystemCollector(machine.kernel, space))
    assert rounds.next() == {
        Series(Metric.NODE_FILESYSTEM_SIZE, "/"): 1000,
        Series(Metric.NODE_FILESYSTEM_USED, "/"): 250,
    }
    # "/" is another file system here, in a container; the volume is the same.
    assert asked == ["/proc/1/root/", "/var/lib/data"]
    assert len(rounds.problems) == 1 and "/var/lib/data" in rounds.problems[0]


def with_device(machine: Machine, name: str) -> None:
    machine.kernel.sysfs.put(f"class/net/{name}/device", Link("../../../devices/virtio0"))


def test_interfaces_with_a_device_are_measured() -> None:
    machine = Machine()
    with_device(machine, "eth0")
    rounds = machine.rounds(NetworkCollector(machine.kernel))
    names = ("lo", "eth0", "veth12", "cni0")
    machine.interfaces = dict.fromkeys(names, (0, 0))
    assert rounds.next() == {}
    machine.interfaces = dict.fromkeys(names, (1000, 50))
    assert rounds.next() == {
        Series(Metric.NODE_NETWORK_RECEIVE, "eth0"): 1000.0,
        Series(Metric.NODE_NETWORK_SEND, "eth0"): 50.0,
    }


def test_without_any_device_all_but_the_loopback_are_measured() -> None:
    machine = Machine()
    rounds = machine.rounds(NetworkCollector(machine.kernel))
    machine.interfaces = {"lo": (0, 0), "eth0": (0, 0)}
    rounds.next()
    assert {series.of for series in rounds.next()} == {"eth0"}


def test_a_counter_that_wraps_gives_no_sample_once() -> None:
    machine = Machine()
    with_device(machine, "eth0")
    rounds = machine.rounds(NetworkCollector(machine.kernel))
    receive = Series(Metric.NODE_NETWORK_RECEIVE, "eth0")
    send = Series(Metric.NODE_NETWORK_SEND, "eth0")
    machine.interfaces = {"eth0": (2**32 - 10, 5)}
    rounds.next()
    machine.interfaces = {"eth0": (90, 15)}
    assert rounds.next() == {send: 10.0}
    machine.interfaces = {"eth0": (190, 15)}
    assert rounds.next()[receive] == 100.0


@given(st.lists(st.tuples(st.integers(0, 2**64), st.floats(0.001, 100)), max_size=8))
def test_no_network_rate_is_absurd(steps: list[tuple[int, float]]) -> None:
    machine = Machine()
    rounds = machine.rounds(NetworkCollector(machine.kernel))
    for count, step_s in steps:
        machine.interfaces = {"eth0": (count, count)}
        assert all(0 <= value <= 1e12 for value in rounds.next(step_s).values())


@pytest.mark.parametrize(
    "make",
    [DiskCollector, NetworkCollector, lambda kernel: FileSystemCollector(kernel, local_space)],
)
def test_a_kernel_without_the_source_is_unavailable(
    make: Callable[[SimulatedKernel], Collector],
) -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    with pytest.raises(Unavailable, match="this kernel has no"):
        Rounds.over(make(kernel), kernel).next()


def test_this_machine(tmp_path: Path) -> None:
    host = LocalHost()
    disks = Rounds(DiskCollector(host), LocalFiles())
    network = Rounds(NetworkCollector(host), LocalFiles())
    for rounds in (disks, network):
        rounds.next()
        assert all(value >= 0 for value in rounds.next().values())
    space = Rounds(FileSystemCollector(host, local_space), LocalFiles()).next()
    assert all(series.metric in (SIZE, USED) and value >= 0 for series, value in space.items())
    assert {series.of for series in space if series.metric is USED} == {
        series.of for series in space if series.metric is SIZE
    }
    found = {series.of for series in network.next()}
    assert found and found <= set(os.listdir("/sys/class/net")) - {"lo"}


def test_the_space_of_a_directory_is_that_of_its_file_system(tmp_path: Path) -> None:
    before = local_space(str(tmp_path))
    (tmp_path / "file").write_bytes(b"x" * (8 << 20))
    os.sync()
    assert before.size_bytes > 0
    assert 0 <= before.used_bytes <= before.size_bytes
    with pytest.raises(FileNotFoundError):
        local_space(str(tmp_path / "none"))


# -- what comes and goes --------------------------------------------------------------------------


def test_a_disk_that_comes_leaves_the_rates_of_the_others() -> None:
    machine = Machine()
    rounds = machine.rounds(DiskCollector(machine.kernel))
    machine.disks = {"sda": (0, 0, 0)}
    rounds.next()
    machine.kernel.sysfs.put("devices/block/cciss!c0/dev", text("104:0\n"))
    machine.kernel.sysfs.put("devices/block/cciss!c0/slaves", Folder())
    machine.kernel.sysfs.put("class/block/cciss!c0", Link("../../devices/block/cciss!c0"))
    DISK["cciss/c0"] = "104:0"
    try:
        machine.disks = {"sda": (2, 0, 0), "cciss/c0": (0, 0, 0)}
        assert {series.of for series in rounds.next()} == {"sda"}
        machine.disks = {"sda": (2, 0, 0), "cciss/c0": (4, 6, 1000)}
        found = rounds.next()
    finally:
        del DISK["cciss/c0"]
    assert found[Series(Metric.NODE_DISK_READ, "cciss/c0")] == 4 * 512
    assert found[Series(Metric.NODE_DISK_WRITE, "cciss/c0")] == 6 * 512
    assert found[Series(Metric.NODE_DISK_BUSY, "cciss/c0")] == 1.0


def test_an_interface_that_comes_leaves_the_rates_of_the_others() -> None:
    machine = Machine()
    with_device(machine, "eth0")
    rounds = machine.rounds(NetworkCollector(machine.kernel))
    machine.interfaces = {"eth0": (0, 0)}
    rounds.next()
    with_device(machine, "eth1")
    machine.interfaces = {"eth0": (10, 20), "eth1": (5, 5)}
    assert rounds.next() == {
        Series(Metric.NODE_NETWORK_RECEIVE, "eth0"): 10.0,
        Series(Metric.NODE_NETWORK_SEND, "eth0"): 20.0,
    }
    machine.interfaces = {"eth1": (6, 7)}
    assert rounds.next() == {
        Series(Metric.NODE_NETWORK_RECEIVE, "eth1"): 1.0,
        Series(Metric.NODE_NETWORK_SEND, "eth1"): 2.0,
    }


@pytest.mark.parametrize("make", [DiskCollector, NetworkCollector])
def test_a_collector_that_is_closed_begins_again(
    make: Callable[[SimulatedKernel], Collector],
) -> None:
    machine = Machine()
    rounds = machine.rounds(make(machine.kernel))
    machine.disks, machine.interfaces = {"sda": (0, 0, 0)}, {"eth0": (0, 0)}
    rounds.next()
    assert rounds.next()
    rounds.collector.close()
    assert rounds.next() == {}
    assert rounds.next()


@pytest.mark.parametrize("make", [DiskCollector, NetworkCollector])
def test_a_counter_is_outdated_after_twenty_intervals(
    make: Callable[[SimulatedKernel], Collector],
) -> None:
    machine = Machine()
    rounds = machine.rounds(make(machine.kernel))
    machine.disks, machine.interfaces = {"sda": (0, 0, 0)}, {"eth0": (0, 0)}
    rounds.next()
    assert len(rounds.next(20.0)) >= 2
    assert rounds.next(20.5) == {}


def test_a_rate_above_a_terabyte_a_second_is_a_defect() -> None:
    machine = Machine()
    for collector in (DiskCollector(machine.kernel), NetworkCollector(machine.kernel)):
        for count, found in ((10**12, 2), (2 * 10**12, 0)):
            rounds = machine.rounds(collector)
            machine.disks, machine.interfaces = {"sda": (0, 0, 0)}, {"eth0": (0, 0)}
            rounds.next()
            machine.disks = {"sda": (count // 512, count // 512, 0)}
            machine.interfaces = {"eth0": (count, count)}
            samples = rounds.next()
            busy = Series(Metric.NODE_DISK_BUSY, "sda")
            assert len([series for series in samples if series != busy]) == found
            collector.close()


def test_reasons_name_the_missing_file() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    for collector, reason in (
        (DiskCollector(kernel), r"^this kernel has no /proc/diskstats$"),
        (NetworkCollector(kernel), r"^this kernel has no network interfaces$"),
        (
            FileSystemCollector(kernel, local_space, sys_root="/other"),
            r"^this kernel has no block devices in /other/class/block$",
        ),
    ):
        with pytest.raises(Unavailable, match=reason):
            Rounds.over(collector, kernel).next()


def test_a_file_system_that_shrinks_while_it_is_read_uses_nothing() -> None:
    machine = Machine()
    machine.kernel.proc.put("1/mountinfo", text(MOUNTINFO))
    machine.kernel.proc.put("self/mountinfo", text(MOUNTINFO))
    asked: list[str] = []

    def space(path: str) -> Space:
        asked.append(path)
        return Space(1000, -5)

    rounds = machine.rounds(FileSystemCollector(machine.kernel, space))
    assert rounds.next() == {
        Series(SIZE, "/"): 1000,
        Series(USED, "/"): 0,
        Series(SIZE, "/var/lib/data"): 1000,
        Series(USED, "/var/lib/data"): 0,
    }
    assert asked == ["/", "/var/lib/data"]


def test_a_device_that_only_the_mounts_source_names_is_found() -> None:
    machine = Machine()
    machine.kernel.proc.put("self/mountinfo", text(""))
    machine.kernel.proc.put(
        "1/mountinfo",
        text(
            "1 0 0:40 / /btrfs rw - btrfs /dev/sda1 rw\n"
            "2 1 0:40 /sub /again rw - btrfs /dev/sda1 rw\n"
            "3 1 0:41 / /nfs rw - nfs server:/x rw\n"
            "4 1 8:0 / /fuse rw - fuse.x /dev/sda rw\n"
        ),
    )
    rounds = machine.rounds(FileSystemCollector(machine.kernel, lambda path: Space(8, 4)))
    assert rounds.next() == {Series(SIZE, "/btrfs"): 8, Series(USED, "/btrfs"): 4}
    assert rounds.problems == []


def test_devices_are_looked_for_only_when_others_are_there() -> None:
    """Each look reads some files of sysfs for every device, hundreds on a node full of pods."""
    machine = Machine()
    with_device(machine, "eth0")
    disks = machine.rounds(DiskCollector(machine.kernel))
    network = machine.rounds(NetworkCollector(machine.kernel))
    machine.disks = {"sda": (0, 0, 0)}
    machine.interfaces = {"eth0": (0, 0), "veth1": (0, 0)}
    disks.next()
    network.next()
    machine.kernel.sysfs.remove("class/net/eth0/device")
    machine.kernel.sysfs.remove("class/block/sda")
    assert {series.of for series in disks.next()} == {"sda"}
    assert {series.of for series in network.next()} == {"eth0"}
    machine.interfaces["veth2"] = (0, 0)
    network.next()
    assert {series.of for series in network.next()} == {"eth0", "veth1", "veth2"}
