"""What of a Reservation decides which pods use it, and how much they get."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.sources.reservation_facts import facts_of
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from tests.cluster.scheduler.sources.reserve_pod_making import read, template

_OPTIONS = "scheduling.koordinator.sh/reservation-restricted-options"
_RESERVED = "node.koordinator.sh/reservation"
_ORDER = "scheduling.koordinator.sh/reservation-order"
_HELD = {"phase": "Available", "nodeName": "n", "allocatable": {"cpu": "4", "memory": "8Gi"}}


def _facts(**members: Any) -> tuple[ReservationFacts, str]:
    facts, problems = facts_of(read(template(), status=_HELD, **members))
    return facts, "; ".join(map(str, problems))


def test_a_plain_reservation_is_used_once_by_pods_of_its_owners() -> None:
    facts, problems = _facts()
    assert problems == ""
    assert (facts.name, facts.uid) == ("r", "u")
    assert facts.allocatable == {"cpu": 4000, "memory": 8 << 30}
    assert (facts.available, facts.once, facts.unschedulable) == (True, True, False)
    assert (facts.policy, facts.order, facts.restricted) == (AllocatePolicy.DEFAULT, 0, None)
    assert not facts.reserved


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"allocatePolicy": "Aligned"}, {"policy": AllocatePolicy.ALIGNED}),
        ({"allocatePolicy": "Restricted"}, {"policy": AllocatePolicy.RESTRICTED}),
        ({"allocateOnce": False}, {"once": False}),
        ({"allocateOnce": True}, {"once": True}),
        ({"unschedulable": True}, {"unschedulable": True}),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, {"unschedulable": True}),
        ({"metadata": {"labels": {_ORDER: "-7"}}}, {"order": -7}),
        ({"metadata": {"labels": {"a": "b"}}}, {"labels": {"a": "b"}}),
        (
            {"metadata": {"annotations": {_OPTIONS: '{"resources":["cpu"]}'}}},
            {"restricted": frozenset({"cpu"})},
        ),
        (
            {"metadata": {"annotations": {_RESERVED: '{"resources":{"cpu":"1"}}'}}},
            {"reserved": {"cpu": 1000}},
        ),
    ],
)
def test_what_a_reservation_says_is_a_fact(
    members: dict[str, Any], expected: dict[str, Any]
) -> None:
    facts, problems = _facts(**members)
    assert problems == ""
    assert {name: getattr(facts, name) for name in expected} == expected


@pytest.mark.parametrize("phase", ["Pending", "Failed", "Succeeded"])
def test_only_an_available_reservation_is_used(phase: str) -> None:
    facts, _ = facts_of(read(template(), status=_HELD | {"phase": phase}))
    assert not facts.available


def test_owners_that_cannot_be_compared_are_owners_of_nothing() -> None:
    bad = {"labelSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}
    good = {"labelSelector": {"matchLabels": {"a": "b"}}}
    assert not _facts(owners=[good, bad])[0].available
    assert _facts(owners=[good, {}])[0].available


def test_a_reservation_without_amounts_in_its_status_holds_what_its_template_asks_for() -> None:
    facts, _ = facts_of(read(template("3"), status={"phase": "Available", "nodeName": "n"}))
    assert facts.allocatable == {"cpu": 3000, "memory": 8 << 30}


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"allocatePolicy": "Often"}, "spec.allocatePolicy = 'Often': expected Aligned or Rest"),
        ({"metadata": {"labels": {_ORDER: "first"}}}, f"metadata.labels[\"{_ORDER}\"] = 'first'"),
        ({"metadata": {"annotations": {_OPTIONS: "["}}}, f'metadata.annotations["{_OPTIONS}"]'),
        ({"metadata": {"annotations": {_RESERVED: "["}}}, f'metadata.annotations["{_RESERVED}"]'),
    ],
)
def test_what_cannot_be_read_is_named_and_costs_itself_alone(
    members: dict[str, Any], named: str
) -> None:
    facts, problems = _facts(**members)
    assert problems.startswith("Reservation r")
    assert named in problems
    assert facts.available
    assert (facts.policy, facts.order, facts.restricted) == (AllocatePolicy.DEFAULT, 0, None)
    assert not facts.reserved
