"""NodeResourcesFit: a node passes if what it has left covers what the pod requests.

For every resource that the pod requests: request <= allocatable - requested, and one more pod must
be allowed. Resources that the pod does not request are not looked at, so a node that is overbooked
in one resource still takes pods of another. A request above the node's whole allocatable cannot be
resolved by evicting pods. Source: kube-scheduler; docs/facts/scheduler.md, "Fit".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import PODS
from cluster.scheduler.plugins.contract import (
    AppliesByShape,
    Given,
    Mask,
    OfRowAlone,
    Reason,
    Restored,
    only,
    zeros,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_TOO_MANY_PODS: Final = Reason("Too many pods")


@dataclass(frozen=True, slots=True)
class NodeResourcesFit(AppliesByShape, OfRowAlone):
    """ignored: extended resources that are not looked at. ignored_groups: prefixes of such names,
    the part before the slash. restored: what reservations of a node have left counts as free for
    pods that may use these; whether one of them has all of it is left to Reservation."""

    ignored: frozenset[str] = frozenset()
    ignored_groups: frozenset[str] = frozenset()
    restored: Restored | None = None
    name: str = "NodeResourcesFit"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        """Return "Too many pods", then two reasons for each resource: taken, and never there."""
        reasons = [_TOO_MANY_PODS]
        for name, _ in self.looked_at(pod):
            text = f"Insufficient {name}"
            reasons += [Reason(text), Reason(text, resolvable=False)]
        return tuple(reasons)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        nodes = tables.nodes
        given = self._given(pod, tables, rows)
        mask = (_pods_left(tables, rows, given) <= 0).astype(np.int64)
        for number, (name, request) in enumerate(self.looked_at(pod)):
            column = nodes.resources.find(name)
            if column is None:
                # No node has this resource.
                mask |= 4 << (2 * number)
                continue
            allocatable = nodes.allocatable[rows, column]
            short = request > _left(tables, rows, column, given)
            never = request > allocatable
            mask |= (short & ~never).astype(np.int64) << (1 + 2 * number)
            mask |= never.astype(np.int64) << (2 + 2 * number)
        return mask

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return the mask that `filter` gives one row."""
        nodes = tables.nodes
        if self._given(pod, tables, only(row)) is not None:
            return int(self.filter(pod, tables, only(row)).item())
        mask = int(nodes.allowed_pods.item(row) <= nodes.pods.item(row))
        allocatable, requested = nodes.allocatable, nodes.requested
        for number, (name, request) in enumerate(self.looked_at(pod)):
            column = nodes.resources.find(name)
            most = 0 if column is None else allocatable.item(row, column)
            if column is None or request > most:
                mask |= 4 << (2 * number)
            elif request > most - requested.item(row, column):
                mask |= 2 << (2 * number)
        return mask

    def headroom(self, pod: PodShape, tables: Tables, rows: Rows, pods: int) -> NDArray[np.int64]:
        """Return min((allocatable - requested) // request) over the resources, and pods left."""
        nodes = tables.nodes
        given = self._given(pod, tables, rows)
        headroom = _pods_left(tables, rows, given)
        for name, request in self.looked_at(pod):
            column = nodes.resources.find(name)
            if column is None:
                return np.zeros_like(headroom)
            headroom = np.minimum(headroom, _left(tables, rows, column, given) // request)
        return np.maximum(headroom, 0)

    def _given(self, pod: PodShape, tables: Tables, rows: Rows) -> Given | None:
        return self.restored.given(pod, tables, rows) if self.restored is not None else None

    def looked_at(self, pod: PodShape) -> list[tuple[str, int]]:
        """Return (resource, amount) of what the pod requests and a node must have left."""
        return looked_at(pod, self.ignored, self.ignored_groups)


def looked_at(
    pod: PodShape, ignored: frozenset[str], ignored_groups: frozenset[str]
) -> list[tuple[str, int]]:
    """Return the pod's requests that have to be covered.

    ignored, ignored_groups: names that are not looked at, and prefixes before the slash of such.
    """
    return [
        (name, request)
        for name, request in pod.requests.items()
        if request > 0
        and name != PODS
        and name not in ignored
        and name.partition("/")[0] not in ignored_groups
    ]


def _left(tables: Tables, rows: Rows, column: int, given: Given | None) -> NDArray[np.int64]:
    """Return allocatable - requested of one resource, with what reservations give back."""
    nodes = tables.nodes
    left: NDArray[np.int64] = nodes.allocatable[rows, column] - nodes.requested[rows, column]
    return left if given is None else left + _summed(tables, given, given.amounts[:, column])[rows]


def _pods_left(tables: Tables, rows: Rows, given: Given | None) -> NDArray[np.int64]:
    """Return how many pods more are allowed, with what reservations give back."""
    nodes = tables.nodes
    left: NDArray[np.int64] = nodes.allowed_pods[rows] - nodes.pods[rows]
    return left if given is None else left + _summed(tables, given, given.pods)[rows]


def _summed(tables: Tables, given: Given, amounts: NDArray[np.int64]) -> NDArray[np.int64]:
    total = zeros(len(tables.nodes))
    np.add.at(total, given.rows, amounts)
    return total
