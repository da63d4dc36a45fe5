"""CPU suppression and burst in a whole daemon, on the kernels of cgroup v1 and v2."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from apis.cpuset import CpuSet
from apis.keys import ANNOTATION_EXTENDED_RESOURCE_SPEC, LABEL_QOS_CLASS
from koordlet.daemon import parts
from koordlet.executor.slots import Plan, WriteReport
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies import cpu_burst, cpu_suppress
from koordlet.qos.strategy import Situation, Strategy, Verdict
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.koordlet.daemon.bed import ONE_CPU, SLO, Node, node, run, until
from tests.koordlet.qos.situations import Figures
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, Pod, Profile
from tests.simulated.kubelet import Container, Limits

BOTH = pytest.mark.parametrize(
    "profile", [DEBIAN_12_V1, DEBIAN_12_V2], ids=lambda profile: profile.name
)
NOTHING = Limits(cpu_request_milli=0)


class Measured:
    """A strategy under measurements that a test sets."""

    def __init__(
        self, strategy: Strategy, monkeypatch: pytest.MonkeyPatch, *, ttl_s: float | None = None
    ) -> None:
        """ttl_s: of its claims, in place of the strategy's."""
        self.values: dict[Series, float] = {}
        self.runs = threading.Event()
        """Not set: the sampling thread stalls at the next step."""
        self.runs.set()
        self._step = strategy.step
        replaced = dataclasses.replace(
            strategy, step=self.step, kept=None, ttl_s=ttl_s or strategy.ttl_s
        )
        monkeypatch.setattr(parts, "STRATEGIES", (replaced,))

    def step(self, state: Any, situation: Situation) -> tuple[Any, Verdict]:
        assert self.runs.wait(20)
        measured = Figures(self.values, situation.now)
        return self._step(state, msgspec.structs.replace(situation, measurements=measured))


def slo(**spec: Any) -> dict[str, Any]:
    return {**SLO, "spec": spec}


def suppress(**fields: Any) -> dict[str, Any]:
    return slo(
        resourceUsedThresholdWithBE={"enable": True, "cpuSuppressThresholdPercent": 100, **fields}
    )


def cpus_of(n: Node, *places: str) -> list[CpuSet]:
    """Return the CPUs that each group may use."""
    name = "cpuset.cpus" if n.kernel.profile.cgroup == 1 else "cpuset.cpus.effective"
    return [CpuSet.parse(n.kernel.text(n.kubelet.path(place, name))) for place in places]


async def report_pod(
    n: Node, pod: Pod, *, qos: str = "", annotations: Mapping[str, str] | None = None
) -> None:
    """Tell koordlet of a pod's sandbox, with the directory of its group."""
    assert pod.sandbox is not None
    linux = nri.LinuxPodSandbox(
        cgroup_parent=f"/{pod.cgroup}", cgroups_path=f"/{pod.sandbox.cgroup}"
    )
    linux.pod_resources.cpu.quota.value = sum(one.quota_us for one in pod.limits)
    linux.pod_resources.cpu.period.value = 100_000
    await n.runtime.run_pod_sandbox(
        nri.PodSandbox(
            id=pod.sandbox.id,
            name=f"pod-{pod.uid[:4]}",
            uid=pod.uid,
            namespace="default",
            labels={LABEL_QOS_CLASS: qos},
            annotations=dict(annotations or {}),
            pid=1,
            linux=linux,
        )
    )


async def report_container(n: Node, pod: Pod, container: Container) -> nri.LinuxResources:
    """Tell koordlet of a container; returns what its creation was answered with."""
    assert pod.sandbox is not None
    message = nri.Container(id=container.id, pod_sandbox_id=pod.sandbox.id, name="main")
    message.linux.cgroups_path = f"/{container.cgroup}"
    message.linux.resources.cpu.quota.value = container.limits.quota_us
    message.linux.resources.cpu.period.value = 100_000
    created = await n.runtime.create_container(message)
    await n.runtime.start_container(container.id)
    return created.adjust.linux.resources


