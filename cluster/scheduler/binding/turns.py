"""Turns: work about one pod runs in the order in which it was asked for, one piece at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Which piece of work is the last of each key. Keys without work take no memory."""

    def __init__(self) -> None:
        self._last: dict[str, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        """Return how many keys have work."""
        return len(self._last)

    def busy(self, key: str) -> bool:
        """Return whether there is work about `key` that has not ended."""
        return key in self._last

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        """Wait for the end of all earlier work about `key`, and hold the turn in the block."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        before = self._last.get(key)
        self._last[key] = mine
        try:
            if before is not None:
                # Shielded: the one before belongs to others, and ends also when this is cancelled.
                await asyncio.shield(before)
            yield
        finally:
            if before is not None and not before.done():
                # Cancelled while waiting: who comes after still has to wait for the one before.
                before.add_done_callback(lambda _: self._end(key, mine))
            else:
                self._end(key, mine)

    def _end(self, key: str, mine: asyncio.Future[None]) -> None:
        mine.set_result(None)
        if self._last.get(key) is mine:
            del self._last[key]
