"""A small log file of lines: the state of a daemon that must survive a restart.

The file begins with a header line, which names the format (and whatever else makes a file of an
earlier time worthless, such as the boot id). Every further line is one change of the state. A line
is a CRC-32 in eight hexadecimal digits, a space, the body, and a newline; bodies are JSON by
convention and hold no newline themselves. `cut -c10- FILE | jq` shows a log to a person.

What this module takes care of:

- A line is appended with one write, so it is in the file once `append` has returned, also after a
  SIGKILL. The log is not synced to the disk: a crash of the machine may lose the last lines.
- A last line that was cut off is left out and reported. A line whose sum does not match its body is
  left out and counted; the lines after it hold.
- When the disk is full, a partly written line is cut off again. The owner goes on with its state in
  memory, and after a pause the whole state is written to a new file. The pause doubles with each
  failure, up to some seconds.
- When most of the file is history, the state is written to a new file that replaces the old one by
  a rename. The check for this costs a pass over the state only each time the file has grown by a
  share of its size, so that an append costs the same in a large log as in a small one.
- A file that its owner cannot read may be kept aside before it is replaced, for another version of
  the program or for a person.
- Only a regular file of a bounded size is read or replaced: a FIFO, a device, a symbolic link or a
  huge file at the path is an error, and stays as it is.

A second process may append to the same file while it takes over from the first one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_LOG = logging.getLogger(__name__)

MAX_BYTES: Final = 64 << 20
"""Default limit of a file. Chosen: 10,000 containers need about 10 MiB, and reading takes a copy
of the file in memory."""
REWRITE_BYTES: Final = 1 << 20
"""Default size below which a log is never rewritten. Chosen: 1 MiB of history costs a restart some
milliseconds; at half of it rewrites come twice as often."""
FIRST_RETRY_S: Final = 0.1
"""The pause after a write that failed; each further failure doubles it. Chosen: a moment's lack of
room costs little, and a tenth of a second is long compared with the milliseconds that writing the
whole state takes."""
LONGEST_RETRY_S: Final = 5.0
"""The longest pause. Chosen: short for a person who has made room on a disk, and rare enough that a
disk that stays full costs nothing that can be measured. Twice the value delays by that much what
depends on the file."""

KEPT_ASIDE: Final = 4
"""The number of files that are kept aside. Chosen: a change of versions makes one, and each may
take `MAX_BYTES` of a memory file system. Twice the value could fill a small one."""

_SUM_BYTES: Final = 9  # eight digits and a space
_LINE_OVERHEAD: Final = _SUM_BYTES + 1
_MODE: Final = 0o600
# Without O_NONBLOCK, opening a FIFO would wait for its other end.
_SAFELY: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Content:
    """What a log file held.

    header: the body of the first line; None where the file is missing, empty or damaged there.
    lines: the bodies of the sound lines, oldest first; none where the header is another one than
        was expected.
    damaged: the number of lines that were left out because their sum did not match.
    torn_bytes: the length of a last line that was cut off.
    """

    header: bytes | None = None
    lines: tuple[bytes, ...] = ()
    damaged: int = 0
    torn_bytes: int = 0


def encode_line(body: bytes) -> bytes:
    """Return the line of a body. Raises ValueError for a body with a newline in it."""
    if b"\n" in body:
        raise ValueError("the body of a log line must not contain a newline")
    return b"%08x %b\n" % (zlib.crc32(body), body)


def parse(lines: Iterable[bytes], *, header: bytes) -> Content:
    """Return what a file holds. lines: with their newlines, which the last one may lack.

    header: the expected body of the first line.
    """
    found: bytes | None = None
    bodies: list[bytes] = []
    damaged = torn_bytes = 0
    first = True
    for line in lines:
        if line == b"\n":
            continue
        body = _body(line.removesuffix(b"\n"))
        if body is None and not line.endswith(b"\n"):
            torn_bytes = len(line)
        elif first:
            found = body
        elif body is None:
            damaged += 1
        elif found == header:
            # Also a last line that lacks nothing but its newline: the next append ends it.
            bodies.append(body)
        first = False
    if found != header:
        return Content(found, torn_bytes=torn_bytes)
    return Content(found, tuple(bodies), damaged, torn_bytes)


def _body(line: bytes) -> bytes | None:
    """Return the body of a line without its newline; None if the line is damaged."""
    body = line[_SUM_BYTES:]
    return body if line[:_SUM_BYTES] == b"%08x " % zlib.crc32(body) else None


def read(path: str, *, header: bytes, max_bytes: int = MAX_BYTES) -> Content:
    """Return what the log at `path` holds; nothing where there is no file. Raises OSError."""
    try:
        descriptor = open_checked(path, os.O_RDONLY, max_bytes)
    except FileNotFoundError:
        return Content()
    try:
        return parse(_lines(descriptor, max_bytes), header=header)
    finally:
        os.close(descriptor)


def files_aside(path: str) -> list[str]:
    """Return the files that `keep_aside` of the log at `path` made, oldest first. Raises OSError.

    They are `PATH.unread-1`, `-2`, ...: a number is not used again while a later one is there.
    """
    folder, name = os.path.split(path)
    prefix = f"{name}.unread-"
    numbers = sorted(
        int(found.removeprefix(prefix))
        for found in os.listdir(folder or ".")
        if re.fullmatch(f"{re.escape(prefix)}[1-9][0-9]{{0,8}}", found)
    )
    return [f"{path}.unread-{number}" for number in numbers]


class AppendLog:
    """One log file and its writer. Not thread-safe; all I/O is synchronous.

    A failure to write never raises. `problem` says what is wrong, and the log of the process gets
    one line when writing begins to fail and one when it works again.
    """

    def __init__(
        self,
        path: str,
        *,
        header: bytes,
        live: Callable[[], Iterable[bytes]],
        consequence: str,
        max_bytes: int = MAX_BYTES,
        rewrite_bytes: int = REWRITE_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """live: returns the bodies that describe the owner's whole state as it is now.
        consequence: what it means that the file cannot be written, for the log of the process.
        max_bytes: of the file; the state may take half of it. rewrite_bytes: a smaller file is not
        rewritten."""
        self.path = path
        self.failures = 0
        """Writes that failed so far."""
        self.problem = ""
        """Why the file lacks a part of the state; empty while it holds all of it."""
        self._header = header
        self._live = live
        self._consequence = consequence
        self._max_bytes = max_bytes
        self._rewrite_bytes = rewrite_bytes
        self._monotonic = monotonic
        self._file = -1
        self._not_before = 0.0
        self._pause_s = FIRST_RETRY_S
        self._check_above = rewrite_bytes
        self._starts_line = True
        self._rewrites = True

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until `append` tries again after a failure; None while `problem` is empty."""
        return max(self._not_before - self._monotonic(), 0.0) if self.problem else None

    def open(self) -> Content:
        """Return what the file holds, and append to it from now on.

        The file is written with the first `append` or `rewrite`: where it is missing, or is not a
        file of this header, by a rewrite. Raises OSError, and is then a `problem` like others: an
        owner that goes on replaces the file after the pause, if it can be replaced.
        """
        self.close()
        try:
            return self._open()
        except OSError as error:
            self._failed(error, "read")
            raise

    def _open(self) -> Content:
        try:
            descriptor = open_checked(self.path, os.O_RDWR | os.O_APPEND, self._max_bytes)
        except FileNotFoundError:
            return Content()
        try:
            content = parse(_lines(descriptor, self._max_bytes), header=self._header)
            if content.header == self._header:
                os.fchmod(descriptor, _MODE)
                self._file, descriptor = descriptor, -1
                # The last line may be torn, or another process may be about to end it.
                self._starts_line = False
            return content
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def keep_aside(self) -> str:
        """Give the file at the path a second name, and return it; the next rewrite leaves it.

        The name is the next of `files_aside`, the mode 0600. The `KEPT_ASIDE` newest files stay.
        Returns "" for an empty file, which is not kept. Raises OSError, and is then a `problem`
        like others.
        """
        try:
            return _keep_aside(self.path)
        except OSError as error:
            self._failed(error, "kept aside")
            raise

    def append(self, bodies: Iterable[bytes]) -> bool:
        """Append changes that the state has taken already; return whether the file has them.

        Where the file lacks earlier changes, it is rewritten instead, once the pause is over.
        """
        lines = [encode_line(body) for body in bodies]
        if self.retry_in_s:
            return False
        try:
            size = self._ready()
            if size is None:
                return self.rewrite()
            if not lines:
                return True
            self._append(b"".join(lines), size)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def rewrite(self) -> bool:
        """Replace the file by one that holds the state as it is now; return whether it did."""
        try:
            self._replace()
        except OSError as error:
            self._failed(error)
            return False
        if self.problem:
            self._recovered()
            _LOG.info("%s is written again", self.path)
        return True

    def stop_rewriting(self) -> None:
        """Append only from now on: the file belongs to a successor, whose state is newer."""
        self._rewrites = False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _ready(self) -> int | None:
        """Return the size of the open file; None if it is not the one at the path, or incomplete.

        A file at the path that another process has begun is opened.
        """
        if self.problem and self._rewrites:
            return None
        if self._file >= 0:
            status = os.fstat(self._file)
            if status.st_nlink:
                return status.st_size
            # Removed, or replaced by another process that uses the log.
            self.close()
        return self._reopen()

    def _reopen(self) -> int | None:
        try:
            descriptor = open_checked(self.path, os.O_RDWR | os.O_APPEND, self._max_bytes)
        except FileNotFoundError:
            return None
        first = encode_line(self._header)
        if os.pread(descriptor, len(first), 0) != first:
            os.close(descriptor)
            return None
        self._file = descriptor
        self._starts_line = False
        return os.fstat(descriptor).st_size

    def _append(self, data: bytes, size: int) -> None:
        """Append lines to the open file, which has `size` bytes. Raises OSError."""
        if self._outdated(size + len(data)):
            try:
                self._replace()
            except OSError as error:
                # Writing the lines alone needs less room than a second file.
                _LOG.debug("%s is not rewritten yet: %s", self.path, error.strerror)
                self._check_above = size + self._rewrite_bytes
            else:
                return
        if size + len(data) > self._max_bytes:
            raise OSError(errno.EFBIG, f"it would be larger than {self._max_bytes} bytes")
        if not self._starts_line:
            data = b"\n" + data
        written = os.write(self._file, data)
        if written != len(data):
            self._cut_back(size, written)
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes were written")
        self._starts_line = True
        self._recovered()

    def _cut_back(self, size: int, written: int) -> None:
        """Remove what a short write left, unless another process has appended meanwhile."""
        self._starts_line = False
        with suppress(OSError):
            if os.fstat(self._file).st_size == size + written:
                os.ftruncate(self._file, size)

    def _outdated(self, size: int) -> bool:
        """Return whether a file of this size is mostly history."""
        if size <= self._check_above or not self._rewrites:
            return False
        live = sum(len(body) + _LINE_OVERHEAD for body in self._live())
        self._check_above = min(2 * live + self._rewrite_bytes, self._max_bytes)
        return size > self._check_above

    def _replace(self) -> None:
        """Write the state to a new file and rename it to the path. Raises OSError."""
        if not self._rewrites:
            raise OSError(errno.ESTALE, "the file is gone, and belongs to another process")
        with suppress(FileNotFoundError):
            _refuse_unusable(os.lstat(self.path), self.path, self._max_bytes)
        bodies = [self._header, *self._live()]
        data = b"".join(map(encode_line, bodies))
        if 2 * len(data) > self._max_bytes:
            raise OSError(
                errno.EFBIG,
                f"the state takes {len(data)} bytes, more than half of {self._max_bytes}",
            )
        scratch = f"{self.path}.new"
        descriptor = _open_scratch(scratch)
        try:
            _write_all(descriptor, data)
            os.rename(scratch, self.path)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(scratch)
            raise
        self.close()
        self._file = descriptor
        self._starts_line = True
        self._check_above = min(2 * len(data) + self._rewrite_bytes, self._max_bytes)

    def _failed(self, error: OSError, what: str = "written") -> None:
        problem = f"{self.path} cannot be {what}: {error.strerror or error}"
        self.failures += 1
        if not self.problem:
            _LOG.error("%s; %s", problem, self._consequence)
        self.problem = problem
        self._not_before = self._monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)

    def _recovered(self) -> None:
        self.problem = ""
        self._pause_s = FIRST_RETRY_S


