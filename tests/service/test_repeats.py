"""Recurring log lines."""

from __future__ import annotations

from service.repeats import PERIOD_S, Repeats


def test_a_subject_is_written_first_and_then_once_a_period_with_the_number_left_out() -> None:
    now = [0.0]
    repeats = Repeats(clock=lambda: now[0])
    assert repeats.due("late") == 0
    for _ in range(41):
        now[0] += 1.0
        assert repeats.due("late") is None
    assert repeats.due("other") == 0
    now[0] = PERIOD_S
    assert repeats.due("late") == 41
    now[0] = 2 * PERIOD_S
    assert repeats.due("late") == 0


def test_subjects_without_end_cost_a_bounded_memory() -> None:
    repeats = Repeats(clock=lambda: 0.0)
    for number in range(5000):
        assert repeats.due(number) == 0
    assert repeats.due(4999) is None
    assert repeats.due(0) == 0
