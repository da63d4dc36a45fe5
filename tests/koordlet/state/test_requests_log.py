"""The requests log over kills: a request that was kept is known after the next start."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hooks.subject import Requested
from koordlet.state.requests_log import Remembered, RequestsLog, load_requests
from service import append_log, staged_lines


def request(quota_us: int) -> Remembered:
    delivered = Requested(cfs_quota_us=quota_us // 2)
    return Remembered(Requested(cfs_quota_us=quota_us), hooked=True, delivered=delivered)


class Life:
    """One process with its log; it ends without a word."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.existing = load_requests(str(path))
        self.log = RequestsLog(str(path), lambda: self.existing)

    def keep(self, container_id: str, quota_us: int) -> None:
        self.existing[container_id] = request(quota_us)
        self.log.keep(container_id, *self.existing[container_id])

    def logged(self) -> int:
        """The number of requests in the log itself."""
        return self.path.read_bytes().count(b'"id"')


def test_a_request_outlasts_a_kill_before_the_log_has_it(tmp_path: Path) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    life.keep("a", 100_000)
    assert life.logged() == 0
    assert load_requests(str(life.path)) == {"a": request(100_000)}


def test_a_staged_request_is_newer_than_the_logs(tmp_path: Path) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    life.keep("a", 100_000)
    life.log.write()
    assert life.logged() == 1
    life.keep("a", 50_000)
    assert load_requests(str(life.path)) == {"a": request(50_000)}
    life.log.write()
    life.keep("a", 80_000)
    life.log.write()
    # What is staged no longer must not come back.
    assert load_requests(str(life.path)) == {"a": request(80_000)}


def test_a_kill_between_the_log_and_the_staged_lines_changes_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    life.keep("a", 100_000)
    life.keep("a", 50_000)
    staged = Path(f"{life.path}.staged")
    before = staged.read_bytes()
    life.log.write()
    staged.write_bytes(before)
    assert load_requests(str(life.path)) == {"a": request(50_000)}


def test_staged_requests_of_an_earlier_process_reach_the_log(tmp_path: Path) -> None:
    first = Life(tmp_path / "requests.log")
    first.log.rewrite()
    first.keep("a", 100_000)
    for _ in range(2):  # killed before it wrote anything
        assert Life(first.path).existing == {"a": request(100_000)}
    third = Life(first.path)
    third.keep("b", 200_000)
    third.log.write()
    assert third.logged() == 2
    assert load_requests(str(first.path)) == {"a": request(100_000), "b": request(200_000)}
    third.keep("a", 50_000)
    assert load_requests(str(first.path))["a"] == request(50_000)


def test_a_full_list_ends_what_is_staged_of_ended_containers(tmp_path: Path) -> None:
    first = Life(tmp_path / "requests.log")
    first.log.rewrite()
    first.keep("a", 100_000)
    second = Life(first.path)
    second.existing = {"b": request(200_000)}
    second.log.rewrite()
    assert load_requests(str(first.path)) == second.existing


def test_more_requests_than_can_be_staged_are_in_the_log_before_the_reply(tmp_path: Path) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    for number in range(2000):
        life.keep(f"c{number}", 100_000)
    assert load_requests(str(life.path)) == life.existing
    life.log.write()
    assert life.logged() == 2000
    assert load_requests(str(life.path)) == life.existing


def test_without_staging_requests_are_in_the_log_before_the_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = tmp_path / "requests.log.staged"
    staged.mkdir()
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    for number in range(3):
        life.keep(f"c{number}", 100_000)
        assert life.logged() == number + 1
    (message,) = [one.message for one in caplog.records if "cannot be made" in one.message]
    assert message.endswith("requests are written during hooks")
    assert not life.log.problem
    staged.rmdir()
    life.keep("c3", 100_000)
    life.keep("c4", 100_000)
    assert life.logged() == 4
    assert load_requests(str(life.path)) == life.existing


def test_a_staged_file_of_another_size_costs_no_other_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Life(tmp_path / "requests.log")
    first.log.rewrite()
    first.keep("a", 100_000)
    first.log.write()
    staged = Path(f"{first.path}.staged")
    staged.write_bytes(b"\0" * (staged_lines.SIZE + 1))
    second = Life(first.path)
    assert second.existing == {"a": request(100_000)}
    assert f"cannot read {staged}" in caplog.text
    second.log.rewrite()
    assert staged.stat().st_size == staged_lines.SIZE


def test_what_is_staged_stays_while_the_log_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    life.keep("a", 100_000)
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patched.setattr(append_log.AppendLog, "_append", full)
        life.log.write()
        assert "No space left" in life.log.problem
        life.keep("b", 200_000)
    assert life.logged() == 0
    assert load_requests(str(life.path)) == life.existing
    life.log.rewrite()
    assert life.logged() == 2
    assert load_requests(str(life.path)) == life.existing


def test_a_clean_end_leaves_nothing_staged(tmp_path: Path) -> None:
    life = Life(tmp_path / "requests.log")
    life.log.rewrite()
    life.keep("a", 100_000)
    life.log.close()
    assert life.logged() == 1
    assert Path(f"{life.path}.staged").read_bytes().count(b'"id"') == 0
