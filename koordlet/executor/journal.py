"""The journal of original values: what a file held before koordlet's first write, for restoring.

It is a log in the run directory (`service.append_log`). An original is in the log before the write
that replaces it. The log is not synced to the disk: a crash of this process loses nothing, and a
crash of the machine ends the cgroups as well, which the boot id in the header shows. A record
belongs to one cgroup, identified by its inode: a later cgroup of the same name is another one.

Each record keeps the values that koordlet wrote lately (`ours`). An observed value that is none of
these came from another writer, and becomes the original.

Delivered values have two stages. A `Delivery` is a value in a reply, until the container's group
exists and the value has been looked for there. `RuntimeValues` are the delivered values of one file
that the runtime or systemd may write again for as long as the group lives.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

import msgspec

from koordlet.executor.records import (
    KEPT_OURS,
    Delivery,
    Record,
    RecordKey,
    RuntimeValues,
    Superseded,
    plain,
)
from linux.resources import Resource, Value
from service.append_log import AppendLog, Content, read

_LOG = logging.getLogger("koordlet.executor.journal")

FILE_NAME: Final = "journal"
"""The name of the file in the run directory."""
_FORMAT: Final = b"koordlet journal 2, boot "
"""The beginning of the first line: the number of the format. The boot id follows."""
_MAX_DELIVERIES: Final = 20_000
"""Containers whose deliveries are kept. Chosen: far more than a node runs, and few enough that
creations that failed without a further event cannot fill the memory. Twice the value doubles the
memory that such creations can take."""


class _Line(msgspec.Struct, omit_defaults=True):
    """A line of the file: exactly one of the fields."""

    record: Record | None = None
    forget: tuple[str, Resource, str] | None = None
    delivery: Delivery | None = None
    adopted: str | None = None  # the container whose deliveries are forgotten
    runtime_values: RuntimeValues | None = None
    superseded: tuple[str, Resource] | None = None  # the place


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Line)
_NO_FIELD: Final = _Line()


class JournalError(Exception):
    """The journal cannot be written; then no kernel file may be written either."""


class Journal:
    """The originals. Owned by the reconciler's thread, except `note_delivered` and `supersede`.

    Any thread may look up one record or one file's runtime values.

    path: the file; None keeps everything in memory (plans, tests). boot: this boot's id.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        boot: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records: dict[RecordKey, Record] = {}
        self._deliveries: dict[str, dict[Resource, Delivery]] = {}
        self._runtime_values: dict[tuple[str, Resource], RuntimeValues] = {}
        self._requested_again: dict[str, set[Resource]] = {}
        """By container: what kubelet requested in an update whose delivery is not noted yet."""
        self._fresh: deque[Delivery | Superseded] = deque(maxlen=_MAX_DELIVERIES)
        self.lost = ""
        """Which part of the file could not be read, and where the file is kept. "" for none."""
        self._unread = False
        self._gathers = False
        self._gathered: list[_Line] = []
        """Lines that the next update appends."""
        self._log: AppendLog | None = None
        if path is not None:
            self._log = AppendLog(
                path,
                header=_header(boot),
                live=self._live,
                consequence="no kernel file is written until originals can be recorded",
                monotonic=monotonic,
            )
            self._open(self._log)

    @classmethod
    def read(cls, path: str, *, boot: str) -> Journal:
        """Return what the file holds as a journal in memory. Raises OSError.

        The file stays as it is. A file that is missing holds nothing.
        """
        journal = cls()
        existed = os.path.lexists(path)
        lines, journal.lost = _lines_of(read(path, header=_header(boot)), existed=existed)
        journal._apply(lines)
        return journal

    def _open(self, log: AppendLog) -> None:
        """Read the file, and write it again to see whether that works.

        A file with a part that cannot be read is kept aside: it may hold the only originals.
        """
        existed = os.path.lexists(log.path)
        self._unread = True
        try:
            lines, lost = _lines_of(log.open(), existed=existed)
            kept = log.keep_aside() if lost else ""
        except OSError:
            # Its originals may become readable later. Until then nothing replaces the file.
            return
        self._unread = False
        if lost:
            self.lost = f"{lost}; the file is kept as {kept}" if kept else lost
            _LOG.warning(
                "%s: %s; originals that only it held are not restored", log.path, self.lost
            )
        self._apply(lines)
        log.rewrite()

    @property
    def problem(self) -> str:
        """Why the file cannot be read or written; "" while it can."""
        return self._log.problem if self._log is not None else ""

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until the file may be tried again after a failure; None while it has none.

        Until then every update changes the state in memory alone, and raises JournalError at once.
        """
        return self._log.retry_in_s if self._log is not None else None

    def close(self) -> None:
        """Close the file. What a failure kept back is tried a last time, also within the pause."""
        if self._log is None:
            return
        if self._gathered and not self._unread:
            self._log.append(_ENCODER.encode(line) for line in self._gathered)
        if self.problem and not self._unread:
            self._log.rewrite()
        self._log.close()

    def copy_in_memory(self) -> Journal:
        """Return a journal with the same records and without a file, for planning."""
        copied = Journal(None)
        copied._records = dict(self._records)
        copied._deliveries = {one: dict(all_of) for one, all_of in self._deliveries.items()}
        copied._runtime_values = dict(self._runtime_values)
        return copied

    # -- reading ---------------------------------------------------------------------------------

    def get(self, place: str, resource: Resource, key: str = "") -> Record | None:
        return self._records.get((place, resource, key))

    def records(self) -> list[Record]:
        return list(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def deliveries(self, container_id: str) -> Mapping[Resource, Delivery]:
        """Return a container's deliveries that have not been looked for in its group yet."""
        return self._deliveries.get(container_id, {})

    def containers_with_deliveries(self) -> list[str]:
        return list(self._deliveries)

    def runtime_values(self, place: str, resource: Resource) -> RuntimeValues | None:
        """Return the values that the runtime of the group at `place` may write at any time."""
        return self._runtime_values.get((place, resource))

    def all_runtime_values(self) -> list[RuntimeValues]:
        return list(self._runtime_values.values())

    # -- writing ---------------------------------------------------------------------------------

    def note_delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        delivered: Value,
        *,
        policy: str = "",
    ) -> None:
        """Note a value that a reply delivered. Any thread; does no I/O.

        The next pass appends it to the file.
        """
        self._fresh.append(
            Delivery(
                container_id,
                resource,
                plain(requested),
                cast("int | str", plain(delivered)),
                policy,
            )
        )

    def supersede(self, container_id: str, resources: Collection[Resource]) -> None:
        """Note that kubelet requested other values. Any thread; does no I/O."""
        self._fresh.append(Superseded(container_id, frozenset(resources)))

    def update(
        self,
        records: Iterable[Record] = (),
        forget: Iterable[RecordKey] = (),
        *,
        runtime_values: Iterable[RuntimeValues] = (),
        superseded: Iterable[tuple[str, Resource]] = (),
    ) -> None:
        """Set and forget all of this with one append; JournalError if that fails."""
        lines = self._take_fresh()
        for one in runtime_values:
            if self._runtime_values.get((one.place, one.resource)) != one:
                self._runtime_values[one.place, one.resource] = one
                lines.append(_Line(runtime_values=one))
        for at in superseded:
            if self._runtime_values.pop(at, None) is not None:
                lines.append(_Line(superseded=at))
        for record in records:
            if self._records.get(record.record_key) != record:
                self._records[record.record_key] = record
                lines.append(_Line(record=record))
        for key in forget:
            if self._records.pop(key, None) is not None:
                lines.append(_Line(forget=key))
        self._append(lines)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Keep the lines of the block in memory; they precede those of the next update.

        For changes that no kernel write follows before that update: one append takes them all. A
        crash of this process in between loses what it would have lost a moment earlier.
        """
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False

    def forget_deliveries(self, container_id: str) -> None:
        """Forget a container's deliveries: they have become records, or the container is gone."""
        self._requested_again.pop(container_id, None)
        if self._deliveries.pop(container_id, None) is not None:
            self._append([_Line(adopted=container_id)])

    def _take_fresh(self) -> list[_Line]:
        lines: list[_Line] = []
        while self._fresh:
            fresh = self._fresh.popleft()
            if isinstance(fresh, Superseded):
                lines += [_Line(superseded=at) for at in self._superseded_by(fresh)]
                self._requested_again.setdefault(fresh.container_id, set()).update(fresh.resources)
                continue
            known = self._deliveries.setdefault(fresh.container_id, {})
            before = known.get(fresh.resource)
            named = self._requested_again.get(fresh.container_id, set())
            repeated = (
                before is not None and before.requested_now and fresh.requested == before.requested
            )
            fresh = msgspec.structs.replace(
                fresh, requested_now=fresh.resource in named or repeated
            )
            named.discard(fresh.resource)
            if (
                before is not None
                and not fresh.requested_now
                and fresh.requested == before.delivered
            ):
                # A later event may report our delivered value as the one in the specification.
                fresh = msgspec.structs.replace(fresh, requested=before.requested)
            if before is not None:
                kept = [one for one in before.earlier if one != before.delivered]
                earlier = tuple([*kept, before.delivered][-KEPT_OURS:])
                fresh = msgspec.structs.replace(fresh, earlier=earlier)
            known[fresh.resource] = fresh
            lines.append(_Line(delivery=fresh))
        # Containers whose creation failed never get a group: drop the oldest above the bound.
        by_container: tuple[dict[str, Any], ...] = (self._deliveries, self._requested_again)
        for of in by_container:
            while len(of) > _MAX_DELIVERIES:
                of.pop(next(iter(of)))
        return lines

    def _superseded_by(self, news: Superseded) -> list[tuple[str, Resource]]:
        gone = [
            at
            for at, one in self._runtime_values.items()
            if one.container_id == news.container_id and one.resource in news.resources
        ]
        for at in gone:
            del self._runtime_values[at]
        return gone

    # -- the file --------------------------------------------------------------------------------

    def _append(self, lines: list[_Line]) -> None:
        if self._log is None:
            return
        if self._gathers:
            self._gathered += lines
            return
        lines, self._gathered = [*self._gathered, *lines], []
        if self._unread and not self._log.retry_in_s:
            self._open(self._log)
        if self._unread or not self._log.append(_ENCODER.encode(line) for line in lines):
            raise JournalError(self._log.problem)

    def _live(self) -> Iterator[bytes]:
        lines = [_Line(record=record) for record in self._records.values()]
        lines += [_Line(delivery=one) for of in self._deliveries.values() for one in of.values()]
        lines += [_Line(runtime_values=one) for one in self._runtime_values.values()]
        return map(_ENCODER.encode, lines)

    def _apply(self, lines: Iterable[_Line]) -> None:
        for line in lines:
            self._take(line)

    def _take(self, line: _Line) -> None:
        """Apply one line of the file."""
        if line.record is not None:
            self._records[line.record.record_key] = line.record
        elif line.forget is not None:
            self._records.pop(line.forget, None)
        elif line.delivery is not None:
            delivery = line.delivery
            self._deliveries.setdefault(delivery.container_id, {})[delivery.resource] = delivery
        elif line.adopted is not None:
            self._deliveries.pop(line.adopted, None)
        elif line.runtime_values is not None:
            self._runtime_values[line.runtime_values.place, line.runtime_values.resource] = (
                line.runtime_values
            )
        elif line.superseded is not None:
            self._runtime_values.pop(line.superseded, None)


def _header(boot: str) -> bytes:
    return _FORMAT + boot.encode()


def _lines_of(content: Content, *, existed: bool) -> tuple[list[_Line], str]:
    """Return the lines of a file, and which part of it cannot be read; "" for none.

    existed: whether there is a file.
    """
    if existed and not (content.header or b"").startswith(_FORMAT):
        return [], "its first line is not that of a journal of this version"
    lines: list[_Line] = []
    lost = content.damaged
    for raw in content.lines:
        try:
            line = _DECODER.decode(raw)
        except (msgspec.DecodeError, ValueError, RecursionError):
            line = _NO_FIELD
        if line == _NO_FIELD:
            lost += 1
        else:
            lines.append(line)
    return lines, f"{lost} lines cannot be read" if lost else ""
