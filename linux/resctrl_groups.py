"""resctrl's file system: what it offers, and operations on control groups.

Each control group takes one of few CLOSIDs; the kernel says ENOSPC when they are used up, and it
leaves the reason for a refused schemata in `info/last_cmd_status`. A task's later children stay in
its group. Files: docs/facts/kernel.md, "resctrl".
"""

from __future__ import annotations

from dataclasses import dataclass

from linux.host import Host
from linux.procfs import cpu_vendor, host_mounts, parse_ids
from linux.resctrl import MOUNT, check_group, parse_schemata


@dataclass(frozen=True, slots=True)
class Offer:
    """What this machine's resctrl offers. Empty domains: the resource does not exist."""

    l3_domains: tuple[int, ...]
    mb_domains: tuple[int, ...]
    cbm_mask: int
    min_cbm_bits: int
    sparse_masks: bool
    bandwidth_gran: int
    min_bandwidth: int
    num_closids: int
    vendor: str
    mba_mbps: bool
    cdp: bool


def read_offer(host: Host, mount: str = MOUNT) -> Offer | None:
    """Return what resctrl offers; None when it is not mounted. Never mounts anything."""
    try:
        root = parse_schemata(host.read(f"{mount}/schemata").decode("ascii", "replace"))
    except (OSError, ValueError):
        return None
    cdp = "L3CODE" in root
    l3 = root.get("L3CODE" if cdp else "L3", {})
    info_l3 = f"{mount}/info/{'L3CODE' if cdp else 'L3'}"
    info_mb = f"{mount}/info/MB"
    closids = [
        count
        for info in (info_l3, info_mb)
        if (count := _number(host, f"{info}/num_closids", 0)) > 0
    ]
    options = next((m.options for m in host_mounts(host) if m.type == "resctrl"), frozenset[str]())
    try:
        vendor = cpu_vendor(host.read("/proc/cpuinfo"))
    except OSError:
        vendor = ""
    return Offer(
        l3_domains=tuple(sorted(l3)),
        mb_domains=tuple(sorted(root.get("MB", {}))),
        cbm_mask=_number(host, f"{info_l3}/cbm_mask", 0, base=16),
        min_cbm_bits=_number(host, f"{info_l3}/min_cbm_bits", 1),
        sparse_masks=_number(host, f"{info_l3}/sparse_masks", 0) == 1,
        # 10 is what every Intel machine says, and what upstream assumes.
        bandwidth_gran=_number(host, f"{info_mb}/bandwidth_gran", 10),
        min_bandwidth=_number(host, f"{info_mb}/min_bandwidth", 10),
        num_closids=min(closids, default=0),
        vendor=vendor,
        mba_mbps="mba_MBps" in options,
        cdp=cdp,
    )


def _number(host: Host, path: str, default: int, *, base: int = 10) -> int:
    try:
        return int(host.read(path), base)
    except (OSError, ValueError):
        return default


def group_path(name: str, mount: str = MOUNT) -> str:
    return f"{mount}/{check_group(name)}"


def groups(host: Host, mount: str = MOUNT) -> list[str]:
    """Return the names of all control groups but the root."""
    return [
        name
        for name in host.listdir(mount)
        if name not in ("info", "mon_data", "mon_groups") and host.is_dir(f"{mount}/{name}")
    ]


def read_group(host: Host, name: str, mount: str = MOUNT) -> dict[str, dict[int, int]]:
    """Return the group's schemata; OSError (ENOENT) when there is no such group."""
    content = host.read(f"{group_path(name, mount)}/schemata")
    return parse_schemata(content.decode("ascii", "replace"))


def last_status(host: Host, mount: str = MOUNT) -> str:
    """Return why the kernel refused the last command, in its words; "" if it says nothing."""
    try:
        text = host.read(f"{mount}/info/last_cmd_status").decode("ascii", "replace").strip()
    except OSError:
        return ""
    return "" if text == "ok" else text


def tasks(host: Host, name: str, mount: str = MOUNT) -> set[int]:
    return set(parse_ids(host.read(f"{group_path(name, mount)}/tasks")))
