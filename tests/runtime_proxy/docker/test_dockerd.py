"""Docker mode before a real dockerd, asked as dockershim asks and with the docker command."""

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.beds.errors import BedError
from tests.beds.image import IMAGE
from tests.conftest import require
from tests.runtime_proxy.docker.client import POD_LABELS, Docker
from tests.runtime_proxy.docker.dockerd import Dockerd, dockerd
from tests.runtime_proxy.processes import (
    STAGES,
    HookService,
    Proxy,
    echo,
    hook_service,
    proxy,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.cgroups


@pytest.fixture(scope="module")
def engine() -> Iterator[Dockerd]:
    try:
        bed = dockerd()
        running = bed.__enter__()
    except BedError as error:
        require(False, f"needs Debian's docker.io: {error}", tier="dockerd")
        raise
    try:
        yield running
    finally:
        bed.__exit__(None, None, None)


@pytest.fixture
def running(engine: Dockerd) -> Iterator[Proxy]:
    with proxy(engine.socket, flags=["--backend-runtime-mode=Docker"]) as started:
        started.wait_for_log("recovered")
        yield started
    engine.remove_containers()


@pytest.fixture
def docker(engine: Dockerd, running: Proxy) -> Docker:
    return engine.client(running.socket)


@pytest.fixture
def service(running: Proxy) -> Iterator[HookService]:
    with hook_service(running.folder / "hook.sock", {"PreCreateContainer": shrink}) as started:
        running.register(started.socket, STAGES)
        yield started


def shrink(request: Any) -> Any:
    answer = echo(request)
    answer.container_resources.cpu_shares = 333
    answer.container_envs["HOOKED"] = "yes"
    return answer


def host(engine: Dockerd, **fields: Any) -> dict[str, Any]:
    parent = engine.runtime.groups.pod_path("u-1", "burstable")
    return {"NetworkMode": "host", "CgroupParent": parent, **fields}


def run_pod(docker: Docker, engine: Dockerd, *command: str) -> tuple[str, str]:
    """A sandbox and a running container as dockershim makes them."""
    sandbox = docker.run_sandbox(HostConfig=host(engine))
    assert docker.ask("POST", f"/containers/{sandbox}/start")[0] == 204
    container = docker.create_container(
        sandbox,
        HostConfig=host(engine, CpuShares=512, NetworkMode=f"container:{sandbox}"),
        Env=["GREETING=hello"],
        Cmd=list(command) or ["/bin/sleep", "600"],
        OpenStdin=True,
    )
    assert docker.ask("POST", f"/containers/{container}/start")[0] == 204
    return sandbox, container


def kernel(engine: Dockerd, container: str, name: str) -> str:
    groups = engine.runtime.groups
    return groups.read(f"{groups.pod_path('u-1', 'burstable')}/{container}", name)


def test_what_hooks_give_is_in_the_kernel_and_in_the_environment(
    docker: Docker, engine: Dockerd, service: HookService
) -> None:
    sandbox, container = run_pod(docker, engine)
    (pod,) = service.asked("PreRunPodSandbox")
    assert (pod.pod_meta.name, pod.pod_meta.uid, pod.annotations) == ("web-0", "u-1", {"note": "n"})
    (created,) = service.asked("PreCreateContainer")
    assert created.pod_labels["app"] == "web"
    assert created.pod_cgroup_parent == engine.runtime.groups.pod_path("u-1", "burstable")
    groups = engine.runtime.groups
    assert kernel(engine, container, "cpu.shares") == str(groups.weight(333))
    environment = execute(docker, container, "/bin/env").split()
    assert {b"GREETING=hello", b"HOOKED=yes"} <= set(environment)
    status, _ = docker.ask("POST", f"/containers/{container}/update", {"CpuQuota": 40_000})
    assert status == 200
    assert kernel(engine, container, "cpu.cfs_quota_us") == "40000"
    (updated,) = service.asked("PreUpdateContainerResources")
    told = updated.container_resources
    assert (told.cpu_quota, told.cpu_shares) == (40_000, 333)
    service.wait_for("PostStartContainer")
    for identifier in (container, sandbox):
        for _ in range(2):
            assert docker.ask("POST", f"/containers/{identifier}/stop?t=0")[0] in (204, 304)
        assert docker.ask("DELETE", f"/containers/{identifier}")[0] == 204
    service.wait_for("PostStopPodSandbox")
    assert len(service.asked("PostStopContainer")) == len(service.asked("PostStopPodSandbox")) == 1


def hijacked(docker: Docker, target: str, document: Any, *, upgrade: bool) -> socket.socket:
    """A stream in place of HTTP, asked for the new way (101) or the old way (200)."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(20)
    stream.connect(str(docker.path))
    body = json.dumps(document).encode()
    extra = b"Connection: Upgrade\r\nUpgrade: tcp\r\n" if upgrade else b""
    stream.sendall(
        b"POST %s HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n%s"
        b"Content-Length: %d\r\n\r\n%s" % (target.encode(), extra, len(body), body)
    )
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += stream.recv(1)
    assert head.startswith(b"HTTP/1.1 101" if upgrade else b"HTTP/1.1 200"), head
    return stream


def parts(stream: socket.socket) -> Iterator[bytes]:
    """Docker's multiplexed stream: each part with a head of eight octets."""
    with stream.makefile("rb") as file:
        while head := file.read(8):
            yield file.read(struct.unpack(">xxxxI", head)[0])


def execute(docker: Docker, container: str, *command: str, upgrade: bool = True) -> bytes:
    asked = {"AttachStdout": True, "Cmd": list(command)}
    status, body = docker.ask("POST", f"/containers/{container}/exec", asked)
    assert status == 201, body
    start = f"/exec/{json.loads(body)['Id']}/start"
    with hijacked(docker, start, {"Detach": False}, upgrade=upgrade) as stream:
        return b"".join(parts(stream))


@pytest.mark.parametrize("upgrade", [True, False], ids=["upgraded", "raw"])
def test_exec_and_attach_are_pipes_both_ways(
    docker: Docker, engine: Dockerd, service: HookService, upgrade: bool
) -> None:
    _, container = run_pod(docker, engine, "/bin/sh", "-c", "while read w; do echo got $w; done")
    assert execute(docker, container, "/bin/echo", "out", upgrade=upgrade) == b"out\n"
    target = f"/containers/{container}/attach?stream=1&stdin=1&stdout=1"
    with hijacked(docker, target, {}, upgrade=upgrade) as stream:
        answers = parts(stream)
        for word in (b"one", b"two"):
            stream.sendall(word + b"\n")
            assert next(answers) == b"got " + word + b"\n"
        stream.shutdown(socket.SHUT_WR)
    assert docker.ask("GET", f"/containers/{container}/json")[0] == 200


def test_followed_logs_and_events_come_part_by_part(docker: Docker, engine: Dockerd) -> None:
    watcher = engine.client(docker.path)
    watcher.connection.request("GET", "/events")
    events = watcher.connection.getresponse()
    script = "for n in 1 2 3; do echo line $n; sleep 0.4; done; sleep 600"
    _, container = run_pod(docker, engine, "/bin/sh", "-c", script)
    follower = engine.client(docker.path)
    follower.connection.request("GET", f"/containers/{container}/logs?follow=1&stdout=1")
    answer = follower.connection.getresponse()
    came = []
    for number in (1, 2, 3):
        line = b""
        while not line.endswith(b"\n"):
            line += answer.read1(100)
        assert line[8:] == b"line %d\n" % number
        came.append(time.monotonic())
    assert came[2] - came[1] > 0.2, "buffered: all lines came at once"
    follower.connection.close()
    seen = b""
    while container.encode() not in seen or b'"start"' not in seen:
        seen += events.read1(10_000)
    watcher.connection.close()


def test_the_docker_command_works_and_its_containers_are_not_ours(
    running: Proxy, engine: Dockerd, service: HookService
) -> None:
    def works(*words: str) -> str:
        done = engine.command(running.socket, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert works("run", "--rm", "--network=host", IMAGE, "/bin/echo", "hi") == "hi\n"
    name = works("run", "-d", "--name=mine", "--network=host", IMAGE).strip()
    assert works("exec", "mine", "/bin/echo", "in") == "in\n"
    assert works("ps", "--no-trunc", "-q").strip() == name
    assert IMAGE.partition(":")[0] in works("images")
    works("update", "--cpu-shares=77", "mine")
    works("load", "-i", str(engine.folder / "image.tar"))
    works("rm", "-f", "mine")
    refused = engine.command(running.socket, "run", "--rm", "koord.test/absent:1")
    assert refused.returncode != 0
    assert service.calls == []


def test_a_restart_finds_pods_and_containers_in_dockerd(
    running: Proxy, docker: Docker, engine: Dockerd, service: HookService
) -> None:
    _, container = run_pod(docker, engine)
    running.stop(signal.SIGKILL)
    for journal in (running.folder / "state").iterdir():
        journal.unlink()
    running.start()
    running.wait_for_log("recovered pods=1 containers=1")
    again = engine.client(running.socket)
    assert again.ask("POST", f"/containers/{container}/update", {"CpuPeriod": 50_000})[0] == 200
    (asked,) = service.asked("PreUpdateContainerResources")
    assert (asked.pod_meta.name, asked.pod_meta.namespace) == ("web-0", "default")
    assert asked.pod_labels["app"] == "web"
    assert asked.container_envs["GREETING"] == "hello"
    assert asked.container_resources.cpu_shares == 333
    assert asked.pod_cgroup_parent == engine.runtime.groups.pod_path("u-1", "burstable")


def test_a_refused_sandbox_is_not_in_dockerd(
    running: Proxy, docker: Docker, engine: Dockerd
) -> None:
    running.register(running.folder / "nobody.sock", ["PreRunPodSandbox"], policy="Fail")
    document = {"Image": IMAGE, "Labels": POD_LABELS, "HostConfig": host(engine)}
    status, body = docker.ask("POST", "/containers/create?name=k8s_POD_p_n_u_0", document)
    assert (status, b"nobody.sock" in body) == (500, True)
    assert json.loads(docker.ask("GET", "/containers/json?all=1")[1]) == []


def test_dockerd_restarts_and_is_found_again(
    docker: Docker, engine: Dockerd, service: HookService
) -> None:
    engine.stop()
    status, body = engine.client(docker.path).ask("GET", "/info")
    assert (status, b"Cannot connect to the Docker daemon" in body) == (503, True)
    engine.start()
    wait_until(lambda: engine.client(docker.path).ask("GET", "/info")[0] == 200, "dockerd")
    run_pod(engine.client(docker.path), engine)
    assert service.asked("PreCreateContainer")
