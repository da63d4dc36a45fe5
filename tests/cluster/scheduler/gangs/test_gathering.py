"""Which nodes a gang gets in the network: worked examples, and properties on random trees."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle.gathering import Gathering, NotGathered, Offers
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import Layer, NetworkTree, tree_of
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node

_LAYERS = (Layer("SpineLayer", ("spine",)), Layer("RackLayer", ("rack",)))
_MUST_RACK = Gather(must=("RackLayer",))
_MUST_SPINE = Gather(must=("SpineLayer",))
_ANY = Gather()

_TWO_RACKS = {"n1": "s/A", "n2": "s/A", "n3": "s/B", "n4": "s/B"}


class _Network:
    """nodes: name -> spine/rack."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self.tables = Tables()
        for name, path in nodes.items():
            spine, _, rack = path.partition("/")
            self.tables.upsert_node(make_node(name, labels={"spine": spine, "rack": rack}))
        self.tree: NetworkTree = tree_of(_LAYERS, self.tables.nodes)

    def column(self, values: Mapping[str, int]) -> np.ndarray:
        column = np.zeros(len(self.tables.nodes), dtype=np.int64)
        for name, value in values.items():
            row = self.tables.nodes.row(name)
            assert row is not None
            column[row] = value
        return column

    def gather(
        self,
        pods: int,
        headroom: Mapping[str, int],
        gather: Gather = _ANY,
        *,
        existing: Mapping[str, int] | None = None,
        scores: Mapping[str, int] | None = None,
    ) -> dict[str, int] | str:
        """Return the pods of each node, in the order of filling, or why there are none."""
        offers = Offers(
            self.column(headroom), self.column(existing or {}), self.column(scores or {})
        )
        try:
            filled = Gathering(self.tree, self.tables.nodes, gather, offers, pods).choose()
        except NotGathered as error:
            return str(error)
        return {self.tables.nodes.name(row): count for row, count in filled}


@pytest.mark.parametrize(
    ("pods", "headroom", "gather", "expected"),
    [
        # Both racks have room; the one with less headroom leaves the other to larger gangs.
        (6, {"n1": 4, "n2": 4, "n3": 3, "n4": 3}, _MUST_RACK, {"n3": 3, "n4": 3}),
        (7, {"n1": 4, "n2": 4, "n3": 3, "n4": 3}, _MUST_RACK, {"n1": 4, "n2": 3}),
        # One node has room for all; nothing is closer.
        (3, {"n1": 4, "n2": 4, "n3": 3, "n4": 3}, _MUST_RACK, {"n3": 3}),
        # In a rack the node with the most headroom is filled first.
        (5, {"n1": 1, "n2": 4, "n3": 1, "n4": 1}, _ANY, {"n2": 4, "n1": 1}),
        # No rack has room, so the spine is taken, where that is allowed.
        (9, {"n1": 4, "n2": 4, "n3": 3, "n4": 3}, _MUST_SPINE, {"n1": 4, "n2": 4, "n3": 1}),
        (
            9,
            {"n1": 4, "n2": 4, "n3": 3, "n4": 3},
            _MUST_RACK,
            "no candidate topology nodes can accommodate job, desiredOfferSlot: 9,"
            " RackLayer: A 8, B 6",
        ),
        (
            5,
            {"n1": 4},
            Gather(must=("NodeTopologyLayer",)),
            "no candidate topology nodes can accommodate job, desiredOfferSlot: 5,"
            " NodeTopologyLayer: n1 4, n2 0, n3 0, n4 0",
        ),
        (1, {"n1": 4}, Gather(must=("Pod",)), "the cluster network topology has no layer Pod"),
    ],
)
def test_worked_examples(
    pods: int, headroom: dict[str, int], gather: Gather, expected: dict[str, int] | str
) -> None:
    found = _Network(_TWO_RACKS).gather(pods, headroom, gather)
    assert found == expected
    if isinstance(found, dict) and isinstance(expected, dict):
        assert list(found) == list(expected)


