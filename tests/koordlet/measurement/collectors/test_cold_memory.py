"""Cold memory on Alibaba's kernel: kidled is started once, set back, and left to its operator."""

from __future__ import annotations

import dataclasses
import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.collecting import (
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Targets,
    Unavailable,
)
from koordlet.measurement.collectors.cold_memory import ColdMemoryCollector
from koordlet.measurement.series import Metric, Series
from linux.discovery import discover
from linux.kidled import Kidled, read_kidled, write_kidled
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.simulated import ANOLIS_8, DEBIAN_12_V2, SimulatedKernel
from tests.simulated.memory import MemoryState

POD, BOX, APP = "kubepods/podone", "kubepods/podone/box", "host-best-effort/app"


def machine() -> tuple[SimulatedKernel, Rounds]:
    kernel = SimulatedKernel(ANOLIS_8)
    for cgroup in (BOX, APP):
        kernel.make(f"/sys/fs/cgroup/memory/{cgroup}")
    targets = Targets(
        discover(kernel),
        (PodTarget("uid-1", POD, (ContainerTarget("box", BOX),)),),
        (HostAppTarget("app", APP),),
    )
    return kernel, Rounds.over(ColdMemoryCollector(kernel), kernel, targets)


def set_memory(kernel: SimulatedKernel, cgroup: str, *, file: int, cold: int) -> None:
    state = kernel.group(cgroup, "memory").state(MemoryState)
    state.file_bytes, state.cold_bytes = file, cold


def test_cold_and_hot_memory() -> None:
    kernel, rounds = machine()
    set_memory(kernel, BOX, file=1000, cold=300)
    set_memory(kernel, APP, file=50, cold=50)
    rounds.stored.samples = {
        Series(Metric.NODE_MEMORY_WITH_PAGE_CACHE): 5000.0,
        Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "uid-1"): 1200.0,
        Series(Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE, "app"): 20.0,  # read before it grew
    }
    assert rounds.next() == {
        Series(Metric.NODE_MEMORY_COLD): 350.0,
        Series(Metric.POD_MEMORY_COLD, "uid-1"): 300.0,
        Series(Metric.CONTAINER_MEMORY_COLD, "box"): 300.0,
        Series(Metric.HOST_APP_MEMORY_COLD, "app"): 50.0,
        Series(Metric.NODE_MEMORY_WITH_HOT_PAGES): 4650.0,
        Series(Metric.POD_MEMORY_WITH_HOT_PAGES, "uid-1"): 900.0,
        Series(Metric.HOST_APP_MEMORY_WITH_HOT_PAGES, "app"): 0.0,
    }


def test_kidled_is_started_once_and_set_back() -> None:
    kernel, rounds = machine()
    rounds.next()
    assert read_kidled(kernel) == Kidled(5, use_hierarchy=True)
    with kernel.recording() as writes:
        rounds.next()
    assert writes == []
    rounds.collector.close()
    assert read_kidled(kernel) == Kidled(0, use_hierarchy=False)


def test_a_scan_period_of_the_operator_stays() -> None:
    kernel, rounds = machine()
    write_kidled(kernel, Kidled(120, use_hierarchy=True))
    set_memory(kernel, BOX, file=1000, cold=300)
    assert rounds.next()[Series(Metric.POD_MEMORY_COLD, "uid-1")] == 300.0
    rounds.collector.close()
    assert read_kidled(kernel) == Kidled(120, use_hierarchy=True)


def test_close_without_the_switches_does_not_raise() -> None:
    kernel, rounds = machine()
    rounds.next()
    kernel.faults.fail("write", errno.EPERM, path="*/kidled/*")
    rounds.collector.close()


def test_a_kernel_without_kidled_is_unavailable_and_nothing_is_written() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    rounds = Rounds.over(ColdMemoryCollector(kernel), kernel, Targets(discover(kernel)))
    with kernel.recording() as writes, pytest.raises(Unavailable, match="kidled"):
        rounds.next()
    assert writes == []


def test_without_a_memory_hierarchy_kidled_is_not_started() -> None:
    kernel, rounds = machine()
    layout = discover(kernel)
    mounts = {name: path for name, path in layout.mounts.items() if name != "memory"}
    rounds.targets = Targets(dataclasses.replace(layout, mounts=mounts))
    with kernel.recording() as writes, pytest.raises(Unavailable):
        rounds.next()
    assert writes == []


def test_a_broken_group_and_a_vanished_one_leave_the_others() -> None:
    kernel, rounds = machine()
    rounds.next()
    kernel.remove_group(BOX)
    kernel.faults.fail("read", errno.EIO, path=f"*{APP}/memory.idle_page_stats")
    found = rounds.next()
    assert Series(Metric.POD_MEMORY_COLD, "uid-1") in found
    assert Series(Metric.CONTAINER_MEMORY_COLD, "box") not in found
    assert Series(Metric.HOST_APP_MEMORY_COLD, "app") not in found
    assert len(rounds.problems) == 1 and APP in rounds.problems[0]


@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(0, 2**60))
def test_hot_memory_never_wraps(file: int, cold: int, usage: int) -> None:
    kernel, rounds = machine()
    set_memory(kernel, BOX, file=max(file, cold), cold=cold)
    rounds.stored.samples = {Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "uid-1"): float(usage)}
    hot = rounds.next()[Series(Metric.POD_MEMORY_WITH_HOT_PAGES, "uid-1")]
    assert 0 <= hot <= usage
