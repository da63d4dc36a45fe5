"""resctrl as text and numbers: schemata, cache masks, group names. Pure.

A schemata is compared by domain id, resource by resource, never by position or as text. With CDP
the kernel shows `L3CODE` and `L3DATA` in place of `L3`; with mba_MBps bandwidth is in MB/s.
Format and formulas: docs/facts/kernel.md, "resctrl".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

MOUNT: Final = "/sys/fs/resctrl"
POD_GROUP_PREFIX: Final = "koordlet-"
_GROUP = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
# 128 characters, chosen: a pod's group has 45. The kernel's limit is NAME_MAX, 255.
_RESERVED: Final = frozenset({"info", "mon_data", "mon_groups"})
_LINE = re.compile(r"\s*([A-Z0-9]+)\s*:(.*)")
_MAX_TEXT: Final = 65536
"""Chosen: a machine with 100 domains has a schemata of 2 KiB. Bounds a site policy's text."""

Schemata = Mapping[str, Mapping[int, int]]
"""Resource ("L3", "MB", "L3CODE", …) -> domain id -> mask or bandwidth."""


def check_group(name: str) -> str:
    """Return `name` if it can name a control group of ours; ValueError otherwise."""
    if not _GROUP.fullmatch(name) or name in _RESERVED:
        raise ValueError(f"{name[:64]!r} cannot name a resctrl group")
    return name


def is_ours_by_name(name: str) -> bool:
    """Return whether a group is a pod's group of koordlet, by the prefix that upstream uses too."""
    return name.startswith(POD_GROUP_PREFIX)


def _is_mask(resource: str) -> bool:
    return resource.startswith(("L2", "L3"))


def parse_schemata(text: str) -> dict[str, dict[int, int]]:
    """Parse a schemata file, or text to be written to one; ValueError names the bad part."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"the schemata has {len(text)} characters, more than {_MAX_TEXT}")
    schemata: dict[str, dict[int, int]] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        shape = _LINE.fullmatch(line)
        if shape is None:
            raise ValueError(f"{line[:64]!r} is not a line of a schemata")
        resource, rest = shape[1], shape[2]
        domains: dict[int, int] = {}
        for part in rest.split(";"):
            if not part.strip():
                continue
            domain, equals, value = part.partition("=")
            try:
                if not equals:
                    raise ValueError
                domains[int(domain)] = int(value, 16 if _is_mask(resource) else 10)
            except ValueError:
                raise ValueError(f"{part[:32]!r} is not <domain>=<value> in {resource}") from None
        schemata[resource] = domains
    return schemata


def format_schemata(schemata: Schemata) -> str:
    """Return the text to write: a line for each resource, with ids ascending."""
    lines = []
    for resource, domains in schemata.items():
        shown = "x" if _is_mask(resource) else "d"
        values = ";".join(f"{domain}={value:{shown}}" for domain, value in sorted(domains.items()))
        lines.append(f"{resource}:{values}\n")
    return "".join(lines)


def with_cdp(schemata: Schemata) -> dict[str, dict[int, int]]:
    """Return the schemata with `L3` split into code and data, for a mount with CDP."""
    split: dict[str, dict[int, int]] = {}
    for resource, domains in schemata.items():
        if resource == "L3":
            split["L3CODE"], split["L3DATA"] = dict(domains), dict(domains)
        else:
            split[resource] = dict(domains)
    return split


def differing(wanted: Schemata, found: Schemata) -> dict[str, dict[int, int]]:
    """Return the resources and domains of `wanted` whose value differs in `found`.

    What the kernel does not show is left out, because it cannot be set.
    """
    parts: dict[str, dict[int, int]] = {}
    for resource, domains in wanted.items():
        present = found.get(resource)
        if present is None:
            continue
        other = {
            domain: value
            for domain, value in domains.items()
            if domain in present and present[domain] != value
        }
        if other:
            parts[resource] = other
    return parts


def bounded(text: str, bound: str) -> str:
    """Return a schemata with the bandwidth of each domain at most that of `bound`.

    A domain that only `bound` has is taken from there. Masks stay as they are. Raises ValueError.
    """
    schemata = parse_schemata(text)
    for resource, domains in parse_schemata(bound).items():
        if not _is_mask(resource):
            own = schemata.setdefault(resource, {})
            own.update({one: min(value, own.get(one, value)) for one, value in domains.items()})
    return format_schemata(schemata)


def missing(wanted: Schemata, found: Schemata) -> list[str]:
    """Return what of `wanted` this machine does not have: "MB", "L3 domain 7"."""
    gaps: list[str] = []
    for resource, domains in wanted.items():
        if resource not in found:
            gaps.append(resource)
        else:
            gaps += [f"{resource} domain {one}" for one in domains if one not in found[resource]]
    return gaps


def mask_of_range(cbm_mask: int, start_percent: int, end_percent: int, min_cbm_bits: int) -> int:
    """Return the contiguous mask of the ways from `start_percent` to `end_percent`.

    Both ends round up, as upstream's do. A range too narrow for the kernel is widened to
    `min_cbm_bits`: upwards, or downwards at the top.
    Raises ValueError for a range that is not 0 <= start < end <= 100, or a root mask with holes.
    """
    if not 0 <= start_percent < end_percent <= 100:
        raise ValueError(f"{start_percent}..{end_percent} is not a range within 0..100 percent")
    ways = cbm_mask.bit_length()
    if cbm_mask == 0 or cbm_mask != (1 << ways) - 1:
        raise ValueError(f"the root mask {cbm_mask:x} is not contiguous from bit 0")
    first = -(-ways * start_percent // 100)
    last = -(-ways * end_percent // 100)
    if last - first < min_cbm_bits:
        last = min(first + min_cbm_bits, ways)
        first = max(last - min_cbm_bits, 0)
    return (1 << last) - (1 << first)
