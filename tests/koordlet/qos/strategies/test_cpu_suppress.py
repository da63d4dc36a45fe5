"""CPU suppression: the worked examples, the damping, who owns which CPU, and what is claimed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
)
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.check import claim_problem
from hooks.facts import KernelFacts, NodeInputs
from hooks.policies.cpuset_allocator import POLICY as CPUSET_ALLOCATOR
from hooks.standing import Standing
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    HostAppSubject,
    Level,
    Pod,
    PodSubject,
    QosSubject,
    SandboxSubject,
    Subject,
)
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies.cpu_suppress import (
    STRATEGY,
    Kept,
    State,
    amount_of,
    damped,
    kept,
    next_quota,
    resumed,
    step,
    wanted_cpus,
)
from koordlet.qos.strategy import PodOnNode, Situation, Verdict
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import EVERYTHING, a_pod, be_pod, engine, node, topology
from tests.koordlet.qos.lives import Life
from tests.koordlet.qos.situations import a_situation, cpus, on_node

CPUS, QUOTA = Resource.CPUSET_CPUS, Resource.CPU_CFS_QUOTA
ROOT = QosSubject(KubeQoS.BESTEFFORT, "kubepods/besteffort")
V2 = KernelFacts(cgroup_version=2, supported=EVERYTHING)

LS = a_pod(QoSClass.LS, name="ls")
BATCH = be_pod(name="batch")
LSR_0 = a_pod(
    QoSClass.LSR,
    KubeQoS.GUARANTEED,
    name="lsr",
    annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": "0,1,8,9"}},
)


def slo(**fields: Any) -> dict[str, Any]:
    return {"resourceUsedThresholdWithBE": {"enable": True, **fields}}


def used(node_cores: float, ls: float = 0.0, be: float = 0.0) -> dict[Series, float]:
    return {
        Series(Metric.NODE_CPU): node_cores,
        Series(Metric.POD_CPU, LS.uid): ls,
        Series(Metric.POD_CPU, BATCH.uid): be,
        Series(Metric.BE_CPU_USED): be * 1000,
    }


def at(
    node_cores: float = 9.0, ls: float = 6.0, be: float = 2.0, *pods: Pod, **given: Any
) -> Situation:
    """Return the node of the worked examples: 16 CPUs, 15.5 of them allocatable."""
    given.setdefault("slo", slo())
    given.setdefault("allocatable_milli", 15_500)
    return a_situation(used(node_cores, ls, be), LS, BATCH, *pods, **given)


def reserving(reservation: Mapping[str, Any]) -> NodeInputs:
    return node(annotations={ANNOTATION_NODE_RESERVATION: json.dumps(reservation)})


LIFTED = State(lifted_at=0.0)
"""Best-effort pods have no quotas of their own any more."""


def on(text: str) -> State:
    return State(cpus=CpuSet.parse(text), measured_at=999.0)


def cpus_of(standing: Standing, subject: Subject, inputs: NodeInputs | None = None) -> CpuSet:
    """Return the CPUs that the engine decides for a subject; all 16 without a claim."""
    decided = engine(node() if inputs is None else inputs, CPUSET_ALLOCATOR).decide(
        subject, standing=standing.of(subject)
    )
    value = decided.value(CPUS)
    assert value is None or isinstance(value, CpuSet)
    return CpuSet(range(16)) if value is None else value


def quota_of(verdict: Verdict) -> int | None:
    values = [c.value for c in verdict.standing.of(ROOT) if c.resource is QUOTA]
    assert len(values) <= 1
    value = values[0] if values else None
    assert value is None or isinstance(value, int)
    return value


# -- the amount -------------------------------------------------------------------------------

YARN: dict[str, Any] = {
    "hostApplications": [
        {"name": "yarn", "qos": "BE", "cgroupPath": {"base": "KubepodsBesteffort"}},
        {"name": "nginx", "qos": "LS"},
        {"name": "away", "qos": "BE"},
    ]
}
APPS = (
    HostAppSubject("yarn", QoSClass.BE, "kubepods/besteffort/yarn"),
    HostAppSubject("nginx", QoSClass.LS, "nginx"),
    HostAppSubject("away", QoSClass.BE, "host-best-effort/away"),
)


@pytest.mark.parametrize(
    ("situation", "milli"),
    [
        (at(9.0, 6.0, 2.0), 3400),
        (at(12.5, 9.5, 2.0), -100),
        (at(12.5, 9.5, 2.0, slo=slo(cpuSuppressMinPercent=20)), 3200),
        (at(9.0, 6.0, 2.0, slo=slo(cpuSuppressMinPercent=20)), 3400),
        (at(9.0, 6.0, 2.0, slo=slo(cpuSuppressThresholdPercent=80)), 5800),
        # the system counts as at least what is not allocatable, or reserved by the annotation
        (at(8.0, 6.0, 2.0), 3900),
        (at(8.0, 6.0, 2.0, allocatable_milli=14_000), 2400),
        (at(8.0, 6.0, 2.0, allocatable_milli=None), 4400),
        (
            at(8.0, 6.0, 2.0, inputs=reserving({"resources": {"cpu": "3"}})),
            1400,
        ),
        (
            at(
                8.0,
                6.0,
                2.0,
                inputs=reserving({"resources": {"cpu": "3"}, "reservedCPUs": "0-1"}),
            ),
            2400,
        ),
        # BE by its label or by Kubernetes' class is not subtracted; a pod without a sample counts 0
        (
            a_situation(
                {
                    Series(Metric.NODE_CPU): 9.0,
                    Series(Metric.POD_CPU, "uid-a"): 2.0,
                    Series(Metric.POD_CPU, "uid-b"): 3.0,
                    Series(Metric.POD_CPU, "uid-c"): 1.0,
                },
                a_pod(QoSClass.BE, KubeQoS.BURSTABLE, name="a"),
                a_pod(QoSClass.NONE, KubeQoS.BESTEFFORT, name="b"),
                a_pod(QoSClass.NONE, KubeQoS.BURSTABLE, name="c"),
                a_pod(QoSClass.NONE, KubeQoS.BURSTABLE, name="d"),
                slo=slo(),
            ),
            10_400 - 1000 - 3000,  # the system has what the samples do not explain
        ),
        # host applications: those below the besteffort directory are best-effort use
        (
            a_situation(
                {
                    Series(Metric.NODE_CPU): 7.0,
                    Series(Metric.HOST_APP_CPU, "yarn"): 2.0,
                    Series(Metric.HOST_APP_CPU, "nginx"): 1.0,
                    Series(Metric.HOST_APP_CPU, "away"): 3.0,
                },
                slo=slo() | YARN,
                host_apps=APPS,
            ),
            10_400 - 4000 - 1000,
        ),
        # more use by pods than the node shows: two samples of different moments
        (at(5.0, 6.0, 2.0, allocatable_milli=None), 4400),
    ],
)  # fmt: skip
def test_the_amount_is_what_the_others_leave_below_the_threshold(
    situation: Situation, milli: int
) -> None:
    amount = amount_of(situation)
    assert amount is not None and amount.milli == milli


@pytest.mark.parametrize(
    ("milli", "available", "count"),
    [(3400, 16, 4), (4000, 16, 4), (4001, 16, 5), (-100, 16, 2), (900, 16, 2), (20_000, 12, 12),
     (9000, 1, 1), (9000, 0, 0)],
)  # fmt: skip
def test_an_amount_becomes_whole_cpus_that_there_are(
    milli: int, available: int, count: int
) -> None:
    assert wanted_cpus(milli, available) == count


# -- the damping ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "present", "fewer", "more", "cpus_of_node", "result"),
    [
        (4, 0, 0, 0, 16, (4, 0, 0)),  # the first set
        (14, 0, 0, 0, 16, (14, 0, 0)),
        (4, 4, 1, 0, 16, (4, 0, 0)),
        # growing: by 10 % of the node, rounded up
        (4, 2, 0, 0, 16, (4, 0, 0)),
        (9, 2, 0, 0, 16, (4, 0, 0)),
        (90, 20, 0, 0, 128, (33, 0, 0)),
        # shrinking by more than noise: at once
        (2, 4, 0, 0, 16, (2, 0, 0)),
        (2, 90, 0, 0, 128, (2, 0, 0)),
        # one CPU: 2 steps down, 5 up
        (3, 4, 0, 0, 16, (4, 1, 0)),
        (3, 4, 1, 0, 16, (3, 0, 0)),
        (5, 4, 0, 0, 16, (4, 0, 1)),
        (5, 4, 0, 3, 16, (4, 0, 4)),
        (5, 4, 0, 4, 16, (5, 0, 0)),
        (5, 4, 1, 0, 16, (4, 0, 1)),  # up and down in turn never counts up
        (3, 4, 0, 4, 16, (4, 1, 0)),
        # of 256 CPUs two are noise
        (98, 100, 0, 0, 256, (100, 1, 0)),
        (97, 100, 0, 0, 256, (97, 0, 0)),
    ],
)
def test_small_changes_wait_and_growth_is_limited(
    wanted: int, present: int, fewer: int, more: int, cpus_of_node: int, result: tuple[int, ...]
) -> None:
    assert damped(wanted, present, fewer, more, cpus=cpus_of_node) == result


def test_the_switch_follows_every_cpu() -> None:
    assert damped(3, 4, 0, 0, cpus=16, every_step=True) == (3, 0, 0)
    assert damped(5, 4, 0, 0, cpus=16, every_step=True) == (5, 0, 0)
    inputs = node(compat=[compat.SUPPRESS_WITHOUT_DAMPING])
    state, _ = step(on("0,4,8"), at(inputs=inputs))
    assert len(state.cpus) == 4


def test_a_noisy_second_moves_nothing_and_a_load_step_is_answered_at_once() -> None:
    state = on("0,4,8,12")
    state, verdict = step(state, at(9.9, 6.9, 2.0))  # 2.5 cores: one CPU fewer
    assert len(state.cpus) == 4 and not verdict.notes
    state, _ = step(state, at())
    assert len(state.cpus) == 4 and state.fewer == 0
    state, verdict = step(state, at(12.5, 9.5, 2.0))
    assert len(state.cpus) == 2 and [note.reason for note in verdict.notes] == [
        "AdjustBEByNodeCPUUsage"
    ]


# -- the worked examples, as the engine decides them ------------------------------------------


@pytest.mark.parametrize(
    ("before", "situation", "after"),
    [
        ("0,8", at(), "0,4,8,12"),
        ("", at(), "0,4,8,12"),
        ("0,4,8,12", at(7.0, 4.0, 2.0), "0-1,4,8-9,12"),  # growth of 2, with siblings together
        ("", at(8.0, 5.0, 2.0), "0-1,4,8,12"),
        ("", at(8.0, 5.0, 2.0, LSR_0), "0,2,4,10,12"),
        ("0,4,8,12", at(12.5, 9.5, 2.0), "0,8"),
        ("0,8", at(12.5, 9.5, 2.0, slo=slo(cpuSuppressMinPercent=20)), "0,4,8,12"),
    ],
)
def test_best_effort_pods_get_the_cpus_of_the_worked_examples(
    before: str, situation: Situation, after: str
) -> None:
    state, verdict = step(on(before) if before else State(), situation)
    wanted = CpuSet.parse(after)
    assert state.cpus == wanted
    container = ContainerSubject(pod=BATCH, name="main", id="c1")
    inputs = msgspec.structs.replace(situation.inputs, kernel=V2)
    _, on_v2 = step(State(), msgspec.structs.replace(situation, inputs=inputs))
    assert cpus_of(verdict.standing, ROOT) == wanted
    assert cpus_of(verdict.standing, PodSubject(BATCH)) == wanted
    assert cpus_of(verdict.standing, SandboxSubject(BATCH, "s1")) == wanted
    assert Level.CONTAINER in {level for level, _ in on_v2.standing.by_class}
    assert cpus_of(on_v2.standing, container) == step(State(), situation)[0].cpus
    # no other pod
    assert cpus_of(verdict.standing, PodSubject(LS)) == CpuSet(range(16))
    assert verdict.gauges["be_suppress_cpu_cores", (("type", "cpuset"),)] == len(wanted)


def test_the_reason_has_the_numbers() -> None:
    _, verdict = step(State(), at())
    (claim,) = verdict.standing.of(ROOT)
    assert claim.reason == "suppressed to 4 CPUs: node 65 % x 16 - LS 6.0 - system 1.0"
    assert "3.4 cores" in verdict.summary
    assert verdict.gauges["be_suppress_ls_used_cpu_cores", ()] == 6.0
    assert verdict.gauges["be_suppress_be_used_cpu_cores", ()] == 2.0


def test_claims_stay_equal_while_the_set_stays() -> None:
    """Otherwise every best-effort cgroup is decided again each second."""
    state, first = step(State(), at())
    _, second = step(state, at(9.1, 6.1, 2.0))
    assert second.standing == first.standing and second.summary != first.summary


def test_claims_are_made_again_only_when_what_they_follow_from_changes() -> None:
    pods = (LS, on_node(BATCH, ("main", NOTHING_REQUESTED)))
    situation = a_situation(used(9.0, 6.0, 2.0), *pods, slo=slo(), allocatable_milli=15_500)
    state, first = step(State(), situation)
    state, second = step(state, msgspec.structs.replace(situation, now=situation.now + 1))
    assert second.standing is first.standing
    more = on_node(be_pod(name="more"), ("main", NOTHING_REQUESTED))
    state, third = step(
        state,
        msgspec.structs.replace(situation, now=situation.now + 2, pods=(*situation.pods, more)),
    )
    assert cpus_of(third.standing, more.containers[0]) == state.cpus
    busy = a_situation(used(13.0, 10.0, 2.0), *pods, slo=slo(), allocatable_milli=15_500)
    for seconds in (3, 4):
        now = situation.now + seconds
        state, last = step(state, msgspec.structs.replace(busy, now=now))
    assert cpus_of(last.standing, ROOT) == state.cpus != cpus_of(first.standing, ROOT)


# -- who has which CPU ------------------------------------------------------------------------


def lse(name: str, text: str, phase: str = "Running") -> Pod:
    pod = a_pod(
        QoSClass.LSE,
        KubeQoS.GUARANTEED,
        name=name,
        annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": text}},
    )
    return msgspec.structs.replace(pod, phase=phase)


@pytest.mark.parametrize(
    ("pods", "annotations", "allowed"),
    [
        ((lse("a", "0-3,8-11"),), {}, "4-7,12-15"),
        ((lse("a", "0-3", "Succeeded"), lse("b", "4", "Failed")), {}, "0-15"),
        ((lse("a", "0-1,8-9"), LSR_0), {}, "2-7,10-15"),  # named by both: the stricter class
        ((LSR_0, lse("a", "0-1,8-9")), {}, "2-7,10-15"),
        ((), {ANNOTATION_NODE_RESERVATION: {"reservedCPUs": "0,8"}}, "1-7,9-15"),
        # An amount reserves the CPUs that kubelet would choose: sockets, cores, then threads.
        ((), {ANNOTATION_NODE_RESERVATION: {"resources": {"cpu": "1500m"}}}, "1-7,9-15"),
        ((), {ANNOTATION_NODE_RESERVATION: {"resources": {"cpu": "3"}}}, "2-7,9-15"),
        ((), {ANNOTATION_NODE_RESERVATION: {"resources": {"cpu": "8"}}}, "4-7,12-15"),
        ((), {ANNOTATION_NODE_RESERVATION: {"resources": {"memory": "8Gi"}}}, "0-15"),
        # The list counts where there are both.
        (
            (),
            {ANNOTATION_NODE_RESERVATION: {"resources": {"cpu": "8"}, "reservedCPUs": "0,8"}},
            "1-7,9-15",
        ),
        ((), {ANNOTATION_SYSTEM_QOS_RESOURCE: {"cpuset": "14-15"}}, "0-13"),
        (
            (),
            {ANNOTATION_SYSTEM_QOS_RESOURCE: {"cpuset": "14-15", "cpusetExclusive": False}},
            "0-15",
        ),
        ((lse("a", "bad"),), {}, "0-15"),
    ],
)
def test_cpus_of_lse_pods_the_system_and_reservations_are_never_used(
    pods: tuple[Pod, ...], annotations: Mapping[str, Any], allowed: str
) -> None:
    """Even when more CPUs are asked for than are left."""
    texts = {key: json.dumps(value) for key, value in annotations.items()}
    state, verdict = step(
        State(),
        at(
            0.5,
            0.0,
            0.0,
            *pods,
            inputs=node(annotations=texts),
            slo=slo(cpuSuppressThresholdPercent=100),
            allocatable_milli=None,
        ),
    )
    wanted = len(CpuSet.parse(allowed))
    assert state.cpus <= CpuSet.parse(allowed)
    assert len(state.cpus) >= min(wanted, 14)
    assert cpus_of(verdict.standing, ROOT) == state.cpus


def test_the_reason_says_when_a_reservation_counts_instead_of_the_systems_use() -> None:
    reserving_3 = reserving({"resources": {"cpu": "3"}})
    reserved = amount_of(at(8.5, 6.0, 2.0, inputs=reserving_3))
    assert str(reserved) == "node 65 % x 16 - LS 6.0 - system 3.0 (reserved; it uses 0.5)"
    assert str(amount_of(at(12.0, 6.0, 2.0, inputs=reserving_3))).endswith("- system 4.0")


def test_while_it_is_off_the_summary_names_the_field() -> None:
    _, verdict = step(State(), at(9.0, 6.0, 2.0, slo=slo(enable=False)))
    assert verdict.standing == Standing()
    field = "NodeSLO spec.resourceUsedThresholdWithBE.enable"
    assert verdict.summary == f"nothing is suppressed: {field} is false"


def test_a_cpu_that_is_allocated_leaves_the_set_at_once() -> None:
    state, _ = step(on("0,4,8,12"), at(9.0, 6.0, 2.0, lse("a", "8")))
    assert 8 not in state.cpus and len(state.cpus) == 4
    assert {0, 4, 12} <= set(state.cpus)


def test_without_a_free_cpu_the_least_quota_holds_best_effort_pods() -> None:
    state, verdict = step(on("0,8"), at(9.0, 6.0, 2.0, lse("a", "0-15")))
    assert not state.cpus and quota_of(verdict) == 2000
    (claim,) = verdict.standing.of(ROOT)
    assert claim.degraded


def test_without_a_topology_a_quota_takes_the_place_of_the_set() -> None:
    _, verdict = step(LIFTED, at(topology=()))
    assert quota_of(verdict) == 340_000
    assert "topology" in verdict.summary


def test_a_bad_reservation_is_reported_and_the_rest_counts() -> None:
    bad = node(annotations={ANNOTATION_NODE_RESERVATION: '{"reservedCPUs": "x"}'})
    _, verdict = step(State(), at(inputs=bad))
    (fault,) = verdict.faults
    assert "reservedCPUs" in str(fault) and verdict.standing.of(ROOT)


def test_a_pod_with_cpus_of_its_own_stays_inside_them() -> None:
    overlapping = be_pod(name="own", annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": "4-7"}})
    apart = be_pod(name="apart", annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": "2-3"}})
    inputs = node(kernel=V2)
    state, verdict = step(State(), at(9.0, 6.0, 2.0, overlapping, apart, inputs=inputs))
    assert str(state.cpus) == "0,4,8,12"

    def of(pod: Pod) -> str:
        container = ContainerSubject(pod=pod, name="main", id=pod.name)
        return str(cpus_of(verdict.standing, container, inputs))

    assert of(overlapping) == "4"
    assert of(apart) == "2-3"
    assert str(cpus_of(verdict.standing, PodSubject(apart))) == "0,2-4,8,12"
    assert str(cpus_of(verdict.standing, PodSubject(overlapping))) == "0,4,8,12"
    assert str(cpus_of(verdict.standing, ROOT)) == "0,2-4,8,12"


def test_on_v1_only_containers_that_exist_are_named() -> None:
    """A set in the reply at a creation is refused while the directories above shrink."""
    existing = on_node(BATCH, ("main", NOTHING_REQUESTED))
    situation = a_situation(used(9.0, 6.0, 2.0), LS, existing, slo=slo(), allocatable_milli=15_500)
    state, verdict = step(State(), situation)
    new = ContainerSubject(pod=BATCH, name="main", id="new")
    assert cpus_of(verdict.standing, new) == CpuSet(range(16))
    assert cpus_of(verdict.standing, existing.containers[0]) == state.cpus


def test_host_applications_below_the_besteffort_directory_are_held_too() -> None:
    state, verdict = step(State(), at(slo=slo() | YARN, host_apps=APPS))
    held = [cpus_of(verdict.standing, app) == state.cpus for app in APPS]
    assert held == [True, False, False]


STATIC = {
    ANNOTATION_CPU_MANAGER_POLICY: {"policy": "static"},
    ANNOTATION_BE_CPU_SHARED_POOLS: [{"socket": 0, "node": 0, "cpuset": "2-7,10-15"}],
}


def test_under_kubelets_static_policy_only_containers_and_sandboxes_are_held() -> None:
    inputs = node(topology=topology(STATIC))
    state, verdict = step(State(), at(inputs=inputs))
    # CPUs 0, 1, 8 and 9 are a container's, by kubelet
    assert str(state.cpus) == "2,4,10,12"
    assert set(verdict.standing.by_class) == {
        (Level.SANDBOX, KubeQoS.BESTEFFORT),
        (Level.CONTAINER, KubeQoS.BESTEFFORT),
    }
    assert not verdict.standing.of(ROOT) and not verdict.standing.of(PodSubject(BATCH))


# -- the quota --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milli", "present", "quota"),
    [
        (3400, UNLIMITED, 340_000),
        (3400, 100_000, 260_000),
        (3400, 260_000, 340_000),
        (3500, 340_000, 340_000),
        (3560, 340_000, 356_000),
        (3240, 340_000, 324_000),
        (-100, 340_000, 2000),
        (-100, 2500, 2000),
        (10, UNLIMITED, 2000),
    ],
)
def test_quotas_of_the_worked_examples(milli: int, present: int, quota: int) -> None:
    assert next_quota(milli, present, 15_500) == quota


def test_the_quota_policy_claims_a_quota_and_keeps_best_effort_off_lse_cpus() -> None:
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    before = msgspec.structs.replace(on("0,8"), lifted_at=0.0)
    state, verdict = step(before, at(9.0, 6.0, 2.0, slo=by_quota))
    assert quota_of(verdict) == 340_000 and not state.cpus
    assert [claim.resource for claim in verdict.standing.of(ROOT)] == [QUOTA]
    assert verdict.gauges["be_suppress_cpu_cores", (("type", "cfsQuota"),)] == 3.4
    _, verdict = step(LIFTED, at(9.0, 6.0, 2.0, lse("a", "0-3"), slo=by_quota))
    assert quota_of(verdict) == 340_000
    assert str(cpus_of(verdict.standing, ROOT)) == "4-15"
    assert str(cpus_of(verdict.standing, PodSubject(BATCH))) == "4-15"


def test_on_v1_the_quotas_below_the_besteffort_directory_are_lifted() -> None:
    """The kernel refuses a group with a larger quota than its parent, and takes one without."""
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    for kernel, lifted in ((KernelFacts(supported=EVERYTHING), True), (V2, False)):
        situation = at(slo=by_quota, inputs=node(kernel=kernel))
        state, verdict = step(LIFTED, situation)
        container = ContainerSubject(pod=BATCH, name="main", id="c1")
        for subject in (PodSubject(BATCH), container):
            values = [c.value for c in verdict.standing.of(subject) if c.resource is QUOTA]
            assert values == ([UNLIMITED] if lifted else [])
        assert not verdict.standing.of(PodSubject(LS))
        assert [note.message.partition(":")[0] for note in verdict.notes] == [
            "best-effort quota unlimited -> 340000 µs"
        ]
        assert not step(state, situation)[1].notes


def test_on_v1_no_quota_falls_before_containers_being_created_have_lost_theirs() -> None:
    """A reply of a moment ago still has a quota, and the kernel refuses one above the parent's."""
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    state, quotas = State(), []
    for now in (1000.0, 1001.0, 1001.9, 1002.0, 1003.0):
        state, verdict = step(state, at(slo=by_quota, now=now))
        quotas.append(quota_of(verdict))
        lifted = verdict.standing.of(ContainerSubject(pod=BATCH, name="main", id="c1"))
        assert [claim.value for claim in lifted if claim.resource is QUOTA] == [UNLIMITED]
    assert quotas == [None, None, None, 340_000, 340_000]
    _, verdict = step(State(), at(slo=by_quota, inputs=node(kernel=V2), now=1000.0))
    assert quota_of(verdict) == 340_000, "v2 takes any quota"


