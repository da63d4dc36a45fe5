"""The program that runs the tests in two sessions and a third, on a small checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.beds.packages import CHECKOUT
from tests.waiting import wait_until
from tools.side_by_side import outcomes, summary

CONFIGURATION = """
[pytest]
addopts = -q
testpaths = tests
markers =
    alone
    apiserver
    cgroups
    containerd
    kubelet
    root
"""
REAL = """
import pytest
pytestmark = pytest.mark.containerd

def test_of_the_first():
    assert {real}
"""
OTHER = """
import os, time, pytest

def test_of_the_second():
    assert {other}

@pytest.mark.skip
def test_skipped():
    pass
"""
MEASURES = """
import pathlib, pytest
pytestmark = [pytest.mark.alone, pytest.mark.containerd]

def test_of_the_third():
    assert pathlib.Path("ended").exists()
"""
MARKS = """
import pytest

def pytest_collection_modifyitems(items):
    for each in items:
        if each.name == "test_of_the_second":
            each.add_marker(pytest.mark.alone)
"""
HANGS = """
import pathlib, time, pytest

@pytest.fixture
def kept(request):
    own = pathlib.Path(__file__).parent / request.node.name
    own.with_suffix(".began").touch()
    yield
    own.with_suffix(".cleaned").touch()

@pytest.mark.root
def test_of_the_first(kept):
    time.sleep(60)

def test_of_the_second(kept):
    time.sleep(60)
"""
ENDS_ON_SIGTERM = """
import signal

def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)
    (tmp_path / "tests").mkdir()
    return tmp_path


def started(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.side_by_side", *arguments],
        cwd=checkout,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )


def ran(checkout: Path, *, real: str = "True", other: str = "True") -> tuple[int, str]:
    """The exit status and the output. real, other: what a test of each session asserts."""
    (checkout / "tests/test_real.py").write_text(REAL.format(real=real))
    (checkout / "tests/test_other.py").write_text(OTHER.format(other=other))
    with started(checkout) as program:
        output, _ = program.communicate(timeout=60)
    return program.returncode, output


def last(output: str) -> str:
    return re.sub(r" in .*", "", output.splitlines()[-1]).lstrip("= ")


def test_each_test_runs_once_and_the_last_line_is_the_sum(checkout: Path) -> None:
    status, output = ran(checkout)
    assert (status, last(output)) == (0, "2 passed, 1 skipped"), output
    assert output.count("1 passed, 2 deselected in") == 1
    assert output.count("1 passed, 1 skipped, 1 deselected in") == 1


def test_what_measures_the_machine_runs_when_the_others_have_ended(checkout: Path) -> None:
    (checkout / "tests/test_measures.py").write_text(MEASURES)
    status, output = ran(checkout, other="time.sleep(2) or open('ended', 'w')")
    assert (status, last(output)) == (0, "3 passed, 1 skipped"), output
    assert re.search("^1 passed in", output, re.MULTILINE), "the third session read files in vain"


def test_with_arguments_the_sessions_select_from_these(checkout: Path) -> None:
    (checkout / "tests/test_measures.py").write_text(MEASURES)
    (checkout / "ended").touch()
    ran(checkout)
    with started(checkout, "tests/test_measures.py", "tests/test_real.py") as program:
        output, _ = program.communicate(timeout=60)
    assert (program.returncode, last(output)) == (0, "2 passed"), output


def test_a_test_that_no_session_runs_fails_the_run(checkout: Path) -> None:
    (checkout / "tests/conftest.py").write_text(MARKS)
    (checkout / "tests/test_measures.py").write_text(MEASURES)
    (checkout / "ended").touch()
    status, output = ran(checkout)
    assert (status, last(output)) == (1, "2 passed, 1 skipped"), output
    assert "Some test ran in no session" in output


@pytest.mark.parametrize("session", ["real", "other"])
def test_a_failure_of_either_session_is_shown_and_fails_the_run(
    checkout: Path, session: str
) -> None:
    status, output = ran(checkout, **{session: "'the reason' == 1"})
    assert (status, last(output)) == (1, "1 failed, 1 passed, 1 skipped"), output
    assert f"FAILED tests/test_{session}.py" in output and "'the reason' == 1" in output


def test_a_session_that_crashes_counts_as_an_error(checkout: Path) -> None:
    status, output = ran(checkout, other="os._exit(0)")
    assert (status, last(output)) == (1, "1 passed, 1 error"), output


def test_a_signal_ends_both_sessions_whose_fixtures_clean_up(checkout: Path) -> None:
    (checkout / "conftest.py").write_text(ENDS_ON_SIGTERM)
    (checkout / "tests/test_hangs.py").write_text(HANGS)
    names = ("test_of_the_first", "test_of_the_second")
    with started(checkout) as program:
        try:
            wait_until(
                lambda: all((checkout / f"tests/{each}.began").exists() for each in names),
                "both sessions run a test",
            )
            program.send_signal(signal.SIGTERM)
            output, _ = program.communicate(timeout=60)
        finally:
            program.kill()
    assert program.returncode == 1, output
    assert all((checkout / f"tests/{each}.cleaned").exists() for each in names), output


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("=== 8332 passed in 1787.38s (0:29:47) ===", {"passed": 8332}),
        ("1 failed, 2 passed, 3 deselected in 0.31s", {"failed": 1, "passed": 2, "deselected": 3}),
        ("= 1 skipped, 1 warning, 1 error in 0.31s =", {"skipped": 1, "warnings": 1, "errors": 1}),
        ("= 2 warnings, 2 errors in 0.31s =", {"warnings": 2, "errors": 2}),
        ("2 passed in 1.00s\nand a later crash\n3 passed in 2.00s", {"passed": 3}),
        ("5 deselected in 0.31s", {"deselected": 5}),
        ("no tests ran in 0.31s", {}),
        ("INTERNALERROR> in vain", {"errors": 1}),
        ("", {"errors": 1}),
    ],
)
def test_a_summary_is_read(line: str, counted: dict[str, int]) -> None:
    assert outcomes(line) == Counter(counted)


def test_a_summary_is_written_as_pytest_writes_it() -> None:
    counted = Counter(errors=1, warnings=2, passed=8332, deselected=5, failed=2)
    line = summary(counted, 1787.38)
    assert line.strip("= ") == "2 failed, 8332 passed, 2 warnings, 1 error in 1787.38s (0:29:47)"
    assert line.startswith("=") and len(line) == 80
    long = summary(Counter(dict.fromkeys(("failed", "passed", "skipped", "errors"), 10**9)), 1)
    assert long.startswith("= 1000000000 failed, ") and long.endswith("s (0:00:01) =")
