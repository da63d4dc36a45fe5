"""SchedulingHint: another component names the nodes that a pod may go to, or those to try first.

A node passes if the hint lists no nodes, or lists it. Of the preferred nodes, the first that passes
all filters and can give the exact allocation is taken, whatever the scores are; if there is none,
the scores decide. Source: Koordinator; docs/scheduler.md, "SchedulingHint".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.scheduler.plugins.contract import AppliesByShape, Mask, OfRowAlone, Reason, Refusal
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.scheduling_hint import has_hint, hint_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

NAME: Final = "SchedulingHint"
_REASONS: Final = (Reason(f"node(s) didn't satisfy plugin(s) [{NAME}]", resolvable=False),)
"""As kube-scheduler words it when a plugin names the only nodes."""


@dataclass(frozen=True, slots=True)
class SchedulingHintNodes(AppliesByShape, OfRowAlone):
    """most_preferred: preferred nodes of a hint that are tried, from the first."""

    most_preferred: int = 100
    name: str = NAME

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a pod whose hint cannot be read. Raises Refusal."""
        if has_hint(pod) and (error := pod.derived(hint_of).error) is not None:
            raise Refusal(NAME, str(error))

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return has_hint(pod) and bool(pod.derived(hint_of).nodes)

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        nodes = tables.nodes
        mask = np.ones(len(nodes), dtype=np.int64)
        for name in pod.derived(hint_of).nodes:
            row = nodes.row(name)
            if row is not None:
                mask[row] = 0
        result: Mask = mask[rows]
        return result

    def preferred(self, pod: PodShape, tables: Tables) -> tuple[int, ...]:
        """Return the rows to try before all others, in their order."""
        if not has_hint(pod):
            return ()
        names = pod.derived(hint_of).preferred[: self.most_preferred]
        rows = (tables.nodes.row(name) for name in names)
        return tuple(row for row in rows if row is not None)
