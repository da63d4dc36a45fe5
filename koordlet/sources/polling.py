"""The loop around a source: fetch in a thread, apply on the event loop, back off on failure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from service.events import Events, Severity

_LOG = logging.getLogger("koordlet.sources")
_T = TypeVar("_T")

LONGEST_BACKOFF_S: Final = 60.0
"""The longest pause between failures, unless the interval is longer. Chosen: a source that is back
is read within a minute. Twice the value doubles that, and halves the attempts in vain."""
LEAST_PAUSE_S: Final = 1.0
"""Between two fetches, however often they are triggered. Chosen: it bounds the load on kubelet
while many pods start. Twice the value: what only kubelet knows of a new pod takes effect that much
later."""
_MOST_DOUBLINGS: Final = 10
"""Keeps 2**failures small: the longest pause is reached long before."""


class SourceError(Exception):
    """A source could not be read; the message says what to do."""


class Poller:
    """Fetches from one source periodically. `trigger` makes the next fetch earlier."""

    def __init__(self, name: str, interval: float, events: Events, executor: Executor) -> None:
        self.name = name
        self.problem = "not fetched yet"
        self.failures = 0
        self.fetches = 0
        self.answered_at: float | None = None
        """When the source last gave its list, in seconds of the monotonic clock; None before."""
        self._interval = interval
        self._events = events
        self._executor = executor
        self._wanted = asyncio.Event()

    def trigger(self) -> None:
        """Fetch soon."""
        self._wanted.set()

    async def run(
        self, fetch: Callable[[], _T], apply: Callable[[_T, int], None], mark: Callable[[], int]
    ) -> None:
        """Run until cancelled. mark: called before each fetch; `apply` gets its result too."""
        while True:
            await self.once(fetch, apply, mark)
            await self._pause()

    async def once(
        self, fetch: Callable[[], _T], apply: Callable[[_T, int], None], mark: Callable[[], int]
    ) -> bool:
        """Fetch once; return whether it succeeded."""
        self._wanted.clear()
        taken_at = mark()
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._executor, fetch)
            apply(result, taken_at)
        except SourceError as error:
            self._failed(str(error))
            return False
        except Exception as error:  # noqa: BLE001 - a defect must not end the source for good
            _LOG.exception("source failed", extra={"source": self.name})
            self._failed(f"{type(error).__name__}: {error}")
            return False
        if self.problem and self.failures:
            self._events.add("source-back", self.name, "answers again", severity=Severity.INFO)
        self.problem = ""
        self.failures = 0
        self.fetches += 1
        self.answered_at = time.monotonic()
        return True

    async def _pause(self) -> None:
        wait = min(
            self._interval * 2.0 ** min(self.failures, _MOST_DOUBLINGS),
            max(self._interval, LONGEST_BACKOFF_S),
        )
        # Spread a little, so that sources with the same interval are not read at once.
        wait *= random.uniform(0.9, 1.1)
        await asyncio.sleep(LEAST_PAUSE_S)
        try:
            async with asyncio.timeout(max(wait - LEAST_PAUSE_S, 0)):
                await self._wanted.wait()
        except TimeoutError:
            return

    def _failed(self, problem: str) -> None:
        self.failures += 1
        if problem != self.problem:
            self._events.add("source-failed", self.name, f"{problem}; its last list stays in force")
        self.problem = problem
