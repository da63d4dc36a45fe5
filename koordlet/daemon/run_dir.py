"""The run directory: made for its owner only, locked by one process at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from service.files import UNWRITABLE
from service.locks import lock_directory, node_lock

LOCK: Final = "koordlet.lock"

_CAP_DAC_OVERRIDE: Final = 1
"""The bit of capabilities(7)."""


def prepare_run_dir(path: str) -> None:
    """Make the run directory, for its owner only; OSError if others could write in it."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{path} is not a directory of user {os.geteuid()}")
    if status.st_mode & 0o022:
        raise OSError(f"{path} is writable by others: chmod 0755 {path}, or set runDir")


@contextmanager
def daemon_lock(run_dir: str) -> Iterator[None]:
    """Hold the run directory for the block. Raises LockHeld when another daemon has it, OSError.

    Where the lock file cannot be made, because the directory is read-only or full, the directory
    itself is locked: hooks must be answered all the same.
    """
    with ExitStack() as held:
        try:
            held.enter_context(node_lock(f"{run_dir}/{LOCK}"))
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            held.callback(os.close, lock_directory(run_dir))
        yield


def writes_for_root(status: str = "/proc/self/status") -> bool:
    """Return whether this process may write root's files: as root, or with CAP_DAC_OVERRIDE."""
    if os.geteuid() == 0:
        return True
    with open(status, encoding="ascii", errors="replace") as file:
        effective = next((line for line in file if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(effective.split()[1], 16) >> _CAP_DAC_OVERRIDE & 1)
