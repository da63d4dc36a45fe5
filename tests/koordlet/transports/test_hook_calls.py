"""Rare calls of the hook service: ends, restarts in between, pods that are gone, bad bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from hooks.observed import Container, ContainerState
from hooks.places import place_of
from hooks.subject import ContainerSubject, Requested, make_pod
from koordlet.state.requests_log import RequestsLog
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from tests.koordlet import builders
from tests.koordlet.builders import pod_manifest
from tests.koordlet.daemon.bed import Node, node_object, until
from tests.koordlet.transports.hook_bed import ONE_CPU, Proxy, connected, run, serving
from tests.simulated import kubelet


def _put_running_pod(n: Node, p: Proxy) -> kubelet.Container:
    """Have the pod's object name a running container that asks for one CPU."""
    container = p.pod.start(ONE_CPU)
    limits = {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}
    running = {
        "name": "main",
        "state": {"running": {}},
        "containerID": f"containerd://{container.id}",
    }
    n.put(
        pod_manifest(
            uid=p.pod.uid,
            metadata={"labels": {"koordinator.sh/qosClass": "LS"}},
            spec={"containers": [{"name": "main", "resources": limits}]},
            status={"phase": "Running", "containerStatuses": [running]},
        )
    )
    return container


def _sandbox(p: Proxy) -> hook.PodSandboxHookRequest:
    return hook.PodSandboxHookRequest(
        pod_meta=hook.PodSandboxMetadata(name="web", uid=p.pod.uid, namespace="default"),
        labels={"l": "1"},
        annotations={"a": "1"},
        cgroup_parent=f"/{p.pod.cgroup}",
    )


@pytest.mark.parametrize("stage", ["PreRunPodSandbox", "PostStopPodSandbox"])
def test_each_call_about_a_sandbox_has_kubelet_asked_soon(tmp_path: Path, stage: str) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            called: list[str] = []
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(n.daemon.parts.after_hooks, "proxy_called", called.append)
                answer = await p.ask(stage, _sandbox(p), hook.PodSandboxHookResponse)
            assert called == [p.pod.uid]
            assert answer.labels == {"l": "1"}
            assert answer.annotations == {"a": "1"}
            assert answer.cgroup_parent == f"/{p.pod.cgroup}"
            assert not answer.HasField("resources")

    run(test)


def test_a_stopped_container_is_forgotten_and_its_name_may_be_used_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            await p.container("PreCreateContainer")
            stopped = await p.container("PostStopContainer", id="c1", cpu_quota=80_000)
            assert stopped.container_resources.cpu_quota == 80_000
            # Of a container that is known, 80 ms would be what was delivered to it.
            resized = await p.container("PreUpdateContainerResources", id="c2", cpu_quota=80_000)
            assert resized.container_resources.cpu_quota == 64_000

    run(test)


