"""What pods and reservations mention of other pods."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.meta import LabelSelector
from apis.scheduling import ReservationOwner
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.matching import MatchTable
from cluster.scheduler.tables.mentions import (
    EVERY_NAMESPACE,
    OWNERS,
    Mention,
    Mentions,
    label,
    mentioned_by_affinity,
    mentioned_by_owners,
    mentioned_by_pod,
    namespace,
)
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod


def _term(key: str, **more: Any) -> dict[str, Any]:
    return {"topologyKey": "zone", "labelSelector": {"matchLabels": {key: "x"}}, **more}


def test_terms_of_affinity_mention_labels_and_namespaces() -> None:
    shape = Shapes().of(
        make_pod(
            "p",
            affinity={
                "podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        _term("a", namespaces=["one", "two"])
                    ],
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {"weight": 1, "podAffinityTerm": _term("b", namespaceSelector={})}
                    ],
                },
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "zone",
                            "labelSelector": {
                                "matchExpressions": [{"key": "c", "operator": "Exists"}]
                            },
                        }
                    ]
                },
            },
        )
    )
    expected = {
        label("a"), namespace("one"), namespace("two"),
        label("b"), EVERY_NAMESPACE,
        label("c"), namespace("default"),
    }  # fmt: skip
    assert mentioned_by_affinity(shape) == expected
    assert mentioned_by_pod(shape) == expected


@pytest.mark.parametrize(
    ("spec", "mentioned"),
    [
        ({}, set()),
        (
            {
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "zone",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": {"matchLabels": {"a": "x"}},
                        "matchLabelKeys": ["b"],
                    }
                ]
            },
            {label("a"), label("b"), namespace("default")},
        ),
        (
            {
                "topologySpreadConstraints": [
                    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                ]
            },
            {namespace("default")},
        ),
        (
            {
                "annotations": {
                    "scheduling.koordinator.sh/network-topology-selector": "job",
                }
            },
            {label("job"), namespace("default")},
        ),
        (
            {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
            {namespace("default")},
        ),
    ],
)
def test_a_pod_mentions_what_is_counted_for_it(
    spec: dict[str, Any], mentioned: set[Mention]
) -> None:
    assert mentioned_by_pod(Shapes().of(make_pod("p", **spec))) == mentioned


def test_a_pod_mentions_what_it_is_spread_by_without_constraints_of_its_own() -> None:
    selector = LabelSelector(match_labels={"app": "a"})
    shape = Shapes().of(make_pod("p"), spread_by=selector)
    assert mentioned_by_pod(shape) == {label("app"), namespace("default")}
    everything = Shapes().of(make_pod("p"), spread_by=LabelSelector())
    assert mentioned_by_pod(everything) == {namespace("default")}


@pytest.mark.parametrize(
    ("owner", "mentioned"),
    [
        ({"labelSelector": {"matchLabels": {"a": "x"}}}, {label("a")}),
        ({"object": {"name": "p", "namespace": "ns"}}, {namespace("ns")}),
        ({"object": {"name": "p"}}, set()),
        ({"controller": {"name": "c", "namespace": "ns"}}, {OWNERS, namespace("ns")}),
        ({"controller": {"name": "c"}}, {OWNERS}),
    ],
)
def test_owners_of_a_reservation_mention_pods(
    owner: dict[str, Any], mentioned: set[Mention]
) -> None:
    assert mentioned_by_owners([msgspec.convert(owner, ReservationOwner)]) == mentioned


def test_the_version_grows_when_something_begins_or_ceases_to_be_mentioned() -> None:
    mentions = Mentions()
    before = mentions.version
    mentions.add([label("a")])
    first = mentions.version
    assert first > before and mentions.now == {label("a")}
    mentions.add([label("a")])
    mentions.remove([label("a")])
    assert mentions.version == first and mentions.now == {label("a")}
    mentions.remove([label("a")])
    assert mentions.version > first and mentions.now == frozenset()


def test_pods_on_nodes_mention_others_as_long_as_there_are_any() -> None:
    mentions = Mentions()
    table = MatchTable(mentions)
    shape = Shapes().of(
        make_pod(
            "p",
            affinity={
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_term("a")]}
            },
        )
    )
    pods = [Booking(f"default/p{number}", f"p{number}", shape, "n") for number in range(2)]
    versions = [table.affinity_version]
    for pod in pods:
        table.place(pod, 0)
        assert mentions.now == {label("a"), namespace("default")}
        assert list(table.shapes_with_affinity()) == list(table.shapes()) == [shape]
    versions.append(table.affinity_version)
    table.remove(pods[0], 0)
    assert mentions.now and list(table.rows_of(shape)) == [0]
    table.remove(pods[1], 0)
    versions.append(table.affinity_version)
    assert not mentions.now and not list(table.shapes()) and not list(table.rows_of(shape))
    assert not list(table.shapes_with_affinity())
    assert versions[0] < versions[1] < versions[2]
