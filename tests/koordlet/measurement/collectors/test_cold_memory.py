"""Cold memory on Alibaba's kernel: kidled is started once, set back, and left to its operator."""

from __future__ import annotations

import dataclasses
import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koordlet.measurement.collecting import (
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Round,
    Targets,
    Unavailable,
)
from koordlet.measurement.collectors.cold_memory import ColdMemoryCollector
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from linux.discovery import discover
from linux.kidled import Kidled, read_kidled, write_kidled
from tests.koordlet.measurement.collectors.rounds import Rounds, Stored
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles
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


@settings(max_examples=30)
@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(0, 2**60))
def test_hot_memory_never_wraps(file: int, cold: int, usage: int) -> None:
    kernel, rounds = machine()
    set_memory(kernel, BOX, file=max(file, cold), cold=cold)
    rounds.stored.samples = {Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "uid-1"): float(usage)}
    hot = rounds.next()[Series(Metric.POD_MEMORY_WITH_HOT_PAGES, "uid-1")]
    assert 0 <= hot <= usage


# -- the groups' files ----------------------------------------------------------------------------

STATS = b"# scan_period_in_seconds: 5\n# buckets: 1,60\ncfei 0 %d\n"


def scripted() -> tuple[SimulatedKernel, Rounds, ScriptedFiles]:
    """Return rounds in which every group has 100 bytes of cold memory."""
    kernel, rounds = machine()
    files = ScriptedFiles({path_of(cgroup): STATS % 100 for cgroup in ("", POD, BOX, APP)})
    rounds.files = files
    return kernel, rounds, files


def path_of(cgroup: str) -> str:
    return f"/sys/fs/cgroup/memory{'/' if cgroup else ''}{cgroup}/memory.idle_page_stats"


def test_files_stay_open_and_follow_the_groups() -> None:
    _, rounds, files = scripted()
    rounds.next()
    assert files.opened == [(path_of(cgroup), 8192) for cgroup in ("", POD, BOX, APP)]
    rounds.next()
    assert len(files.opened) == 4
    rounds.targets = Targets(rounds.targets.layout, (PodTarget("uid-1", POD),))
    assert set(rounds.next()) == {
        Series(Metric.NODE_MEMORY_COLD),
        Series(Metric.POD_MEMORY_COLD, "uid-1"),
    }
    assert (files.is_open, len(files.opened)) == ([path_of(""), path_of(POD)], 4)
    rounds.collector.close()
    assert files.is_open == []
    rounds.next()
    assert len(files.opened) == 6


def test_another_tree_of_cgroups_is_opened_again() -> None:
    _, rounds, files = scripted()
    rounds.next()
    layout = rounds.targets.layout
    assert layout is not None
    moved = dataclasses.replace(layout, mounts={**layout.mounts, "memory": "/other"})
    rounds.targets = Targets(moved)
    files.content["/other/memory.idle_page_stats"] = STATS % 7
    assert rounds.next() == {Series(Metric.NODE_MEMORY_COLD): 7.0}
    assert files.is_open == ["/other/memory.idle_page_stats"]


@pytest.mark.parametrize("gone", [errno.ENOENT, errno.ENODEV])
def test_a_group_that_is_gone_costs_nothing_and_is_found_again(gone: int) -> None:
    _, rounds, files = scripted()
    rounds.next()
    files.content[path_of(BOX)] = gone
    assert Series(Metric.CONTAINER_MEMORY_COLD, "box") not in rounds.next()
    assert (rounds.problems, len(files.is_open)) == ([], 3)
    files.content[path_of(BOX)] = STATS % 9
    assert rounds.next()[Series(Metric.CONTAINER_MEMORY_COLD, "box")] == 9.0


