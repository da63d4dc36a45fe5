"""A work queue of keys: each key waits once, is worked on by one worker, and backs off on failure.

Changes of a key while it is being worked on make it due again afterwards, so no change is lost and
no key is worked on twice at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

_log = logging.getLogger(__name__)

_FIRST_BACKOFF: Final = 0.005
_LONGEST_BACKOFF: Final = 60.0
_CLOCK_S: Final = 0.001


class WorkQueue:
    """Keys that are due, plus keys that will be due at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._due: deque[str] = deque()
        self._waiting: set[str] = set()
        self._active: set[str] = set()
        self._again: set[str] = set()
        self._failures: dict[str, int] = {}
        self._later: list[tuple[float, int, str]] = []
        self._later_at: dict[str, float] = {}
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._idlers: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def idle(self) -> bool:
        """Whether nothing is due and nothing is being worked on."""
        return not self._due and not self._active

    @property
    def due(self) -> bool:
        """Whether a key waits to be worked on."""
        return bool(self._due)

    def take(self) -> str:
        """Take the next due key without working on it; for callers with a loop of their own."""
        key = self._due.popleft()
        self._waiting.discard(key)
        return key

    def add(self, key: str) -> None:
        """Make `key` due now."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._due.append(key)
            self._wake_one()

    def add_after(self, key: str, seconds: float) -> None:
        """Make `key` due in `seconds`, or earlier if it already is due earlier."""
        at = asyncio.get_running_loop().time() + max(0.0, seconds)
        known = self._later_at.get(key)
        if known is not None and known <= at:
            return
        self._later_at[key] = at
        heapq.heappush(self._later, (at, next(self._order), key))
        if self._timer is None or at < self._timer.when():
            self._set_timer(at)

    def forget(self, key: str) -> None:
        """Drop a key's failures and its timer; for keys whose object is gone."""
        self._failures.pop(key, None)
        self._later_at.pop(key, None)

    async def work(self, handle: Callable[[str], Awaitable[float | None]]) -> None:
        """Handle due keys one after the other, until cancelled. Run it once per worker.

        `handle` returns seconds after which the key is due again, or None. When it raises, the key
        backs off and the others go on.
        """
        while True:
            key = await self._next()
            try:
                again = await handle(key)
            except Exception as error:  # noqa: BLE001 - one key must not stop the others
                failures = self._failures.get(key, 0) + 1
                self._failures[key] = failures
                pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(failures, 20))
                level = logging.INFO if failures < 3 else logging.WARNING
                _log.log(level, "%s %s failed (%d): %s", self.name, key, failures, error)
                self.add_after(key, pause * random.uniform(0.9, 1.1))
            else:
                self._failures.pop(key, None)
                if again is not None:
                    self.add_after(key, again)
            finally:
                self._active.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)

    async def _next(self) -> str:
        while not self._due:
            idler = asyncio.get_running_loop().create_future()
            self._idlers.append(idler)
            try:
                await idler
            except asyncio.CancelledError:
                # A worker that ends after it was woken leaves the key to another.
                if self._due:
                    self._wake_one()
                raise
        key = self._due.popleft()
        self._waiting.discard(key)
        self._active.add(key)
        return key

    def _wake_one(self) -> None:
        """One key wakes one worker, however many wait."""
        while self._idlers:
            idler = self._idlers.popleft()
            if not idler.done():
                idler.set_result(None)
                return

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        # The loop may call a little early, by its clock's resolution.
        while self._later and self._later[0][0] <= now + _CLOCK_S:
            at, _, key = heapq.heappop(self._later)
            if self._later_at.get(key) == at:
                del self._later_at[key]
                self.add(key)
        if self._later:
            self._set_timer(self._later[0][0])
