"""Scheduling of threads: what the kernel has of it, and who keeps the interpreter."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from service import scheduling
from service.scheduling import StepAside, keep_interpreter, schedule_this_thread
from tests.conftest import require

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread of its own, whose scheduling ends with it."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def niceness() -> int:
    """The calling thread's, as the kernel shows it."""
    with open("/proc/thread-self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[16])


def slice_us() -> int:
    """The calling thread's slice, where the kernel has one that can be set; otherwise 0."""
    buffer = ctypes.create_string_buffer(56)
    number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
    assert ctypes.CDLL(None).syscall(number, 0, buffer, len(buffer), 0) == 0
    return int.from_bytes(buffer.raw[24:32], sys.byteorder) // 1000


@pytest.fixture
def may_be_preferred() -> None:
    def lowers() -> bool:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -3)
        except PermissionError:
            return False
        return True

    require(in_thread(lowers), "needs CAP_SYS_NICE: run the tests with sudo")


@pytest.mark.usefixtures("may_be_preferred")
def test_the_kernel_has_slice_and_niceness_of_the_calling_thread() -> None:
    before = niceness()

    def work() -> tuple[bool, int, int]:
        return schedule_this_thread(slice_us=150, niceness=-7), niceness(), slice_us()

    took, nice, its_slice = in_thread(work)
    assert (took, nice) == (True, -7)
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release >= (6, 12):
        assert its_slice == 150
    assert niceness() == before


@pytest.mark.usefixtures("may_be_preferred")
def test_threads_and_processes_that_it_starts_are_ordinary() -> None:
    def work() -> tuple[int, int, int, int]:
        ordinary = in_thread(slice_us)
        schedule_this_thread(slice_us=150, niceness=-7)
        child = os.fork()
        if not child:
            os._exit(abs(niceness()))
        _, status = os.waitpid(child, 0)
        return in_thread(niceness), os.waitstatus_to_exitcode(status), in_thread(slice_us), ordinary

    thread, process, its_slice, ordinary = in_thread(work)
    assert (thread, process) == (0, 0)
    assert its_slice == ordinary


def test_a_thread_keeps_its_niceness_when_only_the_slice_is_given() -> None:
    def work() -> tuple[bool, int]:
        os.setpriority(os.PRIO_PROCESS, 0, niceness() + 2)
        return schedule_this_thread(slice_us=20_000), niceness()

    assert in_thread(work) == (True, niceness() + 2)


def test_where_it_is_refused_the_thread_goes_on_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing rights are tried with a whole daemon in tests/koordlet/daemon/test_scheduling.py."""
    caplog.set_level(logging.INFO)
    scheduling._report_refusal.cache_clear()
    before = niceness()

    def refused() -> tuple[bool, int]:
        return schedule_this_thread(slice_us=100, niceness=3), niceness()

    with monkeypatch.context() as patched:
        patched.setattr("platform.machine", lambda: "pdp11")
        assert in_thread(refused) == (False, before)
    with monkeypatch.context() as patched:
        patched.setattr("os.SCHED_OTHER", 77)  # the kernel knows no such policy
        assert in_thread(refused) == (False, before)
        assert in_thread(refused) == (False, before)  # and is not logged again
    assert [record.getMessage() for record in caplog.records] == [
        "this thread keeps its scheduling: sched_setattr is not known on pdp11",
        "this thread keeps its scheduling: sched_setattr: Invalid argument",
    ]


@pytest.mark.parametrize("interval_us", [1, 49, 50, 200, 5000])
def test_the_switch_interval_is_restored_exactly_also_after_a_fault(interval_us: int) -> None:
    before = sys.getswitchinterval()
    kept = keep_interpreter()  # made before the interval is set, as a daemon's first connection
    sys.setswitchinterval((interval_us + 0.5) / 1e6)
    try:
        for _ in range(10):
            with pytest.raises(ZeroDivisionError), kept:
                assert sys.getswitchinterval() == scheduling._KEEP_S
                _ = 1 / 0
        assert sys.getswitchinterval() == pytest.approx(interval_us / 1e6)
    finally:
        sys.setswitchinterval(before)


class Worked:
    """A thread's processor time, and the sleeps at which it stood."""

    def __init__(self) -> None:
        self.time = 5.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.25
        self.slept.append(self.time)
        self.time += 0.5  # what the sleep itself costs does not count as work


def test_a_thread_steps_aside_after_each_share_of_work() -> None:
    worked = Worked()
    aside = StepAside(
        work_s=2.0, aside_s=0.25, clock=worked.clock, elapsed=worked.clock, sleep=worked.sleep
    )
    aside()
    assert worked.slept == [5.0]  # what it worked before is not known to be little
    for _ in range(8):
        worked.time += 0.75
        aside()
    # At 5.5 the work began again: 6.25, 7.0 and 7.75, which is more than 2.0 later.
    assert worked.slept == [5.0, 7.75, 10.5]


def test_garbage_is_collected_after_the_pause_and_counts_as_work() -> None:
    worked = Worked()
    collected: list[float] = []

    def collect() -> None:
        collected.append(worked.time)
        worked.time += 1.5

    aside = StepAside(
        work_s=2.0,
        aside_s=0.25,
        collect=collect,
        clock=worked.clock,
        elapsed=worked.clock,
        sleep=worked.sleep,
    )
    aside()
    worked.time += 0.5
    aside()
    assert (worked.slept, collected) == ([5.0, 7.5], [5.5, 8.0])


def test_waiting_is_no_work() -> None:
    slept: list[float] = []

    def measured() -> list[float]:
        aside = StepAside(work_s=0.2, sleep=slept.append)
        for _ in range(5):
            time.sleep(0.1)
            aside()
        return slept

    assert in_thread(measured) == []


def test_a_busy_thread_leaves_the_processor_to_another() -> None:
    """The real clock and sleep: the kernel counts a voluntary switch for each time."""

    def switches() -> int:
        with open("/proc/thread-self/status") as file:
            found = next(line for line in file if line.startswith("voluntary_ctxt_switches"))
        return int(found.split()[1])

    def busy() -> int:
        aside = StepAside()
        before = switches()
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            aside()
        return switches() - before

    assert in_thread(busy) >= 50  # of 100: it may be interrupted for longer than its share
