"""Pressure control: the table of responses, the loop over time, and whose pressure counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.keys import ANNOTATION_EXTENDED_RESOURCE_SPEC, BATCH_MEMORY
from apis.qos import KubeQoS, QoSClass
from hooks.check import claim_problem
from hooks.facts import KernelFacts
from hooks.standing import Standing, merged
from hooks.subject import Amounts, ContainerSpec, Level, Pod, PodSubject, QosSubject, Subject
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies import cpu_suppress
from koordlet.qos.strategies.pressure import (
    MEMORY_TARGET,
    STRATEGY,
    Bounded,
    Loop,
    Pressure,
    State,
    bounds,
    decay,
    growth,
    loop_step,
    step,
)
from koordlet.qos.strategy import Situation, Verdict
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import EVERYTHING, GIB, MAINLINE, a_pod, batch, be_pod, engine, node
from tests.koordlet.qos.lives import Life
from tests.koordlet.qos.situations import a_situation

QUOTA, HIGH = Resource.CPU_CFS_QUOTA, Resource.MEMORY_HIGH
ROOT = QosSubject(KubeQoS.BESTEFFORT, "kubepods/besteffort")
WEB = a_pod(QoSClass.LS, name="web")
LARGE = be_pod(name="large", specs=[batch("main", memory=(GIB, None))])
SMALL = be_pod(name="small")
V2 = KernelFacts(cgroup_version=2, supported=EVERYTHING)


def at(
    cpu: float | None = 0.0,
    memory: float | None = 0.0,
    *,
    be_cores: float | None = 8.0,
    large: float = 5 * GIB,
    small: float = GIB / 16,
    now: float = 1000.0,
    pods: tuple[Pod, ...] = (WEB, LARGE, SMALL),
    more: dict[Series, float] | None = None,
    **given_: Any,
) -> Situation:
    """Return a node with cgroup v2 where the pod `web` waits so many percent of the time."""
    given_.setdefault("inputs", node(kernel=V2))
    values = {
        Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, LARGE.uid): large,
        Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, SMALL.uid): small,
    }
    if cpu is not None:
        values[Series(Metric.POD_PSI, WEB.uid, "cpu.some.stall")] = cpu
    if memory is not None:
        values[Series(Metric.POD_PSI, WEB.uid, "mem.some.stall")] = memory
    if be_cores is not None:
        values[Series(Metric.BE_CPU_USED)] = be_cores * 1000
    return a_situation(values | (more or {}), *pods, now=now, **given_)


def after(seconds: int, state: State, situation: Situation) -> tuple[State, Verdict]:
    """Return state and verdict after one step a second of the same situation."""
    verdict = Verdict()
    for second in range(seconds):
        moment = msgspec.structs.replace(situation, now=situation.now + second)
        state, verdict = STRATEGY.step(state, moment)
    return state, verdict


def decided(verdict: Verdict, subject: Subject, resource: Resource) -> object:
    standing = verdict.standing
    return engine(node()).decide(subject, standing=standing.of(subject)).value(resource)


# -- the table of responses -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("percent", "per_second"),
    [(10.0, 0.00625), (20.0, 0.025), (30.0, 0.05625), (40.0, 0.1), (100.0, 0.1)],
)
def test_growth_of_the_squeeze_at_a_target_of_10_percent(percent: float, per_second: float) -> None:
    assert growth(percent, 10.0) == pytest.approx(per_second)


@pytest.mark.parametrize(
    ("percent", "per_second"),
    [(0.0, 0.02), (1.0, 0.02), (2.5, 0.02), (4.0, 0.0078125), (5.0, 0.005)],
)
def test_decay_of_the_squeeze_at_a_target_of_10_percent(percent: float, per_second: float) -> None:
    assert decay(percent, 10.0) == pytest.approx(per_second)


HALF = Loop(squeeze=0.5, at=999.0, references={"a": 1000})
BUSY = Bounded({"a": 600}, {"a": 200})  # 600 of 1000 and 200 are in force at 0.5


def half(**fields: Any) -> Loop:
    return msgspec.structs.replace(HALF, **fields)


@pytest.mark.parametrize(
    ("loop", "percent", "bounded", "squeeze"),
    [
        # above the target: after 3 s
        (half(), 40.0, BUSY, 0.5),
        (half(over_since=998.0), 40.0, BUSY, 0.5),
        (half(over_since=997.0), 40.0, BUSY, 0.6),
        (half(over_since=997.0), 20.0, BUSY, 0.525),
        (half(over_since=997.0, squeeze=0.97), 40.0, Bounded({"a": 900}, {"a": 200}), 1.0),
        # not without an effect: best-effort use is far below its bound, or was never measured
        (half(over_since=997.0), 40.0, Bounded({"a": 479}, {"a": 200}), 0.5),
        (half(over_since=997.0), 40.0, Bounded({}, {"a": 200}), 0.5),
        (half(over_since=997.0, rests_until=1000.5), 40.0, BUSY, 0.5),
        # between the release and the target
        (half(over_since=900.0, calm_since=900.0), 7.0, BUSY, 0.5),
        # below the release: after 10 s
        (half(calm_since=991.0), 0.0, BUSY, 0.5),
        (half(calm_since=990.0), 0.0, BUSY, 0.48),
        (half(calm_since=990.0), 4.9, BUSY, 0.5 - 0.02 * (10 / 4.9 / 4) ** 2),
        (half(calm_since=990.0, squeeze=0.01), 0.0, BUSY, 0.0),
        # a late step counts for 5 s at most, and a clock that went back for none
        (half(over_since=900.0, at=900.0, squeeze=0.1), 40.0, Bounded({"a": 900}, {"a": 200}), 0.6),
        (half(over_since=900.0, at=1001.0), 40.0, BUSY, 0.5),
    ],
)
def test_responses(loop: Loop, percent: float, bounded: Bounded, squeeze: float) -> None:
    got = loop_step(loop, Pressure(percent, "default/web"), 10.0, bounded, 1000.0)
    assert got.squeeze == pytest.approx(squeeze)


def test_without_a_sample_the_loop_begins_again() -> None:
    assert loop_step(HALF, None, 10.0, BUSY, 1000.0) == Loop(at=1000.0)


@pytest.mark.parametrize(
    ("squeeze", "bound"),
    [(0.0, 1000), (0.001, 984), (0.02, 984), (0.5, 600), (0.51, 584), (1.0, 200)],
)
def test_bounds_lie_between_the_first_use_and_the_floor(squeeze: float, bound: int) -> None:
    assert bounds(half(squeeze=squeeze), BUSY) == {"a": bound}
    assert bounds(half(squeeze=squeeze), Bounded({}, {"a": 1000})) == {}


# -- over time --------------------------------------------------------------------------------


def test_cpu_pressure_squeezes_the_quota_and_calm_gives_it_back() -> None:
    state, verdict = after(3, State(), at(40.0))
    assert verdict.standing == Standing()
    state, verdict = after(1, state, at(40.0, now=1003.0))
    assert decided(verdict, ROOT, QUOTA) == 730_000  # of 8 CPUs, the floor is one
    (base, bound) = verdict.standing.of(ROOT)
    assert "default/web waits for CPU 40 % (target 10 %): squeezed 10%" in bound.reason
    assert [note.reason for note in verdict.notes] == ["PressureSuppress"]
    assert not claim_problem(base, Level.QOS) and not claim_problem(bound, Level.QOS)
    state, verdict = after(12, state, at(40.0, be_cores=6.0, now=1004.0))
    assert verdict.gauges["pressure_squeeze_ratio", (("resource", "cpu"),)] > 0.1
    state, verdict = after(65, state, at(0.0, be_cores=2.0, now=1020.0))
    assert verdict.standing == Standing() and state.cpu.squeeze == 0.0
    assert verdict.summary == ""


def test_memory_pressure_lowers_memory_high_of_best_effort_pods_towards_their_requests() -> None:
    situation = at(0.0, 4 * MEMORY_TARGET)
    state, verdict = after(4, State(), situation)
    assert state.memory.squeeze == pytest.approx(0.1)
    assert verdict.gauges["pressure_squeeze_ratio", (("resource", "memory"),)] > 0.0
    assert decided(verdict, PodSubject(LARGE), HIGH) == GIB + 4 * GIB * 9 // 10 + 1
    # Below its floor, and not best-effort: nothing.
    assert not verdict.standing.of(PodSubject(SMALL)) and not verdict.standing.of(PodSubject(WEB))
    state, verdict = after(9, state, msgspec.structs.replace(situation, now=1004.0))
    assert decided(verdict, PodSubject(LARGE), HIGH) == GIB
    gone = at(0.0, 4 * MEMORY_TARGET, now=1013.0, pods=(WEB, SMALL))
    state, verdict = after(1, state, gone)
    assert state.memory.references == {} and verdict.standing == Standing()


def test_a_request_that_only_the_annotation_names_is_the_floor_too() -> None:
    """The Pod object may not be known: the runtime reports the annotation, and no requests."""
    requests = {BATCH_MEMORY: str(3 * GIB)}
    spec = {"containers": {"main": {"requests": requests}, "without": {"requests": {}}}}
    pod = be_pod(name="reported", annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: json.dumps(spec)})
    used = {Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, pod.uid): 5.0 * GIB}
    _, verdict = after(40, State(), at(memory=100.0, pods=(WEB, pod), more=used))
    assert decided(verdict, PodSubject(pod), HIGH) == 3 * GIB


def test_a_pod_that_grows_while_others_are_squeezed_is_bounded_too() -> None:
    state, _ = after(8, State(), at(0.0, 20.0))
    grown = at(0.0, 20.0, small=GIB, now=1008.0)
    state, verdict = after(1, state, grown)
    bound = decided(verdict, PodSubject(SMALL), HIGH)
    assert isinstance(bound, int) and 128 << 20 < bound < GIB


def test_pressure_that_stays_at_the_full_squeeze_ends_it() -> None:
    state, _ = after(15, State(), at(50.0))
    assert state.cpu.squeeze == 1.0
    state, verdict = after(61, state, at(50.0, be_cores=1.0, now=1015.0))
    assert state.cpu.squeeze == 0.0 and verdict.standing == Standing()
    assert "of no use" in verdict.summary
    state, _ = after(200, state, at(50.0, now=1076.0))
    assert state.cpu.squeeze == 0.0
    state, _ = after(120, state, at(50.0, now=1276.0))
    assert state.cpu.squeeze > 0.0


def test_without_best_effort_use_nothing_is_squeezed() -> None:
    for situation in (at(90.0, be_cores=0.5), at(90.0, be_cores=None)):
        state, verdict = after(60, State(), situation)
        assert state.cpu.squeeze == 0.0 and verdict.standing == Standing()


# -- whose pressure ---------------------------------------------------------------------------


def test_pressure_of_a_pods_own_making_does_not_count() -> None:
    throttled = {Series(Metric.POD_CPU_THROTTLED, WEB.uid): 0.2}
    assert after(10, State(), at(90.0, more=throttled))[0].cpu.squeeze == 0.0
    limited = a_pod(
        QoSClass.LS,
        name="web",
        specs=[ContainerSpec("main", amounts=Amounts(memory_limit_bytes=GIB))],
    )
    for used, squeezed in ((0.9 * GIB, False), (0.89 * GIB, True)):
        own = {Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, WEB.uid): used}
        state, _ = after(10, State(), at(0.0, 90.0, more=own, pods=(limited, LARGE)))
        assert bool(state.memory.squeeze) is squeezed


def test_pressure_of_best_effort_and_ended_pods_does_not_count() -> None:
    ended = msgspec.structs.replace(a_pod(QoSClass.LS, name="ended"), phase="Succeeded")
    others = {
        Series(Metric.POD_PSI, pod.uid, "cpu.some.stall"): 99.0 for pod in (ended, LARGE, SMALL)
    }
    situation = at(None, None, more=others, pods=(WEB, ended, LARGE, SMALL))
    state, verdict = after(10, State(), situation)
    assert state.cpu.squeeze == 0.0 and "no pressure" in verdict.summary


def test_pressure_counts_in_whatever_order_the_pods_are() -> None:
    situation = at(90.0, pods=(LARGE, SMALL, WEB))
    assert after(10, State(), situation)[0].cpu.squeeze > 0.0


def test_the_average_counts_where_the_stall_is_not_known() -> None:
    average = {Series(Metric.POD_PSI, WEB.uid, "cpu.some.avg10"): 90.0}
    assert after(4, State(), at(None, None, more=average))[0].cpu.squeeze > 0.0


def test_a_kernel_without_memory_high_bounds_cpu_alone() -> None:
    kernel = KernelFacts(supported=MAINLINE - {HIGH})
    state, verdict = after(10, State(), at(50.0, 50.0, inputs=node(kernel=kernel)))
    assert state.memory.squeeze == 0.0 and set(verdict.standing.by_subject) == {ROOT.key}


def test_on_v1_the_quotas_below_the_besteffort_directory_are_lifted() -> None:
    for version, lifted in ((1, UNLIMITED), (2, None)):
        kernel = KernelFacts(cgroup_version=version, supported=MAINLINE)
        _, verdict = after(10, State(), at(50.0, inputs=node(kernel=kernel)))
        assert decided(verdict, PodSubject(LARGE), QUOTA) == lifted
        assert decided(verdict, PodSubject(WEB), QUOTA) is None


def test_the_claims_of_lifted_quotas_name_their_policy_and_reason() -> None:
    kernel = KernelFacts(cgroup_version=1, supported=MAINLINE)
    _, verdict = after(10, State(), at(50.0, inputs=node(kernel=kernel)))
    claims = {claim for each in verdict.standing.by_class.values() for claim in each}
    assert {(claim.policy, claim.reason) for claim in claims} == {
        ("PressureSuppress", "the quota of all best-effort pods holds this one")
    }
    assert {level for level, _ in verdict.standing.by_class} == {Level.POD, Level.CONTAINER}


def test_on_v1_no_quota_falls_before_containers_being_created_have_lost_theirs() -> None:
    """A reply of a moment ago still has a quota, and the kernel refuses one above the parent's."""
    on_v1 = node(kernel=KernelFacts(supported=EVERYTHING))
    state, _ = after(3, State(), at(40.0, inputs=on_v1))
    quotas = []
    for second in range(4):
        state, verdict = step(state, at(40.0, inputs=on_v1, now=1003.0 + second))
        assert decided(verdict, PodSubject(LARGE), QUOTA) == UNLIMITED
        quotas.append(decided(verdict, ROOT, QUOTA))
    assert quotas[:2] == [None, None] and None not in quotas[2:]
    state, verdict = after(80, state, at(0.0, inputs=on_v1, now=1010.0))
    assert verdict.standing == Standing()
    state, _ = after(3, state, at(40.0, inputs=on_v1, now=1100.0))
    _, verdict = step(state, at(40.0, inputs=on_v1, now=1103.0))
    assert decided(verdict, ROOT, QUOTA) is None, "the next squeeze has a lead of its own"


