"""Keeps writes that can wait behind the bindings, which share the API server with them.

A thousand pods that are created at once are a thousand bindings, as many events, and a condition
for each pod that fits nowhere. All of them cost the API server about the same. While bindings wait
for a request, the others are written at a low rate: the first of them show early what goes on,
and the rest follows after the bindings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from cluster.scheduler.binding.pauses import Pauses

_EVERY_S: Final = 0.05
"""Between two writes of one kind while bindings wait. Chosen: 20 a second of each of two kinds
take a twentieth of a server that binds 800 pods a second; at half the value, a tenth."""


class BehindBindings:
    """The turns of one kind of writes.

    busy: returns whether bindings wait for a request. many: with so many writes waiting, they are
    not held back, so that holding back never makes their queue overflow.
    """

    def __init__(self, busy: Callable[[], bool], *, many: int) -> None:
        self._busy = busy
        self._many = many
        self._paced = asyncio.Lock()

    async def write(
        self,
        write_next: Callable[[], Awaitable[bool]],
        *,
        waiting: Callable[[], int],
        wake: asyncio.Event,
        pauses: tuple[float, float],
    ) -> None:
        """Write what waits, one after another, until cancelled.

        write_next: writes the next one and returns whether to pause after it, because the API
        server cannot take more now. wake: set when more waits. pauses: the first and the longest in
        seconds, doubled from one to the next.
        """
        resting = Pauses(*pauses)
        while True:
            while not waiting():
                wake.clear()
                await wake.wait()
            await self.turn(waiting)
            if not waiting():
                continue
            if await write_next():
                await resting.rest()
            else:
                resting.begin_again()

    async def turn(self, waiting: Callable[[], int]) -> None:
        """Return when the next write may begin. waiting: returns how many writes wait."""
        if not self._holds_back(waiting()):
            return
        async with self._paced:
            if self._holds_back(waiting()):
                await asyncio.sleep(_EVERY_S)

    def _holds_back(self, waiting: int) -> bool:
        return waiting < self._many and self._busy()
