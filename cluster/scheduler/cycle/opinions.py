"""What extenders say about the nodes of one pod, and an evaluation with that taken in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from cluster.scheduler.cycle.evaluation import Evaluation, Part
from cluster.scheduler.plugins.contract import Reason

EXTENDER: Final = "Extender"
"""Stands for all extenders where plugins are named."""

_NOT_ASKED: Final = Reason("node(s) that extenders were not asked about yet")
"""A node that became feasible while extenders were asked. That change has the pod tried again."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """asked: names of the nodes that extenders were asked about. failed: those that they rejected,
    with the reason. scores: node -> what is added to its total."""

    asked: frozenset[str]
    failed: Mapping[str, Reason] = field(default_factory=dict)
    scores: Mapping[str, int] = field(default_factory=dict)


def with_opinion(
    evaluation: Evaluation, opinion: Opinion
) -> tuple[Evaluation, dict[int, tuple[str, Reason]]]:
    """Return the evaluation without the nodes that extenders rejected, and why each is left out.

    Nodes are judged by the tables as they are now: what extenders passed may be full by now.
    """
    name_of = evaluation.tables.nodes.name
    left_out: dict[int, tuple[str, Reason]] = {}
    added = np.zeros(len(evaluation.feasible), dtype=np.int64)
    keep = np.ones(len(evaluation.feasible), dtype=np.bool_)
    for position, row in enumerate(evaluation.feasible.tolist()):
        name = name_of(row)
        reason = opinion.failed.get(name) if name in opinion.asked else _NOT_ASKED
        if reason is not None:
            left_out[row] = EXTENDER, reason
            keep[position] = False
        else:
            added[position] = opinion.scores.get(name, 0)
    parts = evaluation.parts
    if opinion.scores:
        by_row = np.zeros(len(evaluation.tables.nodes), dtype=np.int64)
        by_row[evaluation.feasible] = added
        parts += (Part(EXTENDER, 1, by_row),)
    kept = replace(
        evaluation,
        feasible=evaluation.feasible[keep],
        totals=(evaluation.totals + added)[keep],
        parts=parts,
    )
    return kept, left_out
