"""NodeAffinity: node selectors and affinity terms.

A node passes NodeAffinity if it has every label of `nodeSelector` and one of the required terms
holds (all of its expressions and fields); a term without any holds nowhere. The score is the sum of
the weights of the preferred terms that hold, times 100 // the largest sum.
Source: kube-scheduler; docs/facts/scheduler.md, "Node affinity".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from apis.scheduling_pod import NodeAffinity as Terms
from apis.scheduling_pod import NodeSelectorTerm
from cluster.scheduler.plugins.contract import (
    AppliesByShape,
    Mask,
    OfNodeAlone,
    Reason,
    Scores,
    to_largest,
)
from cluster.scheduler.tables.node_terms import Truth, node_term_holds
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NO_MATCH: Final = (
    Reason("node(s) didn't match Pod's node affinity/selector", resolvable=False),
    Reason("node(s) didn't match scheduler-enforced node affinity", resolvable=False),
)


@dataclass(frozen=True, slots=True)
class NodeAffinity(OfNodeAlone, AppliesByShape):
    """added: terms of the profile that apply to all of its pods in addition to their own."""

    added: Terms | None = None
    name: str = "NodeAffinity"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        own = pod.affinity.node_affinity if pod.affinity else None
        return bool(pod.node_selector) or own is not None or self.added is not None

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return 0

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _NO_MATCH

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        holds = np.ones_like(tables.nodes.alive[rows])
        for key, value in pod.node_selector.items():
            column = tables.nodes.labels.column(key)
            number = column.known(value)
            holds &= (column.ids[rows] == number) if number else False
        own = pod.affinity.node_affinity if pod.affinity else None
        if own is not None and own.required is not None:
            holds &= _one_of(own.required.node_selector_terms, tables, rows)
        mask = (~holds).astype(np.int64)
        if self.added is not None and self.added.required is not None:
            enforced = _one_of(self.added.required.node_selector_terms, tables, rows)
            # kube-scheduler looks at the added terms first and names only them.
            mask = np.where(enforced, mask, 2)
        return mask

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        total = np.zeros_like(tables.nodes.pods[rows])
        own = pod.affinity.node_affinity if pod.affinity else None
        for terms in (own, self.added):
            for preferred in terms.preferred if terms is not None else ():
                total += preferred.weight * term_holds(preferred.preference, tables, rows)
        return total

    def normalize(self, raw: Scores) -> Scores:
        return to_largest(raw)


def _one_of(terms: Iterable[NodeSelectorTerm], tables: Tables, rows: Rows) -> Truth:
    result = np.zeros_like(tables.nodes.alive[rows])
    for term in terms:
        result |= term_holds(term, tables, rows)
    return result


def term_holds(term: NodeSelectorTerm, tables: Tables, rows: Rows) -> Truth:
    """Return for each of `rows` whether all expressions and fields of a term hold."""
    return node_term_holds(term, tables.nodes, rows)
