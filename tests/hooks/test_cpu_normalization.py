"""CPU normalisation: which quotas are divided, once only, and restored without a ratio."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import (
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_RESOURCE_STATUS,
)
from apis.qos import KubeQoS
from hooks import compat
from hooks.facts import KernelFacts
from hooks.policies import batch_resource, cpuset_allocator
from hooks.policies.cpu_normalization import POLICY
from hooks.policy import OffBecause
from hooks.subject import Amounts
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import (
    EVERYTHING,
    a_container,
    a_pod,
    a_pod_subject,
    batch,
    be_pod,
    decide,
    engine,
    node,
    plain,
    topology,
    values,
)


def _ratio(text: str, version: int = 2, **settings: Any) -> Any:
    kernel = KernelFacts(supported=EVERYTHING, cgroup_version=version)
    annotations = {ANNOTATION_CPU_NORMALIZATION_RATIO: text}
    return node(annotations=annotations, kernel=kernel, **settings)


@pytest.mark.parametrize("make", [a_container, a_pod_subject])
@pytest.mark.parametrize(
    ("ratio", "requested", "quota"),
    [
        ("1.14", 400000, 350878),
        ("1.20", 100000, 83334),
        ("5.00", 1000, 1000),  # the kernel takes no less
        ("1.125", 400000, 355556),  # upstream's manager writes two digits, others need not
        ("999.9", 400000, 1000),
        ("1.001", 400000, 399601),
        ("1.14", UNLIMITED, None),
        ("1.14", 0, None),
        ("1.14", None, None),
        ("1.00", 400000, None),
        ("0.50", 400000, None),
    ],
)
def test_the_requested_quota_is_divided_and_rounded_up(
    make: Any, ratio: str, requested: int | None, quota: int | None
) -> None:
    subject = make(a_pod("LS"), cfs_quota_us=requested)
    decision = decide(subject, _ratio(ratio), POLICY)
    # 400000 / 1.14 is 350877.19: upstream's worked example rounds up to 350878.
    assert decision.value(Resource.CPU_CFS_QUOTA) == quota


def test_another_period_of_kubelet_is_taken_into_account() -> None:
    subject = a_container(a_pod("LS"), cfs_quota_us=20000, cfs_period_us=10000)
    assert decide(subject, _ratio("1.25"), POLICY).value(Resource.CPU_CFS_QUOTA) == 160000


@pytest.mark.parametrize(
    ("qos", "annotations", "in_scope"),
    [
        ("LS", {}, True),
        ("", {}, True),
        ("", {ANNOTATION_RESOURCE_STATUS: {"cpuset": "0-1"}}, False),
        ("", {ANNOTATION_RESOURCE_STATUS: "{bad"}, True),
        ("LSR", {}, False),
        ("LSE", {}, False),
        ("BE", {}, False),
        ("SYSTEM", {}, False),
    ],
)
def test_only_ls_and_unlabelled_pods_without_cpus_of_their_own(
    qos: str, annotations: dict[str, Any], in_scope: bool
) -> None:
    subject = a_container(a_pod(qos, annotations=annotations), cfs_quota_us=200000)
    decision = decide(subject, _ratio("2.00"), POLICY)
    assert values(decision) == ({"cpu.cfs_quota_us": 100000} if in_scope else {})
    assert decision.faults == ()


@pytest.mark.parametrize("policy", ["static", "none"])
@pytest.mark.parametrize(
    ("qos", "kube_qos", "cpus_milli", "own"),
    [
        ("", KubeQoS.GUARANTEED, (2000,), True),
        ("", KubeQoS.GUARANTEED, (1500,), False),
        ("", KubeQoS.BURSTABLE, (2000,), False),
        ("LS", KubeQoS.GUARANTEED, (2000,), False),  # these run in the share pools all the same
        ("", KubeQoS.GUARANTEED, (1500, 2000), None),  # the pod is, its first container is not
    ],
)
def test_a_pod_with_cpus_from_kubelet_keeps_its_quota(
    policy: str, qos: str, kube_qos: KubeQoS, cpus_milli: tuple[int, ...], own: bool | None
) -> None:
    facts = topology({ANNOTATION_CPU_MANAGER_POLICY: {"policy": policy}})
    inputs = _ratio("2.00", topology=facts)
    specs = [plain(f"c{index}", cpu=(cpus, cpus)) for index, cpus in enumerate(cpus_milli)]
    quota_us = cpus_milli[0] * 100
    for pod in (a_pod(qos, kube_qos, specs=specs), a_pod(qos, kube_qos)):
        if not pod.specs and own is None:
            continue  # nothing tells the containers apart
        container = decide(a_container(pod, "c0", cfs_quota_us=quota_us), inputs, POLICY)
        left_alone = policy == "static" and own is True
        assert bool(values(container)) == (not left_alone)
        of_pod = decide(a_pod_subject(pod, cfs_quota_us=quota_us), inputs, POLICY)
        left_alone = policy == "static" and own is not False
        assert bool(values(of_pod)) == (not left_alone)


def test_kubelet_gives_no_cpus_to_a_pod_with_resources_of_its_own() -> None:
    inputs = _ratio(
        "2.00", topology=topology({ANNOTATION_CPU_MANAGER_POLICY: {"policy": "static"}})
    )
    whole = Amounts(cpu_request_milli=2000, cpu_limit_milli=2000)
    specs = [plain("main", cpu=(2000, 2000))]
    pod = a_pod("", KubeQoS.GUARANTEED, specs=specs, resources=whole)
    for subject in (a_pod_subject, a_container):
        decision = decide(subject(pod, cfs_quota_us=200000), inputs, POLICY)
        assert values(decision) == {"cpu.cfs_quota_us": 100000}


def test_a_pod_that_kubelet_leaves_unlimited_stays_unlimited() -> None:
    subject = a_pod_subject(a_pod("LS"), cfs_quota_us=UNLIMITED)
    assert values(decide(subject, _ratio("2.00"), POLICY)) == {}


@pytest.mark.parametrize(
    ("version", "switches", "quota"),
    [(1, (), None), (2, (), 100000), (1, (compat.NORMALIZED_PODS_ON_V1,), 100000)],
)
def test_on_v1_a_pod_keeps_its_quota_so_that_its_containers_can_start(
    version: int, switches: tuple[str, ...], quota: int | None
) -> None:
    inputs = _ratio("2.00", version, compat=switches)
    of_pod = decide(a_pod_subject(a_pod("LS"), cfs_quota_us=200000), inputs, POLICY)
    assert of_pod.value(Resource.CPU_CFS_QUOTA) == quota
    of_container = decide(a_container(a_pod("LS"), cfs_quota_us=200000), inputs, POLICY)
    assert of_container.value(Resource.CPU_CFS_QUOTA) == 100000


def test_cpus_of_its_own_leave_nothing_to_divide() -> None:
    pod = a_pod("LS", annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": "0-1"}})
    subject = a_container(pod, cfs_quota_us=200000)
    decision = decide(subject, _ratio("2.00"), POLICY, cpuset_allocator.POLICY)
    assert decision.value(Resource.CPU_CFS_QUOTA) == UNLIMITED


def test_a_best_effort_quota_is_divided_once() -> None:
    pod = be_pod(specs=[batch("main", cpu=(1000, 2000))])
    decision = decide(a_container(pod), _ratio("2.00"), POLICY, batch_resource.POLICY)
    assert decision.value(Resource.CPU_CFS_QUOTA) == 100000


def test_deciding_again_on_an_update_starts_from_the_request() -> None:
    """An in-place resize brings a new request; the value in force is never divided again."""
    pod = a_pod("LS", KubeQoS.GUARANTEED)
    for requested, quota in ((400000, 200000), (400000, 200000), (600000, 300000)):
        decision = decide(a_container(pod, cfs_quota_us=requested), _ratio("2.00"), POLICY)
        assert decision.value(Resource.CPU_CFS_QUOTA) == quota


@pytest.mark.parametrize(
    ("annotations", "because", "named"),
    [
        ({}, OffBecause.NODESLO, "is not set"),
        ({ANNOTATION_CPU_NORMALIZATION_RATIO: "1.00"}, OffBecause.NODESLO, "is 1"),
        ({ANNOTATION_CPU_NORMALIZATION_RATIO: "-2"}, OffBecause.BAD_INPUT, "'-2'"),
        ({ANNOTATION_CPU_NORMALIZATION_RATIO: "fast"}, OffBecause.BAD_INPUT, "'fast'"),
    ],
)
def test_off_says_why(annotations: dict[str, str], because: OffBecause, named: str) -> None:
    state = engine(node(annotations=annotations), POLICY).state(POLICY.name)
    assert state is not None and state.off is not None
    assert state.off.because is because and named in state.off.detail


def test_a_ratio_that_goes_away_withdraws_the_claim() -> None:
    before = engine(_ratio("2.00"), POLICY)
    after = engine(node(), POLICY, previous=before)
    subject = a_container(a_pod("LS"), cfs_quota_us=200000)
    assert before.decide(subject).outcomes and not after.decide(subject).outcomes
