"""How many pods of one shape the nodes can take at most, without trying them one by one.

A slot is room for one more pod of the shape. A row has no slot where a filter that looks at that
row alone holds it back: more pods on a node never open it. Each filter that can count says how many
more pods it would pass. So the sum is never below the number of pods that can
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

Slots = NDArray[np.int64]
"""By row."""


@dataclass(frozen=True, slots=True)
class Room:
    """slots: for each row. plugins: names of the filters that may limit them."""

    slots: Slots
    plugins: frozenset[str]

    @property
    def total(self) -> int:
        """The slots of all rows."""
        return int(self.slots.sum())


def room_of(pod: PodShape, evaluation: Evaluation, pods: int) -> Room:
    """Return the room for pods of a shape, from the masks of its evaluation.

    pods: how many pods are to be placed, with those of other shapes.
    """
    tables = evaluation.tables
    rows = slice(0, len(tables.nodes))
    slots = np.where(tables.nodes.alive[rows], NO_LIMIT, 0).astype(np.int64)
    plugins = set()
    for plugin, mask in evaluation.masks:
        # The version of a filter that looks at the row alone is a constant.
        closes = plugin.cluster_version(pod, tables) == 0 and bool(mask.any())
        if closes:
            slots[mask != 0] = 0
        if isinstance(plugin, Counting):
            slots = np.minimum(slots, plugin.slots(pod, tables, rows, pods))
        if closes or isinstance(plugin, Counting):
            plugins.add(plugin.name)
    return Room(slots, frozenset(plugins))


def most_placed(members: Mapping[PodShape, int], room: Mapping[PodShape, Room]) -> int:
    """Return how many pods can be placed at most. members: how many there are of each shape."""
    return sum(min(count, room[shape].total) for shape, count in members.items())
