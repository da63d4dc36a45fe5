"""Memory bandwidth of best-effort pods: when it is taken, how much, and when it returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from apis.effective_nodeslo import decode_nodeslo
from hooks.claim import Op
from hooks.facts import KernelFacts, NodeInputs, ResctrlFacts, Settings
from hooks.schemata import AMD
from hooks.subject import NodeSubject
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies.bandwidth import (
    STRATEGY,
    Frame,
    Line,
    State,
    Traffic,
    next_line,
    step,
    traffic_of,
)
from koordlet.qos.strategy import NodeAmounts, Situation, Verdict
from linux.resctrl import parse_schemata
from tests.koordlet.qos.lives import Life
from tests.koordlet.qos.situations import Figures

GB = 1e9
INTEL = ResctrlFacts(l3_domains=(0, 1), mb_domains=(0, 1), cbm_mask=0xFFF, vendor="GenuineIntel")
CONFIGURED = Frame(capacity=100 * GB, floor=10.0, ceiling=100.0, from_use=False)
LEARNT = CONFIGURED._replace(capacity=0.0)
FULL = Traffic(30 * GB, 65 * GB)
BETWEEN = Traffic(30 * GB, 50 * GB)
FREE = Traffic(30 * GB, 20 * GB)


def run(
    seconds: Sequence[tuple[int, Traffic]], frame: Frame = CONFIGURED, line: Line | None = None
) -> tuple[Line, list[float]]:
    """Step through so many seconds of each traffic, a new sample each; return the percentages."""
    line = line or Line()
    now, found = 10_000.0, []
    for count, traffic in seconds:
        for number in range(count):
            now += 1.0
            # Two samples of real traffic are never the same number.
            jitter = traffic._replace(best_effort=traffic.best_effort + number % 2)
            line = next_line(line, jitter, frame, now)
            found.append(line.percent)
    return line, found


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # Full for less than three seconds changes nothing.
        ([(3, FULL), (1, BETWEEN)], 100.0),
        ([(4, FULL)], 80.0),
        ([(6, FULL)], 51.2),
        ([(60, FULL)], 10.0),
        # In the dead band everything stays.
        ([(5, FULL), (60, BETWEEN)], 64.0),
        # Free for ten seconds gives back 10 points a sample.
        ([(5, FULL), (10, FREE)], 64.0),
        ([(5, FULL), (12, FREE)], 84.0),
        ([(5, FULL), (60, FREE)], 100.0),
        # A line that best-effort pods fill alone is left to them.
        ([(60, Traffic(5 * GB, 94 * GB))], 100.0),
    ],
)
def test_the_law(seconds: list[tuple[int, Traffic]], expected: float) -> None:
    assert run(seconds)[1][-1] == pytest.approx(expected)


AT_FULL = Traffic(10 * GB, 80 * GB)
AT_FREE = Traffic(25 * GB, 50 * GB)


@pytest.mark.parametrize(
    ("traffic", "changes"),
    [
        (AT_FULL, True),
        (AT_FULL._replace(protected=10 * GB - 1, best_effort=80 * GB + 1), False),
        (AT_FULL._replace(best_effort=80 * GB - 1), False),
    ],
)
def test_exactly_full_is_full_and_exactly_a_tenth_is_protected(
    traffic: Traffic, changes: bool
) -> None:
    line = Line(over_since=9_000.0)
    assert (next_line(line, traffic, CONFIGURED, 10_000.0).percent < 100.0) is changes


@pytest.mark.parametrize(
    ("traffic", "changes"), [(AT_FREE, False), (AT_FREE._replace(best_effort=50 * GB - 1), True)]
)
def test_exactly_three_quarters_are_not_free(traffic: Traffic, changes: bool) -> None:
    line = Line(percent=50.0, free_since=9_000.0)
    assert next_line(line, traffic, CONFIGURED, 10_000.0).percent == (60.0 if changes else 50.0)


def test_what_was_full_or_free_before_begins_again_after_the_dead_band() -> None:
    seconds = [(3, FULL), (1, BETWEEN), (3, FULL)]
    assert run(seconds)[1][-1] == 100.0
    seconds = [(5, FULL), (10, FREE), (1, BETWEEN), (10, FREE)]
    assert run(seconds)[1][-1] == pytest.approx(64.0)


def test_a_domain_without_a_sample_has_its_ceiling_and_keeps_what_it_has_learnt() -> None:
    line, _ = run([(650, FULL)], LEARNT)
    assert line.percent < 100.0
    lost = next_line(line, None, LEARNT, 10_700.0)
    assert lost == Line(
        percent=100.0, largest=line.largest, steady=line.steady, grown_at=line.grown_at
    )
    assert line.largest == FULL.total + 1


def test_a_learnt_line_may_be_as_small_as_half_a_channel() -> None:
    smallest = Traffic(5 * GB, 5 * GB)
    assert run([(620, smallest)], LEARNT)[1][-1] < 100.0


@pytest.mark.parametrize("file", ["mbm_total_bytes", "mbm_local_bytes"])
@pytest.mark.parametrize(
    ("measured", "traffic"),
    [
        ({"LSR": 1.0, "LS": 2.0, "BE": 4.0}, Traffic(3.0, 4.0)),
        ({"LS": 2.0, "BE": 4.0}, Traffic(2.0, 4.0)),
        ({"LSR": 1.0, "BE": 0.0}, Traffic(1.0, 0.0)),
        ({"LSR": 1.0, "LS": 2.0}, None),
        ({"BE": 4.0}, None),
    ],
)
def test_traffic_is_of_the_counter_that_the_machine_has(
    file: str, measured: dict[str, float], traffic: Traffic | None
) -> None:
    figures = {
        Series(Metric.RESCTRL_BANDWIDTH, group, f"0/{file}"): rate
        for group, rate in measured.items()
    }
    made = replace(situation({}), measurements=Figures(figures))
    assert traffic_of(made, 0) == traffic
    assert traffic_of(made, 1) is None


def test_a_sample_counts_once() -> None:
    line, _ = run([(4, FULL)])
    assert [next_line(line, FULL._replace(best_effort=1.0 + FULL.best_effort), CONFIGURED, now)
            for now in (10_005.0, 10_006.0)] == [line, line]  # fmt: skip


def test_mba_percent_is_the_ceiling() -> None:
    frame = CONFIGURED._replace(ceiling=50.0)
    assert run([(4, FULL)], frame)[1][-1] == pytest.approx(40.0)
    assert run([(4, FULL), (60, FREE)], frame)[1][-1] == 50.0


def test_under_mba_mbps_a_decrease_begins_at_the_present_use() -> None:
    found = run([(4, Traffic(60 * GB, 35 * GB))], CONFIGURED._replace(from_use=True))[1]
    assert found[-1] == pytest.approx(0.8 * 35)


def test_a_learnt_line_counts_when_it_is_large_and_has_not_grown_for_ten_minutes() -> None:
    assert run([(599, FULL)], LEARNT)[1][-1] == 100.0
    assert run([(604, FULL)], LEARNT)[1][-1] < 100.0
    small = Traffic(3 * GB, 6 * GB)
    assert run([(1200, small)], LEARNT)[1][-1] == 100.0
    growing = [(599, FULL), (599, Traffic(30 * GB, 80 * GB))]
    assert run(growing, LEARNT)[1][-1] == 100.0


def test_a_learnt_line_that_creeps_up_is_not_steady() -> None:
    creeping = [(1, Traffic(30 * GB, (60 + second / 50) * GB)) for second in range(1400)]
    assert set(run(creeping, LEARNT)[1]) == {100.0}


def test_a_learnt_line_is_put_to_the_proof_and_a_larger_one_replaces_it() -> None:
    """What best-effort pods are kept from would otherwise confirm too small a line."""
    line, found = run([(950, FULL)], LEARNT)
    first = next(number for number, percent in enumerate(found) if percent < 100.0)
    assert found[first + 300] == 100.0
    assert found[first + 300 : first + 310] == [100.0] * 10
    assert found[first + 315] < 100.0
    larger = Traffic(30 * GB, 90 * GB)
    line, found = run([(700, FULL), (300, BETWEEN), (20, larger)], LEARNT)
    assert (line.percent, line.largest) == (100.0, larger.total + 1)


def test_a_configured_line_is_not_put_to_the_proof() -> None:
    assert run([(700, FULL)])[1][10:].count(100.0) == 0


def situation(
    traffic: dict[str, tuple[float, float]],
    *,
    now: float = 1000.0,
    facts: ResctrlFacts | None = INTEL,
    mbps: int = 100_000,
    gates: dict[str, bool] | None = None,
    **be: Any,
) -> Situation:
    """traffic: bytes per second in each of the two domains, by class."""
    classes = {"beClass": {"resctrlQOS": {"enable": True, **be}}}
    return Situation(
        now=now,
        wall=now,
        inputs=NodeInputs(
            slo=decode_nodeslo({"resourceQOSStrategy": classes}, obj="test"),
            kernel=KernelFacts(resctrl=facts),
            settings=Settings(feature_gates=gates or {}, memory_bandwidth_mbps=mbps),
        ),
        node=NodeAmounts(cpu_milli=4000, memory_bytes=1 << 30),
        pods=(),
        host_apps=(),
        measurements=Figures(
            {
                Series(Metric.RESCTRL_BANDWIDTH, group, f"{domain}/mbm_total_bytes"): rate
                for group, rates in traffic.items()
                for domain, rate in enumerate(rates)
            },
            now,
        ),
    )


def steps(count: int, **more: Any) -> tuple[State, Verdict]:
    """Domain 0 is full, domain 1 idle."""
    state, verdict = State(), Verdict()
    for number in range(count):
        traffic = {"LSR": (20 * GB, 0.0), "LS": (10 * GB, 1.0), "BE": (65 * GB + number, 0.0)}
        state, verdict = step(state, situation(traffic, now=1000.0 + number, **more))
    return state, verdict


def test_only_the_domain_that_is_full_is_bounded_and_the_reason_has_the_numbers() -> None:
    _, verdict = steps(4)
    (claim,) = verdict.standing.by_subject["node"]
    assert (claim.key, claim.op, claim.value) == ("BE", Op.WITHIN, "MB:0=80\n")
    assert claim.reason == (
        "domain 0: class BE is left 80 %: LSR and LS 30.0 + BE 65.0 of 100.0 GB/s"
    )
    assert verdict.gauges["bandwidth_suppress_percent", (("domain", "1"),)] == 100.0
    assert [note.reason for note in verdict.notes] == ["BandwidthSuppress"]
    state, verdict = steps(5)
    assert verdict.notes == ()
    (claim,) = verdict.standing.by_subject["node"]
    assert claim.value == "MB:0=70\n"
    for number in range(30):
        idle = {"LS": (10 * GB + number, 0.0), "BE": (1 * GB, 0.0)}
        state, verdict = step(state, situation(idle, now=1005.0 + number))
        if verdict.notes:
            break
    assert [note.message for note in verdict.notes] == [
        "class BE has its whole memory bandwidth again"
    ]


def test_what_was_learnt_and_taken_goes_on_after_a_restart(tmp_path: Path) -> None:
    path, now = str(tmp_path / "leases"), 1000.0
    life = Life(path, STRATEGY, now=now)
    for number in range(610):
        now += 1
        full = {"LS": (30 * GB, 1.0), "BE": (65 * GB + number, 0.0)}
        life.step(situation(full, now=now, mbps=0))
    (before,) = life.board.standing.of(NodeSubject())
    assert before.reason.endswith("of 95.0 GB/s (learnt)")
    life.end(now)
    now += 60
    life = Life(path, STRATEGY, now=now)
    assert life.step(situation({}, now=now + 1, mbps=0)).of(NodeSubject()) == (before,)
    between = {"LS": (30 * GB, 1.0), "BE": (45 * GB, 0.0)}
    (claim,) = life.step(situation(between, now=now + 2, mbps=0)).of(NodeSubject())
    assert (claim.key, claim.op, claim.value) == ("BE", Op.WITHIN, before.value)
    assert claim.reason.endswith("of 95.0 GB/s (learnt)")


def test_a_learnt_line_is_named_in_the_reason() -> None:
    _, verdict = steps(610, mbps=0)
    (claim,) = verdict.standing.by_subject["node"]
    assert claim.reason.endswith("of 95.0 GB/s (learnt)")


def test_no_mba_percent_is_no_ceiling() -> None:
    _, verdict = steps(1, mbaPercent=0)
    assert verdict.gauges["bandwidth_suppress_percent", (("domain", "0"),)] == 100.0


@pytest.mark.parametrize(
    ("facts", "count", "value"),
    [
        (INTEL, 5, 70),  # 64 %, in steps of 10
        (replace(INTEL, vendor=AMD), 5, 102),  # 160 x 64 %
        (replace(INTEL, mba_mbps=True), 4, 49591),  # 0.8 x 65 % of 100 GB/s, in MiB/s
    ],
)
def test_the_value_is_in_the_machines_unit(facts: ResctrlFacts, count: int, value: int) -> None:
    _, verdict = steps(count, facts=facts)
    (claim,) = verdict.standing.by_subject["node"]
    assert claim.value == f"MB:0={value}\n"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"facts": None}, "cannot allocate memory bandwidth"),
        ({"facts": replace(INTEL, mb_domains=())}, "cannot allocate memory bandwidth"),
        ({"gates": {"RdtResctrl": False}}, "RdtResctrl=false"),
        ({"enable": False}, "beClass.resctrlQOS is off"),
    ],
)
def test_where_there_is_no_group_to_bound_the_summary_says_why(
    more: dict[str, Any], why: str
) -> None:
    state, verdict = steps(10, **more)
    assert why in verdict.summary
    assert (state, verdict.standing.by_subject) == (State(), {})


@pytest.mark.parametrize(
    "traffic", [{}, {"BE": (65 * GB, 0.0)}, {"LSR": (20 * GB, 0.0), "LS": (1.0, 1.0)}]
)
def test_without_measurements_the_bound_ends(traffic: dict[str, tuple[float, float]]) -> None:
    _, verdict = step(steps(5)[0], situation(traffic, now=1100.0))
    assert verdict.unmeasured and not verdict.standing.by_subject
    assert "ResctrlCollector" in verdict.summary


RATES = st.floats(0, 1e13)


@given(
    st.lists(st.tuples(RATES, RATES, st.floats(0.1, 700)), max_size=40),
    st.integers(0, 200_000),
    st.integers(0, 100),
    st.booleans(),
)
def test_no_traffic_leads_to_an_absurd_value(
    samples: list[tuple[float, float, float]], mbps: int, percent: int, in_mbps: bool
) -> None:
    state, now = State(), 0.0
    facts = replace(INTEL, mba_mbps=in_mbps)
    for protected, best_effort, after in samples:
        now += after
        traffic = {"LS": (protected, 0.0), "BE": (best_effort, 0.0)}
        state, verdict = step(
            state, situation(traffic, now=now, facts=facts, mbps=mbps, mbaPercent=percent)
        )
        for (claim,) in verdict.standing.by_subject.values():
            value = parse_schemata(str(claim.value))["MB"][0]
            most = 2e13 / (1 << 20) if in_mbps else 100
            assert (1 if in_mbps else 10) <= value <= most
            assert min(percent or 100, 10) <= state.lines[0].percent < (percent or 100)
