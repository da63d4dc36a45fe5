"""Pressure of node, pods and containers: averages as the kernel has them, and exact stalls."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement.collecting import (
    ContainerTarget,
    PodTarget,
    Round,
    Targets,
    Unavailable,
)
from koordlet.measurement.collectors.psi import PressureCollector
from koordlet.measurement.kernel_files import PAGE, KernelFile, KernelFiles, LocalFiles
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Driver, Layout
from linux.discovery import discover
from tests.conftest import require
from tests.koordlet.measurement.collectors.rounds import Rounds, Stored
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, DEBIAN_12_V2, RHEL_9, SimulatedKernel
from tests.simulated.profiles import Feature, Profile
from tests.waiting import wait_until

POD, BOX = "kubepods/podone", "kubepods/podone/box"


def machine(profile: Profile) -> tuple[SimulatedKernel, Rounds]:
    kernel = SimulatedKernel(profile)
    for hierarchy in ("cpuacct", "cpu", "memory") if profile.cgroup == 1 else ("",):
        kernel.make(f"/sys/fs/cgroup/{hierarchy}/{BOX}")
    targets = Targets(
        discover(kernel), (PodTarget("uid-1", POD, (ContainerTarget("box", BOX),)),), ()
    )
    return kernel, Rounds.over(PressureCollector(), kernel, targets)


def test_a_file_that_stood_still_and_moves_again_is_seen() -> None:
    kernel, rounds = machine(DEBIAN_12_V2)
    kernel.set_pressure(BOX, "memory", (2.5, 1.5, 0.5, 1_000_000))
    average, stall = (
        Series(Metric.CONTAINER_PSI, "box", f"mem.some.{measure}") for measure in ("avg10", "stall")
    )
    assert rounds.next()[average] == 2.5
    at_rest = rounds.next()
    assert (at_rest[average], at_rest[stall]) == (2.5, 0.0)
    kernel.set_pressure(BOX, "memory", (4.0, 1.5, 0.5, 2_000_000))
    moved = rounds.next()
    assert moved[average] == 4.0 and moved[stall] > 0


@pytest.mark.parametrize(("interval_s", "kept_s"), [(1.0, 63.0), (10.0, 630.0)])
def test_as_many_samples_are_kept_at_each_interval(interval_s: float, kept_s: float) -> None:
    assert PressureCollector(interval_s=interval_s).retention_s == kept_s


@pytest.mark.parametrize("profile", [DEBIAN_12_V2, ANOLIS_8], ids=lambda one: one.name)
def test_averages_and_stalls(profile: Profile) -> None:
    kernel, rounds = machine(profile)
    kernel.set_pressure(BOX, "memory", (2.5, 1.5, 0.5, 1_000_000))
    kernel.set_pressure(POD, "io", (7.0, 0.0, 0.0, 0))
    first = rounds.next()
    assert first[Series(Metric.CONTAINER_PSI, "box", "mem.some.avg10")] == 2.5
    assert first[Series(Metric.CONTAINER_PSI, "box", "mem.some.avg60")] == 1.5
    assert first[Series(Metric.CONTAINER_PSI, "box", "mem.full.avg300")] == 0.5
    assert first[Series(Metric.POD_PSI, "uid-1", "io.some.avg10")] == 7.0
    assert first[Series(Metric.NODE_PSI, "", "cpu.some.avg10")] == 0.0
    assert not any(series.detail.endswith("stall") for series in first)
    kernel.set_pressure(BOX, "memory", (3.0, 1.5, 0.5, 3_000_000))
    second = rounds.next()
    # 2 s of waiting in the 10 s between the rounds.
    assert second[Series(Metric.CONTAINER_PSI, "box", "mem.some.stall")] == pytest.approx(20.0)
    assert second[Series(Metric.CONTAINER_PSI, "box", "cpu.some.stall")] == 0.0


def test_a_kernel_without_full_for_the_cpu_has_no_such_series() -> None:
    _, rounds = machine(ANOLIS_8)  # 5.10: the line came with 5.13
    details = {series.detail for series in rounds.next() if series.metric is Metric.CONTAINER_PSI}
    assert "cpu.some.avg10" in details
    assert "cpu.full.avg10" not in details
    assert "io.full.avg10" in details


def test_mainline_on_cgroup_v1_has_the_nodes_pressure_alone() -> None:
    _, rounds = machine(DEBIAN_12_V1)
    for _ in range(2):
        assert {series.metric for series in rounds.next()} == {Metric.NODE_PSI}
    assert "no pressure of groups" in rounds.problems[0]


def test_on_v1_without_the_files_no_group_is_tried_again() -> None:
    _, rounds = machine(DEBIAN_12_V1)
    files = Counted(rounds.files)
    rounds.files = files
    rounds.next()
    assert sum(POD in path for path in files.tried) == 6  # of the pod and its container
    files.tried.clear()
    other = PodTarget("uid-2", "kubepods/podtwo")
    rounds.targets = Targets(rounds.targets.layout, (*rounds.targets.pods, other), ())
    rounds.next()
    assert not [path for path in files.tried if "/kubepods/" in path]
    assert "no pressure of groups" in rounds.problems[0]


class Counted:
    """Other files, of which it is noted which ones are opened."""

    def __init__(self, files: KernelFiles) -> None:
        self._files = files
        self.tried: list[str] = []

    def open(self, path: str, size: int = PAGE) -> KernelFile:
        self.tried.append(path)
        return self._files.open(path, size)

    def listdir(self, path: str) -> list[str]:
        return self._files.listdir(path)


def test_groups_that_are_not_there_now_hide_no_later_ones() -> None:
    kernel, rounds = machine(ANOLIS_8)
    kernel.remove_group(POD)
    for _ in range(2):
        assert {series.metric for series in rounds.next()} == {Metric.NODE_PSI}
        assert rounds.problems == []
    for hierarchy in ("cpuacct", "cpu", "memory"):
        kernel.make(f"/sys/fs/cgroup/{hierarchy}/{BOX}")
    assert {series.of for series in rounds.next()} == {"", "uid-1", "box"}


def test_a_kernel_without_psi_is_unavailable() -> None:
    _, rounds = machine(RHEL_9)
    with pytest.raises(Unavailable, match="no PSI"):
        rounds.next()


def test_psi_that_is_switched_off_is_unavailable_and_says_how_to_switch_it_on() -> None:
    kernel, rounds = machine(DEBIAN_12_V2)
    kernel.faults.fail("read", errno.EOPNOTSUPP, path="*/pressure/cpu")
    with pytest.raises(Unavailable, match="psi=1"):
        rounds.next()


def test_a_vanished_group_and_its_successor_give_no_absurd_stall() -> None:
    kernel, rounds = machine(DEBIAN_12_V2)
    stall = Series(Metric.CONTAINER_PSI, "box", "cpu.some.stall")
    kernel.set_pressure(BOX, "cpu", (50.0, 0.0, 0.0, 9_000_000))
    rounds.next()
    kernel.remove_group(BOX)
    assert not [series for series in rounds.next() if series.metric is Metric.CONTAINER_PSI]
    assert rounds.problems == []
    kernel.make(f"/sys/fs/cgroup/{BOX}")
    kernel.set_pressure(BOX, "cpu", (1.0, 0.0, 0.0, 10_000_000))
    assert stall not in rounds.next()
    assert rounds.next()[stall] == 0.0


def test_one_bad_file_leaves_the_others() -> None:
    kernel, rounds = machine(DEBIAN_12_V2)
    kernel.faults.fail("read", errno.EIO, path=f"*{BOX}/io.pressure")
    found = rounds.next()
    assert Series(Metric.CONTAINER_PSI, "box", "cpu.some.avg10") in found
    assert Series(Metric.CONTAINER_PSI, "box", "io.some.avg10") not in found
    assert len(rounds.problems) == 1 and BOX in rounds.problems[0]


def test_a_pod_that_ends_takes_its_series_along() -> None:
    _, rounds = machine(DEBIAN_12_V2)
    rounds.next()
    rounds.targets = Targets(rounds.targets.layout)
    assert {series.metric for series in rounds.next()} == {Metric.NODE_PSI}


@given(st.lists(st.tuples(st.integers(0, 2**63), st.floats(0.01, 1000)), max_size=8))
def test_a_stall_is_always_a_percentage(steps: list[tuple[int, float]]) -> None:
    kernel, rounds = machine(DEBIAN_12_V2.lacking(Feature.SWAP_ACCOUNTING))
    for total_us, step_s in steps:
        kernel.set_pressure(BOX, "cpu", (0.0, 0.0, 0.0, total_us))
        assert all(0 <= value <= 100 for value in rounds.next(step_s).values())


def test_this_machine() -> None:
    require(Path("/proc/pressure").is_dir(), "a kernel with PSI (psi=1)", tier="psi")
    rounds = Rounds(PressureCollector(interval_s=1.0), LocalFiles())
    before = len(os.listdir("/proc/self/fd"))
    first, second = rounds.next(), rounds.next()
    assert {series.metric for series in first} == {Metric.NODE_PSI}
    assert Series(Metric.NODE_PSI, "", "mem.some.stall") in second
    assert all(0 <= value <= 100 for value in second.values())
    rounds.collector.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_cgroup_with_braces_in_its_name_is_found() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    kernel.make("/sys/fs/cgroup/odd{}name")
    layout = Layout(2, {"": "/sys/fs/cgroup"}, Driver.CGROUPFS, "")
    rounds = Rounds.over(
        PressureCollector(), kernel, Targets(layout, (PodTarget("u", "odd{}name"),))
    )
    assert Series(Metric.POD_PSI, "u", "cpu.some.avg10") in rounds.next()


V2 = Layout(2, {"": "/v2"}, Driver.CGROUPFS, "k")
PRESSURE = b"some avg10=1.00 avg60=2.00 avg300=3.00 total=%d\nfull avg10=0.00 avg60=0.00 "
PRESSURE += b"avg300=0.00 total=0\n"


def pressure_of(*directories: str, total_us: int = 0) -> dict[str, bytes | int]:
    """Return the three files of each directory, and the node's."""
    return {
        f"{directory}{kind}": PRESSURE % total_us
        for directory, suffix in (
            ("/proc/pressure/", ""),
            *((f"{d}/", ".pressure") for d in directories),
        )
        for kind in (f"{resource}{suffix}" for resource in ("cpu", "memory", "io"))
    }


