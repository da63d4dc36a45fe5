"""Faults of a part's own code: logged with the part's name, counted, and survived.

A part that meets an exception it does not know (a work queue's timer, a subscriber of a cache) goes
on with its next piece of work. One part must not end the process that it shares with the others.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final

_log = logging.getLogger(__name__)

_SAME_FOR_SECONDS: Final = 60.0
"""Chosen: a fault that repeats with every event is logged once a minute, with how often it came."""
_MOST_KNOWN: Final = 256
"""Different faults that are remembered; more than that are logged as if they were new."""


class Faults:
    """The faults of one part. `count` is since the process started."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.count = 0
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    def note(self, doing: str, *, about: str = "") -> None:
        """Count and log the exception that is being handled; call it in an `except` block.

        doing: what failed, one of a few fixed texts. about: the key or object, for the log.
        """
        self.count += 1
        error = sys.exception()
        key = (doing, type(error).__name__)
        now = time.monotonic()
        at, unlogged = self._logged.get(key, (-_SAME_FOR_SECONDS, 0))
        if now - at < _SAME_FOR_SECONDS:
            self._logged[key] = (at, unlogged + 1)
            return
        if len(self._logged) >= _MOST_KNOWN:
            self._logged.clear()
        self._logged[key] = (now, 0)
        again = f" ({unlogged} times more since it was last logged)" if unlogged else ""
        where = f" of {about}" if about else ""
        _log.exception("%s: %s%s failed%s", self.part, doing, where, again)
