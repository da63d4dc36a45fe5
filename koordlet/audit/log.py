"""Writes the audit log: one JSON object a line, in files of a bounded size and number.

Names and fields are upstream's (docs/facts/koordlet.md, "Audit log"): `audit.log` is written,
`audit-<time>-<number>.log` are older ones. `add` only queues, so any thread may call it, the event
loop too; `flush` does the I/O. When a disk takes nothing, the newest lines wait in memory up to a
bound, and what is lost is counted.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

_LOG = logging.getLogger("koordlet.audit")

CURRENT: Final = "audit.log"
_OLDER: Final = "audit-"
_OLDER_NAME: Final = re.compile(r"audit-\d{4}(-\d{2}){5}-\d+\.log")
_FILE_BYTES: Final = 2 << 20
"""Upstream's size of one file."""
_MOST_WAITING: Final = 8192
"""Lines that wait for the disk. Chosen: minutes of a busy node, at most some MiB."""
_LONGEST_MESSAGE: Final = 2000
"""Characters of a message that are kept. Chosen: longer ones hold a copy of bad input."""


class Kind(StrEnum):
    """What an entry is about."""

    NODE = "node"
    POD = "pod"
    GROUP = "group"
    UNKNOWN = "unknown"


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """One line. createdAt: RFC 3339 with the zone."""

    created_at: str
    type: Kind = Kind.UNKNOWN
    namespace: str = ""
    name: str = ""
    container: str = ""
    reason: str = ""
    message: str = ""


class AuditLog:
    """The log in one directory.

    verbosity: entries of a higher one are left out; 0 or less keeps all, as upstream.
    most_bytes: of all files together; at least one file is kept.
    """

    def __init__(
        self,
        directory: str,
        *,
        verbosity: int,
        most_bytes: int,
        file_bytes: int = _FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self._verbosity = verbosity
        self._file_bytes = file_bytes
        self._most_files = max(most_bytes // file_bytes, 1)
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._flushing = threading.Lock()
        self.lost = 0
        """Lines that were dropped because the disk took none for too long."""
        self.problem = ""
        """Why the last flush failed; "" when it did not."""

    def add(
        self,
        verbosity: int,
        kind: Kind,
        reason: str,
        message: str,
        *,
        namespace: str = "",
        name: str = "",
        container: str = "",
        at: float | None = None,
    ) -> None:
        """Queue an entry. Any thread; never blocks. at: seconds since the epoch; None: now."""
        if 0 < self._verbosity < verbosity:
            return
        entry = Entry(
            created_at=_rfc3339(self._clock() if at is None else at),
            type=kind,
            namespace=namespace,
            name=name,
            container=container,
            reason=reason,
            message=message[:_LONGEST_MESSAGE],
        )
        self._waiting.append(msgspec.json.encode(entry) + b"\n")
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1

    def flush(self) -> None:
        """Write what is queued. Blocks on the disk; never raises OSError: see `problem`."""
        with self._flushing:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if not lines:
                return
            try:
                self._write(lines)
            except OSError as error:
                self._waiting.extendleft(reversed(lines))
                problem = f"{error.filename or self.directory}: {error.strerror or error}"
                if problem != self.problem:
                    _LOG.error("the audit log cannot be written: %s; it is tried again", problem)
                self.problem = problem
            else:
                self.problem = ""

    def _write(self, lines: list[bytes]) -> None:
        os.makedirs(self.directory, mode=0o750, exist_ok=True)
        path = f"{self.directory}/{CURRENT}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        while lines:
            descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                while lines and size < self._file_bytes:
                    size += _append(descriptor, lines[0], size)
                    del lines[0]
            finally:
                os.close(descriptor)
            if size >= self._file_bytes:
                self._rotate(path)

    def _rotate(self, path: str) -> None:
        # Several rotations in one second have numbers; with three digits they sort as text.
        stamp = time.strftime("%Y-%m-%d-%H-%M-%S", time.localtime(self._clock()))
        same = [name for name in files(self.directory) if name.startswith(f"{_OLDER}{stamp}-")]
        number = int(same[0].removesuffix(".log").rpartition("-")[2]) + 1 if same else 0
        os.rename(path, f"{self.directory}/{_OLDER}{stamp}-{number:03d}.log")
        older_files = [name for name in files(self.directory) if name != CURRENT]
        for name in older_files[self._most_files - 1 :]:
            os.unlink(f"{self.directory}/{name}")


def files(directory: str) -> list[str]:
    """Return the names of the log's files, the newest first. Raises OSError."""
    names = os.listdir(directory)
    older = [name for name in names if _OLDER_NAME.fullmatch(name)]
    current = [CURRENT] if CURRENT in names else []
    return current + sorted(older, reverse=True)


def _append(descriptor: int, line: bytes, size: int) -> int:
    """Append one line; return its length. A line that was cut off is taken back."""
    written = os.write(descriptor, line)
    if written < len(line):
        os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return written


def _rfc3339(seconds: float) -> str:
    whole = time.localtime(seconds)
    zone = time.strftime("%z", whole)
    micros = int(seconds % 1 * 1e6)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', whole)}.{micros:06d}{zone[:3]}:{zone[3:]}"
