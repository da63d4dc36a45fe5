"""Pressure of the node, its pods and its containers.

The detail of a series is `<resource>.<degree>.<measure>`: resource cpu, mem or io (the values of
upstream's label); degree some or full; measure avg10, avg60 or avg300 (the kernel's moving
averages) or `stall`, the percent of the time since the last sample. `stall` follows a change at
once, while avg10 needs 20 s; a control loop reads it. A kernel without `full` for the CPU has no
such series. Files: docs/facts/kernel.md, "Pressure".
"""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from koordlet.measurement.collecting import GroupTarget, Round, Targets, Unavailable, followed
from koordlet.measurement.counters import RateSeries
from koordlet.measurement.kernel_files import GONE, KernelFile
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Layout
from linux.psi import RESOURCES, Pressure, Stall, parse_pressure

_LABEL: Final = {"cpu": "cpu", "memory": "mem", "io": "io"}
_FILE_BYTES: Final = 512
"""Two lines of at most 80 bytes; the rest is for lines of later kernels."""
_SAMPLES: Final = 63
"""Kept of each series. Chosen: ten minutes at upstream's interval of 10 s, and a minute at 1 s. All
readers take the newest sample, at most 30 s old; twice as many at 1 s take 8 MB more on a node with
330 groups."""
_PERCENT_OF_US: Final = 1e-4
"""Microseconds of waiting per second, as percent of the time."""


class _Line:
    """The series of one line of a file, made once."""

    __slots__ = ("avg10", "avg60", "avg300", "stall")

    def __init__(self, metric: Metric, of: str, start: str, interval_s: float) -> None:
        """start: `<resource>.<degree>`."""
        self.avg10, self.avg60, self.avg300, stall = (
            Series(metric, of, f"{start}.{measure}")
            for measure in ("avg10", "avg60", "avg300", "stall")
        )
        self.stall = RateSeries(stall, interval_s, most=100.0, unit=_PERCENT_OF_US)

    def add(self, samples: dict[Series, float], found: Stall, at: float) -> None:
        samples[self.avg10] = found.avg10
        samples[self.avg60] = found.avg60
        samples[self.avg300] = found.avg300
        self.stall.add(samples, found.total_us, at)


class _Lines:
    """One file with the series of its lines."""

    __slots__ = ("content", "file", "full", "path", "pressure", "some")

    def __init__(
        self, metric: Metric, of: str, resource: str, path: str, interval_s: float
    ) -> None:
        self.path = path
        self.file: KernelFile | None = None
        self.content = b""
        self.pressure: Pressure | None = None
        self.some = _Line(metric, of, f"{_LABEL[resource]}.some", interval_s)
        self.full = _Line(metric, of, f"{_LABEL[resource]}.full", interval_s)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        self.some.stall.forget()
        self.full.stall.forget()

    def read(self, round_: Round, samples: dict[Series, float]) -> bool:
        """Add the samples; False where there is no such file. Raises OSError and ValueError."""
        try:
            if self.file is None:
                self.file = round_.files.open(self.path, _FILE_BYTES)
            content = self.file.read()
            at = round_.clock()
            if self.pressure is None or content != self.content:
                # The file of a group at rest stands still.
                self.pressure, self.content = parse_pressure(content), content
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, OSError) and error.errno in GONE:
                return False
            raise
        self.some.add(samples, self.pressure.some, at)
        if self.pressure.full is not None:
            self.full.add(samples, self.pressure.full, at)
        return True


class PressureCollector:
    """Pressure of node, pods and containers."""

    name = "psi"
    gate = "PSICollector"

    def __init__(self, *, interval_s: float = 10.0) -> None:
        """interval_s: upstream's psi-collector-interval."""
        self.interval_s = interval_s
        self.retention_s = _SAMPLES * interval_s
        self._targets: Targets | None = None
        self._node: list[_Lines] = []
        self._groups: dict[GroupTarget, list[_Lines]] = {}
        self._without_groups = False
        """Whether this kernel has no such files for groups."""

    def sample(self, round_: Round) -> dict[Series, float]:
        if round_.targets is not self._targets:
            self._follow(round_.targets)
        samples: dict[Series, float] = {}
        node = self._read(round_, self._node, samples, "the node")
        if self._without_groups:
            round_.problem("no pressure of groups: this kernel has no such files on cgroup v1")
            return samples
        groups = 0
        for target, lines in self._groups.items():
            groups += self._read(round_, lines, samples, target.cgroup)
            round_.step_aside()
        if not node and not groups:
            raise Unavailable("this kernel has no PSI (CONFIG_PSI)")
        layout = round_.targets.layout
        if not groups and layout is not None and layout.version == 1:
            # The files of v1 are Alibaba's: a group that is there without them shows another
            # kernel. All groups of a moment may have ended, or be about to be made.
            self._without_groups = any(
                _is_there(round_, layout.directory("cpuacct", target.cgroup))
                for target in self._groups
            )
        return samples

    def close(self) -> None:
        for lines in (self._node, *self._groups.values()):
            _close(lines)
        self._node = []
        self._groups = {}
        self._without_groups = False
        self._targets = None

    def _read(
        self, round_: Round, lines: list[_Lines], samples: dict[Series, float], what: str
    ) -> int:
        """Return the number of files that were read."""
        found = 0
        for one in lines:
            try:
                found += one.read(round_, samples)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    raise Unavailable(
                        "PSI is off: psi=1 on the kernel's command line switches it on"
                    ) from None
                round_.problem(f"{what}: {error}")
            except ValueError as error:
                round_.problem(f"{what}: {error}")
        return found

    def _follow(self, targets: Targets) -> None:
        """Keep the groups that are still there, and close the others."""
        if self._targets is None or self._targets.layout != targets.layout:
            self.close()
        if not self._node:
            self._node = self._lines(Metric.NODE_PSI, "", "/proc/pressure/{}")
        layout = targets.layout
        if layout is not None and layout.has("cpuacct") and not self._without_groups:
            make = partial(self._group_lines, layout)
            self._groups = followed(self._groups, targets.groups, make, _close)
        self._targets = targets

    def _group_lines(self, layout: Layout, target: GroupTarget) -> list[_Lines]:
        metric = Metric.POD_PSI if target.is_pod else Metric.CONTAINER_PSI
        return self._lines(metric, target.of, _pattern(layout, target.cgroup))

    def _lines(self, metric: Metric, of: str, pattern: str) -> list[_Lines]:
        return [
            _Lines(metric, of, resource, pattern.format(resource), self.interval_s)
            for resource in RESOURCES
        ]


def _pattern(layout: Layout, cgroup: str) -> str:
    # On v1 Alibaba's kernel has the files in cpuacct; on v2 there is one hierarchy.
    directory = layout.directory("cpuacct", cgroup).replace("{", "{{").replace("}", "}}")
    return f"{directory}/{{}}.pressure"


def _is_there(round_: Round, directory: str) -> bool:
    try:
        round_.files.listdir(directory)
    except OSError:
        return False
    return True


def _close(lines: list[_Lines]) -> None:
    for one in lines:
        one.close()
