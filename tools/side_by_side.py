"""Runs all tests in two sessions of pytest at the same time and a third one after them, as .ci/run.

    .venv/bin/python -m tools.side_by_side
    .venv/bin/python -m tools.side_by_side --durations=20 tests/cluster tests/e2e

Arguments go to all sessions. The first session has the tests on real programs and on the kernel of
this machine: cgroups, containers, network namespaces, API servers, kubelets. They run one after the
other, so that no two of them share the machine's state. The second session has all others: on
simulated kernels, on emulated machines, and without a machine. The first session mostly waits for
other programs; the second uses the CPU meanwhile. What is marked `alone`, because it measures the
load of the whole machine, runs in the third session, when both have ended. Each test is in exactly
one session. Without arguments the third session reads only files that name its marker, and a run in
which some test ran in no session fails.

The output of the first session appears while it runs, that of the second when both have ended. The
last line is the sum of the summaries in pytest's own format. The exit status is 0 if all sessions
passed. SIGINT, SIGTERM and SIGHUP end the sessions, whose fixtures clean up, and start no other.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

_ON_THIS_MACHINE = "(apiserver or cgroups or containerd or kubelet or root)"
REAL = f"{_ON_THIS_MACHINE} and not alone"
OTHERS = f"not {_ON_THIS_MACHINE} and not alone"
ALONE = "alone"
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


def naming(marker: str) -> list[str]:
    """Return the files of tests that name a marker: to collect all tests takes half a minute."""
    files = sorted(Path("tests").rglob("test_*.py"))
    return [str(each) for each in files if f"mark.{marker}" in each.read_text()]


def all_ran(counted: Counter[str], one: Counter[str]) -> bool:
    """Return whether all tests ran. one: the outcomes of a session that collected all of them."""
    return _tests(counted) - counted["deselected"] == _tests(one)


def _tests(counted: Counter[str]) -> int:
    return counted.total() - counted["warnings"]


def start(
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


def end_on_signals(sessions: Sequence[subprocess.Popen[bytes]], asked: list[int]) -> None:
    """Let each signal that asks this process to end reach the sessions as SIGTERM.

    asked: gets the signals that came.
    """

    def end(number: int, _: object) -> None:
        asked.append(number)
        for session in sessions:
            session.terminate()

    for number in _END_SIGNALS:
        signal.signal(number, end)


def shown(source: IO[bytes]) -> str:
    """Copy a session's output to ours until it ends; return it."""
    parts = []
    while part := os.read(source.fileno(), 1 << 16):
        parts.append(part)
        write(part)
    return b"".join(parts).decode(errors="replace")


def followed(session: subprocess.Popen[bytes]) -> Counter[str]:
    """Show a session's output while it runs; return how many tests had each outcome."""
    assert session.stdout is not None
    with session.stdout as source:
        return outcomes(shown(source))


def write(output: bytes) -> None:
    """Write to our output, unless its reader ended before the sessions have cleaned up."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the sessions; return the exit status."""
    began = time.monotonic()
    sessions: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []
    end_on_signals(sessions, asked)
    with tempfile.TemporaryFile(buffering=0) as kept:
        sessions.append(start(OTHERS, arguments, kept))
        sessions.append(start(REAL, arguments, subprocess.PIPE))
        first = followed(sessions[-1])
        counted = first.copy()
        for session in sessions:
            session.wait()
        kept.seek(0)
        counted += outcomes(shown(kept))
    if not asked:
        files = [] if arguments else naming("alone")
        sessions.append(start(ALONE, [*arguments, *files], subprocess.PIPE))
        counted += followed(sessions[-1])
    statuses = {session.wait() for session in sessions}
    passed = statuses <= {0, _NO_TESTS} and statuses != {_NO_TESTS} and not counted["errors"]
    if passed and not arguments and not asked and not all_ran(counted, first):
        write(b"Some test ran in no session: its file does not name its marker `alone`.\n")
        passed = False
    write(f"{summary(counted, time.monotonic() - began)}\n".encode())
    return 0 if passed and not asked else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
