"""The event loop's thread is preferred, all others of the daemon are ordinary."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import waiting
from tests.conftest import require
from tests.koordlet.daemon.process import plain_machine, readiness, running
from tests.ports import free_port

_WITHOUT_RIGHT = ("prlimit", "--nice=0", "setpriv", "--bounding-set=-sys_nice")


def niceness_of_threads(pid: int) -> dict[int, int]:
    """Return the niceness of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        found[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[16])
    return found


@pytest.mark.root
@pytest.mark.parametrize(
    ("prefix", "niceness"),
    [
        pytest.param((), -10, id="with CAP_SYS_NICE"),
        pytest.param(_WITHOUT_RIGHT, None, id="without the right"),
    ],
)
def test_only_the_event_loop_has_another_niceness(
    prefix: tuple[str, ...], niceness: int | None, tmp_path: Path
) -> None:
    """niceness: of the event loop; None: as it was started."""
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    expected = ordinary if niceness is None else niceness
    probe = subprocess.run([*_WITHOUT_RIGHT, "true"], check=False)
    require(probe.returncode == 0, "needs prlimit, setpriv and CAP_SETPCAP")
    port = free_port()
    config = plain_machine(tmp_path, tmp_path / "cgroup" / "cpu" / "kubepods" / "pod1" / "c", port)
    log = tmp_path / "log"
    with running(config, log, prefix=prefix) as daemon:
        waiting.wait_until(lambda: readiness(port) != "", "the daemon answers")
        if niceness is None:
            refused = "this thread keeps its scheduling: sched_setattr: Operation not permitted"
            waiting.wait_until(lambda: refused in log.read_text(), "a line of the log")
        waiting.wait_until(
            lambda: niceness_of_threads(daemon.pid)[daemon.pid] == expected,
            "the event loop's niceness",
        )
        threads = niceness_of_threads(daemon.pid)
        del threads[daemon.pid]
        assert len(threads) >= 2, "the reconciler's and a reader's"
        # Those from before the loop was preferred have what the daemon was started with.
        assert set(threads.values()) <= {ordinary, 0}
