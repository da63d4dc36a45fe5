"""Reservations and the pods that use them count together, in whatever order they become known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts, put, reserve_shape, use

_CPU = 0


def _cluster(*names: str, cpu: str = "32") -> tuple[Tables, Shapes]:
    tables = Tables()
    for name in names:
        tables.upsert_node(make_node(name, allocatable={"cpu": cpu}))
    return tables, Shapes()


def _requested(tables: Tables, node: str = "n") -> tuple[int, int]:
    """Return milli-cores and count of pods that are taken on a node."""
    row = tables.nodes.row(node)
    assert row is not None
    return int(tables.nodes.requested[row, _CPU]), int(tables.nodes.pods[row])


def test_a_pod_inside_a_reservation_takes_nothing_more_of_the_node() -> None:
    """The worked example: 32 cores, 8 reserved of which 4 are used, another pod with 16."""
    tables, shapes = _cluster("n")
    put(tables, shapes, make_facts("r"), "n", {"cpu": "8"})
    use(tables, shapes.of(make_pod("o", requests={"cpu": "16"})), "other", "n")
    assert _requested(tables) == (24_000, 2)
    use(tables, shapes.of(make_pod("p", requests={"cpu": "4"})), "owner", "n", "r")
    assert _requested(tables) == (24_000, 2)
    slots = tables.reservations.every(slice(0, 1))
    assert tables.reservations.remainder(slots)[0, _CPU] == 4_000
    assert tables.reservations.owners_of("uid-r") == {"uid-owner"}


def test_what_a_pod_needs_beyond_its_reservation_counts_on_the_node() -> None:
    tables, shapes = _cluster("n")
    put(tables, shapes, make_facts("r", policy=AllocatePolicy.ALIGNED), "n", {"cpu": "8"})
    for number in range(3):
        owner = shapes.of(make_pod("p", requests={"cpu": "5"}))
        use(tables, owner, f"owner{number}", "n", "r")
    assert _requested(tables) == (15_000, 3)
    tables.remove("uid-owner1")
    assert _requested(tables) == (10_000, 2)
    tables.remove("uid-owner0")
    assert _requested(tables) == (8_000, 1)


def test_pods_outlive_their_reservation_and_count_by_themselves_then() -> None:
    tables, shapes = _cluster("n")
    put(tables, shapes, make_facts("r"), "n", {"cpu": "8"})
    use(tables, shapes.of(make_pod("p", requests={"cpu": "3"})), "owner", "n", "r")
    tables.remove("uid-r")
    tables.reservations.delete("uid-r")
    assert _requested(tables) == (3_000, 1)
    assert len(tables.reservations) == 0
    tables.remove("uid-owner")
    assert _requested(tables) == (0, 0)


def test_a_pod_on_another_node_than_its_reservation_counts_there_in_full() -> None:
    tables, shapes = _cluster("n", "m")
    put(tables, shapes, make_facts("r"), "n", {"cpu": "8"})
    use(tables, shapes.of(make_pod("p", requests={"cpu": "3"})), "owner", "m", "r")
    assert _requested(tables, "n") == (8_000, 1)
    assert _requested(tables, "m") == (3_000, 1)


def test_references_of_pods_to_each_other_and_to_themselves_do_not_disturb_counts() -> None:
    tables, shapes = _cluster("n")
    shape = shapes.of(make_pod("p", requests={"cpu": "3"}))
    for uid, reservation in (("a", "b"), ("b", "a"), ("c", "c"), ("d", "c")):
        allocation = Allocation(reservation=reservation)
        tables.place(Booking(f"default/{uid}", uid, shape, "n", allocation))
    # What c holds is for d, who takes it.
    assert _requested(tables) == (9_000, 3)
    for uid in "bdca":
        tables.remove(uid)
    assert _requested(tables) == (0, 0)


def test_a_resource_that_a_node_brings_later_counts_for_reservations_too() -> None:
    tables, shapes = _cluster("n")
    facts = make_facts("r", {"example.com/gpu": "4"})
    put(tables, shapes, facts, "n", {"example.com/gpu": "4"})
    use(tables, shapes.of(make_pod("p", requests={"example.com/gpu": "1"})), "owner", "n", "r")
    tables.upsert_node(make_node("n", allocatable={"cpu": "32", "example.com/gpu": "8"}))
    column = tables.resources.find("example.com/gpu")
    assert column is not None
    assert tables.nodes.requested[0, column] == 4
    table = tables.reservations
    assert table.remainder(table.every(slice(0, 1)))[0, column] == 3
    assert table.restricted[0, column]


# --- any history ---------------------------------------------------------------------------------

_AMOUNTS = st.sampled_from(["0", "1", "2500m", "6"])
_PODS = st.integers(0, 4)
_NODES = st.integers(0, 2)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("node"), _NODES, st.just(None)),
        st.tuples(st.just("gone"), _NODES, st.just(None)),
        st.tuples(st.just("known"), st.integers(0, 2), st.sampled_from(list(AllocatePolicy))),
        st.tuples(st.just("unknown"), st.integers(0, 2), st.just(None)),
        st.tuples(st.just("reserve"), st.integers(0, 2), st.tuples(_NODES, _AMOUNTS, _AMOUNTS)),
        st.tuples(st.just("unreserve"), st.integers(0, 2), st.just(None)),
        st.tuples(
            st.just("place"),
            _PODS,
            st.tuples(_NODES, _AMOUNTS, st.sampled_from(["", "r0", "r1", "r2", "r7"])),
        ),
        st.tuples(st.just("remove"), _PODS, st.just(None)),
    ),
    max_size=40,
)


class _Life:
    """Tables, and beside them the objects alone."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        self.nodes: set[str] = set()
        self.facts: dict[str, ReservationFacts] = {}
        self.bookings: dict[str, Booking] = {}

    def step(self, kind: str, number: int, what: Any) -> None:
        name = f"n{number}" if kind in ("node", "gone") else f"r{number}"
        match kind:
            case "node":
                self.nodes.add(name)
                self.tables.upsert_node(make_node(name))
            case "gone":
                self.nodes.discard(name)
                self.tables.delete_node(name)
            case "known":
                self.facts[name] = make_facts(name, policy=what)
                self.tables.reservations.upsert(self.facts[name])
            case "unknown":
                self.facts.pop(name, None)
                self.tables.reservations.delete(f"uid-{name}")
            case "reserve":
                node, cpu, memory = what
                shape = reserve_shape(self.shapes, {"cpu": cpu, "memory": memory})
                self._place(Booking(f"default/{name}", f"uid-{name}", shape, f"n{node}"))
            case "unreserve":
                self._remove(f"uid-{name}")
            case "place":
                node, cpu, reservation = what
                shape = self.shapes.of(make_pod("p", requests={"cpu": cpu}))
                uid = f"uid-{reservation}" if reservation else ""
                allocation = Allocation(reservation=uid)
                self._place(Booking(f"d/p{number}", f"p{number}", shape, f"n{node}", allocation))
            case "remove":
                self._remove(f"p{number}")

    def _place(self, booking: Booking) -> None:
        self.bookings[booking.uid] = booking
        self.tables.place(booking)

    def _remove(self, uid: str) -> None:
        assert self.tables.remove(uid) == self.bookings.pop(uid, None)

    def expected(self, node: str) -> tuple[int, int, int]:
        """Return milli-cores, bytes and pods in use: a group takes the larger of its two sides."""
        groups: dict[str, tuple[list[PodShape], list[PodShape]]] = {}
        for booking in self.bookings.values():
            if booking.node == node:
                group = booking.allocation.reservation or booking.uid
                sides = groups.setdefault(group, ([], []))
                sides[group != booking.uid].append(booking.shape)
        cpu = memory = pods = 0
        for reserved, used in groups.values():
            for amounts in ("cpu", "memory"):
                larger = max(
                    sum(shape.requests.get(amounts, 0) for shape in side)
                    for side in (reserved, used)
                )
                if amounts == "cpu":
                    cpu += larger
                else:
                    memory += larger
            pods += max(len(reserved), len(used))
        return cpu, memory, pods


