"""NodeAffinity: node selectors and affinity terms.

A node passes NodeAffinity if it has every label of `nodeSelector` and one of the required terms
holds (all of its expressions and fields); a term without any holds nowhere. The score is the sum of
the weights of the preferred terms that hold, times 100 // the largest sum. Where every required
term names nodes, as for a pod of a DaemonSet, no other node is looked at by any filter.
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
    OfRowAlone,
    Reason,
    Refusal,
    Scores,
    to_largest,
)
from cluster.scheduler.tables.node_terms import NAME_FIELD, Truth, node_term_holds
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NO_MATCH: Final = (
    Reason("node(s) didn't match Pod's node affinity/selector", resolvable=False),
    Reason("node(s) didn't match scheduler-enforced node affinity", resolvable=False),
)
_NAME: Final = "NodeAffinity"
_OTHER_NODE: Final = (Reason(f"node(s) didn't satisfy plugin(s) [{_NAME}]", resolvable=False),)
"""As kube-scheduler words it when a plugin names the only nodes."""
_CONFLICT: Final = "pod affinity terms conflict"


def named_nodes(pod: PodShape) -> frozenset[str] | None:
    """Return the only nodes that a pod may go to, where each of its required terms names some."""
    own = pod.affinity.node_affinity if pod.affinity else None
    if own is None or own.required is None or not own.required.node_selector_terms:
        return None
    named: set[str] = set()
    for term in own.required.node_selector_terms:
        fields = [
            frozenset(field.values)
            for field in term.match_fields
            if field.key == NAME_FIELD and field.operator == "In"
        ]
        if not fields:
            return None
        named |= frozenset.intersection(*fields)
    return frozenset(named)


@dataclass(frozen=True, slots=True)
class NamedNodes(OfNodeAlone, OfRowAlone, AppliesByShape):
    """Holds back the nodes that a pod does not name, before all other filters."""

    name: str = _NAME

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a pod whose terms name no node that could be meant. Raises Refusal."""
        if pod.affinity is not None and pod.derived(named_nodes) == frozenset():
            raise Refusal(_NAME, _CONFLICT)

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return pod.affinity is not None and pod.derived(named_nodes) is not None

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _OTHER_NODE

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask = np.ones(len(tables.nodes), dtype=np.int64)
        for name in pod.derived(named_nodes) or ():
            row = tables.nodes.row(name)
            if row is not None:
                mask[row] = 0
        result: Mask = mask[rows]
        return result


@dataclass(frozen=True, slots=True)
class NodeAffinity(OfNodeAlone, OfRowAlone, AppliesByShape):
    """added: terms of the profile that apply to all of its pods in addition to their own. named:
    the filter that holds back the nodes which a pod does not name, about which this one says
    nothing then."""

    added: Terms | None = None
    named: NamedNodes | None = None
    name: str = _NAME

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        own = pod.affinity.node_affinity if pod.affinity else None
        return bool(pod.node_selector) or own is not None or self.added is not None

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
        if self.named is not None and self.named.applies(pod, tables):
            mask = np.where(self.named.filter(pod, tables, rows) == 0, mask, 0)
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
