"""How far, and for how long, a node uses more CPU than suppression aims at after a load step.

Suppression aims at a threshold, in percent of the node's CPUs. The overshoot is what the node uses
above it, of all its CPUs and by all its processes: the excess over windows of half a second.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from koordlet.measurement.collectors.node import busy_ticks

_WINDOW_S: Final = 0.5
"""Five periods of a quota, of which one may take its part at once. /proc/stat counts in steps of
10 ms, 2 points of one CPU in such a window. Twice the value halves both, and with them a peak that
is shorter than a window."""
_SCATTER: Final = 5.0
"""Points. Chosen: more than windows of a node at its threshold differ by. Less makes its noise a
part of the time; at twice the value the end of a slow return is not counted."""
_EVERY_S: Final = 0.05


class Overshoot(NamedTuple):
    """points: the largest excess of a window, in percentage points of the node's CPUs; below 0 if
    none was above. seconds: the time in windows with an excess above the scatter of 5 points."""

    points: float
    seconds: float


def overshoot(
    used: Sequence[tuple[float, float]], begin: float, end: float, *, percent: float, cpus: int
) -> Overshoot:
    """Return the excess above `percent` of `cpus` CPUs between two moments.

    used: (moment, CPU seconds used until then), ascending. begin, end: at least a window apart.
    """
    moments, seconds = np.array(used).T
    edges = np.arange(begin, end, _WINDOW_S)
    points = np.diff(np.interp(edges, moments, seconds)) / (_WINDOW_S * cpus) * 100 - percent
    return Overshoot(float(points.max()), float((points > _SCATTER).sum() * _WINDOW_S))


@dataclass(slots=True)
class NodeUse:
    """The CPU time that the node's processes have used, since `watching` began."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def above(self, percent: float, begin: float, end: float) -> Overshoot:
        return overshoot(self.samples, begin, end, percent=percent, cpus=os.cpu_count() or 1)


@contextmanager
def watching() -> Iterator[NodeUse]:
    """Sample /proc/stat twenty times a second until the block ends."""
    use, ended = NodeUse(), threading.Event()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def sample() -> None:
        while not ended.wait(_EVERY_S):
            line = Path("/proc/stat").read_bytes().partition(b"\n")[0]
            use.samples.append((time.monotonic(), busy_ticks(line) * tick_s))

    thread = threading.Thread(target=sample, name="node-use")
    thread.start()
    try:
        yield use
    finally:
        ended.set()
        thread.join()
