"""TaintToleration and NodeUnschedulable.

A taint set is looked at once for each pod shape, however many nodes have it. A node with a
NoSchedule or NoExecute taint that the pod does not tolerate is held back. The score counts
PreferNoSchedule taints that the pod does not tolerate; the fewer the better. A node marked
unschedulable takes only pods that tolerate `node.kubernetes.io/unschedulable:NoSchedule`.
Source: kube-scheduler; docs/facts/scheduler.md, "Taints".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from apis.core import Taint
from apis.taints import tolerated
from cluster.scheduler.plugins.contract import (
    AppliesByShape,
    Mask,
    OfNodeAlone,
    OfRowAlone,
    Reason,
    Scores,
    to_largest_reversed,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_UNTOLERATED: Final = (Reason("node(s) had untolerated taint(s)", resolvable=False),)
_UNSCHEDULABLE: Final = (Reason("node(s) were unschedulable", resolvable=False),)
_UNSCHEDULABLE_TAINT: Final = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


@dataclass(frozen=True, slots=True)
class TaintToleration(OfNodeAlone, OfRowAlone):
    name: str = "TaintToleration"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return tables.nodes.has_taints

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _UNTOLERATED

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        def holds_back(taints: tuple[Taint, ...]) -> bool:
            return any(
                taint.effect in ("NoSchedule", "NoExecute")
                and not tolerated(taint, pod.tolerations)
                for taint in taints
            )

        return tables.nodes.by_taints(rows, holds_back)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        # Tolerations of another effect do not count for PreferNoSchedule.
        tolerations = [t for t in pod.tolerations if t.effect in ("", "PreferNoSchedule")]

        def not_preferred(taints: tuple[Taint, ...]) -> int:
            return sum(
                taint.effect == "PreferNoSchedule" and not tolerated(taint, tolerations)
                for taint in taints
            )

        return tables.nodes.by_taints(rows, not_preferred)

    def normalize(self, raw: Scores) -> Scores:
        return to_largest_reversed(raw)


@dataclass(frozen=True, slots=True)
class NodeUnschedulable(OfNodeAlone, OfRowAlone, AppliesByShape):
    name: str = "NodeUnschedulable"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return not tolerated(_UNSCHEDULABLE_TAINT, pod.tolerations)

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _UNSCHEDULABLE

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        return tables.nodes.unschedulable[rows].astype(np.int64)
