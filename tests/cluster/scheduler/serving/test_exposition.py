"""/metrics: names and labels that dashboards read, and what they count."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from apis.decode import decode_object
from apis.scheduling import Reservation
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.manifests import config_map
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.exposition import show_state
from kube.cache import Change, Event
from kube.connection import Connection
from kube.faults import Faults
from kube.kept_client import KeptClient
from tests.cluster.scheduler.making import make_node, make_pod

_LINE = re.compile(r"[a-z_:]+(\{([a-zA-Z_]+=\"[^\"\n]*\",?)*\})? (\d[0-9.e+-]*|\+Inf|NaN)")


@pytest.fixture
def process() -> SchedulerProcess:
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    text = config_map()["data"]["koord-scheduler-config"]
    configuration = read_configuration(text, obj="shipped")
    made = SchedulerProcess(nowhere, configuration, seed=1, network_status=True)
    show_state(made)
    return made


def _lines(process: SchedulerProcess) -> list[str]:
    lines = "".join(process.metrics.registry.slices()).splitlines()
    for line in lines:
        assert line.startswith("# ") or _LINE.fullmatch(line), line
    return lines


def test_nodes_pods_and_refusals_are_counted(
    process: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        process.tables.upsert_node(make_node(f"n{number}"))
    for name, cpu in (("small", "1"), ("large", "64"), ("larger", "64")):
        pod = make_pod(name, requests={"cpu": cpu}, schedulerName="koord-scheduler")
        process.source.pod_event(Event(Change.ADDED, None, pod))
    now = process._clock()
    monkeypatch.setattr(process.binder, "submit", lambda _: None)
    while process.attempts.next(now):
        pass
    lines = _lines(process)
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
        'koord_scheduler_faults{part="scheduler"} 0',
    ):
        assert line in lines, line
    attempt = "scheduler_scheduling_attempt_duration_seconds_count"
    assert f'{attempt}{{result="scheduled",profile="koord-scheduler"}} 1' in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


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
