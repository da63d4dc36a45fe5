"""The pauses between the tries of a request that goes before a binding, or is one.

Each is about twice as long as the one before, up to a bound. Their lengths are random, so that the
requests that failed together are not repeated together.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
"""Chosen: a restart of an API server takes some seconds; at twice the longest pause, a placement
without an outcome waits up to 20 s after the server is back."""
MOST_FAILURES: Final = 6
"""Answers of 5xx or 409 in a row until a placement is refused. Chosen: with the pauses these are
6 s, longer than etcd takes to elect a leader. An error that depends on the request alone (a webhook
that cannot be called) would otherwise hold the booking for ever."""


class Pauses:
    """The pauses of one request. first_s, longest_s: seconds."""

    def __init__(self, first_s: float | None = None, longest_s: float | None = None) -> None:
        self._first_s = FIRST_PAUSE_S if first_s is None else first_s
        self._longest_s = LONGEST_PAUSE_S if longest_s is None else longest_s
        self._next_s = self._first_s

    async def rest(self, *, at_least_s: float = 0.0) -> None:
        """Make the next pause. at_least_s: what the server asked for; it counts up to the bound."""
        pause, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        await asyncio.sleep(max(pause * random.uniform(0.5, 1.5), min(at_least_s, self._longest_s)))

    def begin_again(self) -> None:
        """Let the next pause be the first one: a try succeeded."""
        self._next_s = self._first_s