async def plan_under(n: Node, nodeslo: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the daemon would write under this NodeSLO."""
    status, plan = await n.ask("POST", "/plan", {"files": {"slo.yaml": json.dumps(nodeslo)}})
    assert status == 200
    assert isinstance(plan, dict)
    return plan


def places_of(pod: Pod) -> list[str]:
    assert pod.sandbox is not None
    return [pod.cgroup, pod.sandbox.cgroup, *(one.cgroup for one in pod.containers)]


@BOTH
def test_best_effort_groups_follow_the_load_and_get_everything_back(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        measured = Measured(cpu_suppress.STRATEGY, monkeypatch)
        async with node(profile) as n:
            n.put(suppress())
            root = n.kubelet.qos_dir("BestEffort")
            old = n.kubelet.add_pod(NOTHING, qos="BestEffort")
            other = n.kubelet.add_pod(ONE_CPU)
            measured.values[Series(Metric.NODE_CPU)] = 0.5
            async with n.running():
                await report_pod(n, old)
                await report_pod(n, other)
                measured.values[Series(Metric.NODE_CPU)] = 3.0
                places = [root, *places_of(old)]

                def held() -> bool:
                    found = cpus_of(n, *places)
                    return all(len(cpus) == 2 and cpus == found[0] for cpus in found)

                await until("two CPUs", held)
                new = n.kubelet.add_pod(NOTHING, qos="BestEffort")
                await report_pod(n, new)
                answered = await report_container(n, new, new.start(NOTHING))
                # On v1 the group inherits its CPUs: delivered ones might be refused.
                assert bool(answered.cpu.cpus) is (profile.cgroup == 2)
                places += places_of(new)
                await until("two CPUs for the new pod too", held)
                assert cpus_of(n, *places_of(other)) == [CpuSet(range(4))] * 2
                assert (await plan_under(n, suppress()))["policies"] == []
                plan = await plan_under(n, slo())
                async with asyncio.timeout(10):  # the new container is looked at after its reply
                    while len(plan["writes"]) < len(places) - 1:
                        await asyncio.sleep(0.02)
                        plan = await plan_under(n, slo())
                assert {one["resource"] for one in plan["writes"]} == {"cpuset.cpus"}
                assert {"policy": cpu_suppress.NAME, "before": "on", "after": "off"}.items() <= (
                    plan["policies"][0].items()
                )
                _, answer = await n.ask("GET", f"/explain?kind=pod&name={new.uid}")
                whys = {
                    one["why"]
                    for subject in answer["subjects"]
                    for one in subject["values"]
                    if one["resource"] == "cpuset.cpus"
                }
                assert all("suppressed to 2 CPUs: node 100 % x 4" in why for why in whys) and whys
                n.put(slo())
                await until(
                    "the originals",
                    lambda: cpus_of(n, *places) == [CpuSet(range(4))] * len(places),
                )

    run(test)


BATCH_LIMIT = json.dumps(
    {
        "containers": {
            "main": {
                "requests": {"kubernetes.io/batch-cpu": "2k"},
                "limits": {"kubernetes.io/batch-cpu": "2k"},
            }
        }
    }
)


@BOTH
def test_the_quota_of_the_besteffort_directory_follows_and_returns(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        measured = Measured(cpu_suppress.STRATEGY, monkeypatch)
        async with node(profile) as n:
            n.put(suppress(cpuSuppressPolicy="cfsQuota"))
            name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"

            def quota(place: str) -> str:
                return n.kernel.text(n.kubelet.path(place, name)).split()[0]

            root = n.kubelet.qos_dir("BestEffort")
            measured.values[Series(Metric.NODE_CPU)] = 3.0
            pod = n.kubelet.add_pod(NOTHING, qos="BestEffort")
            original = quota(root)
            async with n.running():
                spec = {ANNOTATION_EXTENDED_RESOURCE_SPEC: BATCH_LIMIT}
                await report_pod(n, pod, qos="BE", annotations=spec)
                await until("one CPU", lambda: quota(root) == "100000")
                container = pod.start(NOTHING)
                answered = await report_container(n, pod, container)
                # Two CPUs are the limit. v1 would refuse to start the container with it.
                unlimited = profile.cgroup == 1
                assert answered.cpu.quota.value == (0 if unlimited else 200_000)
                await until(
                    "the pod's quota",
                    lambda: quota(pod.cgroup) == ("-1" if unlimited else "200000"),
                )
                measured.values[Series(Metric.NODE_CPU)] = 4.5
                await until("the least", lambda: quota(root) == "2000")
                n.put(slo())
                await until("the original", lambda: quota(root) == original)
                await until("the limit", lambda: quota(pod.cgroup) == "200000")
                await until("the container's", lambda: quota(container.cgroup) == "200000")

    run(test)


def test_on_v1_a_container_that_is_created_in_a_stall_is_not_refused_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claims have ended, so the reply has a quota; the runtime writes it after the stall."""

    async def test() -> None:
        measured = Measured(cpu_suppress.STRATEGY, monkeypatch, ttl_s=2.0)
        monkeypatch.setattr(cpu_suppress, "LIFTED_AHEAD_S", 0.0)
        async with node(DEBIAN_12_V1) as n:
            n.put(suppress(cpuSuppressPolicy="cfsQuota"))

            def quota(place: str) -> str:
                return n.kernel.text(n.kubelet.path(place, "cpu.cfs_quota_us"))

            root = n.kubelet.qos_dir("BestEffort")
            measured.values[Series(Metric.NODE_CPU)] = 3.0
            pod = n.kubelet.add_pod(NOTHING, qos="BestEffort")
            async with n.running():
                try:
                    spec = {ANNOTATION_EXTENDED_RESOURCE_SPEC: BATCH_LIMIT}
                    await report_pod(n, pod, qos="BE", annotations=spec)
                    await until("one CPU", lambda: quota(root) == "100000")
                    measured.runs.clear()
                    await until("the end of the claims", lambda: quota(pod.cgroup) == "200000")
                    container = pod.start(NOTHING)
                    answered = await report_container(n, pod, container)
                    assert answered.cpu.quota.value == 200_000
                    # The lead lasts until the runtime has written the reply.
                    monkeypatch.setattr(cpu_suppress, "LIFTED_AHEAD_S", 3600.0)
                finally:
                    measured.runs.set()
                await until("new claims", lambda: quota(pod.cgroup) == "-1")
                own = n.kubelet.path(container.cgroup, "cpu.cfs_quota_us")
                n.kernel.write_as("runtime", own, str(answered.cpu.quota.value))
                assert quota(root) == "-1"
                monkeypatch.setattr(cpu_suppress, "LIFTED_AHEAD_S", 0.0)
                await until("one CPU again", lambda: quota(root) == "100000")
                assert quota(container.cgroup) == "-1"

    run(test)


def test_on_v1_no_new_container_has_a_quota_before_the_common_one_is_lifted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reply comes after the claims' end, and the container before the reconciler's write."""

    async def test() -> None:
        measured = Measured(cpu_suppress.STRATEGY, monkeypatch)
        async with node(DEBIAN_12_V1) as n:
            n.put(suppress(cpuSuppressPolicy="cfsQuota"))

            def quota(place: str) -> str:
                return n.kernel.text(n.kubelet.path(place, "cpu.cfs_quota_us"))

            root = n.kubelet.qos_dir("BestEffort")
            writing, created = threading.Event(), threading.Event()

            measured.values[Series(Metric.NODE_CPU)] = 3.0
            pod = n.kubelet.add_pod(NOTHING, qos="BestEffort")
            async with n.running():
                spec = {ANNOTATION_EXTENDED_RESOURCE_SPEC: BATCH_LIMIT}
                await report_pod(n, pod, qos="BE", annotations=spec)
                await until("one CPU", lambda: quota(root) == "100000")
                executor, board = n.daemon.parts.passes.executor, n.daemon.parts.dynamics.board
                assert executor is not None
                apply = executor.apply

                def held(plan: Plan) -> WriteReport:
                    if not board.standing.by_class:
                        writing.set()
                        assert created.wait(10)
                    return apply(plan)

                monkeypatch.setattr(executor, "apply", held)
                n.put(slo())
                await until("the write", writing.is_set)
                try:
                    container = pod.start(NOTHING)
                    answered = await report_container(n, pod, container)
                    answer = answered.cpu.quota.value
                    own = n.kubelet.path(container.cgroup, "cpu.cfs_quota_us")
                    assert quota(root) == "100000"
                    n.kernel.write_as("runtime", own, str(answer or -1))
                finally:
                    created.set()
                await until("no common quota", lambda: quota(root) == "-1")
                await until("its own", lambda: quota(container.cgroup) == "200000")
                late = pod.start(NOTHING)
                answered = await report_container(n, pod, late)
                assert answered.cpu.quota.value == 200_000

    run(test)


@BOTH
def test_a_throttled_container_and_its_pod_grow_together_and_return(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        measured = Measured(cpu_burst.STRATEGY, monkeypatch)
        async with node(profile) as n:
            n.put(slo(cpuBurstStrategy={"policy": "auto", "cfsQuotaBurstPercent": 130}))
            pod = n.kubelet.add_pod(ONE_CPU)
            container = pod.start(ONE_CPU)
            quota, burst = (
                ("cpu.cfs_quota_us", "cpu.cfs_burst_us")
                if profile.cgroup == 1
                else ("cpu.max", "cpu.max.burst")
            )

            def found(name: str) -> list[str]:
                texts = (n.kernel.text(n.kubelet.path(one, name)) for one in groups)
                return [text.split()[0] for text in texts]

            groups = [pod.cgroup, container.cgroup]
            async with n.running():
                await report_pod(n, pod)
                await report_container(n, pod, container)
                measured.values[Series(Metric.NODE_CPU)] = 0.5
                throttled = Series(Metric.CONTAINER_CPU_THROTTLED, container.id)
                measured.values[throttled] = 1.0
                await until("130 %", lambda: found(quota) == ["130000"] * 2)
                # A mainline kernel takes no burst above the quota.
                await until("the burst", lambda: found(burst) == ["130000"] * 2)
                measured.values[throttled] = 0.0
                measured.values[Series(Metric.NODE_CPU)] = 4.0
                await until("the limit", lambda: found(quota) == ["100000"] * 2)
                assert found(burst) == ["100000"] * 2
                n.put(slo())
                await until("no burst", lambda: found(burst) == ["0"] * 2)
                assert found(quota) == ["100000"] * 2

    run(test)
