"""The event loop's thread comes first; those that share the interpreter with it come next."""

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
    ("prefix", "niceness", "beside"),
    [
        pytest.param((), -10, -9, id="with CAP_SYS_NICE"),
        pytest.param(_WITHOUT_RIGHT, None, None, id="without the right"),
    ],
)
def test_the_threads_of_the_interpreter_are_preferred(
    prefix: tuple[str, ...], niceness: int | None, beside: int | None, tmp_path: Path
) -> None:
    """niceness: of the event loop. beside: of the others. None: as the daemon was started."""
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    expected = ordinary if niceness is None else niceness
    expected_beside = ordinary if beside is None else beside
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
        # The reconciler's, and one that reads the configuration's objects.
        waiting.wait_until(
            lambda: list(niceness_of_threads(daemon.pid).values()).count(expected_beside) >= 2,
            "the niceness of the threads beside it",
        )
        threads = niceness_of_threads(daemon.pid)
        del threads[daemon.pid]
        # Those from before the loop was preferred have what the daemon was started with.
        assert set(threads.values()) <= {ordinary, expected_beside, 0}