def test_groups_keep_their_files_while_others_come_and_go() -> None:
    files = ScriptedFiles(pressure_of("/v2/k/a", "/v2/k/b"))
    rounds = Rounds(
        PressureCollector(), files, Targets(V2, (PodTarget("a", "k/a"), PodTarget("b", "k/b")))
    )
    rounds.next()
    assert len(files.opened) == 9
    rounds.targets = Targets(V2, (PodTarget("a", "k/a"),))
    found = rounds.next()
    assert found[Series(Metric.POD_PSI, "a", "io.some.stall")] == 0.0
    assert found[Series(Metric.NODE_PSI, "", "io.some.stall")] == 0.0
    assert len(files.opened) == 9
    assert not [path for path in files.is_open if "/k/b/" in path]
    rounds.collector.close()
    assert files.is_open == []


def test_other_mounts_mean_other_files_and_counters() -> None:
    files = ScriptedFiles(pressure_of("/v2/k/a", "/new/k/a"))
    rounds = Rounds(PressureCollector(), files, Targets(V2, (PodTarget("a", "k/a"),)))
    rounds.next()
    rounds.targets = Targets(
        Layout(2, {"": "/new"}, Driver.CGROUPFS, "k"), (PodTarget("a", "k/a"),)
    )
    assert Series(Metric.POD_PSI, "a", "cpu.some.stall") not in rounds.next()
    assert sorted(path for path in files.is_open if "/k/" in path) == [
        f"/new/k/a/{name}.pressure" for name in ("cpu", "io", "memory")
    ]