def test_a_second_stop_of_a_container_is_repeated_like_the_first(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            for _ in range(2):
                answer = await p.container("PostStopContainer", id="c1")
                assert answer.container_resources.cpu_quota == 100_000
                assert answer.container_envs == {"A": "1"}

    run(test)


def test_an_update_after_koordlet_restarted_divides_no_quota_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n:
            async with connected(n, tmp_path) as p:
                container = _put_running_pod(n, p)
                path = n.kubelet.path(container.cgroup, "cpu.max")
                async with n.running():
                    await p.container("PreCreateContainer", id=container.id)
                    await until("the quota", lambda: n.kernel.text(path) == "80000 100000")
            n.daemon = n.new_daemon()
            async with connected(n, tmp_path) as again, n.running():
                again.pod = p.pod
                known = n.daemon.parts.state.container_of
                await until("the container", lambda: known(p.pod.uid, container.id) is not None)
                # Kubelet pins; the proxy has put our quota under that.
                pinned = await again.container(
                    "PreUpdateContainerResources",
                    id=container.id,
                    cpu_quota=80_000,
                    cpuset_cpus="0-1",
                )
                assert pinned.container_resources.cpu_quota == 80_000
                assert pinned.container_resources.cpuset_cpus == "0-1"

    run(test)


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed right after the reply"])
@pytest.mark.parametrize("updated", [False, True], ids=["created", "updated"])
def test_no_source_of_pods_is_needed_to_know_which_values_are_ours_after_a_restart(
    tmp_path: Path, killed: bool, updated: bool
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n:
            files = [n.folder / "run" / f"requests.log{end}" for end in ("", ".staged")]
            left: list[tuple[Path, bytes]] = []
            async with connected(n, tmp_path) as p, n.running():
                await p.container("PreCreateContainer", name="first")  # makes the files
                with pytest.MonkeyPatch.context() as patched:
                    if killed:
                        # As in the milliseconds after a reply.
                        patched.setattr(RequestsLog, "write", lambda self: None)
                    await p.container("PreCreateContainer")
                    if updated:
                        await p.container("PreUpdateContainerResources", id="c1", cpu_quota=50_000)
                    left = [(file, file.read_bytes()) for file in files if file.exists()]
            if killed:
                for file, content in left:
                    file.write_bytes(content)
            n.daemon = n.new_daemon()
            async with connected(n, tmp_path) as again, n.running():
                again.pod = p.pod
                ours = 40_000 if updated else 80_000
                # Kubelet pins; the proxy has put our quota under that.
                pinned = await again.container(
                    "PreUpdateContainerResources", id="c1", cpu_quota=ours, cpuset_cpus="0-1"
                )
                assert pinned.container_resources.cpu_quota == ours
                await again.container("PostStopContainer", id="c1")
                assert list(n.daemon.parts.state.all_remembered()) == [f"proxy/{p.pod.uid}/first/0"]
                ended = _sandbox(again)
                await again.ask("PostStopPodSandbox", ended, hook.PodSandboxHookResponse)
            n.daemon = n.new_daemon()
            assert n.daemon.parts.state.all_remembered() == {}

    run(test)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_runtimes_list_has_our_values_and_they_are_not_decided_on_again(
    tmp_path: Path, restarted: bool
) -> None:
    """The CRI, or NRI once it is connected, lists what the proxy created with our values."""

    async def test() -> None:
        async with serving(tmp_path) as n:
            async with connected(n, tmp_path) as p, n.running():
                await p.container("PreCreateContainer")
                if not restarted:
                    await listed_and_kept(p)
            if restarted:
                n.daemon = n.new_daemon()
                async with n.running():
                    await listed_and_kept(p)

    async def listed_and_kept(p: Proxy) -> None:
        n = p.node
        group = p.pod.start(ONE_CPU)
        path = n.kubelet.path(group.cgroup, "cpu.max")
        n.kernel.write_as("runtime", path, "80000 100000")
        pod = make_pod(
            namespace="default",
            name="web",
            uid=p.pod.uid,
            labels={"koordinator.sh/qosClass": "LS"},
            annotations={},
            kube_qos=place_of(p.pod.cgroup)[1],
            cgroup=p.pod.cgroup,
        )
        current = Requested(cpu_shares=1024, cfs_quota_us=80_000, cfs_period_us=100_000)
        assert p.pod.sandbox is not None
        sandbox = builders.sandbox(pod, p.pod.sandbox.id)
        container = Container(
            ContainerSubject(pod=pod, name="main", id=group.id, cgroup=group.cgroup),
            p.pod.sandbox.id,
            current=current,
            state=ContainerState.RUNNING,
        )
        parts = n.daemon.parts
        parts.state.runtime_list([sandbox], [container])
        found = parts.state.container(group.id)
        assert found is not None
        assert found.requested.cfs_quota_us == 100_000
        parts.after_hooks.state_changed("test")
        n.put(node_object("2.0"))
        await until("the new quota", lambda: n.kernel.text(path) == "50000 100000")

    run(test)


@pytest.mark.parametrize(
    ("period_us", "quota_us", "answered_us"),
    [
        (100_000, 80_000, 80_000),
        (50_000, 40_000, 40_000),
        (100_000, 60_000, 48_000),
        (50_000, 30_000, 24_000),
    ],
    ids=["ours", "ours in another period", "resized", "resized in another period"],
)
def test_the_quota_of_a_container_older_than_koordlet_is_ours_or_kubelets(
    tmp_path: Path, period_us: int, quota_us: int, answered_us: int
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, connected(n, tmp_path) as p:
            container = _put_running_pod(n, p)
            async with n.running():
                known = n.daemon.parts.state.container_of
                await until("the container", lambda: known(p.pod.uid, container.id) is not None)
                answer = await p.container(
                    "PreUpdateContainerResources",
                    id=container.id,
                    cpu_period=period_us,
                    cpu_quota=quota_us,
                )
                assert answer.container_resources.cpu_quota == answered_us

    run(test)


def test_a_quota_by_a_former_ratio_is_not_divided_again_where_only_the_journal_has_it(
    tmp_path: Path,
) -> None:
    """As where the runtime has it through NRI, or the requests log was lost."""

    async def test() -> None:
        async with serving(tmp_path) as n:
            async with connected(n, tmp_path) as p:
                container = _put_running_pod(n, p)
                path = n.kubelet.path(container.cgroup, "cpu.max")
                async with n.running():
                    await until("the quota", lambda: n.kernel.text(path) == "80000 100000")
            n.put(node_object("2.0"))
            n.daemon = n.new_daemon()
            async with connected(n, tmp_path) as again, n.running():
                again.pod = p.pod
                await until("the new quota", lambda: n.kernel.text(path) == "50000 100000")
                # Kubelet pins; the proxy has put the former quota under that.
                pinned = await again.container(
                    "PreUpdateContainerResources",
                    id=container.id,
                    cpu_quota=80_000,
                    cpuset_cpus="0-1",
                )
                assert pinned.container_resources.cpu_quota == 50_000
                assert pinned.container_resources.cpuset_cpus == "0-1"
                resized = await again.container(
                    "PreUpdateContainerResources", id=container.id, cpu_quota=70_000
                )
                assert resized.container_resources.cpu_quota == 35_000

    run(test)


def test_a_call_about_a_pod_that_was_deleted_is_decided_by_what_it_says_itself(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, connected(n, tmp_path) as p:
            container = _put_running_pod(n, p)
            async with n.running():
                pod = n.daemon.parts.state.pod
                await until("the pod", lambda: pod(p.pod.uid) is not None)
                objects = (n.folder / "objects.d").iterdir()
                (file,) = (each for each in objects if p.pod.uid in each.read_text())
                file.unlink()
                await until("no pod", lambda: pod(p.pod.uid) is None)
                update = await p.container("PreUpdateContainerResources", id=container.id)
                assert update.container_resources.cpu_quota == 80_000
                created = await p.container("PreCreateContainer")
                assert created.container_resources.cpu_quota == 80_000

    run(test)


def test_a_call_without_resources_gets_what_is_decided_without_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            request = hook.ContainerResourceHookRequest(
                pod_meta=hook.PodSandboxMetadata(name="web", uid=p.pod.uid, namespace="default"),
                container_meta=hook.ContainerMetadata(name="main"),
                pod_cgroup_parent=f"/{p.pod.cgroup}",
            )
            answer = await p.ask("PreCreateContainer", request, hook.ContainerResourceHookResponse)
            assert answer.container_resources.cpu_quota == 0
            assert answer.pod_cgroup_parent == f"/{p.pod.cgroup}"

    run(test)


@pytest.mark.parametrize("stage", ["PreStartContainer", "PostStartContainer"])
def test_a_stage_that_decides_nothing_is_repeated(tmp_path: Path, stage: str) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            answer = await p.container(stage, id="c1")
            assert answer.container_resources.cpu_quota == 100_000
            assert answer.container_annotations == {"a": "b"}

    run(test)


def test_an_unknown_stage_is_refused_by_name_and_the_known_ones_go_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await p.container("PreCheckpointContainer")
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (await p.container("PreCreateContainer")).container_resources.cpu_quota == 80_000

    run(test)


class _Bytes:
    """A request that is these bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializeToString(self) -> bytes:  # noqa: N802 - as messages name it
        return self._content


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a" + b"\x80" * 20, grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x0a\x00" * (9 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["no message", "endless length", "more than 16 MiB"],
)
def test_bytes_that_are_no_request_cost_that_call_only(
    tmp_path: Path, content: bytes, code: grpc.StatusCode, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with serving(tmp_path) as n, n.running(), connected(n, tmp_path) as p:
            bad: Any = _Bytes(content)
            caplog.clear()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await p.ask("PreCreateContainer", bad, hook.ContainerResourceHookResponse)
            assert refused.value.code() is code
            assert not caplog.records
            assert (await p.container("PreCreateContainer")).container_resources.cpu_quota == 80_000

    run(test)


def test_a_stage_that_is_disabled_is_not_registered(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, disabled_stages=["PostStopContainer"]) as n, n.running():
            text = (tmp_path / "hookserver.d" / "koordlet.json").read_text()
            assert "PostStopContainer" not in text
            assert "PostStopPodSandbox" in text

    run(test)
