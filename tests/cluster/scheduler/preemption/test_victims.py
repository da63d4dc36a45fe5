"""Victims of one node and the choice between nodes, beside an oracle, and what a trial leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle import preemption
from cluster.scheduler.cycle.node_search import Arguments
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victims import NO_VICTIM, Candidate, by_trial, default_victims
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.preemption.making import PROFILE, Bed
from tests.cluster.scheduler.preemption.oracle import (
    OracleBudgets,
    OracleNode,
    OraclePod,
    cost,
    victims,
)
from tests.cluster.scheduler.reservations.making import make_facts, put, use

_PODS = st.builds(
    OraclePod,
    name=st.just(""),
    priority=st.sampled_from([-5, 0, 1, 1, 2, 50]),
    cpu=st.sampled_from([0, 100, 300, 300, 700]),
    start=st.sampled_from([0.0, 1.0, 2.0, 3.0]),
    app=st.sampled_from(["", "a", "b", "c"]),
    port=st.sampled_from([0, 0, 0, 1, 2]),
    spared=st.sampled_from([False, False, False, True]),
)


@st.composite
def _clusters(draw: st.DrawFn) -> list[OracleNode]:
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        pods = draw(st.lists(_PODS, max_size=6))
        promised = draw(st.lists(_PODS, max_size=1))
        nodes.append(
            OracleNode(
                f"n{number}",
                draw(st.sampled_from([400, 1000, 1600])),
                draw(st.sampled_from([2, 4, 9])),
                tuple(replace(pod, name=f"p{number}-{at}") for at, pod in enumerate(pods)),
                tuple(replace(pod, name=f"w{number}") for pod in promised),
            )
        )
    return nodes


_BUDGETS = st.builds(
    OracleBudgets,
    allowed=st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)),
    disrupted=st.sampled_from([frozenset(), frozenset({"p0-0", "p1-1"})]),
)


def _names(candidate: Candidate) -> list[str]:
    return [victim.uid for victim in candidate.victims]


@settings(max_examples=150, deadline=None)
@given(_clusters(), _BUDGETS, _PODS)
def test_the_victims_and_the_node_are_those_of_the_oracle(
    nodes: list[OracleNode], budgets: OracleBudgets, pod: OraclePod
) -> None:
    pod = replace(pod, name="new", priority=2)
    bed = Bed(nodes, budgets)
    pending = bed.pending(pod)
    before = bed.state()
    checks = RowChecks(PROFILE, bed.tables, bed.nominator)
    expected = {}
    for node in nodes:
        wanted = victims(pod, node, budgets)
        found = by_trial(checks, pending, bed.row(node.name), default_victims, bed.budgets)
        assert (wanted is None) == (found is None)
        if wanted is not None and found is not None:
            assert (_names(found), found.violations) == (
                [each.name for each in wanted[0]],
                wanted[1],
            )
            expected[node.name] = wanted
    assert bed.state() == before
    if any(checks.fits(pending, bed.row(node.name)) for node in nodes):
        return
    chosen = bed.find(pod)
    assert bed.state() == before
    if isinstance(chosen, NotFound):
        assert not expected
    else:
        best = min(cost(*wanted) for wanted in expected.values())
        wanted = expected[bed.tables.nodes.name(chosen.row)]
        assert _names(chosen) == [each.name for each in wanted[0]]
        assert cost(*wanted) == best


@pytest.mark.parametrize(
    ("pods", "allowed", "gone"),
    [
        # The least important ones go, and only as many as are needed.
        ([("a", 3, 400, 0, ""), ("b", 1, 400, 0, ""), ("c", 2, 200, 0, "")], {}, ["b"]),
        # Of equal ones the one that started last goes.
        ([("a", 1, 500, 5, ""), ("b", 1, 500, 9, "")], {}, ["b"]),
        # A small one stays though larger, more important ones had to be looked at before.
        ([("a", 2, 800, 0, ""), ("b", 1, 150, 0, "")], {}, ["a"]),
        # A pod whose budget allows no eviction stays, and a more important one goes.
        ([("a", 3, 500, 0, ""), ("b", 1, 500, 0, "kept")], {"kept": 0}, ["a"]),
        # The budget allows one eviction, which the more important pod uses up.
        ([("a", 3, 500, 0, "kept"), ("b", 1, 500, 0, "kept")], {"kept": 1}, ["a"]),
        # Where nothing else makes room, a pod goes beyond its budget.
        ([("a", 3, 900, 0, "kept"), ("b", 1, 100, 0, "")], {"kept": 0}, ["a"]),
    ],
)
def test_victims_of_one_node(
    pods: list[tuple[str, int, int, float, str]], allowed: dict[str, int], gone: list[str]
) -> None:
    node = OracleNode("n", 1000, 10, tuple(OraclePod(*pod) for pod in pods))
    bed = Bed([node], OracleBudgets(allowed))
    found = bed.find(OraclePod("new", 10, 400))
    assert isinstance(found, Candidate)
    assert _names(found) == gone
    checks = RowChecks(PROFILE, bed.tables, bed.nominator)
    pod = bed.pending(OraclePod("new", 10, 400))
    assert by_trial(checks, pod, found.row, default_victims, bed.budgets) == found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Each first one is cheaper by one criterion, and dearer by all that follow.
        ([(5, 9.0, ""), (5, 1.0, "")], [(1, 9.0, "kept")]),
        ([(1, 0.0, ""), (1, 0.0, ""), (1, 0.0, "")], [(2, 9.0, "")]),
        ([(4, 0.0, ""), (1, 0.0, "")], [(4, 9.0, ""), (2, 9.0, "")]),
        ([(4, 0.0, "")], [(4, 9.0, ""), (-9, 9.0, "")]),
        ([(4, 9.0, "")], [(4, 8.0, "")]),
    ],
)
def test_the_node_is_chosen_by_one_criterion_after_another(
    first: list[tuple[int, float, str]], second: list[tuple[int, float, str]]
) -> None:
    nodes = []
    for name, pods in (("second", second), ("first", first)):
        cpu = 1000 // len(pods)
        placed = tuple(
            OraclePod(f"{name}{at}", priority, cpu, start, app)
            for at, (priority, start, app) in enumerate(pods)
        )
        nodes.append(OracleNode(name, sum(pod.cpu for pod in placed), 10, placed))
    bed = Bed(nodes, OracleBudgets({"kept": 0}))
    new = OraclePod("new", 10, 999 if len(first) != 3 else 998)
    found = bed.find(new)
    assert isinstance(found, Candidate)
    assert bed.tables.nodes.name(found.row) == "first"
    assert len(found.victims) == len(first)
    # Nodes whose victims were found one by one are compared by the same criteria.
    checks = RowChecks(PROFILE, bed.tables, bed.nominator)
    other = by_trial(checks, bed.pending(new), bed.row("second"), default_victims, bed.budgets)
    assert other is not None
    assert found.cost < other.cost


def test_a_trial_is_undone_after_an_error_and_in_the_right_order() -> None:
    node = OracleNode("n", 1000, 10, (OraclePod("a", 1, 100, port=1), OraclePod("b", 1, 100)))
    bed = Bed([node, OracleNode("other", 1000, 10)])
    before = bed.state()
    moved = Booking("default/a", "a", bed.shape(OraclePod("a", 1, 900)), "other")
    with pytest.raises(ZeroDivisionError), Trial(bed.tables) as trial:
        trial.remove("a")
        trial.remove("nobody")
        trial.place(moved)
        with Trial(bed.tables) as inner:
            inner.remove("b")
            inner.place(bed.booking(OraclePod("c", 1, 5), "n"))
            inner.remove("c")
        trial.place(bed.booking(OraclePod("a", 1, 300), "n"))
        assert bed.state() != before
        raise ZeroDivisionError
    assert bed.state() == before


def test_what_has_to_hold_beside_the_plugins_keeps_victims_victims() -> None:
    node = OracleNode("n", 1000, 10, tuple(OraclePod(f"p{at}", 1, 300, at) for at in range(3)))
    bed = Bed([node])
    checks = RowChecks(PROFILE, bed.tables, bed.nominator)
    pod = bed.pending(OraclePod("new", 2, 100))
    found = by_trial(
        checks,
        pod,
        0,
        lambda shape: True,
        bed.budgets,
        still_fits=lambda pod, row: len(bed.tables.on(row)) < 2,
    )
    assert found is not None
    assert _names(found) == ["p1", "p2"]


@pytest.mark.parametrize("promised", [(), (OraclePod("first", 50, 100),)])
def test_a_node_that_an_extender_rejects_is_not_freed_without_victims(
    promised: tuple[OraclePod, ...],
) -> None:
    nodes = [
        OracleNode("rejected", 1000, 9, (OraclePod("small", 1, 100),), promised),
        OracleNode("full", 1000, 9, (OraclePod("old", 5, 1000),)),
    ]
    bed = Bed(nodes)
    pod = bed.pending(OraclePod("new", 10, 500))
    found = bed.preemption.find(pod, np.array([0, 1], dtype=np.intp), salt=5)
    assert isinstance(found, Candidate)
    assert _names(found) == ["old"]
    alone = bed.preemption.find(pod, np.array([0], dtype=np.intp), salt=5)
    assert isinstance(alone, NotFound)
    assert "1 No preemption victims found for incoming pod" in alone.remark


def test_shapes_that_go_leave_no_numbers_and_rows_stay_right() -> None:
    bed = Bed([OracleNode("n", 10_000, 99)])
    occupants = bed.tables.occupants
    for turn in range(40):
        uids = [f"p{turn}-{at}" for at in range(turn % 30)]
        for at, uid in enumerate(uids):
            bed.tables.place(bed.booking(OraclePod(uid, at % 3, 10 + turn, float(at)), "n"))
        occupants.follow()
        assert [booking.uid for booking in occupants.bookings[0]] == sorted(
            uids, key=lambda uid: (-(int(uid.split("-")[1]) % 3), int(uid.split("-")[1]))
        )
        named = [occupants.shapes[number] for number in occupants.numbers[0][: len(uids)]]
        assert named == [booking.shape for booking in occupants.bookings[0]]
        assert not occupants.numbers[0][len(uids) :].any()
        for uid in uids:
            bed.tables.remove(uid)
    assert len(occupants.shapes) < 10


def test_a_resource_that_a_node_brings_later_counts_for_pods_placed_before() -> None:
    bed = Bed([OracleNode("n", 1000, 9)])
    requests = {"cpu": "1", "test.io/part": "3"}
    shape = bed.shapes.of(make_pod("a", requests=requests))
    bed.tables.place(Booking("default/a", "a", shape, "n"))
    bed.tables.occupants.follow()
    bed.tables.nodes.learn(["test.io/part"])
    bed.tables.occupants.follow()
    number = bed.tables.occupants.numbers[0, 0]
    column = bed.tables.resources.find("test.io/part")
    assert bed.tables.occupants.requests[number, column] == 3


@pytest.mark.parametrize(
    ("freed", "tried", "proposed"),
    [
        ({3, 7}, 64, 2),
        (set(range(100)), 32, 32),
        # Where none is found, the next attempt goes on with others.
        ({31}, 64, 1),
        ({32, 90}, 32, 0),
        (set(), 32, 0),
    ],
)
def test_few_nodes_are_tried_for_what_extenders_are_asked_about(
    freed: set[int], tried: int, proposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        OracleNode(f"n{number}", 1000, 9, (OraclePod(f"p{number}", 1, 100, port=1),))
        for number in range(150)
    ]
    bed = Bed(nodes)
    trials: list[Candidate | None] = []

    def trial(*arguments: Any) -> Candidate | None:
        trials.append(by_trial(*arguments) if len(trials) in freed else None)
        return trials[-1]

    monkeypatch.setattr(preemption, "by_trial", trial)
    pod = bed.pending(OraclePod("new", 10, 100, port=1))
    masks = bed.evaluator.evaluate(pod.shape).masks
    found = bed.preemption.propose(
        pod, diagnose(pod.shape, bed.tables, masks), being_evicted=lambda _: False, salt=5
    )
    assert len(trials) == tried
    assert isinstance(found, NotFound) == (not proposed)
    if isinstance(found, NotFound):
        assert found.more
    else:
        assert len(found) == proposed


def test_a_pod_inside_a_reservation_is_not_evicted_where_that_frees_nothing() -> None:
    nodes = [OracleNode("a", 4000, 9), OracleNode("b", 4000, 9, (OraclePod("old", 5, 4000),))]
    bed = Bed(nodes)
    put(bed.tables, bed.shapes, make_facts("r", {"cpu": "4"}), "a", {"cpu": "4"})
    use(bed.tables, bed.shape(OraclePod("inside", 1, 4000)), "inside", "a", "r")
    assert bed.tables.reservations.rows() == {bed.row("a")}
    found = bed.find(OraclePod("new", 10, 2000))
    assert isinstance(found, Candidate)
    assert _names(found) == ["old"]
    bed.tables.remove("old")
    bed.tables.place(bed.booking(OraclePod("great", 50, 4000), "b"))
    left = bed.find(OraclePod("new", 10, 2000))
    assert isinstance(left, NotFound)
    assert left.remark == (
        "preemption: 0/2 nodes are available: 1 Insufficient cpu,"
        " 1 No preemption victims found for incoming pod."
    )


def test_a_promised_pod_takes_nothing_of_what_it_does_not_request() -> None:
    """The new pod needs all 64 GiB of the node, and the promised pod none of them."""
    promised = OraclePod("promised", 20, 1000)
    node = OracleNode("a", 4000, 9, (OraclePod("old", 1, 2000),), (promised,))
    bed = Bed([node])
    shape = bed.shapes.of(make_pod("new", requests={"cpu": "2", "memory": "64Gi"}, priority=10))
    pending = PendingPod("default/new", "new", 10, shape, 0.0)
    found = bed.preemption.find(pending, np.array([bed.row("a")]), salt=5)
    assert isinstance(found, Candidate)
    assert _names(found) == ["old"]


@pytest.mark.parametrize(
    ("percentage", "absolute", "nodes", "tried"),
    [(10, 100, 5000, 500), (10, 100, 900, 100), (10, 100, 50, 50), (0, 0, 50, 1), (0, 3, 2, 2)],
)
def test_the_larger_of_share_and_count_is_tried_and_at_least_one_node(
    percentage: int, absolute: int, nodes: int, tried: int
) -> None:
    assert Arguments(percentage, absolute).most_tried(nodes) == tried


def test_a_node_without_victims_costs_less_than_any_with_one() -> None:
    free = Candidate(row=1, victims=(), violations=0)
    assert free.cost == (0, NO_VICTIM, 0, 0, 0.0)
    shape = Shapes().of(make_pod("p", priority=-(2**31)))
    least = Candidate(row=0, victims=(Booking("default/p", "p", shape, "n"),), violations=0)
    assert free.cost < least.cost
