"""Tables, headings, times and lengths of time for people."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence

Row = Sequence[object]

_GAP = "  "
_BELOW = "    "
_NARROWEST_LAST = 20
"""Characters of the last column at least, however narrow the terminal."""
_READABLE = 40
"""Characters that the last column should have; with fewer it stands below the others."""


def table(header: Row, rows: Iterable[Row], *, width: int | None = None) -> str:
    """Return aligned columns; the last one wraps within the terminal.

    If the others leave too little room for it, it follows on lines of its own. An empty last column
    takes no room.
    """
    cells = [[cell(value) for value in row] for row in (header, *rows)]
    if len(cells) == 1:
        return ""
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    width = width or shutil.get_terminal_size((120, 40)).columns
    left = sum(widths) + len(_GAP) * len(widths)
    cramped = width - left < max(_NARROWEST_LAST, min(_READABLE, width // 3))
    below = bool(widths) and cramped and any(row[-1] for row in cells)
    lines = []
    for row in cells:
        start = _GAP.join(text.ljust(size) for text, size in zip(row, widths, strict=False))
        if below:
            lines.append(_GAP.join(text for text in row[:-1] if text))
            lines += _wrapped(row[-1], width, indent=_BELOW)
            continue
        start += _GAP if widths else ""
        last = _wrapped(row[-1], width - left) or [""]
        lines.append((start + last[0]).rstrip())
        lines += [(" " * left + more).rstrip() for more in last[1:]]
    return "\n".join(lines)


def _wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(width, _NARROWEST_LAST),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def heading(text: str) -> str:
    """Return a heading, in bold on a terminal that supports it."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return f"\033[1m{text}\033[0m" if terminal and not plain else text


def section(title: str, header: Row, rows: Iterable[Row]) -> str:
    """Return a table below its heading."""
    return f"{heading(title)}\n{table(header, rows)}"


def when(seconds: float) -> str:
    """Return a time of day, or the date when it is long ago."""
    if not seconds:
        return "never"
    form = "%H:%M:%S" if time.time() - seconds < 86400 else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(seconds))


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    left, parts = int(seconds), []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size}{unit}")
            left %= size
    return "".join(parts[:2]) or f"{seconds:.1f}s"


def cell(value: object) -> str:
    """Return a value as a table shows it: without control characters, - for none."""
    if value is None:
        return "-"
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]
