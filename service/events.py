"""Events: what an operator should know, kept in memory in a bounded ring and logged.

An event that repeats (same kind, object and message) increases its count instead of filling the
ring, and is logged again only after a while, so a defect in a loop cannot flood the log.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import msgspec

from apis.errors import printable

_LOG = logging.getLogger(__name__)

CAPACITY: Final = 512
"""Events that are kept. Chosen: hours of a troubled node, as repeated events count up. Twice the
value doubles the memory (at most about 1 KiB an event) and the length of `koordctl events`."""
_REPEAT_LOG_SECONDS: Final = 300.0
"""How long a repeated event is not logged again. Chosen: one line in five minutes shows that a
problem lasts. Twice the value halves the lines of a lasting problem."""
_MOST_LINES: Final = 20
"""Lines of one kind that are logged in that time: pods of a broken Deployment come and go, and each
has an event of its own. Chosen: the objects of a directory fit, and other lines stay visible."""
_LONGEST_MESSAGE: Final = 1000
"""Characters of a message that are kept. Chosen: longer ones hold a copy of bad input."""


class Severity(StrEnum):
    """How urgent an event is; also its log level."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_LEVELS: Final = {
    Severity.INFO: logging.INFO,
    Severity.WARNING: logging.WARNING,
    Severity.ERROR: logging.ERROR,
}


class Event(msgspec.Struct, frozen=True):
    """One thing that happened. Times are seconds since the epoch.

    kind: a short fixed word for programs, such as "bad-object" or "policy-fault".
    obj: the object of the event: "Pod default/web", a file, "nri".
    """

    kind: str
    obj: str
    message: str
    severity: Severity
    first_at: float
    last_at: float
    count: int = 1


class Events:
    """The ring. Any thread may add events."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the time that is shown. monotonic: measures the time since the last log line."""
        self._clock = clock
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._ring: OrderedDict[tuple[str, str, str], Event] = OrderedDict()
        self._logged_at: dict[tuple[str, str, str], float] = {}
        self._lines: dict[str, deque[float]] = {}
        """When the last lines of each kind were logged."""
        self.totals: Counter[str] = Counter()

    def add(
        self, kind: str, obj: str, message: str, *, severity: Severity = Severity.WARNING
    ) -> None:
        """Add an event, or count one that repeats."""
        now = self._clock()
        obj, message = printable(obj), message[:_LONGEST_MESSAGE]
        key = (kind, obj, message)
        with self._lock:
            before = self._ring.pop(key, None)
            if before is None:
                event = Event(kind, obj, message, severity, now, now)
                if len(self._ring) >= CAPACITY:
                    oldest, _ = self._ring.popitem(last=False)
                    self._logged_at.pop(oldest, None)
            else:
                event = msgspec.structs.replace(before, last_at=now, count=before.count + 1)
            self._ring[key] = event
            self.totals[kind] += 1
            moment = self._monotonic()
            log = moment - self._logged_at.get(key, -math.inf) >= _REPEAT_LOG_SECONDS
            log = log and self._has_room(kind, moment)
            if log:
                self._logged_at[key] = moment
        if log:
            _LOG.log(
                _LEVELS[severity],
                message,
                extra={"event": kind, "object": obj, "count": event.count},
            )

    def _has_room(self, kind: str, moment: float) -> bool:
        """Return whether the log takes another line of this kind, and count it if so."""
        lines = self._lines.setdefault(kind, deque(maxlen=_MOST_LINES))
        if len(lines) == _MOST_LINES and moment - lines[0] < _REPEAT_LOG_SECONDS:
            return False
        lines.append(moment)
        return True

    def latest(self, limit: int = CAPACITY) -> list[Event]:
        """Return the events, the latest last."""
        with self._lock:
            return list(self._ring.values())[-limit:]

    def as_json(self, limit: int = CAPACITY) -> list[dict[str, Any]]:
        """Return the events for programs."""
        return [
            {
                "kind": event.kind,
                "object": event.obj,
                "message": event.message,
                "severity": event.severity.value,
                "count": event.count,
                "firstAt": event.first_at,
                "lastAt": event.last_at,
            }
            for event in self.latest(limit)
        ]
