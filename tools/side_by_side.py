"""Runs all tests in several sessions of pytest, two at a time, as .ci/run.

    .venv/bin/python -m tools.side_by_side
    .venv/bin/python -m tools.side_by_side --durations=20 tests/cluster tests/e2e

Arguments go to all sessions. The first session has the tests on real programs and on the kernel of
this machine: cgroups, containers, network namespaces, API servers, kubelets. They run one after the
other, so that no two of them share the machine's state. The second session has the tests on
emulated machines. Each needs about one CPU, so they begin together, and two more sessions at a time
follow with all other tests: on simulated kernels, and without a machine. What is marked `alone`,
because it measures the load of the whole machine, runs in a last session, when all have ended. Each
test is in exactly one session. Without arguments the sessions read only the folders or files that
they need, and a run in which some test ran in no session fails.

The output of the first session appears while it runs, that of the next ones when all have ended.
The last line is the sum of the summaries in pytest's own format. The exit status is 0 if all
sessions passed. SIGINT, SIGTERM and SIGHUP end the sessions, whose fixtures clean up, and start no
other.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

_ON_THIS_MACHINE = "(apiserver or cgroups or containerd or kubelet or root)"
REAL = f"{_ON_THIS_MACHINE} and not alone"
EMULATED = f"vm and not {_ON_THIS_MACHINE} and not alone"
OTHERS = f"not vm and not {_ON_THIS_MACHINE} and not alone"
ALONE = "alone"
_AT_A_TIME = 2
# Sessions of their own; they and all other folders together take about the same time each.
_LARGE = ("tests/cluster", "tests/koordlet")
# The kernel sends a session SIGTERM when this process ends without having done so.
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM", "--")
# pytest ends with this status when it has selected no test.
_NO_TESTS = 5
_SUMMARY = re.compile(r"^=* ?(no tests ran|\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.]+s\b", re.MULTILINE)
# In the order in which pytest prints them. Tests that one session deselects run in the other.
_OUTCOMES = ("failed", "passed", "skipped", "xfailed", "xpassed", "warnings", "errors")
_PLURALS = {"warning": "warnings", "error": "errors"}
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def outcomes(output: str) -> Counter[str]:
    """Return how many tests had each outcome, from the summary line at the end of the output.

    A session without a summary line has crashed, and counts as one error.
    """
    lines = _SUMMARY.findall(output)
    if not lines:
        return Counter(errors=1)
    counted: Counter[str] = Counter()
    for number, outcome in re.findall(r"(\d+) ([a-z]+)", lines[-1]):
        counted[_PLURALS.get(outcome, outcome)] += int(number)
    return counted


def summary(counted: Counter[str], seconds: float) -> str:
    """Return pytest's summary line for these outcomes."""
    singular = {plural: word for word, plural in _PLURALS.items()}
    parts = [
        f"{counted[each]} {singular.get(each, each) if counted[each] == 1 else each}"
        for each in _OUTCOMES
        if counted[each]
    ]
    minutes, rest = divmod(int(seconds), 60)
    length = f"{seconds:.2f}s ({minutes // 60}:{minutes % 60:02d}:{rest:02d})"
    text = f" {', '.join(parts) or 'no tests ran'} in {length} "
    return text.center(max(80, len(text) + 2), "=")


def parts() -> list[list[str]]:
    """Return the folders and files of tests in parts, for a session each."""
    rest = [
        str(each)
        for each in sorted(Path("tests").iterdir())
        if (each.is_dir() and each.name != "__pycache__") or each.match("test_*.py")
    ]
    large = [[each] for each in _LARGE if each in rest]
    return [*large, [each for each in rest if each not in _LARGE]]


def naming(marker: str) -> list[str]:
    """Return the files of tests that name a marker: to collect all tests takes half a minute."""
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(each) for each in files if f"mark.{marker}" in each.read_text()]


def all_ran(counted: Counter[str], one: Counter[str]) -> bool:
    """Return whether all tests ran. one: the outcomes of a session that collected all of them."""
    return _tests(counted) - counted["deselected"] == _tests(one)


def _tests(counted: Counter[str]) -> int:
    return counted.total() - counted["warnings"]


class Sessions:
    """Sessions of pytest, until a signal asks this process to end."""

    def __init__(self) -> None:
        self.asked = False
        """Whether such a signal has come."""
        self._started: list[subprocess.Popen[bytes]] = []
        # Not a plain lock: the handler of a signal runs in the main thread, which starts sessions.
        self._starting = threading.RLock()
        for number in _END_SIGNALS:
            signal.signal(number, self._end)

    def _end(self, number: int, _: object) -> None:
        with self._starting:
            self.asked = True
            for session in self._started:
                session.terminate()

    def run(
        self, selection: str, arguments: Sequence[str], output: IO[bytes] | None = None
    ) -> str | None:
        """Run a session to its end; return what it has written, None if it was not started.

        output: a file for it; None: it appears while the session runs.
        """
        with self._starting:
            if self.asked:
                return None
            session = _start(selection, arguments, output or subprocess.PIPE)
            self._started.append(session)
        if output is None:
            assert session.stdout is not None
            with session.stdout as source:
                text = shown(source)
        session.wait()
        if output is not None:
            output.seek(0)
            text = output.read().decode(errors="replace")
        return text

    def statuses(self) -> set[int]:
        """Return the exit statuses of the sessions that were started. They have ended."""
        return {session.wait() for session in self._started}


def _start(
    selection: str, arguments: Sequence[str], output: int | IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a session of pytest. Signals of the terminal reach it through this process alone."""
    ends_with_us = _ENDS_WITH_US if shutil.which(_ENDS_WITH_US[0]) else ()
    return subprocess.Popen(
        [*ends_with_us, sys.executable, "-m", "pytest", "-m", selection, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def shown(source: IO[bytes]) -> str:
    """Copy a session's output to ours until it ends; return it."""
    parts = []
    while part := os.read(source.fileno(), 1 << 16):
        parts.append(part)
        write(part)
    return b"".join(parts).decode(errors="replace")


def write(output: bytes) -> None:
    """Write to our output, unless its reader ended before the sessions have cleaned up."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the sessions; return the exit status."""
    began = time.monotonic()
    sessions = Sessions()
    beside = [(EMULATED, arguments)]
    beside += [(OTHERS, [*arguments, *part]) for part in ([[]] if arguments else parts())]
    with ExitStack() as files, ThreadPoolExecutor(_AT_A_TIME) as lanes:
        running = [lanes.submit(sessions.run, REAL, arguments)]
        for selection, selected in beside:
            kept = files.enter_context(tempfile.TemporaryFile(buffering=0))
            running.append(lanes.submit(sessions.run, selection, selected, kept))
        first, *others = [each.result() for each in running]
    for output in others:
        write((output or "").encode())
    last = sessions.run(ALONE, [*arguments, *([] if arguments else naming("alone"))])
    counted = Counter[str]()
    for each in (first, *others, last):
        counted += Counter() if each is None else outcomes(each)
    statuses = sessions.statuses()
    passed = statuses <= {0, _NO_TESTS} and statuses != {_NO_TESTS} and not counted["errors"]
    if passed and not (arguments or sessions.asked) and not all_ran(counted, outcomes(first or "")):
        write(b"Some test ran in no session: its file does not name its marker `alone`.\n")
        passed = False
    write(f"{summary(counted, time.monotonic() - began)}\n".encode())
    return 0 if passed and not sessions.asked else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
