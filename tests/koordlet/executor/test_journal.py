"""The journal keeps originals over crashes, torn lines, full disks and reboots."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from apis.cpuset import CpuSet
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Record, RuntimeValues
from linux.resources import Resource
from service.append_log import encode_line
from tests.koordlet.executor.bed import fill_disk
from tests.simulated.kernel import Clock

QUOTA, CPUS = Resource.CPU_CFS_QUOTA, Resource.CPUSET_CPUS


def journal_at(path: Path, clock: Clock) -> Journal:
    return Journal(str(path), boot="b1", monotonic=lambda: clock.now)


def record(number: int = 1, original: str = "100000") -> Record:
    return Record(place=f"kubepods/pod{number}", inode=number, resource=QUOTA, original=original)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path, boot="b1")
    journal.update([record(1), record(2).with_ours("5", "6")])
    journal.update(forget=[record(1).record_key])
    # No close: a killed process does not close either.
    again = Journal(path, boot="b1")
    assert again.records() == [record(2).with_ours("5", "6")]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_torn_last_line_loses_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(str(path), boot="b1").update([record(1), record(2)])
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        journal = Journal(str(path), boot="b1")
        assert journal.get(*record(1).record_key) == record(1)
        # What follows a torn line is not swallowed by it.
        journal.update([record(3)])
        assert Journal(str(path), boot="b1").get(*record(3).record_key) == record(3)


@pytest.mark.parametrize(
    "garbage", [b"\xff\xfe\n", b"{}\n", encode_line(b'{"record":{"place":1}}'), encode_line(b"{}")]
)
def test_garbage_is_reported_and_skipped(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    Journal(str(path), boot="b1").update([record(1)])
    path.write_bytes(path.read_bytes() + garbage + garbage)
    journal = Journal(str(path), boot="b1")
    assert journal.records() == [record(1)]
    assert journal.lost == f"2 lines cannot be read; the file is kept as {path}.unread-1"
    assert journal.lost in caplog.text
    assert Path(f"{path}.unread-1").read_bytes().endswith(garbage + garbage)
    assert not Journal(str(path), boot="b1").lost  # the start has written the file again


NO_JOURNAL = "its first line is not that of a journal of this version"


@pytest.mark.parametrize(
    "content",
    [b"{}\n", b'{"boot":"b1"}\n', encode_line(b"other 1"), encode_line(b"koordlet journal 3")],
)
def test_a_file_that_is_no_journal_is_reported_and_kept(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = tmp_path / "journal", tmp_path / "journal.unread-1"
    path.write_bytes(content)
    path.chmod(0o644)
    journal = Journal(str(path), boot="b1")
    assert journal.lost == f"{NO_JOURNAL}; the file is kept as {kept}"
    assert f"{path}: {journal.lost}; originals that only it held" in caplog.text
    journal.update([record(1)])
    assert kept.read_bytes() == content
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    again = Journal(str(path), boot="b1")
    assert (again.lost, again.records()) == ("", [record(1)])
    # With the kept file back in its place, the version that wrote it restores its originals.
    assert kept.exists()


def test_an_empty_file_is_reported_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch()
    assert Journal(str(path), boot="b1").lost == NO_JOURNAL
    assert os.listdir(tmp_path) == ["journal"]


def test_a_journal_of_an_earlier_boot_is_not_kept(tmp_path: Path) -> None:
    """Its groups are gone."""
    path = str(tmp_path / "journal")
    Journal(path, boot="b1").update([record(1)])
    assert not Journal(path, boot="b2").lost
    assert os.listdir(tmp_path) == ["journal"]


def test_a_file_that_cannot_be_kept_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "journal", Clock()
    path.write_bytes(encode_line(b"other 1"))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        journal = journal_at(path, clock)
        clock.advance(1)
        with pytest.raises(JournalError, match="cannot be kept aside: No space left on device"):
            journal.update([record(1)])
        assert path.read_bytes() == encode_line(b"other 1")
    clock.advance(1)
    journal.update([record(2)])
    assert Path(f"{path}.unread-1").read_bytes() == encode_line(b"other 1")
    assert Journal(str(path), boot="b1").records() == [record(1), record(2)]


def test_reading_a_journal_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(str(path), boot="b1").update([record(1)])
    path.write_bytes(path.read_bytes() + b"garbage\n")
    before = path.read_bytes()
    read = Journal.read(str(path), boot="b1")
    assert (read.records(), read.lost) == ([record(1)], "1 lines cannot be read")
    read.update([record(2)])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["journal"]


def test_a_journal_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    """Its originals may become readable again; until then no kernel file may be written."""
    path, aside, clock = tmp_path / "journal", tmp_path / "aside", Clock()
    Journal(str(path), boot="b1").update([record(1)])
    path.rename(aside)
    path.mkdir()
    journal = journal_at(path, clock)
    with pytest.raises(JournalError, match="not a regular file"):
        journal.update([record(2)])
    path.rmdir()
    aside.rename(path)
    clock.advance(1)
    journal.update()
    assert {one.place for one in journal.records()} == {"kubepods/pod1", "kubepods/pod2"}
    assert {one.inode for one in Journal(str(path), boot="b1").records()} == {1, 2}


def test_another_boot_forgets_everything(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    Journal(path, boot="b1").update([record(1)])
    assert not Journal(path, boot="b2").records()


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), boot="b1")
    for number in range(20_000):
        journal.update([record(1, str(number))])
    assert path.stat().st_size < 1_200_000
    assert Journal(str(path), boot="b1").get(*record(1).record_key) == record(1, "19999")


def test_what_is_gathered_goes_to_the_file_with_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), boot="b1")
    journal.update([record(1), record(2)])
    before = path.read_bytes()
    with journal.gathering():
        journal.update([record(3)])
        journal.update(forget=[record(1).record_key, record(3).record_key])
        assert journal.records() == [record(2)]
    assert path.read_bytes() == before
    writes: list[int] = []

    def counted(descriptor: int, data: bytes, real: Callable[..., int] = os.write) -> int:
        writes.append(descriptor)
        return real(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", counted)
        journal.update([record(4)])
    assert len(writes) == 1
    assert Journal(str(path), boot="b1").records() == [record(2), record(4)]


def test_what_is_gathered_is_in_the_file_at_the_end_and_after_a_fault(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path, boot="b1")
    with pytest.raises(ZeroDivisionError), journal.gathering():
        journal.update([record(1)])
        _ = 1 / 0
    journal.update([record(2)])
    assert Journal(path, boot="b1").records() == [record(1), record(2)]
    with journal.gathering():
        journal.update(forget=[record(2).record_key])
    journal.close()
    assert Journal(path, boot="b1").records() == [record(1)]


def test_a_full_disk_is_noticed_by_the_update_after_gathering(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "journal"
    journal = journal_at(path, clock)
    with journal.gathering():
        journal.update([record(1)])
    fill_disk(journal)
    with journal.gathering():
        journal.update([record(3)])
        assert not journal.problem
    with pytest.raises(JournalError):
        journal.update()
    clock.now += 60
    journal.update([record(2)])
    assert journal_at(path, clock).records() == [record(1), record(3), record(2)]


def test_the_same_record_twice_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(str(path), boot="b1")
    journal.update([record(1)])
    size = path.stat().st_size
    journal.update([record(1)])
    assert path.stat().st_size == size


def test_after_a_failed_append_the_next_one_catches_up(tmp_path: Path) -> None:
    path, clock = tmp_path / "journal", Clock()
    journal = journal_at(path, clock)
    fill_disk(journal)
    with pytest.raises(JournalError, match="No space left"):
        journal.update([record(1)])
    clock.advance(1)
    journal.update([record(2)])
    again = Journal(str(path), boot="b1")
    assert {one.place for one in again.records()} == {"kubepods/pod1", "kubepods/pod2"}


def test_a_disk_that_stays_full_is_not_tried_with_every_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty updates a second for half a minute; none of them is lost."""
    path, clock, attempts = tmp_path / "journal", Clock(), 0
    journal = journal_at(path, clock)
    journal.update([record(0)])

    def full(descriptor: int, data: bytes) -> int:
        nonlocal attempts
        attempts += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for number in range(1, 601):
            with pytest.raises(JournalError, match="No space left on device"):
                journal.update([record(number)], forget=[record(number - 1).record_key])
            assert journal.records() == [record(number)]
            clock.advance(0.05)
    assert 5 < attempts < 15
    clock.advance(5)
    journal.update()
    assert not journal.problem
    assert Journal(str(path), boot="b1").records() == [record(600)]


