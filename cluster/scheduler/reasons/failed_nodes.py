"""The names of the nodes that hold a pod back, by plugin and reason.

A node stands with the first plugin that holds it back and with each reason of that plugin, as in
the pod's condition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import numpy as np

from apis.schedule_explanation import NodeFailedDetail
from cluster.scheduler.plugins.contract import Filter, Mask
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_NAMES: Final = 100
"""Of one reason. Chosen: some 20 reasons with names of 63 characters stay below 150 KB; the number
of nodes stands with the reason."""


def failed_nodes(
    pod: PodShape, tables: Tables, masks: Iterable[tuple[Filter, Mask]]
) -> tuple[NodeFailedDetail, ...]:
    """Return the nodes by plugin, reason and whether evictions could help; names ascending.

    Of more than 100 nodes the first 100 are named, and the reason says how many there are.
    """
    nodes = tables.nodes
    open_rows = nodes.alive[: len(nodes)].copy()
    found: dict[tuple[str, str, bool], list[str]] = {}
    counts: Counter[tuple[str, str, bool]] = Counter()
    for plugin, mask in masks:
        held = np.flatnonzero(open_rows & (mask != 0))
        open_rows[held] = False
        bits = mask[held]
        for number, reason in enumerate(plugin.reasons(pod)):
            rows = held[(bits >> number) & 1 == 1]
            if len(rows):
                key = plugin.name, reason.text, reason.resolvable
                counts[key] += len(rows)
                names = found.setdefault(key, [])
                names.extend(nodes.name(int(row)) for row in rows[: _MOST_NAMES - len(names)])
    return tuple(
        NodeFailedDetail(
            failed_plugin=key[0],
            reason=_with_count(key[1], counts[key]),
            preempt_might_help=key[2],
            failed_nodes=tuple(sorted(names)),
        )
        for key, names in sorted(found.items())
    )


def _with_count(reason: str, count: int) -> str:
    return f"{reason} ({_MOST_NAMES} of {count} nodes named)" if count > _MOST_NAMES else reason
