"""What the C library keeps of freed memory, and how it is given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Numbers of mallopt(3)."""
_MAPPED_BYTES: Final = 128 * 1024
"""Blocks of this size and more are mapped on their own. glibc begins with this value, and raises it
to the size of the largest block that was freed: after one large list all blocks of some megabytes
would lie in the heap, where a small one above them keeps them. Half of the value costs more system
calls; with twice the value the heap has larger gaps."""


def keep_little() -> None:
    """Have the C library keep little of what is freed. Before the process starts a thread.

    glibc gives each thread a heap of its own, in whose gaps no other thread's blocks go. In a
    Python process one thread runs at a time as a rule, so one heap is enough. Where the C library
    has no such settings, nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def give_back() -> None:
    """Have the C library return what it holds of freed memory; blocks for some milliseconds.

    glibc keeps freed blocks that lie below one in use: after a message of 20 MB a process would
    stay at its peak. Where the C library has no such function, nothing happens.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