@pytest.mark.parametrize(
    ("cgroup", "broken", "problem"),
    [
        (BOX, errno.EIO, f"{BOX}: [Errno 5] scripted: '{path_of(BOX)}'"),
        ("", errno.EIO, f"the node: [Errno 5] scripted: '{path_of('')}'"),
        (BOX, b"", f"{BOX}: idle page statistics without a scan period or without classes"),
    ],
)
def test_a_group_whose_file_is_broken_is_reported_alone(
    cgroup: str, broken: bytes | int, problem: str
) -> None:
    _, rounds, files = scripted()
    files.content[path_of(cgroup)] = broken
    assert len(rounds.next()) == 3
    assert rounds.problems == [problem]


def test_each_kind_has_its_hot_memory() -> None:
    _, rounds, _ = scripted()
    kinds = {
        Metric.NODE_MEMORY_WITH_PAGE_CACHE: (Metric.NODE_MEMORY_WITH_HOT_PAGES, ""),
        Metric.POD_MEMORY_WITH_PAGE_CACHE: (Metric.POD_MEMORY_WITH_HOT_PAGES, "uid-1"),
        Metric.CONTAINER_MEMORY_WITH_PAGE_CACHE: (Metric.CONTAINER_MEMORY_WITH_HOT_PAGES, "box"),
        Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE: (Metric.HOST_APP_MEMORY_WITH_HOT_PAGES, "app"),
    }
    for number, (metric, (_, of)) in enumerate(kinds.items()):
        rounds.stored.samples[Series(metric, of)] = 1000.0 + number
        rounds.stored.samples[Series(metric, "unknown")] = 5.0
    found = rounds.next()
    assert {series: value for series, value in found.items() if value > 100} == {
        Series(hot, of): 900.0 + number for number, (hot, of) in enumerate(kinds.values())
    }


def test_samples_of_usage_are_at_most_some_periods_old() -> None:
    asked: set[float] = set()

    class Asked(Stored):
        def latest_of(self, metric: Metric, *, within_s: float) -> dict[tuple[str, str], float]:
            asked.add(within_s)
            return {}

    _, rounds, _ = scripted()
    rounds.stored = Asked()
    rounds.next()
    assert asked == {LATEST_PERIODS * 5.0}


def test_hook_replies_get_a_turn_after_each_group() -> None:
    for count in (0, 1, 40):
        _, rounds, files = scripted()
        pods = tuple(PodTarget(f"u{number}", f"p{number}") for number in range(count))
        files.content |= {path_of(pod.cgroup): STATS % 1 for pod in pods}
        aside: list[int] = []
        round_ = Round(
            now=0.0,
            targets=Targets(rounds.targets.layout, pods),
            files=files,
            measured=rounds.stored,
            step_aside=lambda aside=aside: aside.append(1),  # type: ignore[misc]
        )
        rounds.collector.sample(round_)
        assert len(aside) == 1 + count  # the node is a group too


def test_reasons_without_a_tree_and_without_kidled() -> None:
    _, rounds, _ = scripted()
    rounds.targets = Targets()
    with pytest.raises(Unavailable, match=r"^the cgroup tree is not known yet$"):
        rounds.next()
    plain = SimulatedKernel(DEBIAN_12_V2)
    rounds = Rounds.over(ColdMemoryCollector(plain), plain, Targets(discover(plain)))
    reason = r"^this kernel has no kidled: only Alibaba's kernels have it$"
    with pytest.raises(Unavailable, match=reason):
        rounds.next()


def test_kidled_that_an_operator_switches_off_is_started_again_and_set_back_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel, rounds, _ = scripted()
    rounds.next()
    write_kidled(kernel, Kidled(0, use_hierarchy=True))
    rounds.next()
    assert read_kidled(kernel) == Kidled(5, use_hierarchy=True)
    rounds.collector.close()
    assert read_kidled(kernel) == Kidled(0, use_hierarchy=True)
    with kernel.recording() as writes:
        rounds.collector.close()
    assert writes == []
    rounds.next()
    kernel.faults.fail("write", errno.EPERM, path="*/kidled/*")
    rounds.collector.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("kidled goes on scanning memory: [Errno 1]")