def test_on_v1_the_lead_begins_again_after_suppression_was_off() -> None:
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    state, verdict = step(LIFTED, at(slo=by_quota, now=1000.0))
    assert quota_of(verdict) == 340_000
    state, _ = step(state, at(slo={}, now=1001.0))
    _, verdict = step(state, at(slo=by_quota, now=1002.0))
    assert quota_of(verdict) is None


def test_on_v1_the_lead_begins_again_after_a_stall_that_ended_the_claims(tmp_path: Path) -> None:
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    life = Life(str(tmp_path / "leases"), STRATEGY, now=1000.0)
    quotas = []
    for now in (1000.0, 1002.0, 1011.9, 1022.0, 1023.0, 1024.0):
        standing = life.step(at(slo=by_quota, now=now))
        lifted = standing.of(ContainerSubject(pod=BATCH, name="main", id="c1"))
        assert [claim.value for claim in lifted if claim.resource is QUOTA] == [UNLIMITED]
        quotas.append(quota_of(Verdict(standing=standing)))
    assert quotas == [None, 340_000, 340_000, None, None, 340_000]


def test_a_set_after_a_stall_that_ended_the_claims_is_a_first_one(tmp_path: Path) -> None:
    life = Life(str(tmp_path / "leases"), STRATEGY, now=1000.0)
    sizes = [
        len(cpus_of(life.step(at(3.0 + ls, ls, now=now)), ROOT))
        for ls, now in ((6.0, 1000.0), (3.0, 1001.0), (3.0, 1012.0))
    ]
    assert sizes == [4, 6, 7], "growth is not limited where nothing was held"


