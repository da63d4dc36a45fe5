"""Reads the audit log backwards, page by page, for readers that come back with a token.

A reader is a place in the log: a file, known by its inode, and the number of its bytes that are not
read yet. So a rotation between two pages repeats nothing and skips nothing. Readers are bounded in
number and in idle time, as upstream bounds them; an expired token is refused.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from koordlet.audit.log import Entry, files

_IDLE_S: Final = 600.0
"""Upstream's: a reader that does not come back for so long has expired."""
_CHUNK_BYTES: Final = 64 << 10
"""Read at a time. Chosen: some hundred entries; twice the value reads more than a page needs."""


class Expired(Exception):
    """The token is unknown, or its reader has expired."""


class Page(NamedTuple):
    """entries: the newest first. token: for the next page; "" at the end of the log."""

    entries: list[Entry]
    token: str


class _Place(NamedTuple):
    """inode: of the file; 0 before the first read. unread: bytes from its beginning."""

    inode: int
    unread: int


class Pages:
    """The readers of one log. For one thread at a time."""

    def __init__(
        self, directory: str, *, most_readers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._most_readers = most_readers
        self._clock = clock
        self._places: dict[str, tuple[_Place, float]] = {}

    def page(self, size: int, token: str = "") -> Page:
        """Return up to `size` entries older than the token's place; without a token the newest.

        A line that is not an entry is left out. Raises Expired, and OSError.
        """
        self._expire()
        if token:
            if token not in self._places:
                raise Expired(token)
            place = self._places.pop(token)[0]
        else:
            token = str(uuid.uuid4())
            place = _Place(0, 0)
        entries: list[Entry] = []
        end = False
        while len(entries) < size and not end:
            lines, place, end = self._older(place, size - len(entries))
            entries += filter(None, map(_entry, lines))
        if end:
            return Page(entries, "")
        self._places[token] = place, self._clock()
        while len(self._places) > self._most_readers:
            self._places.pop(next(iter(self._places)))
        return Page(entries, token)

    def _expire(self) -> None:
        now = self._clock()
        for token in [t for t, (_, used) in self._places.items() if now - used > _IDLE_S]:
            del self._places[token]

    def _older(self, place: _Place, count: int) -> tuple[list[bytes], _Place, bool]:
        """Return up to `count` lines before a place, newest first, the new place, and whether the
        log ends there."""
        found = _files(self._directory)
        if place.inode:
            index = next((i for i, each in enumerate(found) if each[1] == place.inode), None)
            if index is None:
                return [], place, True  # the file is gone, and with it all older ones
        else:
            index = 0
            if not found:
                return [], place, True
            place = _Place(found[0][1], found[0][2])
        lines, unread = _lines_before(f"{self._directory}/{found[index][0]}", place.unread, count)
        if unread > 0:
            return lines, _Place(place.inode, unread), False
        if index + 1 < len(found):
            _, inode, size = found[index + 1]
            return lines, _Place(inode, size), False
        return lines, _Place(place.inode, 0), True


def _files(directory: str) -> list[tuple[str, int, int]]:
    """Return (name, inode, size) of the log's files, the newest first."""
    found = []
    try:
        names = files(directory)
    except FileNotFoundError:
        return []
    for name in names:
        try:
            status = os.stat(f"{directory}/{name}", follow_symlinks=False)
        except FileNotFoundError:  # rotated away in this moment
            continue
        found.append((name, status.st_ino, status.st_size))
    return found


def _lines_before(path: str, unread: int, count: int) -> tuple[list[bytes], int]:
    """Return up to `count` lines before byte `unread`, the newest first, and the number of bytes
    before them. May return fewer lines than there are, but at least one if there is one."""
    with open(path, "rb") as file:
        length = _CHUNK_BYTES
        while True:
            start = max(unread - length, 0)
            file.seek(start)
            chunk = file.read(unread - start)
            lines: list[bytes] = []
            end = len(chunk)
            while end > 0 and len(lines) < count:
                begin = chunk.rfind(b"\n", 0, end - 1) + 1
                if begin == 0 and start > 0:
                    break  # the line begins before the chunk
                if line := chunk[begin:end].rstrip(b"\n"):
                    lines.append(line)
                end = begin
            if lines or start == 0:
                return lines, start + end
            length *= 2


def _entry(line: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(line, type=Entry)
    except msgspec.DecodeError:
        return None
