"""One live NRI connection per node: a lock file that the connected daemon holds.

Two connections with the same identity are two plugins to the runtime, and the second claim of a
field fails the creation of every container (upstream's issue 2334). The kernel drops the lock when
its holder ends, however it ends. The file stays: removing it would let two holders in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


class LockHeld(Exception):
    """Another process holds the lock. holder: its pid as it wrote it, "" when unreadable."""

    def __init__(self, path: str, holder: str) -> None:
        self.path = path
        self.holder = holder
        who = f"process {holder}" if holder else "another process"
        super().__init__(
            f"{who} holds {path}: one daemon per node may be connected; stop the other"
        )


@contextmanager
def node_lock(path: str) -> Iterator[None]:
    """Hold the lock at `path` for the block; raises LockHeld at once when it is taken.

    The directory must exist. Raises OSError when the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise LockHeld(path, holder if holder.isdigit() else "") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        yield
    finally:
        os.close(descriptor)
