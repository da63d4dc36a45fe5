"""Core scheduling through prctl(2): read, create and copy cookies.

A cookie can only be copied through the calling thread, and that thread keeps it. So every copy runs
in a thread of its own that ends afterwards: the daemon's other threads stay without a cookie.
Commands, scopes and errors: docs/facts/kernel.md, "Core scheduling".
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Final

_PR_SCHED_CORE: Final = 62  # this and the numbers below: linux/prctl.h
_GET, _CREATE, _SHARE_TO, _SHARE_FROM = 0, 1, 2, 3
_THREAD, _THREAD_GROUP = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.prctl.restype = ctypes.c_int


def _prctl(command: int, pid: int, scope: int, pointer: int = 0) -> None:
    if _libc.prctl(_PR_SCHED_CORE, command, pid, scope, pointer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"core scheduling of pid {pid}: {os.strerror(number)}")


def cookie(pid: int) -> int:
    """Return the cookie id of a task (0: none). OSError: ENODEV or EINVAL where unsupported."""
    value = ctypes.c_uint64(0)
    _prctl(_GET, pid, _THREAD, ctypes.addressof(value))
    return value.value


def create(pid: int) -> None:
    """Give a new, unique cookie to the thread group of `pid`."""
    _prctl(_CREATE, pid, _THREAD_GROUP)


def copy(source_pid: int, target_pids: Sequence[int]) -> list[int]:
    """Give the cookie of `source_pid` (0: no cookie) to each thread group; return the pids that
    failed.

    Raises OSError when the source's cookie cannot be taken.
    """
    failed: list[int] = []
    problem: list[OSError] = []

    def carry() -> None:
        try:
            if source_pid:
                _prctl(_SHARE_FROM, source_pid, _THREAD)
        except OSError as error:
            problem.append(error)
            return
        for pid in target_pids:
            try:
                _prctl(_SHARE_TO, pid, _THREAD_GROUP)
            except OSError:
                failed.append(pid)

    carrier = threading.Thread(target=carry, name="core-sched")
    carrier.start()
    carrier.join()
    if problem:
        raise problem[0]
    return failed
