"""Scheduling of the calling thread: by the kernel, and by the interpreter.

A daemon here has one thread that others wait for, its event loop, and threads that do the rest.
Two things make the loop wait although a CPU is idle, and a third where none is:

- The kernel often wakes it on the CPU where another thread of the process runs. EEVDF, the kernel's
  scheduler since 6.6, lets a running thread of equal weight finish its slice, and looks only at
  ticks, which are 4 ms apart with HZ=250. With a larger weight and a shorter slice the woken thread
  has the earlier deadline and is run at once (docs/facts/kernel.md, "Scheduling of threads").
- The interpreter runs one thread at a time. A thread that wants it waits for the switch interval
  before it asks for it, and at each handover the kernel has to wake a thread again.
- A thread that holds the interpreter may itself wait for a CPU, behind other processes: on a busy
  node for tens of milliseconds. So the other threads have nearly the weight of the loop's. Niceness
  counts within one CPU group. Where a daemon has a group of its own, as a systemd unit or in a
  container, the weight of the group decides how long it waits for other processes.

What helps in the first two cases, and for other processes on that CPU too, is that the other
threads sleep often: `StepAside`.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import struct
import sys
import time
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Final

from service.collection import collect_youngest

_LOG = logging.getLogger(__name__)

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of sched_setattr(2), which the C library does not wrap before glibc 2.41."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
"""struct sched_attr in its first version: size, policy, flags, niceness, priority, runtime (of
SCHED_OTHER: the slice), deadline, period."""
_RESET_ON_FORK: Final = 1
"""SCHED_FLAG_RESET_ON_FORK: new threads and processes begin with the default slice, and with
niceness 0 where it would be negative."""

_LOOP_NICENESS: Final = -10
"""Of the event loop's thread. Chosen with traces of the scheduler in which the threads beside it
had niceness 0: with -5 the kernel still let a running thread go on now and then, -20 brought
nothing more. Its weight is 1.25 times that of the threads beside it now; what puts it before them
is its slice, which is 30 times shorter."""
_LOOP_SLICE_US: Final = 100
"""Of the event loop's thread: the kernel's minimum, and about what an answer takes. The shorter the
slice, the earlier the deadline of a thread that was woken."""
_BESIDE_NICENESS: Final = -9
"""Of the threads beside the event loop: 7.4 times the weight of an ordinary process of the same CPU
group, and less than the loop's. Measured with a koordlet in the CPU group of the other processes,
on two CPUs at a load of 7 to 11, with 30 to 50 ms between pods: with 0 a creation took 0.5 to 0.7
ms (p50) and 64 to 94 ms (p99), with -9 it took 0.3 to 0.4 and 13 to 41 ms in the same runs."""
_BESIDE_SLICE_US: Final = 3000
"""Of the threads beside the event loop: the kernel's default on eight CPUs. A longer one makes
their deadline later than that of ordinary processes: with 20 ms, p50 was 0.5 ms in those runs. With
0.3 ms they keep the runtime's thread, which is an ordinary one, from its CPU: 0.5 ms as well."""

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

    After that, before the thread works on, is the moment for young garbage (`service.collection`).

    A thread that runs is not interrupted by each thread that is woken on its CPU, and the other CPU
    may stay idle meanwhile; what is woken then waits for the next tick, up to 4 ms. A thread that
    sleeps delays no other, whatever the kernel's scheduler decides. One object for each thread.

    work_s: the processor time before. aside_s: how long it sleeps; the kernel adds some. wait:
    called first; may wait for longer, and returns whether it did. collect: called last; it counts
    as work. clock: returns the thread's processor time, so that waiting for the interpreter does
    not count. elapsed: a clock that runs at least as fast, and costs a sixth: it needs no system
    call.
    """

    __slots__ = (
        "_aside_s",
        "_clock",
        "_collect",
        "_earliest",
        "_elapsed",
        "_since",
        "_sleep",
        "_wait",
        "_work_s",
    )

    def __init__(
        self,
        *,
        work_s: float = _WORK_S,
        aside_s: float = _ASIDE_S,
        wait: Callable[[], bool] = lambda: False,
        collect: Callable[[], None] = collect_youngest,
        clock: Callable[[], float] = time.thread_time,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._work_s = work_s
        self._aside_s = aside_s
        self._wait = wait
        self._collect = collect
        self._clock = clock
        self._elapsed = elapsed
        self._sleep = sleep
        self._since = 0.0
        """The thread's processor time when it stepped aside last."""
        self._earliest = -math.inf
        """Before that moment it cannot have worked for long enough."""

    def __call__(self) -> None:
        now = self._elapsed()
        if now < self._earliest:
            return
        left_s = self._work_s - (self._clock() - self._since)
        if left_s > 0:
            self._earliest = now + left_s
            return
        if not self._wait():
            self._sleep(self._aside_s)
        self._since = self._clock()
        self._earliest = self._elapsed() + self._work_s
        self._collect()


def schedule_event_loop() -> bool:
    """Schedule the calling thread as a daemon's event loop, as `schedule_this_thread` does."""
    return schedule_this_thread(slice_us=_LOOP_SLICE_US, niceness=_LOOP_NICENESS)


def schedule_beside_event_loop() -> bool:
    """Schedule the calling thread as one that shares the interpreter with a daemon's event loop.

    As `schedule_this_thread` does. The loop goes first, and other processes of the same CPU group
    hardly delay either.
    """
    return schedule_this_thread(slice_us=_BESIDE_SLICE_US, niceness=_BESIDE_NICENESS)


def schedule_this_thread(*, slice_us: int, niceness: int | None = None) -> bool:
    """Set slice and niceness (None: keep it) of the calling thread; return whether both were taken.

    slice_us: 100 to 100,000; kernels before 6.12 ignore it. A lower niceness than now needs
    CAP_SYS_NICE or a limit RLIMIT_NICE that allows it. Where the kernel or a sandbox refuses, the
    thread is scheduled as before, and one line of the log says so for all such threads. Threads
    that this one starts later inherit neither (SCHED_FLAG_RESET_ON_FORK).
    """
    if niceness is None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        _set_attributes(niceness, slice_us * 1000)
    except OSError as error:
        _report_refusal(error.strerror or str(error), niceness, slice_us)
        return False
    return True


@cache
def _report_refusal(reason: str, niceness: int, slice_us: int) -> None:
    """Log it once: some threads live for one query, and all of them are refused alike."""
    _LOG.info(
        "this thread keeps its scheduling: %s",
        reason,
        extra={"niceness": niceness, "slice_us": slice_us},
    )


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
