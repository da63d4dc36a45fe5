from __future__ import annotations

import pytest

from demo.table import render

HEADER = ("container", "value", "why")


def test_columns_line_up_and_a_repeated_first_cell_is_blank() -> None:
    rows = [("web", "cpu.shares", "asked"), ("web", "cpuset.cpus", "pool"), ("batch", "x", "y")]
    lines = render(HEADER, rows, width=80).splitlines()
    assert lines[2:] == [
        "web        cpu.shares   asked",
        "           cpuset.cpus  pool",
        "batch      x            y",
    ]


def test_the_last_column_wraps_within_the_width() -> None:
    text = render(HEADER, [("web", "cpu.shares", "because " * 20)], width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert text.count("because") == 20


def test_a_narrow_terminal_still_gets_a_readable_last_column() -> None:
    text = render(HEADER, [("web", "cpu.shares", "several words that need room")], width=10)
    assert "several words that need" in text


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a cell for each column"):
        render(HEADER, [("web", "cpu.shares")], width=80)
