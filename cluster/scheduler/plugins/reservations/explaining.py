"""Why a pod goes through none of the reservations that are for it, as a sentence.

Example: `0/3 reservations are available: 1 Reservation(s) is unschedulable, 2 Reservation(s) for
node reason that node(s) were unschedulable, 3 Reservation(s) matched owner total.` What a
reservation itself lacks is among the reasons of its node. The texts are upstream's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from cluster.scheduler.plugins.contract import Filter, Mask
from cluster.scheduler.tables.reservations.asked import asked_of
from cluster.scheduler.tables.reservations.matching import Match, untolerated_taints
from cluster.scheduler.tables.reservations.table import NO_ROW, Slots
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_BY_STEP: Final = {
    Match.NAME: "didn't match the requested reservation name",
    Match.UNSCHEDULABLE: "is unschedulable",
    Match.AFFINITY: "didn't match affinity rules",
    Match.EXACT: "is not exact matched",
}


def explained(
    pod: PodShape, tables: Tables, masks: Sequence[tuple[Filter, Mask]], *, name: str
) -> str:
    """Return the sentence; "" where no reservation is for the pod and it demands none.

    name: of the plugin whose reasons are left out.
    """
    asked = pod.derived(asked_of)
    if asked.ignores or asked.reserves or asked.error is not None:
        return ""
    table = tables.reservations
    verdicts = table.verdicts(pod) if len(table) else ()
    if not verdicts and asked.affinity is None:
        return ""
    counts: Counter[str] = Counter()
    named = asked.affinity is not None and bool(asked.affinity.name)
    matched = []
    for slot, step in verdicts:
        if step in _BY_STEP:
            counts[_BY_STEP[step]] += 1
        if step is Match.TAINT:
            for taint in untolerated_taints(pod, table.facts(slot)):
                counts[f"had untolerated taint {{{taint.key}: {taint.value}}}"] += 1
        if named and step in (Match.YES, Match.EXACT):
            counts["exactly matches the requested reservation name"] += 1
        if step is Match.YES:
            matched.append(slot)
    counts += _of_nodes(pod, tables, masks, np.array(matched, dtype=np.intp), name)
    counts["matched owner total"] = len(verdicts)
    parts = sorted(f"{count} Reservation(s) {text}" for text, count in counts.items())
    return f"0/{len(verdicts)} reservations are available: {', '.join(parts)}."


def _of_nodes(
    pod: PodShape, tables: Tables, masks: Sequence[tuple[Filter, Mask]], slots: Slots, name: str
) -> Counter[str]:
    """Return the states of reservations, and why their nodes are held back by other plugins."""
    table = tables.reservations
    counts: Counter[str] = Counter()
    there = table.available[slots] & (table.row[slots] != NO_ROW)
    used_up = there & table.once[slots] & (table.owners[slots] > 0)
    counts["is not available"] = int(np.count_nonzero(~there))
    counts["is used by another pod"] = int(np.count_nonzero(used_up))
    rows = table.row[slots[there & ~used_up]]
    for plugin, mask in masks:
        bits = mask[rows]
        held = bits != 0
        if plugin.name != name:
            for number, reason in enumerate(plugin.reasons(pod)):
                with_reason = int(np.count_nonzero((bits >> number) & 1))
                counts[f"for node reason that {reason.text}"] += with_reason
        # A node counts with the first plugin that holds it back.
        rows = rows[~held]
    return +counts
