"""The journal: what the store holds, on disk, for the next process.

After a restart the runtime says which objects exist. The journal adds what the runtime does not
say: what hooks changed in a sandbox, whether an end was reported to hooks already, and, from
runtimes whose status is not verbose, resources and cgroup parents. Environments are left out: they
may hold secrets, and the runtime has them.

The file is a `service.append_log`; a line is a whole pod or container, or names an object that is
gone. The last line of an object counts.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from runtime_proxy.model import Container, Pod
from service.append_log import AppendLog, Content, read

log = logging.getLogger(__name__)

_NAME: Final = "journal"
_HEADER: Final = b'{"log":"koord-runtime-proxy","format":2}'
_MAX_BYTES: Final = 32 * 1024 * 1024
"""Of the file, so that reading it fits into the unit's MemoryHigh of 192 MiB. The state may take
half: 16 MiB are about 10,000 containers with 1.5 KiB of annotations each."""
_MAX_OBJECT_BYTES: Final = 4 * 1024 * 1024
"""Of one object, so that a single one cannot use up the journal. Kubernetes allows 256 KiB of
annotations."""


class _PodLine(Pod, frozen=True, tag="pod", tag_field="kind"):
    pass


class _ContainerLine(Container, frozen=True, tag="container", tag_field="kind"):
    pass


class _ForgetLine(msgspec.Struct, frozen=True, tag="forget", tag_field="kind"):
    id: str


_Object = TypeVar("_Object", bound=msgspec.Struct)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_PodLine | _ContainerLine | _ForgetLine).decode


@dataclass(frozen=True, slots=True)
class Recorded:
    """The objects in the journal by their runtime ids."""

    pods: dict[str, Pod] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self.pods or identifier in self.containers

    @property
    def identifiers(self) -> set[str]:
        return {*self.pods, *self.containers}


def replay(lines: Iterable[bytes]) -> Recorded:
    """Return the objects that are left at the end of the lines."""
    pods: dict[str, Pod] = {}
    containers: dict[str, Container] = {}
    for body in lines:
        try:
            line = _decode(body)
        except msgspec.DecodeError:
            # Another release wrote it. The lines after it count.
            continue
        if isinstance(line, _ForgetLine):
            pods.pop(line.id, None)
            containers.pop(line.id, None)
        elif isinstance(line, _PodLine):
            pods[line.id] = _converted(line, Pod)
        else:
            containers[line.id] = _converted(line, Container)
    return Recorded(pods, containers)


def _converted(value: msgspec.Struct, kind: type[_Object]) -> _Object:
    """Return the same fields as a value of another type."""
    return kind(**{name: getattr(value, name) for name in kind.__struct_fields__})


def _pod_line(pod: Pod) -> bytes:
    return _encode(_converted(pod, _PodLine))


def _container_line(container: Container) -> bytes:
    return _encode(_converted(msgspec.structs.replace(container, envs={}), _ContainerLine))


def _lines_of(recorded: Recorded) -> dict[str, bytes]:
    return {
        **{pod.id: _pod_line(pod) for pod in recorded.pods.values()},
        **{one.id: _container_line(one) for one in recorded.containers.values()},
    }


class Checkpoint:
    """The open journal. Writing never raises: a full disk costs recovery, not a pod."""

    def __init__(self, folder: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Open or make the journal in `folder` (mode 0700). Raises OSError without the folder."""
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._lines: dict[str, bytes] = {}
        self._forgotten = ""
        self._log = AppendLog(
            os.path.join(folder, _NAME),
            header=_HEADER,
            live=self._live,
            consequence="a restart recovers from the runtime alone",
            max_bytes=_MAX_BYTES,
            monotonic=monotonic,
        )
        try:
            content = self._log.open()
        except OSError:
            # The log has reported it, and tries again later.
            content = Content(header=_HEADER)
        self.recorded = replay(content.lines)
        self._lines |= _lines_of(self.recorded)
        if content.damaged or content.torn_bytes:
            log.warning(
                "a part of the journal cannot be read and is left out",
                extra={"damaged_lines": content.damaged, "torn_octets": content.torn_bytes},
            )
        if content.header != _HEADER:
            self._log.rewrite()

    @property
    def errors(self) -> int:
        """Writes that failed so far."""
        return self._log.failures

    @property
    def problem(self) -> str:
        """Why the file lacks a part of the state; empty while it holds all of it."""
        return self._log.problem

    def pod(self, pod: Pod) -> None:
        self._put(pod.id, _pod_line(pod))

    def container(self, container: Container) -> None:
        self._put(container.id, _container_line(container))

    def forget(self, identifier: str) -> None:
        if self._lines.pop(identifier, None) is not None:
            self._forgotten = identifier
            self._log.append([_encode(_ForgetLine(identifier))])

    def reread(self) -> Recorded:
        """Return what the file holds now: a predecessor adds to it until its last call has ended.

        What cannot be read counts as not there.
        """
        try:
            content = read(self._log.path, header=_HEADER, max_bytes=_MAX_BYTES)
        except OSError:
            return Recorded()
        return replay(content.lines)

    def stand_back(self) -> None:
        """Leave the file to a successor: the last calls of this process only add to it."""
        self._log.stop_rewriting()

    def catch_up(self) -> None:
        """Write what a failure kept back, if it can be written by now."""
        self._log.append(())

    def close(self) -> None:
        self._log.close()

    def _live(self) -> Iterable[bytes]:
        """Return the lines of a rewritten file: also objects that a predecessor has added.

        A file that lacks changes of ours is no source: it has objects that were removed since.
        """
        added = {} if self._log.problem else _lines_of(self.reread())
        added.pop(self._forgotten, None)  # its own line may not be in the file yet
        return {**added, **self._lines}.values()

    def _put(self, identifier: str, line: bytes) -> None:
        if len(line) > _MAX_OBJECT_BYTES:
            self.forget(identifier)
        elif self._lines.get(identifier) != line:
            self._lines[identifier] = line
            self._log.append([line])
