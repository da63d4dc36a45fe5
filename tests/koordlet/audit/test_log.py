"""The audit log on disk: its lines, their bounds, and what a full disk costs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from koordlet.audit.log import CURRENT, AuditLog, Kind, files


def _log(tmp_path: Path, **more: Any) -> AuditLog:
    return AuditLog(
        str(tmp_path), verbosity=3, **{"most_bytes": 1 << 20, "clock": lambda: 1e9, **more}
    )


def _lines(tmp_path: Path, name: str = CURRENT) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (tmp_path / name).read_bytes().splitlines()]


def test_a_line_has_upstreams_fields_and_leaves_empty_ones_out(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.add(0, Kind.POD, "evicted", "memory is short", namespace="default", name="batch-1")
    log.flush()
    [line] = _lines(tmp_path)
    created_at = line.pop("createdAt")
    assert created_at.startswith("2001-09-")
    assert line == {
        "type": "pod",
        "namespace": "default",
        "name": "batch-1",
        "reason": "evicted",
        "message": "memory is short",
    }
    assert (tmp_path / CURRENT).stat().st_mode & 0o777 == 0o600


def test_entries_above_the_verbosity_are_left_out_and_zero_keeps_all(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.add(3, Kind.NODE, "kept", "")
    log.add(4, Kind.NODE, "left out", "")
    log.flush()
    assert [line["reason"] for line in _lines(tmp_path)] == ["kept"]
    all_of_them = AuditLog(str(tmp_path / "all"), verbosity=0, most_bytes=1 << 20)
    all_of_them.add(5, Kind.NODE, "kept", "")
    all_of_them.flush()
    assert [line["reason"] for line in _lines(tmp_path / "all")] == ["kept"]


def test_files_stay_within_their_size_and_number_and_the_oldest_go(tmp_path: Path) -> None:
    (tmp_path / "audit-of-another-program.log").write_text("kept")
    log = _log(tmp_path, file_bytes=400, most_bytes=1600)
    for number in range(100):
        log.add(1, Kind.NODE, "r", f"entry {number}")
        log.flush()
    names = files(str(tmp_path))
    assert len(names) <= 4
    assert all((tmp_path / name).stat().st_size < 600 for name in names)
    newest_first = [line["message"] for name in names for line in reversed(_lines(tmp_path, name))]
    assert newest_first == [f"entry {99 - index}" for index in range(len(newest_first))]
    assert len(newest_first) >= 8
    assert (tmp_path / "audit-of-another-program.log").read_text() == "kept"


def test_a_full_disk_loses_nothing_that_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _log(tmp_path)
    write = os.write
    full = True

    def limited(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)
    log.add(1, Kind.NODE, "first", "")
    log.flush()
    assert "No space left" in log.problem
    log.add(1, Kind.NODE, "second", "")
    full = False
    log.flush()
    assert log.problem == ""
    assert [line["reason"] for line in _lines(tmp_path)] == ["first", "second"]


def test_a_short_write_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _log(tmp_path)
    log.add(1, Kind.NODE, "whole", "")
    log.flush()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
    log.add(1, Kind.NODE, "cut", "")
    log.flush()
    monkeypatch.setattr(os, "write", write)
    assert [line["reason"] for line in _lines(tmp_path)] == ["whole"]
    log.flush()
    assert [line["reason"] for line in _lines(tmp_path)] == ["whole", "cut"]


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / CURRENT).symlink_to(elsewhere)
    log = _log(tmp_path)
    log.add(1, Kind.NODE, "r", "")
    log.flush()
    assert log.problem
    assert elsewhere.read_text() == "kept"


def test_what_waits_for_a_disk_is_bounded_and_the_loss_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordlet.audit.log._MOST_WAITING", 3)
    log = _log(tmp_path)
    for number in range(5):
        log.add(1, Kind.NODE, f"r{number}", "")
    log.flush()
    assert log.lost == 2
    assert [line["reason"] for line in _lines(tmp_path)] == ["r2", "r3", "r4"]
