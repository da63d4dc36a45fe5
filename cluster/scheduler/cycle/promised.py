"""Which nodes refuse a pod because of the pods that are nominated for them.

A node takes a pod only if it does so beside its nominated pods too. After a preemption for a large
gang a thousand nodes have nominated pods until the victims are gone, and each of these nodes has to
be tried for each pod. So the verdicts on them are kept, for pods of one reduced shape and priority,
as long as the node holds the same, is promised to the same pods, and no filter sees another change.
docs/facts/scheduler.md, "Preemption".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Held
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.plugins.contract import Filter
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.shapes import PodShape

Masks = tuple[tuple[Filter, int], ...]
"""The mask of each filter on one node."""

_UNKNOWN: Final = -1
"""In place of the `content` of a row without a verdict."""

_MOST_KEPT: Final = 128
"""Reduced shapes and priorities whose verdicts are kept, the ones used last; as many as reduced
shapes whose masks are kept. Each takes 40 kB at 5,000 nodes."""

_NOBODY: Final = -(2**31) - 1
"""Of a row that is promised to no pod: below every priority."""


class PromisedRows:
    """The highest priority of the pods that are nominated for each node, as a column."""

    def __init__(self, nominator: Nominator[PodShape], nodes: NodeTable) -> None:
        self._nominator = nominator
        self._nodes = nodes
        self._as_of = (-1, -1)
        """Versions of the nominations and of the nodes."""
        self._highest: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def at_least(self, priority: int) -> NDArray[np.intp]:
        """Return the rows for which pods of at least this priority are nominated, ascending."""
        nominator, nodes = self._nominator, self._nodes
        version, membership = self._as_of
        changed = nominator.changed_since(version) if membership == nodes.membership else None
        if changed is None:
            self._highest = np.full(len(nodes), _NOBODY, dtype=np.int64)
            changed = frozenset(nominator.nodes())
        for node in changed:
            row = nodes.row(node)
            if row is not None:
                highest = nominator.highest(node)
                self._highest[row] = _NOBODY if highest is None else highest
        self._as_of = nominator.version, nodes.membership
        return np.flatnonzero(self._highest >= priority)


class _Kept:
    """Verdicts for one reduced shape and priority.

    content: by row, that of the node table as of the verdict. masks: of the rows that are held
    back. nominations: version of the nominator. versions: of the filters.
    """

    __slots__ = ("content", "masks", "nominations", "versions")

    def __init__(self) -> None:
        self.content: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.masks: dict[int, Masks] = {}
        self.nominations = 0
        self.versions: tuple[int, ...] = ()


class Verdicts:
    """Verdicts on nodes with nominated pods, for the filters of one profile."""

    def __init__(self, nominator: Nominator[PodShape], nodes: NodeTable) -> None:
        self._nominator = nominator
        self._nodes = nodes
        self._kept: OrderedDict[tuple[PodShape, int], _Kept] = OrderedDict()

    def held(
        self,
        reduced: PodShape,
        priority: int,
        rows: NDArray[np.intp],
        versions: Callable[[], tuple[int, ...]],
        work_out: Callable[[Collection[int]], dict[int, Masks]],
    ) -> Held:
        """Return those of `rows`, all of which pass by themselves, that are held back.

        versions: of the filters that look at more than the row. work_out: returns the masks of
        each row as they are now.
        """
        kept = self._kept.setdefault((reduced, priority), _Kept())
        self._kept.move_to_end((reduced, priority))
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        self._follow(kept, versions())
        content = self._nodes.content
        stale = rows[kept.content[rows] != content[rows]]
        if len(stale):
            for row, masks in work_out(stale.tolist()).items():
                kept.masks.pop(row, None)
                if any(bits for _, bits in masks):
                    kept.masks[row] = masks
            kept.content[stale] = content[stale]
            # Trials count as changes for the filters, too.
            kept.versions = versions()
        if not kept.masks:
            return {}
        return {row: kept.masks[row] for row in rows.tolist() if row in kept.masks}

    def _follow(self, kept: _Kept, versions: tuple[int, ...]) -> None:
        """Forget the verdicts that may not hold any more."""
        length = len(self._nodes)
        changed = self._nominator.changed_since(kept.nominations)
        if changed is None or versions != kept.versions:
            kept.content = np.full(length, _UNKNOWN, dtype=np.int64)
            kept.masks.clear()
            changed = frozenset()
        elif len(kept.content) < length:
            missing = length - len(kept.content)
            kept.content = np.pad(kept.content, (0, missing), constant_values=_UNKNOWN)
        for node in changed:
            row = self._nodes.row(node)
            if row is not None:
                kept.content[row] = _UNKNOWN
        kept.nominations = self._nominator.version
        kept.versions = versions
