"""CPU, memory and throttling of cgroups, and the collector of pods and containers.

A group's files stay open. Values and files: docs/measurement.md, "Pods and containers". Memory is
stored from the first reading on, CPU and throttling from the second, since they are differences.

Where nothing ran since the last reading, memory is that of the last reading, and from the second
such reading on nothing is throttled: many containers do nothing in most seconds, and the CPU
counter is the cheapest of the files. A group that is throttled does not run either, but its periods
go on.
"""

from __future__ import annotations

import os
import re
import zlib
from typing import Final, NamedTuple

from koordlet.measurement.collecting import GroupTarget, Round, Targets, followed, layout_with
from koordlet.measurement.counters import Rate, number_after, within
from koordlet.measurement.kernel_files import GONE, KernelFile, KernelFiles, close_all
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Layout

CONTROLLERS: Final = ("cpu", "cpuacct", "memory")
"""A group needs all of them to be measured; kubelet does too."""
_MOST_SKIPPED: Final = 10
"""A group that is not there is looked for again after 1, 2, ... and at most so many intervals: pods
that have completed may be listed for days. Twice the value finds a late group 10 s later."""

_MOST_STILL: Final = 10
"""Chosen: so many readings at most without memory. What does not run takes no memory, and loses it
only when the kernel reclaims pages. Twice the value shows a reclaim 10 s later."""
_RESTING: Final = 16
"""Groups at rest between two looks at whether to step aside. Measured: 16 take 0.05 ms, of which
the look is a tenth. Four times the value would let a reply wait longer than `StepAside` means to.
"""

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_V1_MEMORY: Final = (b"\ntotal_inactive_anon ", b"\ntotal_active_anon ", b"\ntotal_unevictable ")
_V2_MEMORY: Final = (b"\ninactive_anon ", b"\nactive_anon ", b"\nunevictable ")
_V1_CACHE: Final = (b"\ntotal_inactive_file ", b"\ntotal_active_file ")
_V2_CACHE: Final = (b"\ninactive_file ", b"\nactive_file ")
_V1_LISTS: Final = re.compile(
    rb"\ntotal_inactive_anon (\d+)\ntotal_active_anon (\d+)"
    rb"\ntotal_inactive_file (\d+)\ntotal_active_file (\d+)\ntotal_unevictable (\d+)\n"
)
_V2_LISTS: Final = re.compile(
    rb"\ninactive_anon (\d+)\nactive_anon (\d+)"
    rb"\ninactive_file (\d+)\nactive_file (\d+)\nunevictable (\d+)\n"
)
"""The sizes of the lists of pages, in the order in which all kernels so far write them: one search
takes a third of the time of five."""
_V1_NUMA: Final = re.compile(
    rb"\nhierarchical_file=(\d+) [^\n]*\nhierarchical_anon=(\d+) [^\n]*"
    rb"\nhierarchical_unevictable=(\d+) "
)
"""The same sizes in pages, the two lists of a kind added up."""
_MOST_NODES: Final = 2
"""Chosen: v1's `memory.numa_stat` is read if it has so many NUMA nodes at most. Measured with one
node: the kernel makes it in 4 us, and `memory.stat` in 10 us. Each further node adds 8 numbers to
its 16, so with four nodes both would cost the same."""


class GroupUsage(NamedTuple):
    """What one group uses; None for what is not known in this round.

    cpu: cores. memory, with_page_cache: bytes. throttled: ratio of periods, 0..1.
    """

    cpu: float | None = None
    memory: float | None = None
    with_page_cache: float | None = None
    throttled: float | None = None


NOTHING: Final = GroupUsage()