def test_pods_of_the_same_job_draw_a_gang_to_their_domain() -> None:
    network = _Network(_TWO_RACKS)
    headroom = {"n1": 4, "n2": 4, "n3": 3, "n4": 3}
    assert network.gather(6, headroom, _MUST_RACK, existing={"n1": 1}) == {"n1": 4, "n2": 2}
    # On the nodes of equal racks, the node with pods of the job is filled first.
    assert network.gather(6, headroom, _MUST_RACK, existing={"n4": 1}) == {"n4": 3, "n3": 3}


def test_equal_domains_are_ranked_by_score_then_by_name() -> None:
    network = _Network(_TWO_RACKS)
    headroom = dict.fromkeys(_TWO_RACKS, 2)
    assert network.gather(4, headroom, _MUST_RACK) == {"n1": 2, "n2": 2}
    assert network.gather(4, headroom, _MUST_RACK, scores={"n3": 9}) == {"n3": 2, "n4": 2}


def test_counts_of_pods_are_multiples_where_a_layer_asks_for_it() -> None:
    network = _Network(_TWO_RACKS)
    headroom = {"n1": 3, "n2": 3, "n3": 3, "n4": 3}
    by_node = Gather(multiples=(("NodeTopologyLayer", 2),))
    assert network.gather(4, headroom, by_node) == {"n1": 2, "n2": 2}
    by_rack = Gather(must=("SpineLayer",), multiples=(("RackLayer", 4),))
    assert network.gather(8, headroom, by_rack) == {"n1": 3, "n2": 1, "n3": 3, "n4": 1}
    message = network.gather(9, headroom, by_rack)
    assert isinstance(message, str) and "SpineLayer: s 8" in message


def test_a_node_outside_of_the_tree_is_not_taken() -> None:
    network = _Network({"n1": "s/A", "lost": "/A"})
    assert network.gather(2, {"n1": 1, "lost": 9}) == (
        "no candidate topology nodes can accommodate job, desiredOfferSlot: 2,"
        " ClusterTopologyLayer: all nodes 1"
    )


_HEADROOM = st.lists(st.tuples(st.sampled_from(["s/A", "s/B", "t/A", "t/C"]), st.integers(0, 4)),
                  min_size=1, max_size=7)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    nodes=_HEADROOM, pods=st.integers(1, 9), must=st.sampled_from(["", "SpineLayer", "RackLayer"])
)
def test_all_pods_are_placed_in_the_narrowest_domain_or_no_domain_has_room(
    nodes: list[tuple[str, int]], pods: int, must: str
) -> None:
    paths = {f"n{number}": path for number, (path, _) in enumerate(nodes)}
    headroom = {f"n{number}": count for number, (_, count) in enumerate(nodes)}
    found = _Network(paths).gather(pods, headroom, Gather(must=(must,) if must else ()))

    def room(depth: int) -> int:
        """Return the headroom of the widest domain of a depth: cluster 0 to node 3."""
        sums: dict[tuple[str, ...], int] = {}
        for name, path in paths.items():
            domain = (*path.split("/"), name)[:depth]
            sums[domain] = sums.get(domain, 0) + headroom[name]
        return max(sums.values())

    highest = {"": 0, "SpineLayer": 1, "RackLayer": 2}[must]
    fitting = [depth for depth in range(highest, 4) if room(depth) >= pods]
    if not fitting:
        assert isinstance(found, str)
        return
    assert isinstance(found, dict)
    assert sum(found.values()) == pods
    assert all(0 < count <= headroom[name] for name, count in found.items())
    deepest = max(fitting)
    used = {(*paths[name].split("/"), name)[:deepest] for name in found}
    assert len(used) == 1
    # The nodes of one domain are filled one after another, the one with the most headroom first.
    if deepest == 2:
        assert all(headroom[first] >= headroom[second] for first, second in pairwise(found))
