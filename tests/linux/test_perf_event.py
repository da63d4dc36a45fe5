"""Counters of a cgroup: what read(2) gives, and the call itself with a counter in software."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import linux.perf_event
from linux.perf_event import (
    CYCLES,
    INSTRUCTIONS,
    CgroupCounters,
    Counted,
    Event,
    NoCounters,
    parse_set,
)
from tests.conftest import require

CPU_CLOCK = Event(1, 0)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK: nanoseconds
PAGE_FAULTS = Event(1, 2)  # PERF_COUNT_SW_PAGE_FAULTS


@pytest.mark.parametrize(
    ("counted", "scaled"),
    [
        (Counted(100, 100, (10, 20)), (10.0, 20.0)),
        (Counted(100, 50, (10, 20)), (20.0, 40.0)),
        (Counted(100, 0, (0, 0)), (0.0, 0.0)),
        (Counted(0, 0, (0, 0)), (0.0, 0.0)),
        (Counted(90, 100, (10, 20)), (10.0, 20.0)),
    ],
    ids=["all the time", "half of the time", "never", "group never ran", "clocks disagree"],
)
def test_a_set_that_took_turns_is_scaled(counted: Counted, scaled: tuple[float, ...]) -> None:
    assert counted.scaled() == scaled


@given(st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=4))
def test_a_set_is_parsed_and_never_absurd(numbers: list[int]) -> None:
    enabled, running, *values = numbers
    content = struct.pack(f"=Q{len(numbers)}Q", len(values), *numbers)
    assert parse_set(content) == Counted(enabled, running, tuple(values))
    assert all(value >= 0 for value in parse_set(content).scaled())


@pytest.fixture
def group() -> Iterator[Path]:
    """A v2 group of this test's own: perf_event is there without being enabled."""
    roots = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
    root = next((root for root in roots if (root / "cgroup.controllers").exists()), None)
    require(root is not None and os.geteuid() == 0, "root and a cgroup v2 hierarchy", tier="v2")
    assert root is not None
    made = root / f"koord-test-perf-{os.getpid()}"
    made.mkdir()
    try:
        yield made
    finally:
        with contextlib.suppress(FileNotFoundError):
            made.rmdir()


def spin_in(group: Path, mebibytes: int) -> None:
    """Run a process in the group that touches so much memory, and wait for its end."""
    child = os.fork()
    if child == 0:
        try:
            (group / "cgroup.procs").write_text("0")
            bytearray(mebibytes << 20)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_only_the_groups_processes_are_counted(group: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    counters = CgroupCounters(str(group), cpus, (CPU_CLOCK, PAGE_FAULTS))
    try:
        assert counters.read() == (0.0, 0.0)
        spin_in(group, 8)
        clock_ns, faults = counters.read()
        assert clock_ns > 0
        assert faults >= 8 << 20 >> 21  # at least one for each huge page
    finally:
        counters.close()
        counters.close()


def test_no_descriptor_stays_open(group: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    counters = CgroupCounters(str(group), sorted(os.sched_getaffinity(0)), (CPU_CLOCK,))
    assert len(os.listdir("/proc/self/fd")) > before
    counters.close()
    with pytest.raises(OSError):
        CgroupCounters(str(group), [0], (CPU_CLOCK, Event(1, 9999)))
    with pytest.raises(FileNotFoundError):
        CgroupCounters(str(group / "gone"), [0], (CPU_CLOCK,))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cpu_that_went_offline_is_left_out(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = linux.perf_event._open

    def without_cpu_1(event: Event, directory: int, cpu: int, leader: int) -> int:
        if cpu == 1:
            raise OSError(errno.ENODEV, "offline")
        return opened(event, directory, cpu, leader)

    monkeypatch.setattr(linux.perf_event, "_open", without_cpu_1)
    counters = CgroupCounters(str(group), [0, 1], (CPU_CLOCK,))
    assert counters.read() == (0.0,)
    counters.close()
    with pytest.raises(NoCounters):
        CgroupCounters(str(group), [1], (CPU_CLOCK,))


def test_hardware_counters_count_or_say_why_not(group: Path) -> None:
    try:
        counters = CgroupCounters(str(group), [0], (CYCLES, INSTRUCTIONS))
    except NoCounters as error:
        assert error.strerror and ("this machine" in error.strerror or "may not" in error.strerror)
    else:
        spin_in(group, 1)
        assert all(value >= 0 for value in counters.read())
        counters.close()


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOENT, NoCounters), (errno.EACCES, NoCounters), (errno.EOPNOTSUPP, NoCounters),
     (errno.ENODEV, NoCounters), (errno.ENOSYS, NoCounters), (errno.EMFILE, OSError)],
)  # fmt: skip
def test_a_machine_without_counters_differs_from_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[OSError]
) -> None:
    def refuse(event: Event, directory: int, cpu: int, leader: int) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(linux.perf_event, "_open", refuse)
    with pytest.raises(OSError) as refused:
        CgroupCounters(str(tmp_path), [0], (CYCLES,))
    assert isinstance(refused.value, NoCounters) is (raised is NoCounters)


def test_a_group_that_goes_while_it_is_opened_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "group"
    directory.mkdir()

    def remove(event: Event, group: int, cpu: int, leader: int) -> int:
        directory.rmdir()
        raise OSError(errno.ENOENT, "the group is gone")

    monkeypatch.setattr(linux.perf_event, "_open", remove)
    with pytest.raises(FileNotFoundError):
        CgroupCounters(str(directory), [0], (CYCLES,))
