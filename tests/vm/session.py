"""Runs inside the machine: what the payload disk asks for, then power off.

The results (pytest's JUnit file, its output, the journal) go as a tar archive onto the third disk,
without a file system: the host reads them from the raw file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

SESSION = Path("/checkout/vm-session.json")
RESULTS = Path("/run/koord-results")
RESULT_DISK = "/dev/vdc"
_PIECE_BYTES = 65536
_ALIVE_EVERY_S = 20.0
"""A tenth of `tests.vm.machine.STILL_S`, rounded up: a busy machine may miss several turns."""


def say(what: str) -> None:
    """A line that the host waits for."""
    print(f"KOORD-VM: {what}", flush=True)


def _live() -> None:
    """Say for ever that the machine runs: the host ends one that stands still."""
    while True:
        time.sleep(_ALIVE_EVERY_S)
        say("alive")


def main() -> int:
    threading.Thread(target=_live, daemon=True).start()
    say(f"session after {time.clock_gettime(time.CLOCK_BOOTTIME):.1f} s")
    wanted = json.loads(SESSION.read_text())
    RESULTS.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **wanted["environment"], "KOORD_VM": "1"}
    status = 1
    try:
        status = _run(wanted["command"], environment)
    finally:
        _save_logs()
        with tarfile.open(RESULT_DISK, "w") as archive:
            archive.add(RESULTS, arcname=".")
        os.sync()
        say(f"exit {status}")
        subprocess.run(["systemctl", "poweroff", "-ff"], check=False)
    return status


def _run(command: list[str], environment: dict[str, str]) -> int:
    with (RESULTS / "output.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd="/checkout",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
        assert process.stdout is not None
        # In pieces, not lines: the console shows which test began, also if it never ends.
        while piece := process.stdout.read(_PIECE_BYTES):
            log.write(piece)
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        return process.wait()


def _save_logs() -> None:
    for name, command in {
        "journal.txt": ["journalctl", "-b", "--no-pager", "-o", "short-monotonic"],
        "units.txt": ["systemctl", "--no-pager", "--all", "list-units"],
    }.items():
        with (RESULTS / name).open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False, timeout=60)


if __name__ == "__main__":
    sys.exit(main())