@settings(max_examples=80, deadline=None)
@given(_STEPS)
def test_after_any_history_a_group_counts_with_the_larger_of_its_sides(
    steps: list[tuple[str, int, Any]],
) -> None:
    life = _Life()
    owner = life.shapes.of(make_pod("p", labels={"app": "a"}))
    for step in steps:
        life.step(*step)
        tables = life.tables
        for name in life.nodes:
            row = tables.nodes.row(name)
            assert row is not None
            cpu, memory = (int(amount) for amount in tables.nodes.requested[row, :2])
            assert (cpu, memory, int(tables.nodes.pods[row])) == life.expected(name)
        # What is kept for a shape equals what is found anew.
        kept = set(tables.reservations.matched(owner).tolist())
        fresh = Shapes().of(make_pod("p", labels={"app": "a"}))
        assert kept == set(tables.reservations.matched(fresh).tolist())
        assert {tables.reservations.facts(slot).name for slot in kept} == set(life.facts)
    again = _Life()
    for facts in reversed(life.facts.values()):
        again.tables.reservations.upsert(facts)
    for booking in reversed(life.bookings.values()):
        again.tables.place(booking)
    for name in sorted(life.nodes, reverse=True):
        again.tables.upsert_node(make_node(name))
    assert _columns(life.tables) == _columns(again.tables)


