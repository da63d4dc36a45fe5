"""/metrics: names and labels that dashboards read, and what they count."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from apis.decode import decode_object
from apis.scheduling import Reservation
from cluster.scheduler.binding.placement import Bound
from cluster.scheduler.cycle.timings import (
    BIND,
    FILTER,
    PERMIT,
    POST_FILTER,
    PRE_FILTER,
    RESERVE,
    SCORE,
    SUCCESS,
    UNSCHEDULABLE,
)
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.client_metrics import work_queue_lines
from kube.cache import Change, Event
from kube.faults import Faults
from kube.queue import WorkQueue
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.serving.exercised import LINE, decide, new_process


@pytest.fixture
def process() -> SchedulerProcess:
    return new_process()


def _lines(process: SchedulerProcess) -> list[str]:
    lines = "".join(process.metrics.registry.slices()).splitlines()
    for line in lines:
        assert line.startswith("# ") or LINE.fullmatch(line), line
    return lines


def test_nodes_pods_and_refusals_are_counted(process: SchedulerProcess) -> None:
    (placement,) = decide(process, (("small", "1"), ("large", "64"), ("larger", "64")))
    lines = _lines(process)
    incoming = "scheduler_queue_incoming_pods_total"
    for line in (
        'leader_election_master_status{name="koord-scheduler"} 0',
        'scheduler_cache_size{type="nodes"} 3',
        'scheduler_cache_size{type="pods"} 1',
        'scheduler_cache_size{type="assumed_pods"} 1',
        'scheduler_unschedulable_pods{plugin="NodeResourcesFit",profile="koord-scheduler"} 2',
        'scheduler_schedule_attempts_total{result="unschedulable",profile="koord-scheduler"} 2',
        "scheduler_waiting_gang_group_number 0",
        'scheduler_pod_scheduling_feasible_nodes_bucket{le="2"} 2',
        'scheduler_pod_scheduling_feasible_nodes_bucket{le="4"} 3',
        "scheduler_pod_scheduling_evaluated_nodes_sum 9",
        "scheduler_preemption_attempts_total 2",
        f'{incoming}{{event="UnschedulablePodAdd",queue="active"}} 3',
        f'{incoming}{{event="ScheduleAttemptFailure",queue="unschedulable"}} 2',
        'koord_scheduler_faults{part="scheduler"} 0',
    ):
        assert line in lines, line
    attempt = "scheduler_scheduling_attempt_duration_seconds_count"
    assert f'{attempt}{{result="unschedulable",profile="koord-scheduler"}} 2' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    assert not any(line.startswith(f'{attempt}{{result="scheduled"') for line in lines)
    process.attempts.bound(placement, Bound())
    lines = _lines(process)
    for line in (
        f'{attempt}{{result="scheduled",profile="koord-scheduler"}} 1',
        'scheduler_schedule_attempts_total{result="scheduled",profile="koord-scheduler"} 1',
        'scheduler_pod_scheduling_attempts_bucket{le="1"} 1',
        'scheduler_pod_scheduling_sli_duration_seconds_count{attempts="1"} 1',
    ):
        assert line in lines, line


def test_a_gated_pod_is_unschedulable_by_its_gate(process: SchedulerProcess) -> None:
    gates = [{"name": "example.com/wait"}]
    pod = make_pod("gated", schedulerName="koord-scheduler", schedulingGates=gates)
    process.source.pod_event(Event(Change.ADDED, None, pod))
    lines = _lines(process)
    plugin = 'plugin="SchedulingGates",profile="koord-scheduler"'
    assert f"scheduler_unschedulable_pods{{{plugin}}} 1" in lines
    name = "scheduler_queue_incoming_pods_total"
    assert f'{name}{{event="UnschedulablePodAdd",queue="unschedulable"}} 1' in lines


def test_the_steps_of_decisions_are_measured(process: SchedulerProcess) -> None:
    placements = decide(process, [("large", "64"), *((f"p{n}", "1") for n in range(5))])
    for placement in placements:
        process._step(placement, BIND, True, 0.02)
    steps = process.timings["koord-scheduler"].points
    counts = {key: histogram.count for key, histogram in steps.items()}
    for step in (SCORE, RESERVE, PERMIT, BIND):
        # A pod that no node takes is scored too: over no nodes.
        assert counts[step, SUCCESS] == 6 if step == SCORE else 5, step
    assert counts[FILTER, SUCCESS] == counts[PRE_FILTER, SUCCESS] == 6
    assert counts[POST_FILTER, UNSCHEDULABLE] == 1
    assert steps[BIND, SUCCESS].sum == pytest.approx(0.1)


def test_only_nodes_that_changed_are_counted_as_looked_at(process: SchedulerProcess) -> None:
    decide(process, [(f"p{number}", "1") for number in range(9)], nodes=40)
    found = process.timings["koord-scheduler"].evaluated
    # All nodes for the first pod, then the one that took the pod before.
    assert found["NodeResourcesFit", FILTER].nodes == 40 + 8


def test_plugins_are_measured_in_a_part_of_the_decisions(
    process: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = iter([0.5, 0.05, 0.5, 0.09, 0.11])
    monkeypatch.setattr("cluster.scheduler.cycle.timings.random.random", lambda: next(draws))
    decide(process, [(f"p{number}", "1") for number in range(5)])
    plugins = process.timings["koord-scheduler"].plugins
    assert plugins["NodeResourcesFit", FILTER, SUCCESS].count == 2
    assert plugins["NodeResourcesFit", SCORE, SUCCESS].count == 2


def test_requests_and_work_queues_are_shown(process: SchedulerProcess) -> None:
    counts = process.client.counts
    counts.answered("POST", 201)
    counts.answered("GET", None)
    counts.verb("POST").duration.observe(0.2)
    process.reservation_writer.queue.add("r")
    lines = _lines(process)
    for line in (
        'rest_client_requests_total{code="201",host="127.0.0.1:1",method="POST"} 1',
        'rest_client_requests_total{code="<error>",host="127.0.0.1:1",method="GET"} 1',
        'rest_client_request_duration_seconds_bucket{verb="POST",host="127.0.0.1:1",le="0.1"} 0',
        'rest_client_request_duration_seconds_bucket{verb="POST",host="127.0.0.1:1",le="0.25"} 1',
        'workqueue_adds_total{name="writes of reservations"} 1',
        'workqueue_depth{name="writes of reservations"} 1',
        'workqueue_adds_total{name="quota statuses"} 0',
    ):
        assert line in lines, line


def test_a_work_queue_shows_what_is_due_repeated_and_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, idle = WorkQueue("busy"), WorkQueue("idle")
    queue.counts.adds, queue.counts.retries = 5, 2
    queue.counts.waited.observe(0.5)
    queue.counts.worked.observe(5.0)
    monkeypatch.setattr(queue, "running", lambda: (1.5, 4.0))
    lines = "".join(work_queue_lines((queue, idle))).splitlines()
    shown = [line for line in lines if not line.startswith("#") and "_bucket" not in line]
    assert shown == [
        'workqueue_adds_total{name="busy"} 5',
        'workqueue_adds_total{name="idle"} 0',
        'workqueue_retries_total{name="busy"} 2',
        'workqueue_retries_total{name="idle"} 0',
        'workqueue_depth{name="busy"} 0',
        'workqueue_depth{name="idle"} 0',
        'workqueue_unfinished_work_seconds{name="busy"} 5.5',
        'workqueue_unfinished_work_seconds{name="idle"} 0',
        'workqueue_longest_running_processor_seconds{name="busy"} 4',
        'workqueue_longest_running_processor_seconds{name="idle"} 0',
        'workqueue_queue_duration_seconds_sum{name="busy"} 0.5',
        'workqueue_queue_duration_seconds_count{name="busy"} 1',
        'workqueue_queue_duration_seconds_sum{name="idle"} 0',
        'workqueue_queue_duration_seconds_count{name="idle"} 0',
        'workqueue_work_duration_seconds_sum{name="busy"} 5',
        'workqueue_work_duration_seconds_count{name="busy"} 1',
        'workqueue_work_duration_seconds_sum{name="idle"} 0',
        'workqueue_work_duration_seconds_count{name="idle"} 0',
    ]
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert kinds == {
        "workqueue_adds_total": "counter",
        "workqueue_retries_total": "counter",
        "workqueue_depth": "gauge",
        "workqueue_unfinished_work_seconds": "gauge",
        "workqueue_longest_running_processor_seconds": "gauge",
        "workqueue_queue_duration_seconds": "histogram",
        "workqueue_work_duration_seconds": "histogram",
    }


def test_a_reservation_shows_its_phase_and_how_full_it_is(process: SchedulerProcess) -> None:
    tree = {
        "metadata": {"name": 'r"1'},
        "status": {
            "phase": "Available",
            "allocatable": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"},
            "allocated": {"cpu": "1"},
        },
    }
    reservation = decode_object(json.dumps(tree).encode(), Reservation, obj="r")
    process.reservations._items["r"] = reservation
    lines = "".join(process.metrics.registry.slices()).splitlines()
    name = 'name="r\\"1"'
    phase, amount = "scheduler_reservation_status_phase", "scheduler_reservation_resource"
    for line in (
        f'{phase}{{{name},phase="Available"}} 1',
        f'{phase}{{{name},phase="Failed"}} 0',
        f'{amount}{{type="allocatable",{name},resource="cpu",unit="core"}} 4',
        f'{amount}{{type="allocatable",{name},resource="memory",unit="Gi"}} 8',
        f'{amount}{{type="allocatable",{name},resource="nvidia.com/gpu",unit="raw"}} 2',
        f'{amount}{{type="utilization",{name},resource="cpu",unit="ratio"}} 0.25',
    ):
        assert line in lines, line


def test_the_faults_of_every_part_are_shown_once(process: SchedulerProcess) -> None:
    expected: dict[str, str] = {}
    for number, faults in enumerate(_reachable(process), start=1):
        faults.count = number
        expected[f'koord_scheduler_faults{{part="{faults.part}"}}'] = str(number)
    # The walk finds what is kept in an attribute, in a container, and below another part.
    found = {line.split('"')[1] for line in expected}
    assert found >= {"binding", "cache of pods", "cache of nodes", "quota statuses", "explanations"}
    shown = [
        line.rsplit(" ", 1) for line in _lines(process) if line.startswith("koord_scheduler_faults")
    ]
    assert sorted(shown) == sorted([part, count] for part, count in expected.items())


def _reachable(process: SchedulerProcess) -> Iterator[Faults]:
    """Yield every Faults that the attributes of our own objects lead to."""
    seen: set[int] = set()
    waiting: list[object] = [process]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Faults):
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif type(each).__module__.startswith(("cluster.", "kube.")):
            waiting += _attributes(each)


def _attributes(of: Any) -> Iterable[object]:
    yield from getattr(of, "__dict__", {}).values()
    for kind in type(of).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(of, name, None)
