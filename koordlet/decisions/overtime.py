"""Limits the duration of a call into a site policy, by raising `Overtime` inside the call.

In the main thread a kernel timer raises it, in other threads a watching thread. `Overtime` is not
an `Exception`, so a policy that catches its own errors does not catch it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from ctypes import c_ulong, py_object, pythonapi
from types import FrameType
from typing import Final, TypeVar

from service.scheduling import schedule_beside_event_loop

_T = TypeVar("_T")

_STRIKE_AGAIN_S: Final = 0.1
"""After this time `Overtime` is raised again. Chosen: long enough for an interrupted call to end,
and short for a call that catches it. Twice the value doubles how long such a call lasts."""
_SETTLE_POLL_S: Final = 0.0002
"""How often a call that has ended checks whether a late `Overtime` has arrived: a fraction of the
watcher's period, so the wait stays short."""


class Overtime(BaseException):
    """Raised inside a call that took too long. Not an Exception: policies catch those."""


class Alarm:
    """Bounds calls in the main thread with a timer of the kernel: two system calls each."""

    def __init__(self) -> None:
        """Must be made in the main thread."""
        signal.signal(signal.SIGALRM, self._ring)

    @staticmethod
    def _ring(number: int, frame: FrameType | None) -> None:
        raise Overtime

    def run(self, call: Callable[[], _T], limit_s: float) -> _T:
        """Return what `call` returns; raises Overtime in it after `limit_s` seconds."""
        try:
            try:
                # Periodically: a policy that catches the first one meets the next.
                signal.setitimer(signal.ITIMER_REAL, limit_s, _STRIKE_AGAIN_S)
                return call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Overtime:
            # The timer may have fired before the line above was reached.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise


class _Call:
    """A watched call. struck: `Overtime` is being raised in it. settled: the watcher is done."""

    __slots__ = ("deadline", "settled", "struck", "thread")

    def __init__(self, thread: int, deadline: float) -> None:
        self.thread = thread
        self.deadline = deadline
        self.struck = False
        self.settled = True


class Interrupter:
    """Bounds calls in threads other than the main one, where no signal arrives.

    A watching thread raises Overtime inside the thread of a call that is overdue. It sets `struck`
    before it checks whether the call still runs, so a call that ends in between waits until the
    watcher is done. So Overtime is never raised after the call.
    """

    _PERIOD_S: Final = 0.002
    """How often deadlines are checked while a call runs: less than half of the default limit of 5
    ms. Twice the value lets calls run that much longer, half of it doubles the wake-ups."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._work = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], _T], limit_s: float) -> _T:
        """Return what `call` returns; raises Overtime in it after `limit_s` seconds."""
        self._ensure_watching()
        watched = _Call(threading.get_ident(), time.monotonic() + limit_s)
        try:
            try:
                self._calls[watched.thread] = watched
                self._work.set()
                return call()
            finally:
                self._end(watched)
        except Overtime:
            # It may have been raised before `_end` was reached.
            self._end(watched)
            raise

    def _end(self, watched: _Call) -> None:
        self._calls.pop(watched.thread, None)
        while watched.struck and not watched.settled:
            time.sleep(_SETTLE_POLL_S)

    def _ensure_watching(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="koordlet-site", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        schedule_beside_event_loop()
        while True:
            self._work.wait()
            self._work.clear()
            while self._calls:
                time.sleep(self._PERIOD_S)
                now = time.monotonic()
                for watched in tuple(self._calls.values()):
                    if now > watched.deadline:
                        self._strike(watched)

    def _strike(self, watched: _Call) -> None:
        watched.settled = False
        watched.struck = True
        watched.deadline = time.monotonic() + _STRIKE_AGAIN_S
        if self._calls.get(watched.thread) is watched:
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(watched.thread), py_object(Overtime))
        watched.settled = True
