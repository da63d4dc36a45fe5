"""Which pods may use which reservations."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from apis.keys import (
    ANNOTATION_EXACT_MATCH_RESERVATION,
    ANNOTATION_RESERVATION_AFFINITY,
    ANNOTATION_RESERVE_POD,
    LABEL_RESERVATION_IGNORED,
)
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.reservations.asked import Asked, asked_of
from cluster.scheduler.tables.reservations.matching import Match, match
from cluster.scheduler.tables.shapes import PodShape, Shapes, personal
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import file
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts, put

_CONTROLLER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs-1"}


def _pod(affinity: dict[str, Any] | None = None, **more: Any) -> PodShape:
    annotations = dict(more.pop("annotations", {}))
    if affinity is not None:
        annotations[ANNOTATION_RESERVATION_AFFINITY] = json.dumps(affinity)
    labels = {"app": "a", **more.pop("labels", {})}
    return Shapes().of(make_pod("p", labels=labels, annotations=annotations, **more))


def _owned(controller: bool = True) -> PodShape:
    metadata = {
        "name": "p",
        "namespace": "default",
        "uid": "u",
        "ownerReferences": [{**_CONTROLLER, "controller": controller}],
    }
    return Shapes().of(
        decode_scheduling_pod(
            json.dumps({"metadata": metadata, "spec": {"containers": [{"name": "c"}]}}).encode()
        )
    )


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ([], False),
        ([{}], True),
        ([{"labelSelector": {"matchLabels": {"app": "a"}}}], True),
        ([{"labelSelector": {"matchLabels": {"app": "b"}}}], False),
        (
            [
                {"labelSelector": {"matchLabels": {"app": "b"}}},
                {"labelSelector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
            ],
            True,
        ),
        (
            [
                {
                    "labelSelector": {
                        "matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "a"]}]
                    }
                }
            ],
            True,
        ),
        # Members of one entry must all match.
        ([{"labelSelector": {}, "object": {"name": "q"}}], False),
        ([{"labelSelector": {}, "object": {"name": "p"}}], True),
        ([{"object": {"uid": "u"}}], True),
        ([{"object": {"uid": "other", "name": "p"}}], False),
        ([{"object": {"name": "p", "namespace": "elsewhere"}}], False),
        ([{"object": {"name": "p", "namespace": "default", "kind": "Anything"}}], True),
        ([{"object": {"namespace": "default"}}], True),
    ],
)
def test_owners(owners: list[dict[str, Any]], expected: bool) -> None:
    facts = make_facts("r", owners=tuple(owners))
    shape = _pod()
    assert (match(personal(shape, "p", "u"), facts, {}) is Match.YES) is expected
    # The index finds what comparing finds.
    tables = Tables()
    tables.upsert_node(make_node("n"))
    put(tables, Shapes(), facts, "n", {"cpu": "8"})
    mine = tables.reservations.shape_for(shape, "p", "u")
    assert (len(tables.reservations.matched(mine)) == 1) is expected
    # Pods that no reservation names keep their common shape.
    assert tables.reservations.shape_for(shape, "replica", "v") is shape


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({**_CONTROLLER}, True),
        ({**_CONTROLLER, "controller": True}, True),
        ({**_CONTROLLER, "controller": False}, False),
        ({"apiVersion": "", "kind": "", "name": "", "uid": "rs-1"}, True),
        ({"apiVersion": "", "kind": "", "name": "rs", "uid": ""}, True),
        ({"apiVersion": "", "kind": "ReplicaSet", "name": "", "uid": ""}, True),
        ({"apiVersion": "", "kind": "Job", "name": "", "uid": ""}, False),
        ({**_CONTROLLER, "uid": "rs-2"}, False),
        ({**_CONTROLLER, "namespace": "default"}, True),
        ({**_CONTROLLER, "namespace": "elsewhere"}, False),
    ],
)
def test_controllers(wanted: dict[str, Any], expected: bool) -> None:
    facts = make_facts("r", owners=({"controller": wanted},))
    assert (match(_owned(), facts, {}) is Match.YES) is expected
    tables = Tables()
    tables.upsert_node(make_node("n"))
    put(tables, Shapes(), facts, "n", {"cpu": "8"})
    assert (len(tables.reservations.matched(_owned())) == 1) is expected


_UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}
_TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z1"]}]}


def _terms(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"reservationSelectorTerms": list(terms)}
    return {"requiredDuringSchedulingIgnoredDuringExecution": required}


@pytest.mark.parametrize(
    ("affinity", "more", "expected"),
    [
        (None, {}, Match.YES),
        ({"name": "r"}, {}, Match.YES),
        ({"name": "other"}, {}, Match.NAME),
        # A name means the reservation in whatever state it is.
        ({"name": "r"}, {"unschedulable": True, "taints": (("t", "NoSchedule"),)}, Match.YES),
        ({"name": "r", "reservationSelector": {"zone": "no"}}, {}, Match.YES),
        (None, {"unschedulable": True}, Match.UNSCHEDULABLE),
        ({"tolerations": [_UNSCHEDULABLE]}, {"unschedulable": True}, Match.YES),
        # Unlike upstream, a taint keeps pods without the annotation away too.
        (None, {"taints": (("t", "NoSchedule"),)}, Match.TAINT),
        (None, {"taints": (("t", "NoExecute"),)}, Match.TAINT),
        (None, {"taints": (("t", "PreferNoSchedule"),)}, Match.YES),
        ({}, {"taints": (("t", "NoSchedule"),)}, Match.TAINT),
        (
            {"tolerations": [{"key": "t", "operator": "Exists"}]},
            {"taints": (("t", "NoSchedule"),)},
            Match.YES,
        ),
        ({"reservationSelector": {"zone": "z1"}}, {"labels": {"zone": "z1"}}, Match.YES),
        ({"reservationSelector": {"zone": "z1"}}, {"labels": {"zone": "z2"}}, Match.AFFINITY),
        # Labels of the node stand under those of the reservation.
        ({"reservationSelector": {"disk": "ssd"}}, {}, Match.YES),
        ({"reservationSelector": {"disk": "ssd"}}, {"labels": {"disk": "hdd"}}, Match.AFFINITY),
        (_terms(_TERM), {"labels": {"zone": "z1"}}, Match.YES),
        (_terms(_TERM), {}, Match.AFFINITY),
        (_terms({}), {}, Match.AFFINITY),
        (_terms(), {}, Match.AFFINITY),
        (_terms({}, _TERM), {"labels": {"zone": "z1"}}, Match.YES),
        (
            _terms({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["r"]}]}),
            {},
            Match.YES,
        ),
        *(
            (
                _terms({"matchFields": [{"key": key, "operator": operator, "values": values}]}),
                {},
                to,
            )
            for key, operator, values, to in (
                ("metadata.name", "In", ["other"], Match.AFFINITY),
                ("metadata.name", "NotIn", ["other"], Match.YES),
                ("metadata.name", "NotIn", ["r"], Match.AFFINITY),
                ("metadata.name", "Exists", [], Match.AFFINITY),
                ("metadata.uid", "In", ["r"], Match.AFFINITY),
                ("metadata.uid", "NotIn", ["other"], Match.AFFINITY),
            )
        ),
        (
            _terms({"matchExpressions": [{"key": "rank", "operator": "Gt", "values": ["3"]}]}),
            {"labels": {"rank": "4"}},
            Match.YES,
        ),
        (
            _terms({"matchExpressions": [{"key": "rank", "operator": "Lt", "values": ["3"]}]}),
            {"labels": {"rank": "x"}},
            Match.AFFINITY,
        ),
        (
            _terms({"matchExpressions": [{"key": "rank", "operator": "Near", "values": ["3"]}]}),
            {"labels": {"rank": "3"}},
            Match.AFFINITY,
        ),
    ],
)
def test_affinity_and_taints(
    affinity: dict[str, Any] | None, more: dict[str, Any], expected: Match
) -> None:
    assert match(_pod(affinity), make_facts("r", **more), {"disk": "ssd"}) is expected


@pytest.mark.parametrize(
    ("operator", "values", "holds"),
    [
        ("Exists", [], ("3", "4", "-4", "x", "")),
        ("DoesNotExist", [], (None,)),
        ("In", ["3", "4"], ("3", "4")),
        ("NotIn", ["3", "x"], ("4", "-4", "", None)),
        ("Gt", ["3"], ("4",)),
        ("Lt", ["3"], ("-4",)),
        ("Gt", ["x"], ()),
        ("Gt", ["3", "4"], ()),
    ],
)
def test_operators_of_affinity_terms(
    operator: str, values: list[str], holds: tuple[str | None, ...]
) -> None:
    expression = {"key": "rank", "operator": operator, "values": values}
    pod = _pod(_terms({"matchExpressions": [expression]}))
    for value in ("3", "4", "-4", "x", "", None):
        labels = {} if value is None else {"rank": value}
        found = match(pod, make_facts("r", labels=labels), {})
        assert (found is Match.YES) is (value in holds), value


@pytest.mark.parametrize(
    ("names", "requests", "expected"),
    [
        (["cpu"], {"cpu": "8"}, Match.YES),
        (["cpu"], {"cpu": "8000m", "memory": "1Gi"}, Match.YES),
        (["cpu"], {"cpu": "7"}, Match.EXACT),
        (["memory"], {"cpu": "8", "memory": "1Gi"}, Match.EXACT),
        # Unlike upstream, the names after one that neither side has are compared as well.
        (["example.com/none", "cpu"], {"cpu": "7"}, Match.EXACT),
        (["example.com/none", "cpu"], {"cpu": "8"}, Match.YES),
    ],
)
def test_equal_amounts(names: list[str], requests: dict[str, str], expected: Match) -> None:
    annotations = {ANNOTATION_EXACT_MATCH_RESERVATION: json.dumps({"resourceNames": names})}
    pod = _pod(annotations=annotations, requests=requests)
    assert match(pod, make_facts("r"), {}) is expected


def test_pods_that_ignore_reservations_and_reservations_themselves_match_none() -> None:
    tables = Tables()
    tables.upsert_node(make_node("n"))
    put(tables, Shapes(), make_facts("r", owners=({},)), "n", {"cpu": "8"})
    for pod in (
        _pod(labels={LABEL_RESERVATION_IGNORED: "true"}),
        _pod(annotations={ANNOTATION_RESERVE_POD: "true"}),
        _pod(annotations={ANNOTATION_RESERVATION_AFFINITY: "[]"}),
    ):
        assert len(tables.reservations.matched(pod)) == 0
    assert len(tables.reservations.matched(_pod())) == 1


def test_with_the_gate_only_labels_of_the_reservation_count() -> None:
    for gate, expected in (("true", 0), ("false", 1)):
        tables = Tables()
        gates = {"OmitNodeLabelsForReservation": gate == "true"}
        configuration = read_configuration(
            json.dumps(file(profiles=[{"schedulerName": "koord-scheduler"}])), obj="test"
        )
        make_plugins(msgspec.structs.replace(configuration, gates=gates), tables)
        tables.upsert_node(make_node("n", labels={"zone": "z1"}))
        put(tables, Shapes(), make_facts("r"), "n", {"cpu": "8"})
        pod = _pod({"reservationSelector": {"zone": "z1"}})
        assert len(tables.reservations.matched(pod)) == expected


def test_matches_of_many_shapes_are_kept_within_bounds() -> None:
    tables = Tables()
    tables.upsert_node(make_node("n"))
    put(tables, Shapes(), make_facts("r"), "n", {"cpu": "8"})
    shapes = Shapes()
    pods = [shapes.of(make_pod("p", labels={"app": "a", "n": str(n)})) for n in range(1500)]
    for _ in range(2):
        assert all(len(tables.reservations.matched(pod)) == 1 for pod in pods)
    tables.reservations.delete("uid-r")
    assert not any(len(tables.reservations.matched(pod)) for pod in pods)


def test_matches_follow_labels_of_nodes() -> None:
    tables = Tables()
    tables.upsert_node(make_node("n"))
    put(tables, Shapes(), make_facts("r"), "n", {"cpu": "8"})
    pod = _pod({"reservationSelector": {"zone": "z1"}})
    assert len(tables.reservations.matched(pod)) == 0
    tables.upsert_node(make_node("n", labels={"zone": "z1"}))
    assert len(tables.reservations.matched(pod)) == 1
    tables.upsert_node(make_node("n"))
    assert len(tables.reservations.matched(pod)) == 0


def test_one_of_several_owners_of_a_pod_is_enough() -> None:
    other = {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "o-1"}
    metadata = {"name": "p", "namespace": "default", "ownerReferences": [other, _CONTROLLER]}
    pod = {"metadata": metadata, "spec": {"containers": [{"name": "c"}]}}
    shape = Shapes().of(decode_scheduling_pod(json.dumps(pod).encode()))
    for name, expected in (("rs", Match.YES), ("o", Match.YES), ("x", Match.OWNER)):
        wanted = {"apiVersion": "", "kind": "", "name": name, "uid": ""}
        facts = make_facts("r", owners=({"controller": wanted},))
        assert match(shape, facts, {}) is expected
        anyone = make_facts("r", owners=({"controller": wanted}, {"labelSelector": {}}))
        assert match(shape, anyone, {}) is Match.YES


def test_only_reservations_that_mean_a_pod_have_a_verdict_on_it() -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    both = {"labelSelector": {"matchLabels": {"app": "a", "tier": "x"}}}
    one = {"labelSelector": {"matchLabels": {"app": "a"}}}
    put(tables, shapes, make_facts("both", owners=(both,)), "n", {"cpu": "1"})
    put(tables, shapes, make_facts("one", owners=(one,)), "n", {"cpu": "1"})
    put(tables, shapes, make_facts("closed", owners=(one,), unschedulable=True), "n", {"cpu": "1"})
    table = tables.reservations
    pod = shapes.of(make_pod("p", labels={"app": "a"}))
    assert {table.facts(slot).name: verdict for slot, verdict in table.verdicts(pod)} == {
        "one": Match.YES,
        "closed": Match.UNSCHEDULABLE,
    }
    assert table.matched(pod).tolist() == [table.slot("uid-one")]
    assert table.verdicts(shapes.of(make_pod("q"))) == ()


@pytest.mark.parametrize(
    ("annotations", "labels", "expected"),
    [
        ({}, {}, Asked()),
        ({}, {LABEL_RESERVATION_IGNORED: "true"}, Asked(ignores=True)),
        ({ANNOTATION_RESERVE_POD: "true"}, {}, Asked(reserves=True)),
        ({ANNOTATION_RESERVE_POD: "no"}, {}, Asked()),
        (
            {ANNOTATION_RESERVE_POD: "true"},
            {LABEL_RESERVATION_IGNORED: "true"},
            Asked(reserves=True),
        ),
    ],
)
def test_what_a_pod_asks_of_reservations(
    annotations: dict[str, str], labels: dict[str, str], expected: Asked
) -> None:
    shape = Shapes().of(make_pod("p", annotations=annotations, labels=labels))
    assert asked_of(shape) == expected


@pytest.mark.parametrize(
    "key", [ANNOTATION_RESERVATION_AFFINITY, ANNOTATION_EXACT_MATCH_RESERVATION]
)
def test_an_annotation_about_reservations_that_cannot_be_read_is_named(key: str) -> None:
    asked = asked_of(Shapes().of(make_pod("p", annotations={key: "{"})))
    assert asked.error is not None and asked.error.obj == "Pod"
    assert key in asked.error.field
    assert asked == Asked(error=asked.error)
