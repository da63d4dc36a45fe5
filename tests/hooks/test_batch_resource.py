"""Batch resources of best-effort pods, with the example of docs/facts/policies.md."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import ANNOTATION_CPU_NORMALIZATION_RATIO, ANNOTATION_EXTENDED_RESOURCE_SPEC
from apis.qos import KubeQoS
from hooks.claim import Op
from hooks.compat import POD_SUMS_OF_REGULAR_CONTAINERS
from hooks.policies import cpuset_allocator
from hooks.policies.batch_resource import POLICY
from hooks.subject import Amounts, ContainerKind
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import (
    GIB,
    a_container,
    a_pod,
    a_pod_subject,
    batch,
    be_pod,
    decide,
    engine,
    node,
    only_fault,
    slo,
    values,
)

A = batch("a", cpu=(1000, 2000), memory=(GIB, GIB))
B = batch("b", cpu=(500, 1500), memory=(GIB, 2 * GIB))
ANNOTATION: dict[str, Any] = {
    "containers": {
        "a": {
            "requests": {"kubernetes.io/batch-cpu": "1000", "kubernetes.io/batch-memory": "1Gi"},
            "limits": {"kubernetes.io/batch-cpu": "2k", "kubernetes.io/batch-memory": "1Gi"},
        },
        "b": {
            "requests": {"kubernetes.io/batch-cpu": 500},
            "limits": {"kubernetes.io/batch-cpu": "1500", "kubernetes.io/batch-memory": "2Gi"},
        },
    }
}
RATIO = {ANNOTATION_CPU_NORMALIZATION_RATIO: "1.20"}


def _values(shares: int, quota_us: int, memory_bytes: int) -> dict[str, int]:
    return {
        "cpu.shares": shares,
        "cpu.cfs_quota_us": quota_us,
        "memory.limit_in_bytes": memory_bytes,
    }


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(be_pod(specs=[A, B]), id="specification"),
        pytest.param(
            be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: ANNOTATION}), id="annotation"
        ),
        pytest.param(
            be_pod(specs=[A, B], annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: "{bad"}),
            id="specification-before-annotation",
        ),
    ],
)
def test_the_worked_example(pod: Any) -> None:
    inputs = node(annotations=RATIO)
    assert values(decide(a_pod_subject(pod), inputs, POLICY)) == _values(1536, 291667, 3 * GIB)
    assert values(decide(a_container(pod, "a"), inputs, POLICY)) == _values(1024, 166667, GIB)
    assert values(decide(a_container(pod, "b"), inputs, POLICY)) == _values(512, 125000, 2 * GIB)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (batch("a", cpu=(1000, 1000), memory=(1, GIB)), (1024, 100000, GIB)),
        (batch("a", cpu=(1000, None)), (1024, UNLIMITED, UNLIMITED)),
        (batch("a", cpu=(None, 1000)), (2, 100000, UNLIMITED)),
        (batch("a", cpu=(0, 0), memory=(0, 0)), (2, UNLIMITED, UNLIMITED)),
        (batch("a", cpu=(-5, -5), memory=(None, -1)), (2, UNLIMITED, UNLIMITED)),
        (batch("a", cpu=(1, 1)), (2, 1000, UNLIMITED)),
        (batch("a", cpu=(999999999, 10)), (262144, 1000, UNLIMITED)),
    ],
)
def test_a_single_container_and_its_pod_have_the_same_values(
    spec: Any, expected: tuple[int, int, int]
) -> None:
    subject = be_pod(specs=[spec])
    assert values(decide(a_container(subject, "a"), node(), POLICY)) == _values(*expected)
    assert values(decide(a_pod_subject(subject), node(), POLICY)) == _values(*expected)


@pytest.mark.parametrize(
    ("specs", "overhead", "right", "upstream"),
    [
        pytest.param(
            [A, batch("side", cpu=(100, 200), memory=(GIB, GIB), kind=ContainerKind.SIDECAR)],
            Amounts(),
            (1126, 220000, 2 * GIB),
            (1024, 200000, GIB),
            id="sidecar",
        ),
        pytest.param(
            [A, batch("init", cpu=(3000, 4000), memory=(GIB, GIB), kind=ContainerKind.INIT)],
            Amounts(),
            (3072, 400000, GIB),
            (1024, 200000, GIB),
            id="init",
        ),
        pytest.param(
            [A, batch("init", kind=ContainerKind.INIT)],
            Amounts(),
            (1024, UNLIMITED, UNLIMITED),
            (1024, 200000, GIB),
            id="unlimited-init",
        ),
        pytest.param(
            [A],
            Amounts(batch_cpu_request_milli=250, batch_memory_request_bytes=GIB),
            (1280, 225000, 2 * GIB),
            (1024, 200000, GIB),
            id="overhead",
        ),
        pytest.param(
            [A],
            Amounts(cpu_request_milli=250, memory_request_bytes=GIB),
            (1280, 225000, 2 * GIB),
            (1024, 200000, GIB),
            id="plain-overhead",
        ),
        pytest.param(
            [A, batch("b", cpu=(500, None))],
            Amounts(),
            (1536, UNLIMITED, UNLIMITED),
            (1536, UNLIMITED, UNLIMITED),
            id="one-without-limits",
        ),
    ],
)
def test_pod_sums_are_right_by_default_and_upstreams_by_switch(
    specs: Any, overhead: Amounts, right: tuple[int, int, int], upstream: tuple[int, int, int]
) -> None:
    subject = a_pod_subject(be_pod(specs=specs, overhead=overhead))
    assert values(decide(subject, node(), POLICY)) == _values(*right)
    compatible = node(compat={POD_SUMS_OF_REGULAR_CONTAINERS})
    assert values(decide(subject, compatible, POLICY)) == _values(*upstream)


def test_sums_from_the_annotation_are_degraded() -> None:
    pod = be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: ANNOTATION})
    decision = decide(a_pod_subject(pod), node(), POLICY)
    assert "init containers" in decision.outcomes[Resource.CPU_SHARES, ""].degraded
    whole = decide(a_pod_subject(be_pod(specs=[A])), node(), POLICY)
    assert whole.outcomes[Resource.CPU_SHARES, ""].degraded == ""


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(a_pod("LS", specs=[A]), id="LS"),
        pytest.param(a_pod("", KubeQoS.BESTEFFORT, specs=[A]), id="unlabelled"),
        pytest.param(be_pod(), id="nothing-known"),
        pytest.param(be_pod(specs=[batch("a")]), id="no-batch-resources"),
        pytest.param(be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: {}}), id="empty"),
        pytest.param(be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: ""}), id="blank"),
    ],
)
def test_other_pods_keep_what_they_have(pod: Any) -> None:
    for subject in (a_pod_subject(pod), a_container(pod, "a")):
        assert values(decide(subject, node(), POLICY)) == {}


def test_a_container_without_batch_resources_keeps_what_it_has() -> None:
    for pod in (
        be_pod(specs=[A, batch("other")]),
        be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: ANNOTATION}),
    ):
        assert values(decide(a_container(pod, "other"), node(), POLICY)) == {}


def test_old_resource_names_are_read_and_the_current_name_wins() -> None:
    requests = {"koordinator.sh/batch-cpu": "700", "koordinator.sh/batch-memory": "1Gi"}
    limits = {"koordinator.sh/batch-cpu": "700", "kubernetes.io/batch-cpu": "900"}
    spec = {"containers": {"main": {"requests": requests, "limits": limits}}}
    pod = be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: spec})
    decision = decide(a_container(pod), node(), POLICY)
    assert values(decision) == _values(716, 90000, UNLIMITED)


def test_a_policy_of_suppression_alone_lifts_no_quota() -> None:
    threshold = {"enable": True, "cpuSuppressPolicy": "cfsQuota"}
    inputs = node(slo=slo({"resourceUsedThresholdWithBE": threshold}))
    pod = be_pod(specs=[A])
    for subject in (a_pod_subject(pod), a_container(pod, "a")):
        assert decide(subject, inputs, POLICY).value(Resource.CPU_CFS_QUOTA) == 200000


def test_the_ratio_divides_and_leaves_unlimited_alone() -> None:
    inputs = node(annotations=RATIO)
    pod = be_pod(specs=[A, batch("b", cpu=(500, None))])
    outcome = decide(a_container(pod, "a"), inputs, POLICY).outcomes[Resource.CPU_CFS_QUOTA, ""]
    assert outcome.value == 166667
    assert [claim.op for claim in outcome.modifiers] == [Op.DIVIDE]
    assert decide(a_container(pod, "b"), inputs, POLICY).value(Resource.CPU_CFS_QUOTA) == UNLIMITED
    assert decide(a_pod_subject(pod), inputs, POLICY).value(Resource.CPU_CFS_QUOTA) == UNLIMITED


@pytest.mark.parametrize("ratio", ["1.00", "0.80"])
def test_a_ratio_up_to_1_changes_nothing(ratio: str) -> None:
    inputs = node(annotations={ANNOTATION_CPU_NORMALIZATION_RATIO: ratio})
    decision = decide(a_container(be_pod(specs=[A]), "a"), inputs, POLICY)
    assert decision.value(Resource.CPU_CFS_QUOTA) == 200000


@pytest.mark.parametrize("ratio", ["0", "-1", "x", "", "nan", "inf", "1e9", "1_0"])
def test_a_bad_ratio_keeps_the_last_good_rule(ratio: str) -> None:
    good = engine(node(annotations=RATIO), POLICY)
    bad = engine(
        node(annotations={ANNOTATION_CPU_NORMALIZATION_RATIO: ratio}), POLICY, previous=good
    )
    state = bad.state("BatchResource")
    assert state is not None and state.active
    assert "Node n1" in state.problem and ANNOTATION_CPU_NORMALIZATION_RATIO in state.problem
    decision = bad.decide(a_container(be_pod(specs=[A]), "a"))
    assert decision.value(Resource.CPU_CFS_QUOTA) == 166667


@pytest.mark.parametrize("ratio", ["0", "fast"])
def test_a_bad_ratio_on_a_fresh_daemon_costs_the_ratio_and_not_the_limits(ratio: str) -> None:
    bad = engine(node(annotations={ANNOTATION_CPU_NORMALIZATION_RATIO: ratio}), POLICY)
    state = bad.state("BatchResource")
    assert state is not None and state.active
    assert ANNOTATION_CPU_NORMALIZATION_RATIO in state.problem
    decision = bad.decide(a_container(be_pod(specs=[A]), "a"))
    assert values(decision) == _values(1024, 200000, GIB)


def test_cpus_of_its_own_win_over_the_batch_limit() -> None:
    pod = be_pod(
        specs=[A], annotations={"scheduling.koordinator.sh/resource-status": {"cpuset": "0-1"}}
    )
    for subject in (a_container(pod, "a"), a_pod_subject(pod)):
        outcome = decide(subject, node(annotations=RATIO), POLICY, cpuset_allocator.POLICY).outcomes
        assert outcome[Resource.CPU_CFS_QUOTA, ""].value == UNLIMITED
        assert outcome[Resource.CPU_CFS_QUOTA, ""].winner.policy == "CPUSetAllocator"
        assert outcome[Resource.CPU_CFS_QUOTA, ""].losers[0].policy == "BatchResource"


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        ("{", "not valid JSON"),
        ({"containers": []}, "containers"),
        ({"containers": {"a": {"requests": {"kubernetes.io/batch-cpu": "1x"}}}}, "batch-cpu"),
        ({"containers": {"a": {"limits": {"kubernetes.io/batch-memory": {}}}}}, "batch-memory"),
        ({"containers": {"a": {"limits": 3}}}, "limits"),
    ],
)
def test_a_bad_annotation_is_named(annotation: Any, named: str) -> None:
    pod = be_pod(annotations={ANNOTATION_EXTENDED_RESOURCE_SPEC: annotation})
    for subject in (a_pod_subject(pod), a_container(pod, "a")):
        decision = decide(subject, node(), POLICY)
        assert decision.outcomes == {}
        message = only_fault(decision)
        assert "Pod default/web" in message and ANNOTATION_EXTENDED_RESOURCE_SPEC in message
        assert named in message
