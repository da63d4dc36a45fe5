"""One daemon for the pods of a node: a lock on the very directory that daemons would fight over.

Daemons with the same run directory are kept apart by its lock file, and NRI connections by the
runtime's directory (`service.locks`). Daemons that share neither, because their
configurations differ and NRI is off, still share the pods' cgroups. A lock on that directory needs
no file anywhere, is the same in every container that sees the node's cgroups, ends with its holder,
and keeps nobody out who cares for other pods.
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
"""On cgroup v1 daemons have to meet in one hierarchy; this one is where pods are looked for."""


class KubepodsLock:
    """The lock of one daemon, which holds it until `close`."""

    def __init__(self, here: Callable[[str], str] = lambda path: path) -> None:
        """here: maps the node's paths to this process's, see `linux.local`."""
        self._here = here
        self._descriptor: int | None = None
        self._problem = ""

    def hold(self, layout: Layout) -> None:
        """Hold the pods' directory, whatever was held before; costs one stat once it is held.

        Before any pod there is no such directory: then the hierarchy's root stands in for it. A
        directory that was made anew is locked anew. Raises LockHeld when another daemon has it.
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
            return  # nothing is there to fight over; what is held stays until it is
        except LockHeld as held:
            if not _is_of_another_user(held.holder):
                raise
            # Whoever may open a directory may lock it: that must not cost the node its daemon.
            self._tell(f"process {held.holder}, which is no daemon, holds {path}")
            return
        except OSError as error:
            self._tell(f"{path}: {error.strerror}")
            return
        self.close()
        self._descriptor = descriptor
        self._problem = ""

    def close(self) -> None:
        """Let the next daemon in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            _LOG.warning("cannot keep other daemons away from this node's pods: %s", problem)


def _is_of_another_user(pid: str) -> bool:
    """Tell whether a process is known to belong to somebody who could not run a daemon beside us.

    The owner of /proc/PID would not do: it is root for processes that cannot be dumped.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            users = next((line.split()[1:] for line in status if line.startswith("Uid:")), [])
    except OSError:
        return False
    return bool(users) and str(os.geteuid()) not in users and "0" not in users
