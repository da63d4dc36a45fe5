"""Gives freed memory back to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Have the C library return what it holds of freed memory; blocks for some milliseconds.

    glibc keeps freed blocks that lie below one in use: after a message of 20 MB a process would
    stay at its peak. Where the C library has no such function, nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