class Group:
    """The open files and last counters of one cgroup."""

    __slots__ = (
        "_content",
        "_cpu",
        "_cpu_rate",
        "_former",
        "_interval_s",
        "_memory",
        "_missed",
        "_next_look",
        "_numa",
        "_periods",
        "_periods_stand",
        "_rest",
        "_sizes",
        "_stat",
        "_still",
        "_throttled",
        "_used",
        "cgroup",
    )

    def __init__(self, cgroup: str, interval_s: float) -> None:
        self.cgroup = cgroup
        self._interval_s = interval_s
        self._cpu: KernelFile | None = None
        self._stat: KernelFile | None = None
        self._memory: KernelFile | None = None
        self._numa = False
        self._cpu_rate = Rate(interval_s)
        self._former = b""
        self._periods = -1
        self._throttled = 0
        self._periods_stand = False
        """Whether no period began while nothing ran, so that the group waits for none."""
        self._content: bytes | None = None
        """The file with the CPU counter as last read."""
        self._used = -1
        """The CPU counter as last read."""
        self._rest: GroupUsage | None = None
        """What the group uses while that file stands still; None where that is not known."""
        self._sizes = 0, 0
        """Memory without and with page cache as last read."""
        self._still = 0
        """Readings since memory was read."""
        self._missed = 0
        self._next_look = -float("inf")

    def close(self) -> None:
        """Close the files and forget the counters."""
        close_all((self._cpu, self._stat, self._memory))
        self._cpu = self._stat = self._memory = None
        self._cpu_rate.forget()
        self._former = b""
        self._content = self._rest = None
        self._periods = self._used = -1
        self._periods_stand = False

    def read(self, round_: Round, layout: Layout, cpus: int) -> GroupUsage:
        """Return what the group uses; nothing for a group that is gone.

        While nothing of it changes, it is the same object in each round.
        cpus: of the machine. Raises OSError and ValueError for what is not a vanished group.
        """
        if round_.now < self._next_look:
            return NOTHING
        try:
            return self._read(round_, layout, cpus)
        except OSError as error:
            self.close()
            if error.errno in GONE:
                # Half an interval less: a round that comes a little early is not skipped.
                wait = min(self._missed, _MOST_SKIPPED) + 0.5
                self._next_look = round_.now + wait * self._interval_s
                self._missed += 1
                return NOTHING
            raise
        except ValueError:
            self.close()
            raise

    def _open(self, round_: Round, layout: Layout) -> None:
        files = round_.files
        if layout.version == 1:
            self._cpu = files.open(f"{layout.directory('cpuacct', self.cgroup)}/cpuacct.usage", 64)
        self._stat = files.open(f"{layout.directory('cpu', self.cgroup)}/cpu.stat")
        directory = layout.directory("memory", self.cgroup)
        numa = _numa_stat(files, directory) if layout.version == 1 else None
        self._numa = numa is not None
        self._memory = numa or files.open(f"{directory}/memory.stat")

    def _read(self, round_: Round, layout: Layout, cpus: int) -> GroupUsage:
        if self._memory is None or self._stat is None:
            self._open(round_, layout)
        assert self._memory is not None and self._stat is not None
        content = (self._cpu or self._stat).read()
        stands = content == self._content
        if stands:
            count = before = self._used
        else:
            count = int(content) if self._cpu else number_after(content, b"\nusage_usec ")
            before, self._used, self._content = self._used, count, content
        rate = self._cpu_rate.per_second(count, round_.clock())
        if stands and self._rest is not None and rate is not None and self._still < _MOST_STILL:
            self._still += 1
            return self._rest
        rested = count == before
        if rested and self._still < _MOST_STILL:
            self._still += 1
        else:
            sizes = self._memory.read()
            self._sizes = memory_of_numa(sizes) if self._numa else memory_of(sizes, layout.version)
            # The groups of a node are not all read again in the same round.
            self._still = zlib.crc32(self.cgroup.encode()) % _MOST_STILL if before < 0 else 0
            self._periods_stand = False
        stat: bytes | None = content
        if self._cpu is not None:
            stat = None if rested and self._periods_stand else self._stat.read()
            stands = self._periods_stand = rested and stat in (None, self._former)
        self._missed = 0
        cores = None if rate is None else within(rate / (1e9 if self._cpu else 1e6), cpus)
        used = GroupUsage(cores, *self._sizes, self._ratio(stat))
        # While the counter stands, the rate stays 0, and no period is throttled.
        self._rest = used if stands and rate is not None else None
        return used

    def _ratio(self, stat: bytes | None) -> float | None:
        """Return throttled periods among all since the last reading; 0 if no period passed.

        stat: `cpu.stat`; None: it is the same as before.
        """
        if stat is None:
            return 0.0 if self._periods >= 0 else None
        if stat == self._former:
            return 0.0  # the usual case: the group has no quota, or was idle
        if b"nr_periods " not in stat:
            return None  # v2 without the cpu controller here
        periods = number_after(stat, b"\nnr_periods ")
        throttled = number_after(stat, b"\nnr_throttled ")
        former, before = self._periods, self._throttled
        self._former, self._periods, self._throttled = stat, periods, throttled
        if former < 0 or periods < former or throttled < before:
            return None
        if periods == former:
            return 0.0
        return min((throttled - before) / (periods - former), 1.0)


