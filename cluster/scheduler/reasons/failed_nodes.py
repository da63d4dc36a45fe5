"""The names of the nodes that hold a pod back, by plugin and reason.

A node stands with the first plugin that holds it back and with each reason of that plugin, as in
the pod's condition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from apis.schedule_explanation import NodeFailedDetail
from cluster.scheduler.plugins.contract import Filter, Mask
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_NAMES: Final = 10_000
"""Of all reasons together. Chosen: names of 63 characters then stay below half of the largest
object that etcd takes, 1.5 MiB."""


def failed_nodes(
    pod: PodShape, tables: Tables, masks: Iterable[tuple[Filter, Mask]]
) -> tuple[NodeFailedDetail, ...]:
    """Return the nodes by plugin, reason and whether evictions could help; names ascending."""
    nodes = tables.nodes
    open_rows = nodes.alive[: len(nodes)].copy()
    found: dict[tuple[str, str, bool], list[str]] = {}
    left = _MOST_NAMES
    for plugin, mask in masks:
        held = np.flatnonzero(open_rows & (mask != 0))
        if not len(held):
            continue
        open_rows[held] = False
        bits = mask[held]
        for number, reason in enumerate(plugin.reasons(pod)):
            rows = held[(bits >> number) & 1 == 1][:left]
            if len(rows):
                left -= len(rows)
                key = plugin.name, reason.text, reason.resolvable
                found.setdefault(key, []).extend(nodes.name(int(row)) for row in rows)
    return tuple(
        NodeFailedDetail(
            failed_plugin=plugin,
            reason=reason,
            preempt_might_help=resolvable,
            failed_nodes=tuple(sorted(names)),
        )
        for (plugin, reason, resolvable), names in sorted(found.items())
    )
