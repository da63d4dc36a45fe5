"""Masks and scores that are kept for a shape equal those worked out afresh."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.plugins.between_pods.pod_affinity import InterPodAffinity
from cluster.scheduler.plugins.contract import Mask, Reason
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.resource_scores import BalancedAllocation, LeastAllocated
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_PROFILE = Profile(
    "koord-scheduler",
    filters=(NodeUnschedulable(), TaintToleration(), NodeResourcesFit()),
    scores=((LeastAllocated(), 1), (BalancedAllocation(), 1), (TaintToleration(), 3)),
)
_TAINTS = st.sampled_from(
    [
        [],
        [{"key": "a", "effect": "NoSchedule"}],
        [{"key": "b", "effect": "PreferNoSchedule"}],
        [{"key": "b", "value": "x", "effect": "NoExecute"}],
    ]
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("node"), st.integers(0, 40), _TAINTS),
        st.tuples(st.just("gone"), st.integers(0, 40), st.none()),
        st.tuples(st.just("schedule"), st.integers(0, 3), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 10), st.none()),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(_STEPS)
def test_what_is_kept_equals_what_is_worked_out_afresh(steps: list[tuple[str, int, Any]]) -> None:
    tables = Tables()
    shapes = Shapes()
    kept = Evaluator(_PROFILE, tables)
    pods = [
        make_pod("a", requests={"cpu": "1"}),
        make_pod("b", requests={"cpu": "7", "memory": "1Gi"}),
        make_pod("c", requests={"cpu": "1"}, tolerations=[{"key": "a", "operator": "Exists"}]),
        make_pod("d", requests={"example.com/x": "1"}),
    ]
    placed: list[str] = []
    for number, (kind, index, what) in enumerate(steps):
        if kind == "node":
            tables.upsert_node(
                make_node(f"n{index}", taints=what, allocatable={"cpu": str(index % 9)})
            )
        elif kind == "gone":
            tables.delete_node(f"n{index}")
        elif kind == "remove" and placed:
            tables.remove(placed.pop(index % len(placed)))
        elif kind == "schedule":
            shape = shapes.of(pods[index])
            found = kept.evaluate(shape)
            fresh = Evaluator(_PROFILE, tables).evaluate(shape)
            assert found.feasible.tolist() == fresh.feasible.tolist()
            assert found.totals.tolist() == fresh.totals.tolist()
            added = sum(weight * scores[found.feasible] for _, weight, scores in found.parts)
            assert found.totals.tolist() == np.broadcast_to(added, found.totals.shape).tolist()
            for (plugin, mask), (other, expected) in zip(found.masks, fresh.masks, strict=True):
                assert plugin == other
                assert mask.tolist() == expected.tolist()
            best = found.best(number)
            if best is not None:
                assert found.totals[found.feasible.tolist().index(best)] == found.totals.max()
                node = tables.nodes.name(best)
                placed.append(str(number))
                tables.place(Booking(key="", uid=str(number), shape=shape, node=node))


def test_one_node_of_many_that_becomes_full_or_free_is_taken_out_or_in() -> None:
    tables = Tables()
    for number in range(20):
        tables.upsert_node(make_node(f"n{number}"))
    shape = Shapes().of(make_pod("a", requests={"cpu": "10"}))
    evaluator = Evaluator(_PROFILE, tables)
    assert len(evaluator.evaluate(shape).feasible) == 20
    tables.place(Booking(key="", uid="a", shape=shape, node="n3"))
    assert tables.nodes.row("n3") not in evaluator.evaluate(shape).feasible.tolist()
    tables.remove("a")
    assert len(evaluator.evaluate(shape).feasible) == 20


def test_several_nodes_of_many_that_change_are_scored_again_as_a_list() -> None:
    tables, shapes = Tables(), Shapes()
    for number in range(64):
        tables.upsert_node(make_node(f"n{number}", allocatable={"cpu": "8"}))
    kept, shape = Evaluator(_PROFILE, tables), shapes.of(make_pod("p", requests={"cpu": "1"}))
    before = kept.evaluate(shape).totals.tolist()
    for number in range(6):
        tables.place(Booking(f"u{number}", f"default/u{number}", shape, f"n{7 * number}"))
    found = kept.evaluate(shape).totals.tolist()
    assert found == Evaluator(_PROFILE, tables).evaluate(shape).totals.tolist()
    changed = [row for row in range(64) if found[row] != before[row]]
    assert changed == [0, 7, 14, 21, 28, 35]


class _FailsOnce(NodeResourcesFit):
    """A filter whose next call raises an exception if `fails` is set."""

    fails = False

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        if _FailsOnce.fails:
            _FailsOnce.fails = False
            raise RuntimeError("fault")
        return super().filter(pod, tables, rows)

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        return int(self.filter(pod, tables, np.array([row]))[0])


def test_after_a_fault_of_a_plugin_all_nodes_are_evaluated_again() -> None:
    profile = Profile("koord-scheduler", filters=(InterPodAffinity(), _FailsOnce()))
    tables = Tables()
    for number in range(40):
        tables.upsert_node(make_node(f"n{number}", labels={"zone": f"z{number % 2}"}))
    term = {"labelSelector": {"matchLabels": {"app": "red"}}, "topologyKey": "zone"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    shapes = Shapes()
    apart = shapes.of(make_pod("a", affinity={"podAntiAffinity": required}, requests={"cpu": "1"}))
    red = shapes.of(make_pod("r", labels={"app": "red"}))
    evaluator = Evaluator(profile, tables)
    assert len(evaluator.evaluate(apart).feasible) == 40
    tables.place(Booking(key="", uid="r", shape=red, node="n0"))
    _FailsOnce.fails = True
    with pytest.raises(RuntimeError):
        evaluator.evaluate(apart)
    expected = Evaluator(profile, tables).evaluate(apart).feasible.tolist()
    assert len(expected) == 20
    assert evaluator.evaluate(apart).feasible.tolist() == expected


def test_ties_do_not_depend_on_the_order_in_which_nodes_appeared() -> None:
    chosen = []
    for order in (range(50), reversed(range(50))):
        tables = Tables()
        for number in order:
            tables.upsert_node(make_node(f"n{number}"))
        evaluation = Evaluator(_PROFILE, tables).evaluate(Shapes().of(make_pod("a")))
        chosen.append(
            [tables.nodes.name(evaluation.best(salt * 2**56) or 0) for salt in range(200)]
        )
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 20


def test_only_the_shapes_that_were_used_last_are_kept() -> None:
    tables = Tables()
    tables.upsert_node(make_node("n"))
    shapes = Shapes()
    evaluator = Evaluator(_PROFILE, tables)
    all_of_them = [shapes.of(make_pod("p", requests={"cpu": f"{n}m"})) for n in range(300)]
    for shape in all_of_them:
        evaluator.evaluate(shape)
    first = weakref.ref(tables.reduction.of(all_of_them[0]))
    last = weakref.ref(tables.reduction.of(all_of_them[-1]))
    del all_of_them, shape
    assert first() is None
    assert last() is not None
    assert not len(shapes)


def test_a_plugin_that_applies_by_shape_is_asked_once_for_a_shape() -> None:
    asked = []

    class Fixed(NodeResourcesFit):
        __slots__ = ()

        def applies(self, pod: PodShape, tables: Tables) -> bool:
            asked.append(pod)
            return True

    tables = Tables()
    tables.upsert_node(make_node("n"))
    evaluator = Evaluator(Profile("koord-scheduler", filters=(Fixed(),)), tables)
    shape = Shapes().of(make_pod("a"))
    for _ in range(3):
        evaluator.evaluate(shape)
    assert len(asked) == 1


def test_a_plugin_that_applies_by_tables_is_asked_each_time_and_joins_when_it_applies() -> None:
    class ByTables:
        name = "ByTables"
        on = False

        def applies(self, pod: PodShape, tables: Tables) -> bool:
            return self.on

        def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
            return (Reason("no"),)

        def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
            return np.ones_like(tables.nodes.pods[rows])

        def cluster_version(self, pod: PodShape, tables: Tables) -> int:
            return 0

    plugin = ByTables()
    tables = Tables()
    tables.upsert_node(make_node("n"))
    evaluator = Evaluator(Profile("koord-scheduler", filters=(plugin,)), tables)
    shape = Shapes().of(make_pod("a"))
    for on in (False, True, False):
        plugin.on = on
        assert evaluator.evaluate(shape).feasible.tolist() == ([] if on else [0])
