"""The journal of original values: what a file held before we first wrote it, to put it back.

One append-only file of JSON lines under the run directory; a line is a whole record, so a torn last
line loses that record's last change and nothing else. It is not synced: a crash of this process
loses nothing that was written, and after a crash of the machine the cgroups are gone as well (the
boot id in the first line tells). A record belongs to one incarnation of a cgroup, by inode: a later
group of the same name is another one.

Each record keeps the values that we wrote of late (`ours`). A value found that is none of them was
written by somebody else, and becomes the original.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

import msgspec

from apis.cpuset import CpuSet
from koordlet.executor.newer_lines import NewerLines
from linux.resources import Resource, Value

_LOG = logging.getLogger("koordlet.executor.journal")

RecordKey = tuple[str, Resource, str]
"""(cgroup or other place, resource, key)."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_KEPT_OURS: Final = 6
_COMPACT_ABOVE: Final = 2000
_WASTE: Final = 4

_Plain = int | str


class Record(msgspec.Struct, frozen=True):
    """The original of one resource in one place.

    place: the cgroup; "" for the node, where `key` names a switch, a directory or a control group.
    inode: of the cgroup's directory; 0 where the place has none.
    original: the field's text before we wrote; None: the thing itself did not exist.
    asked: the original as a canonical value, where the file never showed it: the runtime was handed
        our value at creation in place of this one.
    ours: texts that we wrote and the kernel showed, newest last.
    policy: who wrote last, for people.
    support_of: the resource for whose sake this one was touched.
    """

    place: str
    inode: int
    resource: Resource
    key: str = ""
    original: str | None = None
    asked: int | str | None = None
    ours: tuple[str, ...] = ()
    policy: str = ""
    support_of: str = ""

    @property
    def record_key(self) -> RecordKey:
        return self.place, self.resource, self.key

    def asked_value(self) -> Value | None:
        """Return `asked` as the canonical value: a text stands for a CPU set."""
        return CpuSet.parse(self.asked) if isinstance(self.asked, str) else self.asked

    def with_ours(self, *texts: str) -> Record:
        """Return the record with `texts` as our newest values."""
        kept = [one for one in self.ours if one not in texts]
        return msgspec.structs.replace(self, ours=tuple([*kept, *texts][-_KEPT_OURS:]))


def plain(value: Value | None) -> int | str | None:
    """Return a canonical value as `Record.asked` keeps it."""
    return value if value is None or isinstance(value, int) else str(value)


class Delivery(msgspec.Struct, frozen=True):
    """A value that the runtime was handed when it made a container.

    requested: what kubelet had asked for; None when it had asked for nothing.
    earlier: what it was handed before, and nobody has seen yet.
    anew: kubelet named the resource in this very request; else `requested` may be our own value,
        told back as the one that the runtime has.
    """

    container_id: str
    resource: Resource
    requested: int | str | None
    delivered: int | str
    policy: str = ""
    earlier: tuple[int | str, ...] = ()
    anew: bool = False


class Handed(msgspec.Struct, frozen=True):
    """What a container's runtime was handed in place of what kubelet asked for, as it stood.

    systemd writes it again at every reload, runc at every update, for as long as the group lives:
    also when nobody wants it any more.

    texts: the field's texts in the kernel: whether the runtime took an answer, nobody tells us.
    original, asked: as in `Record`.
    """

    container_id: str
    place: str
    inode: int
    resource: Resource
    texts: tuple[str, ...]
    original: str | None = None
    asked: int | str | None = None
    policy: str = ""

    def as_record(self) -> Record:
        """Return what the journal knows of the place by this alone."""
        return Record(
            place=self.place,
            inode=self.inode,
            resource=self.resource,
            original=self.original,
            asked=self.asked,
            ours=self.texts,
            policy=self.policy,
        )


class Superseded(msgspec.Struct, frozen=True):
    """kubelet has asked for these resources anew: what the runtime was handed before is history."""

    container_id: str
    resources: frozenset[Resource]


class _Line(msgspec.Struct, omit_defaults=True):
    """A line of the file: exactly one of the fields."""

    boot: str | None = None
    record: Record | None = None
    forget: tuple[str, Resource, str] | None = None
    delivery: Delivery | None = None
    delivered: str | None = None  # the container id whose deliveries are done with
    handed: Handed | None = None
    superseded: tuple[str, Resource] | None = None  # the place


class JournalError(Exception):
    """The journal cannot be written; then no kernel file may be written either."""