def memory_of(stat: bytes, version: int) -> tuple[int, int]:
    """Return bytes without and with page cache from `memory.stat`. ValueError for a missing field.

    Without page cache: anonymous pages of both lists, and unevictable ones. The page cache: file
    pages of both lists. On v1 the sums of the whole subtree.
    """
    lists = (_V1_LISTS if version == 1 else _V2_LISTS).search(stat)
    if lists is not None:
        inactive, active, inactive_file, active_file, unevictable = map(int, lists.groups())
        without = inactive + active + unevictable
        return without, without + inactive_file + active_file
    without = 0
    for key in _V1_MEMORY if version == 1 else _V2_MEMORY:
        without += number_after(stat, key)
    cache = 0
    for key in _V1_CACHE if version == 1 else _V2_CACHE:
        cache += number_after(stat, key)
    return without, without + cache


def memory_of_numa(stat: bytes) -> tuple[int, int]:
    """Return the same from v1's `memory.numa_stat`. ValueError for a missing field."""
    pages = _V1_NUMA.search(stat)
    if pages is None:
        raise ValueError("no sums of the subtree in memory.numa_stat")
    file, anon, unevictable = map(int, pages.groups())
    return (anon + unevictable) * PAGE_BYTES, (anon + unevictable + file) * PAGE_BYTES


def _numa_stat(files: KernelFiles, directory: str) -> KernelFile | None:
    """Open v1's `memory.numa_stat`; None if the kernel has none or `memory.stat` is cheaper."""
    try:
        file = files.open(f"{directory}/memory.numa_stat")
    except OSError as error:
        if error.errno in GONE:
            return None  # a kernel without NUMA, or no such group
        raise
    try:
        content = file.read()
    except OSError:
        file.close()
        raise
    if _V1_NUMA.search(content) and content.partition(b"\n")[0].count(b" N") <= _MOST_NODES:
        return file
    file.close()
    return None


class _Subject:
    """A group with the series that it has, and what it used in the last round."""

    __slots__ = ("_series", "group", "used")

    def __init__(self, group: Group, target: GroupTarget) -> None:
        self.group = group
        self.used = NOTHING
        metrics = _OF_POD if target.is_pod else _OF_CONTAINER
        self._series = tuple(Series(metric, target.of) for metric in metrics)

    def put(self, samples: dict[Series, float], used: GroupUsage) -> None:
        """Replace the group's samples, which are those of the last round."""
        self.used = used
        for series, value in zip(self._series, used, strict=True):
            if value is not None:
                samples[series] = value
            else:
                samples.pop(series, None)


_OF_POD: Final = (
    Metric.POD_CPU,
    Metric.POD_MEMORY,
    Metric.POD_MEMORY_WITH_PAGE_CACHE,
    Metric.POD_CPU_THROTTLED,
)
_OF_CONTAINER: Final = (
    Metric.CONTAINER_CPU,
    Metric.CONTAINER_MEMORY,
    Metric.CONTAINER_MEMORY_WITH_PAGE_CACHE,
    Metric.CONTAINER_CPU_THROTTLED,
)
"""The metrics of the fields of `GroupUsage`."""


class PodCollector:
    """CPU, memory and throttling of all pods and containers."""

    name = "pods"
    gate = None

    def __init__(self, cpus: int, *, interval_s: float = 1.0, retention_s: float = 330.0) -> None:
        """cpus: of the machine. retention_s: upstream's reports aggregate pods over 300 s."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._cpus = cpus
        self._targets: Targets | None = None
        self._subjects: dict[GroupTarget, _Subject] = {}
        self._samples: dict[Series, float] = {}
        """Those of the last round: what rests keeps its samples."""

    def sample(self, round_: Round) -> dict[Series, float]:
        layout = layout_with(round_.targets, *CONTROLLERS)
        if round_.targets is not self._targets:
            self._follow(round_.targets)
        for number, subject in enumerate(self._subjects.values()):
            try:
                used = subject.group.read(round_, layout, self._cpus)
            except (OSError, ValueError) as error:
                round_.problem(f"{subject.group.cgroup}: {error}")
                used = NOTHING
            rests = used is subject.used
            if not rests:
                subject.put(self._samples, used)
            if not rests or number % _RESTING == 0:
                round_.step_aside()
        return self._samples.copy()

    def close(self) -> None:
        for subject in self._subjects.values():
            subject.group.close()
        self._subjects = {}
        self._samples = {}
        self._targets = None

    def _follow(self, targets: Targets) -> None:
        """Keep the groups that are still there, and close the others."""
        if self._targets is None or self._targets.layout != targets.layout:
            self.close()
        self._subjects = followed(self._subjects, targets.groups, self._subject, self._leave)
        self._targets = targets

    def _subject(self, target: GroupTarget) -> _Subject:
        return _Subject(Group(target.cgroup, self.interval_s), target)

    def _leave(self, gone: _Subject) -> None:
        gone.group.close()
        gone.put(self._samples, NOTHING)
