"""The daemon's health, readiness and event loop delay, for systemd and for probes."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from koordlet.daemon.passes import Passes
from koordlet.executor.journal import Journal
from koordlet.state import NodeState
from koordlet.transports.nri_link import NriLink
from service.events import Events, Severity
from service.systemd import Notifier

_STUCK_S: Final = 180.0
"""Without a finished pass for so long, the thread counts as stuck. Chosen: passes are seconds
apart, and a kernel write may block for tens of seconds under memory pressure. Twice the value
delays the restart by systemd that much."""
_STUCK_INTERVALS: Final = 6
"""The same in intervals between passes, for an operator who made them long."""
_WATCHDOG_S: Final = 10.0
"""The watchdog's time where systemd sets none: only the event loop's delay is measured then."""
_LONGEST_PERIOD_S: Final = 5.0
"""How often the event loop's delay is measured at least. Twice the value shows half of them."""


class Health:
    """Belongs to the event loop."""

    def __init__(
        self,
        *,
        state: NodeState,
        nri: NriLink,
        passes: Passes,
        journal: Journal,
        events: Events,
        pass_interval_s: float,
    ) -> None:
        self._state = state
        self._journal = journal
        self._events = events
        self._journal_problem = ""
        self._journal_lost = ""
        self._nri = nri
        self._passes = passes
        self._stuck_s = max(_STUCK_S, _STUCK_INTERVALS * pass_interval_s)
        self.loop_lag_s = 0.0
        self.worst_loop_lag_s = 0.0

    def unhealthy(self) -> str:
        """Return why the daemon should be restarted; "" while it works."""
        silent_s = self._passes.silent_s
        if silent_s > self._stuck_s:
            return f"the reconciler has not finished a pass for {silent_s:.0f} s"
        return ""

    def not_ready(self) -> list[str]:
        """Return why new containers are not protected, or why values are not repaired."""
        reasons = [f"waiting for the first list of {source}" for source in self._state.awaited]
        if crash := self._passes.crash:
            reasons.append(f"the last pass of the reconciler failed: {crash}")
        supervisor = self._nri.supervisor
        if supervisor is not None and not supervisor.status.protects:
            problem = supervisor.status.problem or supervisor.status.state.value
            reasons.append(f"NRI is not connected: {problem}")
        if problem := self._journal.problem:
            reasons.append(f"no kernel file is written: {problem}")
        return reasons

    def status_line(self) -> str:
        """Return one line for systemd and the log."""
        pods, containers = self._state.counts
        supervisor = self._nri.supervisor
        if supervisor is None:
            nri = "NRI off"
        else:
            status = supervisor.status
            runtime = (
                f" {status.runtime.name} {status.runtime.version_text}" if status.runtime else ""
            )
            nri = f"NRI {status.state.value}{runtime}"
        return f"{nri}; {pods} pods, {containers} containers"

    def report_journal(self) -> None:
        """Add an event when originals are lost, when nothing can be written, and when it can."""
        lost, lost_before = self._journal.lost, self._journal_lost
        self._journal_lost = lost
        if lost and lost != lost_before:
            self._events.add(
                "run-dir", "journal", f"{lost}; originals that only it held are not restored"
            )
        problem, before = self._journal.problem, self._journal_problem
        self._journal_problem = problem
        if problem and problem != before:
            self._events.add(
                "run-dir",
                "journal",
                f"{problem}; new containers are adjusted, and no kernel file is written until"
                " originals can be recorded",
                severity=Severity.ERROR,
            )
        elif before and not problem:
            self._events.add("run-dir", "journal", "is written again", severity=Severity.INFO)

    async def watch(self, notifier: Notifier) -> None:
        """Notify systemd's watchdog while the daemon is healthy, and measure the loop's delay."""
        # Three times in the watchdog's time, so that a late one does not end the daemon.
        period = min((notifier.watchdog_seconds or _WATCHDOG_S) / 3, _LONGEST_PERIOD_S)
        while True:
            began = time.monotonic()
            await asyncio.sleep(period)
            self.loop_lag_s = max(time.monotonic() - began - period, 0.0)
            self.worst_loop_lag_s = max(self.worst_loop_lag_s, self.loop_lag_s)
            self.report_journal()
            if not self.unhealthy():
                notifier.send(WATCHDOG="1", STATUS=self.status_line())
