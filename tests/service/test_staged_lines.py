"""Staged lines: a killed process leaves whole lines, and no earlier one behind a later one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.append_log import encode_line
from service.staged_lines import SIZE, StagedLines, read

HEADER = b"test 1"
FIRST = encode_line(HEADER)


def staged(path: Path) -> StagedLines:
    made = StagedLines(str(path), header=HEADER)
    made.clear()
    return made


def bodies(path: Path) -> tuple[bytes, ...]:
    return read(str(path), header=HEADER).lines


def test_a_killed_process_leaves_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    program = f"""
import os, signal
from service.append_log import encode_line
from service.staged_lines import StagedLines
lines = StagedLines({str(path)!r}, header={HEADER!r})
lines.clear()
for body in (b"a=1", b"b=2"):
    assert lines.put(encode_line(body))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert bodies(path) == (b"a=1", b"b=2")


def test_cleared_lines_are_gone_and_make_room(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    lines = staged(path)
    for body in (b"a=1", b"b=2", b"c=3"):
        assert lines.put(encode_line(body))
    lines.clear()
    assert bodies(path) == ()
    assert lines.put(encode_line(b"d=4"))
    assert bodies(path) == (b"d=4",)
    lines.clear()
    assert path.read_bytes() == FIRST.ljust(SIZE, b"\0")


def test_a_copy_that_was_cut_off_costs_only_its_line(tmp_path: Path) -> None:
    """A copy need not be made from its beginning to its end."""
    path = tmp_path / "staged"
    assert staged(path).put(encode_line(b"a=1"))
    before, line = path.read_bytes(), encode_line(b"b=2")
    start = before.index(b"\0")
    for cut in range(len(line)):
        for torn in (
            line[:cut].ljust(len(line), b"\0"),
            line[cut + 1 :].rjust(len(line), b"\0"),
            line[:cut] + b"\0" + line[cut + 1 :],
        ):
            path.write_bytes(before[:start] + torn + before[start + len(line) :])
            # A line that lacks nothing but its newline is whole.
            assert bodies(path) in ((b"a=1",), (b"a=1", b"b=2")[: 1 + (torn[:-1] == line[:-1])])


def test_a_kill_while_lines_are_dropped_leaves_none_of_them_alone(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    lines = staged(path)
    for body in (b"a=1", b"a=2"):
        assert lines.put(encode_line(body))
    zeroes: list[bytes] = []

    class Watched:
        """The map, which shows what a kill after each of its stores would leave."""

        def __init__(self, whole: object) -> None:
            self._whole = whole

        def __setitem__(self, place: object, value: object) -> None:
            self._whole[place] = value  # type: ignore[index]
            zeroes.append(path.read_bytes())
            assert bodies(path) == ()

    lines._map = Watched(lines._map)  # type: ignore[assignment]
    lines.clear()
    assert len(zeroes) == 2
    assert zeroes[-1] == FIRST.ljust(SIZE, b"\0")


def test_a_line_without_room_is_refused_and_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    lines, line = staged(path), encode_line(b"x" * 1000)
    count = 0
    while lines.put(line):
        count += 1
    assert count == (SIZE - 1 - len(FIRST)) // len(line)
    assert bodies(path) == (b"x" * 1000,) * count
    assert lines.put(encode_line(b"short"))
    lines.clear()
    assert lines.put(line)


def test_the_file_has_its_room_from_the_beginning(tmp_path: Path) -> None:
    """A store into a page without room on the disk would end the process."""
    path = tmp_path / "staged"
    staged(path)
    assert os.stat(path).st_blocks * 512 >= SIZE
    assert os.stat(path).st_mode & 0o777 == 0o600


def removed(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    os.truncate(path, 100)


def test_a_process_that_dies_of_a_truncated_file_costs_the_next_one_nothing(
    tmp_path: Path,
) -> None:
    """Another program of root's truncates the file; the next store has no page behind it."""
    path = tmp_path / "staged"
    program = f"""
import os
from service.append_log import encode_line
from service.staged_lines import StagedLines
lines = StagedLines({str(path)!r}, header={HEADER!r})
lines.clear()
os.truncate({str(path)!r}, 0)
lines.put(encode_line(b"a=1"))
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGBUS
    assert bodies(path) == ()
    lines = staged(path)
    assert not lines.problem and lines.put(encode_line(b"b=2"))
    assert bodies(path) == (b"b=2",)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(FIRST + encode_line(b"z=9"))
    other.rename(path)


@pytest.mark.parametrize("harm", [removed, truncated, replaced])
def test_a_file_that_was_removed_or_cut_is_made_again(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "staged"
    lines = staged(path)
    assert lines.put(encode_line(b"a=1"))
    harm(path)
    lines.clear()
    assert not lines.problem
    assert bodies(path) == ()
    assert lines.put(encode_line(b"b=2"))
    assert bodies(path) == (b"b=2",)


def test_lines_of_another_format_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    assert staged(path).put(encode_line(b"a=1"))
    found = read(str(path), header=b"test 2")
    assert (found.header, found.lines) == (HEADER, ())


@pytest.mark.parametrize("content", [b"", b"\0" * SIZE, FIRST[:5], os.urandom(16) * 64])
def test_a_file_of_other_content_holds_no_lines(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "staged"
    path.write_bytes(content)
    assert bodies(path) == ()


def test_a_shorter_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    path.write_bytes(FIRST + encode_line(b"a=1"))
    assert bodies(path) == (b"a=1",)


def test_only_a_regular_file_of_the_usual_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    assert bodies(path) == ()
    path.write_bytes(b"\0" * (SIZE + 1))
    with pytest.raises(OSError, match="more than"):
        bodies(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        bodies(path)
    staged(path)  # takes the place of whatever is there
    assert bodies(path) == ()


def test_where_no_file_can_be_made_lines_are_refused_until_one_can(tmp_path: Path) -> None:
    path = tmp_path / "run" / "staged"
    lines = staged(path)
    assert lines.problem == f"{path} cannot be made: {os.strerror(errno.ENOENT)}"
    assert not lines.put(encode_line(b"a=1"))
    path.parent.mkdir()
    lines.clear()
    assert not lines.problem
    assert lines.put(encode_line(b"a=1"))
    lines.close()
    assert not lines.put(encode_line(b"b=2"))
    assert bodies(path) == (b"a=1",)


def test_a_full_disk_leaves_no_old_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has them, and may get newer ones before the next process reads both."""
    path = tmp_path / "staged"
    assert staged(path).put(encode_line(b"a=1"))
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def replace(*_: object) -> None:
            raise full

        patched.setattr("service.files.os.replace", replace)
        lines = staged(path)
    assert lines.problem.endswith("No space left on device")
    assert bodies(path) == ()
