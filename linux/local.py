"""`LocalHost`: this machine, or the node outside our container, as a `Host`.

Two things are not obvious. Paths are the node's own; `roots` says where its trees are mounted here
(upstream's DaemonSet has them at /host-cgroup, /host-sys, …). And cgroup files that are read
repeatedly stay open: a read is then one system call instead of three. An open file of a removed
group answers ENODEV, so a later group of the same name is never mistaken for it.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType

from linux import core_sched

_CHUNK = 65536
"""Bytes of one read call; larger files take several. Few files here have more than a page."""
_KEPT_READ = 4096
"""Bytes read from a file that stays open. A cgroup file of one value fits; longer ones (a large
`cgroup.procs`) are read by name, at the usual price."""
_SWEEP_S = 60.0
"""Chosen: files that no read needed for this long are closed. Passes come every 10 s by default."""
_MOST_KEPT = 4096
"""Chosen: 200 pods have some 1,300 files. A third of the soft limit at most, which is 1024 on many
systems and which sockets, logs and watches share."""


class _OpenFiles:
    """One thread's open files. Closed with it."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, list[int]]] = {}
        """Directory -> name -> [descriptor, used since the last sweep]."""
        self.count = 0
        self.swept = 0.0

    def __del__(self) -> None:
        for directory in list(self.of):
            self.close_all(directory)

    def add(self, directory: str, name: str, descriptor: int) -> None:
        self.of.setdefault(directory, {})[name] = [descriptor, 1]
        self.count += 1

    def close(self, directory: str, name: str) -> None:
        files = self.of[directory]
        os.close(files.pop(name)[0])
        self.count -= 1
        if not files:
            del self.of[directory]

    def close_all(self, directory: str) -> None:
        for name in list(self.of.get(directory, ())):
            self.close(directory, name)

    def sweep(self) -> None:
        """Close what was not used since the last sweep."""
        for directory, files in list(self.of.items()):
            for name, kept in list(files.items()):
                if kept[1]:
                    kept[1] = 0
                else:
                    self.close(directory, name)


class _PerThread(threading.local):
    """Per thread: a descriptor that one thread closed may name another file a moment later."""

    def __init__(self) -> None:
        self.open = _OpenFiles()


class LocalHost:
    """The real kernel. Thread-safe.

    roots: the node's path -> where it is here; the longest matching one counts.
    keep_open: the largest number of files under `kept_root` that each thread keeps open; 0: none.
    """

    def __init__(
        self,
        roots: Mapping[str, str] = MappingProxyType({}),
        *,
        kept_root: str = "/sys/fs/cgroup",
        keep_open: int | None = None,
    ) -> None:
        self._roots = sorted(
            (
                (path.rstrip("/"), f"{path.rstrip('/')}/", here.rstrip("/"))
                for path, here in roots.items()
            ),
            key=lambda entry: -len(entry[0]),
        )
        self._kept_prefix = kept_root.rstrip("/") + "/"
        if keep_open is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            unlimited = soft == resource.RLIM_INFINITY
            keep_open = _MOST_KEPT if unlimited else min(_MOST_KEPT, soft // 3)
        self._keep_open = keep_open
        self._mine = _PerThread()

    def here(self, path: str) -> str:
        """Return where the node's `path` is on this machine."""
        for root, prefix, mapped in self._roots:
            if path.startswith(prefix) or path == root:
                return mapped + path[len(root) :]
        return path

    def read(self, path: str) -> bytes:
        directory, _, name = path.rpartition("/")
        files = self._mine.open.of.get(directory)
        kept = None if files is None else files.get(name)
        if kept is not None:
            try:
                content = os.pread(kept[0], _KEPT_READ, 0)
            except OSError:
                # The group is gone. Opening by name finds a new one of that name, if any.
                self._mine.open.close(directory, name)
            else:
                kept[1] = 1
                if len(content) < _KEPT_READ:
                    return content
        return self._read_by_name(path, directory, name)

    def _read_by_name(self, path: str, directory: str, name: str) -> bytes:
        descriptor = os.open(self.here(path), os.O_RDONLY | os.O_CLOEXEC)
        keep = False
        try:
            content = os.read(descriptor, _CHUNK)
            whole = content
            # A cgroup file comes in one piece; the end of a longer one needs another look.
            while content and not (len(whole) < _KEPT_READ and path.startswith(self._kept_prefix)):
                content = os.read(descriptor, _CHUNK)
                whole += content
            keep = path.startswith(self._kept_prefix) and self._may_keep(directory, name)
        finally:
            if not keep:
                os.close(descriptor)
        if keep:
            self._mine.open.add(directory, name, descriptor)
        return whole

    def _may_keep(self, directory: str, name: str) -> bool:
        mine = self._mine.open
        if name in mine.of.get(directory, ()):
            return False
        now = time.monotonic()
        if now - mine.swept > _SWEEP_S:
            mine.swept = now
            mine.sweep()
        return mine.count < self._keep_open

    def gone(self, directory: str) -> None:
        self._mine.open.close_all(directory)

    def write(self, path: str, data: bytes) -> None:
        descriptor = os.open(self.here(path), os.O_WRONLY | os.O_CLOEXEC)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.EIO, "the kernel accepted only a part of the value", path)
        finally:
            os.close(descriptor)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(self.here(path))

    def directories(self, path: str) -> list[str]:
        # The kernel says with each name what it is: no stat(2) is needed.
        with os.scandir(self.here(path)) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(self.here(path))

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        here = self.here(path)
        os.mkdir(here, mode)
        if not here.startswith("/sys/"):
            os.chmod(here, mode)  # mkdir(2) applies the umask

    def rmdir(self, path: str) -> None:
        os.rmdir(self.here(path))

    def filesystem_magic(self, path: str) -> int:
        return _filesystem_magic(self.here(path))

    def inode(self, path: str) -> int:
        return os.stat(self.here(path)).st_ino

    def readlink(self, path: str) -> str:
        return os.readlink(self.here(path))

    def device_number(self, path: str) -> tuple[str, int, int]:
        found = os.stat(self.here(path))
        if stat.S_ISCHR(found.st_mode):
            kind = "c"
        elif stat.S_ISBLK(found.st_mode):
            kind = "b"
        else:
            raise OSError(errno.ENOTBLK, "not a device node", path)
        return kind, os.major(found.st_rdev), os.minor(found.st_rdev)

    def core_sched_cookie(self, pid: int) -> int:
        return core_sched.cookie(pid)

    def core_sched_create(self, pid: int) -> None:
        core_sched.create(pid)

    def core_sched_copy(self, source_pid: int, target_pids: list[int]) -> list[int]:
        return core_sched.copy(source_pid, target_pids)


def _filesystem_magic(path: str) -> int:
    """Return statfs(2)'s f_type, which Python's os.statvfs leaves out."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    # struct statfs is at most 120 bytes on 64-bit Linux; f_type is its first word.
    buffer = (ctypes.c_long * 32)()
    if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(buffer[0]) & 0xFFFFFFFF