def test_on_v1_the_cpu_set_holds_until_the_quota_that_takes_its_place_does() -> None:
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    state = on("0-3,8")
    taken = lse("a", "0")
    for now in (1000.0, 1001.0):
        state, verdict = step(state, at(9.0, 6.0, 2.0, taken, slo=by_quota, now=now))
        assert quota_of(verdict) is None
        assert str(cpus_of(verdict.standing, ROOT)) == "1-3,8"
        assert "until a quota holds" in verdict.standing.of(ROOT)[0].reason
    state, verdict = step(state, at(9.0, 6.0, 2.0, taken, slo=by_quota, now=1002.0))
    assert quota_of(verdict) == 340_000 and not state.cpus
    assert str(cpus_of(verdict.standing, ROOT)) == "1-15"


# -- off --------------------------------------------------------------------------------------


def test_switched_off_nothing_is_claimed_and_the_state_is_new() -> None:
    state, verdict = step(on("0,8"), at(9.0, 6.0, 2.0, lse("a", "0"), slo={}))
    assert state == State() and verdict.standing == Standing()


def test_the_switch_keeps_best_effort_pods_off_lse_cpus_while_suppression_is_off() -> None:
    inputs = node(compat=[compat.BEST_EFFORT_POOL_ALWAYS])
    _, verdict = step(State(), at(9.0, 6.0, 2.0, lse("a", "0-1"), slo={}, inputs=inputs))
    assert str(cpus_of(verdict.standing, ROOT)) == "2-15"
    _, verdict = step(State(), at(9.0, 6.0, 2.0, slo={}, inputs=inputs))
    assert verdict.standing == Standing()