def test_what_a_failure_kept_back_is_written_at_the_end(tmp_path: Path) -> None:
    """`koordlet restore` ends sooner than the pause."""
    path = tmp_path / "journal"
    journal = journal_at(path, Clock())
    journal.update([record(1), record(2)])
    fill_disk(journal)
    with pytest.raises(JournalError):
        journal.update(forget=[record(1).record_key])
    journal.close()
    assert Journal(str(path), boot="b1").records() == [record(2)]


def test_a_file_that_was_removed_is_made_again_with_all_that_it_had(tmp_path: Path) -> None:
    path, clock = tmp_path / "run" / "journal", Clock()
    path.parent.mkdir()
    journal = journal_at(path, clock)
    journal.update([record(1)])
    path.unlink()
    journal.update()
    assert Journal(str(path), boot="b1").records() == [record(1)]
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(JournalError, match="No such file or directory"):
        journal.update()
    path.parent.mkdir()
    clock.advance(1)
    journal.update()
    assert Journal(str(path), boot="b1").records() == [record(1)]


def test_a_full_disk_at_the_start_keeps_what_is_there_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "journal", Clock()
    Journal(str(path), boot="b1").update([record(1)])
    before = path.read_bytes()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        journal = journal_at(path, clock)
        assert "no kernel file is written until originals can be recorded" in caplog.text
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["journal"]
        with pytest.raises(JournalError):
            journal.update([record(2)])
    clock.advance(1)
    journal.update([record(3)])
    again = Journal(str(path), boot="b1")
    assert [one.inode for one in again.records()] == [1, 2, 3]


