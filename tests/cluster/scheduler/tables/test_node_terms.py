"""Terms of node selectors: each operator, and what cannot hold anywhere."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from apis.scheduling_pod import NodeSelectorTerm
from cluster.scheduler.tables.node_terms import node_term_holds
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node

_NODES: dict[str, dict[str, str]] = {
    "ten": {"size": "10"},
    "nine": {"size": "9", "zone": "a"},
    "minus": {"size": "-3"},
    "text": {"size": "x"},
    "huge": {"size": "99999999999999999999"},
    "none": {"zone": "b"},
}
_ALL = list(_NODES)


def _label(operator: str, *values: str, key: str = "size") -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": values}]}


def _field(operator: str, *values: str, key: str = "metadata.name") -> dict[str, Any]:
    return {"matchFields": [{"key": key, "operator": operator, "values": values}]}


@pytest.mark.parametrize(
    ("term", "names"),
    [
        (_label("In", "10", "9", "unknown"), ["ten", "nine"]),
        (_label("In"), []),
        (_label("NotIn", "10", "9"), ["minus", "text", "huge", "none"]),
        (_label("NotIn", "unknown"), _ALL),
        (_label("Exists"), ["ten", "nine", "minus", "text", "huge"]),
        (_label("DoesNotExist"), ["none"]),
        (_label("Gt", "9"), ["ten"]),
        (_label("Gt", "-4"), ["ten", "nine", "minus"]),
        (_label("Lt", "+9"), ["minus"]),
        (_label("Lt", "10"), ["nine", "minus"]),
        (_label("Gt", "9", "8"), []),
        (_label("Gt"), []),
        (_label("Lt", "x"), []),
        (_label("Lt", "99999999999999999999"), []),
        (_label("Near", "9"), []),
        (_field("In", "ten", "gone", "none"), ["ten", "none"]),
        (_field("NotIn", "ten", "gone"), _ALL[1:]),
        (_field("Exists"), []),
        (_field("In", "ten", key="metadata.uid"), []),
        (_label("Exists", key="zone") | _field("NotIn", "none"), ["nine"]),
        ({}, []),
    ],
)
def test_a_term_holds_where_all_that_it_says_does(term: dict[str, Any], names: list[str]) -> None:
    tables = Tables()
    for name, labels in _NODES.items():
        tables.upsert_node(make_node(name, labels=labels))
    made = msgspec.convert(term, NodeSelectorTerm)
    nodes = tables.nodes
    held = node_term_holds(made, nodes, slice(0, len(nodes)))
    assert [name for name, holds in zip(_NODES, held.tolist(), strict=True) if holds] == names
    some = np.array([5, 0, 1], dtype=np.intp)
    assert node_term_holds(made, nodes, some).tolist() == held[some].tolist()
