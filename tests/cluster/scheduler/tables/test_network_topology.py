"""The layers of the network and the tree of the nodes, and how gangs ask to be gathered in it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from apis.decode import to_plain
from apis.errors import InputError
from cluster.scheduler.tables.gather import NO_INDEX, Gather, gather_of, index_of, selected
from cluster.scheduler.tables.network_topology import (
    OUTSIDE,
    NetworkTopology,
    detail_of,
    layers_of,
    tree_of,
)
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.tables.networks import RACKS, topology

_SPEC = "gang.scheduling.koordinator.sh/network-topology-spec"


def test_layers_are_read_from_the_widest_to_the_narrowest_in_any_order() -> None:
    layers = layers_of(topology(*reversed(RACKS)))
    assert [(layer.name, layer.labels) for layer in layers] == [
        ("SpineLayer", ("spine",)),
        ("RackLayer", ("rack", "old-rack")),
    ]
    assert layers_of(topology(("NodeTopologyLayer", "ClusterTopologyLayer", []))) == ()


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([], "expected a layer NodeTopologyLayer"),
        ([RACKS[0], RACKS[0], *RACKS[1:]], "'SpineLayer': is given twice"),
        ([RACKS[1], RACKS[2]], "'SpineLayer': is the parent of a layer and no layer itself"),
        ([("RackLayer", "RackLayer", ["r"]), RACKS[2]], "'RackLayer': is above itself"),
        ([("RackLayer", "", ["r"]), RACKS[2]], "'RackLayer': expected the parent"),
        ([("NodeTopologyLayer", "", [])], "'NodeTopologyLayer': expected the parent"),
        ([("RackLayer", "ClusterTopologyLayer", []), RACKS[2]], "'RackLayer': expected a labelKey"),
        ([*RACKS, ("Other", "SpineLayer", ["o"])], "'Other': is not above NodeTopologyLayer"),
    ],
)
def test_bad_layers_are_named(layers: list[tuple[str, str, list[str]]], problem: str) -> None:
    with pytest.raises(InputError) as raised:
        layers_of(topology(*layers))
    assert "ClusterNetworkTopology default: spec.networkTopologySpec" in str(raised.value)
    assert problem in str(raised.value)


def _tables(nodes: dict[str, dict[str, str]]) -> Tables:
    tables = Tables()
    for name, labels in nodes.items():
        tables.upsert_node(make_node(name, labels=labels))
    return tables


_NODES = {
    "a1": {"spine": "s1", "rack": "r1"},
    "a2": {"spine": "s1", "old-rack": "r1"},
    "b1": {"spine": "s1", "rack": "r2", "old-rack": "r1"},
    "c1": {"spine": "s2", "rack": "r1"},
    "no-rack": {"spine": "s2"},
    "no-spine": {"rack": "r1"},
}


def test_nodes_are_put_into_the_tree_by_their_labels() -> None:
    tables = _tables(_NODES)
    tree = tree_of(layers_of(topology(*RACKS)), tables.nodes)
    paths = {}
    for name in _NODES:
        row = tables.nodes.row(name)
        assert row is not None
        lowest = int(tree.domain_of[row])
        names = [] if lowest == OUTSIDE else [tree.domains[n].name for n in tree.above(lowest)]
        paths[name] = "/".join(reversed(names))
    assert paths == {
        "a1": "/s1/r1",
        "a2": "/s1/r1",
        "b1": "/s1/r2",
        # Another rack of the same name below another spine.
        "c1": "/s2/r1",
        "no-rack": "/s2/no-rack",
        "no-spine": "",
    }
    sums = tree.sums(np.ones(len(tables.nodes), dtype=np.int64))
    assert int(sums[0]) == 5


def test_the_status_lists_each_domain_before_those_below_it() -> None:
    tables = _tables(_NODES)
    detail = detail_of(tree_of(layers_of(topology(*RACKS)), tables.nodes))
    assert [(one.topology_info.topology_name, one.node_num) for one in detail] == [
        ("", 5),
        ("s1", 3),
        ("r1", 2),
        ("r2", 1),
        ("s2", 2),
        ("no-rack", 1),
        ("r1", 1),
    ]
    assert to_plain(detail[1]) == {
        "topologyInfo": {"topologyLayer": "SpineLayer", "topologyName": "s1"},
        "parentTopologyInfo": {"topologyLayer": "ClusterTopologyLayer", "topologyName": ""},
        "childTopologyLayer": "RackLayer",
        "childTopologyNames": ("r1", "r2"),
        "nodeNum": 3,
    }
    assert detail[2].child_topology_layer == "NodeTopologyLayer"
    assert detail[2].child_topology_names == ()


def test_the_tree_follows_the_nodes_and_is_kept_while_they_stay_the_same() -> None:
    tables = _tables(_NODES)
    network = NetworkTopology(tables.nodes)
    assert network.tree() is None
    network.set(layers_of(topology(*RACKS)))
    tree = network.tree()
    assert tree is not None and network.tree() is tree
    tables.upsert_node(make_node("no-spine", labels={"spine": "s3", "rack": "r1"}))
    changed = network.tree()
    assert changed is not None and len(changed.domains) == len(tree.domains) + 2
    network.set(None)
    assert network.tree() is None


# --- what gangs and pods ask ---------------------------------------------------------------------


def test_a_gang_says_how_it_is_gathered() -> None:
    rules = [
        {"layer": "SpineLayer", "strategy": "MustGather"},
        {"layer": "RackLayer", "strategy": "PreferGather", "podCountMultiple": 4},
        {"layer": "NodeTopologyLayer", "podCountMultiple": 1},
    ]
    assert gather_of({_SPEC: json.dumps({"gatherStrategy": rules})}, obj="Pod a/b") == Gather(
        must=("SpineLayer",),
        prefer=("RackLayer", "NodeTopologyLayer"),
        multiples=(("RackLayer", 4),),
    )
    for absent in ("", "null", "{}", '{"gatherStrategy":[]}'):
        assert gather_of({_SPEC: absent}, obj="Pod a/b") is None


@pytest.mark.parametrize(
    "rules",
    [
        [{"strategy": "MustGather"}],
        [{"layer": "a", "strategy": "Together"}],
        [{"layer": "a", "podCountMultiple": -1}],
        [{"layer": "a"}, {"layer": "a"}],
        "MustGather",
    ],
)
def test_a_bad_annotation_is_named(rules: Any) -> None:
    with pytest.raises(InputError) as raised:
        gather_of({_SPEC: json.dumps({"gatherStrategy": rules})}, obj="Pod a/b")
    assert str(raised.value).startswith("Pod a/b: ")
    assert "network-topology-spec" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "index"),
    [("0", 0), ("12", 12), ("", -1), ("-3", -1), ("x", -1), ("1" * 50, -1), ("٣", -1)],
)
def test_an_index_that_cannot_be_used_is_none(text: str, index: int) -> None:
    key = "gang.scheduling.koordinator.sh/network-topology-index"
    shape = Shapes().of(make_pod("p", annotations={key: text}))
    assert index_of(shape) == index


def test_pods_of_a_job_are_named_by_a_label() -> None:
    key = "scheduling.koordinator.sh/network-topology-selector"
    shapes = Shapes()
    labels = {"job": "j1"}
    assert selected(shapes.of(make_pod("p", labels=labels, annotations={key: "job"}))) == (
        "job",
        "j1",
    )
    assert selected(shapes.of(make_pod("p", labels=labels, annotations={key: "other"}))) is None
    assert selected(shapes.of(make_pod("p", labels=labels))) is None


@pytest.mark.parametrize(
    ("text", "index"),
    [("0", 0), ("999999999", 999999999), ("1000000000", NO_INDEX), ("", NO_INDEX), ("x", NO_INDEX)],
)
def test_an_index_has_at_most_nine_digits(text: str, index: int) -> None:
    key = "gang.scheduling.koordinator.sh/network-topology-index"
    assert index_of(Shapes().of(make_pod("p", annotations={key: text}))) == index


def test_the_tree_follows_nodes_that_come_and_go_and_their_labels() -> None:
    tables = _tables({"a": {"spine": "s1", "rack": "r1"}})
    network = NetworkTopology(tables.nodes)
    assert network.tree() is None
    network.set(layers_of(topology(*RACKS)))

    def names() -> list[str]:
        tree = network.tree()
        assert tree is not None and network.tree() is tree
        return sorted(domain.name for domain in tree.domains)

    first = names()
    tables.upsert_node(make_node("b", labels={"spine": "s1", "rack": "r2"}))
    with_two = names()
    assert len(with_two) > len(first)
    tables.upsert_node(make_node("b", labels={"spine": "s1", "rack": "r3"}))
    moved = names()
    assert len(moved) == len(with_two) and moved != with_two
    tables.delete_node("b")
    assert names() == first
    network.set(None)
    assert network.tree() is None
    network.set(layers_of(topology(RACKS[0], ("NodeTopologyLayer", "SpineLayer", []))))
    assert len(names()) < len(first)
