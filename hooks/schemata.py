"""From percentages of cache and memory bandwidth to a schemata that this machine accepts.

The kernel takes or refuses a schemata line as a whole, so every domain gets a value and every value
is legal here: masks at least `min_cbm_bits` wide, bandwidth in the machine's own steps. What the
machine cannot do at all is left out and said. Sources: linux-interfaces.md sections 12 and 20
(items 22 to 25), hooks.md 4.8 and 8.33.
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
_AMD_FULL: Final = 160
"""25 GB/s of one core complex in steps of 1/8 GB/s, of which 80 % can be had: measured on Milan."""


class Made(msgspec.Struct, frozen=True):
    """A schemata text, and what of the wish is not in it ("" when all is)."""

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
) -> Made:
    """Return the schemata for shares of each domain; a domain without one gets everything.

    cache: L3 domain -> range in percent; memory: MB domain -> percent; None leaves the line out.
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
            short.append("no MB line: resctrl is mounted with mba_MBps, a percentage has no value")
        else:
            wanted["MB"] = {
                domain: bandwidth(facts, memory.get(domain, 100)) for domain in facts.mb_domains
            }
    if facts.cdp:
        wanted = with_cdp(wanted)
    return Made(format_schemata(wanted), "; ".join(short))
