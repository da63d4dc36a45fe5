"""/proc/diskstats: what each block device has transferred, and how long it was busy. Pure.

Format: docs/facts/kernel.md, "Block devices". All numbers count since the device appeared.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SECTOR_BYTES: Final = 512
"""The kernel's unit here, whatever the device's own sectors have."""
_FIELDS: Final = 14
"""Fields of the oldest format: numbers and name, then eleven statistics (before 4.18)."""


class DiskCounters(NamedTuple):
    """A block device. busy_ms: time with at least one request under way."""

    major: int
    minor: int
    read_bytes: int
    written_bytes: int
    busy_ms: int


def parse_diskstats(content: bytes) -> dict[str, DiskCounters]:
    """Return the device's kernel name -> its counters; a line that is not understood is left out.

    Partitions and device-mapper devices have lines of their own.
    """
    found: dict[str, DiskCounters] = {}
    for line in content.splitlines():
        fields = line.split()
        if len(fields) < _FIELDS:
            continue
        try:
            # After the name: reads, merged, sectors, ms; writes, merged, sectors, ms;
            # requests under way, ms busy.
            found[fields[2].decode("utf-8", "replace")] = DiskCounters(
                major=int(fields[0]),
                minor=int(fields[1]),
                read_bytes=int(fields[5]) * SECTOR_BYTES,
                written_bytes=int(fields[9]) * SECTOR_BYTES,
                busy_ms=int(fields[12]),
            )
        except ValueError:
            continue
    return found
