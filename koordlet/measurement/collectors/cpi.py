"""Cycles and instructions of the containers: the inputs of cycles per instruction (CPI).

Once a cycle (60 s) every container is counted for one window (10 s). Counters are open during the
window alone, and at most `most_descriptors` at a time: if the containers need more, they are
counted one part after the other, and with many of them on many CPUs a cycle lasts longer. A round
reads and closes what is open, and opens the next part; it never waits.

The values are events in a window of exactly `interval_s`: a window that lasted longer, because a
round came late, is scaled down. Facts: docs/facts/kernel.md, "Performance counters".
"""

from __future__ import annotations

import errno
import resource
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from apis.cpuset import CpuSet
from koordlet.measurement.collecting import Round, Targets, Unavailable
from koordlet.measurement.kernel_files import GONE
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Layout
from linux.perf_event import CYCLES, INSTRUCTIONS, CgroupCounters, NoCounters

_ONLINE: Final = "/sys/devices/system/cpu/online"
_EVENTS: Final = (CYCLES, INSTRUCTIONS)
DETAILS: Final = ("cycle", "instruction")
"""The details of the series, in the order of the events; upstream's values of the label."""
_MOST_DESCRIPTORS: Final = 4096
"""Chosen: 220 containers on 8 CPUs at once. One costs the kernel some 1.5 KiB and 15 us to open, so
a part takes 60 ms of the sampling thread."""
_SHARE: Final = 4
"""A quarter of the limit of open files at most."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


class Counters(Protocol):
    """Counters of one cgroup that count since they were made."""

    def read(self) -> tuple[float, ...]:
        """Return each event's count, summed over the CPUs."""
        ...

    def close(self) -> None: ...


def local_counters(here: Callable[[str], str] = str) -> Callable[[str, Sequence[int]], Counters]:
    """Return the function that counts on this machine. here: as `LocalHost.here`."""
    return lambda directory, cpus: CgroupCounters(here(directory), cpus, _EVENTS)


class _Open(NamedTuple):
    """A container that is counted now. since: seconds of the monotonic clock."""

    id: str
    counters: Counters
    since: float


class CpiCollector:
    """Cycles and instructions of each container.

    interval_s is the window, because a round ends one and begins the next; a container has a
    sample once in `cycle_s` or more.
    """

    name = "cpi"
    gate = "CPICollector"

    def __init__(
        self,
        count: Callable[[str, Sequence[int]], Counters],
        *,
        cycle_s: float = 60.0,
        window_s: float = 10.0,
        retention_s: float = 1860.0,
        most_descriptors: int | None = None,
    ) -> None:
        """count: starts counting a directory's tasks on the CPUs; raises OSError,
            NoCounters if this machine cannot count.
        cycle_s, window_s: upstream's cpi-collector-interval and collect-cpi-timewindow.
        most_descriptors: None for 4096, or a quarter of the process's limit if that is less.
        """
        self.interval_s = window_s
        self.retention_s = retention_s
        self._count = count
        self._cycle_s = cycle_s
        if most_descriptors is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            unlimited = soft == resource.RLIM_INFINITY
            most_descriptors = (
                _MOST_DESCRIPTORS if unlimited else min(_MOST_DESCRIPTORS, soft // _SHARE)
            )
        self._most = most_descriptors
        self._open: list[_Open] = []
        self._waiting: deque[str] = deque()
        self._begun = -float("inf")
        self._refused = ""

    def sample(self, round_: Round) -> dict[Series, float]:
        samples = self._finish(round_)
        layout = round_.targets.layout
        if layout is None:
            raise Unavailable("the cgroup tree is not known yet")
        if not layout.has("perf_event"):
            raise Unavailable("no cgroup hierarchy has perf_event")
        cgroups = _cgroups(round_.targets)
        if not self._waiting and round_.now - self._begun >= self._cycle_s - self.interval_s / 2:
            self._begun = round_.now
            self._refused = ""
            self._waiting.extend(cgroups)
        if self._waiting:
            self._begin(round_, layout, cgroups)
        if self._refused:
            raise Unavailable(self._refused)  # until the next cycle tries again
        return samples

    def close(self) -> None:
        for one in self._open:
            one.counters.close()
        self._open = []
        self._waiting.clear()
        self._begun = -float("inf")

    def _finish(self, round_: Round) -> dict[Series, float]:
        """Read and close what was counted."""
        samples: dict[Series, float] = {}
        finished, self._open = self._open, []
        for one in finished:
            try:
                values = one.counters.read()
                lasted_s = round_.clock() - one.since
            except OSError as error:
                round_.problem(f"container {one.id}: {error}")
                continue
            finally:
                one.counters.close()
            if lasted_s <= 0:
                continue
            # The container used the CPU for no moment, or its group is gone: there is no ratio.
            if all(value > 0 for value in values):
                for detail, value in zip(DETAILS, values, strict=True):
                    scaled = value * self.interval_s / lasted_s
                    samples[Series(Metric.CONTAINER_CPI, one.id, detail)] = scaled
        return samples

    def _begin(self, round_: Round, layout: Layout, cgroups: dict[str, str]) -> None:
        """Open counters for as many waiting containers as may be counted at once."""
        cpus = _online(round_)
        # One descriptor per CPU and event; one more while the group's directory is open.
        at_once = (self._most - 1) // (len(cpus) * len(_EVENTS))
        if at_once < 1:
            raise Unavailable(
                f"counting on {len(cpus)} CPUs needs {len(cpus) * len(_EVENTS) + 1} descriptors, "
                f"and {self._most} may be open: raise the limit of open files (LimitNOFILE)"
            )
        while self._waiting and len(self._open) < at_once:
            container = self._waiting.popleft()
            cgroup = cgroups.get(container)
            if cgroup is None:
                continue
            try:
                counters = self._count(layout.directory("perf_event", cgroup), cpus)
            except NoCounters as error:
                self._waiting.clear()
                self._refused = error.strerror or str(error)
                return
            except OSError as error:
                if error.errno in GONE:
                    continue
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._waiting.appendleft(container)
                    round_.problem("too many files are open: the other containers wait")
                    return
                round_.problem(f"container {container}: {error}")
                continue
            self._open.append(_Open(container, counters, round_.clock()))
            round_.step_aside()


def _online(round_: Round) -> tuple[int, ...]:
    file = round_.files.open(_ONLINE)
    try:
        return tuple(CpuSet.parse(file.read().decode("ascii", "replace").strip()))
    finally:
        file.close()


def _cgroups(targets: Targets) -> dict[str, str]:
    return {
        container.id: container.cgroup
        for pod in targets.pods
        for container in pod.containers
        if container.cgroup
    }
