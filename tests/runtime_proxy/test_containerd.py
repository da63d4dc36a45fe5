"""The proxy before real containerd, both generations: what a kubelet would see in a bad week."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import websocket

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import GENERATIONS, Containerd, containerd
from tests.beds.kubelet import RunningPod, remove_pod, run_pod, running_pod, sandbox_config
from tests.runtime_proxy.fake_cri import connected
from tests.runtime_proxy.node import Node, node, succeeds, with_creations
from tests.runtime_proxy.processes import (
    STAGES,
    HookProcess,
    echo,
    hook_process,
    hook_service,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.containerd

_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=GENERATIONS)
def runtime(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    with containerd(request.param) as running:
        yield running


@pytest.fixture
def here(runtime: Containerd) -> Iterator[Node]:
    with node(runtime, "--hook-timeout=1s") as made:
        yield made


def pod(name: str = "web", **container: Any) -> dict[str, Any]:
    number = next(_numbers)
    return {
        "metadata": {"name": f"{name}-{number}", "uid": f"0f0e0d0c-0000-4000-8000-{number:012}"},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "env": [{"name": "GREETING", "value": "hello"}],
                    "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1"}},
                    **container,
                }
            ]
        },
    }


def shrink(request: Any) -> Any:
    answer = echo(request)
    answer.container_resources.cpu_shares = 333
    answer.container_resources.cpu_quota = 40_000
    answer.container_envs["HOOKED"] = "yes"
    return answer


def test_hooks_are_seen_in_the_kernel_and_in_the_environment(here: Node) -> None:
    with hook_service(here.proxy.folder / "h.sock", {"PreCreateContainer": shrink}) as service:
        here.proxy.register(service.socket, STAGES)
        with running_pod(here.kubelet, pod()) as running:
            identifier = running.containers["main"]
            group = running.container_cgroup("main")
            groups = here.runtime.groups
            assert groups.read(group, "cpu.shares") == str(groups.weight(333))
            assert groups.read(group, "cpu.cfs_quota_us") == "40000"
            environment = here.cri.execute(identifier, ["/bin/env"]).stdout.split()
            assert {"GREETING=hello", "HOOKED=yes"} <= set(environment)
            here.cri.update_resources(identifier, cri.LinuxContainerResources(cpu_shares=512))
            assert groups.read(group, "cpu.shares") == str(groups.weight(512))
            told = service.asked("PreUpdateContainerResources")[0].container_resources
            assert (told.cpu_shares, told.cpu_quota) == (512, 40_000)
            assert groups.read(group, "cpu.cfs_quota_us") == "40000"


def test_updates_do_not_pile_hugepage_limits_up(here: Node) -> None:
    with hook_service(here.proxy.folder / "h.sock") as service:
        here.proxy.register(service.socket, STAGES)
        with running_pod(here.kubelet, pod()) as running:
            identifier = running.containers["main"]
            for shares in range(100, 110):
                here.cri.update_resources(
                    identifier, cri.LinuxContainerResources(cpu_shares=shares)
                )
            told = service.asked("PreUpdateContainerResources")
            assert len({len(r.container_resources.hugepage_limits) for r in told}) == 1
            info = here.cri.container_status(identifier).info["info"]
            assert info.count("pageSize") <= 1


def test_exec_attach_port_forward_and_logs_work_through_the_returned_urls(here: Node) -> None:
    command = ["/bin/sh", "-c", "echo started; while sleep 0.2; do echo alive; done"]
    with running_pod(here.kubelet, pod(command=command)) as running:
        identifier = running.containers["main"]
        request = cri.ExecRequest(
            container_id=identifier, cmd=["/bin/sh", "-c", "echo $GREETING"], stdout=True
        )
        url = here.cri.call("RuntimeService/Exec", request, cri.ExecResponse).url
        assert b"hello\n" in read_stream(url)
        log = here.runtime.logs / f"default_{running.name}_{running.uid}" / "main" / "0.log"
        wait_until(lambda: log.exists() and "started" in log.read_text(), "the log")
        assert "stdout F started" in log.read_text()
        attach = cri.AttachRequest(container_id=identifier, stdout=True)
        url = here.cri.call("RuntimeService/Attach", attach, cri.AttachResponse).url
        assert b"alive\n" in read_stream(url, until=b"alive\n")
        forward(here, running)


def read_stream(url: str, *, until: bytes = b"") -> bytes:
    """The standard output channel of a streaming URL, to its end or until it said something."""
    opened = websocket.create_connection(
        url.replace("http://", "ws://"), subprotocols=["v4.channel.k8s.io"], timeout=10
    )
    got = b""
    with suppress(websocket.WebSocketConnectionClosedException):
        while not until or until not in got:
            _, part = opened.recv_data()
            if part[:1] == b"\x01":
                got += part[1:]
            elif part[:1] == b"\x03" or not part:
                break
    opened.close()
    return got


def forward(here: Node, running: RunningPod) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        port = listener.getsockname()[1]
        request = cri.PortForwardRequest(pod_sandbox_id=running.sandbox_id, port=[port])
        url = here.cri.call("RuntimeService/PortForward", request, cri.PortForwardResponse).url
        opened = websocket.create_connection(
            url.replace("http://", "ws://") + f"?port={port}",
            subprotocols=["v4.channel.k8s.io"],
            timeout=10,
        )
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(10)
            opened.send_binary(b"\x00ping")
            assert accepted.recv(10) == b"ping"
        opened.close()


def test_the_event_stream_has_every_step(here: Node) -> None:
    with connected(here.proxy.socket) as channel:
        stream = channel.unary_stream("/runtime.v1.RuntimeService/GetContainerEvents")(b"")
        seen: list[tuple[str, int]] = []

        def follow() -> None:
            with suppress(grpc.RpcError):
                for octets in stream:
                    event = cri.ContainerEventResponse.FromString(octets)
                    seen.append((event.container_id, event.container_event_type))

        reader = threading.Thread(target=follow)
        reader.start()
        time.sleep(0.2)
        with running_pod(here.kubelet, pod()) as running:
            identifier = running.containers["main"]
        for kind in (cri.CONTAINER_STARTED_EVENT, cri.CONTAINER_STOPPED_EVENT):
            wait_until(lambda kind=kind: (identifier, kind) in seen, f"event {kind}")
        stream.cancel()
        reader.join(5)


def test_a_container_that_ends_by_itself_is_reported(here: Node) -> None:
    with hook_service(here.proxy.folder / "h.sock") as service:
        here.proxy.register(service.socket, STAGES)
        with running_pod(here.kubelet, pod(command=["/bin/sh", "-c", "sleep 0.2"])) as running:
            identifier = running.containers["main"]
            if here.runtime.generation == "1.7":
                # 1.7 gives an event to one reader only, and that is kubelet: told at removal.
                wait_until(lambda: has_ended(here, identifier), "the container's end")
                here.cri.remove_container(identifier)
            assert service.wait_for("PostStopContainer")[0].container_meta.id == identifier


def has_ended(here: Node, identifier: str) -> bool:
    status = here.cri.container_status(identifier).status
    return bool(status.state == cri.CONTAINER_EXITED)


def test_after_a_handover_an_end_is_reported_once_though_the_old_process_lives(here: Node) -> None:
    with (
        hook_service(here.proxy.folder / "h.sock") as service,
        connected(here.proxy.socket) as kept,
    ):
        here.proxy.register(service.socket, STAGES)
        # A stream of kubelet's that never ends keeps the old process.
        stream = kept.unary_stream("/runtime.v1.RuntimeService/GetContainerEvents")(b"")
        old, successor = here.proxy.process, 0
        assert old is not None
        try:
            with running_pod(here.kubelet, pod()) as running:
                old.send_signal(signal.SIGHUP)
                here.proxy.wait_for_log("handed over")
                successor = here.proxy.successor()
                here.cri.stop_container(running.containers["main"])
                service.wait_for("PostStopContainer")
                time.sleep(0.5)
                assert len(service.asked("PostStopContainer")) == 1
                assert old.poll() is None
        finally:
            stream.cancel()
            old.kill()
            old.wait()
            if successor:
                os.kill(successor, signal.SIGTERM)
                wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")


def test_a_list_of_many_megabytes_is_the_same_as_without_the_proxy(here: Node) -> None:
    big = {f"note-{n}": "x" * 200_000 for n in range(20)}
    config = sandbox_config(pod(), here.runtime.groups.path + "/burstable", here.runtime.logs)
    config.metadata.uid = "big"
    sandboxes = []
    try:
        for attempt in range(4):
            config.metadata.attempt = attempt
            config.annotations.update(big)
            sandboxes.append(here.cri.run_sandbox(config))
        direct = {s.id: s for s in here.runtime.cri.sandboxes()}
        through = {s.id: s for s in here.cri.sandboxes()}
        assert through == direct
        assert sum(s.ByteSize() for s in through.values()) > 15 << 20
    finally:
        for sandbox in sandboxes:
            here.cri.remove_sandbox(sandbox)


# -- the hook server dies, hangs, comes back ------------------------------------------------------


@pytest.fixture
def daemon(here: Node) -> Iterator[HookProcess]:
    with hook_process(here.proxy.folder / "h.sock") as process:
        yield process


def abuse(here: Node, daemon: HookProcess) -> None:
    """Killed, restarted, hung, let go, upgraded."""
    time.sleep(0.7)
    daemon.kill()
    time.sleep(0.5)
    daemon.restart()
    time.sleep(0.7)
    daemon.signal(signal.SIGSTOP)
    time.sleep(2)
    daemon.signal(signal.SIGCONT)
    time.sleep(0.7)
    daemon.restart()
    time.sleep(0.7)


def test_under_ignore_no_pod_fails_whatever_happens_to_the_hook_server(
    here: Node, daemon: HookProcess
) -> None:
    here.proxy.register(here.proxy.folder / "h.sock", STAGES)
    made, failed = with_creations(here, pod, lambda: abuse(here, daemon))
    assert failed == []
    assert sum(made) > 5


def test_under_fail_pods_fail_with_the_hooks_error_and_only_that(
    here: Node, daemon: HookProcess
) -> None:
    here.proxy.register(here.proxy.folder / "h.sock", STAGES, policy="Fail")
    made, failed = with_creations(here, pod, lambda: abuse(here, daemon))
    assert sum(made) > 2
    assert failed
    assert [text for text in failed if "UNKNOWN: hook server err: " not in text] == []
    here.runtime.remove_pods()


# -- the runtime and the proxy restart ------------------------------------------------------------


def test_containerd_restarts_and_service_is_back_within_a_second(here: Node) -> None:
    with running_pod(here.kubelet, pod()) as running:
        here.runtime.stop()
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            here.cri.version()
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 1
        here.runtime.socket.unlink(missing_ok=True)
        here.runtime.start()
        began = time.monotonic()
        wait_until(lambda: succeeds(here.cri.version), "the proxy to find containerd")
        assert time.monotonic() - began < 1
        assert here.cri.execute(running.containers["main"], ["/bin/true"]).exit_code == 0


@pytest.mark.parametrize("stage", ["PreRunPodSandbox", "PreCreateContainer", "PreStartContainer"])
def test_a_proxy_killed_inside_a_call_leaves_pods_that_a_retry_makes_whole(
    here: Node, stage: str
) -> None:
    reached = threading.Event()
    go_on = threading.Event()

    def hold(request: Any) -> Any:
        if not go_on.is_set():
            reached.set()
            go_on.wait(5)
        return shrink(request) if stage == "PreCreateContainer" else echo(request)

    manifest = pod()
    with hook_service(here.proxy.folder / "h.sock", {stage: hold}) as service:
        here.proxy.register(service.socket, STAGES)
        with futures.ThreadPoolExecutor(1) as pool:
            attempt = pool.submit(run_pod, here.kubelet, manifest)
            assert reached.wait(10)
            here.proxy.stop(signal.SIGKILL)
            go_on.set()
            with pytest.raises(grpc.RpcError):
                attempt.result()
        come_back(here)
        for left in here.cri.sandboxes():
            here.cri.remove_sandbox(left.id)
        with running_pod(here.kubelet, manifest) as running:
            assert here.cri.execute(running.containers["main"], ["/bin/true"]).exit_code == 0


def come_back(here: Node) -> None:
    before = here.proxy.log_text().count("recovered pods")
    here.proxy.start()
    wait_until(lambda: here.proxy.log_text().count("recovered pods") > before, "recovery")
    wait_until(lambda: succeeds(here.cri.version), "the proxy")


def test_a_proxy_killed_inside_an_update_leaves_what_was_and_a_retry_is_whole(here: Node) -> None:
    reached = threading.Event()

    def hold(request: Any) -> Any:
        if not reached.is_set():
            reached.set()
            time.sleep(1)
        return echo(request)

    hooks = {"PreUpdateContainerResources": hold, "PreCreateContainer": shrink}
    with hook_service(here.proxy.folder / "h.sock", hooks) as service:
        here.proxy.register(service.socket, STAGES)
        with running_pod(here.kubelet, pod()) as running, futures.ThreadPoolExecutor(1) as pool:
            identifier = running.containers["main"]
            group = running.container_cgroup("main")
            wanted = cri.LinuxContainerResources(cpu_shares=700)
            attempt = pool.submit(here.cri.update_resources, identifier, wanted)
            assert reached.wait(10)
            here.proxy.stop(signal.SIGKILL)
            with pytest.raises(grpc.RpcError):
                attempt.result()
            groups = here.runtime.groups
            assert groups.read(group, "cpu.shares") == str(groups.weight(333))
            come_back(here)
            here.cri.update_resources(identifier, wanted)
            assert groups.read(group, "cpu.shares") == str(groups.weight(700))
            assert groups.read(group, "cpu.cfs_quota_us") == "40000"


def test_a_proxy_killed_while_a_container_stops_reports_the_stop_once(here: Node) -> None:
    command = ["/bin/sh", "-c", "trap : TERM; touch /tmp/set; while :; do sleep 0.2; done"]
    with hook_service(here.proxy.folder / "h.sock") as service:
        here.proxy.register(service.socket, STAGES)
        with (
            running_pod(here.kubelet, pod(command=command)) as running,
            futures.ThreadPoolExecutor(1) as pool,
        ):
            identifier = running.containers["main"]
            is_set = ["test", "-e", "/tmp/set"]
            wait_until(lambda: here.cri.execute(identifier, is_set).exit_code == 0, "the trap")
            # Longer than any pause of this process: the proxy is killed in the meantime.
            attempt = pool.submit(here.cri.stop_container, identifier, grace_s=60)
            time.sleep(0.5)
            assert not attempt.done()
            here.proxy.stop(signal.SIGKILL)
            with pytest.raises(grpc.RpcError):
                attempt.result()
            come_back(here)
            here.cri.stop_container(identifier, grace_s=2)
            assert has_ended(here, identifier)
            service.wait_for("PostStopContainer")
        assert len(service.asked("PostStopContainer")) == 1


def test_a_restart_of_the_proxy_changes_nothing_for_running_pods(here: Node) -> None:
    with hook_service(here.proxy.folder / "h.sock", {"PreCreateContainer": shrink}) as service:
        here.proxy.register(service.socket, STAGES)
        with running_pod(here.kubelet, pod()) as running:
            identifier = running.containers["main"]
            here.cri.update_resources(identifier, cri.LinuxContainerResources(cpu_quota=70_000))
            before = here.cri.container_status(identifier).status
            here.proxy.stop(signal.SIGKILL)
            come_back(here)
            assert here.cri.container_status(identifier).status == before
            here.cri.update_resources(identifier, cri.LinuxContainerResources(cpuset_cpus="0"))
            told = service.asked("PreUpdateContainerResources")[-1]
            assert told.container_resources.cpu_quota == 70_000
            assert told.container_resources.cpu_shares == 333
            assert told.container_resources.cpuset_cpus == "0"
            assert told.container_envs == {"GREETING": "hello", "HOOKED": "yes"}
            assert told.pod_cgroup_parent == running.cgroup


def test_eight_callers_make_two_hundred_pods(here: Node) -> None:
    count = 200
    with hook_service(here.proxy.folder / "h.sock") as service:
        here.proxy.register(service.socket, STAGES)
        made: list[RunningPod] = []
        try:
            with futures.ThreadPoolExecutor(8) as pool:
                jobs = [pool.submit(run_pod, here.kubelet, pod("mass")) for _ in range(count)]
                for job in futures.as_completed(jobs):
                    made.append(job.result())
            assert len({running.sandbox_id for running in made}) == count
            assert len(service.asked("PreCreateContainer")) == count
            assert here.proxy.resident_kib() < 60 * 1024
        finally:
            with futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda running: remove_pod(here.kubelet, running), made))