def _columns(tables: Tables) -> dict[str, Any]:
    """Return what the table says about each reservation."""
    table = tables.reservations
    result = {}
    for facts in table:
        slot = table.slot(facts.uid)
        assert slot is not None
        row = int(table.row[slot])
        result[facts.name] = (
            tables.nodes.name(row) if row >= 0 else "",
            int(table.owners[slot]),
            table.own[slot].tolist(),
            table.used[slot].tolist(),
            table.named[slot].tolist(),
            table.restricted[slot].tolist(),
            slot in table.slots_on(row),
        )
    return result


@pytest.mark.parametrize("rows", [slice(0, 3), np.array([1], dtype=np.intp)])
def test_only_reservations_that_are_available_and_not_used_up_are_usable(rows: Any) -> None:
    tables, shapes = _cluster("a", "n", "z")
    owner = shapes.of(make_pod("p", labels={"app": "a"}))
    put(tables, shapes, make_facts("open"), "n", {"cpu": "1"})
    put(tables, shapes, make_facts("once", once=True), "n", {"cpu": "1"})
    put(tables, shapes, make_facts("waiting", available=False), "n", {"cpu": "1"})
    tables.reservations.upsert(make_facts("nowhere"))
    table = tables.reservations

    def usable() -> set[str]:
        return {table.facts(slot).name for slot in table.usable(owner, rows).tolist()}

    assert usable() == {"open", "once"}
    use(tables, owner, "p", "n", "once")
    assert usable() == {"open"}
    tables.remove("uid-p")
    assert usable() == {"open", "once"}


def test_a_change_of_a_reservation_marks_the_row_of_its_node() -> None:
    tables, shapes = _cluster("a", "n")
    put(tables, shapes, make_facts("r"), "n", {"cpu": "1"})
    version = tables.nodes.version
    tables.reservations.upsert(make_facts("r"))
    assert tables.nodes.version == version
    tables.reservations.upsert(make_facts("r", unschedulable=True))
    assert tables.nodes.changed_since(version).tolist() == [1]
    version = tables.nodes.version
    tables.reservations.delete("uid-r")
    assert tables.nodes.changed_since(version).tolist() == [1]


def test_a_pod_elsewhere_that_uses_a_reservation_marks_the_row_of_its_node() -> None:
    tables, shapes = _cluster("a", "n")
    put(tables, shapes, make_facts("r", once=True), "n", {"cpu": "1"})
    owner = shapes.of(make_pod("p", labels={"app": "a"}))
    version = tables.nodes.version
    use(tables, owner, "p", "a", "r")
    # No other pod can use it from now on.
    assert tables.nodes.changed_since(version).tolist() == [0, 1]
    version = tables.nodes.version
    tables.remove("uid-p")
    assert tables.nodes.changed_since(version).tolist() == [0, 1]


def test_many_reservations_grow_the_table() -> None:
    tables, shapes = _cluster("n")
    for number in range(50):
        put(tables, shapes, make_facts(f"r{number}"), "n", {"cpu": "100m"})
    owner = shapes.of(make_pod("p", labels={"app": "a"}))
    assert len(tables.reservations.usable(owner, slice(0, 1))) == 50
    assert _requested(tables) == (5_000, 50)
    for number in range(50):
        tables.reservations.delete(f"uid-r{number}")
    assert len(tables.reservations.matched(owner)) == 0


def test_a_reservation_that_moves_to_another_node_is_found_there_alone() -> None:
    tables, shapes = Tables(), Shapes()
    for node in ("n0", "n1"):
        tables.upsert_node(make_node(node))
    table = tables.reservations
    for name in ("c", "a", "b"):
        put(tables, shapes, make_facts(name), "n0", {"cpu": "8"})
    slots = {name: table.slot(f"uid-{name}") for name in "abc"}
    # In the order of their slots, however they came to the node.
    assert list(table.slots_on(0)) == sorted(table.slots_on(0))
    put(tables, shapes, make_facts("c"), "n1", {"cpu": "8"})
    assert set(table.slots_on(0)) == {slots["a"], slots["b"]}
    assert list(table.slots_on(1)) == [slots["c"]]
    put(tables, shapes, make_facts("c"), "n0", {"cpu": "8"})
    assert list(table.slots_on(0)) == sorted(table.slots_on(0))
    assert set(table.slots_on(0)) == set(slots.values())
    assert table.rows() == {0}


def test_a_reservation_is_found_by_the_name_that_it_has_now() -> None:
    tables = Tables()
    table = tables.reservations
    first = make_facts("a")
    table.upsert(first)
    renamed = replace(first, name="b")
    table.upsert(renamed)
    assert table.by_name("a") is None and table.by_name("b") == renamed
    # Another one of the name takes it over, and keeps it when the former one goes.
    again = replace(make_facts("c"), name="b")
    table.upsert(again)
    table.delete(first.uid)
    assert table.by_name("b") == again
    assert list(table) == [again] and len(table) == 1
    table.delete(again.uid)
    table.delete(again.uid)
    assert table.by_name("b") is None and list(table) == []