_MAX_DELIVERIES: Final = 20_000


class Journal:
    """The originals. Owned by the reconciler's thread, except `note_delivered` and `supersede`.

    path: the file; None keeps everything in memory (plans, tests). boot: this boot's id.
    """

    def __init__(self, path: str | None = None, *, boot: str = "") -> None:
        self._path = path
        self._boot = boot
        self._records: dict[RecordKey, Record] = {}
        self._deliveries: dict[str, dict[Resource, Delivery]] = {}
        self._handed: dict[tuple[str, Resource], Handed] = {}
        self._asked_anew: dict[str, set[Resource]] = {}  # containers: until the delivery comes
        self._fresh: deque[Delivery | Superseded] = deque(maxlen=_MAX_DELIVERIES)
        self._encoder = msgspec.json.Encoder()
        self._file = -1
        self._behind = False
        self._lines = 0
        self.damaged_lines = 0
        self.newer = NewerLines(frozenset(_Line.__struct_fields__))
        if path is not None:
            self._load(path)
            self._begin(path)

    def _begin(self, path: str) -> None:
        if self.damaged_lines:
            _LOG.warning(
                "%s: %d lines cannot be read; the originals that only they knew are not given back",
                path,
                self.damaged_lines,
            )
        if self.newer:
            _LOG.warning(
                "%s: %d lines are of a newer koordlet; they are kept for it, but not given back",
                path,
                len(self.newer),
            )
        try:
            self._compact(path)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # Containers are adjusted at creation all the same; kernel files wait for room.
            self._behind = True
            _LOG.error("%s: %s: kernel files are written when there is room", path, error.strerror)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def copy_in_memory(self) -> Journal:
        """Return a journal with the same records that writes nowhere: for planning."""
        copied = Journal(None, boot=self._boot)
        copied._records = dict(self._records)
        copied._deliveries = {one: dict(all_of) for one, all_of in self._deliveries.items()}
        copied._handed = dict(self._handed)
        return copied

    # -- reading ---------------------------------------------------------------------------------

    def get(self, place: str, resource: Resource, key: str = "") -> Record | None:
        return self._records.get((place, resource, key))

    def records(self) -> list[Record]:
        return list(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def deliveries(self, container_id: str) -> Mapping[Resource, Delivery]:
        """Return what the runtime was handed for a container and nobody has seen yet."""
        return self._deliveries.get(container_id, {})

    def containers_with_deliveries(self) -> list[str]:
        return list(self._deliveries)

    def handed(self, place: str, resource: Resource) -> Handed | None:
        """Return what the runtime of the group at `place` may write again at any time."""
        return self._handed.get((place, resource))

    def all_handed(self) -> list[Handed]:
        return list(self._handed.values())

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
        """Remember a value that was handed over at creation. Any thread; does no I/O.

        It reaches the file with the next pass.
        """
        self._fresh.append(
            Delivery(
                container_id, resource, plain(requested), cast("_Plain", plain(delivered)), policy
            )
        )

    def supersede(self, container_id: str, resources: Collection[Resource]) -> None:
        """Note that kubelet asked the runtime for other values. Any thread; does no I/O."""
        self._fresh.append(Superseded(container_id, frozenset(resources)))

    def update(
        self,
        records: Iterable[Record] = (),
        forget: Iterable[RecordKey] = (),
        *,
        handed: Iterable[Handed] = (),
        superseded: Iterable[tuple[str, Resource]] = (),
    ) -> None:
        """Set and forget all of this with one append; JournalError if the file does not take it."""
        lines = self._take_fresh()
        for one in handed:
            if self._handed.get((one.place, one.resource)) != one:
                self._handed[one.place, one.resource] = one
                lines.append(_Line(handed=one))
        for at in superseded:
            if self._handed.pop(at, None) is not None:
                lines.append(_Line(superseded=at))
        for record in records:
            if self._records.get(record.record_key) != record:
                self._records[record.record_key] = record
                lines.append(_Line(record=record))
        for key in forget:
            if self._records.pop(key, None) is not None:
                lines.append(_Line(forget=key))
        self._append(lines)

    def done_with(self, container_id: str) -> None:
        """Forget a container's deliveries: they have become records, or it is gone."""
        self._asked_anew.pop(container_id, None)
        of_newer = self.newer.done_with(container_id)
        if self._deliveries.pop(container_id, None) is not None or of_newer:
            self._append([_Line(delivered=container_id)])

    def _take_fresh(self) -> list[_Line]:
        lines: list[_Line] = []
        while self._fresh:
            fresh = self._fresh.popleft()
            if isinstance(fresh, Superseded):
                lines += [_Line(superseded=at) for at in self._superseded_by(fresh)]
                self._asked_anew.setdefault(fresh.container_id, set()).update(fresh.resources)
                continue
            known = self._deliveries.setdefault(fresh.container_id, {})
            before = known.get(fresh.resource)
            named = self._asked_anew.get(fresh.container_id, set())
            told_again = before is not None and before.anew and fresh.requested == before.requested
            fresh = msgspec.structs.replace(fresh, anew=fresh.resource in named or told_again)
            named.discard(fresh.resource)
            if before is not None and not fresh.anew and fresh.requested == before.delivered:
                # A runtime that is asked again tells our own value as the one in its specification.
                fresh = msgspec.structs.replace(fresh, requested=before.requested)
            if before is not None:
                kept = [one for one in before.earlier if one != before.delivered]
                earlier = tuple([*kept, before.delivered][-_KEPT_OURS:])
                fresh = msgspec.structs.replace(fresh, earlier=earlier)
            known[fresh.resource] = fresh
            lines.append(_Line(delivery=fresh))
        # Containers whose creation failed never show up; the oldest make room.
        by_container: tuple[dict[str, Any], ...] = (self._deliveries, self._asked_anew)
        for of in by_container:
            while len(of) > _MAX_DELIVERIES:
                of.pop(next(iter(of)))
        return lines

    def _superseded_by(self, news: Superseded) -> list[tuple[str, Resource]]:
        gone = [
            at
            for at, one in self._handed.items()
            if one.container_id == news.container_id and one.resource in news.resources
        ]
        for at in gone:
            del self._handed[at]
        return gone

    def _append(self, lines: list[_Line]) -> None:
        if self._path is None:
            return
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            # Somebody removed the file: what is appended now would be gone with this process.
            self._behind = True
        if not (lines or self._behind):
            return
        try:
            live = len(self._records) + len(self._deliveries) + len(self._handed)
            live += len(self.newer) + 1
            if self._behind or (self._lines > _COMPACT_ABOVE and self._lines > _WASTE * live):
                self._compact(self._path)
                return
            data = b"".join(self._encoder.encode(line) + b"\n" for line in lines)
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk took a part of it only")
            self._lines += len(lines)
        except OSError as error:
            # Memory is ahead of the file now, and the file may end in half a line.
            self._behind = True
            raise JournalError(f"{self._path}: {error.strerror}") from error

    # -- the file --------------------------------------------------------------------------------

    def _load(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return
        decoder = msgspec.json.Decoder(_Line)
        this_boot = False
        for raw in data.split(b"\n"):
            if not raw:
                continue
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, ValueError, RecursionError):
                if not (this_boot and self.newer.take(raw)):
                    self.damaged_lines += 1
                continue
            if line.boot is not None:
                this_boot = line.boot == self._boot
            elif not this_boot:
                continue  # no cgroup of another boot exists any more
            elif line.record is not None:
                self._records[line.record.record_key] = line.record
            elif line.forget is not None:
                self._records.pop(line.forget, None)
            elif line.delivery is not None:
                delivery = line.delivery
                of_container = self._deliveries.setdefault(delivery.container_id, {})
                of_container[delivery.resource] = delivery
            elif line.delivered is not None:
                self._deliveries.pop(line.delivered, None)
                self.newer.done_with(line.delivered)
            elif line.handed is not None:
                self._handed[line.handed.place, line.handed.resource] = line.handed
            elif line.superseded is not None:
                self._handed.pop(line.superseded, None)
            else:
                self.newer.take(raw)

    def _compact(self, path: str) -> None:
        """Write the live records to a new file and put it in the old one's place."""
        lines = [_Line(boot=self._boot)]
        lines += [_Line(record=record) for record in self._records.values()]
        lines += [
            _Line(delivery=one) for all_of in self._deliveries.values() for one in all_of.values()
        ]
        lines += [_Line(handed=one) for one in self._handed.values()]
        raw = [self._encoder.encode(line) for line in lines] + self.newer.lines()
        data = b"".join(line + b"\n" for line in raw)
        new = f"{path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(new, flags, 0o600)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk took a part of it only")
            os.replace(new, path)
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                os.unlink(new)
            raise
        self.close()
        self._file = descriptor
        self._behind = False
        self._lines = len(raw)