def test_on_v1_the_lead_begins_again_after_a_stall_that_ended_the_claims(tmp_path: Path) -> None:
    on_v1 = node(kernel=KernelFacts(supported=EVERYTHING))
    life = Life(str(tmp_path / "leases"), STRATEGY, now=1000.0)
    quotas = []
    for now in (1000, 1001, 1002, 1003, 1004, 1005, 1006, 1020, 1021, 1022):
        standing = life.step(at(40.0, inputs=on_v1, now=float(now)))
        assert now < 1003 or standing.by_class, "best-effort pods lose their own quotas"
        quotas.append(decided(Verdict(standing=standing), ROOT, QUOTA))
    assert [quota is None for quota in quotas] == [True] * 5 + [False] * 2 + [True] * 2 + [False]
    assert quotas[-1] != quotas[6], "the squeeze itself has gone on"


# -- beside suppression -----------------------------------------------------------------------


def test_the_smaller_of_suppression_and_pressure_holds() -> None:
    slo = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressPolicy": "cfsQuota"}}
    used = {Series(Metric.NODE_CPU): 9.0}
    situation = at(50.0, more=used, slo=slo)
    _, suppressed = cpu_suppress.step(cpu_suppress.State(), situation)
    for seconds, quota in ((4, 140_000), (13, 100_000)):
        _, squeezed = after(seconds, State(), situation)
        both = merged([suppressed.standing, squeezed.standing])
        assert decided(Verdict(standing=both), ROOT, QUOTA) == quota
    least = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressMinPercent": 25}}
    _, squeezed = after(20, State(), at(50.0, slo=least))
    assert decided(squeezed, ROOT, QUOTA) == 400_000


