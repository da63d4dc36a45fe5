"""Which running pods a Reservation may take over, among many nodes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from apis.keys import (
    ANNOTATION_PRE_ALLOCATABLE_PRIORITY,
    ANNOTATION_RESERVE_POD,
    LABEL_IS_PRE_ALLOCATABLE,
)
from apis.meta import LabelSelector
from apis.scheduling import ReservationOwner
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.plugins.contract import Given, Refusal
from cluster.scheduler.plugins.reservations import pre_allocation
from cluster.scheduler.plugins.reservations.pre_allocation import PreAllocating, Settings
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.reservations.pre_allocation import (
    ANNOTATION,
    PreAllocation,
    demand_of,
    text_of,
)
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import chart_file, load
from tests.cluster.scheduler.making import make_node, make_pod

_NODES = 20


def _cluster(draw: Random, shapes: Shapes) -> Tables:
    tables = Tables()
    for number in range(_NODES):
        name = f"n{number}"
        tables.upsert_node(make_node(name, allocatable={"cpu": "8", "pods": "110"}))
        for at in range(draw.randrange(4)):
            uid = f"{name}-{at}"
            labels = {"app": draw.choice("abc")}
            pod = make_pod(uid, requests={"cpu": draw.choice("124")}, labels=labels)
            terminating = draw.random() < 0.2
            tables.place(Booking(uid, uid, shapes.of(pod), name, terminating=terminating))
    return tables


def _reserve_pod(shapes: Shapes, *, multiple: bool, required: bool) -> PodShape:
    owner = ReservationOwner(label_selector=LabelSelector(match_labels={"app": "a"}))
    demand = PreAllocation(name="r", owners=(owner,), multiple=multiple, required=required)
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    return shapes.of(make_pod("r", requests={"cpu": "4"}, annotations=annotations))


def _columns(given: Given | None) -> list[list[object]]:
    return [] if given is None else [each.tolist() for each in (given.rows, given.amounts)]


@pytest.mark.parametrize("multiple", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_without_a_pod_of_use_need_not_be_looked_at(
    seed: int, multiple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = Shapes()
    tables = _cluster(Random(seed), shapes)
    plugin = PreAllocating()
    every = slice(0, _NODES)
    some = np.array([17, 3, 4, 11], dtype=np.intp)
    answers = []
    for few in (0, _NODES):
        monkeypatch.setattr(pre_allocation, "_FEW_ROWS", few)
        offered = _reserve_pod(shapes, multiple=multiple, required=False)
        required = _reserve_pod(shapes, multiple=multiple, required=True)
        answers.append(
            (
                _columns(plugin.given(offered, tables, every)),
                _columns(plugin.given(offered, tables, some)),
                plugin.filter(required, tables, every).tolist(),
                plugin.filter(required, tables, some).tolist(),
            )
        )
    assert answers[0] == answers[1]
    rows = set(answers[0][0][0])
    assert 0 < len(rows) < _NODES
    assert {row for row, held in enumerate(answers[0][2]) if not held} == rows


def _scores(settings: Settings, used: dict[str, list[str]]) -> dict[str, int]:
    """Return the score of each node. used: pods by node, by the cpu of their requests; each node
    has 8 CPUs, and the Reservation wants 4."""
    shapes, tables = Shapes(), Tables()
    for name, pods in used.items():
        tables.upsert_node(make_node(name, allocatable={"cpu": "8", "pods": "110"}))
        for at, cpu in enumerate(pods):
            uid = f"{name}-{at}"
            pod = make_pod(uid, requests={"cpu": cpu}, labels={"app": "a"})
            tables.place(Booking(uid, uid, shapes.of(pod), name))
    plugin = PreAllocating(settings)
    shape = _reserve_pod(shapes, multiple=True, required=False)
    assert plugin.applies(shape, tables)
    some = np.arange(len(used), dtype=np.intp)[::-1]
    raw = plugin.score(shape, tables, some)
    found = {tables.nodes.name(row): score for row, score in zip(some, raw.tolist(), strict=True)}
    assert found == {
        tables.nodes.name(row): score
        for row, score in enumerate(plugin.score(shape, tables, slice(0, len(used))).tolist())
    }
    assert plugin.normalize(raw).max() == 100
    return found


def test_the_node_whose_pods_fill_most_of_the_reservation_comes_first() -> None:
    used = {"half": ["2"], "whole": ["4"], "both": ["3", "1"], "none": [], "scarce": ["1", "6"]}
    assert _scores(Settings(), used) == {
        "half": 50, "whole": 100, "both": 75, "none": 0, "scarce": 0,
    }  # fmt: skip


def test_free_room_comes_before_pods_where_it_is_preferred() -> None:
    used = {"half": ["2"], "taken": ["4", "4"]}
    assert _scores(Settings(prefer_free=True), used) == {"half": 200, "taken": 100}


def test_nodes_are_ranked_by_the_pods_in_a_whole_decision() -> None:
    tables = Tables()
    plugins = make_plugins(load(chart_file()), tables)
    shapes = Shapes()
    for name, cpu in (("a", "1"), ("b", "4"), ("c", "2")):
        tables.upsert_node(make_node(name, allocatable={"cpu": "8", "pods": "110"}))
        pod = make_pod(f"{name}-0", requests={"cpu": cpu}, labels={"app": "a"})
        tables.place(Booking(f"{name}-0", f"{name}-0", shapes.of(pod), name))
    result = Scheduling(tables, plugins.profiles, seed=1).schedule(
        key="r",
        uid="r",
        shape=_reserve_pod(shapes, multiple=False, required=False),
        profile=next(iter(plugins.profiles)),
        now=0.0,
    )
    assert isinstance(result, Placed)
    assert result.booking.node == "b"
    assert result.booking.allocation.takes == ("b-0",)


def test_the_mean_over_all_that_a_reservation_wants_counts() -> None:
    shapes, tables = Shapes(), Tables()
    owner = ReservationOwner(label_selector=LabelSelector(match_labels={"app": "a"}))
    demand = PreAllocation(name="r", owners=(owner,), multiple=False, required=False)
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    wanted = {"cpu": "4", "memory": "8Gi", "example.com/x": "0"}
    shape = shapes.of(make_pod("r", requests=wanted, annotations=annotations))
    for name, memory in (("all", "8Gi"), ("half", "4Gi")):
        tables.upsert_node(make_node(name, allocatable={"cpu": "4", "memory": "8Gi"}))
        pod = make_pod(name, requests={"cpu": "2", "memory": memory}, labels={"app": "a"})
        tables.place(Booking(name, name, shapes.of(pod), name))
    assert PreAllocating().score(shape, tables, slice(0, 2)).tolist() == [75, 50]


def test_candidates_of_the_whole_cluster_need_the_profiles_consent() -> None:
    shapes, tables = Shapes(), Tables()
    demand = PreAllocation(name="r", owners=(), cluster=True)
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    shape = shapes.of(make_pod("r", requests={"cpu": "4"}, annotations=annotations))
    PreAllocating(Settings(cluster=True)).check(shape, tables)
    PreAllocating().check(shapes.of(make_pod("p")), tables)
    PreAllocating().check(_reserve_pod(shapes, multiple=True, required=True), tables)
    with pytest.raises(Refusal, match="'Cluster': enableClusterMode is not set") as refused:
        PreAllocating().check(shape, tables)
    assert (refused.value.plugin, refused.value.resolvable) == ("Reservation", False)


@pytest.mark.parametrize(
    ("priorities", "taken"),
    [
        (("2", "10"), "b"),
        (("-5", ""), "b"),
        (("-7", "-5"), "b"),
        (("", "1-"), "a"),
        (("", "5x"), "a"),
        (("-1", "99999999999"), "b"),
        (("", "99999999999"), "a"),
        (("0", "9999999999"), "b"),
        (("7", "7"), "a"),
    ],
)
def test_candidates_of_the_cluster_are_taken_by_their_priority(
    priorities: tuple[str, str], taken: str
) -> None:
    """What is no number of at most ten digits counts as 0; equal ones go by UID."""
    shapes, tables = Shapes(), Tables()
    tables.upsert_node(make_node("n", allocatable={"cpu": "4"}))
    for uid, priority in zip("ab", priorities, strict=True):
        labels = {LABEL_IS_PRE_ALLOCATABLE: "true"}
        annotations = {ANNOTATION_PRE_ALLOCATABLE_PRIORITY: priority}
        pod = make_pod(uid, requests={"cpu": "2"}, labels=labels, annotations=annotations)
        tables.place(Booking(uid, uid, shapes.of(pod), "n"))
    owner = ReservationOwner(label_selector=LabelSelector())
    demand = PreAllocation(name="r", owners=(owner,), cluster=True)
    annotations = {ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(demand)}
    shape = shapes.of(make_pod("r", requests={"cpu": "2"}, annotations=annotations))
    found = PreAllocating(Settings(cluster=True)).taken_over(shape, tables, slice(0, 1))
    assert [booking.uid for booking in found[0]] == [taken]


_DEMAND = PreAllocation(
    name="r",
    owners=(ReservationOwner(label_selector=LabelSelector(match_labels={"app": "a"})),),
    cluster=True,
    required=True,
)


@pytest.mark.parametrize(
    ("annotations", "demand"),
    [
        ({ANNOTATION_RESERVE_POD: "true", ANNOTATION: text_of(_DEMAND)}, _DEMAND),
        ({ANNOTATION_RESERVE_POD: "true", ANNOTATION: "{"}, None),
        ({ANNOTATION_RESERVE_POD: "true"}, None),
        # A pod of a user.
        ({ANNOTATION: text_of(_DEMAND)}, None),
    ],
)
def test_a_demand_is_read_from_reserve_pods_alone(
    annotations: dict[str, str], demand: PreAllocation | None
) -> None:
    assert demand_of(Shapes().of(make_pod("p", annotations=annotations))) == demand
