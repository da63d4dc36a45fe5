"""Scheduling of the calling thread: by the kernel, and by the interpreter.

A daemon here has one thread that others wait for, its event loop, and threads that do the rest.
Two things make the loop wait although a CPU is idle:

- The kernel often wakes it on the CPU where another thread of the process runs. EEVDF, the kernel's
  scheduler since 6.6, lets a running thread of equal weight finish its slice, and looks only at
  ticks, which are 4 ms apart with HZ=250. With a larger weight and a shorter slice the woken thread
  has the earlier deadline and is run at once (docs/facts/kernel.md, "Scheduling of threads").
- The interpreter runs one thread at a time. A thread that wants it waits for the switch interval
  before it asks for it, and at each handover the kernel has to wake a thread again.

What helps in both cases, and for other processes on that CPU too, is that the other threads sleep
often: `StepAside`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

_LOG = logging.getLogger(__name__)

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of sched_setattr(2), which the C library does not wrap before glibc 2.41."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""struct sched_attr in its first version: size, policy, flags, niceness, priority, runtime (of
SCHED_OTHER: the slice), deadline, period."""
_RESET_ON_FORK: Final = 1
"""SCHED_FLAG_RESET_ON_FORK: new threads and processes begin with the default slice, and with
niceness 0 where it would be negative."""

_KEEP_S: Final = 0.005
"""The interpreter's switch interval inside `keep_interpreter`: Python's default. An answer takes a
tenth of a millisecond; twice the value changes nothing for it."""
_WORK_S: Final = 0.0002
"""How long a background thread works before it steps aside: twice what an answer takes. Twice the
value doubles what a thread waits that was woken on the same CPU. Half of it has the same tail, and
costs twice as much: 6 % of the processor time of a pod's life."""
_ASIDE_S: Final = 0.00002
"""How long it sleeps then. The kernel adds up to 50 us (the timer slack of a thread). Longer sleeps
make the background work last longer, so that it meets more answers."""


class StepAside:
    """Called often by a background thread: lets others run once it has worked for 200 us.

    A thread that runs is not interrupted by each thread that is woken on its CPU, and the other CPU
    may stay idle meanwhile; what is woken then waits for the next tick, up to 4 ms. A thread that
    sleeps delays no other, whatever the kernel's scheduler decides. One object for each thread.

    work_s: the processor time before. aside_s: how long it sleeps; the kernel adds some. clock:
    returns the thread's processor time, so that waiting for the interpreter is no work.
    """

    __slots__ = ("_aside_s", "_clock", "_since", "_sleep", "_work_s")

    def __init__(
        self,
        *,
        work_s: float = _WORK_S,
        aside_s: float = _ASIDE_S,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._work_s = work_s
        self._aside_s = aside_s
        self._clock = clock
        self._sleep = sleep
        self._since = 0.0
        """The thread's processor time when it stepped aside last."""

    def __call__(self) -> None:
        if self._clock() - self._since >= self._work_s:
            self._sleep(self._aside_s)
            self._since = self._clock()


def schedule_this_thread(*, slice_us: int, niceness: int | None = None) -> bool:
    """Set slice and niceness (None: keep it) of the calling thread; return whether both were taken.

    slice_us: 100 to 100,000; kernels before 6.12 ignore it. A lower niceness than now needs
    CAP_SYS_NICE or a limit RLIMIT_NICE that allows it. Where the kernel or a sandbox refuses, the
    thread is scheduled as before, and one line of the log says so. Threads that this one starts
    later inherit neither (SCHED_FLAG_RESET_ON_FORK).
    """
    if niceness is None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        _set_attributes(niceness, slice_us * 1000)
    except OSError as error:
        _LOG.info(
            "this thread keeps its scheduling: %s",
            error.strerror,
            extra={"niceness": niceness, "slice_us": slice_us},
        )
        return False
    return True


def _set_attributes(niceness: int, slice_ns: int) -> None:
    """Call sched_setattr(2) for the calling thread. Raises OSError."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        raise OSError(None, f"sched_setattr is not known on {platform.machine()}")
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, _RESET_ON_FORK, niceness, 0, slice_ns, 0, 0
    )
    if ctypes.CDLL(None, use_errno=True).syscall(number, 0, attributes, 0) != 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"sched_setattr: {os.strerror(failed)}")


class keep_interpreter:  # noqa: N801 - used like a function
    """Context manager: other threads do not interrupt the block, unless it takes 5 ms.

    With the short switch interval of a daemon, a thread that waits for the interpreter would take
    it in the middle of an answer, and the answer would wait until the kernel runs its thread again.
    The interval belongs to the whole process, so only one thread may use this. One object serves
    any number of blocks, one after the other.
    """

    __slots__ = ("_interval_s",)

    def __enter__(self) -> None:
        # Read each time: a daemon sets its interval after its first connection was made.
        # Python keeps whole microseconds and rounds down: without the half, each round loses one.
        self._interval_s = sys.getswitchinterval() + 0.5e-6
        sys.setswitchinterval(_KEEP_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.setswitchinterval(self._interval_s)
