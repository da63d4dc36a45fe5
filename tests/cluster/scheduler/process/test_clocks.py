"""The system's clock is set while pods wait: back-offs and time limits take as long as ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.core import SchedulerCore, steady_clock
from cluster.scheduler.cycle.waiting import QueueState
from kube.client import Client
from tests.cluster.scheduler.beds.core import CONFIGURATION, Bed

HOUR = 3600.0


class ClockBed(Bed):
    """`now` is the system's clock; `passed` are the seconds since the start."""

    passed = 0.0

    def start(self) -> None:
        began = self.now
        self.core = SchedulerCore(
            cast(Client, None),
            read_configuration(CONFIGURATION, obj="test"),
            self,
            seed=1,
            clock=lambda: self.now,
            steady=lambda: began + self.passed,
        )

    def wait(self, seconds: float) -> None:
        self.passed += seconds
        self.run(seconds)


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_a_back_off_takes_as_long_as_ever(jump: float) -> None:
    bed = ClockBed()
    bed.node("n", 4)
    bed.pod("new", 2, 0)
    bed.core.schedule_for(1.0)
    # Its binding fails: 1 s of back-off.
    (placement,) = bed.placements
    bed.placements.clear()
    bed.core.attempts.bound(placement, Refused(Why.FAILING, "as the test wants it"))
    assert placement.name == "new"
    bed.now += jump
    bed.wait(0.5)
    assert bed.core.queue.state_of("u-new") is QueueState.BACKOFF
    bed.wait(0.6)
    assert bed.node_of("new") == "n"


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_a_refused_pod_is_looked_at_again_after_as_long_as_ever(jump: float) -> None:
    bed = ClockBed()
    bed.node("n", 4)
    bed.pod("large", 5, 0)
    bed.run()
    order = bed.core.queue.order("u-large")
    bed.now += jump
    bed.wait(250.0)
    assert bed.core.queue.order("u-large") == order
    # The longest wait of 300 s, and up to 30 s until the next look.
    bed.wait(85.0)
    assert bed.core.queue.order("u-large") > order


def test_a_changed_namespace_ends_no_back_off() -> None:
    bed = ClockBed()
    bed.node("n", 2)
    bed.pod("first", 2, 0, node="n", app="web")
    term = {
        "labelSelector": {"matchLabels": {"app": "web"}},
        "namespaceSelector": {"matchLabels": {"team": "a"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    bed.pod("new", 0, 0, affinity=affinity)
    bed.run()
    assert bed.core.queue.state_of("u-new") is QueueState.UNSCHEDULABLE
    bed.now += HOUR
    cache = next(each for each in bed.core.caches if each.resource.kind == "Namespace")
    bed.show(cache, "ADDED", {"metadata": {"name": "default", "labels": {"team": "a"}}})
    assert bed.core.queue.state_of("u-new") is QueueState.BACKOFF
    bed.wait(1.1)
    assert bed.node_of("new") == "n"


def test_what_is_shown_follows_the_system_s_clock() -> None:
    bed = ClockBed()
    bed.node("n", 4)
    bed.pod("large", 5, 0)
    bed.now += HOUR
    bed.wait(0.0)
    why = bed.core.why("default/large")
    assert why is not None
    # 1,800,000,000 is 08:00 in the morning.
    assert why["decidedAt"] == "2027-01-15T09:00:00Z"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    clocks = {"wall": 1000.0, "monotonic": 7.0}
    monkeypatch.setattr(time, "time", lambda: clocks["wall"])
    monkeypatch.setattr(time, "monotonic", lambda: clocks["monotonic"])
    yield clocks


def test_a_steady_clock_begins_with_the_system_s_and_never_jumps(system: dict[str, Any]) -> None:
    steady = steady_clock()
    assert steady() == 1000.0
    system["wall"] = 50.0
    system["monotonic"] += 2.0
    assert steady() == 1002.0


def test_a_scheduler_beside_the_system_s_clock_has_a_steady_one() -> None:
    configuration = read_configuration(CONFIGURATION, obj="test")
    core = SchedulerCore(cast(Client, None), configuration, cast(Any, None))
    assert core._steady is not core._clock
    assert abs(core._steady() - time.time()) < 60.0
