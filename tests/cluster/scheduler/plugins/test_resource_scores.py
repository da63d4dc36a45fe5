"""Scores of the strategies that are configured rather than default."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.scheduler.plugins.contract import (
    RowScore,
    Score,
    to_largest,
    to_largest_reversed,
)
from cluster.scheduler.plugins.resources.fit_plus import (
    NodeResourcesFitPlus,
    ScarceResourceAvoidance,
    Strategy,
)
from cluster.scheduler.plugins.resources.resource_scores import (
    BalancedAllocation,
    LeastAllocated,
    MostAllocated,
    RequestedToCapacityRatio,
)
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_GPU = "nvidia.com/gpu"


def _with(
    allocatable: dict[str, str], used: dict[str, str], pod: dict[str, str]
) -> tuple[Tables, PodShape]:
    tables = Tables()
    shapes = Shapes()
    tables.upsert_node(make_node("n", allocatable=allocatable))
    if used:
        shape = shapes.of(make_pod("u", requests=used))
        tables.place(Booking(key="", uid="u", shape=shape, node="n"))
    return tables, shapes.of(make_pod("p", requests=pod))


def test_fit_plus_scores_each_resource_by_its_own_strategy() -> None:
    tables, pod = _with({"cpu": "64", _GPU: "8"}, {"cpu": "48", _GPU: "4"}, {"cpu": "8", _GPU: "2"})
    plugin = NodeResourcesFitPlus(
        ((_GPU, Strategy(most=True, weight=2)), ("cpu", Strategy(most=False, weight=1)))
    )
    assert plugin.score(pod, tables, slice(0, 1)).tolist() == [54]
    assert not plugin.applies(Shapes().of(make_pod("x")), tables)
    with_overhead = Shapes().of(make_pod("o", requests={"cpu": "4"}, overhead={"cpu": "4"}))
    assert plugin.score(with_overhead, tables, slice(0, 1)).tolist() == [12]


@pytest.mark.parametrize(
    ("plugin", "without", "with_gpu"),
    [
        pytest.param(LeastAllocated((("cpu", 1), (_GPU, 3))), 50, 31, id="the emptiest"),
        pytest.param(MostAllocated((("cpu", 1), (_GPU, 3))), 50, 68, id="the fullest"),
        pytest.param(
            RequestedToCapacityRatio(((0, 0), (100, 10)), (("cpu", 1), (_GPU, 3))),
            50,
            69,
            id="ratio",
        ),
        pytest.param(BalancedAllocation(("cpu", _GPU)), 75, 71, id="balance"),
    ],
)
def test_an_extended_resource_counts_for_pods_that_request_it(
    plugin: Score, without: int, with_gpu: int
) -> None:
    for requests, score in (({"cpu": "1"}, without), ({"cpu": "1", _GPU: "2"}, with_gpu)):
        tables, pod = _with({"cpu": "10", _GPU: "8"}, {"cpu": "4", _GPU: "4"}, requests)
        assert plugin.score(pod, tables, slice(0, 1)).tolist() == [score]
        if isinstance(plugin, RowScore):
            assert plugin.score_row(pod, tables, 0) == score


@pytest.mark.parametrize(
    ("plugin", "score"),
    [
        pytest.param(LeastAllocated((("cpu", 1), (_GPU, 1))), 0, id="the emptiest"),
        pytest.param(MostAllocated((("cpu", 1), (_GPU, 1))), 100, id="the fullest"),
        pytest.param(RequestedToCapacityRatio(((0, 0), (100, 10))), 67, id="ratio"),
    ],
)
def test_what_a_node_has_too_little_of_counts_as_full(plugin: Score, score: int) -> None:
    tables, pod = _with(
        {"cpu": "2", "memory": "9Gi"}, {"cpu": "3", "memory": "1Gi"}, {"cpu": "1", "memory": "2Gi"}
    )
    assert plugin.score(pod, tables, slice(0, 1)).tolist() == [score]


@pytest.mark.parametrize(
    ("allocatable", "requests", "scarce", "score"),
    [
        pytest.param({_GPU: "8"}, {"cpu": "1", "memory": "1Gi"}, {_GPU}, 50, id="half of the rest"),
        pytest.param({_GPU: "1"}, {"cpu": "1", "memory": "1Gi"}, {_GPU}, 50, id="one is some"),
        pytest.param({}, {"cpu": "1", "memory": "1Gi"}, {_GPU}, 100, id="a node without it"),
        pytest.param({_GPU: "8"}, {"cpu": "1", _GPU: "1"}, {_GPU}, 100, id="a pod that needs it"),
    ],
)
def test_nodes_with_scarce_resources_are_avoided(
    allocatable: dict[str, str], requests: dict[str, str], scarce: set[str], score: int
) -> None:
    tables, pod = _with({"ephemeral-storage": "1Gi", **allocatable}, {}, requests)
    plugin = ScarceResourceAvoidance(frozenset(scarce))
    assert plugin.score(pod, tables, slice(0, 1)).tolist() == [score]


@pytest.mark.parametrize(
    ("points", "percent", "score"),
    [
        pytest.param(((0, 0), (100, 10)), 45, 45, id="a straight line"),
        pytest.param(((0, 10), (100, 0)), 45, 55, id="a falling line"),
        pytest.param(((20, 4), (40, 8)), 10, 40, id="constant before the first point"),
        pytest.param(((20, 4), (40, 8)), 90, 80, id="constant after the last point"),
        pytest.param(((20, 4), (40, 8)), 21, 42, id="between two points"),
    ],
)
def test_a_ratio_function_is_linear_between_its_points(
    points: tuple[tuple[int, int], ...], percent: int, score: int
) -> None:
    assert RequestedToCapacityRatio(points).at(percent) == score


def test_resources_whose_ratio_scores_nothing_are_left_out_of_the_mean() -> None:
    tables, pod = _with({"cpu": "10", "memory": "10Gi"}, {}, {"cpu": "5", "memory": "0"})
    plugin = RequestedToCapacityRatio(((0, 0), (100, 10)))
    assert plugin.score(pod, tables, slice(0, 1)).tolist() == [50]


def test_a_resource_that_a_node_lacks_is_left_out_of_the_mean() -> None:
    tables, pod = _with({"cpu": "10", "memory": "0"}, {}, {"cpu": "5"})
    plugin = RequestedToCapacityRatio(((0, 0), (100, 10)))
    assert plugin.score(pod, tables, slice(0, 1)).tolist() == [50]


@pytest.mark.parametrize(
    ("raw", "largest", "reversed_"),
    [
        ([0, 1], [0, 100], [100, 0]),
        ([3, 6, 2], [50, 100, 33], [50, 0, 67]),
        ([0, 0], [0, 0], [100, 100]),
        ([], [], []),
    ],
)
def test_scores_are_normalised_to_the_largest(
    raw: list[int], largest: list[int], reversed_: list[int]
) -> None:
    scores = np.array(raw, dtype=np.int64)
    assert to_largest(scores).tolist() == largest
    assert to_largest_reversed(scores).tolist() == reversed_


@pytest.mark.parametrize(
    ("allocatable", "used", "score"),
    [
        pytest.param({"cpu": "4", "memory": "8Gi"}, {"cpu": "1", "memory": "2Gi"}, 75, id="even"),
        pytest.param(
            {"cpu": "4", "memory": "8Gi"}, {"cpu": "1"}, 75 + (100 - 87) // 2, id="evener"
        ),
        pytest.param(
            {"cpu": "2", "memory": "8Gi"},
            {"cpu": "3", "memory": "2Gi"},
            75 + (75 - 62) // 2,
            id="what is overbooked counts as full",
        ),
        pytest.param({"cpu": "4", "memory": "0"}, {"cpu": "1"}, 75, id="one resource is even"),
    ],
)
def test_balance_of_two_resources(
    allocatable: dict[str, str], used: dict[str, str], score: int
) -> None:
    pod = {"cpu": "1", "memory": "2Gi"} if "memory" in used else {"memory": "2Gi"}
    tables, shape = _with(allocatable, used, pod)
    plugin = BalancedAllocation()
    assert plugin.score(shape, tables, slice(0, 1)).tolist() == [score]
    assert plugin.score_row(shape, tables, 0) == score


def test_balance_of_other_counts_of_resources() -> None:
    tables, shape = _with({"cpu": "4", "memory": "8Gi"}, {"cpu": "1"}, {"cpu": "1", _GPU: "1"})
    tables.upsert_node(make_node("m", allocatable={"cpu": "4", "memory": "8Gi", _GPU: "2"}))
    rows = slice(0, 2)
    # The first node has no GPU: of one resource, or of none, it is as even as before.
    assert BalancedAllocation((_GPU,)).score(shape, tables, rows).tolist() == [75, 75]
    three = BalancedAllocation(("cpu", "memory", _GPU))
    # Fractions before and after: 1/4, 0 and 2/4, 0; then 0, 0, 0 and 1/4, 0, 1/2.
    assert three.score(shape, tables, rows).tolist() == [75 + (75 - 87) // 2, 75 + (79 - 100) // 2]
    assert [three.score_row(shape, tables, row) for row in (0, 1)] == [69, 64]