def test_a_file_that_fails_is_opened_again_and_its_stall_begins_again() -> None:
    files = ScriptedFiles(pressure_of("/v2/k/a"))
    rounds = Rounds(PressureCollector(), files, Targets(V2, (PodTarget("a", "k/a"),)))
    rounds.next()
    for content in (errno.EIO, b"nonsense\n"):
        files.content["/v2/k/a/cpu.pressure"] = content
        assert Series(Metric.POD_PSI, "a", "cpu.some.avg10") not in rounds.next()
        (problem,) = rounds.problems
        assert problem.startswith("k/a: ")
        assert "/v2/k/a/cpu.pressure" not in files.is_open
        files.content |= pressure_of("/v2/k/a", total_us=9_000_000)
        found = rounds.next()
        assert found[Series(Metric.POD_PSI, "a", "cpu.some.avg10")] == 1.0
        assert Series(Metric.POD_PSI, "a", "cpu.some.stall") not in found
        assert Series(Metric.POD_PSI, "a", "cpu.full.stall") not in found


def test_a_file_of_the_node_that_fails_is_named() -> None:
    files = ScriptedFiles(pressure_of())
    files.content["/proc/pressure/io"] = errno.EIO
    rounds = Rounds(PressureCollector(), files)
    assert Series(Metric.NODE_PSI, "", "cpu.some.avg10") in rounds.next()
    (problem,) = rounds.problems
    assert problem.startswith("the node: ")


