"""Bounding how long a call of somebody else's code may take: it is struck in the middle.

In the main thread a timer of the kernel does it, in any other a watching thread. Either way the
call ends with `Overtime`, which such code does not catch with its own errors.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from ctypes import c_ulong, py_object, pythonapi
from types import FrameType
from typing import Final, TypeVar

_T = TypeVar("_T")

_STRIKE_AGAIN_S: Final = 0.1
"""Long enough for a struck call to leave, short enough against one that swallows the strike."""


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
                # Again and again: a policy that swallows the first one is struck by the next.
                signal.setitimer(signal.ITIMER_REAL, limit_s, _STRIKE_AGAIN_S)
                return call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Overtime:
            # It may have struck on the way to the line above.
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise


class _Call:
    """One call under watch. settled: the watcher will not strike any more, or has."""

    __slots__ = ("deadline", "settled", "struck", "thread")

    def __init__(self, thread: int, deadline: float) -> None:
        self.thread = thread
        self.deadline = deadline
        self.struck = False
        self.settled = True


class Interrupter:
    """Bounds calls in threads other than the main one, where no signal arrives.

    A watching thread raises Overtime inside the thread of a call that is overdue. It announces the
    strike before it looks whether the call still runs, so a call that ends meanwhile waits for the
    strike to be settled, and no strike ever hits what comes after the call.
    """

    _PERIOD_S: Final = 0.002

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
            # It may have struck on the way to the line above.
            self._end(watched)
            raise

    def _end(self, watched: _Call) -> None:
        self._calls.pop(watched.thread, None)
        while watched.struck and not watched.settled:
            time.sleep(0.0002)

    def _ensure_watching(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._watch, name="koordlet-site", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
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
