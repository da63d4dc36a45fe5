"""The append log: what was appended is read back, however the file was cut, bent or refused."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.append_log import AppendLog, Content, encode_line, files_aside, parse, read

HEADER = b'{"log":"test","format":1}'


class Owner:
    """A mapping that lives in a log: `key=value` sets, `key` removes."""

    def __init__(self, path: Path, *, rewrite_bytes: int = 1 << 20, max_bytes: int = 8 << 20):
        self.now = 0.0
        self.state: dict[bytes, bytes] = {}
        self.log = AppendLog(
            str(path),
            header=HEADER,
            live=self.live,
            consequence="a restart forgets",
            rewrite_bytes=rewrite_bytes,
            max_bytes=max_bytes,
            monotonic=lambda: self.now,
        )

    def live(self) -> Iterator[bytes]:
        for key, value in self.state.items():
            yield key + b"=" + value

    def set(self, key: bytes, value: bytes) -> bool:
        self.state[key] = value
        return self.log.append([key + b"=" + value])

    def remove(self, key: bytes) -> bool:
        self.state.pop(key, None)
        return self.log.append([key])


def state_of(content: Content) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for line in content.lines:
        key, sets, value = line.partition(b"=")
        if sets:
            state[key] = value
        else:
            state.pop(key, None)
    return state


def on_disk(path: Path) -> dict[bytes, bytes]:
    return state_of(read(str(path), header=HEADER))


def opened(path: Path) -> Owner:
    owner = Owner(path)
    owner.state = state_of(owner.log.open())
    return owner


def test_changes_come_back_in_order_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    owner = opened(path)
    assert owner.set(b"a", b"1")
    assert owner.set(b"b", b"2")
    assert owner.remove(b"a")
    assert owner.log.append([])
    owner.log.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"".join(map(encode_line, [HEADER, b"a=1", b"b=2", b"a"]))
    again = opened(path)
    assert again.state == {b"b": b"2"}
    assert again.set(b"c", b"3")
    assert on_disk(path) == {b"b": b"2", b"c": b"3"}


def test_a_missing_or_empty_file_is_an_empty_log(tmp_path: Path) -> None:
    assert read(str(tmp_path / "none"), header=HEADER) == Content()
    (tmp_path / "empty").touch()
    owner = opened(tmp_path / "empty")
    assert owner.set(b"a", b"1")
    assert on_disk(tmp_path / "empty") == {b"a": b"1"}


def test_a_file_that_others_may_read_becomes_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(encode_line(HEADER))
    path.chmod(0o644)
    opened(path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"something else\n",
        b"something else",
        encode_line(b'{"log":"test","format":2}') + encode_line(b"a=1"),
        b"\0" * 100,
    ],
)
def test_a_file_with_another_header_holds_nothing_and_is_replaced(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    owner = opened(path)
    assert owner.state == {}
    assert path.read_bytes() == content
    assert owner.set(b"b", b"2")
    assert on_disk(path) == {b"b": b"2"}


def test_the_header_that_was_found_is_reported(tmp_path: Path) -> None:
    other = b'{"boot":"yesterday"}'
    found = parse(io.BytesIO(encode_line(other) + encode_line(b"a=1")), header=HEADER)
    assert found == Content(header=other)


def test_a_body_with_a_newline_is_refused() -> None:
    with pytest.raises(ValueError, match="newline"):
        encode_line(b"a\nb")


LINES = [HEADER, b"a=1", b"b=2", b"", b"a", b"c=33"]


@given(cut=st.integers(0, sum(len(encode_line(line)) for line in LINES)))
def test_a_file_cut_at_any_byte_keeps_its_whole_lines(cut: int) -> None:
    data = b"".join(map(encode_line, LINES))[:cut]
    whole = []
    end = 0
    for line in LINES:
        end += len(encode_line(line))
        # The newline alone may be missing.
        if cut >= end - 1:
            whole.append(line)
    found = parse(io.BytesIO(data), header=HEADER)
    assert found.header == (whole[0] if whole else None)
    assert list(found.lines) == whole[1:]
    assert found.damaged == 0
    covered = sum(len(encode_line(line)) for line in whole)
    assert found.torn_bytes == max(0, cut - covered)


@given(at=st.integers(0), value=st.integers(0, 255))
def test_a_changed_byte_costs_the_lines_it_touches_alone(at: int, value: int) -> None:
    data = bytearray(b"".join(map(encode_line, LINES)))
    at %= len(data)
    data[at] = value
    found = parse(io.BytesIO(bytes(data)), header=HEADER)
    starts = [0]
    for line in LINES:
        starts.append(starts[-1] + len(encode_line(line)))
    hit = max(n for n, start in enumerate(starts) if start <= at)
    if hit == 0 and found.header != HEADER:
        assert found.lines == ()
        return
    assert all(line in LINES for line in found.lines)
    # A newline that is gone joins two lines.
    sound = [line for n, line in enumerate(LINES) if n and n not in (hit, hit + 1)]
    assert [line for line in found.lines if line in sound] == sound


@given(cut=st.integers(0, 200))
@settings(deadline=None)
def test_what_is_appended_behind_a_torn_line_holds(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    data = b"".join(map(encode_line, LINES))
    path.write_bytes(data[: cut % len(data)])
    owner = opened(path)
    before = dict(owner.state)
    assert owner.set(b"new", b"1")
    owner.log.close()
    assert on_disk(path) == {**before, b"new": b"1"}


def short(
    monkeypatch: pytest.MonkeyPatch, room: Callable[[], int], *, error: int = errno.ENOSPC
) -> None:
    """Let writes take only as many bytes as there is room for."""
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if room() <= 0:
            raise OSError(error, os.strerror(error))
        return real(descriptor, bytes(data)[: room()])

    monkeypatch.setattr(os, "write", write)


def test_a_full_disk_is_reported_once_and_the_state_written_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "log"
    owner = opened(path)
    owner.set(b"a", b"1")
    sound = path.read_bytes()
    with monkeypatch.context() as patched:
        short(patched, lambda: 5)
        assert not owner.set(b"b", b"2")
        # A part of the line was written, and is cut off.
        assert path.read_bytes() == sound
        assert "only 5 of" in owner.log.problem
        short(patched, lambda: 0)
        owner.now += 10
        assert not owner.set(b"c", b"3")
        assert owner.log.problem == f"{path} cannot be written: No space left on device"
        assert owner.log.failures == 2
    owner.now += 0.1
    assert not owner.set(b"d", b"4")  # nothing is tried during the pause
    assert owner.log.failures == 2
    assert path.read_bytes() == sound
    owner.now += 0.2
    assert owner.log.append([])
    assert on_disk(path) == owner.state == {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}
    assert owner.log.problem == ""
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "a restart forgets" in caplog.text
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_stays_full_is_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = opened(tmp_path / "log")
    owner.set(b"k", b"0")
    for _ in range(2):  # what worked once begins with short pauses again
        began = owner.now
        tried: list[float] = []
        with monkeypatch.context() as patched:
            short(patched, lambda: 0)
            while owner.now < began + 20:
                before = owner.log.failures
                assert not owner.set(b"k", b"%d" % len(tried))
                if owner.log.failures > before:
                    tried.append(round(owner.now - began, 3))
                owner.now += 1 / 64  # exact in binary
        assert tried == pytest.approx([0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3, 16.3], abs=0.2)
        assert owner.log.retry_in_s == pytest.approx(1.3, abs=0.2)
        owner.now += 5
        assert owner.set(b"k", b"last")
        assert on_disk(tmp_path / "log") == {b"k": b"last"}
        assert owner.log.retry_in_s is None


def test_the_newest_files_are_kept_aside_under_names_that_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    for beside in ("log.unread-x", "log.unread-0", "log.unread-2.gz", "catalog.unread-9"):
        (tmp_path / beside).touch()
    for number in range(1, 7):
        path.write_bytes(b"other %d" % number)
        owner = opened(path)
        assert owner.log.keep_aside() == f"{path}.unread-{number}"
        # A start that was killed here leaves both names; the next one takes no further name.
        assert owner.log.keep_aside() == f"{path}.unread-{number}"
        assert owner.log.rewrite()
    assert files_aside(str(path)) == [f"{path}.unread-{number}" for number in (3, 4, 5, 6)]
    assert [Path(one).read_bytes() for one in files_aside(str(path))] == [
        b"other 3", b"other 4", b"other 5", b"other 6"
    ]  # fmt: skip
    assert "unread-2 is removed: the newest 4 such files are kept" in caplog.text
    assert len(list(tmp_path.iterdir())) == 9


def test_a_rewrite_for_which_there_is_no_room_does_not_stop_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    owner = Owner(path, rewrite_bytes=1000)
    for number in range(20):
        owner.set(b"k", b"%d" % number)
    rename = os.rename

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    for number in range(200):
        assert owner.set(b"k", b"%d" % number)
    assert path.stat().st_size > 2000
    assert owner.log.problem == ""
    assert not path.with_name("log.new").exists()
    monkeypatch.setattr(os, "rename", rename)
    for number in range(100):
        assert owner.set(b"k", b"%d" % number)
    assert path.stat().st_size < 2000


def test_history_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    owner = Owner(path, rewrite_bytes=10_000)
    largest = 0
    for number in range(3000):
        assert owner.set(b"k%d" % (number % 100), b"x" * 20)
        largest = max(largest, path.stat().st_size)
    live = sum(len(body) + 10 for body in owner.live())
    assert 10_000 < largest <= 2 * live + 10_000 + 100
    assert on_disk(path) == owner.state


@pytest.mark.parametrize("entries", [100, 1000, 10_000])
def test_an_append_costs_the_same_however_large_the_state(tmp_path: Path, entries: int) -> None:
    owner = Owner(tmp_path / "log", rewrite_bytes=1000)
    passes = 0
    live = owner.live

    def counted() -> Iterator[bytes]:
        for body in live():
            nonlocal passes
            passes += 1
            yield body

    owner.log._live = counted
    for number in range(entries):
        owner.set(b"k%d" % number, b"v")
    growing = passes
    assert growing < 8 * entries
    for number in range(entries):
        owner.set(b"k%d" % number, b"w")
    for number in range(entries):
        owner.set(b"k%d" % number, b"x")
    assert passes - growing < 8 * 2 * entries


def test_a_log_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    owner = Owner(path, rewrite_bytes=1000, max_bytes=20_000)
    accepted = 0
    while owner.set(b"k%d" % accepted, b"x" * 80):
        accepted += 1
        assert accepted < 1000
    assert path.stat().st_size <= 20_000
    assert accepted > 80
    assert "more than" in owner.log.problem or "larger than" in owner.log.problem
    for number in range(accepted // 2, accepted + 1):
        owner.remove(b"k%d" % number)
    owner.now += 10
    assert owner.log.append([])
    assert on_disk(path) == owner.state
    assert owner.log.problem == ""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


def link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(encode_line(HEADER) + encode_line(b"a=1"))
    path.symlink_to(target)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("make", [fifo, huge, link, Path.mkdir, unix_socket])
def test_what_is_no_log_is_refused_at_once_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "log"
    make(path)
    before = path.lstat()
    owner = Owner(path)
    with pytest.raises(OSError, match="move it away"):
        owner.log.open()
    with pytest.raises(OSError, match="move it away"):
        read(str(path), header=HEADER)
    assert not owner.set(b"b", b"2")
    assert not owner.log.rewrite()
    assert "move it away" in owner.log.problem
    after = path.lstat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    path.rename(tmp_path / "moved")
    owner.now += 10
    assert owner.set(b"c", b"3")
    assert on_disk(path) == {b"b": b"2", b"c": b"3"}


@pytest.mark.parametrize("make", [fifo, link, Path.mkdir])
def test_what_is_in_the_new_files_place_is_an_error_and_not_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "log"
    make(path.with_name("log.new"))
    owner = opened(path)
    assert not owner.set(b"a", b"1")
    assert owner.log.problem
    assert not path.exists()
    kinds = {one.name for one in tmp_path.iterdir()}
    assert "log.new" in kinds


def test_a_removed_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    owner = opened(path)
    owner.set(b"a", b"1")
    path.unlink()
    assert owner.set(b"b", b"2")
    assert on_disk(path) == {b"a": b"1", b"b": b"2"}


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    old = opened(path)
    old.set(b"a", b"1")
    new = opened(path)
    old.set(b"b", b"2")
    new.set(b"c", b"3")
    old.set(b"d", b"4")
    assert on_disk(path) == {b"a": b"1", b"b": b"2", b"c": b"3", b"d": b"4"}
    # A rewrite by one of them moves the other to the new file.
    new.state = on_disk(path)
    assert new.log.rewrite()
    assert old.set(b"e", b"5")
    assert new.set(b"f", b"6")
    assert set(on_disk(path)) == {b"a", b"b", b"c", b"d", b"e", b"f"}


def test_a_line_that_another_process_was_writing_is_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    data = b"".join(map(encode_line, [HEADER, b"a=1"]))
    path.write_bytes(data[:-4])
    owner = opened(path)
    assert owner.state == {}
    with path.open("ab") as predecessor:
        predecessor.write(data[-4:])
    owner.set(b"b", b"2")
    assert on_disk(path) == {b"a": b"1", b"b": b"2"}


def test_a_predecessor_never_rewrites(tmp_path: Path) -> None:
    path = tmp_path / "log"
    old = Owner(path, rewrite_bytes=100)
    old.set(b"a", b"1")
    new = opened(path)
    old.log.stop_rewriting()
    for number in range(100):
        new.set(b"b", b"%d" % number)
        assert old.set(b"a", b"%d" % number)
    assert on_disk(path) == {b"a": b"99", b"b": b"99"}
    path.unlink()
    assert not old.set(b"a", b"100")
    assert not path.exists()
    new.set(b"b", b"100")
    old.now += 10
    assert old.set(b"a", b"101")
    assert old.log.problem == ""
    assert on_disk(path) == {b"a": b"101", b"b": b"100"}


def test_of_two_processes_one_writes_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    owner = opened(path)
    owner.set(b"a", b"1")
    with path.with_name("log.new").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"half")
        other.flush()
        assert not owner.log.rewrite()
        assert path.with_name("log.new").read_bytes() == b"half"
    owner.now += 10
    assert owner.set(b"b", b"2")
    assert on_disk(path) == {b"a": b"1", b"b": b"2"}


class AnyFault(RuleBasedStateMachine):
    """An owner that sets, removes, restarts and is killed, on a disk that refuses at any byte."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="koord-log-")
        self.path = Path(self.folder.name) / "log"
        self.owner = Owner(self.path, rewrite_bytes=200)
        self.room: int | None = None
        self.real = os.write
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(os, "write", self.write)
        self.sound: list[dict[bytes, bytes]] = [{}]
        """The states that the file may hold: the last one written, and any since."""

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self.real(descriptor, data)
        part = bytes(data)[: self.room]
        self.room -= len(part)
        if not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(descriptor, part)

    def noted(self, written: bool) -> None:
        self.sound = [dict(self.owner.state)] if written else [*self.sound, dict(self.owner.state)]

    @rule(key=st.sampled_from([b"a", b"b", b"c"]), value=st.binary(max_size=40))
    def set(self, key: bytes, value: bytes) -> None:
        self.noted(self.owner.set(key, value.replace(b"\n", b"")))

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def remove(self, key: bytes) -> None:
        self.noted(self.owner.remove(key))

    @rule(room=st.integers(0, 300))
    def fill_up(self, room: int) -> None:
        self.room = room

    @rule()
    def make_room(self) -> None:
        self.room = None

    @rule()
    def let_time_pass(self) -> None:
        self.owner.now += 10

    @rule()
    def delete_the_file(self) -> None:
        self.path.unlink(missing_ok=True)
        self.sound = [{}, *self.sound]

    @rule()
    def restart(self) -> None:
        self.owner.log.close()
        self.owner = Owner(self.path, rewrite_bytes=200)
        self.owner.state = state_of(self.owner.log.open())
        assert self.owner.state in self.sound
        self.sound = [dict(self.owner.state)]

    @rule(cut=st.integers(0, 60))
    def die_in_a_write(self, cut: int) -> None:
        """The process ends after a part of a line has reached the file."""
        if self.path.exists():
            with self.path.open("ab") as file:
                file.write(b"\n" + encode_line(b"half=" + b"x" * 60)[:cut])
        self.restart()

    @invariant()
    def the_file_holds_a_state_that_was(self) -> None:
        content = read(str(self.path), header=HEADER)
        assert state_of(content) in self.sound
        assert self.owner.log.problem or self.path.exists() is bool(content.header)

    def teardown(self) -> None:
        self.room = None
        self.owner.now += 10
        self.owner.log.append([])
        assert on_disk(self.path) == self.owner.state
        assert self.owner.log.problem == ""
        self.owner.log.close()
        self.patched.undo()
        self.folder.cleanup()


AnyFault.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyFault = AnyFault.TestCase
