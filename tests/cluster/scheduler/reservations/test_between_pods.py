"""A reserve pod keeps other pods away as a pod does, but not those that its place is for."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import ANNOTATION_RESERVE_POD
from cluster.scheduler.plugins.between_pods.pod_affinity import InterPodAffinity
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.plugins.contract import Filter
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts

_HOST = "kubernetes.io/hostname"
_SELECTOR = {"matchLabels": {"kind": "db"}}
_APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": _SELECTOR, "topologyKey": _HOST}
        ]
    }
}
_SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": _HOST,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": _SELECTOR,
    }
]


def _tables(shapes: Shapes, **spec: Any) -> Tables:
    tables = Tables()
    for name in ("n", "m"):
        tables.upsert_node(make_node(name))
    reserve = make_pod(
        "r", labels={"kind": "db"}, annotations={ANNOTATION_RESERVE_POD: "true"}, **spec
    )
    tables.place(Booking("default/r", "uid-r", shapes.of(reserve), "n"))
    return tables


def _held(plugin: Filter, pod: PodShape, tables: Tables) -> list[bool]:
    if not plugin.applies(pod, tables):
        return [False, False]
    return [bool(bits) for bits in plugin.filter(pod, tables, slice(0, 2)).tolist()]


@pytest.mark.parametrize(
    ("plugin", "spec", "reserved"),
    [
        (InterPodAffinity(), {"affinity": _APART}, {}),
        (PodTopologySpread(), {"topologySpreadConstraints": _SPREAD}, {}),
        (InterPodAffinity(), {}, {"affinity": _APART}),
    ],
)
def test_a_pod_that_matches_a_reservation_does_not_meet_reserve_pods(
    plugin: Filter, spec: dict[str, Any], reserved: dict[str, Any]
) -> None:
    shapes = Shapes()
    tables = _tables(shapes, **reserved)
    pod = shapes.of(make_pod("p", labels={"kind": "db", "app": "a"}, **spec))
    stranger = shapes.of(make_pod("p", labels={"kind": "db"}, **spec))
    assert _held(plugin, pod, tables) == [True, False]
    version = plugin.cluster_version(pod, tables)
    tables.reservations.upsert(make_facts("r"))
    assert plugin.cluster_version(pod, tables) != version
    assert _held(plugin, pod, tables) == [False, False]
    assert _held(plugin, stranger, tables) == [True, False]
    # Pods that run are met as ever.
    tables.place(Booking("default/q", "uid-q", stranger, "m"))
    assert _held(plugin, pod, tables)[1] is bool(spec)
    tables.reservations.delete("uid-r")
    tables.remove("uid-q")
    assert _held(plugin, pod, tables) == [True, False]
