"""The tables of koordctl: headings, columns, hostile cells, durations."""

from __future__ import annotations

import sys

import pytest

from koordctl import tables


@pytest.mark.parametrize(
    ("environment", "bold"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_headings_are_bold_if_the_terminal_supports_it(
    environment: dict[str, str], bold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tables.heading("x") == "x"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert (tables.heading("x") != "x") is bold


def test_tables_align_and_wrap_their_last_column() -> None:
    shown = tables.table(
        ("A", "B", "WHY"), [("x", 1, "word " * 30), ("longer", None, "y")], width=60
    )
    lines = shown.splitlines()
    assert lines[0] == "A       B  WHY"
    assert lines[-1] == "longer  -  y"
    assert all(len(line) <= 60 for line in lines)


def test_a_last_column_without_room_follows_below_its_row() -> None:
    path = "/a/very/long/path/" * 4
    shown = tables.table(("FILE", "OBJECT", "PROBLEM"), [(path, "", "word " * 20)], width=80)
    first, header_of_last, row, *rest = shown.splitlines()
    assert (first, header_of_last, row) == ("FILE  OBJECT", "    PROBLEM", path)
    assert len(rest) == 2
    assert all(line.startswith("    word") and len(line) <= 80 for line in rest)


@pytest.mark.parametrize(("width", "beside"), [(60, True), (49, False), (150, True), (69, False)])
def test_the_last_column_stays_beside_the_others_with_a_third_of_the_width_or_forty(
    width: int, beside: bool
) -> None:
    """At 150 characters a third would be 50; forty are enough. None has less than twenty."""
    others = {60: 38, 49: 28, 150: 106, 69: 45}[width]
    shown = tables.table(("A", "WHY"), [("x" * others, "y")], width=width).splitlines()
    assert (len(shown) == 2) is beside


def test_a_hostile_cell_stays_in_its_cell() -> None:
    shown = tables.table(("A", "B"), [("x\n\x1b[2J", "y\r\nz")])
    assert len(shown.splitlines()) == 2
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5s"), (61, "1m1s"), (3600, "1h"), (90061, "1d1h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
