"""`PacedHost`: a `Host` for a thread that gives way to others while it reads and writes many files.

A pass over a node reads thousands of small files, each in microseconds. Before each read the
thread may step aside (`service.scheduling.StepAside`). It does so only after a write, never between
the checks that a write depends on (such as that kubelet requests no other value) and the write.
"""

from __future__ import annotations

from collections.abc import Callable

from linux.host import Host


class PacedHost:
    """Another host's files. step_aside: called for each access that a pass repeats."""

    def __init__(self, host: Host, step_aside: Callable[[], None]) -> None:
        self._host = host
        self._step_aside = step_aside
        self.mkdir = host.mkdir
        self.rmdir = host.rmdir
        self.gone = host.gone
        self.filesystem_magic = host.filesystem_magic
        self.readlink = host.readlink
        self.device_number = host.device_number
        self.core_sched_create = host.core_sched_create
        self.core_sched_copy = host.core_sched_copy

    def read(self, path: str) -> bytes:
        self._step_aside()
        return self._host.read(path)

    def write(self, path: str, data: bytes) -> None:
        self._host.write(path, data)
        self._step_aside()

    def listdir(self, path: str) -> list[str]:
        self._step_aside()
        return self._host.listdir(path)

    def directories(self, path: str) -> list[str]:
        self._step_aside()
        return self._host.directories(path)

    def is_dir(self, path: str) -> bool:
        self._step_aside()
        return self._host.is_dir(path)

    def inode(self, path: str) -> int:
        self._step_aside()
        return self._host.inode(path)

    def core_sched_cookie(self, pid: int) -> int:
        self._step_aside()
        return self._host.core_sched_cookie(pid)
