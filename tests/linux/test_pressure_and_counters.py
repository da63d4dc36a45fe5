"""Kernel texts of pressure, disks, network interfaces, resctrl's monitoring and cold memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linux.diskstats import DiskCounters, parse_diskstats
from linux.kidled import Kidled, cold_bytes, read_kidled, write_kidled
from linux.local import LocalHost
from linux.net_dev import InterfaceCounters, parse_net_dev
from linux.psi import RESOURCES, Pressure, Stall, parse_pressure
from linux.resctrl_monitor import monitored, parse_counter, read_group_counters
from tests.conftest import require
from tests.simulated import ANOLIS_8, DEBIAN_12_V2, INTEL_RDT, SimulatedKernel
from tests.simulated.resctrl import Counters

SOME = b"some avg10=1.50 avg60=0.20 avg300=0.00 total=12345\n"
FULL = b"full avg10=0.10 avg60=0.00 avg300=0.00 total=99\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (SOME + FULL, Pressure(Stall(1.5, 0.2, 0.0, 12345), Stall(0.1, 0.0, 0.0, 99))),
        (SOME, Pressure(Stall(1.5, 0.2, 0.0, 12345), None)),
        (FULL + SOME, Pressure(Stall(1.5, 0.2, 0.0, 12345), Stall(0.1, 0.0, 0.0, 99))),
        (SOME + b"much avg10=9.00\n", Pressure(Stall(1.5, 0.2, 0.0, 12345), None)),
    ],
    ids=["both", "no full", "other order", "a line of a later kernel"],
)
def test_pressure(content: bytes, expected: Pressure) -> None:
    assert parse_pressure(content) == expected


_SHARES = st.integers(0, 10_000).map(lambda hundredths: hundredths / 100)
_STALLS = st.builds(Stall, _SHARES, _SHARES, _SHARES, st.integers(0, 2**63))


def _line(kind: str, stall: Stall) -> bytes:
    shares = (f"{name}={getattr(stall, name):.2f}" for name in ("avg10", "avg60", "avg300"))
    return f"{kind} {' '.join(shares)} total={stall.total_us}\n".encode()


@given(_STALLS, st.none() | _STALLS)
def test_a_file_of_a_later_kernel_is_read_as_one_of_today(some: Stall, full: Stall | None) -> None:
    lines = [_line("some", some)] + ([] if full is None else [_line("full", full)])
    expected = Pressure(some, full)
    assert parse_pressure(b"".join(lines)) == expected
    assert parse_pressure(b"".join([*lines, b"much avg10=9.00\n"])) == expected
    more = [line.replace(b" total", b" avg900=1.00 total") for line in lines]
    assert parse_pressure(b"".join(more)) == expected


@pytest.mark.parametrize(
    "content", [b"", FULL, b"some avg10=x avg60=0 avg300=0 total=0\n", b"some avg10=1.00\n"]
)
def test_a_pressure_file_that_is_not_understood_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="pressure file"):
        parse_pressure(content)


@pytest.mark.parametrize("resource", RESOURCES)
def test_pressure_of_this_machine(resource: str) -> None:
    path = Path("/proc/pressure") / resource
    require(path.exists(), "a kernel with PSI (psi=1)", tier="psi")
    found = parse_pressure(path.read_bytes())
    assert 0 <= found.some.avg10 <= 100
    assert found.some.total_us >= 0


def test_disk_counters() -> None:
    content = (
        b" 259       1 nvme0n1p1 11 1 80 5 22 2 160 9 0 7 14\n"
        b"   8       0 sda 1 0 2 3 4 0 6 7 0 9 10 0 0 0 0 0 0\n"
        b"   8      16 sdb 1 0 x 3 4 0 6 7 0 9 10\n"
        b"   8      32 short 1\n"
    )
    assert parse_diskstats(content) == {
        "nvme0n1p1": DiskCounters(259, 1, 80 * 512, 160 * 512, 7),
        "sda": DiskCounters(8, 0, 1024, 3072, 9),
    }


def test_disk_counters_of_this_machine_match_sysfs() -> None:
    found = parse_diskstats(Path("/proc/diskstats").read_bytes())
    for name, counters in found.items():
        number = Path("/sys/class/block", name.replace("/", "!"), "dev").read_text().strip()
        assert number == f"{counters.major}:{counters.minor}"


def test_interface_counters() -> None:
    content = (
        b"Inter-|   Receive                                                |  Transmit\n"
        b" face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        b"    lo: 100 1 0 0 0 0 0 0 200 2 0 0 0 0 0 0\n"
        b"  eth0:18446744073709551615 1 0 0 0 0 0 0 4 2 0 0 0 0 0 0\n"
        b"eth0:1: 5 1 0 0 0 0 0 0 6 2 0 0 0 0 0 0\n"
        b"  bad: 5 1\n"
        b" worse: x 1 0 0 0 0 0 0 6 2 0 0 0 0 0 0\n"
    )
    assert parse_net_dev(content) == {
        "lo": InterfaceCounters(100, 200),
        "eth0": InterfaceCounters(2**64 - 1, 4),
        "eth0:1": InterfaceCounters(5, 6),
    }


def test_interface_counters_of_this_machine_match_sysfs() -> None:
    found = parse_net_dev(Path("/proc/self/net/dev").read_bytes())
    assert set(found) == set(os.listdir("/sys/class/net"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"123\n", 123), (b"0\n", 0), (b"Unavailable\n", None), (b"Error\n", None), (b"", None),
     (b"-1\n", None), (b"Unassigned\n", None)],
)  # fmt: skip
def test_a_monitored_value_may_be_missing(content: bytes, expected: int | None) -> None:
    assert parse_counter(content) == expected


def test_the_counters_of_a_control_group() -> None:
    kernel = SimulatedKernel(INTEL_RDT)
    assert kernel.resctrl is not None
    kernel.mkdir("/sys/fs/resctrl/BE")
    kernel.resctrl.counters[("BE", 0)] = Counters(4096, 300, 200)
    kernel.resctrl.counters[("BE", 1)] = Counters("Unavailable", 7, "Error")
    found = read_group_counters(kernel, "BE")
    assert found is not None
    assert found[0] == (4096, {"mbm_local_bytes": 200, "mbm_total_bytes": 300})
    assert found[1] == (None, {"mbm_total_bytes": 7})
    assert read_group_counters(kernel, "LS") is None
    assert monitored(kernel) == {"llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"}
    assert monitored(SimulatedKernel(DEBIAN_12_V2)) == frozenset()


def idle_pages(rows: dict[str, list[int]], *, period_s: int = 5, buckets: str = "") -> bytes:
    """A file of Alibaba's kernel: 14 heading lines, then the rows."""
    bounds = buckets or "1,2,5,15,30,60,120,240"
    heading = [
        "# version: 1.0", "# page_scans: 24", "# slab_scans: 1477",
        f"# scan_period_in_seconds: {period_s}", "# use_hierarchy: 1", f"# buckets: {bounds}", "#",
        "#   _-----=> clean/dirty", "#  / _----=> swap/file", "# | / _---=> evict/unevict",
        "# || / _--=> inactive/active", "# ||| / _-=> slab", "# |||| /", "# ||||",
    ]  # fmt: skip
    lines = [f"  {name} " + " ".join(f"{count:>10}" for count in row) for name, row in rows.items()]
    return ("\n".join([*heading, *lines]) + "\n").encode()


