"""The gaps between a runtime's calls: when background work rests, and how long."""

from __future__ import annotations

import itertools
import threading

import pytest

from koordlet.daemon import gaps as module
from koordlet.daemon.gaps import _BURST_S, Gaps
from tests.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def burst(clock: Clock) -> Gaps:
    """Return the gaps when the second pod of a burst has just appeared."""
    gaps = Gaps(clock=clock)
    gaps.begin()
    clock.now += 0.01
    gaps.begin()
    return gaps


def test_without_new_pods_work_does_not_rest() -> None:
    assert not Gaps().wait()


@pytest.mark.parametrize("before_s", [None, _BURST_S + 0.001])
def test_work_for_a_pod_that_appears_alone_does_not_rest(before_s: float | None) -> None:
    clock = Clock()
    gaps = Gaps(clock=clock)
    if before_s is not None:
        gaps.begin()
        clock.now += before_s
    gaps.begin()
    clock.now += 0.005
    assert not gaps.wait()


@pytest.mark.parametrize("since_s", [0.0, 0.0019, _BURST_S + 0.001])
def test_work_goes_on_in_a_gap_and_after_a_burst(since_s: float) -> None:
    clock = Clock()
    gaps = burst(clock)
    clock.now += since_s
    assert not gaps.wait()


def test_between_two_gaps_work_rests_until_the_burst_is_over() -> None:
    clock = Clock()
    gaps = burst(clock)
    clock.now += _BURST_S - 0.001
    assert gaps.wait()


def test_the_next_gap_ends_the_rest_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BURST_S", 3600.0)
    seconds = itertools.count(100.0)  # a second for each look, so that no look falls into a gap
    gaps = Gaps(clock=lambda: next(seconds))
    gaps.begin()
    gaps.begin()
    rested: list[bool] = []
    threads = [
        threading.Thread(target=lambda: rested.append(gaps.wait()), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()

    def go_on() -> bool:
        gaps.begin()
        return not any(thread.is_alive() for thread in threads)

    wait_until(go_on, "the threads go on", timeout_s=10)
    assert rested == [True, True]
