"""Counting the containers' cycles and instructions: windows, parts, limits and refusals."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from koordlet.measurement.collecting import ContainerTarget, PodTarget, Targets, Unavailable
from koordlet.measurement.collectors.cpi import CpiCollector, local_counters
from koordlet.measurement.kernel_files import LocalFiles
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Driver, Layout
from linux.perf_event import NoCounters
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.simulated import DEBIAN_12_V2, SimulatedKernel

LAYOUT = Layout(2, {"": "/sys/fs/cgroup"}, Driver.CGROUPFS, "kubepods")


@dataclass
class Machine:
    """Counters that count as a test says.

    refuse: directory -> what opening it raises. broken: directories whose counters cannot be read.
    """

    cycles: float = 2000.0
    instructions: float = 1000.0
    refuse: dict[str, OSError] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    most_open: int = 0
    cpus: tuple[int, ...] = ()

    def count(self, directory: str, cpus: Sequence[int]) -> Counting:
        error = self.refuse.get(directory) or self.refuse.get("*")
        if error is not None:
            raise error
        self.cpus = tuple(cpus)
        self.open.add(directory)
        self.most_open = max(self.most_open, len(self.open))
        return Counting(self, directory)


@dataclass
class Counting:
    machine: Machine
    directory: str

    def read(self) -> tuple[float, ...]:
        if self.directory in self.machine.broken:
            raise OSError(errno.EIO, "broken")
        return self.machine.cycles, self.machine.instructions

    def close(self) -> None:
        self.machine.open.discard(self.directory)


def rounds_of(machine: Machine, containers: int = 1, **options: int) -> Rounds:
    kernel = SimulatedKernel(DEBIAN_12_V2)  # 4 CPUs: 8 descriptors a container
    pods = tuple(
        PodTarget(f"uid-{n}", f"pod{n}", (ContainerTarget(f"box-{n}", f"pod{n}/box"),))
        for n in range(containers)
    )
    collector = CpiCollector(machine.count, **options)
    return Rounds.over(collector, kernel, Targets(LAYOUT, pods))


def events(of: str, cycles: float, instructions: float) -> dict[Series, float]:
    return {
        Series(Metric.CONTAINER_CPI, of, "cycle"): cycles,
        Series(Metric.CONTAINER_CPI, of, "instruction"): instructions,
    }


def test_a_window_of_ten_seconds_in_each_minute() -> None:
    machine = Machine()
    rounds = rounds_of(machine)
    found = [rounds.next() for _ in range(8)]
    assert found == [
        {},
        events("box-0", 2000, 1000),
        {},
        {},
        {},
        {},
        {},
        events("box-0", 2000, 1000),
    ]
    assert machine.cpus == (0, 1, 2, 3)
    assert machine.open == set()


def test_a_window_that_lasted_longer_is_scaled_down() -> None:
    rounds = rounds_of(Machine())
    rounds.next()
    assert rounds.next(20.0) == events("box-0", 1000, 500)


def test_counters_are_open_in_parts_of_the_limit() -> None:
    machine = Machine()
    rounds = rounds_of(machine, 5, most_descriptors=17)  # two containers at once
    found = [rounds.next() for _ in range(4)]
    assert machine.most_open == 2
    counted = [sorted({series.of for series in samples}) for samples in found]
    assert counted == [[], ["box-0", "box-1"], ["box-2", "box-3"], ["box-4"]]


def test_a_limit_below_one_container_is_unavailable_and_names_both_numbers() -> None:
    with pytest.raises(Unavailable, match="needs 9 descriptors, and 8 may be open"):
        rounds_of(Machine(), most_descriptors=8).next()


def test_a_machine_without_counters_is_unavailable_until_the_next_minute_tries_again() -> None:
    machine = Machine(refuse={"*": NoCounters(errno.ENOENT, "no such counters")})
    rounds = rounds_of(machine, 3)
    for _ in range(6):
        with pytest.raises(Unavailable, match="no such counters"):
            rounds.next()
    machine.refuse = {}
    assert rounds.next() == {}
    assert {series.of for series in rounds.next()} == {"box-0", "box-1", "box-2"}


def test_a_container_that_vanishes_or_fails_leaves_the_others() -> None:
    machine = Machine(
        refuse={
            "/sys/fs/cgroup/pod0/box": FileNotFoundError(errno.ENOENT, "gone"),
            "/sys/fs/cgroup/pod1/box": OSError(errno.EINVAL, "odd"),
        }
    )
    rounds = rounds_of(machine, 3)
    rounds.next()
    assert len(rounds.problems) == 1 and "box-1" in rounds.problems[0]
    assert {series.of for series in rounds.next()} == {"box-2"}


def test_without_descriptors_the_other_containers_wait() -> None:
    machine = Machine(refuse={"/sys/fs/cgroup/pod1/box": OSError(errno.EMFILE, "too many")})
    rounds = rounds_of(machine, 3)
    rounds.next()
    assert "wait" in rounds.problems[0]
    machine.refuse = {}
    assert {series.of for series in rounds.next()} == {"box-0"}
    assert {series.of for series in rounds.next()} == {"box-1", "box-2"}


def test_a_container_that_did_nothing_has_no_sample() -> None:
    rounds = rounds_of(Machine(cycles=0.0, instructions=0.0))
    rounds.next()
    assert rounds.next() == {}


def test_close_ends_an_open_window() -> None:
    machine = Machine()
    rounds = rounds_of(machine, 3)
    rounds.next()
    assert len(machine.open) == 3
    rounds.collector.close()
    assert machine.open == set()
    rounds.next()
    assert len(machine.open) == 3  # switched on again, it does not wait for the minute's end


def test_a_counter_that_cannot_be_read_is_named_and_leaves_the_others() -> None:
    machine = Machine()
    rounds = rounds_of(machine, 2)
    rounds.next()
    machine.broken = {"/sys/fs/cgroup/pod0/box"}
    assert {series.of for series in rounds.next()} == {"box-1"}
    (problem,) = rounds.problems
    assert problem.startswith("container box-0: ")
    assert machine.open == set()


def test_a_window_of_no_time_gives_no_sample() -> None:
    rounds = rounds_of(Machine())
    rounds.next()
    assert rounds.next(0.0) == {}


def test_only_both_counts_together_are_a_sample() -> None:
    rounds = rounds_of(Machine(cycles=5.0, instructions=0.0))
    rounds.next()
    assert rounds.next() == {}


def test_a_round_that_comes_a_little_early_begins_the_next_cycle_all_the_same() -> None:
    machine = Machine()
    rounds = rounds_of(machine)
    rounds.next()
    rounds.next()
    rounds.next(44.9)
    assert machine.open == set()
    rounds.next(0.1)
    assert len(machine.open) == 1


def test_a_container_that_ended_while_it_waited_is_not_counted() -> None:
    machine = Machine()
    rounds = rounds_of(machine, 3, most_descriptors=9)  # one container at once
    rounds.next()
    pods = rounds.targets.pods
    without = PodTarget("uid-2", "pod2", (ContainerTarget("box-2", ""),))
    rounds.targets = Targets(LAYOUT, (pods[0], without))
    assert {series.of for series in rounds.next()} == {"box-0"}
    assert machine.open == set()


def test_without_a_hierarchy_there_is_nothing_to_count_and_what_was_open_is_closed() -> None:
    machine = Machine()
    rounds = rounds_of(machine)
    rounds.next()
    rounds.targets = Targets()
    with pytest.raises(Unavailable, match="not known yet"):
        rounds.next()
    assert machine.open == set()
    rounds.targets = Targets(Layout(1, {"cpu": "/cpu"}, Driver.CGROUPFS, "kubepods"))
    with pytest.raises(Unavailable, match="perf_event"):
        rounds.next()


@pytest.mark.parametrize(
    ("soft", "at_once"),
    [
        (400, 12),  # a quarter of the limit, less one: 99 // 8
        (1 << 20, 511),  # 4096, less one
        (resource.RLIM_INFINITY, 511),
    ],
)
def test_counters_take_at_most_a_quarter_of_the_open_files(
    soft: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    machine = Machine()
    rounds_of(machine, 520).next()
    assert machine.most_open == at_once


def test_this_machine_counts_or_says_why_not() -> None:
    before = len(os.listdir("/proc/self/fd"))
    mount = (
        "/sys/fs/cgroup/unified" if os.path.isdir("/sys/fs/cgroup/unified") else "/sys/fs/cgroup"
    )
    targets = Targets(
        Layout(2, {"": mount}, Driver.CGROUPFS, ""),
        (PodTarget("u", "x", (ContainerTarget("root", "."),)),),
    )
    rounds = Rounds(CpiCollector(local_counters()), LocalFiles(), targets)
    with contextlib.suppress(Unavailable):
        rounds.next()
        assert all(value > 0 for value in rounds.next().values())
    rounds.collector.close()
    assert len(os.listdir("/proc/self/fd")) == before
