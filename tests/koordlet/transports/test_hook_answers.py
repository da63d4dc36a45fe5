"""The hook service answers as NRI replies: every kind of value, on every change of what decides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from hooks.claim import Claim
from hooks.standing import Standing
from hooks.subject import Level
from koordlet.decisions.decider import Decider
from linux.resources import Resource
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from tests.koordlet.daemon.bed import node_object, until
from tests.koordlet.transports.hook_bed import connected, run, serving
from tests.simulated.kubelet import Limits

MI = 1 << 20
BATCH = {
    "requests": {"kubernetes.io/batch-cpu": 500, "kubernetes.io/batch-memory": "64Mi"},
    "limits": {"kubernetes.io/batch-cpu": 1000, "kubernetes.io/batch-memory": "64Mi"},
}
LS, BE, LSR = ({"koordinator.sh/qosClass": qos} for qos in ("LS", "BE", "LSR"))
OTHER_GATES = ("BatchResource", "CPUSetAllocator", "GPUEnvInject")


def annotation(key: str, value: Any) -> dict[str, str]:
    return {key: json.dumps(value)}


@pytest.mark.parametrize(
    ("labels", "annotations", "asked", "answered"),
    [
        pytest.param(LS, {}, {}, {"cpu_quota": 80_000}, id="a divided quota"),
        pytest.param(LS, {}, {"cpu_quota": -1}, {"cpu_quota": -1}, id="no limit"),
        pytest.param(LS, {}, {"cpu_quota": 0}, {"cpu_quota": 0}, id="no quota"),
        pytest.param(LS, {}, {"cpu_quota": 1000}, {"cpu_quota": 1000}, id="the kernel's least"),
        pytest.param(
            BE,
            annotation(
                "node.koordinator.sh/extended-resource-spec", {"containers": {"main": BATCH}}
            ),
            {"cpu_quota": 0, "cpu_shares": 2},
            {"cpu_quota": 80_000, "cpu_shares": 512, "memory_limit_in_bytes": 64 * MI},
            id="batch resources",
        ),
        pytest.param(
            LSR,
            annotation("scheduling.koordinator.sh/resource-status", {"cpuset": "1-2"}),
            {},
            {"cpu_quota": -1, "cpuset_cpus": "1-2"},
            id="allocated CPUs, which need no quota",
        ),
        pytest.param(
            LSR,
            annotation("scheduling.koordinator.sh/resource-status", {"cpuset": "1-2"}),
            {"cpuset_cpus": "0-3", "cpuset_mems": "0"},
            {"cpu_quota": -1, "cpuset_cpus": "1-2", "cpuset_mems": "0"},
            id="allocated CPUs in place of kubelet's",
        ),
    ],
)
@pytest.mark.parametrize("stage", ["PreCreateContainer", "PreUpdateContainerResources"])
def test_each_kind_of_value_is_answered(
    tmp_path: Path,
    stage: str,
    labels: dict[str, str],
    annotations: dict[str, str],
    asked: dict[str, Any],
    answered: dict[str, Any],
) -> None:
    async def test() -> None:
        gates = dict.fromkeys(("CPUNormalization", *OTHER_GATES), True)
        async with (
            serving(tmp_path, featureGates=gates) as n,
            n.running(),
            connected(n, tmp_path) as p,
        ):
            if labels is BE:
                p.pod = n.kubelet.add_pod(Limits(), qos="BestEffort")
            usual = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024, **asked}
            answer = await p.container(
                stage, id="c1", labels=labels, annotations=annotations, **usual
            )
            assert answer.container_resources == hook.LinuxContainerResources(**usual | answered)
            assert answer.container_envs == {"A": "1"}
            assert answer.container_annotations == {"a": "b"}

    run(test)


def test_answers_follow_the_objects_and_the_gate(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:

            async def quota_us(name: str) -> int:
                answer = await p.container("PreCreateContainer", name=name)
                return int(answer.container_resources.cpu_quota)

            def engines() -> int:
                return n.daemon.parts.rules.engine.generation

            assert await quota_us("a") == 80_000
            before = engines()
            n.put(node_object("2.0"))
            await until("the new ratio", lambda: engines() > before)
            assert await quota_us("b") == 50_000
            # A container is updated under the ratio that holds now, of what kubelet requested.
            updated = await p.container("PreUpdateContainerResources", name="a", cpu_quota=80_000)
            assert updated.container_resources.cpu_quota == 50_000
            n.tree["featureGates"] = {"CPUNormalization": False}
            before = engines()
            n.daemon.reload()
            await until("the gate", lambda: engines() > before)
            assert await quota_us("c") == 100_000
            # Our value, which the proxy has put under kubelet's, is claimed no more.
            given_back = await p.container(
                "PreUpdateContainerResources", name="b", cpu_quota=50_000, cpuset_cpus="0"
            )
            assert given_back.container_resources.cpu_quota == 100_000
            assert given_back.container_resources.cpuset_cpus == "0"

    run(test)


def test_the_claims_of_strategies_are_in_the_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            claim = Claim(Resource.CPU_CFS_QUOTA, 30_000, policy="s", reason="busy", source="x")
            subject = (Level.CONTAINER, (await seen_pod(n, p)).kube_qos)
            n.daemon.parts.hook_decider.stand(Standing(by_class={subject: (claim,)}))
            answer = await p.container("PreCreateContainer")
            assert answer.container_resources.cpu_quota == 24_000
            n.daemon.parts.hook_decider.stand(Standing())
            answer = await p.container("PreCreateContainer")
            assert answer.container_resources.cpu_quota == 80_000

    run(test)


async def seen_pod(n: Any, p: Any) -> Any:
    """Return the pod as a call of the proxy describes it."""
    decided: list[Any] = []
    decide = Decider.decide

    def noting(self: Decider, engine: Any, subject: Any, stage: Any) -> Any:
        decided.append(subject)
        return decide(self, engine, subject, stage)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Decider, "decide", noting)
        await p.container("PreCreateContainer")
    return decided[0].pod


def test_a_pod_object_counts_before_what_the_request_has_of_the_pod(tmp_path: Path) -> None:
    """A sandbox's labels and annotations are as of its start; the object may have been edited."""

    async def test() -> None:
        async with serving(tmp_path) as n, connected(n, tmp_path) as p:
            n.put(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": "web",
                        "namespace": "default",
                        "uid": p.pod.uid,
                        "labels": LSR,
                        "annotations": annotation(
                            "scheduling.koordinator.sh/resource-status", {"cpuset": "3"}
                        ),
                    },
                    "spec": {"containers": [{"name": "main"}]},
                    "status": {"phase": "Running"},
                }
            )
            async with n.running():
                known = n.daemon.parts.state.pod
                await until("the pod", lambda: known(p.pod.uid) is not None)
                old = annotation("scheduling.koordinator.sh/resource-status", {"cpuset": "1-2"})
                answer = await p.container("PreCreateContainer", labels=LS, annotations=old)
                assert answer.container_resources.cpuset_cpus == "3"

    run(test)