def test_be_cpu_manager_owns_the_cpu_sets_but_not_the_quota() -> None:
    inputs = node(gates={"BECPUManager": True})
    _, verdict = step(on("0,8"), at(inputs=inputs))
    assert verdict.standing == Standing() and "BECPUManager" in verdict.summary
    by_quota = slo(cpuSuppressPolicy="cfsQuota")
    _, verdict = step(LIFTED, at(9.0, 6.0, 2.0, lse("a", "0"), inputs=inputs, slo=by_quota))
    assert quota_of(verdict) == 340_000 and len(verdict.standing.of(ROOT)) == 1


def test_without_a_measurement_the_last_decision_stays_for_ten_seconds() -> None:
    state, first = step(State(), at(now=1000.0))
    blind = msgspec.structs.replace(at(), measurements=a_situation({}).measurements)
    state, held = step(state, msgspec.structs.replace(blind, now=1010.0))
    assert held.standing == first.standing and not held.notes and "unchanged" in held.summary
    state, released = step(state, msgspec.structs.replace(blind, now=1010.5))
    assert released.standing == Standing() and state == State()
    assert step(State(), blind)[1].standing == Standing()


# -- over a restart ---------------------------------------------------------------------------


@pytest.mark.parametrize("gap_s", [2.0, 3600.0])
@pytest.mark.parametrize(
    ("policy", "left", "later"),
    [
        ("cpuset", "2 CPUs", ["4 CPUs", "6 CPUs", "8 CPUs"]),
        ("cfsQuota", "2000 µs", ["162000 µs", "322000 µs", "482000 µs"]),
    ],
)
def test_growth_is_limited_over_a_restart_too(
    tmp_path: Path, gap_s: float, policy: str, left: str, later: list[str]
) -> None:
    """The load ends while no daemon runs: best-effort pods still have what the last one left."""
    path, about = str(tmp_path / "leases"), slo(cpuSuppressPolicy=policy)

    def in_force(standing: Standing) -> str:
        quota = quota_of(Verdict(standing=standing))
        return f"{len(cpus_of(standing, ROOT))} CPUs" if quota is None else f"{quota} µs"

    life = Life(path, STRATEGY, now=1000.0)
    life.step(at(12.5, 9.5, now=1001.0, slo=about))
    assert in_force(life.step(at(12.5, 9.5, now=1003.0, slo=about))) == left
    now = 1003.0 + gap_s
    life = Life(path, STRATEGY, now=now)
    blind = msgspec.structs.replace(
        at(now=now + 1, slo=about), measurements=a_situation({}).measurements
    )
    assert in_force(life.step(blind)) == left
    steps = [life.step(at(1.0, 0.5, now=now + n, slo=about)) for n in (2, 3, 4)]
    assert [in_force(standing) for standing in steps] == later


