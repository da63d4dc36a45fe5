"""A table for people: columns as wide as their content, the last one wrapped to the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby, zip_longest

_GAP = "  "
_LEAST_LAST_COLUMN = 24
"""Characters of the last column at least, however narrow the terminal."""


def render(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> str:
    """Return the table as text. A first cell that repeats the one above is left blank.

    Every row has as many cells as the header. width: columns of the terminal.
    """
    if any(len(row) != len(header) for row in rows):
        raise ValueError("every row needs a cell for each column")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header) - 1)]
    room = max(_LEAST_LAST_COLUMN, width - sum(widths) - len(_GAP) * len(widths))
    last = min(room, max(len(row[-1]) for row in (header, *rows)))
    lines = [
        *_lines(header, widths, last),
        *_lines([*("-" * w for w in widths), "-" * last], widths, last),
    ]
    for _, group in groupby(rows, key=lambda row: row[0]):
        for number, row in enumerate(group):
            lines += _lines(row if number == 0 else ["", *row[1:]], widths, last)
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int], last: int) -> list[str]:
    *cells, long = row
    wrapped = textwrap.wrap(long, last, break_on_hyphens=False) or [""]
    lines = []
    for parts in zip_longest(*([cell] for cell in cells), wrapped, fillvalue=""):
        padded = [part.ljust(size) for part, size in zip(parts, [*widths, 0], strict=True)]
        lines.append(_GAP.join(padded).rstrip())
    return lines
