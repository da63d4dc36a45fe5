"""/proc/<pid>/net/dev: bytes of each network interface of a process's network namespace. Pure.

Format: docs/facts/kernel.md, "Network interfaces".
"""

from __future__ import annotations

from typing import NamedTuple


class InterfaceCounters(NamedTuple):
    """Bytes since the interface appeared. Some drivers count in 32 bits and wrap."""

    received_bytes: int
    sent_bytes: int


def parse_net_dev(content: bytes) -> dict[str, InterfaceCounters]:
    """Return interface -> its counters; the two heading lines and odd lines are left out.

    A large number may stand directly behind the colon, and a name may contain a colon itself.
    """
    found: dict[str, InterfaceCounters] = {}
    for line in content.splitlines():
        name, colon, rest = line.rpartition(b":")
        fields = rest.split()
        # Eight numbers for receiving, then eight for sending; the first of each counts bytes.
        if not colon or len(fields) < 16:
            continue
        try:
            counters = InterfaceCounters(int(fields[0]), int(fields[8]))
        except ValueError:
            continue
        found[name.strip().decode("utf-8", "replace")] = counters
    return found
