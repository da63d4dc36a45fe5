"""Terms of node selectors over the rows of the node table: affinity of pods, volumes, topologies.

Source: kube-scheduler; docs/facts/scheduler.md, "Node affinity".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm
from cluster.scheduler.tables.labels import ABSENT
from cluster.scheduler.tables.nodes import NodeTable, Rows

NAME_FIELD: Final = "metadata.name"
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}\Z", re.ASCII)

Truth = NDArray[np.bool_]


def node_term_holds(term: NodeSelectorTerm, nodes: NodeTable, rows: Rows) -> Truth:
    """Return for each of `rows` whether all expressions and fields of a term hold."""
    if not term.match_expressions and not term.match_fields:
        return np.zeros_like(nodes.alive[rows])
    result = np.ones_like(nodes.alive[rows])
    for requirement in term.match_expressions:
        result &= _label_holds(requirement, nodes, rows)
    for requirement in term.match_fields:
        named = _named(nodes, requirement.values, rows)
        known = requirement.key == NAME_FIELD
        if known and requirement.operator == "In":
            result &= named
        elif known and requirement.operator == "NotIn":
            result &= ~named
        else:
            result[:] = False
    return result


def _label_holds(requirement: NodeSelectorRequirement, nodes: NodeTable, rows: Rows) -> Truth:
    column = nodes.labels.column(requirement.key)
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
    return np.zeros_like(nodes.alive[rows])


def _named(nodes: NodeTable, names: Iterable[str], rows: Rows) -> Truth:
    result = np.zeros(len(nodes), dtype=np.bool_)
    for name in names:
        row = nodes.row(name)
        if row is not None:
            result[row] = True
    return result[rows]
