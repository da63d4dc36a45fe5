"""The runner steps what is due and isolates strategies from each other."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from apis.errors import InputError
from hooks.claim import Claim, Rank
from hooks.facts import NodeInputs, Settings
from hooks.policies import BUILTIN
from hooks.standing import NOTHING_STANDS, Standing
from koordlet.configuration.gates import GATES
from koordlet.measurement.series import Aggregate, Series
from koordlet.qos.board import Board, Lease
from koordlet.qos.runner import Outcome, Runner
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.qos.strategy import NodeAmounts, Note, Situation, Strategy, Verdict
from linux.resources import Resource
from service.events import Events

GATE = "CPUBurst"
Step = Callable[[Any, Situation], tuple[Any, Verdict]]


def claim(value: Any) -> Claim:
    return Claim(
        resource=Resource.CPU_SHARES,
        value=value,
        policy="one",
        reason="r",
        source="s",
        rank=Rank.EMERGENCY,
    )


def standing(value: Any) -> Standing:
    return Standing({"pod/u1": (claim(value),)})


def counting(state: int, situation: Situation) -> tuple[int, Verdict]:
    verdict = Verdict(
        standing=standing(100 + state),
        notes=(Note(0, "Step", f"step {state}"),),
        gauges={("steps", (("of", "one"),)): float(state)},
        summary=f"step {state}",
    )
    return state + 1, verdict


def strategy(
    step: Step = counting,
    *,
    name: str = "one",
    gates: Mapping[str, bool] = MappingProxyType({GATE: True}),
    interval: float = 1.0,
) -> Strategy:
    return Strategy(
        name=name, gates=gates, interval_s=interval, ttl_s=10.0, initial=lambda: 0, step=step
    )


@dataclass
class Unmeasured:
    """Measurements of which there are none."""

    now: float

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return None

    def average(self, series: Series, *, within_s: float) -> float | None:
        return None

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        return None


class Bed:
    """A runner with a clock of its own."""

    def __init__(self, *strategies: Strategy, **intervals: float) -> None:
        self.now = 100.0
        self.settings = Settings()
        self.events = Events()
        self.board = Board([each.name for each in strategies], lambda _: None)
        self.runner = Runner(strategies, self.board, self.events, intervals=intervals)

    def round(self, after: float = 1.0) -> Outcome:
        self.now += after
        self.board.expire(self.now)
        situation = Situation(
            now=self.now,
            wall=self.now,
            inputs=NodeInputs(settings=self.settings),
            node=NodeAmounts(cpu_milli=4000, memory_bytes=1 << 30),
            pods=(),
            host_apps=(),
            measurements=Unmeasured(self.now),
        )
        return self.runner.run(situation, lambda: self.settings)

    @property
    def value(self) -> Any:
        claims = self.board.standing.by_subject.get("pod/u1", ())
        return claims[0].value if claims else None


def test_the_state_goes_from_step_to_step_and_the_verdict_is_seen() -> None:
    bed = Bed(strategy())
    assert [note.message for _, note in bed.round().notes] == ["step 0"]
    bed.round()
    assert bed.value == 101
    (status,) = bed.runner.statuses
    assert (status.on, status.steps, status.summary, status.leased) == (True, 2, "step 1", True)
    assert list(bed.runner.gauges(bed.now)) == [("steps", (("of", "one"),), 1.0)]
    assert not list(bed.runner.gauges(bed.now + 11))


def test_a_strategy_is_stepped_at_its_interval_also_when_rounds_jitter() -> None:
    bed = Bed(strategy(), strategy(name="slow", interval=3.0))
    for jitter in (1.0, 1.004, 0.995, 1.0, 0.9995, 1.002, 1.0):
        bed.round(jitter)
    assert [status.steps for status in bed.runner.statuses] == [7, 3]


def test_a_configured_interval_stretches_the_time_to_live_too() -> None:
    bed = Bed(strategy(), one=5.0)
    bed.round()
    assert bed.board.next_expiry() == bed.now + 50.0


def test_a_strategy_that_fails_keeps_its_claims_until_the_lease_ends_and_then_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken: list[bool] = []

    def step(state: int, situation: Situation) -> tuple[int, Verdict]:
        if broken:
            raise ZeroDivisionError("no CPUs")
        return counting(state, situation)

    bed = Bed(strategy(step), strategy(name="other"))
    bed.round()
    broken.append(True)
    with caplog.at_level(logging.ERROR):
        for _ in range(9):
            bed.round()
    assert bed.value == 100
    bed.round()
    assert bed.board.lease("one") is None
    failed, other = bed.runner.statuses
    assert (failed.failures, failed.problem, failed.leased) == (
        10,
        "ZeroDivisionError: no CPUs",
        False,
    )
    assert (other.failures, other.steps) == (0, 11)
    assert (
        len([record for record in caplog.records if "strategy one failed" in record.message]) == 1
    )
    broken.clear()
    bed.round()
    assert bed.board.lease("one") is not None
    assert bed.runner.statuses[0].problem == ""


def test_a_step_whose_claims_have_ended_begins_with_the_lapsed_state() -> None:
    bed = Bed(dataclasses.replace(strategy(), lapsed=lambda state: 1000 + state))
    values = []
    for after_s in (1.0, 9.9, 10.1, 1.0):
        bed.round(after_s)
        values.append(bed.value)
    assert values == [100, 101, 1102, 1103]
    bed.board.drop("one")  # as a gate that was off between two rounds
    bed.round()
    assert bed.value == 2104


def test_what_was_decided_while_the_claims_ended_is_left_to_the_next_step() -> None:
    stalls: list[bool] = []

    def step(state: int, situation: Situation) -> tuple[int, Verdict]:
        if stalls:
            bed.board.expire(situation.now + 11.0)
        return counting(state, situation)

    bed = Bed(dataclasses.replace(strategy(step), lapsed=lambda state: 1000 + state))
    bed.round()
    stalls.append(True)
    assert not bed.round().notes
    assert bed.value is None
    stalls.clear()
    bed.round()
    assert bed.value == 1101


def test_bad_input_keeps_the_last_claims_in_force_for_as_long_as_it_is_bad() -> None:
    bad: list[bool] = []

    def step(state: int, situation: Situation) -> tuple[int, Verdict]:
        if bad:
            raise InputError(obj="NodeSLO n1", field="spec.x", value="y", problem="is bad")
        return counting(state, situation)

    bed = Bed(strategy(step))
    bed.round()
    bad.append(True)
    for _ in range(30):
        bed.round()
    assert bed.value == 100
    (status,) = bed.runner.statuses
    assert "spec.x" in status.problem
    assert status.failures == 0
    assert bed.events.totals["bad-input"] == 30
    bad.clear()
    bed.round()
    assert bed.value == 101


def test_a_gate_that_is_switched_off_ends_the_claims_at_once_and_the_state() -> None:
    bed = Bed(strategy())
    bed.round()
    bed.round()
    bed.settings = Settings(feature_gates={GATE: False})
    bed.runner.settings_changed(bed.settings)
    assert bed.board.standing is NOTHING_STANDS
    bed.round()
    (status,) = bed.runner.statuses
    assert (status.on, status.why, status.summary) == (False, "feature gate CPUBurst=false", "")
    bed.settings = Settings()
    bed.round()
    assert bed.value == 100  # from the initial state


def test_a_strategy_that_is_off_from_the_start_says_why() -> None:
    bed = Bed(strategy(gates={"BECPUEvict": False}))
    bed.round()
    (status,) = bed.runner.statuses
    assert (status.on, status.why) == (False, "feature gate BECPUEvict=false")
    assert status.stepped_at is None


def test_a_gate_that_goes_off_during_a_step_leaves_no_claim() -> None:
    bed: Bed

    def step(state: int, situation: Situation) -> tuple[int, Verdict]:
        bed.settings = Settings(feature_gates={GATE: False})
        bed.runner.settings_changed(bed.settings)
        return counting(state, situation)

    bed = Bed(strategy(step))
    bed.round()
    assert bed.board.standing is NOTHING_STANDS


def test_a_strategy_with_several_gates_runs_while_any_is_on() -> None:
    bed = Bed(strategy(gates={"CPUEvict": False, "BECPUEvict": False}))
    bed.round()
    assert bed.runner.statuses[0].why == "feature gates CPUEvict, BECPUEvict: all false"
    bed.settings = Settings(feature_gates={"BECPUEvict": True})
    bed.round()
    assert bed.runner.statuses[0].on


def test_claims_of_before_a_restart_stay_until_a_step_can_judge() -> None:
    unmeasured = [True]

    def step(state: int, situation: Situation) -> tuple[int, Verdict]:
        return state + 1, Verdict(unmeasured=unmeasured[0], summary="no measurement")

    bed = Bed(strategy(step))
    bed.board.resume({"one": Lease(standing(7), 120.0, resumed=True)})
    bed.round()
    (status,) = bed.runner.statuses
    assert (bed.value, status.leased, status.steps) == (7, True, 1)
    assert "of before the restart" in status.summary and "no measurement" in status.summary
    unmeasured[0] = False
    bed.round()
    assert bed.value is None
    assert bed.runner.statuses[0].summary == "no measurement"


class Counted(msgspec.Struct, frozen=True):
    steps: int = 0


def counted(state: Counted, situation: Situation) -> tuple[Counted, Verdict]:
    """A strategy with a state that outlasts a restart; odd steps cannot judge."""
    notes = (Note(0, "Step", f"step {state.steps}"),)
    return Counted(state.steps + 1), Verdict(notes=notes, unmeasured=state.steps % 2 == 1)


def kept_strategy(*, gate: str = GATE) -> Strategy:
    return Strategy(
        name="one",
        gates={gate: GATES[gate].default},
        interval_s=1.0,
        ttl_s=10.0,
        initial=Counted,
        step=counted,
        kept=Counted,
    )


def test_a_strategy_goes_on_from_its_state_of_before_a_restart() -> None:
    bed = Bed(kept_strategy(), strategy(name="other"))
    assert bed.runner.kept_types == {"one": Counted} and not bed.runner.kept_states
    bed.runner.resume({"one": Counted(40)})
    assert bed.runner.kept_states == {"one": Counted(40)}
    assert bed.round().notes[0] == ("one", Note(0, "Step", "step 40"))
    assert bed.runner.kept_states == {"one": Counted(41)}


def test_a_state_of_before_a_restart_stays_while_its_claims_do() -> None:
    bed = Bed(kept_strategy())
    bed.runner.resume({"one": Counted(41)})
    bed.board.resume({"one": Lease(standing(7), 103.5, resumed=True)})
    for _ in range(3):
        assert not bed.round().notes  # what a step notes that could not judge did not happen
        assert (bed.value, bed.runner.kept_states) == (7, {"one": Counted(41)})
    bed.round()  # without claims the step counts
    assert (bed.value, bed.runner.kept_states) == (None, {"one": Counted(42)})


def test_a_state_goes_with_the_gate() -> None:
    bed = Bed(kept_strategy(gate="PressureSuppress"))
    bed.settings = Settings(feature_gates={"PressureSuppress": True})
    bed.runner.resume({"one": Counted(40)})
    bed.round()
    assert bed.runner.kept_states == {"one": Counted(41)}
    bed.settings = Settings()
    bed.round()
    assert not bed.runner.kept_states


def test_claims_of_before_a_restart_end_with_their_lease_if_nothing_is_measured() -> None:
    bed = Bed(strategy(lambda state, _: (state, Verdict(unmeasured=True))))
    bed.board.resume({"one": Lease(standing(7), 103.5, resumed=True)})
    assert [bed.round() and bed.value for _ in range(4)] == [7, 7, 7, None]


def test_a_step_without_measurements_ends_the_claims_of_the_steps_before() -> None:
    verdicts = [Verdict(standing=standing(7)), Verdict(unmeasured=True)]
    bed = Bed(strategy(lambda state, _: (state + 1, verdicts[state])))
    bed.round()
    assert bed.value == 7
    bed.round()
    assert bed.value is None


def test_only_strategies_that_run_have_a_time_to_live_for_a_restart() -> None:
    bed = Bed(strategy(), strategy(name="off", gates={"BECPUEvict": False}), one=2.0)
    assert bed.runner.times_to_live(Settings()) == {"one": 20.0}


def test_a_bad_claim_is_dropped_and_reported() -> None:
    bed = Bed(strategy(lambda state, _: (state, Verdict(standing=standing("many")))))
    bed.round()
    assert bed.value is None
    assert bed.events.totals["policy-fault"] == 1
    (status,) = bed.runner.statuses
    assert "needs a number" in status.problem
    assert not status.leased


def test_faults_of_a_verdict_are_events_and_show_in_the_status() -> None:
    fault = InputError(obj="Pod default/web", field="annotation a", value="x", problem="is bad")
    bed = Bed(strategy(lambda state, _: (state, Verdict(standing=standing(7), faults=(fault,)))))
    bed.round()
    assert bed.value == 7
    assert [event.obj for event in bed.events.latest()] == ["Pod default/web"]
    assert "annotation a" in bed.runner.statuses[0].problem


def test_no_strategy_has_the_name_of_a_policy_or_of_another_one() -> None:
    """A claim's policy name tells whose it is: in `explain`, and when a policy's input is bad."""
    names = [each.name for each in STRATEGIES]
    assert len(set(names)) == len(names)
    assert not {policy.name for policy in BUILTIN} & set(names)
