"""The tables of koordctl: headings, columns, hostile cells, durations."""

from __future__ import annotations

import sys
import time

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
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (0.5, "0.5s"),
        (1, "1s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m1s"),
        (3599, "59m59s"),
        (3600, "1h"),
        (86399, "23h59m"),
        (86400, "1d"),
        (90061, "1d1h"),
        (180_000, "2d2h"),
    ],
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("age", "text"),
    [(0, "01:46:40"), (86399, "01:46:41"), (86400, "2001-09-08 01:46"), (-60, "01:47:40")],
)
def test_a_time_of_the_last_day_is_a_time_of_day_and_else_a_date(
    age: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    assert tables.when(now - age) == text


def test_what_never_was_has_no_time() -> None:
    assert tables.when(0.0) == "never"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ("", ""), (0, "0"), (False, "False"), ("a b", "a b"), ("a\tb", "a\\tb"),
     ("é", "é"), ("it's\n", "it's\\n")],
)  # fmt: skip
def test_a_cell_is_one_line_of_printable_characters(value: object, text: str) -> None:
    assert tables.cell(value) == text


def test_a_table_without_rows_is_nothing_and_a_section_keeps_its_heading() -> None:
    assert tables.table(("A", "B"), []) == ""
    assert tables.section("some", ("A",), [("x",)]) == "some\nA\nx"


def _shown(header: tuple[str, ...], *rows: tuple[object, ...], width: int) -> list[str]:
    return tables.table(header, rows, width=width).split("\n")


def test_further_lines_of_the_last_column_stand_below_its_first() -> None:
    assert _shown(("A", "WHY"), ("x", "one two three four five"), ("yy", ""), width=24) == [
        "A   WHY",
        "x   one two three four",
        "    five",
        "yy",
    ]


def test_a_word_longer_than_the_line_is_broken_but_not_at_its_hyphens() -> None:
    assert _shown(("WHY",), (f"{'a' * 18}-bcd",), width=20) == ["WHY", f"{'a' * 18}-b", "cd"]
    assert _shown(("WHY",), ("aaaa bbbb-cccccccccccc d",), width=20) == [
        "WHY",
        "aaaa",
        "bbbb-cccccccccccc d",
    ]


def test_below_its_row_a_last_column_has_the_whole_width() -> None:
    others = "x" * 30
    assert _shown(("A", "B", "WHY"), (others, "", "one " * 12), ("y", "z", ""), width=36) == [
        "A  B",
        "    WHY",
        others,
        "    one one one one one one one one",
        "    one one one one",
        "y  z",
    ]


def test_an_empty_last_column_takes_no_room_also_in_a_narrow_terminal() -> None:
    others = "x" * 30
    assert _shown(("A", ""), (others, ""), width=30) == ["A", others]


def test_however_narrow_the_terminal_twenty_characters_are_shown() -> None:
    assert _shown(("A", "WHY"), ("x", "one two three four five"), width=5) == [
        "A",
        "    WHY",
        "x",
        "    one two three",
        "    four five",
    ]


@pytest.mark.parametrize(
    ("columns", "width"), [("50", 50), ("100", 100), (None, 120)], ids=["50", "100", "unknown"]
)
def test_a_table_is_as_wide_as_the_terminal(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the output is no terminal and the environment is silent, 120."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    else:
        monkeypatch.setattr("os.get_terminal_size", _no_terminal)
    shown = tables.table(("WHY",), [("y" * 400,)])
    assert max(map(len, shown.splitlines())) == width


def _no_terminal(_: int) -> object:
    raise OSError
