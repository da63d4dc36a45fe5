"""Waiting for what another process, thread, task or the kernel brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class NotWithin(AssertionError):
    """What was waited for did not come; the text names it."""


def wait_until(
    condition: Callable[..., object], what: str, *, timeout_s: float = 20.0, every_s: float = 0.02
) -> None:
    """Return once the condition, called without arguments, holds. Raises NotWithin."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotWithin(f"not within {timeout_s:g} s: {what}")
        time.sleep(every_s)


async def until(
    condition: Callable[[], object], what: str = "", *, timeout_s: float = 10.0
) -> None:
    """As `wait_until`, for what a task of this event loop brings about. Raises NotWithin."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NotWithin(f"not within {timeout_s:g} s: {what or 'the condition'}")
        await asyncio.sleep(0.005)
