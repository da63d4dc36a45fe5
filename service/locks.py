"""Locks that keep a second daemon off a node: on a file, or on a directory that both would use.

Two connections with the same identity are two plugins to the runtime, and the second claim of a
field fails the creation of every container (upstream's issue 2334). One lock is a file in the run
directory; the other is on the directory of the runtime's socket, which daemons with different run
directories have in common. The kernel drops a lock when its holder ends, however it ends. The file
stays: removing it would let two holders in.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from service.files import UNWRITABLE


class LockHeld(Exception):
    """Another process holds the lock. holder: its pid as it wrote it, "" when unreadable."""

    def __init__(self, path: str, holder: str) -> None:
        self.path = path
        self.holder = holder
        who = f"process {holder}" if holder else "another process"
        super().__init__(f"{who} holds {path}: a node has one daemon; stop the other")


@contextmanager
def node_lock(path: str) -> Iterator[None]:
    """Hold the lock at `path` for the block; raises LockHeld at once when it is taken.

    The directory must exist. A file that is there is also locked where it cannot be written.
    Raises OSError when the file cannot be made.
    """
    descriptor = _open_lock_file(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            raise LockHeld(path, holder if holder.isdigit() else "") from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            # The lock holds all the same, without its holder's name. EBADF, EINVAL: the file is
            # open for reading alone.
            if error.errno not in UNWRITABLE | {errno.EBADF, errno.EINVAL}:
                raise
        yield
    finally:
        os.close(descriptor)


def _open_lock_file(path: str) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        try:
            return os.open(path, os.O_RDONLY | flags)
        except FileNotFoundError:
            raise error from None


@contextmanager
def runtime_lock(socket: str) -> Iterator[None]:
    """Hold the directory of a runtime's socket for the block; raises LockHeld when it is taken.

    A missing directory keeps no other process out; dialling reports that it is missing.
    """
    try:
        descriptor = lock_directory(os.path.dirname(os.path.realpath(socket)))
    except FileNotFoundError:
        yield
        return
    try:
        yield
    finally:
        os.close(descriptor)


def lock_directory(directory: str) -> int:
    """Lock a directory; returns the descriptor that holds it until it is closed.

    Raises LockHeld at once when it is taken, OSError when it cannot be opened. On a file system
    without locks no other process is kept out.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise LockHeld(directory, holder) from None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            os.close(descriptor)
            raise
    return descriptor


def _holder(descriptor: int) -> str:
    """Return the pid that holds the open directory, "" where the kernel does not report it."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii") as locks:
            for line in locks:
                words = line.split()
                if "FLOCK" in words and device in words:
                    return words[words.index(device) - 1]
    except (OSError, UnicodeDecodeError):
        pass
    return ""
