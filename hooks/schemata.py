"""From percentages of cache and memory bandwidth to a schemata that this machine accepts.

The kernel accepts or refuses a schemata as a whole, so every domain gets a value and every value is
legal: masks are at least `min_cbm_bits` wide, bandwidth is in the machine's own steps. What the
machine cannot do at all is left out and reported. Formulas: docs/facts/kernel.md, "resctrl".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from hooks.facts import ResctrlFacts
from linux.resctrl import format_schemata, mask_of_range, with_cdp

Range = tuple[int, int]
"""Start and end in percent, 0 <= start < end <= 100."""

WHOLE: Final[Range] = (0, 100)
NOT_MOUNTED: Final = (
    "this machine has no resctrl, or it is not mounted (mount -t resctrl resctrl /sys/fs/resctrl)"
)
AMD: Final = "AuthenticAMD"
_AMD_UNLIMITED: Final = 2048
"""AMD's value for no limit."""
MBPS_UNLIMITED: Final = (1 << 32) - 1
"""The kernel's value for no limit under mba_MBps."""
_AMD_FULL: Final = 160
"""Upstream's measurement on Milan: a core complex has 25 GB/s in steps of 1/8 GB/s, and reaches
80 % of it. With twice the value, the percentages below 50 would not limit anything there."""


class MachineSchemata(msgspec.Struct, frozen=True):
    """A schemata text, and what of the request is not in it ("" when everything is)."""

    text: str
    degraded: str


def bandwidth(facts: ResctrlFacts, percent: int) -> int:
    """Return the MB value for a percentage: rounded up to the machine's step, or AMD's units."""
    if facts.vendor == AMD:
        return _AMD_UNLIMITED if percent >= 100 else max(_AMD_FULL * percent // 100, 1)
    step = max(facts.bandwidth_gran, 1)
    return min(max(-(-percent // step) * step, facts.min_bandwidth), 100)


def make_schemata(
    facts: ResctrlFacts,
    *,
    cache: Mapping[int, Range] | None = None,
    memory: Mapping[int, int] | None = None,
) -> MachineSchemata:
    """Return the schemata for shares of each domain; a domain without one gets everything.

    cache: L3 domain -> range in percent. memory: MB domain -> percent. None leaves the line out.
    """
    wanted: dict[str, dict[int, int]] = {}
    short: list[str] = []
    if cache is not None:
        if not facts.l3_domains:
            short.append("this machine cannot allocate L3 cache")
        else:
            try:
                wanted["L3"] = {
                    domain: mask_of_range(
                        facts.cbm_mask, *cache.get(domain, WHOLE), facts.min_cbm_bits
                    )
                    for domain in facts.l3_domains
                }
            except ValueError as error:
                short.append(f"no L3 line: {error}")
    if memory is not None:
        if not facts.mb_domains:
            short.append("this machine cannot allocate memory bandwidth")
        elif facts.mba_mbps:
            # Written all the same: a bound that a strategy claimed ends with it.
            wanted["MB"] = dict.fromkeys(facts.mb_domains, MBPS_UNLIMITED)
            short.append("no limit of MB: a percentage has no value with the mount option mba_MBps")
        else:
            wanted["MB"] = {
                domain: bandwidth(facts, memory.get(domain, 100)) for domain in facts.mb_domains
            }
    if facts.cdp:
        wanted = with_cdp(wanted)
    return MachineSchemata(format_schemata(wanted), "; ".join(short))
