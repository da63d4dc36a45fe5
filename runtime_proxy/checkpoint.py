"""The store on disk: a journal that survives a torn write.

What the runtime cannot tell after a restart must come from here: what hooks changed in a sandbox,
whether a stop was already announced, and, on runtimes whose status is not verbose, resources and
cgroup parents. Environments are left out: they may hold secrets, and the runtime has them.

One file of records, each `length, CRC-32, body` with the body as MessagePack. A record is appended
in one write; the first one that is short or does not match its sum ends the reading, and opening
cuts the file there. Rewriting goes through a temporary file and a rename. A crash of the machine
may lose the last records; then every sandbox in them is gone as well.
"""

import logging
import os
import struct
import zlib
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from runtime_proxy.model import Container, Pod

log = logging.getLogger(__name__)

_MAGIC = b"koordproxy-journal-1\n"
_RECORD = struct.Struct("<II")
_MAX_RECORD_BYTES = 4 * 1024 * 1024
_NAME = "journal"
# Rewrite when the file is this large and mostly history.
_REWRITE_BYTES = 1024 * 1024


class _PodRecord(Pod, frozen=True, tag="pod", tag_field="kind"):
    pass


class _ContainerRecord(Container, frozen=True, tag="container", tag_field="kind"):
    pass


class _Forget(msgspec.Struct, frozen=True, tag="forget", tag_field="kind"):
    id: str


_Entry = TypeVar("_Entry", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_PodRecord | _ContainerRecord | _Forget)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the journal held: entries by id, and how many octets at its end were unreadable."""

    pods: dict[str, Pod] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    torn_bytes: int = 0

    def __contains__(self, identifier: str) -> bool:
        return identifier in self.pods or identifier in self.containers

    @property
    def identifiers(self) -> set[str]:
        return {*self.pods, *self.containers}


def read_records(content: bytes) -> tuple[Recorded, int]:
    """The entries in a journal's content, and how many octets of it are sound."""
    pods: dict[str, Pod] = {}
    containers: dict[str, Container] = {}
    if not content.startswith(_MAGIC):
        return Recorded(torn_bytes=len(content)), 0
    at = len(_MAGIC)
    while len(content) - at >= _RECORD.size:
        length, crc = _RECORD.unpack_from(content, at)
        end = at + _RECORD.size + length
        if length > _MAX_RECORD_BYTES or end > len(content):
            break
        body = content[at + _RECORD.size : end]
        if zlib.crc32(body) != crc:
            break
        at = end
        try:
            record = _decoder.decode(body)
        except msgspec.DecodeError:
            # Whole, but not for us: another release wrote it. What follows it counts.
            continue
        if isinstance(record, _Forget):
            pods.pop(record.id, None)
            containers.pop(record.id, None)
        elif isinstance(record, _PodRecord):
            pods[record.id] = _plain(record, Pod)
        else:
            containers[record.id] = _plain(record, Container)
    return Recorded(pods, containers, len(content) - at), at


def _plain(record: msgspec.Struct, kind: type[_Entry]) -> _Entry:
    return kind(**{name: getattr(record, name) for name in kind.__struct_fields__})


def _record(value: msgspec.Struct) -> bytes:
    body = _encoder.encode(value)
    return _RECORD.pack(len(body), zlib.crc32(body)) + body


def _pod_record(pod: Pod) -> bytes:
    return _record(_PodRecord(**{n: getattr(pod, n) for n in Pod.__struct_fields__}))


def _container_record(container: Container) -> bytes:
    fields = {n: getattr(container, n) for n in Container.__struct_fields__}
    return _record(_ContainerRecord(**{**fields, "envs": {}}))


class Checkpoint:
    """The open journal. Writing never raises: a full disk costs recovery, not a pod."""

    def __init__(self, folder: str) -> None:
        """Open or make the journal in `folder` (mode 0700). Raises OSError."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(folder, _NAME)
        self._failed = False
        self._successor = False
        self.errors = 0
        self._live: dict[str, bytes] = {}
        # Appending, because during a handover two processes write: whole records, one at a time.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        content = _read_all(self._file)
        self.recorded, sound = read_records(content)
        for pod in self.recorded.pods.values():
            self._live[pod.id] = _pod_record(pod)
        for container in self.recorded.containers.values():
            self._live[container.id] = _container_record(container)
        if self.recorded.torn_bytes:
            log.warning(
                "the journal's end is not readable and is cut off",
                extra={"octets": self.recorded.torn_bytes},
            )
        self._size = sound
        if sound == 0:
            self._rewrite()
        elif self.recorded.torn_bytes:
            # Only then: a predecessor may have written more meanwhile.
            os.ftruncate(self._file, sound)

    def pod(self, pod: Pod) -> None:
        self._append(pod.id, _pod_record(pod))

    def container(self, container: Container) -> None:
        self._append(container.id, _container_record(container))

    def forget(self, identifier: str) -> None:
        if self._live.pop(identifier, None) is not None:
            self._write(_record(_Forget(identifier)))

    def reread(self) -> Recorded:
        """What the file holds now: a predecessor's last calls may end after we have read it."""
        try:
            with open(self._path, "rb") as file:
                return read_records(file.read())[0]
        except OSError:
            return Recorded()

    def stand_back(self) -> None:
        """The file is a successor's from here on: what our last calls add goes to its end."""
        self._successor = True

    def close(self) -> None:
        os.close(self._file)

    def _append(self, identifier: str, record: bytes) -> None:
        if len(record) > _MAX_RECORD_BYTES:
            # It would end the reading of all that follow it.
            self.forget(identifier)
        elif self._live.get(identifier) != record:
            self._live[identifier] = record
            self._write(record)

    def _write(self, record: bytes) -> None:
        if self._successor:
            self._add(record)
            return
        if self._failed or self._size > _REWRITE_BYTES:
            live = sum(map(len, self._live.values()))
            if self._failed or self._size > 2 * live + _REWRITE_BYTES:
                self._rewrite()
                return
        try:
            written = os.write(self._file, record)
            if written != len(record):
                raise OSError(0, f"only {written} of {len(record)} octets were written")
            self._size += written
        except OSError as error:
            self._fail(error)

    def _add(self, record: bytes) -> None:
        """To the file that is there by now: the successor may have put a new one in its place."""
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(file, record)
            finally:
                os.close(file)
        except OSError as error:
            self._fail(error)

    def _rewrite(self) -> None:
        """A new file with the live entries in the old one's place."""
        temporary = self._path + ".new"
        content = _MAGIC + b"".join(self._live.values())
        try:
            file = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            try:
                _write_all(file, content)
                os.fsync(file)
                os.rename(temporary, self._path)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            self._fail(error)
            return
        os.close(self._file)
        self._file = file
        self._size = len(content)
        if self._failed:
            self._failed = False
            log.info("the journal is written again")

    def _fail(self, error: OSError) -> None:
        """Say it once; every later write tries to write the whole journal anew."""
        self.errors += 1
        if not self._failed:
            self._failed = True
            log.error(
                "the journal cannot be written: a restart now recovers from the runtime alone",
                extra={"file": self._path, "reason": error.strerror or str(error)},
            )


def _read_all(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write_all(file: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
