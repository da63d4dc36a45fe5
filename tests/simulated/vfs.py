"""The file systems that are not groups: trees of small files, links and device nodes.

`FileSystem` is what a mount must answer; `Tree` answers it from a dictionary of nodes, each file
being a function to read and one to write.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulated.values import refuse

Parts = tuple[str, ...]

SYSFS_MAGIC = 0x62656572
PROC_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994


class FileSystem(Protocol):
    """A mounted tree. Paths are relative to the mount, as tuples of names."""

    @property
    def magic(self) -> int: ...
    def read(self, parts: Parts) -> bytes: ...
    def write(self, parts: Parts, data: bytes) -> None: ...
    def listdir(self, parts: Parts) -> list[str]: ...
    def is_dir(self, parts: Parts) -> bool: ...
    def mkdir(self, parts: Parts, mode: int) -> None: ...
    def rmdir(self, parts: Parts) -> None: ...
    def inode(self, parts: Parts) -> int: ...
    def readlink(self, parts: Parts) -> str: ...


@dataclass(frozen=True, slots=True)
class File:
    """A file: without `write` it refuses with EACCES (as sysfs and proc do for root's open)."""

    read: Callable[[], str]
    write: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    target: str


@dataclass(frozen=True, slots=True)
class Device:
    kind: str  # "c" or "b"
    major: int
    minor: int


@dataclass
class Folder:
    """A directory; `dynamic` lists and finds entries that come and go."""

    entries: dict[str, Node] = field(default_factory=dict)
    mode: int = 0o755
    dynamic: Callable[[], dict[str, Node]] | None = None
    closed: bool = False  # refuses mkdir, as sysfs and proc do

    def all(self) -> dict[str, Node]:
        return self.entries if self.dynamic is None else {**self.entries, **self.dynamic()}


Node = File | Link | Device | Folder


def text(content: str) -> File:
    """A read-only file with a fixed content."""
    return File(lambda: content)


@dataclass
class Tree:
    """A file system of nodes."""

    magic: int
    root: Folder = field(default_factory=Folder)

    def put(self, path: str, node: Node) -> None:
        """Place a node, making the directories above it."""
        parts = path.strip("/").split("/")
        folder = self.root
        for part in parts[:-1]:
            below = folder.entries.setdefault(part, Folder(closed=self.root.closed))
            assert isinstance(below, Folder), path
            folder = below
        folder.entries[parts[-1]] = node

    def remove(self, path: str) -> None:
        """Take a node away, with all below it."""
        parts = path.strip("/").split("/")
        folder = self.root
        for part in parts[:-1]:
            below = folder.entries[part]
            assert isinstance(below, Folder), path
            folder = below
        del folder.entries[parts[-1]]

    def find(self, parts: Parts, *, hops: int = 0) -> Node:
        """The node at the path, links followed; ENOENT, ENOTDIR, ELOOP."""
        node: Node = self.root
        for at, part in enumerate(parts):
            if not isinstance(node, Folder):
                refuse(errno.ENOTDIR)
            found = node.all().get(part)
            if found is None:
                refuse(errno.ENOENT)
            if isinstance(found, Link) and at < len(parts) - 1:
                if hops > 40:
                    refuse(errno.ELOOP)
                target = _resolve(parts[:at], found.target)
                return self.find((*target, *parts[at + 1 :]), hops=hops + 1)
            node = found
        return node

    def _followed(self, parts: Parts) -> Node:
        node = self.find(parts)
        hops = 0
        while isinstance(node, Link):
            if (hops := hops + 1) > 40:
                refuse(errno.ELOOP)
            parts = _resolve(parts[:-1], node.target)
            node = self.find(parts)
        return node

    def read(self, parts: Parts) -> bytes:
        node = self._followed(parts)
        if isinstance(node, Folder):
            refuse(errno.EISDIR)
        if not isinstance(node, File):
            refuse(errno.ENXIO)
        return node.read().encode("utf-8", "surrogateescape")

    def write(self, parts: Parts, data: bytes) -> None:
        node = self._followed(parts)
        if isinstance(node, Folder):
            refuse(errno.EISDIR)
        if not isinstance(node, File) or node.write is None:
            refuse(errno.EACCES, "read-only")
        if data:
            node.write(data.decode("utf-8", "surrogateescape"))

    def listdir(self, parts: Parts) -> list[str]:
        node = self._followed(parts)
        if not isinstance(node, Folder):
            refuse(errno.ENOTDIR)
        return list(node.all())

    def is_dir(self, parts: Parts) -> bool:
        try:
            return isinstance(self._followed(parts), Folder)
        except OSError:
            return False

    def mkdir(self, parts: Parts, mode: int) -> None:
        if not parts:
            refuse(errno.EEXIST)
        above = self._followed(parts[:-1])
        if not isinstance(above, Folder):
            refuse(errno.ENOTDIR)
        if parts[-1] in above.all():
            refuse(errno.EEXIST)
        if above.closed:
            refuse(errno.EPERM)
        above.entries[parts[-1]] = Folder(mode=mode)

    def rmdir(self, parts: Parts) -> None:
        node = self.find(parts)
        if not isinstance(node, Folder):
            refuse(errno.ENOTDIR)
        if not parts or node.closed:
            refuse(errno.EPERM)
        if node.all():
            refuse(errno.ENOTEMPTY)
        above = self._followed(parts[:-1])
        assert isinstance(above, Folder)
        del above.entries[parts[-1]]

    def inode(self, parts: Parts) -> int:
        return id(self._followed(parts))

    def readlink(self, parts: Parts) -> str:
        node = self.find(parts)
        if not isinstance(node, Link):
            refuse(errno.EINVAL, "not a link")
        return node.target


def _resolve(base: Parts, target: str) -> Parts:
    """A link's target, relative to the directory that holds the link, within the same tree."""
    found: list[str] = [] if target.startswith("/") else list(base)
    for part in target.split("/"):
        if part == "..":
            found = found[:-1]
        elif part not in ("", "."):
            found.append(part)
    return tuple(found)
