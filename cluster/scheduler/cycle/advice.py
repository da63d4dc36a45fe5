"""The nearest nodes of refused pods, worked out once for pods of equal content.

A refusal that is repeated shows the same text, so the pod's condition is not written again, and a
thousand equal pods cost one look at the masks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cluster.scheduler.reasons.counterfactuals import Counterfactuals
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.shapes import PodShape

_VALID_FOR_S: Final = 10.0
"""How long advice is kept while the counts of a refusal stay equal. Chosen: the longest back-off
of kube-scheduler, so that a retry sees new numbers. Twice the value shows older ones."""
_MOST_KEPT: Final = 1024
"""Shapes. Chosen: 2 MB; a forgotten shape costs one more look at the masks."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Advice, and the refusal that it was worked out for."""

    counterfactuals: Counterfactuals
    nodes: int
    plugins: frozenset[str]
    counts: Mapping[str, int]
    version: int
    at: float


class Advisor:
    """Adds the nearest nodes to diagnoses."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, PodShape], _Kept] = OrderedDict()

    def advise(
        self,
        key: tuple[str, PodShape],
        diagnosis: Diagnosis,
        work: Callable[[], Counterfactuals],
        *,
        version: int,
        now: float,
    ) -> Diagnosis:
        """Return the diagnosis with what `work` returns, or returned lately for equal counts.

        key: the profile's scheduler name and the pod's shape. version: of the node table. now:
        seconds since 1970.
        """
        kept = self._kept.get(key)
        if kept is None or not self._holds(kept, diagnosis, version, now):
            diagnosis = replace(diagnosis, counterfactuals=work())
            self._kept[key] = _Kept(
                diagnosis.counterfactuals,
                diagnosis.nodes,
                diagnosis.plugins,
                diagnosis.counts,
                version,
                now,
            )
            self._kept.move_to_end(key)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return diagnosis
        return replace(diagnosis, counterfactuals=kept.counterfactuals)

    def _holds(self, kept: _Kept, diagnosis: Diagnosis, version: int, now: float) -> bool:
        before = kept.nodes, kept.plugins, kept.counts
        if before != (diagnosis.nodes, diagnosis.plugins, diagnosis.counts):
            return False
        return version == kept.version or 0 <= now - kept.at < _VALID_FOR_S
