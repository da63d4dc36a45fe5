"""The excess of a node's CPU use above a threshold, from cumulative CPU seconds."""

from __future__ import annotations

import pytest

from benchmarks.overshoot import Overshoot, overshoot, watching
from tests.waiting import wait_until


def used(*phases: tuple[float, float]) -> list[tuple[float, float]]:
    """(seconds, CPUs in use) one after the other, sampled ten times a second from moment 100."""
    moment, total = 100.0, 7.0
    samples = [(moment, total)]
    for seconds, cpus in phases:
        for _ in range(round(seconds * 10)):
            moment, total = moment + 0.1, total + cpus / 10
            samples.append((moment, total))
    return samples


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        # Two CPUs at 65 %: 1.3 of them. All of both are 35 points more.
        ([(5, 1.3)], Overshoot(0, 0)),
        ([(1.5, 2.0), (3.5, 1.3)], Overshoot(35, 1.5)),
        ([(5, 1.0)], Overshoot(-15, 0)),
        # 4 points more are within the scatter.
        ([(5, 1.38)], Overshoot(4, 0)),
        # A fifth of a second of all CPUs is a window's 14 points.
        ([(0.2, 2.0), (4.8, 1.3)], Overshoot(14, 0.5)),
    ],
)
def test_excess_of_known_loads(phases: list[tuple[float, float]], expected: Overshoot) -> None:
    found = overshoot(used(*phases), 100.0, 105.0, percent=65, cpus=2)
    assert found == pytest.approx(expected, abs=1e-6)


def test_only_the_time_between_the_moments_counts() -> None:
    samples = used((2, 2.0), (2, 1.3), (2, 2.0))
    found = overshoot(samples, 102.0, 104.0, percent=65, cpus=2)
    assert found == pytest.approx(Overshoot(0, 0), abs=1e-6)


def test_the_nodes_use_only_grows() -> None:
    with watching() as use:
        wait_until(lambda: len(use.samples) > 3, "samples")
    moments, seconds = zip(*use.samples, strict=True)
    assert list(moments) == sorted(set(moments))
    assert list(seconds) == sorted(seconds)
