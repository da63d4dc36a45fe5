"""What the metrics about attempts and bindings count."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.scheduler.binding.placement import Bound, Refused, Why
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.events import EventTable
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Placed, Unplaced
from cluster.scheduler.metrics import SchedulerMetrics, Tried
from cluster.scheduler.plugins.contract import Recorded
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.pending import pending
from tests.cluster.scheduler.serving.exercised import exercise, new_process

_SHAPE = Shapes().of(make_pod("p", requests={"cpu": "9"}, schedulerName="s"))
_POD = PendingPod("default/p", "p", priority=0, shape=_SHAPE, created=0.0)

_BUCKETS = {
    # count of bounds, the first two and the last one; kube-scheduler's where it has the name
    "scheduler_scheduling_algorithm_duration_seconds": (16, 0.00005, 0.0001, 1.6384),
    "scheduler_batch_algorithm_by_pod_duration_seconds": (15, 0.001, 0.002, 16.384),
    "scheduler_scheduling_attempt_duration_seconds": (20, 0.00005, 0.0001, 26.2144),
    "scheduler_pod_scheduling_attempts": (5, 1, 2, 16),
    "scheduler_pod_scheduling_evaluated_nodes": (24, 1, 2, 8.38861e06),
    "scheduler_pod_scheduling_feasible_nodes": (24, 1, 2, 8.38861e06),
    "scheduler_pod_scheduling_sli_duration_seconds": (20, 0.01, 0.02, 5242.88),
    "scheduler_preemption_victims": (7, 1, 2, 64),
    "scheduler_update_elastic_quota_status_duration_seconds": (15, 0.001, 0.002, 16.384),
    "scheduler_framework_extension_point_duration_seconds": (12, 0.0001, 0.0002, 0.2048),
    "scheduler_plugin_execution_duration_seconds": (20, 1e-05, 1.5e-05, 0.0221684),
}


def _values(metrics: SchedulerMetrics) -> dict[str, float]:
    """Return the series that are not 0, without buckets."""
    text = "".join(metrics.registry.slices())
    rows = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in rows if "_bucket" not in name and float(value)}


@pytest.fixture
def metrics() -> SchedulerMetrics:
    queue: SchedulingQueue[Any] = SchedulingQueue(EventTable({}))
    return SchedulerMetrics(queue)


def test_durations_and_counts_have_the_buckets_of_kube_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.scheduler.cycle.timings.SAMPLED_PART", 1.0)
    process = new_process()
    exercise(process)
    found: dict[str, list[float]] = {}
    for name, bound in re.findall(
        r'^(scheduler_\w+)_bucket\{(?:.*,)?le="([0-9.e+-]+)"', "".join(_text(process)), re.MULTILINE
    ):
        bounds = found.setdefault(name, [])
        if float(bound) not in bounds:
            bounds.append(float(bound))
    assert {
        name: (len(bounds), *bounds[:2], bounds[-1]) for name, bounds in found.items()
    } == _BUCKETS


def _text(process: Any) -> list[str]:
    return list(process.metrics.registry.slices())


def test_a_decision_counts_nodes_and_an_attempt_that_ends_with_it(
    metrics: SchedulerMetrics,
) -> None:
    metrics.decided(Unplaced(Diagnosis(nodes=5)), "s", 0.25)
    common = {
        "scheduler_scheduling_algorithm_duration_seconds_sum": 0.25,
        "scheduler_scheduling_algorithm_duration_seconds_count": 1,
        "scheduler_pod_scheduling_evaluated_nodes_count": 1,
        "scheduler_pod_scheduling_feasible_nodes_count": 1,
    }
    labels = '{result="unschedulable",profile="s"}'
    assert _values(metrics) == common | {
        f"scheduler_scheduling_attempt_duration_seconds_sum{labels}": 0.25,
        f"scheduler_scheduling_attempt_duration_seconds_count{labels}": 1,
        f"scheduler_schedule_attempts_total{labels}": 1,
        "scheduler_pod_scheduling_evaluated_nodes_sum": 5,
    }


def test_a_decision_for_a_node_counts_as_an_attempt_when_the_pod_is_bound(
    metrics: SchedulerMetrics,
) -> None:
    tables = Tables()
    for name in ("a", "b", "c"):
        tables.upsert_node(make_node(name))
    tables.delete_node("b")
    evaluation = Evaluator(Profile("s"), tables).evaluate(_SHAPE)
    placed = Placed(Booking("default/p", "p", _SHAPE, "a"), Recorded({}, {}), evaluation)
    metrics.decided(placed, "s", 0.25)
    assert _values(metrics) == {
        "scheduler_scheduling_algorithm_duration_seconds_sum": 0.25,
        "scheduler_scheduling_algorithm_duration_seconds_count": 1,
        "scheduler_pod_scheduling_evaluated_nodes_sum": 2,
        "scheduler_pod_scheduling_evaluated_nodes_count": 1,
        "scheduler_pod_scheduling_feasible_nodes_sum": 2,
        "scheduler_pod_scheduling_feasible_nodes_count": 1,
    }


@pytest.mark.parametrize(("number", "named"), [(1, "1"), (15, "15"), (16, "15+"), (99, "15+")])
def test_a_bound_pod_counts_with_its_attempts_and_its_wait(
    number: int, named: str, metrics: SchedulerMetrics
) -> None:
    metrics.bound(Bound(), _POD, Tried(number, entered=100.0, began=7.0), 103.5, 7.25)
    labels = '{result="scheduled",profile="s"}'
    assert _values(metrics) == {
        f"scheduler_schedule_attempts_total{labels}": 1,
        f"scheduler_scheduling_attempt_duration_seconds_sum{labels}": 0.25,
        f"scheduler_scheduling_attempt_duration_seconds_count{labels}": 1,
        "scheduler_pod_scheduling_attempts_sum": number,
        "scheduler_pod_scheduling_attempts_count": 1,
        f'scheduler_pod_scheduling_sli_duration_seconds_sum{{attempts="{named}"}}': 3.5,
        f'scheduler_pod_scheduling_sli_duration_seconds_count{{attempts="{named}"}}': 1,
    }


def test_a_binding_that_is_refused_is_an_error(metrics: SchedulerMetrics) -> None:
    metrics.bound(Refused(Why.FAILING, "no"), _POD, Tried(1, entered=100.0, began=7.0), 101, 7.25)
    labels = '{result="error",profile="s"}'
    assert _values(metrics) == {
        f"scheduler_schedule_attempts_total{labels}": 1,
        f"scheduler_scheduling_attempt_duration_seconds_sum{labels}": 0.25,
        f"scheduler_scheduling_attempt_duration_seconds_count{labels}": 1,
    }


def test_pods_are_counted_where_they_wait_and_how_they_came_there() -> None:
    queue: SchedulingQueue[Any] = SchedulingQueue(EventTable({}))
    metrics = SchedulerMetrics(queue)
    for name in ("a", "b", "c"):
        queue.add(pending(name, name), now=0)
    for _ in range(2):
        assert queue.pop(0) is not None
    queue.refuse("a", {"Fit"}, now=0)
    metrics.preempts(3)
    arrived = "scheduler_queue_incoming_pods_total"
    assert _values(metrics) == {
        'scheduler_pending_pods{queue="active"}': 1,
        'scheduler_pending_pods{queue="unschedulable"}': 1,
        f'{arrived}{{event="UnschedulablePodAdd",queue="active"}}': 3,
        f'{arrived}{{event="ScheduleAttemptFailure",queue="unschedulable"}}': 1,
        "scheduler_preemption_victims_sum": 3,
        "scheduler_preemption_victims_count": 1,
    }
