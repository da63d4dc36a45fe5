"""Work that a hook's reply does not need, done once the runtime has had the time to receive it.

A reply wakes the runtime's thread, often on the CPU where the event loop runs. The loop has the
larger weight there (`service.scheduling`), so the thread waits until the loop sleeps: everything
that is done right after a reply is part of what the runtime waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

_LOG = logging.getLogger("koordlet")

_LATER_S: Final = 0.005
"""How long work waits. A runtime takes longer between two calls for one container. Nothing is lost
with a process that is killed in this time: requests are staged before the reply
(`koordlet.state.requests_log`), and the rest has no file before the next pass. Three times the
value changes nothing; a fifth meets the next call of a runtime that calls back to back."""


class AfterReply:
    """Keeps work in its order for a moment. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def later(self, work: Callable[[], None]) -> None:
        """Do `work` in a moment, after all earlier work."""
        self._waiting.append(work)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LATER_S, self.catch_up)

    def catch_up(self) -> None:
        """Do what waits now: what follows depends on it. Work that fails takes no other with it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            work = self._waiting.popleft()
            try:
                work()
            except Exception:  # noqa: BLE001 - the work of other hooks must not be lost
                _LOG.exception("what follows a hook's reply failed")
