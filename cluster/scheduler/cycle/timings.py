"""How long the steps of a decision take, and how many nodes each plugin looked at.

Steps are named as kube-scheduler names its extension points, and are measured in every decision.
Plugins are measured in a tenth of the decisions, as kube-scheduler does: there are some twenty of
them, each takes a few microseconds, and reading the clock for each would be seen in the whole.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from service.histogram import Histogram

PRE_FILTER: Final = "PreFilter"
FILTER: Final = "Filter"
POST_FILTER: Final = "PostFilter"
SCORE: Final = "Score"
RESERVE: Final = "Reserve"
PERMIT: Final = "Permit"
PRE_BIND: Final = "PreBind"
BIND: Final = "Bind"

SUCCESS: Final = "Success"
UNSCHEDULABLE: Final = "Unschedulable"
UNRESOLVABLE: Final = "UnschedulableAndUnresolvable"
WAIT: Final = "Wait"
ERROR: Final = "Error"
"""Statuses, in kube-scheduler's words."""

SAMPLED_PART: Final = 0.1
"""kube-scheduler's part of the decisions in which plugins are measured."""

POINT_BOUNDS: Final = tuple(0.0001 * 2.0**power for power in range(12))
"""kube-scheduler's, 0.1 ms to 0.2 s."""
PLUGIN_BOUNDS: Final = tuple(0.00001 * 1.5**power for power in range(20))
"""kube-scheduler's, 10 us to 22 ms."""


class Tally:
    """Nodes that one plugin looked at, at one step; at PreFilter, pods."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes = 0


class Timings:
    """Of one profile. Counting is plain additions; a scrape reads the attributes."""

    __slots__ = ("clock", "evaluated", "plugins", "points", "sampled")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, for differences."""
        self.clock = clock
        self.sampled = False
        """Whether plugins are measured in the present decision."""
        self.points: dict[tuple[str, str], Histogram] = {}
        """By step and status."""
        self.plugins: dict[tuple[str, str, str], Histogram] = {}
        """By plugin, step and status."""
        self.evaluated: dict[tuple[str, str], Tally] = {}
        """By plugin and step."""

    def begin(self) -> float:
        """Begin a decision: draw whether plugins are measured. Returns the time."""
        self.sampled = random.random() < SAMPLED_PART
        return self.clock()

    def step(self, name: str, status: str, seconds: float) -> None:
        """Count a step."""
        found = self.points.get((name, status))
        if found is None:
            found = self.points[name, status] = Histogram(POINT_BOUNDS)
        found.observe(seconds)

    def plugin(self, plugin: str, step: str, status: str, seconds: float) -> None:
        """Count one call of a plugin."""
        key = plugin, step, status
        found = self.plugins.get(key)
        if found is None:
            found = self.plugins[key] = Histogram(PLUGIN_BOUNDS)
        found.observe(seconds)

    def tally(self, plugin: str, step: str) -> Tally:
        """Return where the nodes are counted that a plugin looks at."""
        found = self.evaluated.get((plugin, step))
        if found is None:
            found = self.evaluated[plugin, step] = Tally()
        return found