def _keep_aside(path: str) -> str:
    present = os.lstat(path)
    if not present.st_size:
        return ""
    kept = files_aside(path)
    # A process that was killed before its rewrite has left both names.
    if not (kept and os.path.samestat(os.lstat(kept[-1]), present)):
        number = int(kept[-1].rpartition("-")[2]) + 1 if kept else 1
        kept.append(f"{path}.unread-{number}")
        os.link(path, kept[-1], follow_symlinks=False)
    os.chmod(kept[-1], _MODE)
    for oldest in kept[:-KEPT_ASIDE]:
        _LOG.warning("%s is removed: the newest %d such files are kept", oldest, KEPT_ASIDE)
        with suppress(OSError):
            os.unlink(oldest)
    return kept[-1]


def open_checked(path: str, flags: int, max_bytes: int) -> int:
    """Open a regular file of at most `max_bytes` without waiting for anything. Raises OSError."""
    _refuse_unusable(os.lstat(path), path, max_bytes)
    descriptor = os.open(path, flags | _SAFELY)
    try:
        _refuse_unusable(os.fstat(descriptor), path, max_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_scratch(path: str) -> int:
    """Open an empty new file that no other process writes. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFELY, _MODE)
    try:
        _refuse_unusable(os.fstat(descriptor), path, None)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has just rewritten the file")
        os.fchmod(descriptor, _MODE)
        os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_unusable(status: os.stat_result, path: str, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file: move it away", path)
    if max_bytes is not None and status.st_size > max_bytes:
        raise OSError(
            errno.EFBIG,
            f"it has {status.st_size} bytes, more than the {max_bytes} of a log: move it away",
            path,
        )


def _lines(descriptor: int, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file. Raises OSError where it has grown beyond `max_bytes` meanwhile."""
    size = 0
    with open(descriptor, "rb", closefd=False) as file:
        while line := file.readline(max_bytes + 1 - size):
            size += len(line)
            if size > max_bytes:
                raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes: move it away")
            yield line


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if not written:
            raise OSError(errno.ENOSPC, f"{len(view)} of {len(data)} bytes could not be written")
        view = view[written:]
