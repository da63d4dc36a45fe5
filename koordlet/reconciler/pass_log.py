"""Log lines about passes: what was written, once a minute, and not for each pass.

On a busy node a pass runs every second and each writes something. Single writes are in `koordctl
explain`, the counters in the metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from koordlet.reconciler.reports import PassReport

_LOG = logging.getLogger("koordlet")

PERIOD_S: Final = 60.0
"""Between two lines. Chosen: the ten minutes that one looks at after an incident are ten lines."""


class PassLog:
    """Sums up the passes since the last line. Belongs to one thread."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due_at = clock()
        self._clear()

    def add(self, report: PassReport) -> None:
        """Count a finished pass; write a line if one is due and anything was written."""
        self._passes += 1
        self._reasons.update(report.reasons)
        self._written += report.written
        self._failed += report.failed
        self._restored += report.restored
        self._cpu_ms += report.cpu_ms
        now = self._clock()
        if now < self._due_at or not (self._written or self._failed or self._restored):
            return
        _LOG.info(
            "reconciled",
            extra={
                "passes": self._passes,
                "reasons": ",".join(sorted(self._reasons)),
                "subjects": report.subjects,
                "written": self._written,
                "failed": self._failed,
                "restored": self._restored,
                "cpu_ms": round(self._cpu_ms, 1),
            },
        )
        self._due_at = now + PERIOD_S
        self._clear()

    def _clear(self) -> None:
        self._passes = self._written = self._failed = self._restored = 0
        self._cpu_ms = 0.0
        self._reasons: set[str] = set()
