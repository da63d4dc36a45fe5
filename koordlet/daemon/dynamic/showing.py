"""What `koordctl top` and `koordctl report` show: the last round's measurements, and an hour's.

The sampling thread adds to the history after each round; the admin socket's worker threads read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from hooks.facts import NodeInputs
from hooks.subject import Pod
from koordlet.daemon.dynamic.dynamics import Dynamics
from koordlet.exposition.cpu_owners import topology
from koordlet.exposition.overview import History, Plain, Readable, overview
from koordlet.node.hardware import Machine
from koordlet.prediction.peak import Predictions
from koordlet.qos.strategy import Note

_RECENT_S: Final = 30.0
"""An older round is not shown as the present one: the sampling thread has stalled. Chosen: a round
is due each second by default, and one of an overloaded node takes some. At twice the value, values
of a minute ago appear as the present ones."""


class Showing:
    """See the module."""

    def __init__(
        self,
        name: str,
        *,
        dynamics: Dynamics,
        machine: Callable[[], Machine | None],
        inputs: Callable[[], NodeInputs],
        predictions: Callable[[], Predictions | None],
        interval_s: float,
    ) -> None:
        """name: the node's. machine: returns what is known of it. inputs: returns those of the
        rules. predictions: returns what the last report predicted. interval_s: of the samples."""
        self._name = name
        self._dynamics = dynamics
        self._machine = machine
        self._inputs = inputs
        self._predictions = predictions
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._history = History()
        self._measured: Readable | None = None

    # --- the sampling thread -------------------------------------------------------------------

    def round(self, measured: Readable) -> None:
        """Note a round of measurements."""
        self._measured = measured
        wall = time.time()
        with self._lock:
            if not self._history.due(wall):
                return
        shown = self._overview(measured)
        if shown is None or shown["node"]["cpu"]["used"] is None:
            return  # usage is a difference of two rounds
        gauges = {
            _label(name, labels): value
            for name, labels, value in self._dynamics.runner.gauges(measured.now)
            if not any(key == "container_id" for key, _ in labels)
        }
        predicted = self._predictions()
        if predicted is not None:
            peak = predicted.careful.peak
            gauges["predicted.cpu.prod"] = peak.cpu_milli / 1000
            gauges["predicted.memory.prod"] = float(peak.memory_bytes)
        with self._lock:
            self._history.add(wall, shown, gauges)

    def noted(self, strategy: str, note: Note) -> None:
        """Add a strategy's note to the history."""
        with self._lock:
            self._history.note(time.time(), strategy, note.reason, note.message, note.obj)

    # --- the admin socket's threads ------------------------------------------------------------

    def top(self) -> Plain:
        """Return the present look; `measured` is false without a recent round."""
        answer: Plain = {"name": self._name, "at": time.time(), "measured": False}
        measured, machine = self._measured, self._machine()
        if measured is None or time.monotonic() - measured.now > _RECENT_S or machine is None:
            return answer
        shown = self._overview(measured)
        if shown is None:
            return answer
        now = time.monotonic()
        strategies = [
            {
                "name": each.name,
                "on": each.on,
                "why": each.why,
                "summary": each.summary,
                "problem": each.problem,
                "age_s": None if each.stepped_at is None else now - each.stepped_at,
            }
            for each in self._dynamics.runner.statuses
        ]
        return (
            answer
            | shown
            | {"measured": True, "strategies": strategies, "topology": self._topology(machine)}
        )

    def history(self) -> Plain:
        """Return the last hour."""
        with self._lock:
            return self._history.plain()

    def _topology(self, machine: Machine) -> Plain:
        pods = (view.pod for view in self._dynamics.views)
        return topology(machine.cpus, pods, self._inputs())

    def _overview(self, measured: Readable) -> Plain | None:
        machine = self._machine()
        if machine is None:
            return None
        pods: Iterable[Pod] = (view.pod for view in self._dynamics.views)
        return overview(
            measured,
            pods,
            cpu_milli=machine.cpu_milli,
            memory_bytes=machine.memory_bytes,
            interval_s=self._interval_s,
        )


def _label(name: str, labels: Iterable[tuple[str, str]]) -> str:
    shown = ",".join(f"{key}={value}" for key, value in labels)
    return f"{name}{{{shown}}}" if shown else name
