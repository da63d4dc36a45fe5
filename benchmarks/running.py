"""How a benchmark runs and ends: its daemons and cgroups go with it, also when a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import psutil

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_S: Final = 20.0
"""From SIGTERM to SIGKILL. Chosen: koordlet takes a second, more on a busy machine. With
twice the value a daemon that hangs holds up the end by that much."""


def run_main(main: Callable[[], None]) -> None:
    """Call `main`; SIGINT, SIGTERM and SIGHUP leave its blocks by an exception.

    By default SIGTERM and SIGHUP end Python without leaving a block, and a shell starts a
    background job with SIGINT ignored.
    """
    for number in _ENDING:
        signal.signal(number, _leave)
    main()


def _leave(number: int, _: FrameType | None) -> None:
    """Begin to leave all blocks, once: a second signal would leave the clean-up itself."""
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def started_apart(command: Sequence[str], **options: Any) -> psutil.Popen:
    """Start a program in a session of its own, which for the kernel's scheduler is a CPU group.

    A runtime, its plugin and what loads the node are in CPU groups of their own too: units, pods.
    Measured at a load of 20: a Go plugin in the driver's group answered in 0.24 ms (p50), in a
    group of its own in 8.9 ms. Probably one of its threads runs on the driver's CPU, in the turn of
    their group, as soon as the driver waits.
    """
    return psutil.Popen(command, start_new_session=True, **options)


@contextmanager
def ended_with_block(process: psutil.Popen) -> Iterator[psutil.Popen]:
    """End the process when the block ends: by SIGTERM, and by SIGKILL where that is not enough."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()
