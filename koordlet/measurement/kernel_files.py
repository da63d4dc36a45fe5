"""Kernel files that are read each second: opened once, and read at offset 0 from then on.

A file of a cgroup that is gone answers ENODEV, so a later cgroup of the same name is never mistaken
for it: the reader closes the file, opens it again and forgets what it knew of the counters.
`LocalFiles` is this machine. `HostFiles` has the same behaviour over a `Host`, for kernels without
descriptors.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Protocol

from linux.host import Host

GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""The errors of a file whose cgroup is gone, or not made yet."""
PAGE: Final = 4096
"""Bytes of one read. Every cgroup file that is read here fits into half of it; a caller says more
for a larger file."""
_MOST_OPEN: Final = 8192
"""Chosen: files that stay open. 110 pods with 220 containers have some 2,000 with every collector;
a kept file costs the kernel about 250 bytes."""
_SHARE: Final = 3
"""A third of the limit of open files at most: sockets, logs and `LocalHost` need the others."""


class KernelFile(Protocol):
    """An open file."""

    def read(self) -> bytes:
        """Return the content now. Raises OSError, with an errno of `GONE` if the cgroup is gone."""
        ...

    def close(self) -> None:
        """Release the descriptor. May be called twice."""
        ...


class KernelFiles(Protocol):
    """Opens files by the node's own paths."""

    def open(self, path: str, size: int = PAGE) -> KernelFile:
        """Open a file, of which `size` bytes are read each time. Raises OSError."""
        ...

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory. Raises OSError."""
        ...


def close_all(files: Iterable[KernelFile | None]) -> None:
    """Close the files; None stands for one that is not open."""
    for file in files:
        if file is not None:
            file.close()


class _Kept:
    """A file whose descriptor stays open."""

    __slots__ = ("_descriptor", "_files", "_size")

    def __init__(self, files: LocalFiles, descriptor: int, size: int) -> None:
        self._files = files
        self._descriptor = descriptor
        self._size = size

    def read(self) -> bytes:
        return os.pread(self._descriptor, self._size, 0)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._files.kept -= 1

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


class _Fleeting:
    """A file that is opened for each read: the descriptors that may be kept are used up.

    The inode of the first opening is remembered, so that a successor of the same name is noticed.
    """

    __slots__ = ("_inode", "_path", "_size")

    def __init__(self, path: str, size: int, inode: int) -> None:
        self._path = path
        self._size = size
        self._inode = inode

    def read(self) -> bytes:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_ino != self._inode:
                raise OSError(errno.ENODEV, "another file has taken the place", self._path)
            return os.pread(descriptor, self._size, 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        pass


class LocalFiles:
    """This machine's files. Belongs to one thread.

    here: maps a path of the node to the path in this process, as `LocalHost.here` does.
    most: the largest number of descriptors that stay open; None: a third of the process's limit.
    """

    def __init__(self, here: Callable[[str], str] = str, *, most: int | None = None) -> None:
        self._here = here
        if most is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            unlimited = soft == resource.RLIM_INFINITY
            most = _MOST_OPEN if unlimited else min(_MOST_OPEN, soft // _SHARE)
        self._most = most
        self.kept = 0

    def open(self, path: str, size: int = PAGE) -> KernelFile:
        here = self._here(path)
        descriptor = os.open(here, os.O_RDONLY | os.O_CLOEXEC)
        if self.kept < self._most:
            self.kept += 1
            return _Kept(self, descriptor, size)
        try:
            return _Fleeting(here, size, os.fstat(descriptor).st_ino)
        finally:
            os.close(descriptor)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(self._here(path))


class _HostFile:
    __slots__ = ("_directory", "_host", "_inode", "_path")

    def __init__(self, host: Host, path: str) -> None:
        host.read(path)  # raises what open(2) would
        self._host = host
        self._path = path
        self._directory = path.rpartition("/")[0]
        self._inode = host.inode(self._directory)

    def read(self) -> bytes:
        if self._host.inode(self._directory) != self._inode:
            raise OSError(errno.ENODEV, "the directory was replaced", self._path)
        return self._host.read(self._path)

    def close(self) -> None:
        pass


class HostFiles:
    """The files of a `Host`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def open(self, path: str, size: int = PAGE) -> KernelFile:
        return _HostFile(self._host, path)

    def listdir(self, path: str) -> list[str]:
        return self._host.listdir(path)
