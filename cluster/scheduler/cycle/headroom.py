"""How many pods of one shape the nodes can take at most, without trying them one by one.

The headroom of a row is how many more pods of the shape it can take. A row has none where a filter
that looks at that row alone holds it back: more pods on a node never open it. Each filter that can
count says how many more pods it would pass. So the sum is never below the number of pods that can
be placed, and equals it where the counting filters are the only ones that apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.plugins.contract import NO_LIMIT, Counting
from cluster.scheduler.tables.shapes import PodShape


@dataclass(frozen=True, slots=True)
class Headroom:
    """by_row: pods for each row. plugins: names of the filters that may limit them."""

    by_row: NDArray[np.int64]
    plugins: frozenset[str]

    @property
    def total(self) -> int:
        """The headroom of all rows."""
        return int(self.by_row.sum())


def headroom_of(pod: PodShape, evaluation: Evaluation, pods: int) -> Headroom:
    """Return the headroom for pods of a shape, from the masks of its evaluation.

    pods: how many pods are to be placed, with those of other shapes.
    """
    tables = evaluation.tables
    rows = slice(0, len(tables.nodes))
    by_row = np.where(tables.nodes.alive[rows], NO_LIMIT, 0).astype(np.int64)
    plugins = set()
    for plugin, mask in evaluation.masks:
        # The version of a filter that looks at the row alone is a constant.
        closes = plugin.cluster_version(pod, tables) == 0 and bool(mask.any())
        if closes:
            by_row[mask != 0] = 0
        if isinstance(plugin, Counting):
            by_row = np.minimum(by_row, plugin.headroom(pod, tables, rows, pods))
        if closes or isinstance(plugin, Counting):
            plugins.add(plugin.name)
    return Headroom(by_row, frozenset(plugins))


def most_placed(members: Mapping[PodShape, int], headroom: Mapping[PodShape, Headroom]) -> int:
    """Return how many pods can be placed at most. members: how many there are of each shape."""
    return sum(min(count, headroom[shape].total) for shape, count in members.items())
