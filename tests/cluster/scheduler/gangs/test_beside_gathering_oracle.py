"""Random networks: the nodes that a gang gets, and how near nodes are to a job, as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle.gathering import Gathering, NotGathered, Offers
from cluster.scheduler.plugins.between_pods.near_pods import NetworkTopologyScore
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import Layer, NetworkTopology
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.gangs.gathering_oracle import LAYERS, Oracle, path
from tests.cluster.scheduler.making import make_node, make_pod

_SELECTOR = {"scheduling.koordinator.sh/network-topology-selector": "job"}


@dataclass(frozen=True)
class _Node:
    spine: str
    rack: str
    headroom: int
    existing: int
    score: int


_NODES = st.lists(
    st.builds(
        _Node,
        # Few have no spine, which is the layer above, or no rack.
        spine=st.sampled_from(["s", "s", "t", "t", "u", ""]),
        rack=st.sampled_from(["A", "A", "B", "C", ""]),
        headroom=st.integers(0, 5),
        existing=st.sampled_from([0, 0, 0, 1, 2]),
        score=st.sampled_from([0, 0, 50, 80]),
    ),
    min_size=1,
    max_size=9,
)


def _network(nodes: list[_Node]) -> tuple[Tables, NetworkTopology]:
    tables = Tables()
    for number, node in enumerate(nodes):
        labels = {"spine": node.spine, "rack": node.rack}
        present = {key: value for key, value in labels.items() if value}
        tables.upsert_node(make_node(f"n{number}", labels=present))
    network = NetworkTopology(tables.nodes)
    network.set((Layer("SpineLayer", ("spine",)), Layer("RackLayer", ("rack",))))
    return tables, network


def _oracle(nodes: list[_Node], **more: Any) -> Oracle:
    return Oracle(
        {f"n{n}": path(f"n{n}", node.spine, node.rack) for n, node in enumerate(nodes)},
        more.pop("headroom", {f"n{n}": node.headroom for n, node in enumerate(nodes)}),
        {f"n{n}": node.existing for n, node in enumerate(nodes)},
        **more,
    )


def _nodes(*nodes: tuple[str, int, int]) -> list[_Node]:
    """nodes: (rack, headroom, score)."""
    return [_Node("s", rack, headroom, 0, score) for rack, headroom, score in nodes]


@settings(max_examples=400, deadline=None)
# Rack A comes first and has nodes for 4 pods of 6, so it takes none.
@example(
    nodes=[_Node("s", "A", 4, 1, 0), *_nodes(*((rack, 4, 0) for rack in "ABBB"))],
    pods=16,
    must="",
    multiples={"RackLayer": 6, "NodeTopologyLayer": 4},
)
# The score of a node that takes no pod does not count for its rack.
@example(
    nodes=_nodes(("A", 1, 0), ("A", 1, 0), ("A", 0, 80), ("B", 1, 50), ("B", 1, 0)),
    pods=2,
    must="",
    multiples={},
)
@given(
    nodes=_NODES,
    pods=st.integers(1, 10),
    must=st.sampled_from(["", *LAYERS]),
    multiples=st.dictionaries(st.sampled_from(LAYERS), st.integers(2, 4), max_size=2),
)
def test_a_gang_gets_the_nodes_of_the_oracle(
    nodes: list[_Node], pods: int, must: str, multiples: dict[str, int]
) -> None:
    tables, network = _network(nodes)
    tree = network.tree()
    assert tree is not None
    columns = [
        np.array([getattr(node, name) for node in nodes], dtype=np.int64)
        for name in ("headroom", "existing", "score")
    ]
    gather = Gather(must=(must,) if must else (), multiples=tuple(multiples.items()))
    oracle = _oracle(
        nodes,
        scores={f"n{n}": node.score for n, node in enumerate(nodes)},
        multiples=multiples,
    )
    expected = oracle.gather(pods, must)
    try:
        chosen = Gathering(tree, tables.nodes, gather, Offers(*columns), pods).choose()
    except NotGathered:
        assert expected is None
        return
    assert expected is not None
    assert [(tables.nodes.name(row), count) for row, count in chosen] == list(expected.items())


@settings(max_examples=200, deadline=None)
@given(nodes=_NODES, data=st.data())
def test_nodes_are_as_near_to_a_job_as_the_oracle_says(
    nodes: list[_Node], data: st.DataObject
) -> None:
    tables, network = _network(nodes)
    shapes = Shapes()
    shape = shapes.of(make_pod("p", labels={"job": "j"}, annotations=_SELECTOR))
    for number, node in enumerate(nodes):
        for count in range(node.existing):
            uid = f"u{number}-{count}"
            tables.place(Booking(key=uid, uid=uid, shape=shape, node=f"n{number}"))
    rows = data.draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1))
    feasible = np.array(sorted(rows), dtype=np.intp)
    scores = NetworkTopologyScore(network).score_set(shape, tables, feasible)
    oracle = _oracle(nodes, headroom={f"n{n}": int(n in rows) for n in range(len(nodes))})
    found = {f"n{row}": int(score) for row, score in zip(feasible, scores, strict=True)}
    assert found == oracle.nearness()
