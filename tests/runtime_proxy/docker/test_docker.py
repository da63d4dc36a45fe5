"""Docker mode through the whole process."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.runtime_proxy.docker.client import POD_LABELS, Docker
from tests.runtime_proxy.docker.fake_dockerd import FakeDockerd, fake_dockerd
from tests.runtime_proxy.processes import (
    STAGES,
    HookService,
    Proxy,
    answering,
    fetch,
    hook_service,
    proxy,
)
from tests.waiting import wait_until


@pytest.fixture(params=["cgroupfs", "systemd"])
def dockerd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeDockerd]:
    with fake_dockerd(tmp_path, request.param) as running:
        yield running


@pytest.fixture
def running(dockerd: FakeDockerd) -> Iterator[Proxy]:
    with proxy(dockerd.path, flags=["--backend-runtime-mode=Docker"]) as started:
        yield started


@pytest.fixture
def docker(running: Proxy) -> Docker:
    return Docker(running.socket)


def parent_of(dockerd: FakeDockerd) -> tuple[str, str]:
    """What kubelet writes for the driver, and what a hook is told."""
    if dockerd.driver == "systemd":
        return "kubepods-podu_1.slice", "/kubepods.slice/kubepods-podu_1.slice"
    return "/kubepods/podu_1", "/kubepods/podu_1"


def test_hooks_see_and_change_a_pods_life(
    docker: Docker, service: HookService, dockerd: FakeDockerd
) -> None:
    written, told = parent_of(dockerd)

    def change(answer: Any) -> None:
        answer.container_resources.cpu_shares = 2
        answer.container_envs["NEW"] = "x"

    service.answers["PreCreateContainer"] = answering(change)
    sandbox = docker.run_sandbox(HostConfig={"CgroupParent": written, "CpuShares": 7})
    (pod,) = service.asked("PreRunPodSandbox")
    assert (pod.pod_meta.name, pod.pod_meta.namespace, pod.pod_meta.uid) == (
        "web-0",
        "default",
        "u-1",
    )
    assert pod.annotations == {"note": "n"}
    assert pod.labels["app"] == "web"
    assert pod.cgroup_parent == told
    assert pod.resources.cpu_shares == 7
    host = {
        "CgroupParent": written,
        "CpuShares": 100,
        "Memory": 5,
        "OomScoreAdj": 9,
        "Unknown": {"kept": [1]},
    }
    container = docker.create_container(
        sandbox, HostConfig=host, Env=["A=1", "B"], AlsoUnknown="kept"
    )
    sent = dockerd.asked("/containers/create")[1].document()
    assert sent["HostConfig"] == {**host, "CpuShares": 2}
    assert sent["Env"] == ["A=1", "B", "NEW=x"]
    assert sent["AlsoUnknown"] == "kept"
    (created,) = service.asked("PreCreateContainer")
    assert created.container_meta.attempt == 2
    assert created.pod_labels["app"] == "web"
    assert created.pod_cgroup_parent == told
    assert docker.ask("POST", f"/containers/{container}/start")[0] == 204
    service.wait_for("PostStartContainer")
    assert docker.ask("POST", f"/containers/{container}/update", {"CpuQuota": -1})[0] == 200
    assert dockerd.asked("/update")[0].document() == {"CpuQuota": -1}
    (updated,) = service.asked("PreUpdateContainerResources")
    assert (updated.container_resources.cpu_quota, updated.container_resources.cpu_shares) == (
        -1,
        2,
    )
    for _ in range(2):
        assert docker.ask("POST", f"/v1.41/containers/{container[:12]}/stop?t=1")[0] == 204
    service.wait_for("PostStopContainer")
    docker.ask("POST", f"/containers/{sandbox}/stop")
    service.wait_for("PostStopPodSandbox")
    assert len(service.asked("PostStopContainer")) == 1
    for identifier in (container, sandbox):
        assert docker.ask("DELETE", f"/containers/{identifier}?force=1")[0] == 204
    assert dockerd.containers == {}


def test_an_echo_leaves_the_octets_and_an_empty_parent_moves_nothing(
    docker: Docker, service: HookService, dockerd: FakeDockerd
) -> None:
    def forget(answer: Any) -> None:
        answer.cgroup_parent = ""

    service.answers["PreRunPodSandbox"] = answering(forget)
    written, _ = parent_of(dockerd)
    document = {"Labels": POD_LABELS, "HostConfig": {"CgroupParent": written}, "Zahl": 1.50}
    body = json.dumps(document, indent=3)
    docker.connection.request("POST", "/containers/create?name=k8s_POD_p_n_u_0_retry", body)
    assert docker.connection.getresponse().read()
    assert dockerd.asked("/containers/create")[0].body == body.encode()


def test_other_peoples_containers_pass(
    docker: Docker, service: HookService, dockerd: FakeDockerd
) -> None:
    container = docker.create("web", {})
    assert docker.ask("POST", f"/containers/{container}/start")[0] == 204
    assert docker.ask("POST", "/containers/web/stop")[0] == 204
    status, body = docker.ask("POST", "/containers/nobody/stop")
    assert (status, b"No such container" in body) == (404, True)
    assert service.calls == []
    assert dockerd.asked("/containers/create")[0].headers["content-type"] == "application/json"


def test_a_refusing_hook_becomes_http_500_with_its_text(
    running: Proxy, docker: Docker, dockerd: FakeDockerd
) -> None:
    running.register(running.folder / "nobody.sock", ["PreRunPodSandbox"], policy="Fail")
    document = {"Labels": POD_LABELS}
    status, body = docker.ask("POST", "/containers/create?name=k8s_POD_p_n_u_0", document)
    assert status == 500
    assert b"nobody.sock" in body
    assert dockerd.asked("/containers/create") == []


def test_after_a_restart_the_pods_names_and_labels_are_right(
    running: Proxy, docker: Docker, service: HookService, dockerd: FakeDockerd
) -> None:
    written, told = parent_of(dockerd)
    sandbox = docker.run_sandbox(HostConfig={"CgroupParent": written})
    container = docker.create_container(
        sandbox, HostConfig={"CgroupParent": written, "CpuShares": 44}, Env=["A=1"]
    )
    running.stop(signal.SIGKILL)
    running.start()
    running.wait_for_log("recovered pods=1 containers=1")
    assert "cannot be made" not in running.log_text()
    again = Docker(running.socket)
    assert again.ask("POST", f"/containers/{container}/update", {"CpuQuota": 5})[0] == 200
    (asked,) = service.asked("PreUpdateContainerResources")
    assert (asked.pod_meta.name, asked.pod_meta.namespace, asked.pod_meta.uid) == (
        "web-0",
        "default",
        "u-1",
    )
    assert asked.pod_labels["app"] == "web"
    assert asked.pod_cgroup_parent == told
    assert asked.container_envs == {"A": "1"}
    assert (asked.container_resources.cpu_shares, asked.container_resources.cpu_quota) == (44, 5)


@pytest.mark.parametrize("upgrade", [True, False], ids=["upgraded", "raw"])
def test_an_attached_stream_is_a_pipe_both_ways(
    running: Proxy, docker: Docker, upgrade: bool
) -> None:
    container = docker.create("web", {})
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(running.socket))
        extra = b"Connection: Upgrade\r\nUpgrade: tcp\r\n" if upgrade else b""
        client.sendall(
            b"POST /containers/%s/attach?stream=1 HTTP/1.1\r\nHost: d\r\n%s\r\n"
            % (container.encode(), extra)
        )
        got = b""
        while b"\r\n\r\n" not in got:
            got += client.recv(1000)
        for word in (b"hello", b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff"):
            client.sendall(word)
            got = b""
            while len(got) < len(word):
                got += client.recv(1000)
            assert got == word.upper()
        client.shutdown(socket.SHUT_WR)
        rest = b""
        while part := client.recv(1000):
            rest += part
        assert rest == b"<end of input>"


def test_a_stream_arrives_part_by_part(docker: Docker, dockerd: FakeDockerd) -> None:
    docker.connection.request("GET", "/events")
    answer = docker.connection.getresponse()
    for number in range(3):
        assert json.loads(answer.read1()) == {"event": number}
        dockerd.say.set()
    assert answer.read() == b""
    assert docker.ask("GET", "/info")[0] == 200, "the connection goes on"


def test_a_stop_waits_for_calls_and_not_for_streams_without_end(tmp_path: Path) -> None:
    flags = ["--backend-runtime-mode=Docker", "--drain-timeout=600s"]
    with fake_dockerd(tmp_path) as dockerd, proxy(dockerd.path, flags=flags) as running:
        docker = Docker(running.socket)
        container = docker.create("web", {})
        docker.connection.request("GET", "/v1.41/events")
        events = docker.connection.getresponse()
        assert json.loads(events.read1()) == {"event": 0}
        with socket.socket(socket.AF_UNIX) as attached:
            attached.settimeout(10)
            attached.connect(str(running.socket))
            attached.sendall(
                b"POST /containers/%s/attach?stream=1 HTTP/1.1\r\nHost: d\r\n\r\n"
                % container.encode()
            )
            while b"\r\n\r\n" not in attached.recv(1000):
                pass
            os.kill(running.pid, signal.SIGTERM)
            wait_until(lambda: not running.socket.exists(), "the stop to begin")
            attached.sendall(b"still here")
            assert attached.recv(1000) == b"STILL HERE"
            dockerd.say.set()
            assert json.loads(events.read1()) == {"event": 1}
        assert running.process is not None
        assert running.process.wait(10) == 0
        assert "calls_cut_off=0" in running.log_text()


def test_uploads_of_any_kind_pass(docker: Docker) -> None:
    status, body = docker.ask("POST", "/echo", {"x": "y" * 300_000})
    assert status == 200
    assert json.loads(body)["size"] > 300_000
    docker.connection.request("POST", "/echo", iter([b"abc" * 10_000] * 5), encode_chunked=True)
    assert json.loads(docker.connection.getresponse().read())["size"] == 150_000


def test_an_absent_dockerd_is_said_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    with proxy(path, flags=["--backend-runtime-mode=Docker"]) as running:
        status, body = Docker(running.socket).ask("GET", "/info")
        assert status == 503
        assert b"Cannot connect to the Docker daemon" in body
        with fake_dockerd(tmp_path):
            wait_until(lambda: Docker(running.socket).ask("GET", "/info")[0] == 200, "dockerd")
            began = time.monotonic()
            assert running.stop() == 0
            assert time.monotonic() - began < 5


def test_an_answer_that_is_no_http_ends_that_connection_alone(
    running: Proxy, docker: Docker
) -> None:
    with pytest.raises(ConnectionError):
        docker.ask("GET", "/nonsense")
    running.wait_for_log("broken HTTP")
    assert "side=dockerd" in running.log_text()
    assert "Traceback" not in running.log_text()
    assert Docker(running.socket).ask("GET", "/info")[0] == 200


def test_the_status_says_whether_dockerd_answers(tmp_path: Path) -> None:
    port = free_port()
    flags = ["--backend-runtime-mode=Docker", f"--http-address=127.0.0.1:{port}"]
    path = tmp_path / "docker.sock"
    with proxy(path, flags=flags) as running:

        def status() -> Any:
            return json.loads(fetch(f"http://127.0.0.1:{port}/status")[1])

        Docker(running.socket).ask("GET", "/info")
        assert status()["runtime"] == {"socket": str(path), "up": False}
        with fake_dockerd(tmp_path):
            wait_until(lambda: Docker(running.socket).ask("GET", "/info")[0] == 200, "dockerd")
            wait_until(lambda: status()["recovered"], "recovery")
            shown = status()
    assert shown["runtime"] == {"socket": str(path), "up": True}
    assert (shown["hookServers"], shown["unusableRegistrations"]) == ([], {})


def test_clients_that_look_in_while_dockerd_is_away_leave_nothing_behind(tmp_path: Path) -> None:
    with proxy(tmp_path / "docker.sock", flags=["--backend-runtime-mode=Docker"]) as running:
        before = running.open_sockets()
        for _ in range(30):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(running.socket))
                time.sleep(0.01)
        wait_until(lambda: running.open_sockets() <= before, "the connections to be closed")


def test_a_container_that_dockerd_cannot_inspect_keeps_no_other_one_unknown(
    dockerd: FakeDockerd,
) -> None:
    direct = Docker(dockerd.path)
    broken = direct.run_sandbox()
    direct.run_sandbox()
    dockerd.broken.add(broken)
    with proxy(dockerd.path, flags=["--backend-runtime-mode=Docker"]) as running:
        running.wait_for_log("recovered pods=1 containers=0")


def test_a_sandbox_deleted_while_it_runs_is_reported_with_its_containers(
    docker: Docker, service: HookService
) -> None:
    sandbox = docker.run_sandbox()
    container = docker.create_container(sandbox)
    assert docker.ask("DELETE", f"/v1.41/containers/{sandbox}?force=1")[0] == 204
    service.wait_for("PostStopPodSandbox")
    assert [r.container_meta.id for r in service.asked("PostStopContainer")] == [container]


def test_calls_that_go_on_without_hooks_are_counted(dockerd: FakeDockerd) -> None:
    port = free_port()
    flags = ["--backend-runtime-mode=Docker", f"--http-address=127.0.0.1:{port}"]
    with (
        proxy(dockerd.path, flags=flags) as running,
        hook_service(running.folder / "hook.sock") as service,
    ):
        running.register(service.socket, STAGES)
        labels = {**POD_LABELS, "runtimeproxy.koordinator.sh/skip-hookserver": "true"}
        Docker(running.socket).create("k8s_POD_web-0_default_u-1_0", labels)
        _, text = fetch(f"http://127.0.0.1:{port}/metrics")
    assert "koord_runtime_proxy_hooks_skipped_labelled_total 1.0" in text
    assert "koord_runtime_proxy_journal_errors_total 0.0" in text
