"""The loop around a source: fetch in a thread, apply on the event loop, back off when it fails."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from koordlet.events import Events, Severity

_LOG = logging.getLogger("koordlet.sources")
_T = TypeVar("_T")

LONGEST_BACKOFF_S: Final = 60.0
LEAST_PAUSE_S: Final = 1.0
"""Between two fetches, however often they are asked for."""


class SourceError(Exception):
    """A source could not be asked; the message says what to do."""


class Poller:
    """Asks one source again and again. `trigger` asks for it sooner."""

    def __init__(self, name: str, interval: float, events: Events, executor: Executor) -> None:
        self.name = name
        self.problem = "not asked yet"
        self.failures = 0
        self.fetches = 0
        self._interval = interval
        self._events = events
        self._executor = executor
        self._wanted = asyncio.Event()

    def trigger(self) -> None:
        """Ask soon."""
        self._wanted.set()

    async def run(
        self, fetch: Callable[[], _T], apply: Callable[[_T, int], None], mark: Callable[[], int]
    ) -> None:
        """Go on until cancelled. mark: taken before a fetch, given to `apply` too."""
        while True:
            await self.once(fetch, apply, mark)
            await self._pause()

    async def once(
        self, fetch: Callable[[], _T], apply: Callable[[_T, int], None], mark: Callable[[], int]
    ) -> bool:
        """Ask once; tells whether it succeeded."""
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
        return True

    async def _pause(self) -> None:
        wait = min(
            self._interval * 2.0 ** min(self.failures, 10), max(self._interval, LONGEST_BACKOFF_S)
        )
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
