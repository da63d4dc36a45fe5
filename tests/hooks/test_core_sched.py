"""Core scheduling: groups of cookies, cpu.idle, sysctls."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import LABEL_CORE_SCHED_GROUP_ID, LABEL_CORE_SCHED_POLICY
from apis.qos import KubeQoS
from hooks.compat import CPU_IDLE_ON_QOS_DIRECTORIES
from hooks.facts import KernelFacts
from hooks.policies import batch_resource
from hooks.policies.core_sched import POLICY
from hooks.policy import OffBecause
from hooks.subject import NodeSubject
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
    values,
)

G, BU, BE = KubeQoS.GUARANTEED, KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT
CORE = {"cpuPolicy": "coreSched"}
ALL_ON = classes("cpuQOS", policies=CORE, lsr={}, ls={}, be={"schedIdle": 1})
NO_IDLE = classes("cpuQOS", policies=CORE, lsr={}, ls={}, be={})
LS_OFF = classes("cpuQOS", policies=CORE, lsr={}, be={})
LSR_OFF = classes("cpuQOS", policies=CORE, ls={}, be={})
KERNEL = KernelFacts(supported=MAINLINE, core_sched=True)


def _node(slo: Any = ALL_ON, **kwargs: Any) -> Any:
    return node(slo=slo, kernel=kwargs.pop("kernel", KERNEL), **kwargs)


def _labels(group: str | None = None, policy: str | None = None) -> dict[str, str]:
    labels = {}
    if group is not None:
        labels[LABEL_CORE_SCHED_GROUP_ID] = group
    if policy is not None:
        labels[LABEL_CORE_SCHED_POLICY] = policy
    return labels


@pytest.mark.parametrize(
    ("slo", "qos", "kube_qos", "labels", "group"),
    [
        (ALL_ON, "LS", BU, _labels(), "-expeller"),
        (ALL_ON, "LSR", G, _labels(), "-expeller"),
        (ALL_ON, "LSE", G, _labels("g1"), "g1-expeller"),
        (ALL_ON, "BE", BE, _labels(), ""),
        (ALL_ON, "BE", BE, _labels("g1"), "g1"),
        (ALL_ON, "LSR", G, _labels(policy="exclusive"), "uid-web-expeller"),
        (ALL_ON, "LSR", G, _labels("g1", "exclusive"), "uid-web-expeller"),
        (ALL_ON, "BE", BE, _labels(policy="exclusive"), "uid-web"),
        (ALL_ON, "BE", BE, _labels("g1", "sometimes"), "g1"),
        (ALL_ON, "LS", BU, _labels(policy="none"), None),
        (ALL_ON, "SYSTEM", G, _labels("g1"), None),
        (ALL_ON, "", G, _labels(), "-expeller"),
        (ALL_ON, "", BU, _labels("g1"), "g1-expeller"),
        (ALL_ON, "", BE, _labels("g1"), "g1"),
        (LS_OFF, "LS", BU, _labels("g1"), None),
        (LS_OFF, "", BU, _labels("g1"), None),
        (LS_OFF, "BE", BE, _labels("g1"), "g1"),
        (LSR_OFF, "LSR", G, _labels("g1"), None),
        (LSR_OFF, "", G, _labels("g1"), "g1-expeller"),  # Guaranteed falls back to LS
    ],
)
@pytest.mark.parametrize("make", [a_container, a_sandbox])
def test_class_and_labels_decide_whose_cookie_is_shared(
    make: Any, slo: Any, qos: str, kube_qos: KubeQoS, labels: dict[str, str], group: str | None
) -> None:
    decision = decide(make(a_pod(qos, kube_qos, labels=labels)), _node(slo), POLICY)
    assert decision.value(Resource.CORE_SCHED_COOKIE) == group
    assert set(values(decision)) <= {"core_sched_cookie"}


@pytest.mark.parametrize(
    ("pod", "idle"),
    [
        (be_pod(), 1),
        (a_pod("", BE), 1),
        (a_pod("BE", BU), 1),
        (a_pod("LS"), None),
        (a_pod("SYSTEM", BE), None),
    ],
)
def test_sched_idle_goes_to_pods_and_leaves_kubelets_directories_alone(
    pod: Any, idle: int | None
) -> None:
    assert decide(a_pod_subject(pod), _node(), POLICY).value(Resource.CPU_IDLE) == idle
    assert values(decide(a_directory(BE, pod), _node(), POLICY)) == {}


def test_the_compat_switch_puts_cpu_idle_on_the_directories() -> None:
    inputs = _node(compat={CPU_IDLE_ON_QOS_DIRECTORIES})
    idle = [decide(a_directory(k), inputs, POLICY).value(Resource.CPU_IDLE) for k in (G, BU, BE)]
    assert idle == [None, None, 1]
    assert values(decide(a_pod_subject(be_pod()), inputs, POLICY)) == {}


def test_cpu_idle_overrules_the_weight_of_the_same_directory() -> None:
    pod = be_pod(specs=[batch("main", cpu=(1000, 2000))])
    decision = decide(a_pod_subject(pod), _node(), POLICY, batch_resource.POLICY)
    assert "cpu.shares" not in values(decision)
    assert [c.resource for c in decision.outcomes[Resource.CPU_IDLE, ""].losers] == ["cpu.shares"]


def test_without_cpu_idle_the_policy_is_degraded() -> None:
    kernel = KernelFacts(core_sched=True, supported=MAINLINE - {Resource.CPU_IDLE})
    assert values(decide(a_pod_subject(be_pod()), _node(kernel=kernel), POLICY)) == {}
    state = engine(_node(kernel=kernel), POLICY).state(POLICY.name)
    assert state is not None and "cpu.idle" in POLICY.degraded(state.rule)
    whole = engine(_node(), POLICY).state(POLICY.name)
    assert whole is not None and POLICY.degraded(whole.rule) == ""


@pytest.mark.parametrize("switches", [(), (CPU_IDLE_ON_QOS_DIRECTORIES,)])
def test_sched_idle_needs_no_core_scheduling(switches: tuple[str, ...]) -> None:
    kernel = KernelFacts(supported=MAINLINE, group_identity_sysctl=True)
    inputs = _node(kernel=kernel, compat=switches)
    idle, other = (a_directory(BE), a_pod_subject(be_pod()))[:: 1 if switches else -1]
    assert values(decide(idle, inputs, POLICY)) == {"cpu.idle": 1}
    for subject in (other, a_container(be_pod()), a_sandbox(be_pod()), NodeSubject()):
        assert values(decide(subject, inputs, POLICY)) == {}
    state = engine(inputs, POLICY).state(POLICY.name)
    assert state is not None and "only schedIdle" in POLICY.degraded(state.rule)


def test_group_identity_goes_off_before_core_scheduling_goes_on() -> None:
    kernel = KernelFacts(core_sched=True, group_identity_sysctl=True, sched_core_sysctl=True)
    assert list(values(decide(NodeSubject(), _node(kernel=kernel), POLICY)).items()) == [
        ("sysctl:kernel.sched_group_identity_enabled", "0"),
        ("sysctl:kernel.sched_core", "1"),
    ]
    assert values(decide(NodeSubject(), _node(), POLICY)) == {}


@pytest.mark.parametrize(
    ("slo", "kernel", "because", "named"),
    [
        (classes("cpuQOS", ls={}), KERNEL, OffBecause.NODESLO, "groupIdentity, not coreSched"),
        (classes("cpuQOS", policies=CORE), KERNEL, OffBecause.NODESLO, "cpuQOS.enable"),
        (NO_IDLE, KernelFacts(supported=MAINLINE), OffBecause.UNSUPPORTED, "core scheduling"),
        (
            ALL_ON,
            KernelFacts(supported=MAINLINE - {Resource.CPU_IDLE}),
            OffBecause.UNSUPPORTED,
            "core scheduling",
        ),
    ],
)
def test_off_says_why(slo: Any, kernel: KernelFacts, because: OffBecause, named: str) -> None:
    state = engine(_node(slo, kernel=kernel), POLICY).state(POLICY.name)
    assert state is not None and state.off is not None
    assert state.off.because is because and named in state.off.detail
