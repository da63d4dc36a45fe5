"""CPU burst: the worked examples, the tokens, whose quotas move, and what the engine decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.keys import (
    ANNOTATION_CPU_BURST,
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_RESOURCE_STATUS,
)
from apis.nodeslo import CPUBurstPolicy, CPUBurstStrategy
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.amounts import requested_of_container, requested_of_pod
from hooks.check import claim_problem
from hooks.facts import KernelFacts, NodeInputs
from hooks.policies import cpu_normalization, cpuset_allocator
from hooks.standing import Standing
from hooks.subject import (
    Amounts,
    ContainerSpec,
    ContainerSubject,
    Level,
    Pod,
    PodSubject,
    Requested,
)
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies.cpu_burst import (
    STRATEGY,
    Bucket,
    NodeState,
    Operation,
    State,
    filled,
    load_of,
    moved,
    node_state,
    operation_of,
    step,
)
from koordlet.qos.strategy import PodOnNode, Situation, Verdict
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import MAINLINE, a_pod, engine, node
from tests.koordlet.qos.lives import Life
from tests.koordlet.qos.situations import a_situation, cpus, on_node

QUOTA, BURST = Resource.CPU_CFS_QUOTA, Resource.CPU_CFS_BURST


def burst(policy: str = "auto", **fields: Any) -> dict[str, Any]:
    return {"cpuBurstStrategy": {"policy": policy, **fields}}


def web(
    *limits_milli: int | None,
    qos: QoSClass | str = QoSClass.LS,
    annotations: dict[str, Any] | None = None,
    name: str = "web",
    resources: Amounts = Amounts(),  # noqa: B008 - frozen
) -> PodOnNode:
    """Return a pod with containers of these CPU limits, named c0, c1 and so on."""
    specs = [
        ContainerSpec(f"c{index}", amounts=Amounts(cpu_limit_milli=limit))
        for index, limit in enumerate(limits_milli or (2000,))
    ]
    pod = a_pod(qos, annotations=annotations, name=name, specs=specs, resources=resources)
    return on_node(
        pod, *((spec.name, requested_of_container(spec.amounts, resources)) for spec in specs)
    )


def at(
    one: PodOnNode,
    throttled: float | None = 1.0,
    *,
    used: float | None = None,
    node_cores: float | None = 2.0,
    now: float = 1000.0,
    slo: dict[str, Any] | None = None,
    inputs: NodeInputs | None = None,
    others: tuple[PodOnNode, ...] = (),
) -> Situation:
    """Return a node of 16 CPUs, idle unless `node_cores` says otherwise; all throttled alike."""
    values: dict[Series, float] = {}
    if node_cores is not None:
        values[Series(Metric.NODE_CPU)] = node_cores
    for container in one.containers:
        if throttled is not None:
            values[Series(Metric.CONTAINER_CPU_THROTTLED, container.id)] = throttled
        if used is not None:
            values[Series(Metric.CONTAINER_CPU, container.id)] = used
    return a_situation(
        values, one, *others, slo=burst() if slo is None else slo, inputs=inputs, now=now
    )


def run(*situations: Situation, state: State | None = None) -> tuple[State, list[Verdict]]:
    state, verdicts = state or STRATEGY.initial(), []
    for index, situation in enumerate(situations):
        moment = msgspec.structs.replace(situation, now=situation.now + index)
        state, verdict = STRATEGY.step(state, moment)
        verdicts.append(verdict)
    return state, verdicts


def decided(
    verdict: Verdict,
    subject: ContainerSubject | Pod,
    resource: Resource = QUOTA,
    inputs: NodeInputs | None = None,
) -> int | None:
    """Return what the engine decides beside CPU normalisation and CPU sets."""
    asked = (
        subject
        if isinstance(subject, ContainerSubject)
        else PodSubject(subject, requested_of_pod(subject))
    )
    decision = engine(inputs or node(), cpu_normalization.POLICY, cpuset_allocator.POLICY).decide(
        asked, standing=verdict.standing.of(asked)
    )
    value = decision.value(resource)
    assert value is None or isinstance(value, int)
    return value


# -- the worked examples ----------------------------------------------------------------------


def test_a_throttled_container_of_an_idle_node_climbs_to_its_ceiling() -> None:
    one = web()
    _, verdicts = run(*[at(one)] * 8)
    quotas = [decided(verdict, one.containers[0]) for verdict in verdicts]
    assert quotas == [240000, 288000, 345600, 414720, 497664, 597196, 600000, 600000]
    assert [decided(verdict, one.pod) for verdict in verdicts] == quotas


def test_an_overloaded_node_takes_the_quota_back_and_a_cooling_one_keeps_it() -> None:
    one = web()
    raised, _ = run(*[at(one)] * 7)
    cooling, _ = run(at(one, node_cores=7.5), state=raised)
    assert cooling.containers[one.containers[0].id].quota_us == 600000
    _, verdicts = run(*[at(one, node_cores=8.0)] * 6, state=raised)
    quotas = [decided(verdict, one.containers[0]) for verdict in verdicts]
    # At the limit nothing is claimed: kubelet's quota is in force.
    assert quotas == [480000, 384000, 307200, 245760, None, None]
    assert decided(verdicts[-1], one.pod) is None


def test_raised_quotas_are_counted() -> None:
    one, calm = web(2000, 1000), web(name="calm")
    _, verdicts = run(at(one, 0.0, others=(calm,)), at(one, others=(calm,)))
    assert [each.gauges["cpu_burst_raised_quotas", ()] for each in verdicts] == [0.0, 2.0]
    _, (verdict,) = run(at(one, slo=burst("none")))
    assert verdict.gauges == {}


def test_the_static_burst_of_the_worked_example() -> None:
    one = web()
    state, (verdict,) = run(at(one))
    assert decided(verdict, one.containers[0], BURST) == 2000000
    assert decided(verdict, one.pod, BURST) == 2000000
    labels = dict(next(key for key in verdict.gauges if "burst" in key[0])[1])
    assert labels == {
        "pod_namespace": "default",
        "pod_name": "web",
        "container_id": "uid-web-c0",
        "container_name": "c0",
    }
    assert [(note.reason, note.obj) for note in verdict.notes] == [
        ("CFSQuotaBurst", "default/web"),
        ("CPUBurst", "default/web"),
    ]
    _, verdict = STRATEGY.step(state, at(one, 0.0, now=1001.0))
    assert not verdict.notes


@pytest.mark.parametrize(
    ("node_cores", "state", "ratio"),
    [
        (14.0, NodeState.IDLE, 0.375),
        (17.0, NodeState.OVERLOAD, 0.5),
        (16.0, NodeState.COOLING, 11 / 24),
    ],
)
def test_the_load_of_the_share_pool(node_cores: float, state: NodeState, ratio: float) -> None:
    lsr = a_pod(
        QoSClass.LSR,
        KubeQoS.GUARANTEED,
        name="lsr",
        specs=[ContainerSpec("main", amounts=Amounts(cpu_limit_milli=8000))],
    )
    ended = msgspec.structs.replace(lsr, uid="ended", phase="Succeeded")
    batch = a_pod(QoSClass.BE, KubeQoS.BESTEFFORT, name="be")
    values = {
        Series(Metric.NODE_CPU): node_cores,
        Series(Metric.POD_CPU, lsr.uid): 4.0,
        Series(Metric.POD_CPU, batch.uid): 1.0,
    }
    load = load_of(a_situation(values, lsr, batch, ended, topology=cpus(32)))
    assert load.state is state and load.ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "percent", "state"),
    [
        (0.4499, 50, NodeState.IDLE),
        (0.45, 50, NodeState.COOLING),
        (0.63, 70, NodeState.COOLING),
        (0.5, 50, NodeState.OVERLOAD),
        (0.0, 0, NodeState.OVERLOAD),
    ],
)
def test_node_states(ratio: float, percent: int, state: NodeState) -> None:
    assert node_state(ratio, percent) is state


def test_a_node_that_lsr_pods_fill_is_overloaded_and_one_without_samples_unknown() -> None:
    lsr = a_pod(
        QoSClass.LSR,
        KubeQoS.GUARANTEED,
        specs=[ContainerSpec("main", amounts=Amounts(cpu_request_milli=16000))],
    )
    assert load_of(a_situation({Series(Metric.NODE_CPU): 1.0}, lsr)).state is NodeState.OVERLOAD
    assert load_of(a_situation({}, lsr)).state is NodeState.UNKNOWN


# -- operations -------------------------------------------------------------------------------

UP, DOWN, STAY, RESET = Operation.UP, Operation.DOWN, Operation.REMAIN, Operation.RESET
EMPTY, SOME = Bucket(0.0, 100.0, 0.0), Bucket(1.0, 100.0, 0.0)


@pytest.mark.parametrize(
    ("policy", "throttled", "bucket", "by_state"),
    [
        # idle, cooling, overloaded, not measured
        ("auto", True, None, (UP, STAY, DOWN, STAY)),
        ("cfsQuotaBurstOnly", True, SOME, (UP, STAY, DOWN, STAY)),
        ("auto", False, None, (STAY, STAY, DOWN, STAY)),
        ("auto", None, None, (STAY, STAY, DOWN, STAY)),
        ("auto", True, EMPTY, (DOWN, DOWN, DOWN, DOWN)),
        ("cpuBurstOnly", True, None, (RESET, RESET, RESET, RESET)),
        ("none", True, EMPTY, (RESET, RESET, RESET, RESET)),
    ],
)
def test_operations(
    policy: str, throttled: bool | None, bucket: Bucket | None, by_state: tuple[Operation, ...]
) -> None:
    config = CPUBurstStrategy(policy=CPUBurstPolicy(policy))
    states = (NodeState.IDLE, NodeState.COOLING, NodeState.OVERLOAD, NodeState.UNKNOWN)
    assert by_state == tuple(
        operation_of(config, state, throttled=throttled, bucket=bucket) for state in states
    )


@pytest.mark.parametrize(
    ("quota", "percent", "operation", "after"),
    [
        (200000, 300, UP, 240000),
        (597196, 300, UP, 600000),
        (245760, 300, DOWN, 200000),
        (600000, 300, RESET, 200000),
        (300000, 300, STAY, 300000),
        (600000, 200, STAY, 400000),  # the ceiling has come down
        (100000, 300, STAY, 200000),  # the limit has gone up
        (200000, 100, UP, 200000),
        (200000, -5, UP, 200000),
        (200000, 10**15, UP, 240000),
    ],
)
def test_a_quota_moves_between_the_limit_and_the_ceiling(
    quota: int, percent: int, operation: Operation, after: int
) -> None:
    assert moved(quota, 200000, percent, operation) == after


def test_one_throttled_period_raises_nothing() -> None:
    one = web()
    key = one.containers[0].id
    few = at(one, 0.04)
    assert run(few)[0].containers[key].quota_us == 200000
    switched = at(one, 0.04, inputs=node(compat=[compat.BURST_ON_ANY_THROTTLING]))
    assert run(switched)[0].containers[key].quota_us == 240000


def test_a_calm_container_gives_its_quota_back_as_far_as_it_uses_less() -> None:
    one = web()
    key = one.containers[0].id
    raised, _ = run(*[at(one)] * 7)  # 6 cores at 1006.0
    assert step(raised, at(one, 0.0, used=1.0, now=1065.9))[0].containers[key].quota_us == 600000
    calm = at(one, 0.0, used=1.0, now=1066.0)
    state, verdict = step(raised, calm)
    assert state.containers[key].quota_us == 480000
    assert "calm" in verdict.notes[0].message
    # 80 % of 4.8 cores
    busy = at(one, 0.0, used=3.85, now=1066.0)
    assert step(raised, busy)[0].containers[key].quota_us == 600000
    stays = at(one, 0.0, used=1.0, now=1066.0, inputs=node(compat=[compat.BURST_QUOTA_STAYS]))
    assert step(raised, stays)[0].containers[key].quota_us == 600000
    state, _ = run(*[calm] * 6, state=raised)
    assert state.containers[key].quota_us == 200000


# -- tokens -----------------------------------------------------------------------------------


def limited(period_s: int, percent: int = 300) -> CPUBurstStrategy:
    return CPUBurstStrategy(
        policy=CPUBurstPolicy.AUTO,
        cfs_quota_burst_percent=percent,
        cfs_quota_burst_period_seconds=period_s,
    )


def seconds_until(bucket: Bucket, config: CPUBurstStrategy, percent: float, ends: float) -> int:
    for second in range(1, 1000):
        after = filled(bucket, config, percent, bucket.at + 1.0)
        assert after is not None
        bucket = after
        if bucket.tokens == ends:
            return second
    raise AssertionError(f"{bucket} never holds {ends}")


def test_the_tokens_of_the_worked_example() -> None:
    config = limited(60)
    first = filled(None, config, 100.0, 0.0)
    assert first == Bucket(3000.0, 12000.0, 0.0)
    assert seconds_until(Bucket(12000.0, 12000.0, 0.0), config, 250.0, 0.0) == 80
    assert seconds_until(Bucket(0.0, 12000.0, 0.0), config, 20.0, 12000.0) == 150


@pytest.mark.parametrize(
    ("bucket", "config", "percent", "now", "tokens"),
    [
        (Bucket(100.0, 12000.0, 0.0), limited(60), 60.0, 1.0, 100.0),
        (Bucket(100.0, 12000.0, 0.0), limited(60), 99.9, 1.0, 100.0),
        (Bucket(100.0, 12000.0, 0.0), limited(60), 200.0, 0.5, 50.0),  # parts of seconds
        (Bucket(0.0, 12000.0, 0.0), limited(60), 300.0, 3600.0, -2000.0),  # 10 s are known
        (Bucket(-11990.0, 12000.0, 0.0), limited(60), 300.0, 1.0, -12000.0),
        (Bucket(6000.0, 12000.0, 0.0), limited(120), 100.0, 1.0, 12000.0),  # still half full
        (Bucket(5.0, 12000.0, 10.0), limited(60), 300.0, 9.0, 5.0),  # the clock went back
        (Bucket(50.0, 100.0, 0.0), limited(60, 90), 20.0, 1.0, 0.0),
        (None, limited(0), 20.0, 1.0, 0.0),
    ],
)
def test_tokens(
    bucket: Bucket | None, config: CPUBurstStrategy, percent: float, now: float, tokens: float
) -> None:
    after = filled(bucket, config, percent, now)
    assert after is not None and after.tokens == tokens


def test_without_tokens_the_quota_goes_down() -> None:
    one = web()
    slo = burst(cfsQuotaBurstPeriodSeconds=60)
    _, verdicts = run(*[at(one, used=5.0, slo=slo)] * 30)  # 250 % of the limit: 20 s
    quotas = [decided(verdict, one.containers[0]) for verdict in verdicts]
    assert max(quota or 0 for quota in quotas) == 600000 and quotas[-1] is None
    assert any("tokens" in note.message for verdict in verdicts for note in verdict.notes)
    assert not filled(None, limited(-1), 100.0, 0.0)


# -- whose quotas -----------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [QoSClass.LSE, QoSClass.LSR, QoSClass.BE])
def test_pods_with_cpus_of_their_own_and_best_effort_pods_do_not_burst(qos: QoSClass) -> None:
    _, (verdict,) = run(at(web(qos=qos)))
    assert verdict.standing == Standing()


@pytest.mark.parametrize("slo", [{}, burst("none")])
def test_with_policy_none_nothing_is_claimed(slo: dict[str, Any]) -> None:
    why = "NodeSLO spec.cpuBurstStrategy.policy is none, and no running pod's annotation says"
    summary = f"{why} otherwise"
    assert run(at(web(), slo=slo)) == (State(), [Verdict(standing=Standing(), summary=summary)])


def test_without_a_pod_that_may_burst_the_summary_says_so() -> None:
    _, (verdict,) = run(at(web(qos=QoSClass.LSR)))
    assert verdict.summary == "no pod runs whose quota may be raised"


@pytest.mark.parametrize(
    ("policy", "resources"),
    [("cpuBurstOnly", {BURST}), ("cfsQuotaBurstOnly", {QUOTA}), ("auto", {QUOTA, BURST})],
)
def test_policies(policy: str, resources: set[Resource]) -> None:
    one = web()
    _, (verdict,) = run(at(one, slo=burst(policy)))
    assert {c.resource for c in verdict.standing.of(one.containers[0])} == resources
    assert {c.resource for c in verdict.standing.of(PodSubject(one.pod))} == resources
    for subject, level in ((one.containers[0], Level.CONTAINER), (PodSubject(one.pod), Level.POD)):
        assert all(not claim_problem(c, level) for c in verdict.standing.of(subject))


def test_a_pods_annotation_goes_over_the_nodes_strategy() -> None:
    own = {"policy": "cfsQuotaBurstOnly", "cfsQuotaBurstPercent": 110}
    one = web(annotations={ANNOTATION_CPU_BURST: own})
    _, (verdict,) = run(at(one, slo=burst("none")))
    assert decided(verdict, one.containers[0]) == 220000
    (claim,) = verdict.standing.of(one.containers[0])
    assert claim.source == f"annotation {ANNOTATION_CPU_BURST}"
    off = web(annotations={ANNOTATION_CPU_BURST: {"policy": "none"}})
    assert run(at(off))[1][0].standing == Standing()


def test_a_bad_annotation_is_reported_and_the_nodes_strategy_counts() -> None:
    one = web(annotations={ANNOTATION_CPU_BURST: '{"policy":"auto","cpuBurstPercent":"much"}'})
    _, (verdict,) = run(at(one))
    assert decided(verdict, one.containers[0]) == 240000
    (fault,) = verdict.faults
    assert fault.obj == "Pod default/web" and "cpuBurstPercent" in fault.field


def test_a_kernel_without_burst_gets_quotas_alone_and_says_so() -> None:
    one = web()
    old = node(kernel=KernelFacts(supported=MAINLINE - {BURST}))
    _, (verdict,) = run(at(one, inputs=old))
    assert {c.resource for c in verdict.standing.of(one.containers[0])} == {QUOTA}
    assert "no CFS burst" in verdict.summary


# -- composition ------------------------------------------------------------------------------


def test_a_raised_quota_is_of_the_normalised_one() -> None:
    inputs = node(
        gates={"CPUNormalization": True},
        annotations={ANNOTATION_CPU_NORMALIZATION_RATIO: "1.25"},
        kernel=KernelFacts(cgroup_version=2, supported=MAINLINE | {BURST}),
    )
    one = web()
    _, verdicts = run(*[at(one, inputs=inputs)] * 7)
    quotas = [decided(verdict, one.containers[0], inputs=inputs) for verdict in verdicts]
    assert (quotas[0], quotas[-1]) == (192000, 480000)
    assert decided(verdicts[-1], one.pod, inputs=inputs) == 480000
    assert decided(verdicts[-1], one.containers[0], BURST, inputs) == 1600000


def test_use_counts_by_the_normalised_limit() -> None:
    gate = {"gates": {"CPUNormalization": True}}
    inputs = node(**gate, annotations={ANNOTATION_CPU_NORMALIZATION_RATIO: "2"})  # type: ignore[arg-type]
    slo = burst(cfsQuotaBurstPeriodSeconds=60)
    one = web()
    key = one.containers[0].id
    plain, _ = run(*[at(one, used=1.5, slo=slo)] * 2)
    normalised, _ = run(*[at(one, used=1.5, slo=slo, inputs=inputs)] * 2)
    tokens = [state.containers[key].bucket for state in (plain, normalised)]
    assert [bucket and bucket.tokens for bucket in tokens] == [3000.0, 2950.0]


def test_a_quota_that_another_policy_lifted_stays_lifted() -> None:
    one = web(qos="", annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": "0-1"}})
    _, (verdict,) = run(at(one))
    assert decided(verdict, one.containers[0]) == UNLIMITED
    assert decided(verdict, one.pod) == UNLIMITED


def test_a_container_without_a_limit_leaves_its_pod_without_claims() -> None:
    one = web(2000, None)
    state, (verdict,) = run(at(one))
    assert list(state.containers) == [one.containers[0].id]
    assert decided(verdict, one.containers[0]) == 240000
    assert not verdict.standing.of(PodSubject(one.pod))


def test_a_pod_of_unknown_specification_grows_by_the_containers_that_run() -> None:
    known = web(2000, 1000)
    pod = msgspec.structs.replace(known.pod, specs=())
    unknown = msgspec.structs.replace(known, pod=pod)
    _, (verdict,) = run(at(unknown))
    (claim, _) = verdict.standing.of(PodSubject(pod))
    assert claim.factor == pytest.approx(1.2)
    unlimited = web(2000, None)
    pod = msgspec.structs.replace(unlimited.pod, specs=())
    _, (verdict,) = run(at(msgspec.structs.replace(unlimited, pod=pod)))
    assert not verdict.standing.of(PodSubject(pod))


@pytest.mark.parametrize(
    ("limits", "pod_quota_us", "without_effect"),
    [
        ((2000, 1000), None, True),
        ((2000, 1000), 300_000, False),  # the runtime passed kubelet's sums on
        ((2000, None), None, False),  # kubelet sets no quota on such a pod
    ],
)
def test_the_summary_counts_quotas_that_the_pods_own_quota_bounds(
    limits: tuple[int | None, ...], pod_quota_us: int | None, without_effect: bool
) -> None:
    known = web(*limits)
    one = msgspec.structs.replace(
        known,
        pod=msgspec.structs.replace(known.pod, specs=()),
        requested=Requested(cfs_quota_us=pod_quota_us),
    )
    _, (verdict,) = run(at(one))
    count = len([limit for limit in limits if limit])
    assert verdict.summary.startswith(f"{count} of {count} quotas raised")
    assert (f"{count} of them without effect" in verdict.summary) is without_effect


def test_no_quota_is_without_effect_in_a_pod_of_known_specification() -> None:
    one = msgspec.structs.replace(web(2000, 1000), requested=Requested(cfs_quota_us=None))
    _, (verdict,) = run(at(one))
    assert verdict.summary.startswith("2 of 2 quotas raised")
    assert "without effect" not in verdict.summary


def test_a_pods_quota_is_exact_after_a_container_restarted() -> None:
    one = web(2000, 1000)
    raised, verdicts = run(*[at(one)] * 7)
    assert decided(verdicts[-1], one.pod) == 900000
    old, other = one.containers
    again = msgspec.structs.replace(one, containers=(msgspec.structs.replace(old, id="new"), other))
    state, verdict = step(raised, at(again, 0.0, now=1007.0))
    assert set(state.containers) == {"new", other.id}
    assert decided(verdict, again.pod) == 500000
    assert decided(verdict, again.containers[0]) is None


def test_a_resized_container_keeps_its_quota_within_the_new_bounds() -> None:
    one = web()
    raised, _ = run(*[at(one)] * 7)
    _, verdict = step(raised, at(web(1000), 0.0, now=1007.0))
    assert decided(verdict, web(1000).containers[0]) == 300000


def test_containers_that_share_the_pods_own_limit_never_exceed_its_ceiling() -> None:
    shared = web(None, None, resources=Amounts(cpu_limit_milli=2000))
    _, verdicts = run(*[at(shared)] * 8)
    assert decided(verdicts[-1], shared.containers[0]) == 600000
    assert decided(verdicts[-1], shared.pod) == 600000


# -- over restarts ----------------------------------------------------------------------------

_GAPS_S = pytest.mark.parametrize("gap_s", [0.5, 5.0, 60.0, 3600.0])


@_GAPS_S
def test_a_raised_quota_stays_over_a_restart_and_comes_down_again(
    tmp_path: Path, gap_s: float
) -> None:
    """Killed at its ceiling: the next daemon keeps it while the container is throttled."""
    one, now = web(), 1000.0
    life = Life(str(tmp_path / "leases"), STRATEGY, now=now)
    for _ in range(8):
        now += 1
        standing = life.step(at(one, used=2.0, now=now))
    assert decided(Verdict(standing=standing), one.containers[0]) == 600000
    now += gap_s
    life = Life(str(tmp_path / "leases"), STRATEGY, now=now)
    for _ in range(3):
        now += 1
        standing = life.step(at(one, used=2.0, now=now))
        assert decided(Verdict(standing=standing), one.containers[0]) == 600000
    for _ in range(70):
        now += 1
        standing = life.step(at(one, 0.0, used=0.0, now=now))
    assert decided(Verdict(standing=standing), one.containers[0]) is None
    assert decided(Verdict(standing=standing), one.pod) is None


def test_a_daemon_that_stops_keeps_tokens_to_the_last_step(tmp_path: Path) -> None:
    one, now, slo = web(), 1000.0, burst(cfsQuotaBurstPeriodSeconds=60)
    path = str(tmp_path / "leases")
    life = Life(path, STRATEGY, now=now)
    for _ in range(13):
        now += 1
        life.step(at(one, 0.0, used=5.0, now=now, slo=slo))
    before = life.runner.kept_states
    life.end(now)
    assert Life(path, STRATEGY, now=now + 30).runner.kept_states == before
    bucket = state_of(before).containers[one.containers[0].id].bucket
    assert bucket == Bucket(3000.0 - 12 * 150.0, 12000.0, now)
    assert not Life(path, STRATEGY, now=5.0, boot="b2").runner.kept_states  # another boot


def state_of(states: Mapping[str, Any]) -> State:
    state = states[STRATEGY.name]
    assert isinstance(state, State)
    return state


_LIVES = st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 60)), min_size=8, max_size=25)


@given(_LIVES)
@settings(max_examples=40, deadline=None)
def test_a_daemon_that_crashes_again_and_again_hands_out_no_further_tokens(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, float]]
) -> None:
    """lives: steps, and seconds until the next start. The container uses 250 % all the time."""
    one, now, slo = web(), 1000.0, burst(cfsQuotaBurstPeriodSeconds=60)
    path = str(tmp_path_factory.mktemp("lives") / "leases")
    raised = 0
    for steps, gap_s in lives:
        life = Life(path, STRATEGY, now=now)
        for _ in range(steps):
            now += 1
            standing = life.step(at(one, used=5.0, now=now, slo=slo))
            raised += decided(Verdict(standing=standing), one.containers[0]) is not None
        now += gap_s
    # 3000 tokens last for 20 s, and 0.8 to the 5th takes the ceiling to the limit.
    assert raised <= 1 + 20 + 5


def test_tokens_outlast_a_minute_in_which_the_container_is_not_listed(tmp_path: Path) -> None:
    """At a restart a source of pods may be away."""
    one, now, slo = web(), 1000.0, burst(cfsQuotaBurstPeriodSeconds=60)
    path = str(tmp_path / "leases")
    life = Life(path, STRATEGY, now=now)
    for _ in range(40):
        now += 1
        life.step(at(one, used=5.0, now=now, slo=slo))
    life = Life(path, STRATEGY, now=now + 600)
    now += 600
    nothing = msgspec.structs.replace(at(one, slo=slo), pods=())
    for _ in range(59):
        now += 1
        assert life.step(msgspec.structs.replace(nothing, now=now)) == Standing()
    standing = life.step(at(one, used=5.0, now=now + 1, slo=slo))
    assert decided(Verdict(standing=standing), one.containers[0]) is None
    bucket = state_of(life.runner.kept_states).containers[one.containers[0].id].bucket
    assert bucket is not None and bucket.tokens < 0
    for _ in range(62):
        now += 1
        life.step(msgspec.structs.replace(nothing, now=now))
    assert not state_of(life.runner.kept_states).containers


# -- invariants -------------------------------------------------------------------------------

_STEPS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.floats(0, 1)),  # throttled
        st.one_of(st.none(), st.floats(0, 64)),  # use
        st.one_of(st.none(), st.floats(0, 20)),  # of the node
        st.integers(0, 3),  # which containers there are
    ),
    min_size=1,
    max_size=12,
)


@given(_STEPS, st.integers(0, 1000), st.integers(-1, 100), st.integers(10, 40_000))
@settings(max_examples=150, deadline=None)
def test_quotas_lie_between_limit_and_ceiling_and_nothing_grows(
    steps: list[tuple[float | None, float | None, float | None, int]],
    percent: int,
    period_s: int,
    limit_milli: int,
) -> None:
    slo = burst(cfsQuotaBurstPercent=percent, cfsQuotaBurstPeriodSeconds=period_s)
    pods = [web(*[limit_milli] * (1 + index), name=f"p{index}") for index in range(4)]
    state = STRATEGY.initial()
    for number, (throttled, used, node_cores, which) in enumerate(steps):
        one = pods[which]
        situation = at(
            one, throttled, used=used, node_cores=node_cores, slo=slo, now=1000.0 + number
        )
        before = state
        state, verdict = STRATEGY.step(before, situation)
        assert STRATEGY.step(before, situation) == (state, verdict)
        listed = {container.id for container in one.containers}
        absent = {key for key, held in state.containers.items() if held.absent_since is not None}
        assert set(state.containers) <= listed | absent
        assert not absent & listed
        bases = quotas = 0
        for container in one.containers:
            base = container.requested.cfs_quota_us
            assert base is not None
            quota = decided(verdict, container) or base
            assert base <= quota <= max(base, base * percent // 100)
            bases, quotas = bases + base, quotas + quota
        whole = decided(verdict, one.pod) or bases
        assert quotas <= whole + len(one.containers)  # a quota is rounded to whole µs
        assert whole <= max(bases, bases * percent // 100) + 1


@given(_STEPS)
@settings(max_examples=50, deadline=None)
def test_after_the_load_ends_every_quota_returns(
    steps: list[tuple[float | None, float | None, float | None, int]],
) -> None:
    one, now = web(2000, 500), 1000.0
    state = STRATEGY.initial()
    for throttled, used, node_cores, _ in steps:
        now += 1
        state, _ = STRATEGY.step(
            state, at(one, throttled, used=used, node_cores=node_cores, now=now)
        )
    for _ in range(72):
        now += 1
        state, verdict = STRATEGY.step(state, at(one, 0.0, used=0.0, node_cores=1.0, now=now))
    assert all(held.quota_us == held.base_us for held in state.containers.values())
    assert decided(verdict, one.pod) is None
