"""The sampler: ticks, collectors apart from each other, status, and the saved file."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from koordlet.measurement.collecting import Collector, Round, Targets, Unavailable
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.kernel_files import LocalFiles
from koordlet.measurement.sampler import Sampler, SavedFile
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store, View
from tests.waiting import wait_until

CPU = Series(Metric.NODE_CPU)


@dataclass
class Scripted:
    """A collector that returns or raises what the test sets."""

    name: str = "scripted"
    interval_s: float = 1.0
    retention_s: float = 60.0
    gate: str | None = None
    result: Mapping[Series, float] | Exception = field(default_factory=lambda: {CPU: 1.0})
    sampled_at: list[float] = field(default_factory=list)
    closed: int = 0
    during: Callable[[Round], None] = lambda round_: None

    def sample(self, round_: Round) -> Mapping[Series, float]:
        self.sampled_at.append(round_.now)
        self.during(round_)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def close(self) -> None:
        self.closed += 1


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def sampler_of(*collectors: Collector, clock: Callable[[], float] | None = None) -> Sampler:
    return Sampler(Store(), collectors, LocalFiles(), Targets, clock=clock or Clock())


def rounds(sampler: Sampler, *times: float) -> None:
    clock = sampler.clock
    assert isinstance(clock, Clock)
    for clock.now in times:
        sampler.round(clock.now)


def test_a_round_rests_where_its_work_would_delay_others_but_not_for_long() -> None:
    clock = Clock()
    rested: list[float] = []

    def rest() -> bool:
        rested.append(round(clock.now, 3))
        return True  # it has waited, so the thread need not step aside itself

    def work(round_: Round) -> None:
        for _ in range(5):
            clock.now += 0.1
            until = time.thread_time() + 0.0005
            while time.thread_time() < until:
                pass
            round_.step_aside()

    sampler = sampler_of(Scripted(during=work), clock=clock)
    sampler.rest = rest
    sampler.round(clock.now)
    assert rested == [100.1, 100.2]
    clock.now += 1.0
    sampler.round(clock.now)  # the next one rests again
    assert rested[2:] == [101.6, 101.7]


@pytest.mark.parametrize(
    ("interval_s", "times", "sampled"),
    [
        (1.0, [0, 1, 2, 3], [0, 1, 2, 3]),
        (2.0, [0, 1, 2, 3, 4, 5], [0, 2, 4]),
        (1.0, [0, 0.9995, 2.0004], [0, 0.9995, 2.0004]),  # a wait may end a little early
        (2.0, [0, 7, 8, 9, 10], [0, 7, 8, 10]),  # one late round, then the grid again
        (10.0, [0, 5, 9, 35, 39, 40], [0, 35, 40]),  # missed rounds are not made up for
    ],
)
def test_a_collector_keeps_to_its_own_grid(
    interval_s: float, times: list[float], sampled: list[float]
) -> None:
    collector = Scripted(interval_s=interval_s)
    rounds(sampler_of(collector), *times)
    assert collector.sampled_at == sampled


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), ValueError("no field x"), ZeroDivisionError("defect")]
)
def test_a_failing_collector_costs_its_own_samples_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Scripted("bad", result=error), Scripted("good")
    sampler = sampler_of(bad, good)
    with caplog.at_level(logging.WARNING):
        rounds(sampler, 1, 2, 3)
    assert good.sampled_at == [1, 2, 3]
    first, second = sampler.status(3.0).collectors
    assert (first.state, first.failures, first.age_s) == ("failing", 3, None)
    assert str(error) in first.error
    assert (second.state, second.age_s, second.error) == ("ready", 0.0, "")
    assert len(caplog.records) == 1, "the same failure is logged once"


def test_a_collector_that_fails_keeps_its_last_samples_with_their_age() -> None:
    collector = Scripted()
    sampler = sampler_of(collector)
    rounds(sampler, 1, 2)
    collector.result = OSError(errno.EIO, "broken")
    rounds(sampler, 3, 4)
    status = sampler.status(4.5).collectors[0]
    assert (status.state, status.age_s) == ("failing", 2.5)
    assert sampler.store.view(4.0).latest(CPU, within_s=5) == 1
    collector.result = {CPU: 2.0}
    rounds(sampler, 5)
    assert sampler.status(5.0).collectors[0].state == "ready"


def test_an_interval_may_be_longer_than_the_retention() -> None:
    collector = Scripted(interval_s=600.0, retention_s=330.0)
    sampler = sampler_of(collector)
    rounds(sampler, 1, 601)
    found = sampler.store.view(601.0).aggregate(CPU, within_s=600)
    assert found is not None and found.samples == 2


def test_what_a_kernel_does_not_offer_is_tried_less_often() -> None:
    collector = Scripted(result=Unavailable("no such hierarchy"))
    sampler = sampler_of(collector)
    rounds(sampler, *range(1, 32))
    assert len(collector.sampled_at) == 4
    status = sampler.status(30.0).collectors[0]
    assert (status.state, status.error, status.failures) == ("unavailable", "no such hierarchy", 0)


def test_problems_of_a_round_are_in_status_and_counted() -> None:
    def during(round_: Round) -> None:
        for number in range(5):
            round_.problem(f"p{number}")

    collector = Scripted(during=during)
    sampler = sampler_of(collector)
    rounds(sampler, 1)
    status = sampler.status(1.0).collectors[0]
    assert (status.state, status.error) == ("ready", "p0; p1; p2; and 2 more")


def test_a_collector_that_is_switched_off_is_closed_and_starts_again() -> None:
    collector = Scripted(gate="PSICollector")
    sampler = sampler_of(collector)
    on = True
    sampler.enabled = lambda one: on or one.gate is None
    rounds(sampler, 1)
    on = False
    rounds(sampler, 2, 3)
    assert (collector.sampled_at, collector.closed) == ([1], 1)
    assert sampler.status(3.0).collectors[0].state == "off"
    on = True
    rounds(sampler, 4)
    assert collector.sampled_at == [1, 4]


def test_a_later_collector_sees_the_samples_of_an_earlier_one() -> None:
    seen: list[Mapping[tuple[str, str], float]] = []
    first = Scripted("first", result={CPU: 7.0})
    second = Scripted(
        "second",
        result={Series(Metric.SYSTEM_CPU): 1.0},
        during=lambda round_: seen.append(round_.measured.latest_of(Metric.NODE_CPU, within_s=1.0)),
    )
    rounds(sampler_of(first, second), 1)
    assert seen == [{("", ""): 7.0}]


def test_what_runs_after_a_round_sees_it_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[float, float | None]] = []

    def after(view: View) -> None:
        seen.append((view.now, view.latest(CPU, within_s=0.5)))
        raise RuntimeError("a defect")

    collector = Scripted()
    sampler = sampler_of(collector)
    sampler.after_round = after
    with caplog.at_level(logging.ERROR):
        rounds(sampler, 1, 2)
    assert seen == [(1, 1.0), (2, 1.0)]
    assert len(caplog.records) == 1


def test_the_thread_keeps_to_fixed_ticks_and_skips_those_that_a_late_round_missed() -> None:
    late = threading.Event()

    def during(round_: Round) -> None:
        if len(collector.sampled_at) == 3 and not late.is_set():
            late.set()
            time.sleep(0.25)

    collector = Scripted(interval_s=0.1, during=during)
    sampler = sampler_of(collector, clock=time.monotonic)
    sampler.tick_s = 0.1
    sampler.start()
    try:
        wait_until(lambda: len(collector.sampled_at) >= 8, "eight rounds")
    finally:
        assert sampler.stop()
    skipped = sampler.status(time.monotonic()).skipped_ticks
    assert skipped >= 2
    # Each tick since the first has had one round or was skipped; a thread may wake late.
    ticks = (collector.sampled_at[-1] - collector.sampled_at[0]) / 0.1
    further = len(collector.sampled_at) - 1
    assert further <= ticks + 1
    assert further + skipped >= ticks - 1
    assert collector.closed == 1


def test_a_sampler_that_runs_is_not_started_twice() -> None:
    sampler = sampler_of(Scripted(), clock=time.monotonic)
    sampler.start()
    try:
        with pytest.raises(RuntimeError, match="runs already"):
            sampler.start()
    finally:
        sampler.stop()
    assert not sampler.status(time.monotonic()).running


def test_samples_survive_a_restart(tmp_path: Path) -> None:
    file = SavedFile(str(tmp_path / "measurements"), "boot")
    collector = Scripted()
    first = sampler_of(collector, clock=time.monotonic)
    first.saved_file = file
    first.start()
    wait_until(lambda: bool(collector.sampled_at), "a round")
    assert first.stop()
    second = sampler_of(Scripted(), clock=time.monotonic)
    second.saved_file = file
    assert second.restore() == 1
    assert second.store.view(time.monotonic()).latest(CPU, within_s=60) == 1.0


def test_a_killed_daemon_loses_a_minute_at_most_and_the_time_until_the_next_one_is_a_gap(
    tmp_path: Path,
) -> None:
    """A reader asked for 15 minutes; the next daemon has them before that reader asks again."""
    file = SavedFile(str(tmp_path / "measurements"), "boot")
    first = sampler_of(Scripted())
    first.saved_file = file
    first.store.keep("scripted", 900.0)
    rounds(first, *map(float, range(101, 720)))  # the last time saved at 700
    second = sampler_of(Scripted(), clock=Clock(1000.0))
    second.saved_file = file
    assert second.restore() == 1
    rounds(second, 1001.0, 1002.0)
    view = second.store.view(1002.0)
    for within_s, samples, span_s in ((900, 601, 900.0), (302, 3, 302.0), (301, 2, 1.0)):
        found = view.aggregate(CPU, within_s=within_s)
        assert found is not None
        assert (found.samples, found.span_s) == (samples, span_s)
    third = sampler_of(Scripted(), clock=Clock(1010.0))
    third.saved_file = SavedFile(file.path, "another boot")
    assert third.restore() == 0
    assert third.store.view(1010.0).latest(CPU, within_s=1e9) is None


def test_samples_are_saved_once_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "measurements"
    sampler = sampler_of(Scripted())
    sampler.saved_file = SavedFile(str(path), "boot")
    rounds(sampler, 101, 159)
    assert not path.exists()
    rounds(sampler, 160)
    assert path.exists()
    path.unlink()
    rounds(sampler, 161, 219)
    assert not path.exists()
    rounds(sampler, 220)
    assert path.exists()


def test_a_file_that_cannot_be_used_is_reported_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "measurements"
    path.write_bytes(b"something else")
    sampler = sampler_of(Scripted())
    sampler.saved_file = SavedFile(str(path), "boot")
    assert sampler.restore() == 0
    assert "not a file of measurements" in caplog.text
    rounds(sampler, 101)


def test_a_disk_that_takes_nothing_is_in_status_and_measuring_goes_on(tmp_path: Path) -> None:
    sampler = sampler_of(collector := Scripted())
    sampler.saved_file = SavedFile(str(tmp_path / "missing" / "measurements"), "boot")
    rounds(sampler, 160, 161)
    assert "No such file" in sampler.status(161.0).saving
    assert collector.sampled_at == [160, 161]
    (tmp_path / "missing").mkdir()
    rounds(sampler, 221)
    assert sampler.status(221.0).saving == ""


def test_this_machine_is_measured() -> None:
    """The real /proc and /sys."""
    sampler = sampler_of(NodeCollector(4096, interval_s=0.3), clock=time.monotonic)
    sampler.tick_s = 0.3
    sampler.start()
    try:
        store = sampler.store
        wait_until(
            lambda: store.view(time.monotonic()).latest(CPU, within_s=5) is not None, "a CPU sample"
        )
        used = store.view(time.monotonic()).latest(Series(Metric.NODE_MEMORY), within_s=5)
    finally:
        sampler.stop()
    assert used is not None and used > 0
