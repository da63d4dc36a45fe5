"""Cold memory by kidled, which Alibaba's kernels have: how long pages were not used.

kidled scans all pages once a period and counts for each how many scans it was idle. A group's
`memory.idle_page_stats` has a row per kind of page and a column per class of idle scans. Nothing
is counted until a scan period is set. Files: docs/facts/kernel.md, "Cold memory".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from linux.host import Host

_SCAN_PERIOD: Final = "kernel/mm/kidled/scan_period_in_seconds"
_USE_HIERARCHY: Final = "kernel/mm/kidled/use_hierarchy"
STATS_FILE: Final = "memory.idle_page_stats"
SCAN_PERIOD_S: Final = 5
"""Upstream's. Half of it doubles kidled's CPU time, and 300 s are then no bound of a class."""
COLD_S: Final = 300
"""Upstream's: a page is cold when it was not used for so long (60 scans of 5 s)."""
_FILE_ROWS: Final = (b"cfei", b"dfei", b"cfui", b"dfui")
"""Inactive file pages: clean or dirty, evictable or not. Upstream counts these as cold."""


class Kidled(NamedTuple):
    """The state of kidled. scan_period_s: 0 while it is off."""

    scan_period_s: int
    use_hierarchy: bool


def read_kidled(host: Host, *, sys_root: str = "/sys") -> Kidled | None:
    """Return kidled's state; None on a kernel without it. Changes nothing."""
    try:
        return Kidled(
            int(host.read(f"{sys_root}/{_SCAN_PERIOD}")),
            int(host.read(f"{sys_root}/{_USE_HIERARCHY}")) == 1,
        )
    except (OSError, ValueError):
        return None


def write_kidled(host: Host, state: Kidled, *, sys_root: str = "/sys") -> None:
    """Set the scan period, and whether a group's statistics include its children's; OSError."""
    host.write(f"{sys_root}/{_USE_HIERARCHY}", f"{int(state.use_hierarchy)}\n".encode())
    host.write(f"{sys_root}/{_SCAN_PERIOD}", f"{state.scan_period_s}\n".encode())


def cold_bytes(content: bytes) -> int:
    """Return the bytes of inactive file pages that were not used for `COLD_S` or longer.

    The file gives the scan period and, as scans, the lower bounds of its classes; the classes from
    `COLD_S` on count, and at least the last one. Lines that are not known here are ignored.
    ValueError without these two lines, or for a row without one number for each class.
    """
    period_s = 0
    bounds: list[int] = []
    rows: list[list[bytes]] = []
    for line in content.splitlines():
        if line.startswith(b"# scan_period_in_seconds:"):
            period_s = int(line.partition(b":")[2])
        elif line.startswith(b"# buckets:"):
            bounds = [int(bound) for bound in line.partition(b":")[2].split(b",")]
        elif (fields := line.split()) and fields[0] in _FILE_ROWS:
            rows.append(fields)
    if not bounds or period_s <= 0:
        raise ValueError("idle page statistics without a scan period or without classes")
    first = next((at for at, bound in enumerate(bounds[:-1]) if bound * period_s >= COLD_S), -1)
    cold = 0
    for name, *counts in rows:
        if len(counts) != len(bounds):
            raise ValueError(
                f"row {name.decode('ascii')} has {len(counts)} numbers for {len(bounds)} classes"
            )
        cold += sum(map(int, counts[first:]))
    return cold
