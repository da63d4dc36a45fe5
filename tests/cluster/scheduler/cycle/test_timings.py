"""What is counted about decisions: the time of each step and plugin, and the nodes looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.timings import Timings
from cluster.scheduler.plugins.contract import (
    Mask,
    Reason,
    Recorded,
    Refusal,
    ScoredAsIs,
    Scores,
)
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from service.histogram import Histogram
from tests.cluster.scheduler.making import make_node, make_pod


@dataclass
class _Clock:
    """Stands still but for what plugins say that they take."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class _Plugin:
    """Takes so many seconds for each call."""

    name: str
    clock: _Clock
    takes: float

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return 0

    def count(self, tables: Tables, rows: Rows) -> int:
        self.clock.now += self.takes
        return len(np.arange(len(tables.nodes))[rows])


@dataclass(frozen=True)
class _Admission(_Plugin):
    refuses: list[Refusal] = field(default_factory=list)

    def check(self, pod: PodShape, tables: Tables) -> None:
        self.clock.now += self.takes
        if self.refuses:
            raise self.refuses[0]


class _Filter(_Plugin):
    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return ()

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        return np.zeros(self.count(tables, rows), dtype=np.int64)


class _RowFilter(_Filter):
    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        self.clock.now += self.takes
        return 0


class _Score(_Plugin):
    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        return np.zeros(self.count(tables, rows), dtype=np.int64)

    def normalize(self, raw: Scores) -> Scores:
        return raw


class _RowScore(ScoredAsIs, _Score):
    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        self.clock.now += self.takes
        return 0


class _SetScore(_Plugin):
    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        return np.zeros(self.count(tables, feasible), dtype=np.int64)


@dataclass(frozen=True)
class _Allocator(_Plugin):
    gives: bool = True

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        self.clock.now += self.takes
        return allocation if self.gives else Reason("node(s) give nothing")

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        return Recorded({}, {})


_SHAPE = Shapes().of(make_pod("a", requests={"cpu": "1"}))


def _profile(clock: _Clock) -> Profile:
    return Profile(
        "koord-scheduler",
        admissions=(_Admission("Admission", clock, 1.0),),
        filters=(_Filter("Filter", clock, 2.0), _RowFilter("RowFilter", clock, 4.0)),
        scores=((_Score("Score", clock, 8.0), 1), (_RowScore("RowScore", clock, 16.0), 1)),
        set_scores=((_SetScore("SetScore", clock, 32.0), 1),),
    )


def _tables(nodes: int) -> Tables:
    tables = Tables()
    for number in range(nodes):
        tables.upsert_node(make_node(f"n{number}"))
    return tables


def _place(tables: Tables, number: int) -> None:
    tables.place(Booking(f"default/p{number}", f"p{number}", _SHAPE, f"n{number}"))


def _took(timings: Timings) -> dict[tuple[str, ...], tuple[int, float]]:
    found: list[tuple[tuple[str, ...], Histogram]] = [
        *timings.points.items(),
        *timings.plugins.items(),
    ]
    return {key: (each.count, each.sum) for key, each in found}


def test_steps_and_plugins_are_timed_and_looked_at_nodes_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, tables = _Clock(), _tables(40)
    evaluator = Evaluator(_profile(clock), tables)
    evaluator.timings.clock = clock
    # Plugins are measured in a tenth of the decisions.
    monkeypatch.setattr("random.random", lambda: 0.09)
    evaluator.evaluate(_SHAPE)
    steps = {
        ("PreFilter", "Success"): (1, 1.0),
        ("Filter", "Success"): (1, 6.0),
        ("Score", "Success"): (1, 56.0),
    }
    plugins = {
        ("Admission", "PreFilter", "Success"): (1, 1.0),
        ("Filter", "Filter", "Success"): (1, 2.0),
        ("RowFilter", "Filter", "Success"): (1, 4.0),
        ("Score", "Score", "Success"): (1, 8.0),
        ("RowScore", "Score", "Success"): (1, 16.0),
        ("SetScore", "Score", "Success"): (1, 32.0),
    }
    assert _took(evaluator.timings) == steps | plugins
    # Then one node changes, which is looked at by itself, and then five of them.
    _place(tables, 0)
    evaluator.evaluate(_SHAPE)
    assert evaluator.timings.plugins["RowFilter", "Filter", "Success"].sum == 8.0
    for number in range(5):
        _place(tables, number + 10)
    monkeypatch.setattr("random.random", lambda: 0.1)
    evaluator.evaluate(_SHAPE)
    evaluator.evaluate(_SHAPE)
    assert evaluator.timings.points["Score", "Success"].sum == 3 * 56.0 + 32.0
    counts = {key: count for key, (count, _) in _took(evaluator.timings).items()}
    assert {key: counts.pop(key) for key in steps} == dict.fromkeys(steps, 4)
    assert counts == dict.fromkeys(plugins, 2)
    assert {key: tally.nodes for key, tally in evaluator.timings.evaluated.items()} == {
        ("Admission", "PreFilter"): 4,
        ("Filter", "Filter"): 46,
        ("RowFilter", "Filter"): 46,
        ("Score", "Score"): 46,
        ("RowScore", "Score"): 46,
        ("SetScore", "Score"): 160,
    }


@pytest.mark.parametrize(
    ("resolvable", "status"), [(True, "Unschedulable"), (False, "UnschedulableAndUnresolvable")]
)
def test_a_refusal_before_the_nodes_ends_the_timing_there(resolvable: bool, status: str) -> None:
    clock = _Clock()
    refusal = Refusal("Admission", "no", resolvable=resolvable)
    profile = replace(_profile(clock), admissions=(_Admission("Admission", clock, 1.0, [refusal]),))
    evaluator = Evaluator(profile, _tables(2))
    evaluator.timings.clock = clock
    with pytest.raises(Refusal):
        evaluator.evaluate(_SHAPE)
    assert _took(evaluator.timings) == {("PreFilter", status): (1, 1.0)}


@pytest.mark.parametrize(("gives", "seconds"), [(True, 64.0), (False, 3 * 64.0)])
def test_the_exact_allocation_is_timed(gives: bool, seconds: float) -> None:
    clock = _Clock()
    allocator = _Allocator("Allocator", clock, 64.0, gives)
    scheduling = Scheduling(
        _tables(3), {"koord-scheduler": replace(_profile(clock), allocators=(allocator,))}, seed=1
    )
    scheduling.timings("koord-scheduler").clock = clock
    scheduling.schedule(key="default/a", uid="u", shape=_SHAPE, profile="koord-scheduler", now=0.0)
    status = "Success" if gives else "Unschedulable"
    found = scheduling.timings("koord-scheduler").points
    assert {key: each.sum for key, each in found.items() if key[0] == "Reserve"} == {
        ("Reserve", status): seconds
    }


def test_a_pod_that_no_filter_passes_has_no_time_of_an_allocation() -> None:
    scheduling = Scheduling(Tables(), {"koord-scheduler": _profile(_Clock())}, seed=1)
    scheduling.schedule(key="default/a", uid="u", shape=_SHAPE, profile="koord-scheduler", now=0.0)
    steps = {step for step, _ in scheduling.timings("koord-scheduler").points}
    assert steps == {"PreFilter", "Filter", "Score"}
