"""NodeDeclaredFeatures: a node passes if its kubelet declares all features that the pod needs.

Source: kube-scheduler 1.36; docs/facts/scheduler.md, "Declared features".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.scheduler.plugins.contract import AppliesByShape, Mask, OfNodeAlone, OfRowAlone, Reason
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NOT_DECLARED: Final = (Reason("node(s) didn't match Pod's required features", resolvable=False),)


@dataclass(frozen=True, slots=True)
class NodeDeclaredFeatures(OfNodeAlone, OfRowAlone, AppliesByShape):
    name: str = "NodeDeclaredFeatures"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return pod.features != 0

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _NOT_DECLARED

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        lacks: Mask = ((tables.nodes.declared[rows] & pod.features) != pod.features).astype(
            np.int64
        )
        return lacks
