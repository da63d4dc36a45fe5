"""Logs repeated failures: the first one, the return to success, and a count in between.

A server that fails each of a thousand calls is news twice. One that fails every second call would
be news a thousand times; there at most one failure a minute gets a line.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

_QUIET_S = 60.0
"""Chosen: the shortest time between two lines about failures of one kind. At half of it a server
that flaps writes 2,900 lines a day instead of 1,400."""


@dataclass(slots=True)
class _Run:
    """What is known of one kind of failures. logged: the last line said that it fails."""

    logged: bool = False
    quiet_until: float = 0.0
    unlogged: int = 0


class FailureLog:
    """Failures by who failed and at what."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._runs: dict[tuple[str, str], _Run] = {}

    def failed(self, server: str, stage: str, reason: str) -> None:
        run = self._runs.setdefault((server, stage), _Run())
        now = self._monotonic()
        if run.logged or now < run.quiet_until:
            run.unlogged += 1
            return
        extra: dict[str, object] = {"server": server, "stage": stage, "reason": reason}
        if run.unlogged:
            extra["failures_before"] = run.unlogged
        log.warning("hook gave no answer; further failures are counted", extra=extra)
        run.logged = True
        run.quiet_until = now + _QUIET_S
        run.unlogged = 0

    def succeeded(self, server: str, stage: str) -> None:
        run = self._runs.get((server, stage))
        if run is None or not run.logged:
            return
        log.info(
            "hook answers again",
            extra={"server": server, "stage": stage, "failures": run.unlogged + 1},
        )
        run.logged = False
        run.unlogged = 0
