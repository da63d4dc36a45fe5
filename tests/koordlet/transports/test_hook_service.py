"""The hook service: a proxy's questions, answered by the daemon's engine."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim
from hooks.decision import Decision, Outcome
from hooks.subject import ContainerSubject
from koordctl.status import status_text
from koordlet.transports.hook_service import carry
from linux.resources import Resource, Value
from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from tests.koordlet.builders import pod_manifest
from tests.koordlet.daemon.bed import until
from tests.koordlet.transports.hook_bed import ONE_CPU, connected, run, serving
from tests.runtime_proxy.fake_cri import FakeCri
from tests.runtime_proxy.processes import proxy


def test_a_container_gets_its_decided_values_and_everything_else_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            answer = await p.container("PreCreateContainer", cpuset_mems="0", oom_score_adj=7)
            resources = answer.container_resources
            assert resources.cpu_quota == 80_000
            assert resources.cpu_shares == 1024
            assert resources.cpuset_mems == "0"
            assert resources.oom_score_adj == 7
            assert answer.container_annotations == {"a": "b"}
            assert answer.container_envs == {"A": "1"}
            assert answer.pod_cgroup_parent == f"/{p.pod.cgroup}"

    run(test)


def test_an_environment_that_a_policy_decides_joins_the_containers_own(tmp_path: Path) -> None:
    gpus = json.dumps({"gpu": [{"minor": 1}, {"minor": 3}]})

    async def test() -> None:
        gates = {"GPUEnvInject": True}
        async with (
            serving(tmp_path, featureGates=gates) as n,
            n.running(),
            connected(n, tmp_path) as p,
        ):
            allocated = {"scheduling.koordinator.sh/device-allocated": gpus}
            answer = await p.container("PreCreateContainer", annotations=allocated)
            assert answer.container_envs == {"A": "1", "NVIDIA_VISIBLE_DEVICES": "1,3"}
            assert answer.container_annotations == {"a": "b"}
            plain = await p.container("PreCreateContainer")
            assert plain.container_envs == {"A": "1"}

    run(test)


def outcome(resource: Resource, value: Value) -> Outcome:
    return Outcome(value, Claim(resource, value, "policy", "reason", "source"))


@pytest.mark.parametrize(
    ("resource", "key", "value", "expected"),
    [
        (Resource.CPU_SHARES, "", 7, {"cpu_shares": 7}),
        (Resource.CPU_CFS_QUOTA, "", -1, {"cpu_quota": -1}),
        (Resource.CPU_CFS_PERIOD, "", 7, {"cpu_period": 7}),
        (Resource.MEMORY_LIMIT, "", 7, {"memory_limit_in_bytes": 7}),
        (Resource.OOM_SCORE_ADJ, "", -7, {"oom_score_adj": -7}),
        (Resource.CPUSET_CPUS, "", CpuSet.parse("0-3,7"), {"cpuset_cpus": "0-3,7"}),
        (Resource.CPUSET_MEMS, "", CpuSet.parse("1"), {"cpuset_mems": "1"}),
        # The protocol has no field for it.
        (Resource.CPU_IDLE, "", 1, {}),
    ],
)
def test_a_decision_goes_into_the_field_of_its_resource(
    resource: Resource, key: str, value: Value, expected: dict[str, Any]
) -> None:
    answer = hook.ContainerResourceHookResponse(container_envs={"A": "1"})
    carry(Decision({(resource, key): outcome(resource, value)}), answer)
    assert answer.container_resources == hook.LinuxContainerResources(**expected)
    assert answer.container_envs == {"A": "1"}


def test_decided_variables_go_into_the_environment_by_name() -> None:
    answer = hook.ContainerResourceHookResponse(container_envs={"A": "1", "B": "2"})
    decided = {
        (Resource.ENV, name): outcome(Resource.ENV, value)
        for name, value in (("B", "decided"), ("C", ""))
    }
    carry(Decision(decided), answer)
    assert answer.container_envs == {"A": "1", "B": "decided", "C": ""}
    assert not answer.HasField("container_resources")


def test_the_class_of_an_unknown_pod_follows_from_its_cgroup_parent(tmp_path: Path) -> None:
    """Of the cgroup parent the QoS class is read where the request has no other source."""

    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            decided: list[ContainerSubject] = []
            decider = n.daemon.parts.hook_decider
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(decider, "decide", noting(decided, decider.decide))
                await p.container("PreCreateContainer", id="c1")
            (subject,) = decided
            assert subject.pod.cgroup == p.pod.cgroup
            assert subject.pod.kube_qos is KubeQoS.BURSTABLE
            assert subject.cgroup.startswith(f"{p.pod.cgroup}/")

    run(test)


def noting(
    subjects: list[ContainerSubject], decide: Callable[..., Decision]
) -> Callable[..., Decision]:
    def noted(engine: Any, subject: ContainerSubject, stage: Any) -> Decision:
        subjects.append(subject)
        return decide(engine, subject, stage)

    return noted


def test_a_quota_is_divided_once_although_the_proxy_reports_our_own_answer(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            await p.container("PreCreateContainer")
            # Kubelet pins; the proxy puts the values in force, ours, under that.
            pinned = await p.container(
                "PreUpdateContainerResources", id="c1", cpu_quota=80_000, cpuset_cpus="0"
            )
            assert pinned.container_resources.cpu_quota == 80_000
            assert pinned.container_resources.cpuset_cpus == "0"
            resized = await p.container("PreUpdateContainerResources", id="c1", cpu_quota=50_000)
            assert resized.container_resources.cpu_quota == 40_000
            again = await p.container("PreUpdateContainerResources", id="c1", cpu_quota=40_000)
            assert again.container_resources.cpu_quota == 40_000

    run(test)


def test_an_update_counts_for_the_reconciler_before_any_list_has_it(tmp_path: Path) -> None:
    """Kubelet next lowers the pod's quota, which the kernel refuses above a child's old one."""

    async def test() -> None:
        async with serving(tmp_path) as n, connected(n, tmp_path) as p:
            container = p.pod.start(ONE_CPU)
            limits = {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
            state = {"name": "main", "state": {"running": {}}}
            n.put(
                pod_manifest(
                    uid=p.pod.uid,
                    metadata={"labels": {"koordinator.sh/qosClass": "LS"}},
                    spec={"containers": [{"name": "main", "resources": limits}]},
                    status={
                        "phase": "Running",
                        "containerStatuses": [
                            {**state, "containerID": f"containerd://{container.id}"}
                        ],
                    },
                )
            )
            path = n.kubelet.path(container.cgroup, "cpu.max")
            async with n.running():
                await until("the quota", lambda: n.kernel.text(path) == "80000 100000")
                requested: list[str] = []
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(n.daemon.parts.after_hooks, "requested", requested.append)
                    await p.container(
                        "PreUpdateContainerResources", id=container.id, cpu_quota=60_000
                    )
                assert requested == [container.cgroup]
                await until("the new quota", lambda: n.kernel.text(path) == "48000 100000")

    run(test)


@pytest.mark.parametrize(
    ("period_us", "quota_us"), [(50_000, 40_000), (10_000, 8_000), (33_333, 26_667)]
)
def test_a_quota_follows_the_containers_own_period(
    tmp_path: Path, period_us: int, quota_us: int
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            answer = await p.container(
                "PreCreateContainer", cpu_period=period_us, cpu_quota=period_us
            )
            assert answer.container_resources.cpu_quota == quota_us

    run(test)


@pytest.mark.parametrize("policy", ["Fail", "Ignore"])
def test_a_call_for_which_a_policy_fails_follows_the_failure_policy(
    tmp_path: Path, policy: str
) -> None:
    bad = {"scheduling.koordinator.sh/device-allocated": "{broken"}

    async def test() -> None:
        changes: dict[str, Any] = {"featureGates": {"GPUEnvInject": True, "CPUNormalization": True}}
        async with serving(tmp_path, failure_policy=policy, **changes) as n, n.running():
            _, status = await n.ask("GET", "/status")
            assert status["hookService"]["failurePolicy"]["configured"] == policy
            fails = status["hookService"]["failurePolicy"]["inForce"].startswith("a call fails")
            assert fails is (policy == "Fail")
            row = next(line for line in status_text(status).splitlines() if "proxy" in line)
            assert f"on failure {policy}: a call " in row
            async with connected(n, tmp_path) as p:
                assert (await p.container("PreCreateContainer")).container_envs == {"A": "1"}
                if policy == "Fail":
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await p.container("PreCreateContainer", annotations=bad)
                    assert refused.value.code() is grpc.StatusCode.UNKNOWN
                    assert "policy GPUEnvInject: " in str(refused.value.details())
                    superseded: list[object] = []
                    hooks = n.daemon.parts.after_hooks
                    with pytest.MonkeyPatch.context() as patched:
                        patched.setattr(hooks, "superseded", lambda *_: superseded.append(1))
                        with pytest.raises(grpc.aio.AioRpcError):
                            await p.container(
                                "PreUpdateContainerResources",
                                id="c1",
                                cpu_quota=60_000,
                                annotations=bad,
                            )
                    assert not superseded
                else:
                    answer = await p.container("PreCreateContainer", annotations=bad)
                    assert answer.container_resources.cpu_quota == 80_000

    run(test)


def test_while_nri_protects_the_answers_only_echo(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            serving(tmp_path, nri={"enabled": True}) as n,
            n.running(),
            connected(n, tmp_path) as p,
        ):
            for stage in ("PreCreateContainer", "PreUpdateContainerResources"):
                answer = await p.container(stage, id="c1")
                assert answer.container_resources.cpu_quota == 100_000

    run(test)


def test_an_update_supersedes_deliveries_of_the_values_that_it_changes(tmp_path: Path) -> None:
    """What NRI delivered before, while it was connected, is no original of these any more."""

    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            superseded: list[tuple[str, set[Resource]]] = []

            def noting(container_id: str, resources: Collection[Resource]) -> None:
                superseded.append((container_id, set(resources)))

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(n.daemon.parts.after_hooks, "superseded", noting)
                await p.container("PreCreateContainer")
                assert superseded == []
                await p.container("PreUpdateContainerResources", id="c1", cpu_quota=80_000)
                await p.container(
                    "PreUpdateContainerResources", id="c1", cpu_quota=50_000, cpuset_cpus="0"
                )
            assert superseded == [
                ("c1", set()),
                ("c1", {Resource.CPU_CFS_QUOTA, Resource.CPUSET_CPUS}),
            ]

    run(test)


def test_a_sandbox_is_echoed(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            request = hook.PodSandboxHookRequest(
                pod_meta=hook.PodSandboxMetadata(name="web", uid="u", namespace="default"),
                labels={"l": "1"},
                annotations={"a": "1"},
                cgroup_parent="/kubepods/podu",
                resources=hook.LinuxContainerResources(cpu_shares=2),
            )
            answer = await p.ask("PreRunPodSandbox", request, hook.PodSandboxHookResponse)
            assert answer.labels == {"l": "1"}
            assert answer.annotations == {"a": "1"}
            assert answer.cgroup_parent == "/kubepods/podu"
            assert answer.resources.cpu_shares == 2

    run(test)


def test_the_file_is_there_while_the_socket_is_served_and_goes_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "hookserver.d" / "koordlet.json"
        async with serving(tmp_path) as n:
            async with n.running():
                document = json.loads(file.read_text())
                assert document["remote-endpoint"] == str(tmp_path / "koordlet.sock")
                assert document["failure-policy"] == "Ignore"
                assert "PreCreateContainer" in document["runtime-hooks"]
                assert stat.S_IMODE(file.stat().st_mode) == 0o644
                assert stat.S_IMODE((tmp_path / "koordlet.sock").stat().st_mode) == 0o600
            assert not file.exists()
            assert not (tmp_path / "koordlet.sock").exists()

    run(test)


def test_a_folder_that_cannot_be_written_is_said_and_the_daemon_runs(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "hookserver.d").write_text("a file in the folder's place")
        async with serving(tmp_path) as n, n.running():
            kinds = [event.kind for event in n.daemon.parts.events.latest()]
            assert "hook-registration" in kinds

    run(test)


def test_our_proxy_asks_our_daemon(tmp_path: Path) -> None:
    """The whole chain: a CRI call through the proxy's process, decided by this daemon."""

    def create(socket: Path, parent: str, uid: str) -> None:
        with grpc.insecure_channel(f"unix://{socket}") as opened:
            channel: Any = opened
            config = cri.PodSandboxConfig(
                metadata=cri.PodSandboxMetadata(name="web", uid=uid, namespace="default"),
                labels={"koordinator.sh/qosClass": "LS"},
                linux=cri.LinuxPodSandboxConfig(cgroup_parent=parent),
            )
            request = cri.RunPodSandboxRequest(config=config)
            answer = channel.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")(
                request.SerializeToString(), timeout=5
            )
            create = cri.CreateContainerRequest(
                pod_sandbox_id=cri.RunPodSandboxResponse.FromString(answer).pod_sandbox_id,
                config=cri.ContainerConfig(
                    metadata=cri.ContainerMetadata(name="main"),
                    linux=cri.LinuxContainerConfig(
                        resources=cri.LinuxContainerResources(
                            cpu_period=100_000, cpu_quota=100_000, cpu_shares=1024
                        )
                    ),
                ),
                sandbox_config=config,
            )
            channel.unary_unary("/runtime.v1.RuntimeService/CreateContainer")(
                create.SerializeToString(), timeout=5
            )

    async def test() -> None:
        runtime = FakeCri(tmp_path / "runtime.sock")
        runtime.start()
        try:
            async with serving(tmp_path) as n, n.running():
                pod = n.kubelet.add_pod(ONE_CPU)
                flags = [f"--hook-server-dir={tmp_path / 'hookserver.d'}"]
                with proxy(runtime.socket, flags=flags) as running:
                    await until("the file seen", lambda: "is registered" in running.log_text())
                    await asyncio.to_thread(create, running.socket, f"/{pod.cgroup}", pod.uid)
        finally:
            runtime.stop()
        (asked,) = runtime.asked("CreateContainer")
        assert asked.config.linux.resources.cpu_quota == 80_000
        assert asked.config.linux.resources.cpu_shares == 1024

    run(test)
