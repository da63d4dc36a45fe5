"""Pressure stall information: how long tasks waited for CPU, memory or I/O. Pure.

A file has a line for `some` (at least one task waited) and, where the kernel has it, one for `full`
(all tasks that were not idle waited). The kernel shows no `full` for the CPU before 5.13, and only
zeros for the CPU of the whole machine. Format: docs/facts/kernel.md, "Pressure".
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

RESOURCES: Final = ("cpu", "memory", "io")
"""The resources with a file of their own: `<resource>.pressure`, or /proc/pressure/<resource>."""

_AS_WRITTEN: Final = re.compile(
    rb"some avg10=(\d+\.\d\d) avg60=(\d+\.\d\d) avg300=(\d+\.\d\d) total=(\d+)\n"
    rb"(?:full avg10=(\d+\.\d\d) avg60=(\d+\.\d\d) avg300=(\d+\.\d\d) total=(\d+)\n)?"
)
"""A file as kernels write it today. A node has a thousand of them, each read again and again: this
takes a third of the time of the search by names below, which is for kernels that write more."""


class Stall(NamedTuple):
    """A line. avg10, avg60, avg300: percent of the time, as moving averages over so many seconds.
    total_us: since the group exists."""

    avg10: float
    avg60: float
    avg300: float
    total_us: int


class Pressure(NamedTuple):
    """A file. full: None where the kernel has no such line."""

    some: Stall
    full: Stall | None


def parse_pressure(content: bytes) -> Pressure:
    """Parse a pressure file; ValueError names the line that is missing or bad.

    Lines and fields that are not known here are ignored: later kernels may add some.
    """
    if (written := _AS_WRITTEN.fullmatch(content)) is not None:
        ten, minute, five, total, *full = written.groups()
        some = Stall(float(ten), float(minute), float(five), int(total))
        if full[0] is None:
            return Pressure(some, None)
        ten, minute, five, total = full
        return Pressure(some, Stall(float(ten), float(minute), float(five), int(total)))
    found: dict[bytes, Stall] = {}
    for line in content.splitlines():
        kind, _, rest = line.partition(b" ")
        if kind in (b"some", b"full"):
            found[kind] = _stall(line, rest)
    if b"some" not in found:
        raise ValueError(f"a pressure file without a line 'some': {content[:64]!r}")
    return Pressure(found[b"some"], found.get(b"full"))


def _stall(line: bytes, rest: bytes) -> Stall:
    fields = dict(word.split(b"=", 1) for word in rest.split() if b"=" in word)
    try:
        return Stall(
            float(fields[b"avg10"]),
            float(fields[b"avg60"]),
            float(fields[b"avg300"]),
            int(fields[b"total"]),
        )
    except (KeyError, ValueError):
        raise ValueError(f"{line[:64]!r} is not a line of a pressure file") from None