def test_a_v1_without_cpuacct_has_the_nodes_pressure() -> None:
    v1 = Layout(1, {"cpu": "/cpu"}, Driver.CGROUPFS, "k")
    rounds = Rounds(
        PressureCollector(), ScriptedFiles(pressure_of()), Targets(v1, (PodTarget("a", "k/a"),))
    )
    assert {series.metric for series in rounds.next()} == {Metric.NODE_PSI}
    assert rounds.problems == []


def test_replies_get_their_turn_after_each_group() -> None:
    names = [f"pod{number}" for number in range(17)]
    files = ScriptedFiles(pressure_of(*(f"/v2/k/{name}" for name in names)))
    aside: list[int] = []
    round_ = Round(
        now=1.0,
        targets=Targets(V2, tuple(PodTarget(name, f"k/{name}") for name in names)),
        files=files,
        measured=Stored(),
        clock=lambda: 1.0,
        step_aside=lambda: aside.append(len(files.opened)),
    )
    PressureCollector().sample(round_)
    assert aside == [3 + 3 * number for number in range(1, 18)]


@contextlib.contextmanager
def crowded_group() -> Iterator[tuple[str, str]]:
    """A v2 group of this test's own with two spinning processes on one CPU; yields the hierarchy
    and the group's path in it."""
    mounts = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    mount = next((one for one in mounts if os.path.exists(f"{one}/cgroup.controllers")), None)
    require(mount and os.geteuid() == 0, "root and a cgroup v2 hierarchy", tier="v2")
    require(Path("/proc/pressure").is_dir(), "a kernel with PSI (psi=1)", tier="psi")
    assert mount is not None
    name = f"koord-test-psi-{os.getpid()}"
    group = Path(mount, name)
    group.mkdir()
    cpu = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        for spinner in spinners:
            (group / "cgroup.procs").write_text(str(spinner.pid))
        yield mount, name
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
        group.rmdir()


def test_two_spinners_on_one_cpu_wait_half_of_the_time() -> None:
    with crowded_group() as (mount, name):
        layout = Layout(2, {"": mount}, Driver.CGROUPFS, "")
        rounds = Rounds(
            PressureCollector(interval_s=1.0),
            LocalFiles(),
            Targets(layout, (PodTarget("u", name),)),
        )
        stall = Series(Metric.POD_PSI, "u", "cpu.some.stall")

        def waits() -> bool:
            rounds.now = time.monotonic()
            return rounds.next(0.0).get(stall, 0.0) > 50.0

        wait_until(waits, "more than half of the time is waited", timeout_s=30, every_s=0.5)
        rounds.collector.close()
