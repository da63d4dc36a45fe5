"""Recurring log lines: the first is written, the next ones are counted for a while.

A warning for each event hides a new one. `Repeats` says when to write a line: when its subject
comes up first, and then once a period, with the number of lines left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Final

PERIOD_S: Final = 300.0
"""Between two lines about one subject. A quarter of an hour's journal then holds three: enough to
see that it goes on, too few to hide another line."""

_MOST_SUBJECTS: Final = 256
"""Subjects that are remembered. Above it the oldest is forgotten, and its next line is written."""


class Repeats:
    """Counts lines by subject. Belongs to one thread."""

    def __init__(
        self, *, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._period_s = period_s
        self._clock = clock
        self._subjects: dict[Hashable, tuple[float, int]] = {}
        """When a line about the subject was last written, and how many were left out since."""

    def due(self, subject: Hashable) -> int | None:
        """Return how many lines about `subject` were left out, when the next one is to be written.

        Returns None, and counts, when it is to be left out.
        """
        now = self._clock()
        written_at, left_out = self._subjects.get(subject, (-float("inf"), 0))
        if now - written_at < self._period_s:
            self._subjects[subject] = (written_at, left_out + 1)
            return None
        self._subjects.pop(subject, None)
        if len(self._subjects) >= _MOST_SUBJECTS:
            self._subjects.pop(next(iter(self._subjects)))
        self._subjects[subject] = (now, 0)
        return left_out
