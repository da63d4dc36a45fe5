"""Lines that survive a SIGKILL before their log has them, kept without a system call.

A program must sometimes make a change durable before it answers a peer, and has no time to write.
It copies the change into a file that is mapped into its memory, answers, and appends the change to
its log (`service.append_log`) a moment later. The kernel keeps the pages of the file when the
process is killed. A crash of the machine may lose them; use this for a state that such a crash
ends as well.

The file has a fixed size and begins with lines in the format of the log, its header line among
them. Everything behind the last line is zero. A line is copied behind the last one; `clear` puts a
zero in the place of the first one, and then zeroes the others. So a copy that was cut off shows as
text without a newline before the first zero, or as nothing at all, and no earlier line can show
behind a later one. `read` returns the whole lines.

The file is made with all its bytes, and not sparse: a store into a mapped page that the file system
has no room for would end the process (SIGBUS). Therefore it belongs on a file system that writes in
place, such as the tmpfs of a run directory, and must not be truncated while it is in use: only root
can do that, and the process then ends at its next line. A `pwrite` would survive it. But each
system call lets another thread take the interpreter, which may keep it for 5 ms (Python's switch
interval) while the peer waits.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Final

from service import append_log
from service.files import replacing

SIZE: Final = 64 << 10
"""Bytes of the file. Chosen: three hundred lines of 200 bytes, and a runtime makes at most some
fifty calls in the milliseconds until the log is written. Twice the value changes nothing."""


def read(path: str, *, header: bytes) -> append_log.Content:
    """Return the lines of an earlier process; none where there is no file. Raises OSError.

    header: the body of the first line; the lines behind another one are left out.
    """
    try:
        with open(path, "rb", opener=_open_regular) as file:
            text = file.read(SIZE).partition(b"\0")[0]
    except FileNotFoundError:
        return append_log.Content()
    return append_log.parse(text.splitlines(keepends=True), header=header)


def _open_regular(path: str, flags: int) -> int:
    return append_log.open_checked(path, flags, SIZE)


class StagedLines:
    """The mapped file and its only writer. Not thread-safe. No method raises OSError.

    problem: why lines cannot be staged; empty while they can, and before `make`.
    """

    def __init__(self, path: str, *, header: bytes) -> None:
        self._path = path
        self._first = append_log.encode_line(header)
        self._file = -1
        self._map: mmap.mmap | None = None
        self._end = 0
        self.problem = ""

    def put(self, line: bytes) -> bool:
        """Keep a line, which ends with a newline; return whether the file has room for it."""
        mapped, end = self._map, self._end
        after = end + len(line)
        # The last byte stays zero, so that a whole file ends like any other.
        if mapped is None or after >= SIZE:
            return False
        mapped[end:after] = line
        self._end = after
        return True

    def clear(self) -> None:
        """Drop all lines: the log has them. Make the file where it is missing or was removed."""
        if self._map is None or not self._in_place():
            self._make()
            return
        first = len(self._first)
        if self._end > first:
            # One store: a process that is killed here leaves no line, or all of them.
            self._map[first] = 0
            self._map[first : self._end] = bytes(self._end - first)
            self._end = first

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _in_place(self) -> bool:
        status = os.fstat(self._file)
        return status.st_nlink > 0 and status.st_size == SIZE

    def _make(self) -> None:
        """Replace the file at the path by one without lines, and map it."""
        self.close()
        try:
            with replacing(self._path) as file:
                file.write(self._first.ljust(SIZE, b"\0"))
            self._file = append_log.open_checked(self._path, os.O_RDWR, SIZE)
            # Mapped with its pages: the first line would otherwise wait for a page fault.
            self._map = mmap.mmap(self._file, SIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            self.close()
            self.problem = f"{self._path} cannot be made: {error.strerror or error}"
            with suppress(OSError):
                os.unlink(self._path)
            return
        self._end = len(self._first)
        self.problem = ""