def test_small_changes_count_on_over_a_restart(tmp_path: Path) -> None:
    path, now, sets = str(tmp_path / "leases"), 1000.0, []
    life = Life(path, STRATEGY, now=now)
    first = life.step(at(now=now))
    assert len(cpus_of(first, ROOT)) == 4
    for step_number in range(6):
        if step_number == 3:
            life.end(now)
            life = Life(path, STRATEGY, now=now)
        now += 1
        sets.append(cpus_of(life.step(at(9.0, 5.0, 3.0, now=now)), ROOT))
    assert [len(each) for each in sets] == [4, 4, 4, 4, 5, 5]
    assert sets[0] == sets[3] == cpus_of(first, ROOT)


@pytest.mark.parametrize("state", [State(), State(cpus=CpuSet.parse("0-3,8"), fewer=1, terms="t")])
def test_what_is_kept_of_a_state_is_all_of_the_damping(state: State) -> None:
    text = msgspec.json.encode(kept(state))
    assert resumed(msgspec.json.decode(text, type=Kept)) == state


def test_kept_cpus_that_are_no_list_begin_again() -> None:
    assert resumed(Kept(cpus="three", quota_us=5000)) == State()


# -- invariants -------------------------------------------------------------------------------

_LOADS = st.floats(0, 40, allow_nan=False)
_SETS = st.integers(0, 2**16 - 1).map(CpuSet.of_mask)
_STATES = st.builds(
    State, cpus=_SETS, fewer=st.integers(0, 1), more=st.integers(0, 4), measured_at=st.just(999.0)
)


