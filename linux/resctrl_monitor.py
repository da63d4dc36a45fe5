"""resctrl's monitoring: cache occupancy and memory bandwidth of a control group.

Each group has a directory per L3 domain below `mon_data`. The bandwidth files count bytes since the
group exists. A file may read `Unavailable` (the hardware has no value now) or `Error`: then there
is not a value, which is not a failure. Files: docs/facts/kernel.md, "resctrl".
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from linux.host import Host
from linux.resctrl import MOUNT, check_group

_DOMAIN: Final = re.compile(r"mon_L3_(\d{1,9})", re.ASCII)
"""With sub-NUMA clustering the kernel adds `mon_sub_L3_*` inside; their sum is the domain's own."""
_OCCUPANCY: Final = "llc_occupancy"
BANDWIDTH: Final = ("mbm_local_bytes", "mbm_total_bytes")
"""Files that count bytes between the cache and this NUMA node's memory, or all memory."""


class DomainCounters(NamedTuple):
    """One L3 domain of a group. occupancy_bytes: None without a value. bandwidth_bytes: file ->
    bytes since the group exists; a file without a value is left out."""

    occupancy_bytes: int | None
    bandwidth_bytes: dict[str, int]


def parse_counter(content: bytes) -> int | None:
    """Return the number; None for `Unavailable`, `Error` and anything else without a number."""
    text = content.strip()
    return int(text) if text.isdigit() else None


def monitored(host: Host, mount: str = MOUNT) -> frozenset[str]:
    """Return the names of the values that this machine monitors; none without monitoring."""
    try:
        content = host.read(f"{mount}/info/L3_MON/mon_features")
    except OSError:
        return frozenset()
    return frozenset(content.decode("ascii", "replace").split())


def read_group_counters(
    host: Host, group: str, mount: str = MOUNT
) -> dict[int, DomainCounters] | None:
    """Return L3 domain id -> its counters; None when the group does not exist.

    A file that cannot be read has no value; the other files are read all the same.
    """
    base = f"{mount}/{check_group(group)}/mon_data"
    try:
        names = host.listdir(base)
    except OSError:
        return None
    found: dict[int, DomainCounters] = {}
    for name in sorted(names):
        shape = _DOMAIN.fullmatch(name)
        if shape is None:
            continue
        bandwidth = {}
        for file in BANDWIDTH:
            number = _read(host, f"{base}/{name}/{file}")
            if number is not None:
                bandwidth[file] = number
        found[int(shape[1])] = DomainCounters(_read(host, f"{base}/{name}/{_OCCUPANCY}"), bandwidth)
    return found


def _read(host: Host, path: str) -> int | None:
    try:
        return parse_counter(host.read(path))
    except OSError:
        return None
