"""Starts background tasks. A task that fails is logged."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


def spawn(what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start `work`; `what` names it in the log should it fail."""
    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work failed", extra={"work": task.get_name()}, exc_info=error)
