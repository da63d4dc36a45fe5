"""Times each step of a koordlet's event loop: what it runs without a look at its sockets.

A hook that arrives during a step waits for its end. uvloop does not show its steps, so the daemon
runs on asyncio's own loop here, which calls the same code. CPU time is what a step costs; elapsed
time also has the waits for a CPU and for the interpreter's other threads.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
from array import array
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

_SAVED_EVERY_S: Final = 5.0
_LONGEST: Final = 5


class Steps(msgspec.Struct):
    """Steps since the start; times in seconds, ascending. longest: CPU time and name of the longest
    ones, the longest first."""

    cpu: list[float]
    elapsed: list[float]
    longest: list[tuple[float, str]]


def program(path: Path, checkout: Path) -> str:
    """Return the Python program that is a koordlet which saves its steps to a file."""
    return (
        f"import sys; sys.path.append({str(checkout)!r});"
        f" from benchmarks.loop_steps import measured; measured({str(path)!r});"
        " from koordlet.main import main; sys.exit(main())"
    )


def measured(path: str) -> None:
    """Measure the steps of every loop of this process from now on, and save them now and then."""
    cpu, elapsed = array("d"), array("d")
    longest: list[tuple[float, str]] = []
    saved_at = time.monotonic()
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        nonlocal saved_at
        began, busy = time.perf_counter(), time.thread_time()
        run(handle)
        busy = time.thread_time() - busy
        elapsed.append(time.perf_counter() - began)
        cpu.append(busy)
        if len(longest) < _LONGEST:
            heapq.heappush(longest, (busy, _name(handle)))
        elif busy > longest[0][0]:
            heapq.heapreplace(longest, (busy, _name(handle)))
        if time.monotonic() - saved_at > _SAVED_EVERY_S:
            steps = Steps(sorted(cpu), sorted(elapsed), sorted(longest, reverse=True))
            Path(path).write_text(json.dumps(msgspec.to_builtins(steps)))
            saved_at = time.monotonic()

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]
    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]


def read(path: Path) -> Steps:
    """Return what a measured daemon saved last."""
    return msgspec.json.decode(path.read_bytes(), type=Steps)


def _name(handle: Any) -> str:
    """Return which code a step ran: of a task its coroutine, otherwise the function."""
    owner = getattr(handle._callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return str(owner.get_coro().__qualname__)  # type: ignore[union-attr]
    return str(getattr(handle._callback, "__qualname__", handle._callback))
