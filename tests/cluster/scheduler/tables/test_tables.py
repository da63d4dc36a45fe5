"""The tables after any sequence of changes equal tables made from the objects alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.core import Taint
from apis.keys import PODS
from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.tables import amounts
from cluster.scheduler.tables.amounts import OWN_COLUMNS
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.occupants import NOBODY
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.use import NO_USE, Use
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts

_AMOUNTS = st.sampled_from(["0", "100m", "1", "2500m", "9223372036854775807"])
_EXTENDED = st.sampled_from([{}, {"example.com/gpu": "1"}, {"kubernetes.io/batch-cpu": "1500"}])
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("node"), st.integers(0, 3), _AMOUNTS),
        st.tuples(st.just("gone"), st.integers(0, 3), st.none()),
        st.tuples(
            st.just("place"),
            st.integers(0, 5),
            st.tuples(st.integers(0, 3), _AMOUNTS, _EXTENDED),
        ),
        st.tuples(st.just("remove"), st.integers(0, 5), st.none()),
    ),
    max_size=30,
)


def _observed(tables: Tables) -> dict[str, object]:
    nodes = tables.nodes
    result: dict[str, object] = {}
    for row in range(len(nodes)):
        if nodes.alive[row]:
            result[nodes.name(row)] = (
                tables.resources.amounts(nodes.allocatable[row]),
                tables.resources.amounts(nodes.requested[row]),
                nodes.scored[row].tolist(),
                int(nodes.pods[row]),
                int(nodes.allowed_pods[row]),
                sorted(tables.on(row)),
            )
        else:
            assert not nodes.requested[row].any()
            assert not nodes.scored[row].any()
            assert nodes.pods[row] == 0
    return result


@settings(max_examples=150, deadline=None)
@given(_STEPS)
def test_tables_depend_on_the_objects_and_not_on_their_history(
    steps: list[tuple[str, int, Any]],
) -> None:
    tables = Tables()
    shapes = Shapes()
    nodes = {}
    bookings: dict[str, Booking] = {}
    for kind, number, what in steps:
        if kind == "node":
            nodes[f"n{number}"] = make_node(f"n{number}", allocatable={"cpu": what})
            tables.upsert_node(nodes[f"n{number}"])
        elif kind == "gone":
            nodes.pop(f"n{number}", None)
            tables.delete_node(f"n{number}")
        elif kind == "place":
            target, cpu, extended = what
            pod = make_pod(f"p{number}", requests={"cpu": cpu, **extended})
            booking = Booking(
                key=f"default/p{number}",
                uid=pod.metadata.uid,
                shape=shapes.of(pod),
                node=f"n{target}",
            )
            bookings[booking.uid] = booking
            tables.place(booking)
        else:
            uid = f"uid-default-p{number}"
            assert tables.remove(uid) == bookings.pop(uid, None)
    anew = Tables()
    for booking in reversed(bookings.values()):
        anew.place(booking)
    for node in reversed(nodes.values()):
        anew.upsert_node(node)
    assert _observed(tables) == _observed(anew)
    assert dict(tables.bookings) == bookings


def test_a_reservation_takes_over_the_pods_of_its_node_until_it_goes() -> None:
    tables, shapes = Tables(), Shapes()
    for node in ("n0", "n1"):
        tables.upsert_node(make_node(node))
    pods = {
        uid: Booking(uid, uid, shapes.of(make_pod(uid, requests={"cpu": "1"})), node)
        for uid, node in (("a", "n0"), ("b", "n0"), ("c", "n0"), ("elsewhere", "n1"))
    }
    for booking in pods.values():
        tables.place(booking)
    taking = Booking(
        "r",
        "r",
        shapes.of(make_pod("r", requests={"cpu": "3"})),
        "n0",
        Allocation(takes=("gone", "elsewhere", "a", "b", "c")),
    )
    tables.place(taking)
    assert {uid: booking.allocation.reservation for uid, booking in tables.bookings.items()} == {
        "a": "r", "b": "r", "c": "r", "elsewhere": "", "r": "",
    }  # fmt: skip
    assert tables.taken("a") == ("r", pods["a"]) and tables.taken("elsewhere") is None
    # A pod that is placed again is no longer taken over, and one that is gone does not come back.
    again = replace(pods["a"], allocation=Allocation(reservation="r"))
    tables.place(again)
    tables.remove("b")
    assert tables.remove("r") is taking
    assert tables.taken("a") is None and tables.taken("c") is None
    assert dict(tables.bookings) == {"a": again} | {uid: pods[uid] for uid in ("c", "elsewhere")}


def test_a_booking_that_is_put_back_is_taken_over_as_before() -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n0"))
    pod = Booking("a", "a", shapes.of(make_pod("a")), "n0")
    tables.place(pod)
    tables.place(Booking("r", "r", shapes.of(make_pod("r")), "n0", Allocation(takes=("a",))))
    taken = tables.taken("a")
    removed = tables.remove("a")
    assert removed is not None and tables.taken("a") is None
    tables.place(removed, taken)
    tables.remove("r")
    assert tables.bookings["a"] == pod


def test_replicas_share_a_shape_and_other_content_does_not() -> None:
    shapes = Shapes()
    one = shapes.of(make_pod("a", requests={"cpu": "1"}, labels={"app": "x"}))
    assert shapes.of(make_pod("b", requests={"cpu": "1"}, labels={"app": "x"})) is one
    assert shapes.of(make_pod("a", requests={"cpu": "1"}, labels={"app": "y"})) is not one
    assert shapes.of(make_pod("a", requests={"cpu": "2"}, labels={"app": "x"})) is not one
    assert (
        shapes.of(make_pod("a", requests={"cpu": "1"}, namespace="o", labels={"app": "x"}))
        is not one
    )
    assert (
        shapes.of(
            make_pod(
                "a",
                requests={"cpu": "1"},
                labels={"app": "x"},
                tolerations=[{"operator": "Exists"}],
            )
        )
        is not one
    )


def test_a_bound_pod_has_the_shape_that_it_was_scheduled_with() -> None:
    shapes = Shapes()
    allocated = {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-1"}'}
    pending = shapes.of(make_pod("a", requests={"cpu": "1"}))
    assert (
        shapes.of(make_pod("a", requests={"cpu": "1"}, node="n", annotations=allocated)) is pending
    )
    assert shapes.of(make_pod("a", requests={"cpu": "1"}, annotations=allocated)) is not pending


def test_a_shape_that_no_pod_has_any_more_is_forgotten() -> None:
    shapes = Shapes()
    shape = shapes.of(make_pod("a"))
    assert len(shapes) == 1
    del shape
    assert len(shapes) == 0


def test_scored_amounts_have_defaults_for_containers_without_a_request() -> None:
    pod = make_pod(
        "a",
        containers=[
            {"name": "a", "resources": {"requests": {"cpu": "1"}}},
            {"name": "b", "resources": {"requests": {"cpu": "0", "memory": "1Gi"}}},
        ],
        initContainers=[
            {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "300m"}}},
            {"name": "i", "resources": {"requests": {"cpu": "200m", "memory": "4Gi"}}},
        ],
        overhead={"cpu": "10m"},
    )
    shape = Shapes().of(pod)
    mib = 1024 * 1024
    assert shape.requests == {"cpu": 1310, "memory": 4096 * mib}
    assert shape.scored == {"cpu": 1310, "memory": (200 + 4096) * mib}


def test_a_row_keeps_its_number_and_a_freed_one_is_used_again() -> None:
    tables = Tables()
    rows = [tables.upsert_node(make_node(f"n{number}")) for number in range(200)]
    assert rows == list(range(200))
    tables.delete_node("n7")
    before = tables.nodes.version
    assert tables.upsert_node(make_node("other")) == 7
    assert tables.nodes.changed_since(before).tolist() == [7]
    assert np.count_nonzero(tables.nodes.alive) == 200
    assert tables.nodes.row("n7") is None


def test_rows_that_changed_are_those_with_a_newer_version_however_many_changes_ago() -> None:
    nodes = Tables().nodes
    for number in range(50):
        nodes.upsert(make_node(f"n{number}"))
    for number in range(200):
        nodes.touch(number * number % 37)
    for version in range(nodes.version + 2):
        newer = np.flatnonzero(nodes.row_version[: len(nodes)] > version).tolist()
        assert nodes.changed_since(version).tolist() == newer, version


def test_absurd_amounts_stay_within_what_columns_can_add() -> None:
    tables = Tables()
    shapes = Shapes()
    tables.upsert_node(make_node("n", allocatable={"memory": "9E"}))
    for number in range(500):
        pod = make_pod(f"p{number}", requests={"memory": "9223372036854775807"})
        tables.place(Booking(key="", uid=str(number), shape=shapes.of(pod), node="n"))
    assert tables.nodes.requested[0].min() >= 0
    assert tables.nodes.requested[0].max() > 0


def test_pods_do_not_widen_the_tables_and_count_once_a_node_has_the_resource() -> None:
    tables = Tables()
    shapes = Shapes()
    tables.upsert_node(make_node("n"))
    width = tables.nodes.requested.shape[1]
    hostile = make_pod("p", requests={f"example.com/r{number}": "3" for number in range(1000)})
    tables.place(Booking(key="", uid="p", shape=shapes.of(hostile), node="n"))
    assert tables.nodes.requested.shape[1] == width
    tables.upsert_node(make_node("n", allocatable={"example.com/r7": "5"}))
    assert tables.nodes.requested.shape[1] == width + 1
    assert tables.resources.amounts(tables.nodes.requested[0]) == {"example.com/r7": 3}
    tables.remove("p")
    assert not tables.nodes.requested.any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["node", "node", "place", "remove"]),
            st.integers(0, 1),
            st.sets(st.integers(0, 7), min_size=1, max_size=2),
        ),
        min_size=20,
        max_size=40,
    )
)
def test_the_columns_of_names_that_no_node_offers_are_used_again_without_a_trace(
    steps: list[tuple[str, int, set[int]]],
) -> None:
    tables, shapes = Tables(), Shapes()
    nodes: dict[str, SchedulingNode] = {}
    bookings: dict[str, Booking] = {}
    tables.reservations.upsert(make_facts("r", {_resource(1): "3", _resource(2): "4"}))
    with pytest.MonkeyPatch.context() as patch:
        # As many as two nodes offer at a time.
        patch.setattr(amounts, "MOST_RESOURCES", OWN_COLUMNS + 4)
        for kind, number, names in steps:
            if kind == "node":
                offered = {_resource(name): f"{name + 5}" for name in names}
                nodes[f"n{number}"] = make_node(f"n{number}", allocatable=offered)
                tables.upsert_node(nodes[f"n{number}"])
            elif kind == "place":
                pod = make_pod(f"p{number}", requests={_resource(name): "2" for name in names})
                booking = Booking(
                    key="", uid=pod.metadata.uid, shape=shapes.of(pod), node=f"n{number}"
                )
                bookings[booking.uid] = booking
                tables.place(booking)
                tables.occupants.follow()
            else:
                tables.remove(f"uid-default-p{number}")
                bookings.pop(f"uid-default-p{number}", None)
    fresh = Tables()
    fresh.reservations.upsert(make_facts("r", {_resource(1): "3", _resource(2): "4"}))
    for node in nodes.values():
        fresh.upsert_node(node)
    for booking in bookings.values():
        fresh.place(booking)
    offered_now = {name for node in nodes.values() for name in node.status.allocatable}
    assert _by_name(tables, offered_now) == _by_name(fresh, offered_now)
    assert len(tables.resources) <= OWN_COLUMNS + 4


def _resource(number: int) -> str:
    return f"example.com/r{number}"


def _by_name(tables: Tables, names: set[str]) -> dict[str, object]:
    """Return what the columns of these resources hold."""
    tables.occupants.follow()
    rows = {name: tables.nodes.row(name) for name in ("n0", "n1")}
    result: dict[str, object] = {}
    for name in names - {PODS}:
        column = tables.resources.find(name)
        assert column is not None
        for node, row in rows.items():
            if row is None:
                continue
            result[f"{name} of {node}"] = (
                tables.nodes.allocatable[row, column],
                tables.nodes.requested[row, column],
                [
                    int(tables.occupants.requests[number, column])
                    for number in tables.occupants.numbers[row]
                    if number != NOBODY
                ],
            )
        result[name] = tables.reservations.allocatable[:, column].tolist()
    return result


def test_names_of_deleted_nodes_do_not_pile_up_in_a_label_column() -> None:
    tables = Tables()
    labels = tables.nodes.labels
    labels.column("kubernetes.io/hostname")
    for number in range(3000):
        tables.upsert_node(make_node(f"n{number}"))
        if number >= 10:
            tables.delete_node(f"n{number - 10}")
    column = labels.column("kubernetes.io/hostname")
    assert column.values < 1000
    row = tables.nodes.row("n2999")
    assert row is not None
    assert column.text(int(column.ids[row])) == "n2999"
    assert column.ids[row] == column.known("n2999") != 0


def test_taints_that_no_node_has_any_more_do_not_pile_up() -> None:
    tables = Tables()
    tables.upsert_node(make_node("kept", taints=[{"key": "kept", "effect": "NoSchedule"}]))
    tables.upsert_node(make_node("plain"))
    for number in range(300):
        tables.upsert_node(
            make_node("marked", taints=[{"key": f"at-{number}", "effect": "NoSchedule"}])
        )
    looked_at: list[tuple[Taint, ...]] = []

    def count(taints: tuple[Taint, ...]) -> int:
        looked_at.append(taints)
        return len(taints)

    counts = tables.nodes.by_taints(slice(0, 3), count)
    assert counts.tolist() == [1, 0, 1]
    assert {taint.key for taints in looked_at for taint in taints} == {"kept", "at-299"}
    assert int(tables.nodes.taint_set.max()) < 100
    # Those that stayed keep one number for all nodes with them.
    for name in ("kept", "kept too"):
        tables.upsert_node(make_node(name, taints=[{"key": "kept", "effect": "NoSchedule"}]))
    numbers = tables.nodes.taint_set[:4].tolist()
    assert numbers[0] == numbers[3] and len(set(numbers)) == 3
    assert [taint.key for taint in tables.nodes.taints(numbers[0])] == ["kept"]
    assert tables.nodes.has_taints


def test_a_node_without_pods_takes_none() -> None:
    nodes = Tables().nodes
    plain = make_node("n")
    amounts = {name: each for name, each in plain.status.allocatable.items() if name != PODS}
    status = msgspec.structs.replace(plain.status, allocatable=amounts)
    row = nodes.upsert(msgspec.structs.replace(plain, status=status))
    assert nodes.allowed_pods[row] == 0
    nodes.upsert(plain)
    assert nodes.allowed_pods[row] == 110


@pytest.mark.parametrize("with_terminating", [True, False])
def test_a_counter_follows_pods_that_begin_to_be_deleted_if_it_counts_them(
    with_terminating: bool,
) -> None:
    tables, shapes = Tables(), Shapes()
    tables.upsert_node(make_node("n"))
    shape = shapes.of(make_pod("p"))
    pods = [Booking(f"default/p{at}", f"p{at}", shape, "n") for at in range(3)]
    tables.place(pods[0])
    tables.place(replace(pods[1], terminating=True))
    counter = tables.matches.counter("all", lambda _: 2, with_terminating=with_terminating)
    ended = 2 if with_terminating else 0

    def counted() -> int:
        return int(counter.column(1)[0])

    assert counted() == 2 + ended
    tables.place(pods[2])
    assert counted() == 4 + ended
    tables.place(replace(pods[2], terminating=True))
    assert counted() == 2 + 2 * ended
    tables.remove("p1")
    assert counted() == 2 + ended
    tables.remove("p0")
    assert counted() == ended


def test_what_reservations_take_counts_in_amounts_scores_and_pods() -> None:
    nodes = Tables().nodes
    row = nodes.upsert(make_node("n"))
    use = Use({"cpu": 1500, "memory": 7}, cpu=1500, memory=9, pods=2)
    for sign in (use, NO_USE - use):
        version = nodes.version
        nodes.add_use(row, sign)
        assert nodes.version > version
        taken = sign is use
        assert nodes.resources.amounts(nodes.requested[row]) == (use.amounts if taken else {})
        assert nodes.scored[row].tolist() == ([1500, 9] if taken else [0, 0])
        assert nodes.pods[row] == (2 if taken else 0)


def test_the_content_of_a_row_is_new_with_each_change_until_it_is_restored() -> None:
    nodes = Tables().nodes
    row = nodes.upsert(make_node("n"))
    content = int(nodes.content[row])
    nodes.touch(row)
    assert nodes.content[row] > content
    nodes.restore_content(row, content)
    assert nodes.content[row] == content and nodes.row_version[row] == nodes.version