def test_deliveries_are_kept_until_they_are_records(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    journal = Journal(path, boot="b1")
    journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    journal.note_delivered("c1", CPUS, None, CpuSet.parse("0-1"))
    assert not journal.deliveries("c1")  # nothing is done before a pass takes it over
    journal.update()
    again = Journal(path, boot="b1")
    assert again.deliveries("c1")[QUOTA].requested == 200_000
    assert again.deliveries("c1")[CPUS].delivered == "0-1"
    again.forget_deliveries("c1")
    assert not Journal(path, boot="b1").deliveries("c1")


def test_our_newest_values_are_kept_and_bounded() -> None:
    kept = record().with_ours(*map(str, range(20)))
    assert kept.ours == ("14", "15", "16", "17", "18", "19")
    assert kept.with_ours("16").ours[-1] == "16"


def test_everything_survives_restart_after_restart(tmp_path: Path) -> None:
    """Each start writes the file again, from what the former start had written."""
    path = str(tmp_path / "journal")
    handed = RuntimeValues("c1", "kubepods/pod1/c1", 7, QUOTA, ("200000",), requested=100_000)
    journal = Journal(path, boot="b1")
    journal.update([record(1)], runtime_values=[handed])
    journal.note_delivered("c2", QUOTA, 1, 2)
    journal.update()
    for _ in range(3):
        journal = Journal(path, boot="b1")
        assert journal.records() == [record(1)]
        assert journal.all_runtime_values() == [handed]
        assert journal.deliveries("c2")[QUOTA].delivered == 2


@pytest.mark.parametrize("when", ["appending", "starting"])
def test_a_disk_that_takes_a_part_only_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nothing may be written to the kernel on the strength of half a line."""
    path, clock = tmp_path / "journal", Clock()
    journal = journal_at(path, clock)
    journal.update([record(1)])
    whole = os.write

    def half(descriptor: int, data: bytes) -> int:
        return whole(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    if when == "starting":
        before = path.read_bytes()
        journal = journal_at(path, clock)
        assert path.read_bytes() == before
    with pytest.raises(JournalError):
        journal.update([record(2)])
    monkeypatch.undo()
    clock.advance(1)
    journal.update()
    assert Journal(str(path), boot="b1").records() == [record(1), record(2)]
