"""What a client asks of its API server: requests by answer, their durations and sizes.

Counted are every try, and streams when they are opened. Counting one request costs about a
microsecond.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from service.histogram import Histogram

DURATION_BOUNDS: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Seconds; those of client-go."""
SIZE_BOUNDS: Final = (
    64.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0,
    16777216.0,
)  # fmt: skip
"""Bytes; those of client-go."""
NO_ANSWER: Final = "<error>"
"""Stands for the status of a request without an answer, as in client-go."""


class VerbCounts:
    """Requests of one method. limited: seconds that they waited for the client's own limit."""

    __slots__ = ("duration", "limited", "received", "sent")

    def __init__(self) -> None:
        self.duration = Histogram(DURATION_BOUNDS)
        self.limited = Histogram(DURATION_BOUNDS)
        self.sent = Histogram(SIZE_BOUNDS)
        self.received = Histogram(SIZE_BOUNDS)


class RequestCounts:
    """Of one API server. host: its name and port."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.answers: Counter[tuple[str, str]] = Counter()
        """Requests by method and status."""
        self.verbs: dict[str, VerbCounts] = {}

    def verb(self, method: str) -> VerbCounts:
        """Return the counts of a method; the first call creates them."""
        found = self.verbs.get(method)
        if found is None:
            found = self.verbs[method] = VerbCounts()
        return found

    def answered(self, method: str, status: int | None) -> None:
        """Count a request. status: of its answer; None for none."""
        self.answers[method, NO_ANSWER if status is None else str(status)] += 1
