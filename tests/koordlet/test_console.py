"""Output that cannot be written is no reason for a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO, Any

import pytest

_MAIN = "import sys; from {0}.main import main; sys.exit(main())"


def run(
    room: str, *arguments: str, stdout: int | IO[Any], **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _MAIN.format(room), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


COMMANDS = pytest.mark.parametrize(
    ("room", "arguments"),
    [
        ("koordlet", ["--help"]),
        ("koordlet", ["check-config", "-node-name=n1"]),
        ("koordctl", ["--help"]),
    ],
)


@COMMANDS
def test_a_reader_that_left_is_no_error(room: str, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(room, *arguments, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_is_reported_in_one_line() -> None:
    with open("/dev/full", "w", encoding="ascii") as full:
        done = run("koordlet", "--help", stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["koordlet: [Errno 28] No space left on device"]


def test_a_terminal_without_utf_8_gets_escapes() -> None:
    done = run(
        "koordlet",
        "check-config",
        "-node-name=n\N{LATIN SMALL LETTER O WITH DIAERESIS}",
        stdout=subprocess.PIPE,
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 2
    assert "not a node name" in done.stderr
    assert "Traceback" not in done.stderr
