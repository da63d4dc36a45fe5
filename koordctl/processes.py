"""The node's processes: programs by name, their command lines, and the files that these name.

A process may take any name, so a container may run a "kubelet" of its own. Files are therefore read
only for root's processes in the machine's (or our) mount namespace: no container starts those.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psutil

_LONGEST_FILE: Final = 1 << 20
"""Chosen: configurations of kubelet and containerd have some KiB."""
_SHOWN_WORDS: Final = 4
"""Words and characters of a command line in a finding: enough to recognise it, on one line."""
_SHOWN_CHARACTERS: Final = 120


class NotOurs(Exception):
    """A process whose files are not read; the message says why."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process. name: of the program; for Python, of the script or module."""

    pid: int
    name: str
    command: tuple[str, ...]
    user_id: int | None
    proc_root: str

    @property
    def shown(self) -> str:
        """The process as findings show it: pid and the first words of its command line."""
        words = " ".join(self.command[:_SHOWN_WORDS])
        return f"{self.pid} {words[:_SHOWN_CHARACTERS]}"

    def flag(self, *names: str) -> str | None:
        """Return the value of the last of these flags on the command line; `--a=b` or `--a b`."""
        spelled = {f"{dashes}{name}" for name in names for dashes in ("-", "--")}
        given = None
        for index, word in enumerate(self.command):
            flag, equals, value = word.partition("=")
            if flag in spelled:
                given = value if equals else next(iter(self.command[index + 1 :]), "")
        return given

    def read(self, path: str) -> bytes:
        """Return a file's content as the process sees it. Raises NotOurs, OSError."""
        self.require_of_node()
        if not path.startswith("/"):
            raise NotOurs(f"process {self.shown} names the file by a relative path, {path!r}")
        with open(f"{self.proc_root}/{self.pid}/root{path}", "rb") as file:
            content = file.read(_LONGEST_FILE + 1)
        if len(content) > _LONGEST_FILE:
            raise NotOurs(f"{path} has more than {_LONGEST_FILE >> 20} MiB")
        return content

    def glob(self, pattern: str) -> list[str]:
        """Return the files of a pattern as the process sees them, in order. Raises NotOurs."""
        self.require_of_node()
        root = f"{self.proc_root}/{self.pid}/root"
        return sorted(name.removeprefix(root) for name in glob.glob(root + pattern))

    def require_of_node(self) -> None:
        """Raise NotOurs for a process that is not root's, or that a container may have started."""
        if self.user_id != 0:
            raise NotOurs(f"process {self.shown} is not root's")
        trusted = {os.readlink("/proc/self/ns/mnt")}
        with suppress(PermissionError):  # where doctor itself runs in a container
            trusted.add(os.readlink(f"{self.proc_root}/1/ns/mnt"))
        if os.readlink(f"{self.proc_root}/{self.pid}/ns/mnt") not in trusted:
            raise NotOurs(f"process {self.shown} has a mount namespace of its own")


def running(proc_root: str) -> tuple[Process, ...]:
    """Return the processes of the procfs that is mounted at `proc_root`. Raises OSError."""
    with _looking_at(proc_root):
        found = [each.info for each in psutil.process_iter(["pid", "cmdline", "uids"])]
    return tuple(
        Process(
            pid=each["pid"],
            name=program(each["cmdline"]),
            command=tuple(each["cmdline"]),
            user_id=each["uids"].effective if each["uids"] else None,
            proc_root=proc_root,
        )
        for each in found
        if each["cmdline"]  # kernel threads have none
    )


def program(command: Iterable[str]) -> str:
    """Return the name of the program, looking through Python to the script or module."""
    words = iter(command)
    name = os.path.basename(next(words, ""))
    if not name.startswith("python"):
        return name
    for word in words:
        if word == "-m":
            return next(words, "")
        if not word.startswith("-"):
            return os.path.basename(word)
        if word == "-c":
            return name
        if word in ("-X", "-W"):
            next(words, "")
    return name


@contextmanager
def _looking_at(proc_root: str) -> Iterator[None]:
    before = psutil.PROCFS_PATH
    psutil.PROCFS_PATH = proc_root
    try:
        yield
    finally:
        psutil.PROCFS_PATH = before