# -- over restarts ----------------------------------------------------------------------------


def squeezed(path: str, *, now: float = 1000.0, boot: str = "b1") -> tuple[Life, object]:
    """Return a life in which the quota was squeezed to the half, and the quota."""
    life = Life(path, STRATEGY, now=now, boot=boot)
    for second in range(8):
        standing = life.step(at(40.0, now=now + 1 + second))
    assert state_of(life).cpu.squeeze == pytest.approx(0.5)
    return life, decided(Verdict(standing=standing), ROOT, QUOTA)


def state_of(life: Life) -> State:
    state = life.runner.kept_states[STRATEGY.name]
    assert isinstance(state, State)
    return state


@pytest.mark.parametrize("gap_s", [0.5, 5.0, 60.0, 3600.0])
@pytest.mark.parametrize("killed", [True, False])
def test_a_restart_releases_nothing_and_the_squeeze_goes_on(
    tmp_path: Path, gap_s: float, killed: bool
) -> None:
    """Also while nothing is measured yet; and it ends with the pressure."""
    path = str(tmp_path / "leases")
    life, quota = squeezed(path)
    assert quota == 450_000  # of 8 CPUs, the floor is one
    now = 1008.0
    if not killed:
        life.end(now)
    now += gap_s
    life = Life(path, STRATEGY, now=now)
    quotas = []
    for cpu in (None, None, 7.0, 7.0):
        now += 1
        memory = None if cpu is None else 0.0
        standing = life.step(at(cpu, memory, be_cores=4.0, now=now))
        quotas.append(decided(Verdict(standing=standing), ROOT, QUOTA))
    assert set(quotas) == {quota}
    for _ in range(62):
        now += 1
        standing = life.step(at(0.0, be_cores=4.0, now=now))
    assert standing == Standing() and state_of(life).cpu.squeeze == 0.0


