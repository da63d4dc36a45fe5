"""inotify(7): who else writes into directories that we read or manage.

A write through the cgroup file system raises IN_MODIFY as on any file; what the kernel changes by
itself does not. So a watch finds foreign writes quickly, and a look from time to time stays as the
net. Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from typing import Final

IN_MODIFY: Final = 0x2
IN_CREATE: Final = 0x100
IN_IGNORED: Final = 0x8000
IN_Q_OVERFLOW: Final = 0x4000
_IN_ONLYDIR: Final = 0x01000000
_EVENT = struct.Struct("iIII")
_BUFFER: Final = 65536
"""Bytes of one read; chosen: about 2000 events, and what is left is read next."""


@dataclass(frozen=True, slots=True)
class Event:
    """`path` is the file's; "" when the queue overflowed and events were lost."""

    path: str
    mask: int


class Inotify:
    """A set of watched directories. A context manager; not thread-safe.

    limit: the largest number of watches: the kernel's own limit is per user and shared with others.
    """

    def __init__(self, *, limit: int = 8192) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"inotify: {os.strerror(number)}")
        self._limit = limit
        self._path_of: dict[int, str] = {}
        self._watch_of: dict[str, int] = {}

    def __enter__(self) -> Inotify:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return int(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __len__(self) -> int:
        return len(self._watch_of)

    def __contains__(self, path: str) -> bool:
        return path in self._watch_of

    def add(self, path: str, mask: int = IN_MODIFY) -> bool:
        """Watch a directory; False when it is gone or no watch is left: no error here."""
        if path in self._watch_of:
            return True
        if len(self._watch_of) >= self._limit:
            return False
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask | _IN_ONLYDIR)
        if watch < 0:
            number = ctypes.get_errno()
            if number in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR, errno.ENOSPC):
                return False
            raise OSError(number, f"inotify: {os.strerror(number)}", path)
        self._path_of[watch] = path
        self._watch_of[path] = watch
        return True

    def remove(self, path: str) -> None:
        """Stop watching; a directory that is gone is fine."""
        watch = self._watch_of.pop(path, None)
        if watch is not None:
            self._path_of.pop(watch, None)
            self._libc.inotify_rm_watch(self._fd, watch)

    def watched(self) -> list[str]:
        return list(self._watch_of)

    def events(self) -> list[Event]:
        """Return what happened since the last call, without waiting."""
        found: list[Event] = []
        while True:
            try:
                buffer = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                return found
            offset = 0
            while offset < len(buffer):
                watch, mask, _, length = _EVENT.unpack_from(buffer, offset)
                start = offset + _EVENT.size
                name = buffer[start : start + length].rstrip(b"\0").decode("utf-8", "replace")
                offset = start + length
                if mask & IN_Q_OVERFLOW:
                    found.append(Event("", mask))
                    continue
                directory = self._path_of.get(watch)
                if mask & IN_IGNORED:
                    # The kernel removed the watch: the directory is gone.
                    if directory is not None:
                        self._path_of.pop(watch)
                        if self._watch_of.get(directory) == watch:
                            self._watch_of.pop(directory)
                elif directory is not None:
                    found.append(Event(f"{directory}/{name}" if name else directory, mask))
