"""What was decided about each pod lately, kept for questions.

Only the last decisions are kept, which bounds the memory: users mostly ask about a pod that was
decided a moment ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.reasons.counterfactuals import NONE, Counterfactuals
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.reasons.score_table import ScoreTable, score_table

_MOST_KEPT: Final = 4096
"""Pods. Chosen: 7 s of 550 bindings a second, in 15 MB (measured, with 12 plugins). At twice the
value a question may come twice as late."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The last decision about a pod. at: seconds since 1970.

    scores: of a pod that got a node. message, counts, nearest: of one that got none.
    """

    uid: str
    at: float
    scores: ScoreTable | None = None
    message: str = ""
    counts: Mapping[str, int] | None = None
    nearest: Counterfactuals = NONE

    def plain(self) -> dict[str, Any]:
        """Return what JSON has of it, without members that are empty."""
        result: dict[str, Any] = {}
        if self.message:
            result["message"] = self.message
        if self.counts:
            result["counts"] = dict(self.counts)
        if self.nearest.changes:
            result["nearest"] = [
                {
                    "text": change.text,
                    "nodes": change.nodes,
                    "examples": list(change.examples),
                    "constraints": [
                        {"plugin": each.plugin, "reason": each.reason}
                        for each in change.constraints
                    ],
                }
                for change in self.nearest.changes
            ]
        if self.scores is not None:
            result["scores"] = self.scores.plain()
        return result


class Explanations:
    """The last decisions by pod key."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Explained] = OrderedDict()

    def get(self, key: str) -> Explained | None:
        """Return the last decision about the pod namespace/name, if it is kept."""
        return self._kept.get(key)

    def placed(self, key: str, uid: str, evaluation: Evaluation, node: str, *, at: float) -> None:
        """Keep why a pod got a node. Call it before the pod's shape is evaluated again."""
        row = evaluation.tables.nodes.row(node)
        if row is None:
            return
        table = score_table(
            evaluation.tables, evaluation.feasible, evaluation.totals, evaluation.parts, row
        )
        self._keep(key, Explained(uid, at, scores=table))

    def refused(self, key: str, uid: str, diagnosis: Diagnosis, *, at: float) -> None:
        """Keep why a pod got no node."""
        explained = Explained(
            uid,
            at,
            message=diagnosis.text,
            counts=diagnosis.counts,
            nearest=diagnosis.counterfactuals,
        )
        self._keep(key, explained)

    def held_up(self, key: str, uid: str, message: str, *, at: float) -> None:
        """Keep what holds a pod up apart from nodes, such as a member of its gang."""
        self._keep(key, Explained(uid, at, message=message))

    def _keep(self, key: str, explained: Explained) -> None:
        self._kept[key] = explained
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
