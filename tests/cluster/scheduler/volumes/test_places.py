"""Places of volumes as numbers and layers, and the sizes that reports of storage give."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from apis.decode import json_decoder
from apis.meta import LabelSelector, LabelSelectorRequirement
from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm
from apis.storage import CSIStorageCapacity
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.objects import largest_volume
from cluster.scheduler.tables.volumes.places import (
    NOWHERE,
    Place,
    Places,
    place_of_selector,
    place_of_topologies,
)
from tests.cluster.scheduler.making import make_node

_decode_capacity = json_decoder(CSIStorageCapacity)


def _label(key: str, *values: str) -> Place:
    requirement = NodeSelectorRequirement(key=key, operator="In", values=values)
    return (NodeSelectorTerm(match_expressions=(requirement,)),)


def _tables(*zones: str) -> Tables:
    tables = Tables()
    for number, zone in enumerate(zones):
        labels = {"zone": zone} if zone else {}
        tables.upsert_node(make_node(f"n{number}", labels={"host": f"n{number}", **labels}))
    return tables


def _layers(places: Places) -> list[list[int]]:
    return sorted(layer.tolist() for layer in places.layers())


def test_places_of_one_label_share_a_layer() -> None:
    places = Places(_tables("a", "b", "").nodes)
    a, b, c = (places.hold(_label("zone", each)) for each in "abc")
    assert _layers(places) == [[a, b, NOWHERE]]
    first, both = places.hold(_label("host", "n0")), places.hold(_label("zone", "a", "b"))
    everywhere = places.hold(None)
    assert places.hold(_label("zone", "a")) == a
    assert _layers(places) == sorted(
        [
            [a, b, NOWHERE],
            [first, NOWHERE, NOWHERE],
            [both, both, NOWHERE],
            [everywhere, everywhere, everywhere],
        ]
    )
    inside = {number: places.rows_in(number).tolist() for number in (a, c, both, everywhere)}
    assert inside == {
        a: [True, False, False],
        c: [False, False, False],
        both: [True, True, False],
        everywhere: [True, True, True],
    }


@pytest.mark.parametrize("seed", range(3))
def test_layers_that_follow_changes_equal_layers_that_are_made_afresh(seed: int) -> None:
    draw = Random(seed)
    tables = _tables(*(draw.choice("ab") for _ in range(40)))
    places = Places(tables.nodes)
    held: list[tuple[int, Place]] = []
    choices: list[Place] = [
        *(_label("zone", each) for each in "abc"),
        _label("zone", "a", "c"),
        *(_label("host", f"n{number}") for number in range(45)),
        place_of_selector(
            LabelSelector(match_expressions=(LabelSelectorRequirement("zone", "DoesNotExist"),))
        ),
        None,
    ]
    for _ in range(300):
        number = draw.randrange(45)
        match draw.randrange(5):
            case 0:
                tables.delete_node(f"n{number}")
            case 1:
                zone = draw.choice(("a", "b", "c", ""))
                labels = {"host": f"n{number}", **({"zone": zone} if zone else {})}
                tables.upsert_node(make_node(f"n{number}", labels=labels))
            case 2 if held:
                places.release(held.pop(draw.randrange(len(held)))[0])
            case _:
                place = draw.choice(choices)
                held.append((places.hold(place), place))
        if draw.random() < 0.5:
            continue
        fresh = Places(tables.nodes)
        for number, place in held:
            expected = fresh.rows_in(fresh.hold(place))
            assert places.rows_in(number).tolist() == expected.tolist(), place
        of_layers = {tuple(layer.tolist()) for layer in places.layers()}
        assert all(len(layer) == len(tables.nodes) for layer in of_layers)


def test_a_place_keeps_its_number_until_it_is_released_as_often_as_it_was_held() -> None:
    places = Places(_tables("a", "b").nodes)
    a = places.hold(_label("zone", "a"))
    assert places.hold(_label("zone", "a")) == a
    both = places.hold(_label("zone", "a", "b"))
    assert places.size == 2
    places.release(a)
    assert _layers(places) == sorted([[a, NOWHERE], [both, both]])
    places.release(a)
    assert _layers(places) == [[both, both]]
    places.release(both)
    assert _layers(places) == []
    # Numbers are used again, with nothing of the place that had them before.
    numbers = {places.hold(_label("host", "n1")), places.hold(_label("zone", "b"))}
    assert numbers == {a, both}
    assert places.size == 2
    assert all(layer[0] == NOWHERE for layer in _layers(places))


def test_layers_follow_nodes_and_their_labels() -> None:
    tables = _tables("a")
    places = Places(tables.nodes)
    a = places.hold(_label("zone", "a"))
    many = places.hold(_label("zone", "a", "b"))
    assert _layers(places) == [[a], [many]]
    tables.upsert_node(make_node("n1", labels={"zone": "a"}))
    assert _layers(places) == [[a, a], [many, many]]
    tables.upsert_node(make_node("n0", labels={"zone": "b"}))
    assert _layers(places) == sorted([[NOWHERE, a], [many, many]])


def test_values_of_one_label_come_and_go_in_its_layer() -> None:
    places = Places(_tables("a", "b").nodes)
    a = places.hold(_label("zone", "a"))
    assert _layers(places) == [[a, NOWHERE]]
    b = places.hold(_label("zone", "b"))
    assert _layers(places) == [[a, b]]
    places.release(a)
    assert _layers(places) == [[NOWHERE, b]]


@pytest.mark.parametrize(
    ("selector", "place"),
    [
        (LabelSelector(), None),
        (LabelSelector(match_labels={"zone": "a"}), _label("zone", "a")),
        (
            LabelSelector(
                match_labels={"zone": "a"},
                match_expressions=(LabelSelectorRequirement(key="host", operator="Exists"),),
            ),
            (
                NodeSelectorTerm(
                    match_expressions=(
                        NodeSelectorRequirement(key="zone", operator="In", values=("a",)),
                        NodeSelectorRequirement(key="host", operator="Exists"),
                    )
                ),
            ),
        ),
    ],
)
def test_a_selector_is_a_place(selector: LabelSelector, place: Place) -> None:
    assert place_of_selector(selector) == place


def test_a_term_that_asks_for_two_labels_holds_where_both_do() -> None:
    nodes: NodeTable = _tables("a", "a", "b").nodes
    places = Places(nodes)
    both = places.hold(place_of_selector(LabelSelector(match_labels={"zone": "a", "host": "n1"})))
    assert places.rows_in(both).tolist() == [False, True, False]
    other = NodeSelectorRequirement(key="zone", operator="NotIn", values=("a",))
    outside = places.hold((NodeSelectorTerm(match_expressions=(other,)),))
    assert places.rows_in(outside).tolist() == [False, False, True]
    field = NodeSelectorRequirement(key="metadata.name", operator="In", values=("n2",))
    named = places.hold((NodeSelectorTerm(match_fields=(field,)),))
    assert places.rows_in(named).tolist() == [False, False, True]


def test_a_class_without_topologies_is_everywhere() -> None:
    assert place_of_topologies(()) is None


@pytest.mark.parametrize(
    ("report", "size"),
    [
        ({}, -1),
        ({"capacity": "0"}, 0),
        ({"capacity": "4Gi"}, 4 << 30),
        ({"capacity": "4Gi", "maximumVolumeSize": "1Gi"}, 1 << 30),
        ({"maximumVolumeSize": "1Gi"}, 1 << 30),
        ({"capacity": "-1"}, 0),
    ],
)
def test_a_report_bounds_new_volumes_by_their_size_or_what_is_left(
    report: dict[str, Any], size: int
) -> None:
    made = {"metadata": {"name": "r"}, "storageClassName": "made", **report}
    assert largest_volume(_decode_capacity(msgspec.json.encode(made))) == size
