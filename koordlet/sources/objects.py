"""The objects directory: Kubernetes manifests in place of an API server on a bare node.

It may hold NodeSLO, NodeResourceTopology, Node and Device of this node, and Pods. A file may have
several documents, or a List. An error affects as little as possible: a bad file leaves its last
good objects in force, and `koordlet.sources.documents` handles bad documents and fields. Every
problem names file, object, field and value. `Directory.scan` reads; `service.directory_watch`
decides when.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from apis.core import Pod
from apis.device import Device
from apis.errors import InputError, InputErrors
from apis.nodeslo import NodeSLOSpec
from apis.topology import NodeCPUFacts
from hooks.facts import NodeMeta
from koordlet.sources.documents import (
    Good,
    Identity,
    check_size,
    decode,
    each_of,
    identity_of,
    load_documents,
    name_of,
)

MAX_FILES: Final = 4096
MAX_FILE_BYTES: Final = 8 << 20
"""Bounds of the directory. Chosen: a file for each of several thousand pods, and a file with all
objects of a node (an object has at most 1.5 MiB). Twice the values allow twice the memory and time
of a scan."""
_SUFFIXES: Final = (".yaml", ".yml", ".json")


class Problem(msgspec.Struct, frozen=True):
    """An error in the directory. message: the error, and what is in force instead."""

    file: str
    obj: str
    message: str


class NodeObjects(msgspec.Struct, frozen=True):
    """The objects of a source. None: there is no such object."""

    slo: NodeSLOSpec | None = None
    topology: NodeCPUFacts | None = None
    node: NodeMeta | None = None
    device: Device | None = None
    pods: tuple[Pod, ...] = ()
    problems: tuple[Problem, ...] = ()


class _Stamp(msgspec.Struct, frozen=True):
    """The attributes of stat(2) that show that a file changed."""

    inode: int
    size: int
    modified_ns: int


class _File(msgspec.Struct, frozen=True):
    """The objects in force of one file."""

    stamp: _Stamp | None
    objects: Mapping[Identity, Good]
    problems: tuple[Problem, ...]


class Directory:
    """The directory and the last good object of everything in it."""

    def __init__(self, path: str, node_name: str) -> None:
        self._path = path
        self._node_name = node_name
        self._files: dict[str, _File] = {}
        self._objects: NodeObjects | None = None
        self._unlisted: NodeObjects | None = None

    @property
    def path(self) -> str:
        return self._path

    def scan(self) -> NodeObjects:
        """Read changed files; returns the same value as before when no file changed."""
        try:
            names = sorted(
                name
                for name in os.listdir(self._path)
                if name.endswith(_SUFFIXES) and not name.startswith(".")
            )
        except FileNotFoundError:
            if self._files:
                # Most likely a mistake: a share is not mounted, or a tool replaces the directory.
                return self._without_list("is gone; an empty one would withdraw its objects")
            names = []
        except OSError as error:
            return self._without_list(f"cannot be listed: {error.strerror}")
        self._unlisted = None
        files = {name: self._read(name) for name in names[:MAX_FILES]}
        changed = self._objects is None or any(
            files.get(name) is not self._files.get(name) for name in {*files, *self._files}
        )
        self._files = files
        if changed or self._objects is None:
            self._objects = self._merge(len(names))
        return self._objects

    def _without_list(self, problem: str) -> NodeObjects:
        """Return the objects that were read last, with the reason why there are no newer ones."""
        kept = self._objects or NodeObjects()
        added = Problem(self._path, "", f"{problem}; what was read last stays in force")
        if self._unlisted is None or added not in self._unlisted.problems:
            self._unlisted = msgspec.structs.replace(kept, problems=(*kept.problems, added))
        return self._unlisted

    def _read(self, name: str) -> _File:
        before = self._files.get(name)
        path = f"{self._path}/{name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    return _broken(before, path, None, "not a regular file")
                stamp = _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)
                if before is not None and before.stamp == stamp:
                    return before
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            return _broken(before, path, None, f"cannot be read: {error.strerror}")
        if not data and before is not None and before.objects:
            # Most likely it is being written.
            return _broken(before, path, stamp, "is empty; deleting it would withdraw its objects")
        if len(data) > MAX_FILE_BYTES:
            return _broken(before, path, stamp, f"larger than {MAX_FILE_BYTES >> 20} MiB")
        return self._parse(before, path, stamp, data)

    def take(self, files: Mapping[str, bytes]) -> NodeObjects:
        """Use these files, name -> content, in place of the directory's."""
        stamp = _Stamp(0, 0, 0)
        self._files = {
            name: self._parse(None, name, stamp, data) for name, data in sorted(files.items())
        }
        self._objects = self._merge(len(files))
        return self._objects

    def _parse(self, before: _File | None, path: str, stamp: _Stamp, data: bytes) -> _File:
        try:
            return _documents(before, path, stamp, load_documents(data), self._node_name)
        except InputError as error:
            return _broken(before, path, stamp, error.problem)
        except Exception as error:  # noqa: BLE001 - a defect must cost the file, not the daemon
            return _broken(before, path, stamp, f"{type(error).__name__}: {error}")

    def _merge(self, count: int) -> NodeObjects:
        made = _merge(self._files, f"{self._path}/" if self._path else "")
        if count <= MAX_FILES:
            return made
        problem = Problem(self._path, "", f"{count} files; only the first {MAX_FILES} are read")
        return msgspec.structs.replace(made, problems=(problem, *made.problems))