def test_many_calls_at_a_time_get_each_its_own_answer(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            answers = await asyncio.gather(
                *(
                    p.container(
                        "PreCreateContainer",
                        name=f"c{number}",
                        envs={"N": str(number)},
                        cpu_quota=(number + 1) * 10_000,
                    )
                    for number in range(40)
                )
            )
            for number, answer in enumerate(answers):
                assert answer.container_envs == {"N": str(number)}
                assert answer.container_resources.cpu_quota == (number + 1) * 8_000

    run(test)


def test_a_defect_costs_its_own_call_only(tmp_path: Path) -> None:
    """The proxy's failure policy decides about that call; NRI's transport does the same."""

    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:

            def broken(*_: Any) -> Any:
                raise RuntimeError("a defect")

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(n.daemon.parts.hook_decider, "decide", broken)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await p.container("PreCreateContainer")
            assert failed.value.code() is grpc.StatusCode.UNKNOWN
            assert (await p.container("PreCreateContainer")).container_resources.cpu_quota == 80_000
            assert (await n.ask("GET", "/status"))[0] == 200

    run(test)


def test_a_late_end_of_an_earlier_attempt_does_not_forget_the_present_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            await p.container("PreCreateContainer", attempt=0)
            await p.container("PreCreateContainer", attempt=1)
            await p.container("PostStopContainer", id="c0", attempt=0)
            pinned = await p.container(
                "PreUpdateContainerResources", id="c1", attempt=1, cpu_quota=80_000
            )
            assert pinned.container_resources.cpu_quota == 80_000

    run(test)


def test_allocated_cpus_that_are_claimed_no_more_are_given_back(tmp_path: Path) -> None:
    """Kubelet set no CPUs, so the answer opens the set; a number cannot be withdrawn."""

    async def test() -> None:
        gates = dict.fromkeys(("CPUNormalization", *OTHER_GATES), True)
        async with (
            serving(tmp_path, featureGates=gates) as n,
            n.running(),
            connected(n, tmp_path) as p,
        ):
            own = annotation("scheduling.koordinator.sh/resource-status", {"cpuset": "1-2"})
            created = await p.container("PreCreateContainer", labels=LSR, annotations=own)
            assert created.container_resources.cpuset_cpus == "1-2"
            ours: dict[str, Any] = {"cpu_quota": -1, "cpuset_cpus": "1-2"}
            update = await p.container("PreUpdateContainerResources", labels=LS, **ours)
            assert update.container_resources.cpuset_cpus == ""
            assert update.container_resources.cpu_quota == 80_000
            batch = annotation(
                "node.koordinator.sh/extended-resource-spec", {"containers": {"side": BATCH}}
            )
            p.pod = n.kubelet.add_pod(Limits(), qos="BestEffort")
            nothing: dict[str, Any] = {"cpu_quota": 0, "cpu_shares": 2}
            await p.container(
                "PreCreateContainer", name="side", labels=BE, annotations=batch, **nothing
            )
            ours = {"cpu_quota": 80_000, "cpu_shares": 512, "memory_limit_in_bytes": 64 * MI}
            update = await p.container("PreUpdateContainerResources", name="side", **ours)
            resources = update.container_resources
            assert (resources.cpu_shares, resources.memory_limit_in_bytes) == (2, 64 * MI)
            limited = {**nothing, "memory_limit_in_bytes": 128 * MI}
            await p.container(
                "PreCreateContainer", name="side", labels=BE, annotations=batch, **limited
            )
            update = await p.container("PreUpdateContainerResources", name="side", **ours)
            assert update.container_resources.memory_limit_in_bytes == 128 * MI

    run(test)