def _owned(lse_cpus: CpuSet, lsr_cpus: CpuSet) -> tuple[PodOnNode, ...]:
    lsr = a_pod(
        QoSClass.LSR,
        KubeQoS.GUARANTEED,
        name="lsr",
        annotations={ANNOTATION_RESOURCE_STATUS: {"cpuset": str(lsr_cpus)}},
    )
    return PodOnNode(lse("lse", str(lse_cpus))), PodOnNode(lsr)


@given(_STATES, _LOADS, _LOADS, _LOADS, _SETS, _SETS, _SETS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_set_is_never_empty_and_never_holds_a_cpu_that_others_own(
    state: State,
    node_cores: float,
    ls: float,
    be: float,
    lse_cpus: CpuSet,
    lsr_cpus: CpuSet,
    reserved: CpuSet,
    by_quota: bool,
) -> None:
    text = json.dumps({"reservedCPUs": str(reserved)})
    situation = a_situation(
        used(node_cores, ls, be),
        LS,
        BATCH,
        *_owned(lse_cpus, lsr_cpus),
        slo=slo(cpuSuppressPolicy="cfsQuota") if by_quota else slo(),
        inputs=node(kernel=V2, annotations={ANNOTATION_NODE_RESERVATION: text}),
        topology=cpus(),
    )
    after, verdict = step(state, situation)
    assert step(state, situation) == (after, verdict)
    for level, claims in [
        *((Level.QOS, verdict.standing.of(ROOT)),),
        *((level, claims) for (level, _), claims in verdict.standing.by_class.items()),
    ]:
        assert all(not claim_problem(claim, level) for claim in claims)
    decided = cpus_of(verdict.standing, ROOT)
    quota = quota_of(verdict)
    if by_quota or len(lse_cpus | reserved) == 16:
        assert quota is not None and 2000 <= quota <= 1_600_000
    else:
        assert quota is None and decided == after.cpus
    if len(lse_cpus | reserved) < 16:
        assert decided and not decided & (lse_cpus | reserved)
    assert verdict.gauges["be_suppress_ls_used_cpu_cores", ()] >= 0


@given(_STATES, _LOADS, _LOADS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_more_latency_sensitive_load_never_leaves_more_to_best_effort_pods(
    state: State, one: float, other: float, by_quota: bool
) -> None:
    low, high = sorted((one, other))
    given_slo = slo(cpuSuppressPolicy="cfsQuota") if by_quota else slo()
    if by_quota:
        state = State(quota_us=100_000 * len(state.cpus) or UNLIMITED)
    less, _ = step(state, at(low, low, 0.0, slo=given_slo))
    more, _ = step(state, at(high, high, 0.0, slo=given_slo))
    assert len(more.cpus) <= len(less.cpus)
    assert more.quota_us <= less.quota_us


@given(st.lists(_LOADS, max_size=10))
@settings(max_examples=50, deadline=None)
def test_after_any_load_two_steps_of_high_load_leave_the_least_and_idle_gives_it_back(
    loads: list[float],
) -> None:
    state = STRATEGY.initial()
    for load in loads:
        state, _ = STRATEGY.step(state, at(load, load, 0.0))
    for _ in range(2):
        state, _ = STRATEGY.step(state, at(16.0, 16.0, 0.0))
    assert len(state.cpus) == 2
    for _ in range(20):
        state, _ = STRATEGY.step(state, at(0.5, 0.0, 0.0))
    assert len(state.cpus) == 10  # 65 % of 16 without the 0.5 that are not allocatable
