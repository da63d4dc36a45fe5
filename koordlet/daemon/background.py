"""Tasks that run as long as the daemon. A task that ends with an error ends the daemon."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

_LOG = logging.getLogger("koordlet")


class Background:
    """The tasks of one daemon. Belongs to the event loop."""

    def __init__(self, fault: Callable[[], None]) -> None:
        """fault: called when a task has ended with an error."""
        self._fault = fault
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the daemon does."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                _LOG.critical("task failed, stopping", exc_info=error, extra={"task": name})
                self._fault()

        task.add_done_callback(ended)

    def repeat(
        self, name: str, work: Callable[[], None], *, workers: Executor, pause_s: float
    ) -> None:
        """Do blocking work in a worker thread again and again, until the daemon ends."""
        self.spawn(name, _repeat(work, workers, pause_s))

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(work: Callable[[], None], workers: Executor, pause_s: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await loop.run_in_executor(workers, work)
        await asyncio.sleep(pause_s)
