"""Hooks through the whole process: a CRI client, the proxy, a hook server and a runtime."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.checkpoint import Checkpoint
from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.grpc import add_prefix
from tests.runtime_proxy.fake_cri import FakeCri, connected, fake_cri
from tests.runtime_proxy.node import succeeds
from tests.runtime_proxy.processes import (
    STAGES,
    HookProcess,
    HookService,
    Proxy,
    answering,
    echo,
    hook_process,
    hook_service,
    proxy,
)
from tests.waiting import wait_until

PARENT = "/kubepods/besteffort/podu-1"


def sandbox_config(uid: str = "u-1", **fields: Any) -> cri.PodSandboxConfig:
    return cri.PodSandboxConfig(
        **{
            "metadata": cri.PodSandboxMetadata(
                name="web-0", uid=uid, namespace="default", attempt=3
            ),
            "labels": {"io.kubernetes.pod.uid": uid, "koordinator.sh/qosClass": "BE"},
            "annotations": {"a": "1"},
            "linux": cri.LinuxPodSandboxConfig(
                cgroup_parent=PARENT, resources=cri.LinuxContainerResources(cpu_shares=2)
            ),
            **fields,
        }
    )


def container_config(**fields: Any) -> cri.ContainerConfig:
    return cri.ContainerConfig(
        **{
            "metadata": cri.ContainerMetadata(name="main", attempt=1),
            "envs": [cri.KeyValue(key="A", value=b"1"), cri.KeyValue(key="RAW", value=b"\xff\xfe")],
            "annotations": {"c": "1"},
            "linux": cri.LinuxContainerConfig(
                resources=cri.LinuxContainerResources(
                    cpu_period=100_000, cpu_quota=200_000, cpu_shares=2048, oom_score_adj=996
                )
            ),
            **fields,
        }
    )


class Kubelet:
    """CRI calls over one channel; answers are parsed, errors are grpc.RpcError."""

    def __init__(self, channel: Any, package: str = "runtime.v1") -> None:
        self._channel = channel
        self._package = package

    def call(self, method: str, request: Any, *, timeout: float = 10) -> Any:
        invoke = self._channel.unary_unary(f"/{self._package}.RuntimeService/{method}")
        answer = invoke(request.SerializeToString(), timeout=timeout)
        return getattr(cri, f"{method}Response").FromString(answer)

    def run(self, config: cri.PodSandboxConfig | None = None) -> str:
        request = cri.RunPodSandboxRequest(config=config or sandbox_config(), runtime_handler="rh")
        return str(self.call("RunPodSandbox", request).pod_sandbox_id)

    def create(self, sandbox: str, **fields: Any) -> str:
        request = cri.CreateContainerRequest(
            pod_sandbox_id=sandbox, config=container_config(), sandbox_config=sandbox_config()
        )
        for name, value in fields.items():
            getattr(request, name).CopyFrom(value)
        return str(self.call("CreateContainer", request).container_id)

    def update(self, container: str, **resources: Any) -> None:
        self.call(
            "UpdateContainerResources",
            cri.UpdateContainerResourcesRequest(
                container_id=container, linux=cri.LinuxContainerResources(**resources)
            ),
        )

    def start(self, container: str) -> None:
        self.call("StartContainer", cri.StartContainerRequest(container_id=container))

    def stop(self, container: str) -> None:
        self.call("StopContainer", cri.StopContainerRequest(container_id=container))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[FakeCri]:
    with fake_cri(tmp_path) as running:
        yield running


@pytest.fixture
def running(runtime: FakeCri) -> Iterator[Proxy]:
    with proxy(runtime.socket, flags=["--hook-timeout=1s"]) as started:
        yield started


@pytest.fixture
def kubelet(running: Proxy) -> Iterator[Kubelet]:
    with connected(running.socket) as channel:
        yield Kubelet(channel)


def test_a_hook_that_echoes_leaves_every_request_octet_for_octet(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    config = container_config()
    config.annotations.update({f"k{n}": "v" for n in range(30)})
    sandbox = kubelet.run()
    container = kubelet.create(sandbox, config=config)
    kubelet.start(container)
    kubelet.update(container, cpuset_cpus="0-7")
    assert runtime.asked("RunPodSandbox")[0].config == sandbox_config()
    assert runtime.asked("CreateContainer")[0].config == config
    assert runtime.updated[container] == cri.LinuxContainerResources(cpuset_cpus="0-7")
    assert [name for name, _ in service.calls][:3] == [
        "PreRunPodSandbox",
        "PreCreateContainer",
        "PreStartContainer",
    ]


def test_hooks_get_what_the_protocol_promises(kubelet: Kubelet, service: HookService) -> None:
    container = kubelet.create(kubelet.run())
    kubelet.update(container, cpu_quota=-1)
    (pod,) = service.asked("PreRunPodSandbox")
    assert pod.pod_meta == hook.PodSandboxMetadata(
        name="web-0", uid="u-1", namespace="default", attempt=3
    )
    assert pod.runtime_handler == "rh"
    assert pod.cgroup_parent == PARENT
    assert pod.resources.cpu_shares == 2
    (created,) = service.asked("PreCreateContainer")
    assert created.container_meta == hook.ContainerMetadata(name="main", attempt=1)
    assert created.pod_labels["koordinator.sh/qosClass"] == "BE"
    assert created.pod_annotations == {"a": "1"}
    assert created.container_annotations == {"c": "1"}
    assert created.container_envs == {"A": "1"}, "what is not UTF-8 cannot be told"
    assert created.container_resources.cpu_quota == 200_000
    assert created.pod_cgroup_parent == PARENT
    (updated,) = service.asked("PreUpdateContainerResources")
    assert updated.container_meta.id == container
    assert updated.container_resources.cpu_quota == -1
    assert updated.container_resources.cpu_shares == 2048


def test_a_hooks_changes_reach_the_runtime_and_nothing_else_does(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    def change(answer: Any) -> None:
        answer.container_resources.cpu_shares = 2
        answer.container_resources.cpu_quota = -1
        answer.container_envs["NEW"] = "x"
        answer.container_annotations["added"] = "y"

    service.answers["PreCreateContainer"] = answering(change)
    kubelet.create(kubelet.run())
    config = runtime.asked("CreateContainer")[0].config
    expected = container_config()
    expected.linux.resources.cpu_shares = 2
    expected.linux.resources.cpu_quota = -1
    expected.envs.add(key="NEW", value=b"x")
    expected.annotations["added"] = "y"
    assert config == expected


def test_what_a_hook_changes_in_the_sandbox_holds_for_its_containers(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    def change(answer: Any) -> None:
        answer.cgroup_parent = "/moved/podu-1"
        answer.annotations["pod-note"] = "n"
        answer.labels["io.kubernetes.pod.uid"] = "stolen"

    service.answers["PreRunPodSandbox"] = answering(change)
    sandbox = kubelet.run()
    kubelet.create(sandbox)
    ran = runtime.asked("RunPodSandbox")[0].config
    assert ran.linux.cgroup_parent == "/moved/podu-1"
    assert ran.labels["io.kubernetes.pod.uid"] == "u-1"
    created = runtime.asked("CreateContainer")[0].sandbox_config
    assert created.linux.cgroup_parent == "/moved/podu-1"
    assert created.annotations == {"a": "1", "pod-note": "n"}
    assert service.asked("PreCreateContainer")[0].pod_cgroup_parent == "/moved/podu-1"


def test_an_empty_cpuset_in_an_answer_keeps_kubelets_pinning_out(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    def unpin(answer: Any) -> None:
        answer.container_resources.cpuset_cpus = ""

    container = kubelet.create(kubelet.run())
    service.answers["PreUpdateContainerResources"] = answering(unpin)
    kubelet.update(container, cpuset_cpus="0-7")
    forwarded = runtime.asked("UpdateContainerResources")[0]
    assert forwarded.HasField("linux")
    assert forwarded.linux == cri.LinuxContainerResources()


def test_a_refused_update_is_not_remembered(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    container = kubelet.create(kubelet.run())
    runtime.fail["UpdateContainerResources"] = grpc.StatusCode.INTERNAL
    with pytest.raises(grpc.RpcError):
        kubelet.update(container, cpu_shares=7)
    runtime.fail.clear()
    kubelet.update(container, cpu_quota=9)
    told = service.asked("PreUpdateContainerResources")[-1].container_resources
    assert (told.cpu_shares, told.cpu_quota) == (2048, 9)


def test_the_skip_label_keeps_hooks_away_for_the_pods_whole_life(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    labels = {"runtimeproxy.koordinator.sh/skip-hookserver": "true"}
    sandbox = kubelet.run(sandbox_config(labels=labels))
    container = kubelet.create(sandbox)
    kubelet.start(container)
    kubelet.update(container, cpu_shares=5)
    kubelet.stop(container)
    kubelet.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    kubelet.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    runtime.wait_quiet()
    assert service.calls == []
    assert len(runtime.asked("RemovePodSandbox")) == 1


def test_stops_are_reported_once_even_when_kubelet_repeats_them(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    sandbox = kubelet.run()
    first, second = kubelet.create(sandbox), kubelet.create(sandbox)
    runtime.fail["StopContainer"] = grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(grpc.RpcError):
        kubelet.stop(first)
    runtime.fail.clear()
    kubelet.stop(first)
    kubelet.stop(first)
    for _ in range(3):
        kubelet.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    service.wait_for("PostStopPodSandbox")
    kubelet.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    runtime.wait_quiet()
    stopped = [r.container_meta.id for r in service.asked("PostStopContainer")]
    assert stopped == [first, second]
    assert len(service.asked("PostStopPodSandbox")) == 1
    assert len(service.asked("PreRemoveRunPodSandbox")) == 1


def test_a_container_that_ended_by_itself_is_reported_when_it_is_removed(
    kubelet: Kubelet, service: HookService
) -> None:
    container = kubelet.create(kubelet.run())
    kubelet.call("RemoveContainer", cri.RemoveContainerRequest(container_id=container))
    assert service.wait_for("PostStopContainer")[0].container_meta.id == container


def test_a_sandbox_removed_while_it_runs_is_reported_with_its_containers(
    kubelet: Kubelet, service: HookService
) -> None:
    sandbox = kubelet.run()
    container = kubelet.create(sandbox)
    kubelet.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    service.wait_for("PostStopPodSandbox")
    told = service.asked("PostStopContainer")
    assert [(r.container_meta.id, r.pod_meta.uid) for r in told] == [(container, "u-1")]


def test_after_stages_of_a_pod_come_in_order_however_slow_the_first_is(
    kubelet: Kubelet, service: HookService
) -> None:
    ended: list[str] = []

    def slow(request: Any) -> Any:
        time.sleep(0.3)
        ended.append(request.container_meta.id)
        return echo(request)

    def last(request: Any) -> Any:
        ended.append("sandbox")
        return echo(request)

    service.answers["PostStopContainer"] = slow
    service.answers["PostStopPodSandbox"] = last
    sandbox = kubelet.run()
    first, second, third = (kubelet.create(sandbox) for _ in range(3))
    kubelet.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    kubelet.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    wait_until(lambda: "sandbox" in ended, "all after-stages")
    assert ended == [first, second, third, "sandbox"], "also of what is removed by then"
    ended.clear()
    sandbox = kubelet.run()
    container = kubelet.create(sandbox)
    kubelet.stop(container)
    kubelet.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    wait_until(lambda: len(ended) == 2, "both after-stages")
    assert ended == [container, "sandbox"]


def test_a_sandboxes_resources_pass_a_hook(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    def shares(answer: Any) -> None:
        answer.resources.cpu_shares = 11

    service.answers["PreUpdatePodSandboxResources"] = answering(shares)
    sandbox = kubelet.run()
    kubelet.call(
        "UpdatePodSandboxResources",
        cri.UpdatePodSandboxResourcesRequest(
            pod_sandbox_id=sandbox, resources=cri.LinuxContainerResources(cpu_shares=5, cpu_quota=7)
        ),
    )
    forwarded = runtime.asked("UpdatePodSandboxResources")[0].resources
    assert (forwarded.cpu_shares, forwarded.cpu_quota) == (11, 7)


def test_servers_are_asked_in_order_and_see_each_others_changes(
    running: Proxy, kubelet: Kubelet, runtime: FakeCri
) -> None:
    def add(name: str) -> Callable[[Any], Any]:
        return answering(lambda answer: answer.container_envs.update({"ORDER": name}))

    with (
        hook_service(running.folder / "b.sock", {"PreCreateContainer": add("second")}) as second,
        hook_service(running.folder / "a.sock", {"PreCreateContainer": add("first")}) as first,
    ):
        running.register(second.socket, ["PreCreateContainer"], name="20-b.json")
        running.register(first.socket, ["PreCreateContainer"], name="10-a.json")
        kubelet.create(kubelet.run())
        assert "ORDER" not in first.asked("PreCreateContainer")[0].container_envs
        assert second.asked("PreCreateContainer")[0].container_envs["ORDER"] == "first"
    envs = {e.key: e.value for e in runtime.asked("CreateContainer")[0].config.envs}
    assert envs["ORDER"] == b"second"
    assert envs["RAW"] == b"\xff\xfe"


def test_a_v1alpha2_kubelet_gets_hooks_too(tmp_path: Path) -> None:
    with fake_cri(tmp_path, "runtime.v1alpha2") as runtime, proxy(runtime.socket) as running:
        running.wait_for_log("recovered")
        with hook_service(running.folder / "hook.sock") as service:
            running.register(service.socket, STAGES)
            with connected(running.socket) as channel:
                kubelet = Kubelet(channel, "runtime.v1alpha2")
                kubelet.create(kubelet.run())
            assert len(service.asked("PreCreateContainer")) == 1


def test_a_registration_that_goes_takes_its_hooks_along(
    running: Proxy, kubelet: Kubelet, service: HookService
) -> None:
    kubelet.run()
    (running.hook_dir / "koordlet.json").unlink()
    running.wait_for_log("hook server is gone")
    kubelet.run()
    assert len(service.asked("PreRunPodSandbox")) == 1


def test_requests_that_cannot_be_read_reach_the_runtime_as_they_are(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.call("RunPodSandbox", _Raw(b"\xff\xff\xff"))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "deserializ" in error.details().lower(), "the runtime's own words"
    assert service.calls == []


class _Raw:
    def __init__(self, octets: bytes) -> None:
        self._octets = octets

    def SerializeToString(self) -> bytes:  # noqa: N802 - stands for a message
        return self._octets


def test_a_rewritten_registration_lets_the_calls_under_way_end(
    running: Proxy, kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    running.register(service.socket, STAGES, policy="Fail")
    go_on = threading.Event()
    service.answers["PreRunPodSandbox"] = lambda request: go_on.wait(5) and echo(request)
    with futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(kubelet.run)
        service.wait_for("PreRunPodSandbox")
        running.register(service.socket, ["PreRunPodSandbox"], policy="Fail")
        go_on.set()
        call.result(timeout=5)
    assert len(runtime.asked("RunPodSandbox")) == 1


# -- when the hook server does not answer -------------------------------------------------------


def test_under_ignore_a_dead_server_costs_nothing_and_is_used_again_when_it_is_back(
    running: Proxy, kubelet: Kubelet, service: HookService
) -> None:
    kubelet.run()
    service.stop()
    began = time.monotonic()
    for _ in range(20):
        kubelet.run()
    assert time.monotonic() - began < 1
    assert running.log_text().count("hook server is given up for now") == 1
    assert running.log_text().count("hook gave no answer") == 1
    service.start()
    running.wait_for_log("hook server is back")
    before = len(service.asked("PreRunPodSandbox"))
    kubelet.run()
    assert len(service.asked("PreRunPodSandbox")) == before + 1
    assert running.log_text().count("hook answers again") == 1


def test_under_fail_a_dead_server_refuses_with_the_documented_error(
    running: Proxy, kubelet: Kubelet, runtime: FakeCri
) -> None:
    running.register(running.folder / "nobody.sock", ["PreRunPodSandbox"], policy="Fail")
    for _ in range(5):
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.run()
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNKNOWN
        assert error.details().startswith("hook server err: ")
        assert "nobody.sock" in error.details()
    runtime.wait_quiet()
    assert runtime.asked("RunPodSandbox") == []
    kubelet.run(sandbox_config(labels={"runtimeproxy.koordinator.sh/skip-hookserver": "true"}))
    assert len(runtime.asked("RunPodSandbox")) == 1


def test_under_fail_nothing_that_stops_or_removes_is_ever_refused(
    running: Proxy, kubelet: Kubelet, runtime: FakeCri
) -> None:
    sandbox = kubelet.run()
    container = kubelet.create(sandbox)
    running.register(
        running.folder / "nobody.sock",
        ["PostStopContainer", "PostStopPodSandbox", "PreRemoveRunPodSandbox"],
        policy="Fail",
    )
    kubelet.stop(container)
    kubelet.call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
    kubelet.call("RemovePodSandbox", cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox))
    assert len(runtime.asked("RemovePodSandbox")) == 1


@pytest.fixture
def stoppable(running: Proxy) -> Iterator[HookProcess]:
    with hook_process(running.folder / "hook.sock") as process:
        yield process


def test_a_hung_server_costs_its_time_once_for_all_callers(
    running: Proxy, kubelet: Kubelet, stoppable: HookProcess
) -> None:
    running.register(running.folder / "hook.sock", STAGES)
    kubelet.run()
    stoppable.signal(signal.SIGSTOP)
    began = time.monotonic()
    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: kubelet.run(), range(40)))
    took_s = time.monotonic() - began
    assert 0.9 < took_s < 2.5
    stoppable.signal(signal.SIGCONT)
    running.wait_for_log("hook server is back")


def test_under_fail_a_hung_server_refuses_within_its_time(
    running: Proxy, kubelet: Kubelet, stoppable: HookProcess
) -> None:
    running.register(running.folder / "hook.sock", STAGES, policy="Fail")
    stoppable.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.run()
    error: Any = caught.value
    assert "hook server err" in error.details()
    assert 0.9 < time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(grpc.RpcError):
        kubelet.run()
    assert time.monotonic() - began < 0.2


def test_hooks_leave_half_of_a_callers_time_to_the_runtime(
    running: Proxy, kubelet: Kubelet, stoppable: HookProcess, runtime: FakeCri
) -> None:
    running.register(running.folder / "hook.sock", STAGES)
    kubelet.run()
    stoppable.signal(signal.SIGSTOP)
    request = cri.RunPodSandboxRequest(config=sandbox_config())
    began = time.monotonic()
    kubelet.call("RunPodSandbox", request, timeout=0.8)
    assert 0.3 < time.monotonic() - began < 0.75
    assert len(runtime.asked("RunPodSandbox")) == 2


def test_a_caller_that_gives_up_takes_the_hook_call_along(
    running: Proxy, kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    held = threading.Event()
    service.answers["PreRunPodSandbox"] = lambda request: held.wait(5) and echo(request)
    invoke = kubelet._channel.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")
    call = invoke.future(cri.RunPodSandboxRequest(config=sandbox_config()).SerializeToString())
    service.wait_for("PreRunPodSandbox")
    call.cancel()
    held.set()
    runtime.wait_quiet()
    assert runtime.asked("RunPodSandbox") == []


def test_calls_that_are_cancelled_at_once_reach_no_server_and_leave_nothing(
    running: Proxy, kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    path = b"/runtime.v1.RuntimeService/RunPodSandbox"
    block = hpack.encode([(b":method", b"POST"), (b":scheme", b"http"), (b":path", path)])
    body = add_prefix(cri.RunPodSandboxRequest(config=sandbox_config()).SerializeToString())
    before = running.resident_kib()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(running.socket))
        client.sendall(frames.PREFACE + frames.settings({}))
        for stream in range(1, 4001, 2):
            client.sendall(
                frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)
                + frames.frame(frames.DATA, frames.END_STREAM, stream, body)
                + frames.rst_stream(stream, frames.ErrorCode.CANCEL)
            )
        kubelet.run()
    assert running.resident_kib() - before < 8 * 1024
    assert "never awaited" not in running.log_text()
    assert "Error" not in running.log_text()


# -- restarts -------------------------------------------------------------------------------------


def test_after_a_crash_updates_are_still_decided_on_the_whole_truth(
    running: Proxy, kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    def moved(answer: Any) -> None:
        answer.cgroup_parent = "/moved/pod"

    service.answers["PreRunPodSandbox"] = answering(moved)
    sandbox = kubelet.run()
    container = kubelet.create(sandbox)
    kubelet.update(container, cpu_quota=-1)
    running.stop(signal.SIGKILL)
    running.start()
    running.wait_for_log("recovered pods=1 containers=1")
    wait_until(lambda: succeeds(lambda: kubelet.update(container, cpuset_cpus="3")), "the proxy")
    told = service.asked("PreUpdateContainerResources")[-1]
    assert told.container_resources.cpu_quota == -1
    assert told.container_resources.cpu_shares == 2048
    assert told.container_resources.cpuset_cpus == "3"
    assert told.pod_cgroup_parent == "/moved/pod"
    second = kubelet.create(sandbox)
    assert runtime.containers[second].sandbox_config.linux.cgroup_parent == "/moved/pod"


def test_what_went_while_the_proxy_was_away_leaves_the_journal(
    running: Proxy, kubelet: Kubelet, runtime: FakeCri
) -> None:
    running.wait_for_log("recovered")
    for _ in range(3):
        kubelet.create(kubelet.run())
    running.stop(signal.SIGKILL)
    kept = next(iter(runtime.sandboxes))
    runtime.sandboxes = {kept: runtime.sandboxes[kept]}
    runtime.containers.clear()
    running.start()
    running.wait_for_log("recovered pods=1 containers=0")
    running.stop()
    recorded = Checkpoint(str(running.folder / "state")).recorded
    assert (set(recorded.pods), set(recorded.containers)) == ({kept}, set())


def test_an_object_that_the_proxy_never_saw_is_looked_up(
    running: Proxy, kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    running.wait_for_log("recovered")
    with connected(runtime.socket) as direct:
        behind = Kubelet(direct)
        sandbox = behind.run()
        container = behind.create(sandbox, config=container_config(envs=[]))
    kubelet.update(container, cpu_shares=9)
    (told,) = service.asked("PreUpdateContainerResources")
    assert told.pod_meta.uid == "u-1"
    assert told.pod_cgroup_parent == PARENT
    assert told.container_resources.cpu_quota == 200_000


def test_a_container_in_an_unknown_sandbox_goes_to_the_runtime(
    kubelet: Kubelet, service: HookService, runtime: FakeCri
) -> None:
    kubelet.create("no-such-sandbox")
    assert len(runtime.asked("CreateContainer")) == 1
    assert service.asked("PreCreateContainer") == []


def test_nothing_of_a_containers_environment_is_logged_or_kept(
    running: Proxy, kubelet: Kubelet, service: HookService
) -> None:
    config = container_config(envs=[cri.KeyValue(key="PASSWORD", value=b"hunter2")])
    kubelet.create(kubelet.run(), config=config)
    service.stop()
    kubelet.create(kubelet.run(), config=config)
    running.stop()
    assert "hunter2" not in running.log_text()
    assert b"hunter2" not in (running.folder / "state" / "journal").read_bytes()


def test_memory_stays_small_with_hundreds_of_containers(
    running: Proxy, kubelet: Kubelet, service: HookService
) -> None:
    for _ in range(40):
        sandbox = kubelet.run()
        for _ in range(10):
            kubelet.create(sandbox, config=container_config(envs=[]))
    assert running.resident_kib() < 60 * 1024
