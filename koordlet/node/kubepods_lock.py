"""Allows one daemon for the pods of a node: a lock on the pods' cgroup directory.

The lock file of the run directory excludes daemons with the same run directory, and a lock on the
runtime's directory excludes NRI connections (`service.locks`). Daemons whose configurations differ
and that do not use NRI share neither, but they share the pods' cgroups. A lock on that directory
needs no file, is the same in every container that sees the node's cgroups, and ends with its
holder. It does not exclude a daemon that manages pods below another directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from linux.cgroup_paths import Layout
from service.locks import LockHeld, lock_directory

_LOG = logging.getLogger("koordlet")

_HIERARCHY: Final = "cpu"
"""On cgroup v1 daemons must lock the same hierarchy. Pods are looked for in this one."""


class KubepodsLock:
    """The lock of one daemon, which holds it until `close`."""

    def __init__(self, here: Callable[[str], str] = lambda path: path) -> None:
        """here: maps the node's paths to paths of this process; see `linux.local`."""
        self._here = here
        self._descriptor: int | None = None
        self._problem = ""

    def hold(self, layout: Layout) -> None:
        """Lock the pods' directory in place of what was locked before; if held, one stat(2).

        Before the first pod there is no such directory, and the hierarchy's root is locked instead.
        A directory that was removed and made again is locked again. Raises LockHeld when another
        daemon has the lock.
        """
        controller = _HIERARCHY if layout.has(_HIERARCHY) else next(iter(layout.mounts))
        path = self._here(layout.directory(controller, layout.kubepods))
        try:
            if self._descriptor is not None and os.path.samestat(
                os.fstat(self._descriptor), os.stat(path)
            ):
                return
            descriptor = lock_directory(path)
        except FileNotFoundError:
            return  # no directory to lock now; a lock that is held stays
        except LockHeld as held:
            if not _is_of_another_user(held.holder):
                raise
            # Any user who may open the directory may lock it. That must not stop the daemon.
            self._warn_once(f"process {held.holder}, which is not a daemon, holds {path}")
            return
        except OSError as error:
            self._warn_once(f"{path}: {error.strerror}")
            return
        self.close()
        self._descriptor = descriptor
        self._problem = ""

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _warn_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _LOG.warning("cannot lock this node's pods against other daemons: %s", problem)


def _is_of_another_user(pid: str) -> bool:
    """Return whether a process belongs to a user who could not run a second daemon.

    Reads the uids of /proc/PID/status: the owner of /proc/PID is root for processes that cannot be
    dumped.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            users = next((line.split()[1:] for line in status if line.startswith("Uid:")), [])
    except OSError:
        return False
    return bool(users) and str(os.geteuid()) not in users and "0" not in users