FILE_ROW = [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("rows", "period_s", "buckets", "expected"),
    [
        ({"cfei": FILE_ROW}, 5, "", 32 + 64 + 128),
        ({"cfei": FILE_ROW, "dfei": FILE_ROW, "cfui": FILE_ROW, "dfui": FILE_ROW}, 5, "", 4 * 224),
        ({"csei": FILE_ROW, "cfea": FILE_ROW, "slab": FILE_ROW}, 5, "", 0),
        ({"cfei": FILE_ROW}, 120, "", 4 + 8 + 16 + 32 + 64 + 128),
        ({"cfei": FILE_ROW}, 1, "", 128),
        ({"cfei": [1, 2, 4]}, 5, "1,60,100", 2 + 4),
        ({}, 5, "", 0),
    ],
    ids=["60 scans of 5 s", "all file rows", "other rows", "120 s", "1 s", "3 classes", "no rows"],
)
def test_cold_memory(
    rows: dict[str, list[int]], period_s: int, buckets: str, expected: int
) -> None:
    assert cold_bytes(idle_pages(rows, period_s=period_s, buckets=buckets)) == expected


@pytest.mark.parametrize(
    "content",
    [b"", b"# buckets: 1,2\n", idle_pages({"cfei": [1, 2]}), idle_pages({}, period_s=0),
     idle_pages({"cfei": FILE_ROW}, buckets="1,x")],
)  # fmt: skip
def test_idle_page_statistics_that_are_not_understood_are_an_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        cold_bytes(content)


@given(st.lists(st.integers(0, 2**50), min_size=8, max_size=8), st.integers(1, 400))
def test_cold_memory_is_never_more_than_all_of_it(row: list[int], period_s: int) -> None:
    assert 0 <= cold_bytes(idle_pages({"dfei": row}, period_s=period_s)) <= sum(row)


def test_kidled_is_read_and_written() -> None:
    kernel = SimulatedKernel(ANOLIS_8)
    with kernel.recording() as writes:
        assert read_kidled(kernel) == Kidled(0, use_hierarchy=False)
    assert writes == []
    write_kidled(kernel, Kidled(5, use_hierarchy=True))
    assert read_kidled(kernel) == Kidled(5, use_hierarchy=True)
    assert read_kidled(SimulatedKernel(DEBIAN_12_V2)) is None
    assert read_kidled(LocalHost(), sys_root="/nonexistent") is None
