"""Pages of the audit log: every entry once, newest first, whatever happens between two pages."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.audit.log import CURRENT, AuditLog, Kind
from koordlet.audit.pages import Expired, Pages
from koordlet.exposition.audit_pages import answer
from service.http_server import Request


def _write(directory: Path, messages: list[str], *, file_bytes: int = 1 << 20) -> None:
    log = AuditLog(str(directory), verbosity=0, most_bytes=1 << 30, file_bytes=file_bytes)
    for message in messages:
        log.add(1, Kind.NODE, "r", message)
        log.flush()


def _all(pages: Pages, size: int) -> list[str]:
    found: list[str] = []
    token = ""
    while True:
        page = pages.page(size, token)
        found += [entry.message for entry in page.entries]
        if not page.token:
            return found
        token = page.token


@given(
    count=st.integers(0, 40),
    size=st.integers(1, 9),
    file_bytes=st.integers(100, 900),
    chunk=st.integers(1, 300),
)
def test_every_entry_comes_once_and_the_newest_first(
    count: int, size: int, file_bytes: int, chunk: int
) -> None:
    messages = [f"{number} " + "x" * (number * 7 % 90) for number in range(count)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("koordlet.audit.pages._CHUNK_BYTES", chunk)
        patch.setattr("koordlet.audit.log.time.strftime", _numbered())
        _write(Path(folder), messages, file_bytes=file_bytes)
        assert _all(Pages(folder, most_readers=4), size) == messages[::-1]


def _numbered() -> object:
    """Times that differ between rotations, as rotations of a real log do."""
    calls = iter(range(8000))

    def formatted(form: str, when: object) -> str:
        return f"{2000 + next(calls)}-01-01-00-00-00" if form.endswith("-%S") else "+0000"

    return formatted


def test_a_rotation_between_two_pages_repeats_and_skips_nothing(tmp_path: Path) -> None:
    _write(tmp_path, [f"old {number}" for number in range(6)])
    pages = Pages(str(tmp_path), most_readers=4)
    first = pages.page(2)
    (tmp_path / CURRENT).rename(tmp_path / "audit-2026-01-01-00-00-00-0.log")
    _write(tmp_path, ["new"])
    second = pages.page(9, first.token)
    messages = [entry.message for entry in (*first.entries, *second.entries)]
    assert messages == ["old 5", "old 4", "old 3", "old 2", "old 1", "old 0"]


def test_a_line_that_is_no_entry_is_left_out(tmp_path: Path) -> None:
    _write(tmp_path, ["one"])
    with (tmp_path / CURRENT).open("ab") as file:
        file.write(b"{half\n")
    _write(tmp_path, ["two"])
    assert _all(Pages(str(tmp_path), most_readers=1), 5) == ["two", "one"]


def test_readers_are_bounded_in_number_and_in_idle_time(tmp_path: Path) -> None:
    _write(tmp_path, ["a", "b", "c"])
    now = 0.0
    pages = Pages(str(tmp_path), most_readers=2, clock=lambda: now)
    tokens = [pages.page(1).token for _ in range(3)]
    with pytest.raises(Expired):
        pages.page(1, tokens[0])
    assert pages.page(1, tokens[1]).entries[0].message == "b"
    now = 601.0
    with pytest.raises(Expired):
        pages.page(1, tokens[2])
    with pytest.raises(Expired):
        pages.page(1, "unknown")


def _ask(pages: Pages, accept: str = "", **query: str) -> tuple[int, str, dict[str, str], bytes]:
    request = Request("GET", "/events", query, b"", accept)
    response = answer(pages, request, most=3)
    return response.status, response.content_type, dict(response.headers), response.body


def test_the_answers_of_the_endpoint(tmp_path: Path) -> None:
    _write(tmp_path, ["a", "b"])
    pages = Pages(str(tmp_path), most_readers=4)
    status, kind, headers, body = _ask(pages, size="1")
    assert (status, kind) == (200, "text/plain; charset=utf-8")
    assert b'"message":"b"' in body and body.count(b"\n") == 1
    status, kind, headers, body = _ask(pages, size="3", pageToken=headers["Next-Page-Token"])
    assert b'"message":"a"' in body and "Next-Page-Token" not in headers
    status, kind, _, body = _ask(pages, accept="application/json, */*", size="3")
    assert kind == "application/json; charset=utf-8"
    assert body.startswith(b'{"NextPageToken":"","Events":[{')
    assert _ask(pages, size="4")[0] == 400
    assert _ask(pages, size="-1")[0] == 400
    assert _ask(pages, size="1", pageToken="unknown")[0] == 409


def test_no_log_yet_is_an_empty_page(tmp_path: Path) -> None:
    assert _all(Pages(str(tmp_path / "none"), most_readers=1), 5) == []
