"""CPU eviction: upstream's worked examples field by field, and what is decided otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from apis.keys import BATCH_CPU, CPU, MID_CPU
from apis.qos import KubeQoS
from hooks.subject import Amounts, ContainerKind, ContainerSpec, Pod
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies.cpu_evict import STRATEGY, step
from koordlet.qos.strategy import PodOnNode, Shortage, Situation, Verdict
from tests.koordlet.qos.eviction.rounds import a_round, all_taken
from tests.koordlet.qos.eviction_making import (
    Measured,
    a_pod,
    a_situation,
    on_node,
    steady,
    used,
)

BE_SLO = {
    "cpuEvictBESatisfactionLowerPercent": 50,
    "cpuEvictBESatisfactionUpperPercent": 80,
    "cpuEvictTimeWindowSeconds": 60,
}


def verdict(situation: Situation) -> Verdict:
    return step(None, situation)[1]


def only(situation: Situation) -> Shortage:
    found = verdict(situation)
    assert found.faults == ()
    (short,) = found.shortages
    return short


def names(short: Shortage) -> list[str]:
    return [victim.pod.name for victim in short.victims]


def be(name: str, milli: int, priority: int | None = 5000, **fields: Any) -> Pod:
    return a_pod(
        name,
        qos="BE",
        priority=priority,
        kube_qos=KubeQoS.BESTEFFORT,
        requests={"batch_cpu_request_milli": milli},
        **fields,
    )


def be_samples(
    u: float = 15200, r: float = 40000, limit: float = 16000, count: int = 60
) -> dict[Series, tuple[float, ...]]:
    return {
        Series(Metric.BE_CPU_USED): steady(u, count),
        Series(Metric.BE_CPU_REQUEST): steady(r, count),
        Series(Metric.BE_CPU_LIMIT): steady(limit, count),
    }


PODS = (be("p3", 28000, 5500), be("p2", 8000), be("p1", 4000))
PODS_USED = used(Metric.POD_CPU, p1=3.9, p2=4.0, p3=7.3)


def satisfaction(**changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "pods": PODS,
        "samples": {**be_samples(), **PODS_USED},
        "slo": BE_SLO,
        "gates": ["BECPUEvict"],
        **changes,
    }
    return a_situation(**fields)


# --- satisfaction ------------------------------------------------------------------------------


def test_the_worked_example_of_satisfaction() -> None:
    short = only(satisfaction())
    assert short == Shortage(
        gate="BECPUEvict",
        resource="kubernetes.io/batch-cpu",
        of_requests=True,
        needed=16000,
        numbers=(
            "best-effort pods may use 16000 of 40000 requested milli-cores = 40.0 % <= 50 %, and"
            " use 15200 over 60 s: release 16000 requested milli-cores to reach 80 %"
        ),
        victims=short.victims,
        cool_down_s=20.0,
    )
    assert [(victim.pod.name, victim.releases) for victim in short.victims] == [
        ("p1", 4000),
        ("p2", 8000),
        ("p3", 28000),
    ]
    assert verdict(satisfaction()).summary == f"BECPUEvict: {short.numbers}"


@pytest.mark.parametrize(
    ("samples", "needed"),
    [
        (be_samples(u=14400), 16000),  # exactly 90 % used
        (be_samples(u=14399), None),  # they do not want more
        (be_samples(limit=20000, u=20000), 12000),  # exactly at the lower limit
        (be_samples(limit=20001, u=20001), None),  # satisfied
        (be_samples(limit=999, u=0), 31001),  # less than a core counts as starved
        (be_samples(limit=1000, u=0), None),
        (be_samples(limit=0), None),
        (be_samples(limit=-1), None),
        (be_samples(r=0), None),
        (be_samples(count=20), 16000),  # a third of the window
        (be_samples(count=19), None),
        ({}, None),
    ],
)
def test_when_satisfaction_is_too_low(
    samples: dict[Series, tuple[float, ...]], needed: int | None
) -> None:
    found = verdict(satisfaction(samples={**samples, **PODS_USED}))
    assert [short.needed for short in found.shortages] == ([] if needed is None else [needed])
    assert found.faults == ()


def test_the_newest_sample_must_agree_and_the_smaller_amount_counts() -> None:
    for last, needed in (((15000, 30000, 15000), [9000]), ((15200, 40000, 40000), [])):
        samples = {
            series: (*values[:-1], float(value))
            for (series, values), value in zip(be_samples().items(), last, strict=True)
        }
        found = verdict(satisfaction(samples={**samples, **PODS_USED}))
        assert [short.needed for short in found.shortages] == needed


@pytest.mark.parametrize(
    ("allocatable", "needed"),
    [
        ({BATCH_CPU: 16000}, [16000]),
        ({BATCH_CPU: 0}, [31999]),
        ({CPU: 32000}, []),
        ({BATCH_CPU: 30000}, []),
    ],
)
def test_satisfaction_by_allocatable(allocatable: dict[str, int], needed: list[int]) -> None:
    situation = satisfaction(
        samples={**be_samples(limit=40000), **PODS_USED},
        slo={**BE_SLO, "cpuEvictPolicy": "evictByAllocatable"},
        allocatable=allocatable,
    )
    assert [short.needed for short in verdict(situation).shortages] == needed


def test_sidecars_count_and_init_containers_do_not() -> None:
    milli = Amounts(batch_cpu_request_milli=500)
    pod = be(
        "p",
        1000,
        more=[
            ContainerSpec("side", ContainerKind.SIDECAR, milli),
            ContainerSpec("init", ContainerKind.INIT, milli),
        ],
    )
    assert [victim.releases for victim in only(satisfaction(pods=[pod])).victims] == [1500]


def test_without_a_specification_the_annotation_of_admission_counts() -> None:
    text = '{"containers": {"main": {"requests": {"kubernetes.io/batch-cpu": "700"}}}}'
    pod = be("p", 1, annotations={"node.koordinator.sh/extended-resource-spec": text})
    situation = satisfaction(pods=[replace(pod, specs=())])
    assert [victim.releases for victim in only(situation).victims] == [700]


@pytest.mark.parametrize("annotations", [{}, {"node.koordinator.sh/extended-resource-spec": "{"}])
def test_a_pod_whose_requests_are_not_known_is_no_victim(annotations: dict[str, str]) -> None:
    pod = replace(be("p", 1, annotations=annotations), specs=())
    assert only(satisfaction(pods=[pod])).victims == ()


@pytest.mark.parametrize(
    "missing", [Metric.BE_CPU_USED, Metric.BE_CPU_REQUEST, Metric.BE_CPU_LIMIT]
)
def test_satisfaction_needs_all_three_series(missing: Metric) -> None:
    samples = {
        series: values for series, values in be_samples().items() if series != (missing, "", "")
    }
    assert len(samples) == 2
    assert verdict(satisfaction(samples={**samples, **PODS_USED})) == Verdict()


def test_pods_that_release_nothing_have_ended_or_are_not_best_effort_are_no_victims() -> None:
    pods = [
        be("zero", 0),
        be("failed", 4000, phase="Failed"),
        a_pod("ls", qos="LS", requests={"batch_cpu_request_milli": 4000}),
        be("pending", 4000, phase="Pending"),
        be("kept", 4000, enabled=False),
        be("unlabelled", 4000),
    ]
    assert names(only(satisfaction(pods=pods))) == ["pending", "unlabelled"]


def test_a_pod_whose_deletion_has_begun_counts_and_is_no_victim() -> None:
    pods = [on_node(be("gone", 4000), terminating=True), be("stays", 8000)]
    short = only(satisfaction(pods=pods))
    assert names(short) == ["stays"]
    assert [(one.pod.name, one.releases) for one in short.others] == [("gone", 4000)]


def test_a_pod_that_kubelets_list_lacks_is_no_victim() -> None:
    """It may have been evicted, or protected, since the runtime was given its annotations."""
    pods = [msgspec.structs.replace(on_node(be("new", 4000)), unlisted=True), be("stays", 8000)]
    short = only(satisfaction(pods=pods))
    assert names(short) == ["stays"]


def test_eviction_priority_goes_before_priority_in_best_effort_evictions_too() -> None:
    pods = [be("low", 4000, 5000), be("chosen", 4000, 5900, eviction_priority=-1)]
    assert names(only(satisfaction(pods=pods))) == ["chosen", "low"]
    upstream = satisfaction(
        pods=[*pods, be("kept", 1, enabled=False)], compat=["EvictBEByPriorityAlone"]
    )
    assert names(only(upstream)) == ["kept", "low", "chosen"]


@pytest.mark.parametrize(
    ("policy", "evicted", "fault"),
    [
        (None, True, ""),
        (["BECPUEvict"], True, ""),
        (["BEMemoryEvict"], False, ""),
        ([], False, ""),
        (
            "[",
            False,
            'Pod default/p: metadata.annotations["koordinator.sh/eviction-policy"]',
        ),
        (
            '"BECPUEvict"',
            False,
            'Pod default/p: metadata.annotations["koordinator.sh/eviction-policy"]',
        ),
    ],
)
def test_the_pods_own_policy(policy: object, evicted: bool, fault: str) -> None:
    found = verdict(satisfaction(pods=[be("p", 4000, policy=policy), be("q", 4000)]))
    assert names(found.shortages[0]) == (["p", "q"] if evicted else ["q"])
    assert [str(error)[: len(fault)] for error in found.faults] == ([fault] if fault else [])


def test_a_bad_eviction_priority_counts_as_zero_and_is_a_fault() -> None:
    pods = [be("bad", 4000, eviction_priority="soon"), be("later", 4000, eviction_priority=1)]
    found = verdict(satisfaction(pods=pods))
    assert names(found.shortages[0]) == ["bad", "later"]
    assert [error.field for error in found.faults] == [
        'metadata.annotations["koordinator.sh/eviction-priority"]'
    ]


@pytest.mark.parametrize(
    ("slo", "field"),
    [
        ({}, "LowerPercent"),
        ({**BE_SLO, "cpuEvictBESatisfactionLowerPercent": 0}, "LowerPercent"),
        ({**BE_SLO, "cpuEvictBESatisfactionLowerPercent": 61}, "LowerPercent"),
        ({**BE_SLO, "cpuEvictBESatisfactionUpperPercent": 49}, "UpperPercent"),
        ({**BE_SLO, "cpuEvictBESatisfactionUpperPercent": 100}, "UpperPercent"),
    ],
)
def test_bad_satisfaction_limits_switch_the_gate_off_by_name(
    slo: dict[str, int], field: str
) -> None:
    found = verdict(satisfaction(slo=slo))
    assert found.shortages == ()
    assert [(error.obj, error.field) for error in found.faults] == [
        ("NodeSLO n1", f"spec.resourceUsedThresholdWithBE.cpuEvictBESatisfaction{field}")
    ]


@pytest.mark.parametrize(
    ("cores", "order"),
    [
        ({"a": 1.0, "b": 1.0, "c": 2.0}, ["c", "a", "b"]),  # a half, a quarter, a quarter
        ({"a": 1.0, "b": 3.0, "c": 2.0}, ["b", "c", "a"]),
        ({"a": 1.0, "c": 0.5}, ["a", "c", "b"]),  # without a sample it uses nothing
    ],
)
def test_of_equal_priority_the_one_that_uses_most_of_its_request_goes_first(
    cores: dict[str, float], order: list[str]
) -> None:
    samples = {**be_samples(), **used(Metric.POD_CPU, **cores)}
    pods = [be(name, 4000) for name in ("a", "b", "c")]
    assert names(only(satisfaction(pods=pods, samples=samples))) == order
    small = [be("a", 500), be("b", 4000), be("c", 8000)]
    assert names(only(satisfaction(pods=small, samples=samples)))[0] == "a"


@pytest.mark.parametrize(("lower", "upper"), [(1, 1), (1, 99), (60, 60), (60, 99)])
def test_the_smallest_and_largest_satisfaction_limits_are_taken(lower: int, upper: int) -> None:
    limits = {
        "cpuEvictBESatisfactionLowerPercent": lower,
        "cpuEvictBESatisfactionUpperPercent": upper,
    }
    assert verdict(satisfaction(slo={**BE_SLO, **limits})).faults == ()


def test_a_bad_field_of_one_gate_stops_no_other() -> None:
    found = verdict(satisfaction(gates=["BECPUEvict", "CPUEvict", "CPUAllocatableEvict"]))
    assert [short.gate for short in found.shortages] == ["BECPUEvict"]
    assert {error.field.rpartition(".")[2] for error in found.faults} == {
        "cpuEvictThresholdPercent",
        "allocatableEvictPriorityThreshold",
    }


def test_nothing_is_evicted_with_the_gate_or_the_nodeslo_off() -> None:
    assert verdict(satisfaction(gates=[])) == Verdict()
    why = "NodeSLO spec.resourceUsedThresholdWithBE.enable is false"
    off = Verdict(summary=f"nothing is evicted: {why}")
    assert verdict(satisfaction(slo={**BE_SLO, "enable": False})) == off


# --- use ---------------------------------------------------------------------------------------

USE_SLO = {
    "cpuEvictThresholdPercent": 90,
    "cpuEvictLowerPercent": 80,
    "evictEnabledPriorityThreshold": 7999,
}


def busy(cores: float = 29.3, **changes: Any) -> Situation:
    pods = [a_pod("a", priority=7000, enabled=True), a_pod("b", priority=5500, enabled=True)]
    fields: dict[str, Any] = {
        "pods": pods,
        "samples": {
            Series(Metric.NODE_CPU): steady(cores),
            **used(Metric.POD_CPU, a=2.5, b=1.25),
        },
        "slo": USE_SLO,
        "gates": ["CPUEvict"],
        **changes,
    }
    return a_situation(**fields)


def test_the_worked_example_of_use_in_whole_percents() -> None:
    short = only(busy(compat=["EvictionMeasuresCoarsely"]))
    assert (short.needed, short.resource, short.of_requests) == (3520, "cpu", False)
    assert "= 91.0 %" in short.numbers


def test_use_is_exact() -> None:
    short = only(busy())
    assert short.needed == 3700  # 32000 * (91.5625 - 80) %
    assert short.numbers == (
        "the node uses 29300 of 32000 milli-cores = 91.6 % over 1 s, at least 90 %:"
        " release 3700 milli-cores to reach 80 %"
    )
    assert [(victim.pod.name, victim.releases) for victim in short.victims] == [
        ("b", 1250),
        ("a", 2500),
    ]
    assert short.cool_down_s == 20.0


@pytest.mark.parametrize(("cores", "found"), [(28.8, 1), (28.79, 0), (0.0, 0)])
def test_the_threshold_of_use(cores: float, found: int) -> None:
    assert len(verdict(busy(cores)).shortages) == found


def test_a_lower_limit_that_is_not_set_is_two_below() -> None:
    slo = {"cpuEvictThresholdPercent": 90, "evictEnabledPriorityThreshold": 7999}
    assert only(busy(slo=slo)).needed == 1140  # 91.5625 - 88 %


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cpuEvictLowerPercent": 90}, "cpuEvictLowerPercent"),
        ({"evictEnabledPriorityThreshold": None}, "evictEnabledPriorityThreshold"),
        ({"cpuEvictThresholdPercent": None}, "cpuEvictThresholdPercent"),
    ],
)
def test_bad_limits_of_use(changes: dict[str, Any], field: str) -> None:
    slo = {key: value for key, value in {**USE_SLO, **changes}.items() if value is not None}
    found = verdict(busy(slo=slo))
    assert found.shortages == ()
    assert [error.field.rpartition(".")[2] for error in found.faults] == [field]


def test_the_order_and_the_candidates_of_use() -> None:
    def pod(name: str, **fields: Any) -> Pod:
        return a_pod(name, **{"priority": 5500, "enabled": True, **fields})

    sub = "koordinator.sh/priority"
    pods = [
        pod("plain"),
        pod("busier"),
        pod("sub", labels={sub: "10"}),
        pod("higher", priority=7000),
        pod("chosen", priority=7500, eviction_priority=-5),
        pod("spared", priority=3000, eviction_priority=5),
        pod("prod", priority=9000),
        pod("free-by-class", priority=None, labels={"koordinator.sh/priority-class": "koord-free"}),
        pod("not-enabled", enabled=None),
        pod("refused", policy=["MemoryEvict"]),
        pod("unmeasured"),
        pod("ended", phase="Succeeded"),
        pod("unclassified", priority=None),
    ]
    cores = {each.name: 1.0 for each in pods if each.name != "unmeasured"} | {"busier": 2.0}
    samples = {
        Series(Metric.NODE_CPU): steady(30),
        **{Series(Metric.POD_CPU, f"uid-{name}"): (value,) for name, value in cores.items()},
    }
    assert names(only(busy(pods=pods, samples=samples))) == [
        "chosen",
        "free-by-class",
        "sub",
        "busier",
        "plain",
        "higher",
        "spared",
    ]


def test_a_bad_sub_priority_counts_as_none_and_is_a_fault() -> None:
    bad = a_pod("a", priority=5500, enabled=True, labels={"koordinator.sh/priority": "high"})
    found = verdict(busy(pods=[bad]))
    assert names(found.shortages[0]) == ["a"]
    assert [error.field for error in found.faults] == ['metadata.labels["koordinator.sh/priority"]']


def test_a_node_whose_capacity_is_not_known_is_not_busy() -> None:
    assert verdict(busy(cpu_milli=0)) == Verdict()


def test_an_old_sample_is_not_the_newest() -> None:
    asked: list[float] = []

    class Watched(Measured):
        def latest(self, series: Series, *, within_s: float) -> float | None:
            asked.append(within_s)
            return super().latest(series, within_s=within_s)

    situation = busy()
    measurements = Watched({Series(Metric.NODE_CPU): steady(29.3)})
    step(None, replace(situation, measurements=measurements, interval_s=5.0))
    assert asked and set(asked) == {10.0}


# --- requests ----------------------------------------------------------------------------------

ALLOCATABLE_SLO = {
    "cpuAllocatableEvictThresholdPercent": 120,
    "cpuAllocatableEvictLowerPercent": 100,
    "allocatableEvictPriorityThreshold": 7999,
}


def requested(**changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "pods": [
            a_pod(
                f"b{index}",
                qos="BE",
                priority=5000 + index,
                enabled=True,
                requests={"batch_cpu_request_milli": milli},
            )
            for index, milli in enumerate((3000, 5000, 6000))
        ],
        "slo": ALLOCATABLE_SLO,
        "gates": ["CPUAllocatableEvict"],
        "allocatable": {BATCH_CPU: 10000, MID_CPU: 4000, CPU: 32000},
        **changes,
    }
    return a_situation(**fields)


def test_the_worked_example_of_allocatable() -> None:
    short = only(requested())
    assert (short.gate, short.resource, short.of_requests, short.needed) == (
        "CPUAllocatableEvict",
        "kubernetes.io/batch-cpu",
        True,
        4000,
    )
    assert names(short) == ["b0", "b1", "b2"]
    assert short.numbers == (
        "pods up to priority 7999 request 14000 kubernetes.io/batch-cpu of 10000 allocatable"
        " = 140.0 %, more than 120 %: release 4000 to reach 100 %"
    )


def test_a_batch_pod_does_not_go_for_mid_pressure() -> None:
    mid = a_pod("m", priority=7500, enabled=True, requests={"mid_cpu_request_milli": 5000})
    batch = a_pod(
        "b", qos="BE", priority=5500, enabled=True, requests={"batch_cpu_request_milli": 1000}
    )
    short = only(requested(pods=[batch, mid]))
    assert (short.resource, short.needed, names(short)) == ("kubernetes.io/mid-cpu", 1000, ["m"])


def test_only_pods_that_count_and_request_it_leave_a_resource() -> None:
    def gone(name: str, priority: int, milli: int) -> PodOnNode:
        amounts = {"batch_cpu_request_milli": milli}
        return on_node(a_pod(name, qos="BE", priority=priority, requests=amounts), terminating=True)

    labelled = {"koordinator.sh/priority-class": "koord-batch"}
    above = on_node(
        a_pod(
            "above",
            priority=9000,
            labels=labelled,
            requests={"batch_cpu_request_milli": 7},
        ),
        terminating=True,
    )
    pods = [gone("goes", 5000, 14000), gone("empty", 5000, 0), above]
    short = only(requested(pods=pods))
    assert [(one.pod.name, one.releases) for one in short.others] == [("goes", 14000)]
    assert (short.needed, short.victims) == (4000, ())


def test_plain_cpu_is_counted_in_milli_cores_and_can_be_released() -> None:
    free = a_pod("f", priority=3500, enabled=True, requests={"cpu_request_milli": 2500})
    short = only(requested(pods=[free], allocatable={CPU: 2000}))
    assert (short.resource, short.needed) == ("cpu", 500)
    assert [victim.releases for victim in short.victims] == [2500]


def test_a_resource_that_the_node_lacks_is_requested_too_much() -> None:
    short = only(requested(allocatable={CPU: 32000}))
    assert short.needed == 14000


def test_without_a_node_object_nothing_is_too_much() -> None:
    assert verdict(requested(allocatable={})) == Verdict()


def test_exactly_the_threshold_is_not_too_much() -> None:
    pods = [
        a_pod("b", qos="BE", priority=5000, enabled=True, requests={"batch_cpu_request_milli": m})
        for m in (12000,)
    ]
    assert verdict(requested(pods=pods)).shortages == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"allocatableEvictPriorityThreshold": 8000}, "allocatableEvictPriorityThreshold"),
        ({"allocatableEvictPriorityThreshold": None}, "allocatableEvictPriorityThreshold"),
        ({"cpuAllocatableEvictLowerPercent": 120}, "cpuAllocatableEvictLowerPercent"),
        ({"cpuAllocatableEvictLowerPercent": None}, "cpuAllocatableEvictLowerPercent"),
        ({"cpuAllocatableEvictThresholdPercent": None}, "cpuAllocatableEvictThresholdPercent"),
    ],
)
def test_bad_limits_of_allocatable(changes: dict[str, Any], field: str) -> None:
    slo = {key: value for key, value in {**ALLOCATABLE_SLO, **changes}.items() if value is not None}
    found = verdict(requested(slo=slo))
    assert found.shortages == ()
    assert [error.field.rpartition(".")[2] for error in found.faults] == [field]


# --- several gates -----------------------------------------------------------------------------


def test_the_victim_of_one_gate_counts_for_the_others() -> None:
    """A best-effort pod that did not agree to CPUEvict releases CPU when BECPUEvict ends it."""
    agreed = a_pod("agreed", priority=7000, enabled=True)
    samples = {
        **be_samples(r=20000, limit=8000, u=8000),
        Series(Metric.NODE_CPU): steady(29.3),
        **used(Metric.POD_CPU, hog=6.0, agreed=5.0),
    }
    situation = a_situation(
        [be("hog", 20000), agreed],
        samples,
        slo={**BE_SLO, **USE_SLO},
        gates=["BECPUEvict", "CPUEvict"],
    )
    found = verdict(situation).shortages
    assert [(short.gate, names(short)) for short in found] == [
        ("BECPUEvict", ["hog"]),
        ("CPUEvict", ["agreed"]),
    ]
    assert [(one.pod.name, one.releases) for one in found[1].others] == [("hog", 6000)]
    assert all_taken(a_round(*found)) == ["hog"]
    idle = a_situation(
        [be("hog", 20000), agreed],
        {**samples, **used(Metric.POD_CPU, hog=1.0)},
        slo={**BE_SLO, **USE_SLO},
        gates=["BECPUEvict", "CPUEvict"],
    )
    assert all_taken(a_round(*verdict(idle).shortages)) == ["hog", "agreed"]


# --- properties --------------------------------------------------------------------------------

_AMOUNT = st.floats(min_value=-1e6, max_value=1e9, allow_nan=False)


@given(_AMOUNT, _AMOUNT, _AMOUNT, _AMOUNT, st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_no_amount_is_absurd(
    u: float, r: float, limit: float, cores: float, milli: int, allocatable: int
) -> None:
    situation = a_situation(
        [be("p", milli, enabled=True), be("q", 100, enabled=True)],
        {
            **be_samples(u, r, limit),
            Series(Metric.NODE_CPU): steady(cores),
            **used(Metric.POD_CPU, p=cores, q=u),
        },
        slo={**BE_SLO, **USE_SLO, **ALLOCATABLE_SLO},
        gates=STRATEGY.gates,
        allocatable={BATCH_CPU: allocatable},
    )
    for short in verdict(situation).shortages:
        assert short.needed > 0
        assert all(victim.releases > 0 for victim in (*short.victims, *short.others))
        if short.gate == "BECPUEvict":
            assert short.needed <= r
        elif short.gate == "CPUAllocatableEvict":
            assert short.needed <= milli + 100
