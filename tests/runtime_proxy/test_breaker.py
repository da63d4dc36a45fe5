"""A dead or slow hook server costs its time once, not per call."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.breaker import Breaker, State


def test_a_server_that_is_away_is_not_called_until_it_shows_life() -> None:
    breaker = Breaker()
    assert breaker.admit()
    breaker.unreachable("connection refused")
    assert not breaker.admit()
    assert breaker.reason == "connection refused"
    assert breaker.alive(now=0.1)
    assert breaker.admit()
    assert breaker.trips == 1


def test_only_a_server_that_cannot_be_reached_is_lost() -> None:
    breaker = Breaker()
    assert not breaker.lost
    breaker.unreachable("connection refused")
    assert breaker.lost
    assert breaker.alive(now=0.1)
    assert not breaker.lost
    breaker.timed_out("no answer within 2 s", 1.0)
    assert state_of(breaker) is State.OPEN
    assert not breaker.lost


def test_a_slow_server_gets_one_trial_after_a_pause_that_doubles() -> None:
    breaker = Breaker()
    now = 0.0
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert breaker.admit()
        breaker.timed_out("no answer within 2 s", now)
        assert not breaker.alive(now + pause - 0.01)
        assert breaker.alive(now + pause)
        assert breaker.state is State.TRIAL
        now += pause
    assert breaker.admit()
    assert not breaker.admit(), "one trial at a time"
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    breaker.timed_out("again", now)
    assert breaker.alive(now + 1.0), "success forgets the doubled pause"


def state_of(breaker: Breaker) -> State:
    """mypy takes a property's value for the one that an earlier assert has shown."""
    return breaker.state


def test_answers_that_are_slow_for_some_seconds_open_the_breaker() -> None:
    breaker = Breaker()
    for number in range(4):
        breaker.answered_slowly("slow", now=1.9 * number)
        assert state_of(breaker) is State.CLOSED
    breaker.answered_slowly("slow", now=1.9 * 4)
    assert state_of(breaker) is State.OPEN
    assert breaker.reason == "slow"
    assert not breaker.alive(now=8.5)
    assert breaker.alive(now=8.6)
    assert state_of(breaker) is State.TRIAL


def test_one_stall_that_many_calls_meet_does_not() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.answered_slowly("slow", now=3.0)
    breaker.answered_slowly("slow", now=7.9)
    assert state_of(breaker) is State.CLOSED
    breaker.answered_slowly("slow", now=8.0)
    assert state_of(breaker) is State.OPEN


def test_an_answer_in_good_time_ends_a_row_of_slow_ones() -> None:
    breaker = Breaker()
    for number in range(100):
        breaker.answered_slowly("slow", now=5.0 * number)
        if number % 4 == 3:
            breaker.succeeded()
    assert state_of(breaker) is State.CLOSED
    assert breaker.trips == 0


def test_a_trial_that_is_answered_slowly_makes_the_pause_longer() -> None:
    breaker = Breaker()
    breaker.timed_out("no answer", now=0.0)
    assert breaker.alive(now=1.0)
    assert breaker.admit()
    breaker.answered_slowly("slow", now=3.0)
    assert state_of(breaker) is State.OPEN
    assert not breaker.alive(now=4.9)
    assert breaker.alive(now=5.0)
    assert breaker.admit()
    breaker.succeeded()
    assert state_of(breaker) is State.CLOSED
    # The row begins anew.
    for _ in range(2):
        for number in range(4):
            breaker.answered_slowly("slow", now=6.0 + 10 * number)
        breaker.succeeded()
    assert state_of(breaker) is State.CLOSED


def test_a_slow_answer_to_a_call_from_before_it_opened_changes_nothing() -> None:
    breaker = Breaker()
    breaker.unreachable("refused")
    for number in range(10):
        breaker.answered_slowly("slow", now=5.0 * number)
    assert breaker.reason == "refused"
    assert breaker.alive(now=0.0)
    assert state_of(breaker) is State.CLOSED


def test_a_trial_whose_caller_went_away_leaves_room_for_the_next() -> None:
    breaker = Breaker()
    breaker.timed_out("slow", 0.0)
    breaker.alive(1.0)
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.admit()


def test_calls_that_time_out_together_trip_once() -> None:
    breaker = Breaker()
    for _ in range(8):
        assert breaker.admit()
    for _ in range(8):
        breaker.timed_out("slow", 0.0)
    assert breaker.trips == 1
    assert breaker.alive(1.0)


steps = st.lists(
    st.sampled_from(
        [
            "admit",
            "succeeded",
            "answered_slowly",
            "unreachable",
            "timed_out",
            "abandoned",
            "alive",
        ]
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=steps)
def test_from_any_state_life_and_success_lead_back_to_closed(steps: list[str]) -> None:
    breaker = Breaker()
    now = 0.0
    for step in steps:
        now += 0.3
        if step == "admit":
            breaker.admit()
        elif step == "unreachable":
            breaker.unreachable("away")
        elif step in ("timed_out", "answered_slowly"):
            getattr(breaker, step)("slow", now)
        elif step == "alive":
            breaker.alive(now)
        else:
            getattr(breaker, step)()
        assert breaker.state is not State.OPEN or not breaker.admit()
    breaker.alive(now + 31)
    breaker.abandoned()
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.state is State.CLOSED


def test_an_answer_from_before_the_breaker_opened_does_not_close_it() -> None:
    breaker = Breaker()
    assert breaker.admit()
    breaker.timed_out("slow", 0.0)
    breaker.succeeded()
    assert breaker.state is State.OPEN
    assert breaker.reason == "slow"