def test_a_squeeze_that_was_of_no_use_rests_over_a_restart(tmp_path: Path) -> None:
    path, now = str(tmp_path / "leases"), 1000.0
    life = Life(path, STRATEGY, now=now)
    ends = 0.0
    while not ends:
        now += 1
        life.step(at(40.0, now=now))
        ends = state_of(life).cpu.rests_until
    assert ends == now + 300
    now += 20
    life = Life(path, STRATEGY, now=now)
    while now < ends:
        assert life.step(at(40.0, now=now)) == Standing()
        now += 1
    assert life.step(at(40.0, now=now)) != Standing()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"squeeze":0.5', '"squeeze":7.5', "Expected `float` <= 1.0"),
        ('"squeeze":0.5', '"squeeze":null', "Expected `float`, got `null`"),
        ('"version":1', '"version":9', "Invalid value 9"),
    ],
)
def test_with_a_bad_state_it_begins_from_nothing_after_the_claims_of_before(
    tmp_path: Path, old: str, new: str, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "leases"
    life, quota = squeezed(str(path))
    life.end(1008.0)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    life = Life(str(path), STRATEGY, now=1010.0)
    assert "the state of PressureSuppress is not readable" in caplog.text
    assert problem in caplog.text
    assert decided(Verdict(standing=life.board.standing), ROOT, QUOTA) == quota
    assert life.step(at(7.0, be_cores=4.0, now=1011.0)) == Standing()
    assert state_of(life).cpu.squeeze == 0.0


def test_after_a_reboot_nothing_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "leases")
    life, _ = squeezed(path)
    life.end(1008.0)
    life = Life(path, STRATEGY, now=20.0, boot="b2")
    assert not life.runner.kept_states and life.board.standing == Standing()


