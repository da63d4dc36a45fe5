"""A benchmark that a signal ends leaves no process and no cgroup behind."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.beds.groups import layout
from tests.beds.packages import CHECKOUT
from tests.waiting import wait_until

_BENCHMARKS = sorted((CHECKOUT / "benchmarks").glob("*.py"))
_PROGRAM = """
import psutil
from benchmarks.running import ended_with_block, run_main
from tests.beds.groups import kubepods
def main():
    with kubepods(), ended_with_block(psutil.Popen(["sleep", "600"])) as process:
        print(process.pid, flush=True)
        process.wait()
run_main(main)
"""


def groups_of(pid: int) -> list[Path]:
    """The groups that a program has made for its pods."""
    return [each for root in layout()[1] for each in root.glob(f"koord-bed-{pid}-*")]


@pytest.mark.cgroups
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_processes_and_removes_the_groups(number: signal.Signals) -> None:
    """The signals are ignored when it starts, as SIGINT is in a shell's background jobs."""
    ignored = ("env", f"--ignore-signal={number.name.removeprefix('SIG')}")
    with subprocess.Popen(
        [*ignored, sys.executable, "-c", _PROGRAM], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            below = int(program.stdout.readline())
            assert groups_of(program.pid)
            program.send_signal(number)
            assert program.wait(20) == 128 + number
        finally:
            program.kill()
    assert not psutil.pid_exists(below)
    assert not groups_of(program.pid)


@pytest.mark.cgroups
def test_a_daemon_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import running

    monkeypatch.setattr(running, "_STOP_S", 0.1)
    deaf = psutil.Popen(["env", "--ignore-signal=TERM", "sleep", "600"])
    wait_until(lambda: deaf.name() == "sleep", "it ignores SIGTERM")
    with running.ended_with_block(deaf):
        pass
    assert deaf.returncode == -signal.SIGKILL


@pytest.mark.cgroups
@pytest.mark.parametrize("more", [(), ("--all-collectors",)], ids=["groups", "processes"])
def test_a_soak_that_is_ended_takes_its_koordlet_along(more: tuple[str, ...]) -> None:
    options = ["--pods", "2", "--minutes", "60", *more]
    command = [sys.executable, "-m", "benchmarks.node_soak", *options]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL) as soak:
        program = psutil.Process(soak.pid)

        def daemon() -> list[psutil.Process]:
            return [
                each for each in program.children() if "koordlet.main" in " ".join(each.cmdline())
            ]

        try:
            wait_until(lambda: groups_of(soak.pid) and daemon(), "koordlet runs", timeout_s=60)
            (koordlet,) = daemon()
        finally:
            soak.terminate()
        assert soak.wait(60) == 128 + signal.SIGTERM
    # Its parent has ended, so another process takes its exit status, a moment later.
    wait_until(lambda: not koordlet.is_running(), "the daemon's process is gone")
    assert not groups_of(soak.pid)


@pytest.mark.parametrize("path", _BENCHMARKS, ids=lambda path: path.stem)
def test_every_program_is_run_in_that_way(path: Path) -> None:
    tree = ast.parse(path.read_text())
    started = [
        ast.unparse(line)
        for each in tree.body
        if isinstance(each, ast.If) and "__main__" in ast.unparse(each.test)
        for line in each.body
    ]
    assert started in ([], ["run_main(main)"])
