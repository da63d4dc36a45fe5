"""NodeAffinity: node selectors and affinity terms.

A node passes NodeAffinity if it has every label of `nodeSelector` and one of the required terms
holds (all of its expressions and fields); a term without any holds nowhere. The score is the sum of
the weights of the preferred terms that hold, times 100 // the largest sum.
Source: kube-scheduler; docs/facts/scheduler.md, "Node affinity".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.scheduling_pod import NodeAffinity as Terms
from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm
from cluster.scheduler.plugins.contract import Mask, Reason, Scores, to_largest
from cluster.scheduler.tables.labels import ABSENT
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NAME_FIELD: Final = "metadata.name"
_NO_MATCH: Final = (
    Reason("node(s) didn't match Pod's node affinity/selector", resolvable=False),
    Reason("node(s) didn't match scheduler-enforced node affinity", resolvable=False),
)
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}\Z", re.ASCII)

Truth = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NodeAffinity:
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
    if not term.match_expressions and not term.match_fields:
        return np.zeros_like(tables.nodes.alive[rows])
    result = np.ones_like(tables.nodes.alive[rows])
    for requirement in term.match_expressions:
        result &= _label_holds(requirement, tables, rows)
    for requirement in term.match_fields:
        named = _named(tables, requirement.values, rows)
        known = requirement.key == _NAME_FIELD
        if known and requirement.operator == "In":
            result &= named
        elif known and requirement.operator == "NotIn":
            result &= ~named
        else:
            result[:] = False
    return result


def _label_holds(requirement: NodeSelectorRequirement, tables: Tables, rows: Rows) -> Truth:
    column = tables.nodes.labels.column(requirement.key)
    ids = column.ids[rows]
    match requirement.operator:
        case "Exists":
            return np.not_equal(ids, ABSENT)
        case "DoesNotExist":
            return np.equal(ids, ABSENT)
        case "In" | "NotIn":
            numbers = [number for value in requirement.values if (number := column.known(value))]
            within = np.isin(ids, numbers)
            return within if requirement.operator == "In" else ~within
        case "Gt" | "Lt" if len(requirement.values) == 1 and _INTEGER.match(requirement.values[0]):
            bound = int(requirement.values[0])
            greater = requirement.operator == "Gt"

            def passes(text: str) -> bool:
                if not _INTEGER.match(text):
                    return False
                return int(text) > bound if greater else int(text) < bound

            passing: Truth = column.where(passes)[ids]
            return passing
    # An operator that the API server does not know matches no node.
    return np.zeros_like(tables.nodes.alive[rows])


def _named(tables: Tables, names: Iterable[str], rows: Rows) -> Truth:
    result = np.zeros(len(tables.nodes), dtype=np.bool_)
    for name in names:
        row = tables.nodes.row(name)
        if row is not None:
            result[row] = True
    return result[rows]