# -- invariants -------------------------------------------------------------------------------

_PERCENT = st.one_of(st.none(), st.floats(0, 100))
_STEPS = st.lists(
    st.tuples(_PERCENT, _PERCENT, st.floats(0, 16), st.floats(0, 64 * GIB), st.floats(-1, 30)),
    min_size=1,
    max_size=30,
)


@given(_STEPS, st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_whatever_is_measured_bounds_stay_bounded_and_nothing_grows(
    steps: list[tuple[float | None, float | None, float, float, float]], least_percent: int
) -> None:
    slo = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressMinPercent": least_percent}}
    state, now, most = State(), 1000.0, 0.0
    for cpu, memory, be_cores, large, passed in steps:
        now += passed
        most = max(most, be_cores)
        situation = at(cpu, memory, be_cores=be_cores, large=large, now=now, slo=slo)
        before = state
        state, verdict = step(before, situation)
        assert step(before, situation) == (state, verdict)
        for loop in (state.cpu, state.memory):
            assert 0.0 <= loop.squeeze <= 1.0
            assert loop.references.keys() <= {ROOT.key, "pod/uid-large", "pod/uid-small"}
            assert bool(loop.references) <= bool(loop.squeeze)
        quota = decided(verdict, ROOT, QUOTA)
        if quota is not None:
            assert isinstance(quota, int)
            floor = max(100_000, 16_000 * least_percent)
            assert floor <= quota <= max(most * 100_000, floor)
        high = decided(verdict, PodSubject(LARGE), HIGH)
        assert high is None or (isinstance(high, int) and GIB <= high <= 64 * GIB)


@given(_STEPS)
@settings(max_examples=50, deadline=None)
def test_after_the_pressure_ends_everything_returns(
    steps: list[tuple[float | None, float | None, float, float, float]],
) -> None:
    state, now = State(), 1000.0
    for cpu, memory, be_cores, large, passed in steps:
        now += passed
        state, _ = step(state, at(cpu, memory, be_cores=be_cores, large=large, now=now))
    state, verdict = after(62, state, at(0.0, 0.0, now=now + 1))
    assert verdict.standing == Standing() and state.cpu.squeeze == state.memory.squeeze == 0.0