class Received:
    """The last good version of each object that an API server sends, by name."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._files: dict[str, _File] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    @property
    def trees(self) -> dict[str, Any]:
        """The objects in force, as trees: if the newest version is bad, its replacement."""
        return {
            name: good.tree for name, file in self._files.items() for good in file.objects.values()
        }

    def put(self, name: str, tree: Any) -> None:
        """Take an object's newest version; a bad version leaves the last good one in force."""
        before, stamp = self._files.get(name), _Stamp(0, 0, 0)
        try:
            check_size(tree)
            taken = _documents(before, name, stamp, [tree], self._node_name)
        except InputError as error:
            taken = _broken(before, name, stamp, error.problem)
        except Exception as error:  # noqa: BLE001 - a defect must cost the object, not the source
            taken = _broken(before, name, stamp, f"{type(error).__name__}: {error}")
        self._files[name] = taken

    def drop(self, name: str) -> None:
        """Forget an object that was deleted."""
        self._files.pop(name, None)

    def objects(self) -> NodeObjects:
        return _merge(self._files, "")


def over(upper: NodeObjects, lower: NodeObjects) -> NodeObjects:
    """Overlay the objects of one source on those of another, kind by kind; pods are joined."""
    return NodeObjects(
        slo=lower.slo if upper.slo is None else upper.slo,
        topology=lower.topology if upper.topology is None else upper.topology,
        node=lower.node if upper.node is None else upper.node,
        device=lower.device if upper.device is None else upper.device,
        pods=(*upper.pods, *lower.pods),
        problems=(*upper.problems, *lower.problems),
    )


def _broken(before: _File | None, path: str, stamp: _Stamp | None, problem: str) -> _File:
    kept = before.objects if before else {}
    consequence = "its last good objects stay in force" if kept else "it is not used"
    made = _File(stamp, kept, (Problem(path, "", f"{problem}; {consequence}"),))
    # The same error again is not a change.
    return before if before is not None and before == made else made


def _documents(
    before: _File | None,
    path: str,
    stamp: _Stamp,
    trees: Iterable[Any],
    node_name: str,
) -> _File:
    last_good = before.objects if before else {}
    objects: dict[Identity, Good] = {}
    problems: list[Problem] = []
    for index, tree in enumerate(trees):
        try:
            identity = identity_of(tree, node_name, f"document {index + 1}")
        except InputError as error:
            problems.append(Problem(path, error.obj, str(error)))
            continue
        if identity is None:
            continue
        obj = name_of(identity)
        if identity in objects:
            problems.append(Problem(path, obj, "occurs twice in the file; the first is used"))
            continue
        kept = last_good.get(identity)
        try:
            good, errors = decode(identity, tree, kept)
        except (InputError, InputErrors) as error:
            consequence = "its last good version stays in force" if kept else "not used"
            problems += [Problem(path, obj, f"{each}; {consequence}") for each in each_of(error)]
            if kept is not None:
                objects[identity] = kept
            continue
        objects[identity] = good
        problems += [Problem(path, obj, message) for message in errors]
    return _File(stamp, objects, tuple(problems))


def _merge(files: Mapping[str, _File], prefix: str) -> NodeObjects:
    found: dict[Identity, tuple[str, Good]] = {}
    problems: list[Problem] = []
    for name, file in files.items():
        problems += file.problems
        for identity, good in file.objects.items():
            first = found.setdefault(identity, (name, good))
            if first[0] != name:
                problems.append(
                    Problem(
                        f"{prefix}{name}",
                        name_of(identity),
                        f"is in {first[0]} too; that one is used",
                    )
                )
    by_kind: dict[str, list[Any]] = {}
    for (kind, _, _), (_, good) in found.items():
        by_kind.setdefault(kind, []).append(good.value)
    return NodeObjects(
        slo=_first(by_kind, "NodeSLO"),
        topology=_first(by_kind, "NodeResourceTopology"),
        node=_first(by_kind, "Node"),
        device=_first(by_kind, "Device"),
        pods=tuple(by_kind.get("Pod", ())),
        problems=tuple(problems),
    )


def _first(by_kind: Mapping[str, list[Any]], kind: str) -> Any:
    values = by_kind.get(kind)
    return values[0] if values else None
