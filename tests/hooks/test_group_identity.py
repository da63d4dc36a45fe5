"""Group identity: the table by class, its annotation, its sysctls, and its stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import ANNOTATION_CPU_QOS
from apis.qos import KubeQoS, QoSClass
from hooks.compat import GROUP_IDENTITY_BVT_ONLY
from hooks.facts import KernelFacts
from hooks.policies import batch_resource
from hooks.policies.group_identity import POLICY
from hooks.policy import OffBecause
from hooks.subject import HostAppSubject, NodeSubject
from linux.resources import Resource
from tests.hooks.making import (
    MAINLINE,
    a_container,
    a_directory,
    a_pod,
    a_pod_subject,
    a_sandbox,
    batch,
    be_pod,
    classes,
    decide,
    engine,
    node,
    only_fault,
    values,
)

G, BU, BE = KubeQoS.GUARANTEED, KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT
ALL_ON = classes("cpuQOS", lsr={}, ls={}, be={})
ONLY_BE = classes("cpuQOS", be={})
ONLY_LS = classes("cpuQOS", ls={"groupIdentity": 1})
NO_POLICY = classes("cpuQOS", policies={"cpuPolicy": ""}, lsr={}, ls={}, be={})
OTHER_POLICY = classes("cpuQOS", policies={"cpuPolicy": "coreSched"}, lsr={}, ls={}, be={})

PODS = [
    ("LSE", G),
    ("LSR", G),
    ("LS", BU),
    ("BE", BE),
    ("", G),
    ("", BU),
    ("", BE),
    ("SYSTEM", G),
    ("SYSTEM", BE),
    ("lsr", BU),  # wrong case counts as no label
]


@pytest.mark.parametrize(
    ("slo", "bvt_of_pods", "bvt_of_directories"),
    [
        pytest.param(ALL_ON, [2, 2, 2, -1, 2, 2, -1, 2, -1, 2], [0, 2, -1], id="all-on"),
        pytest.param(NO_POLICY, [2, 2, 2, -1, 2, 2, -1, 2, -1, 2], [0, 2, -1], id="empty-policy"),
        pytest.param(ONLY_BE, [0, 0, 0, -1, 0, 0, -1, 0, -1, 0], [0, 0, -1], id="only-BE"),
        pytest.param(ONLY_LS, [0, 0, 1, 0, 1, 1, 0, 1, 0, 1], [0, 1, 0], id="only-LS"),
        pytest.param(OTHER_POLICY, [0] * 10, [0, 0, 0], id="coreSched"),
        pytest.param(None, [0] * 10, [0, 0, 0], id="nothing-on"),
    ],
)
def test_bvt_follows_the_class_and_switching_off_writes_0(
    slo: Any, bvt_of_pods: list[int], bvt_of_directories: list[int]
) -> None:
    inputs = node(slo=slo)
    got = [
        values(decide(a_pod_subject(a_pod(qos, kube)), inputs, POLICY))["cpu.bvt_warp_ns"]
        for qos, kube in PODS
    ]
    assert got == bvt_of_pods
    directories = [
        values(decide(a_directory(kube), inputs, POLICY))["cpu.bvt_warp_ns"] for kube in (G, BU, BE)
    ]
    assert directories == bvt_of_directories


def test_containers_and_sandboxes_follow_their_pod() -> None:
    pod = be_pod()
    for subject in (a_container(pod), a_sandbox(pod)):
        assert values(decide(subject, node(slo=ALL_ON), POLICY)) == {"cpu.bvt_warp_ns": -1}


@pytest.mark.parametrize(
    ("annotation", "bvt"),
    [
        ({"enable": True, "groupIdentity": -1}, -1),
        ({"enable": True, "groupIdentity": 1}, 1),
        ({"enable": True}, 2),
        ({"groupIdentity": -1}, 0),
        ({"enable": False, "groupIdentity": -1}, 0),
        ({}, 0),
    ],
)
@pytest.mark.parametrize("make", [a_pod_subject, a_container])
def test_the_annotation_of_an_ls_pod_counts_at_every_level(
    annotation: dict[str, Any], bvt: int, make: Any
) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_CPU_QOS: annotation})
    decision = decide(make(pod), node(slo=ALL_ON), POLICY)
    assert decision.value(Resource.CPU_BVT) == bvt


def test_the_annotation_counts_for_a_class_that_is_off_while_another_is_on() -> None:
    pod = a_pod("LS", annotations={ANNOTATION_CPU_QOS: {"enable": True, "groupIdentity": -1}})
    assert values(decide(a_pod_subject(pod), node(slo=ONLY_BE), POLICY)) == {"cpu.bvt_warp_ns": -1}
    for slo in (OTHER_POLICY, None):
        assert values(decide(a_pod_subject(pod), node(slo=slo), POLICY)) == {"cpu.bvt_warp_ns": 0}
    mainline = node(kernel=WITH_IDLE)
    assert values(decide(a_pod_subject(pod), mainline, POLICY)) == {}


@pytest.mark.parametrize("qos", ["LSE", "LSR", "BE", "SYSTEM", ""])
def test_the_annotation_is_for_ls_pods_only(qos: str) -> None:
    annotation = {ANNOTATION_CPU_QOS: {"enable": True, "groupIdentity": 1}}
    subject = a_pod_subject(a_pod(qos, annotations=annotation))
    plain = a_pod_subject(a_pod(qos))
    inputs = node(slo=ALL_ON)
    assert values(decide(subject, inputs, POLICY)) == values(decide(plain, inputs, POLICY))


@pytest.mark.parametrize(
    ("annotation", "named"),
    [
        ("{", "{"),
        ({"enable": True, "groupIdentity": 3}, "groupIdentity"),
        ({"enable": True, "groupIdentity": -2}, "groupIdentity"),
        ({"enable": "yes"}, "enable"),
        ({"enable": True, "groupIdentity": "2"}, "groupIdentity"),
        ([], "koordinator.sh/cpuQOS"),
    ],
)
def test_a_bad_annotation_costs_this_pod_its_identity_and_is_named(
    annotation: Any, named: str
) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_CPU_QOS: annotation})
    decision = decide(a_pod_subject(pod), node(slo=ALL_ON), POLICY)
    assert decision.outcomes == {}
    message = only_fault(decision)
    assert "Pod default/web" in message and ANNOTATION_CPU_QOS in message and named in message


def test_a_host_application_goes_by_its_class() -> None:
    def app(qos: QoSClass) -> Any:
        subject = HostAppSubject(name="nginx", qos=qos, cgroup="system.slice/nginx.service")
        return decide(subject, node(slo=ALL_ON), POLICY).value(Resource.CPU_BVT)

    assert [app(qos) for qos in (QoSClass.LSR, QoSClass.LS, QoSClass.BE)] == [2, 2, -1]
    assert [app(qos) for qos in (QoSClass.SYSTEM, QoSClass.NONE)] == [0, 0]


def test_core_scheduling_goes_off_before_group_identity_goes_on() -> None:
    kernel = KernelFacts(
        supported=frozenset({Resource.CPU_BVT}), group_identity_sysctl=True, sched_core_sysctl=True
    )
    decision = decide(NodeSubject(), node(slo=ALL_ON, kernel=kernel), POLICY)
    assert list(values(decision).items()) == [
        ("sysctl:kernel.sched_core", "0"),
        ("sysctl:kernel.sched_group_identity_enabled", "1"),
    ]


@pytest.mark.parametrize(
    ("kernel", "slo"),
    [
        (KernelFacts(supported=frozenset({Resource.CPU_BVT})), ALL_ON),
        (KernelFacts(group_identity_sysctl=True, sched_core_sysctl=True), None),
        (KernelFacts(group_identity_sysctl=True, sched_core_sysctl=True), OTHER_POLICY),
        (KernelFacts(supported=MAINLINE, sched_core_sysctl=True), ALL_ON),
    ],
)
def test_sysctls_are_left_alone_without_the_switch_or_when_no_class_is_on(
    kernel: KernelFacts, slo: Any
) -> None:
    assert values(decide(NodeSubject(), node(slo=slo, kernel=kernel), POLICY)) == {}


# --- kernels without bvt -----------------------------------------------------------------------

WITH_IDLE = KernelFacts(supported=MAINLINE)
WITHOUT_IDLE = KernelFacts(supported=MAINLINE - {Resource.CPU_IDLE})


@pytest.mark.parametrize(
    ("kernel", "pod", "expected"),
    [
        (WITH_IDLE, be_pod(), {"cpu.idle": 1}),
        (WITH_IDLE, a_pod("", BE), {"cpu.idle": 1}),
        (WITH_IDLE, a_pod("BE", BU), {"cpu.idle": 1}),
        (WITH_IDLE, a_pod("LS", BU), {}),
        (WITH_IDLE, a_pod("LSR", G), {}),
        (WITHOUT_IDLE, be_pod(), {}),  # the besteffort directory has the smallest weight already
        (WITHOUT_IDLE, a_pod("BE", BU), {"cpu.shares": 2}),
        (WITHOUT_IDLE, a_pod("LS", BU), {}),
    ],
)
def test_without_bvt_a_low_identity_gets_what_the_kernel_has(
    kernel: KernelFacts, pod: Any, expected: dict[str, int]
) -> None:
    decision = decide(a_pod_subject(pod), node(slo=ALL_ON, kernel=kernel), POLICY)
    assert values(decision) == expected
    assert all(outcome.degraded for outcome in decision.outcomes.values())


def test_the_stand_in_keeps_away_from_directories_that_kubelet_writes() -> None:
    inputs = node(slo=ALL_ON, kernel=WITH_IDLE)
    assert values(decide(a_directory(BE), inputs, POLICY)) == {}
    assert values(decide(a_container(be_pod()), inputs, POLICY)) == {}


def test_degraded_says_what_the_kernel_lacks() -> None:
    def degraded(kernel: KernelFacts) -> str:
        state = engine(node(slo=ALL_ON, kernel=kernel), POLICY).state("GroupIdentity")
        assert state is not None and state.active
        return POLICY.degraded(state.rule)

    assert degraded(KernelFacts(supported=frozenset({Resource.CPU_BVT}))) == ""
    assert "cpu.idle" in degraded(WITH_IDLE)
    assert "smallest CPU weight" in degraded(WITHOUT_IDLE)


def test_the_compat_switch_forbids_the_stand_in() -> None:
    inputs = node(slo=ALL_ON, kernel=WITH_IDLE, compat={GROUP_IDENTITY_BVT_ONLY})
    state = engine(inputs, POLICY).state("GroupIdentity")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.UNSUPPORTED
    assert GROUP_IDENTITY_BVT_ONLY in state.off.detail


@pytest.mark.parametrize(
    ("slo", "named"), [(None, "cpuQOS.enable"), (OTHER_POLICY, "cpuPolicy is coreSched")]
)
def test_without_bvt_and_without_a_class_the_policy_is_off_and_says_why(
    slo: Any, named: str
) -> None:
    state = engine(node(slo=slo, kernel=WITH_IDLE), POLICY).state("GroupIdentity")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.NODESLO and named in state.off.detail


def test_an_idle_pod_has_no_weight_and_its_batch_request_is_shown_as_overruled() -> None:
    pod = be_pod(specs=[batch("main", cpu=(1000, 2000))])
    inputs = node(slo=ALL_ON, kernel=WITH_IDLE)
    decision = decide(a_pod_subject(pod), inputs, batch_resource.POLICY, POLICY)
    assert decision.value(Resource.CPU_IDLE) == 1
    assert decision.value(Resource.CPU_SHARES) is None
    (loser,) = decision.outcomes[Resource.CPU_IDLE, ""].losers
    assert (loser.resource, loser.value, loser.policy) == (
        Resource.CPU_SHARES,
        1024,
        "BatchResource",
    )
    container = decide(a_container(pod), inputs, batch_resource.POLICY, POLICY)
    assert container.value(Resource.CPU_SHARES) == 1024


def test_the_smallest_weight_gives_way_to_a_batch_request() -> None:
    pod = a_pod("BE", BU, specs=[batch("main", cpu=(1000, 2000))])
    inputs = node(slo=ALL_ON, kernel=WITHOUT_IDLE)
    decision = decide(a_pod_subject(pod), inputs, POLICY, batch_resource.POLICY)
    assert decision.value(Resource.CPU_SHARES) == 1024


def test_every_source_names_its_field() -> None:
    def source(pod: Any) -> str:
        decision = decide(a_pod_subject(pod), node(slo=ONLY_LS), POLICY)
        return decision.outcomes[Resource.CPU_BVT, ""].winner.source

    strategy = "NodeSLO spec.resourceQOSStrategy"
    assert source(a_pod("LS")) == f"{strategy}.lsClass.cpuQOS.groupIdentity"
    assert source(a_pod("LSR")) == f"{strategy}.lsrClass.cpuQOS.enable"
    own = a_pod("LS", annotations={ANNOTATION_CPU_QOS: {"enable": True, "groupIdentity": 0}})
    assert source(own) == f"annotation {ANNOTATION_CPU_QOS}.groupIdentity"
