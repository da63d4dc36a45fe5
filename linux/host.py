"""`Host`: the few operations through which everything here touches the kernel.

Paths are the host's own absolute paths ("/sys/fs/cgroup/...", "/proc/..."); an implementation maps
them (in a container the host's trees are mounted elsewhere). `linux.local.LocalHost` is the real
one; tests put a simulated kernel under the same interface. Errors are `OSError` with the kernel's
errno, unchanged.
"""

from __future__ import annotations

from typing import Protocol


class Host(Protocol):
    """A machine's kernel, as files and the few calls that are not files."""

    def read(self, path: str) -> bytes:
        """Return the whole content of the file."""

    def write(self, path: str, data: bytes) -> None:
        """Write `data` with one write call to an existing file (never creates one)."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in the directory, files and directories alike."""

    def directories(self, path: str) -> list[str]:
        """Return the names of the directories in the directory."""

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory; False when it does not exist."""

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        """Make one directory."""

    def rmdir(self, path: str) -> None:
        """Remove one directory: a cgroup without children and tasks, or a resctrl group."""

    def gone(self, directory: str) -> None:
        """Close what is still open of a directory that another program has removed."""

    def filesystem_magic(self, path: str) -> int:
        """Return `f_type` of statfs(2): 0x63677270 on a cgroup v2 hierarchy."""

    def inode(self, path: str) -> int:
        """Return the inode number: it differs between a cgroup and its successor of that name."""

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""

    def device_number(self, path: str) -> tuple[str, int, int]:
        """Return ("c" or "b", major, minor) of a device node."""

    def core_sched_cookie(self, pid: int) -> int:
        """Return the core scheduling cookie id of a task; 0 is none."""

    def core_sched_create(self, pid: int) -> None:
        """Give a new cookie to the task's thread group."""

    def core_sched_copy(self, source_pid: int, target_pids: list[int]) -> list[int]:
        """Give the source's cookie (0: none) to each thread group; returns the pids that failed."""
