"""Why a pod is on its node: the scores of the best nodes, plugin by plugin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import Scores
from cluster.scheduler.tables.tables import Tables

BEST: Final = 5
"""Nodes of a table. Chosen: the winner and what came close; twice as many are kept in twice the
memory."""


@dataclass(frozen=True, slots=True)
class NodeScore:
    """One node's total and what each plugin of the table adds to it, by its weight."""

    node: str
    total: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """The best nodes, the highest total first; the chosen node is always among them.

    nodes: count of all nodes. feasible: count of those that pass every filter. chosen: the node
    that the pod got. plugins: names, as columns of the rows.
    """

    nodes: int
    feasible: int
    chosen: str
    plugins: tuple[str, ...]
    rows: tuple[NodeScore, ...]

    def plain(self) -> dict[str, Any]:
        """Return the table as JSON has it."""
        return {
            "nodes": self.nodes,
            "feasible": self.feasible,
            "best": [
                {
                    "node": row.node,
                    "total": row.total,
                    "scores": dict(zip(self.plugins, row.parts, strict=True)),
                }
                for row in self.rows
            ],
        }


def score_table(
    tables: Tables,
    feasible: NDArray[np.intp],
    totals: Scores,
    parts: Sequence[tuple[str, int, Scores]],
    chosen: int,
    *,
    most: int = BEST,
) -> ScoreTable | None:
    """Return the table of the best feasible rows, and of the chosen one.

    totals: by position in `feasible`. parts: plugin, weight, scores by row. None if the chosen row
    is not among these: it was not chosen by its score.
    """
    if len(feasible) > most:
        best = np.argpartition(totals, len(totals) - most)[-most:]
    else:
        best = np.arange(len(feasible))
    place = int(np.searchsorted(feasible, chosen))
    if place == len(feasible) or feasible[place] != chosen:
        return None
    others = best[best != place]
    if len(others) == len(best) == most:
        # Equal totals, or the best node could not give the exact allocation.
        others = np.delete(others, totals[others].argmin())
    positions = sorted(
        (place, *others.tolist()),
        key=lambda position: (-int(totals[position]), position != place, int(feasible[position])),
    )
    columns = [weight * scores[feasible[positions]] for _, weight, scores in parts]
    rows = tuple(
        NodeScore(
            tables.nodes.name(int(feasible[position])),
            int(totals[position]),
            tuple(int(column[number]) for column in columns),
        )
        for number, position in enumerate(positions)
    )
    return ScoreTable(
        nodes=tables.nodes.count,
        feasible=len(feasible),
        chosen=tables.nodes.name(chosen),
        plugins=tuple(name for name, _, _ in parts),
        rows=rows,
    )
