"""Unix sockets of our own: open to their owner alone, from their first moment on."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LONGEST_PATH: Final = 107
"""Bytes that the address of a Unix socket has room for (unix(7))."""
BACKLOG: Final = max(socket.SOMAXCONN, 4096)
"""Connections that may wait to be accepted: as many as the kernel allows. It lowers this to
net.core.somaxconn, which is 4096 since Linux 5.4 (socket.SOMAXCONN may be an older libc's 128).
asyncio's servers call listen() with their own default of 100, which would also lower what systemd
set for a socket unit: pass this to them."""


def listen(path: str) -> socket.socket:
    """Listen on `path`, in place of a socket without a server, without blocking.

    Raises OSError, whose text says what to do about it.
    """
    make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with owner_only():
            listener.bind(path)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def make_way(path: str) -> None:
    """Remove a dead socket from `path`. Raises OSError for anything else that is there."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise OSError(
            f"{path} is too long for a socket's address ({LONGEST_PATH} bytes):"
            " choose a shorter directory"
        )
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(f"{path} is there and is not a socket: remove it or choose another")
    if _is_served(path):
        raise OSError(f"{path} is served by another process: stop that one first")
    os.unlink(path)


@contextmanager
def owner_only() -> Iterator[None]:
    """What is made inside is for its owner alone: not even between bind and chmod for others.

    The mask is the process': keep it short, and make no other file meanwhile.
    """
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
