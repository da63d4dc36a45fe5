"""Memory QoS: formulas, merge rules, and the example of docs/facts/policies.md."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.keys import ANNOTATION_MEMORY_QOS
from apis.nodeslo import MemoryQOS
from apis.qos import KubeQoS
from hooks.compat import (
    MEMORY_QOS_WRITES_ZEROS,
    OOM_GROUP_ON_QOS_DIRECTORIES,
    POD_SUMS_OF_REGULAR_CONTAINERS,
)
from hooks.facts import KernelFacts
from hooks.policies.memory_qos import POLICY, protection, throttling
from hooks.policy import OffBecause
from hooks.subject import Amounts, ContainerKind
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import (
    EVERYTHING,
    GIB,
    MAINLINE,
    a_container,
    a_directory,
    a_pod,
    a_pod_subject,
    batch,
    be_pod,
    classes,
    decide,
    engine,
    node,
    only_fault,
    plain,
    slo,
    values,
)

G, BU, BE = KubeQoS.GUARANTEED, KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT
KERNEL = KernelFacts(supported=MAINLINE)
PERCENTS = {"minLimitPercent": 50, "lowLimitPercent": 80, "throttlingPercent": 60}
EXAMPLE = classes("memoryQOS", ls=PERCENTS)
A = plain("a", memory=(GIB, 2 * GIB))
B = plain("b", memory=(GIB, 4 * GIB))


def _node(slo: Any = EXAMPLE, **kwargs: Any) -> Any:
    return node(slo=slo, kernel=kwargs.pop("kernel", KERNEL), **kwargs)


def _memory(low: int, lowest: int, high: int | None = None) -> dict[str, int]:
    made = {"memory.min": lowest, "memory.low": low, "memory.high": high}
    return {name: value for name, value in made.items() if value}


# --- the worked example ------------------------------------------------------------------------

POD = a_pod("LS", specs=[A, B])


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (a_container(POD, "a"), _memory(858993459, 536870912, 1717985280)),
        (a_container(POD, "b"), _memory(858993459, 536870912, 3006476288)),
        (a_pod_subject(POD), _memory(1717986918, 1073741824)),
        (a_directory(BU, POD), _memory(1717986918, 1073741824)),
        (a_directory(G, POD), _memory(1717986918, 1073741824)),
        (a_directory(BE), {}),
    ],
)
def test_the_worked_example(subject: Any, expected: dict[str, int]) -> None:
    assert values(decide(subject, _node(), POLICY)) == expected


def test_the_worked_example_with_policy_auto() -> None:
    annotation = {ANNOTATION_MEMORY_QOS: {"policy": "auto", "throttlingPercent": 80}}
    pod = a_pod("LS", specs=[A, B], annotations=annotation)
    kernel = KernelFacts(supported=EVERYTHING)
    decision = decide(a_container(pod, "a"), _node(kernel=kernel), POLICY)
    assert values(decision) == {
        "memory.high": 1932734464,
        "memory.wmark_ratio": 95,
        "memory.wmark_scale_factor": 20,
        "memory.wmark_min_adj": -25,
        "memory.priority": 0,
        "memory.use_priority_oom": 0,
    }
    assert values(decide(a_pod_subject(pod), _node(), POLICY)) == {}


# --- which setting holds -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo", "annotation", "min_percent", "low_percent"),
    [
        (EXAMPLE, None, 50, 80),
        (EXAMPLE, {}, 50, 80),
        (EXAMPLE, {"policy": ""}, 50, 80),
        (EXAMPLE, {"policy": "default"}, 50, 80),
        (EXAMPLE, {"policy": "default", "minLimitPercent": 10}, 10, 80),
        (EXAMPLE, {"lowLimitPercent": 0}, 50, 0),
        (EXAMPLE, {"policy": "none"}, 0, 0),
        (EXAMPLE, {"policy": "none", "minLimitPercent": 10}, 0, 0),
        (EXAMPLE, {"policy": "auto"}, 0, 0),
        (EXAMPLE, {"policy": "auto", "minLimitPercent": 10}, 10, 0),
        # a class that is switched off does not keep a pod from asking for itself
        (None, None, 0, 0),
        (None, {"minLimitPercent": 10}, 10, 0),
        (None, {"policy": "auto", "lowLimitPercent": 100}, 0, 100),
    ],
)
def test_class_and_annotation_make_one_setting(
    slo: Any, annotation: Any, min_percent: int, low_percent: int
) -> None:
    annotations = {} if annotation is None else {ANNOTATION_MEMORY_QOS: annotation}
    pod = a_pod("LS", specs=[A], annotations=annotations)
    decision = decide(a_container(pod, "a"), _node(slo), POLICY)
    assert decision.value(Resource.MEMORY_MIN) == (GIB * min_percent // 100 or None)
    assert decision.value(Resource.MEMORY_LOW) == (GIB * low_percent // 100 or None)


@pytest.mark.parametrize(
    ("qos", "kube_qos", "percent"),
    [
        ("LSE", G, 10),
        ("LSR", G, 10),
        ("LS", BU, 20),
        ("SYSTEM", G, 40),
        ("", G, 10),
        ("", BU, 20),
    ],
)
def test_a_pod_belongs_to_one_class(qos: str, kube_qos: KubeQoS, percent: int) -> None:
    slo = classes(
        "memoryQOS",
        lsr={"minLimitPercent": 10},
        ls={"minLimitPercent": 20},
        be={"minLimitPercent": 30},
        system={"minLimitPercent": 40},
    )
    pod = a_pod(qos, kube_qos, specs=[A])
    decision = decide(a_container(pod, "a"), _node(slo), POLICY)
    assert decision.value(Resource.MEMORY_MIN) == GIB * percent // 100


def test_best_effort_pods_count_batch_memory() -> None:
    slo = classes("memoryQOS", be={"minLimitPercent": 50, "throttlingPercent": 50})
    pod = be_pod(specs=[batch("a", memory=(GIB, 3 * GIB))])
    assert values(decide(a_container(pod, "a"), _node(slo), POLICY)) == _memory(
        0, GIB // 2, 2 * GIB
    )
    unlabelled = a_pod("", BE, specs=[batch("a", memory=(GIB, 3 * GIB))])
    assert values(decide(a_container(unlabelled, "a"), _node(slo), POLICY)) == _memory(
        0, GIB // 2, 2 * GIB
    )
    assert values(decide(a_pod_subject(unlabelled), _node(slo), POLICY)) == _memory(0, GIB // 2)
    latency_sensitive = a_pod("LS", BE, specs=[batch("a", memory=(GIB, 3 * GIB))])
    inputs = _node(classes("memoryQOS", ls=PERCENTS))
    assert values(decide(a_container(latency_sensitive, "a"), inputs, POLICY)) == {}


def test_containers_that_share_their_pods_limit_are_throttled_together() -> None:
    """Each container by itself would be throttled at 4.8 GiB; both together would reach 8 first."""
    whole = Amounts(memory_request_bytes=2 * GIB, memory_limit_bytes=8 * GIB)
    overhead = Amounts(memory_request_bytes=GIB)
    pod = a_pod("LS", specs=[plain("a"), plain("b")], resources=whole)
    wanted = (2 * GIB + 6 * GIB * 60 // 100) // 4096 * 4096
    assert decide(a_pod_subject(pod), _node(), POLICY).value(Resource.MEMORY_HIGH) == wanted
    pod = a_pod("LS", specs=[plain("a"), plain("b")], resources=whole, overhead=overhead)
    high = decide(a_pod_subject(pod), _node(), POLICY).value(Resource.MEMORY_HIGH)
    assert high == wanted + GIB
    off = a_pod(
        "LS",
        specs=[plain("a")],
        resources=whole,
        annotations={ANNOTATION_MEMORY_QOS: {"throttlingPercent": 0}},
    )
    assert decide(a_pod_subject(off), _node(), POLICY).value(Resource.MEMORY_HIGH) is None


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "allocatable", "high"),
    [
        ((GIB, 2 * GIB), None, 1717985280),
        ((GIB, None), 11 * GIB, 7 * GIB),
        ((GIB, None), None, None),
        ((None, None), 10 * GIB, 6 * GIB),
        ((None, GIB), None, 644243456),
        ((GIB, GIB), None, GIB),
    ],
)
def test_throttling_lies_between_request_and_limit(
    memory: Any, allocatable: int | None, high: int | None
) -> None:
    pod = a_pod("LS", specs=[plain("a", memory=memory)])
    inputs = _node(allocatable_memory_bytes=allocatable)
    assert decide(a_container(pod, "a"), inputs, POLICY).value(Resource.MEMORY_HIGH) == high


@pytest.mark.parametrize(
    ("min_percent", "low_percent", "expected"),
    [(50, 80, (50, 80)), (80, 50, (80, 80)), (80, 0, (80, 0)), (0, 50, (0, 50)), (0, 0, (0, 0))],
)
def test_low_is_never_below_min_unless_it_is_off(
    min_percent: int, low_percent: int, expected: tuple[int, int]
) -> None:
    qos = MemoryQOS(min_limit_percent=min_percent, low_limit_percent=low_percent)
    assert protection(qos, 100) == expected


@given(
    st.integers(0, 1 << 45),
    st.integers(0, 1 << 45),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(1, 100),
    st.sampled_from([4096, 65536]),
)
@settings(max_examples=200, deadline=None)
def test_min_low_and_high_are_in_order(
    request_bytes: int, above: int, lowest: int, low: int, throttle: int, page: int
) -> None:
    qos = MemoryQOS(min_limit_percent=lowest, low_limit_percent=low, throttling_percent=throttle)
    limit = request_bytes + above
    min_bytes, low_bytes = protection(qos, request_bytes)
    high = throttling(
        qos, request_bytes=request_bytes, limit_bytes=limit, min_bytes=min_bytes, page_bytes=page
    )
    assert 0 <= min_bytes <= request_bytes
    assert low_bytes == 0 or min_bytes <= low_bytes <= request_bytes
    assert high == 0 or min_bytes <= high <= max(limit, min_bytes)


def test_sidecars_init_containers_and_overhead_count() -> None:
    specs = [
        A,
        plain("side", memory=(GIB, GIB), kind=ContainerKind.SIDECAR),
        plain("init", memory=(GIB // 2, GIB), kind=ContainerKind.INIT),
    ]
    pod = a_pod("LS", specs=specs, overhead=Amounts(memory_request_bytes=GIB))
    assert values(decide(a_pod_subject(pod), _node(), POLICY)) == _memory(
        3 * GIB * 80 // 100, 3 * GIB // 2
    )
    assert decide(a_container(pod, "init"), _node(), POLICY).value(Resource.MEMORY_MIN) == GIB // 4
    compatible = _node(compat={POD_SUMS_OF_REGULAR_CONTAINERS})
    assert values(decide(a_pod_subject(pod), compatible, POLICY)) == _memory(
        GIB * 80 // 100, GIB // 2
    )


def test_a_pods_own_memory_replaces_the_sum_and_a_missing_limit() -> None:
    whole = Amounts(memory_request_bytes=4 * GIB, memory_limit_bytes=8 * GIB)
    pod = a_pod("LS", specs=[A, plain("open")], resources=whole)
    assert values(decide(a_pod_subject(pod), _node(), POLICY)) == _memory(
        4 * GIB * 80 // 100, 2 * GIB, (4 * GIB + 4 * GIB * 60 // 100) // 4096 * 4096
    )
    assert values(decide(a_container(pod, "a"), _node(), POLICY)) == _memory(
        858993459, 536870912, 1717985280
    )
    inputs = _node(allocatable_memory_bytes=100 * GIB)
    high = decide(a_container(pod, "open"), inputs, POLICY).value(Resource.MEMORY_HIGH)
    assert high == 8 * GIB * 60 // 100 // 4096 * 4096
    compatible = _node(compat={POD_SUMS_OF_REGULAR_CONTAINERS})
    assert values(decide(a_pod_subject(pod), compatible, POLICY)) == _memory(858993459, GIB // 2)


def test_a_pod_of_unknown_specification_gets_no_protection() -> None:
    pod = a_pod("LS")
    assert values(decide(a_pod_subject(pod), _node(), POLICY)) == {}
    assert values(decide(a_container(pod, "a"), _node(), POLICY)) == {}


def test_directories_promise_what_their_pods_are_promised_and_no_more_than_the_node_has() -> None:
    pods = [a_pod("LS", name=f"p{index}", specs=[A]) for index in range(3)]
    asked_for_none = a_pod(
        "LS", name="none", specs=[A], annotations={ANNOTATION_MEMORY_QOS: {"policy": "none"}}
    )
    directory = a_directory(BU, *pods, asked_for_none)
    whole = decide(directory, _node(allocatable_memory_bytes=100 * GIB), POLICY)
    assert values(whole) == _memory(3 * (GIB * 80 // 100), 3 * GIB // 2)
    small = decide(directory, _node(allocatable_memory_bytes=GIB), POLICY)
    assert values(small) == _memory(GIB, GIB)
    assert "allocatable" in small.outcomes[Resource.MEMORY_MIN, ""].degraded


@pytest.mark.parametrize(
    ("slo", "annotation", "zeros", "expected"),
    [
        (classes("memoryQOS", ls={}), None, False, None),
        (classes("memoryQOS", ls={"oomKillGroup": 1}), None, False, 1),
        (classes("memoryQOS", ls={"oomKillGroup": 1}), {"oomKillGroup": 0}, False, 0),
        (None, {"oomKillGroup": 0}, False, 0),
        (None, {"oomKillGroup": 1}, False, 1),
        (classes("memoryQOS", ls={}), None, True, 0),
    ],
)
def test_a_default_does_not_undo_kubelets_oom_group(
    slo: Any, annotation: Any, zeros: bool, expected: int | None
) -> None:
    annotations = {} if annotation is None else {ANNOTATION_MEMORY_QOS: annotation}
    pod = a_pod("LS", specs=[A], annotations=annotations)
    inputs = _node(slo, compat={MEMORY_QOS_WRITES_ZEROS} if zeros else ())
    assert (
        decide(a_container(pod, "a"), inputs, POLICY).value(Resource.MEMORY_OOM_GROUP) == expected
    )


def test_the_compat_switch_writes_zeros() -> None:
    inputs = _node(classes("memoryQOS", ls={}), compat={MEMORY_QOS_WRITES_ZEROS})
    pod = a_pod("LS", specs=[A])
    assert values(decide(a_container(pod, "a"), inputs, POLICY)) == {
        "memory.min": 0,
        "memory.low": 0,
        "memory.high": UNLIMITED,
        "memory.oom.group": 0,
    }


def test_the_compat_switch_writes_zeros_for_a_class_that_is_off() -> None:
    """As upstream does for LSR, LS and BE; of a SYSTEM class that is off nothing counts here."""
    off = slo({"resourceQOSStrategy": {"systemClass": {"memoryQOS": {"minLimitPercent": 40}}}})
    kernel = KernelFacts(supported=EVERYTHING)
    for pod in (a_pod("LS", specs=[A]), a_pod("SYSTEM", specs=[A])):
        assert values(decide(a_container(pod, "a"), _node(off), POLICY)) == {}
        zeros = _node(off, kernel=kernel, compat={MEMORY_QOS_WRITES_ZEROS})
        assert values(decide(a_container(pod, "a"), zeros, POLICY)) == {
            "memory.min": 0,
            "memory.low": 0,
            "memory.high": UNLIMITED,
            "memory.wmark_ratio": 0,
            "memory.wmark_scale_factor": 50,
            "memory.wmark_min_adj": 0,
            "memory.priority": 0,
            "memory.use_priority_oom": 0,
            "memory.oom.group": 0,
        }


@pytest.mark.parametrize(
    ("kube_qos", "upstream"), [(G, 1), (BU, None), (BE, 1)], ids=lambda value: str(value)
)
def test_a_node_out_of_memory_does_not_lose_all_pods_of_a_class_at_once(
    kube_qos: KubeQoS, upstream: int | None
) -> None:
    """The kernel ends all below the topmost group that has memory.oom.group around its victim."""
    slo = classes("memoryQOS", lsr={"oomKillGroup": 1}, be={"oomKillGroup": 1})
    directory = a_directory(kube_qos)
    assert values(decide(directory, _node(slo), POLICY)) == {}
    compatible = _node(slo, compat={OOM_GROUP_ON_QOS_DIRECTORIES})
    assert decide(directory, compatible, POLICY).value(Resource.MEMORY_OOM_GROUP) == upstream


def test_anolis_files_carry_watermarks_and_oom_order() -> None:
    kernel = KernelFacts(supported=EVERYTHING)
    slo = classes("memoryQOS", be={"priorityEnable": 1, "priority": 3, "oomKillGroup": 1})
    order = {"memory.priority": 3, "memory.use_priority_oom": 1, "memory.oom.group": 1}
    reclaim = {
        "memory.wmark_ratio": 95,
        "memory.wmark_scale_factor": 20,
        "memory.wmark_min_adj": 50,
    }
    pod = be_pod()
    for subject in (a_pod_subject(pod), a_container(pod)):
        assert values(decide(subject, _node(slo, kernel=kernel), POLICY)) == reclaim | order
    directory = decide(a_directory(BE, pod), _node(slo, kernel=kernel), POLICY)
    assert values(directory) == {name: order[name] for name in list(order)[:2]}
    state = engine(_node(slo), POLICY).state(POLICY.name)
    assert state is not None
    assert "memory.use_priority_oom, memory.wmark_ratio" in POLICY.degraded(state.rule)


@pytest.mark.parametrize(
    ("settings_", "size", "enable", "sync"),
    [
        ({"pageCacheLimitPercent": 50}, 3 * GIB, 1, 0),
        ({"pageCacheLimitPercent": 50, "pageCacheReclaimSync": True}, 3 * GIB, 1, 1),
        ({"pageCacheLimitSize": GIB}, GIB, 1, 0),
        ({"pageCacheLimitSize": GIB, "pageCacheLimitPercent": 50}, GIB, 1, 0),
        ({"pageCacheLimitSize": 99 * GIB}, 6 * GIB, 1, 0),
        ({"pageCacheLimitSize": GIB, "pageCacheEnable": False}, GIB, 0, 0),
        ({"pageCacheLimitPercent": 0}, 0, 0, None),
        ({"pageCacheEnable": True}, 0, 1, None),
    ],
)
def test_the_page_cache_limit_of_a_pod(
    settings_: dict[str, Any], size: int, enable: int, sync: int | None
) -> None:
    inputs = _node(classes("memoryQOS", ls=settings_), kernel=KernelFacts(supported=EVERYTHING))
    decision = decide(a_pod_subject(a_pod("LS", specs=[A, B])), inputs, POLICY)
    assert decision.value(Resource.MEMORY_PAGECACHE_LIMIT_SIZE) == size
    assert decision.value(Resource.MEMORY_PAGECACHE_LIMIT_ENABLE) == enable
    assert decision.value(Resource.MEMORY_PAGECACHE_LIMIT_SYNC) == sync


def test_a_percentage_needs_a_limit_and_a_size_does_not() -> None:
    kernel = KernelFacts(supported=EVERYTHING)
    pod = a_pod("LS", specs=[A, plain("open")])
    percent = _node(classes("memoryQOS", ls={"pageCacheLimitPercent": 50}), kernel=kernel)
    assert (
        decide(a_pod_subject(pod), percent, POLICY).value(Resource.MEMORY_PAGECACHE_LIMIT_SIZE) == 0
    )
    size = _node(classes("memoryQOS", ls={"pageCacheLimitSize": GIB}), kernel=kernel)
    assert (
        decide(a_pod_subject(pod), size, POLICY).value(Resource.MEMORY_PAGECACHE_LIMIT_SIZE) == GIB
    )


@pytest.mark.parametrize(
    "annotation",
    [
        "{",
        {"policy": "sometimes"},
        {"minLimitPercent": -1},
        {"minLimitPercent": "50"},
        {"wmarkRatio": 101},
        {"wmarkScalePermill": 0},
        {"wmarkMinAdj": 51},
        {"priority": 13},
        {"priorityEnable": 2},
        {"oomKillGroup": 2},
        {"pageCacheEnable": 1},
        {"pageCacheLimitPercent": 101},
        {"pageCacheLimitSize": -1},
        {"pageCacheReclaimSync": "yes"},
    ],
)
def test_a_bad_annotation_is_named_and_the_class_still_counts(annotation: Any) -> None:
    pod = a_pod("LS", specs=[A, B], annotations={ANNOTATION_MEMORY_QOS: annotation})
    field = next(iter(annotation)) if isinstance(annotation, dict) else ""
    for subject, same in (
        (a_container(pod, "a"), a_container(POD, "a")),
        (a_pod_subject(pod), a_pod_subject(POD)),
    ):
        decision = decide(subject, _node(), POLICY)
        assert values(decision) == values(decide(same, _node(), POLICY)) != {}
        message = only_fault(decision)
        assert "Pod default/web" in message and ANNOTATION_MEMORY_QOS in message
        assert field in message
    directory = decide(a_directory(BU, pod), _node(), POLICY)
    assert values(directory) == values(decide(a_directory(BU, POD), _node(), POLICY))
    assert directory.faults == ()


def test_sources_name_the_field_of_each_value() -> None:
    pod = a_pod("LS", specs=[A], annotations={ANNOTATION_MEMORY_QOS: {"minLimitPercent": 10}})
    outcomes = decide(a_container(pod, "a"), _node(), POLICY).outcomes
    assert outcomes[Resource.MEMORY_MIN, ""].winner.source == (
        f"annotation {ANNOTATION_MEMORY_QOS}.minLimitPercent"
    )
    assert outcomes[Resource.MEMORY_LOW, ""].winner.source == (
        "NodeSLO spec.resourceQOSStrategy.lsClass.memoryQOS.lowLimitPercent"
    )


def test_a_kernel_without_any_of_the_files_has_the_policy_off() -> None:
    state = engine(_node(kernel=KernelFacts()), POLICY).state(POLICY.name)
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.UNSUPPORTED
