"""A work queue of keys: each key waits once, is worked on by one worker, and backs off on failure.

A key that is added while it is being worked on becomes due again afterwards, so no change is lost
and no key is worked on twice at a time. A fault of the queue's own code delays the key that it
occurred with; workers and the timer go on.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from kube.client import ApiError, Unreachable
from kube.faults import Faults
from service.histogram import Histogram

_log = logging.getLogger(__name__)

_FIRST_BACKOFF: Final = 0.005
"""Seconds before the first retry; doubled with each failure in a row, as client-go does."""
_LONGEST_BACKOFF: Final = 60.0
"""Chosen: a node whose writes are refused is tried once a minute; client-go waits up to 16 min."""
_CLOCK_S: Final = 0.001
"""uvloop counts time in whole milliseconds, so a timer may come that much early."""
_LONGEST_TIMER_S: Final = 3600.0
"""An event loop's timers have a range; a later time is reached by setting the timer again."""
_LONGEST_DELAY_S: Final = 366 * 24 * 3600.0
"""A year. Chosen: longer than a controller runs, so that a time that was computed wrongly (NaN,
infinity) means "not in this run". Twice the value changes nothing."""
_FAULT_PAUSE_S: Final = 1.0
"""Before a worker goes on that failed outside of a key's work, so that it cannot spin."""
_SPARE_TIMES: Final = 64
"""Times without a key that are kept at least, so that few keys cause no constant sorting."""


WORK_BOUNDS: Final = tuple(1e-8 * 10.0**power for power in range(10))
"""Seconds; those of client-go's work queues."""


class WorkCounts:
    """adds: keys that became due. retries: those that did after a failure. waited: seconds from
    then until a worker took a key. worked: seconds that it took."""

    __slots__ = ("adds", "retries", "waited", "worked")

    def __init__(self) -> None:
        self.adds = 0
        self.retries = 0
        self.waited = Histogram(WORK_BOUNDS)
        self.worked = Histogram(WORK_BOUNDS)


class WorkQueue:
    """Keys that are due, and keys with a later time at which they become due."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults = Faults(name)
        self.counts = WorkCounts()
        self._due: deque[str] = deque()
        self._waiting: dict[str, float] = {}
        """Keys that are due, with the time since when, by time.monotonic."""
        self._active: dict[str, float] = {}
        """Keys that are worked on, likewise."""
        self._again: set[str] = set()
        self._failures: dict[str, int] = {}
        self._later: list[tuple[float, int, str]] = []
        """A heap of times; those that differ from the key's in `_later_at` are out of date."""
        self._later_at: dict[str, float] = {}
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        """When `_timer` comes. It is kept here because the handle may not know: for a time that
        is past, uvloop's call_at() returns a handle without when()."""
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

    @property
    def remembered(self) -> int:
        """How many entries the queue holds for keys that are not due, out-of-date ones included."""
        return len(self._later) + len(self._later_at) + len(self._failures)

    def take(self) -> str:
        """Take the next due key without working on it; for callers with a loop of their own."""
        return self._taken()[0]

    def _taken(self) -> tuple[str, float]:
        """Take the next due key. Returns it with the time."""
        key, now = self._due.popleft(), time.monotonic()
        since = self._waiting.pop(key, now)
        self.counts.waited.observe(now - since)
        return key, now

    def running(self) -> tuple[float, ...]:
        """Return for how many seconds each key has been worked on that is now."""
        now = time.monotonic()
        return tuple(now - since for since in self._active.values())

    def add(self, key: str) -> None:
        """Make `key` due now."""
        if key in self._active:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting[key] = time.monotonic()
            self._due.append(key)
            self.counts.adds += 1
            self._wake_one()

    def add_after(self, key: str, seconds: float) -> None:
        """Make `key` due in `seconds`, or earlier if it already is due earlier.

        Negative seconds mean now; NaN, and more than a year, mean a year.
        """
        if not seconds <= _LONGEST_DELAY_S:
            seconds = _LONGEST_DELAY_S
        at = asyncio.get_running_loop().time() + max(0.0, seconds)
        known = self._later_at.get(key)
        if known is not None and known <= at:
            return
        self._later_at[key] = at
        heapq.heappush(self._later, (at, next(self._order), key))
        self._drop_outdated()
        if at < self._timer_at:
            self._set_timer(at)

    def forget(self, key: str) -> None:
        """Drop a key's failures and its time; for keys whose object is gone."""
        self._failures.pop(key, None)
        self._later_at.pop(key, None)
        self._drop_outdated()

    async def work(self, handle: Callable[[str], Awaitable[float | None]]) -> None:
        """Handle due keys one after the other, until cancelled. Run it once per worker.

        `handle` returns seconds after which the key is due again, or None. When it raises, the key
        backs off and the others go on.
        """
        while True:
            key = await self._next()
            try:
                await self._work_on(key, handle)
            except Exception:  # noqa: BLE001 - a worker lives as long as the process
                self.faults.note("the work queue", about=key)
                await asyncio.sleep(_FAULT_PAUSE_S)
                self.add(key)
            # Work that waits for nothing would hold the loop for all keys that are due: 0.7 s were
            # measured for 5,000 nodes after an edit of the configuration that changes no object.
            await asyncio.sleep(0)

    async def _work_on(self, key: str, handle: Callable[[str], Awaitable[float | None]]) -> None:
        try:
            again = await handle(key)
        except Exception as error:  # noqa: BLE001 - one key must not stop the others
            if not isinstance(error, (ApiError, Unreachable)):
                self.faults.note("work", about=key)
            self._back_off(key, error)
        else:
            self._failures.pop(key, None)
            if again is not None:
                self.add_after(key, again)
        finally:
            since = self._active.pop(key, None)
            if since is not None:
                self.counts.worked.observe(time.monotonic() - since)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    def _back_off(self, key: str, error: Exception) -> None:
        failures = self._failures.get(key, 0) + 1
        self._failures[key] = failures
        self.counts.retries += 1
        pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2.0 ** min(failures, 20))
        level = logging.INFO if failures < 3 else logging.WARNING
        _log.log(level, "%s %s failed (%d): %s", self.name, key, failures, error)
        self.add_after(key, pause * random.uniform(0.9, 1.1))

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
        key, now = self._taken()
        self._active[key] = now
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
            self._timer = None
        loop = asyncio.get_running_loop()
        at = min(at, loop.time() + _LONGEST_TIMER_S)
        self._timer_at = at
        self._timer = loop.call_at(at, self._time_passed)

    def _time_passed(self) -> None:
        self._timer, self._timer_at = None, math.inf
        try:
            self._make_due(asyncio.get_running_loop().time())
        except Exception:  # noqa: BLE001 - the keys that wait for later must still get their timer
            self.faults.note("the timer")
        if self._later:
            self._set_timer(self._later[0][0])

    def _make_due(self, now: float) -> None:
        # The loop may call a little early, by its clock's resolution.
        while self._later and self._later[0][0] <= now + _CLOCK_S:
            at, _, key = heapq.heappop(self._later)
            if self._later_at.get(key) == at:
                del self._later_at[key]
                self.add(key)

    def _drop_outdated(self) -> None:
        """Keep the heap within twice the keys that have a time: nodes come and go for weeks."""
        if len(self._later) <= 2 * len(self._later_at) + _SPARE_TIMES:
            return
        self._later = [entry for entry in self._later if self._later_at.get(entry[2]) == entry[0]]
        heapq.heapify(self._later)
