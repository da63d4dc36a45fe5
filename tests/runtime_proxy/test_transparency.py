"""Whatever a client and a runtime say to each other passes through the proxy as they said it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.http2 import frames, hpack
from tests.ports import free_port
from tests.runtime_proxy.fake_cri import FakeCri, connected, fake_cri
from tests.runtime_proxy.processes import (
    AS_MODULE,
    ROOT,
    STAGES,
    Proxy,
    echo,
    fetch,
    hook_service,
    proxy,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCri]:
    with fake_cri(tmp_path_factory.mktemp("runtime")) as running:
        yield running


@pytest.fixture(scope="module")
def running(runtime: FakeCri) -> Iterator[Proxy]:
    with proxy(runtime.socket, flags=["--http-address=127.0.0.1:0"]) as started:
        yield started


@pytest.fixture
def channel(running: Proxy) -> Iterator[Any]:
    with connected(running.socket) as opened:
        yield opened


def test_a_unary_call_keeps_its_metadata_headers_and_trailers(channel: Any) -> None:
    echo = channel.unary_unary("/test.Bytes/Echo")
    answer, call = echo.with_call(b"hello", metadata=(("x-test", "42"),), timeout=5)
    assert answer == b"hello"
    assert dict(call.initial_metadata())["x-head"] == "42"
    trailers = dict(call.trailing_metadata())
    assert trailers["x-tail"] == "z" * 20_000
    assert trailers["x-raw-bin"] == bytes(range(256))


@pytest.mark.parametrize("size", [0, 1, 16_384, 65_536, 4 << 20, 17 << 20])
def test_a_message_of_any_size_comes_through_both_ways(channel: Any, size: int) -> None:
    message = os.urandom(size)
    answer = channel.unary_unary("/test.Bytes/Echo")(message, timeout=30)
    assert hashlib.sha256(answer).digest() == hashlib.sha256(message).digest()


def test_streams_pass_in_every_direction(channel: Any) -> None:
    repeat = channel.unary_stream("/test.Bytes/Repeat")
    parts = list(repeat(b"200 5000", timeout=20))
    assert [int.from_bytes(part[:4], "big") for part in parts] == list(range(200))
    collect = channel.stream_unary("/test.Bytes/Collect")
    assert collect(iter([b"x" * 70_000, b"", b"y"]), timeout=20) == b"70000,0,1"
    converse = channel.stream_stream("/test.Bytes/Converse")
    assert list(converse(iter([b"abc", b"def"]), timeout=20)) == [b"cba", b"fed"]


def test_an_error_keeps_code_text_and_details(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/test.Bytes/Fail")(b"", timeout=5)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details() == "kein Gefäß: 100% " + "x" * 3000
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == b"\x08\x05\x12\x01x"


def test_an_unknown_service_gets_the_runtimes_own_answer(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/no.Such/Method")(b"", timeout=5)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_deadlines_and_cancellation_reach_the_runtime(runtime: FakeCri, channel: Any) -> None:
    left = float(channel.unary_unary("/test.Bytes/Remaining")(b"", timeout=7))
    assert 6 < left < 7.5  # the client rounds up
    runtime.cancelled.clear()
    runtime.hanging.clear()
    call = channel.unary_unary("/test.Bytes/Hang").future(b"", timeout=30)
    assert runtime.hanging.wait(5)
    assert not runtime.cancelled.is_set()
    call.cancel()
    assert runtime.cancelled.wait(5)


def test_many_callers_share_a_connection(channel: Any) -> None:
    echo = channel.unary_unary("/test.Bytes/Echo")
    with futures.ThreadPoolExecutor(8) as pool:
        sizes = [(number * 997) % 40_000 for number in range(400)]
        answers = list(pool.map(lambda size: len(echo(b"x" * size, timeout=30)), sizes))
    assert answers == sizes


def raw(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    client.connect(str(path))
    return client


def read_to_end(client: socket.socket) -> bytes:
    got = b""
    while True:
        try:
            part = client.recv(65_536)
        except ConnectionResetError:
            return got
        if not part:
            return got
        got += part


@pytest.mark.parametrize(
    "octets",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames.PREFACE + b"\xff" * 100,
        frames.PREFACE
        + frames.settings({})
        + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        frames.PREFACE
        + frames.settings({})
        + frames.frame(frames.HEADERS, 0, 1, b"")
        + frames.frame(frames.CONTINUATION, 0, 1, b"\0" * 16_384) * 40,
    ],
    ids=["http/1.1", "noise", "broken header block", "endless headers"],
)
def test_a_hostile_client_loses_its_own_connection_only(
    running: Proxy, channel: Any, octets: bytes
) -> None:
    echo = channel.unary_unary("/test.Bytes/Echo")
    assert echo(b"before", timeout=5) == b"before"
    with raw(running.socket) as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(octets)
        read_to_end(client)
    assert echo(b"after", timeout=5) == b"after"


def test_half_a_message_and_gone_leaves_nothing_behind(
    running: Proxy, runtime: FakeCri, channel: Any
) -> None:
    path = b"/runtime.v1.RuntimeService/CreateContainer"
    block = hpack.encode(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
    )
    before = len(runtime.asked("CreateContainer"))
    for _ in range(20):
        with raw(running.socket) as client:
            client.sendall(
                frames.PREFACE
                + frames.settings({})
                + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
                + frames.frame(frames.DATA, 0, 1, b"\0\0\0\x40\0" + b"half")
            )
    assert channel.unary_unary("/test.Bytes/Echo")(b"x", timeout=5) == b"x"
    wait_until(lambda: running.open_sockets() < 25, "the connections to be closed")
    assert len(runtime.asked("CreateContainer")) == before


@pytest.mark.parametrize("window", [65_535, frames.LARGEST_WINDOW], ids=["no window", "no reading"])
def test_a_client_that_does_not_read_holds_up_no_other_and_fills_no_memory(
    running: Proxy, channel: Any, window: int
) -> None:
    block = hpack.encode(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/test.Bytes/Repeat"),
            (b":authority", b"localhost"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
    )
    asked = b"100 1000000"
    before = running.resident_kib()
    with raw(running.socket) as client:
        client.sendall(
            frames.PREFACE
            + frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: window})
            + (frames.window_update(0, window - 65_535) if window > 65_535 else b"")
            + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
            + frames.frame(frames.DATA, frames.END_STREAM, 1, b"\0\0\0\0\x0b" + asked)
        )
        time.sleep(1)
        assert channel.unary_unary("/test.Bytes/Echo")(b"x", timeout=5) == b"x"
        assert running.resident_kib() - before < 8 * 1024
        got = data_octets(client, 3 * 1024 * 1024)
    assert got == 65_535 if window == 65_535 else got > 2 * 1024 * 1024


def data_octets(client: socket.socket, limit: int) -> int:
    """Octets of DATA that arrive until there have been `limit` of anything, or silence."""
    client.settimeout(0.5)
    octets = b""
    with suppress(TimeoutError):
        while len(octets) < limit and (part := client.recv(1 << 20)):
            octets += part
    at = total = 0
    while at + frames.HEADER_SIZE <= len(octets):
        length = int.from_bytes(octets[at : at + 3], "big")
        total += length if octets[at + 3] == frames.DATA else 0
        at += frames.HEADER_SIZE + length
    return total


def test_only_root_may_connect(running: Proxy) -> None:
    assert running.socket.stat().st_mode & 0o777 == 0o600


# -- the runtime goes and comes -------------------------------------------------------------------


def test_an_absent_runtime_is_reported_at_once_and_found_again_within_a_second(
    tmp_path: Path,
) -> None:
    runtime = FakeCri(tmp_path / "runtime.sock")
    with (
        proxy(runtime.socket) as running,
        connected(running.socket) as channel,
    ):
        echo = channel.unary_unary("/test.Bytes/Echo")
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                echo(b"x", timeout=30)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "no such file" in error.details()
            assert time.monotonic() - began < 1
        for _ in range(2):
            runtime.start()
            began = time.monotonic()
            while True:
                try:
                    assert echo(b"back", timeout=5) == b"back"
                    break
                except grpc.RpcError:
                    time.sleep(0.02)
            assert time.monotonic() - began < 1
            runtime.stop()
            runtime.socket.unlink(missing_ok=True)
            with pytest.raises(grpc.RpcError):
                echo(b"x", timeout=30)


def test_a_client_that_floods_while_the_runtime_is_away_fills_nothing(tmp_path: Path) -> None:
    with proxy(tmp_path / "nobody.sock") as running, raw(running.socket) as client:
        client.sendall(frames.PREFACE + frames.settings({}))
        client.recv(100)
        before = running.resident_kib()
        client.settimeout(1)
        flood = frames.ping(b"12345678") * 4096
        sent = 0
        with suppress(TimeoutError):
            for _ in range(1000):
                sent += client.send(flood)
        assert sent < len(flood) * 1000
        assert running.resident_kib() - before < 16 * 1024
        client.settimeout(5)
        assert data_after(client, 8 << 20), "a client that reads again is served again"


def data_after(client: socket.socket, size: int) -> bytes:
    """What comes once `size` octets were read, asked for by another ping."""
    client.settimeout(0.5)
    with suppress(TimeoutError):
        while size > 0 and (part := client.recv(1 << 20)):
            size -= len(part)
    client.settimeout(5)
    client.sendall(frames.ping(b"87654321"))
    return client.recv(17)


def test_a_drain_lets_running_calls_end_and_drops_none(tmp_path: Path) -> None:
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket) as running:
        with connected(running.socket) as channel:
            hang = channel.unary_unary("/test.Bytes/Hang").future(b"", timeout=20)
            assert runtime.hanging.wait(5)
            assert running.process is not None
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not running.socket.exists(), "the drain to begin")
            assert running.process.poll() is None
            runtime.cancelled.set()
            assert hang.result() == b""
        assert running.process.wait(5) == 0
        assert "ended calls_cut_off=0" in running.log_text()


@pytest.mark.parametrize(
    "method",
    [
        "/runtime.v1.RuntimeService/GetContainerEvents",
        "/containerd.services.events.v1.Events/Subscribe",
        "/grpc.health.v1.Health/Watch",
    ],
)
def test_a_drain_waits_for_calls_and_not_for_streams_without_an_end(
    tmp_path: Path, method: str
) -> None:
    flags = ("--drain-timeout=1h",)
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket, flags=flags) as running:
        with connected(running.socket) as channel:
            events = channel.unary_stream(method)(b"")
            hang = channel.unary_unary("/test.Bytes/Hang").future(b"", timeout=20)
            assert next(events) == b"event"
            assert runtime.hanging.wait(5)
            assert running.process is not None
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not running.socket.exists(), "the drain to begin")
            assert [next(events) for _ in range(10)] == [b"event"] * 10
            runtime.cancelled.set()
            assert hang.result() == b""
            with pytest.raises(grpc.RpcError) as ended:
                list(events)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert running.process.wait(10) == 0


def test_after_a_handover_streams_without_an_end_go_on(tmp_path: Path) -> None:
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket) as running:
        with connected(running.socket) as channel:
            events = channel.unary_stream("/runtime.v1.RuntimeService/GetContainerEvents")(b"")
            assert next(events) == b"event"
            assert running.process is not None
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_log("handed over")
            successor = running.successor()
            assert [next(events) for _ in range(20)] == [b"event"] * 20
            assert running.process.poll() is None
            events.cancel()
        assert running.process.wait(10) == 0
        os.kill(successor, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")


def as_script(folder: Path) -> tuple[str, ...]:
    """A command as pip installs one, which finds the package by itself and nowhere else."""
    script = folder / "koord-runtime-proxy"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from runtime_proxy.main import main\nsys.exit(main())\n"
    )
    return sys.executable, str(script)


@pytest.mark.parametrize("start", [lambda _: AS_MODULE, as_script], ids=["module", "script"])
def test_a_handover_under_load_drops_no_call(
    tmp_path: Path, start: Callable[[Path], tuple[str, ...]]
) -> None:
    program = start(tmp_path)
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket, program=program) as running:
        stop = threading.Event()
        failures: list[str] = []
        done = [0]

        def caller() -> None:
            with connected(running.socket) as channel:
                echo = channel.unary_unary("/test.Bytes/Echo")
                while not stop.is_set():
                    try:
                        echo(b"x" * 3000, timeout=10)
                        done[0] += 1
                    except grpc.RpcError as error:
                        failures.append(str(error))

        callers = [threading.Thread(target=caller) for _ in range(4)]
        for thread in callers:
            thread.start()
        assert running.process is not None
        pid = running.pid
        successor = 0
        try:
            wait_until(lambda: done[0] > 100, "calls to be under way")
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_log("handed over")
            successor = running.successor()
            assert running.process.wait(10) == 0
            before = done[0]
            wait_until(lambda: done[0] > before + 100, "calls through the successor")
        finally:
            stop.set()
            for thread in callers:
                thread.join()
            if successor:
                os.kill(successor, signal.SIGTERM)
                wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")
        assert successor != pid
        assert failures == []


def test_a_client_that_learns_late_that_it_was_sent_away_meets_no_closed_socket(
    tmp_path: Path,
) -> None:
    """Whoever wrote into one could not tell that its call was never processed."""
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket) as running:
        assert running.process is not None
        with raw(running.socket) as client:
            client.sendall(frames.PREFACE + frames.settings({}))
            assert client.recv(65536)
            running.process.send_signal(signal.SIGTERM)
            assert read_to_end(client).endswith(b"draining")
            client.sendall(frames.settings({}))
        assert running.process.wait(10) == 0


def test_what_a_hook_changed_in_a_call_that_outlived_a_handover_is_not_forgotten(
    tmp_path: Path,
) -> None:
    def moved(request: Any) -> Any:
        go_on.wait(10)
        answer = echo(request)
        answer.cgroup_parent = "/moved"
        return answer

    go_on = threading.Event()
    with (
        fake_cri(tmp_path) as runtime,
        proxy(runtime.socket, flags=["--hook-timeout=10s"]) as running,
        hook_service(tmp_path / "h.sock", {"PreRunPodSandbox": moved}) as service,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        running.wait_for_log("recovered")
        running.register(service.socket, ["PreRunPodSandbox"])
        with connected(running.socket) as before, connected(running.socket) as after:
            run = before.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")
            create = after.unary_unary("/runtime.v1.RuntimeService/CreateContainer")
            late = pool.submit(run, cri.RunPodSandboxRequest().SerializeToString(), timeout=20)
            service.wait_for("PreRunPodSandbox")
            assert running.process is not None
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_log("handed over")
            successor = running.successor()
            try:
                wait_until(lambda: running.log_text().count("recovered") == 2, "its recovery")
                go_on.set()
                pod = cri.RunPodSandboxResponse.FromString(late.result()).pod_sandbox_id
                request = cri.CreateContainerRequest(pod_sandbox_id=pod)
                create(request.SerializeToString(), timeout=10)
            finally:
                os.kill(successor, signal.SIGTERM)
                wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")
        (container,) = runtime.asked("CreateContainer")
        assert container.sandbox_config.linux.cgroup_parent == "/moved"


def test_after_a_handover_the_successor_alone_serves_figures(tmp_path: Path) -> None:
    port = free_port()

    def started_at() -> str:
        _, text = fetch(f"http://127.0.0.1:{port}/metrics")
        return next(x for x in text.splitlines() if x.startswith("process_start_time_seconds"))

    flags = [f"--http-address=127.0.0.1:{port}"]
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket, flags=flags) as running:
        assert running.process is not None
        before = started_at()
        with connected(running.socket) as channel:
            hang = channel.unary_unary("/test.Bytes/Hang").future(b"", timeout=20)
            assert runtime.hanging.wait(5)
            running.process.send_signal(signal.SIGHUP)
            running.wait_for_log("handed over")
            successor = running.successor()
            try:
                assert running.process.poll() is None, "it waits for its call"
                told = {started_at() for _ in range(20)}
                assert len(told) == 1
                assert before not in told
                runtime.cancelled.set()
                assert hang.result() == b""
                assert running.process.wait(5) == 0
            finally:
                os.kill(successor, signal.SIGTERM)
                wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")


def test_a_passed_socket_is_served_and_left_in_place(tmp_path: Path) -> None:
    path = tmp_path / "activated.sock"
    with socket.socket(socket.AF_UNIX) as listener, fake_cri(tmp_path) as runtime:
        listener.bind(str(path))
        listener.listen(16)
        with proxy(
            runtime.socket,
            environment={"KOORD_RUNTIME_PROXY_SOCKETS": f"cri={listener.fileno()}"},
            pass_fds=[listener.fileno()],
        ) as running:
            for _ in range(2):
                with connected(path) as channel:
                    assert channel.unary_unary("/test.Bytes/Echo")(b"x", timeout=5) == b"x"
                assert running.stop() == 0
                assert path.exists()
                running.start()


def test_the_socket_of_a_running_process_is_not_taken(running: Proxy) -> None:
    other = Proxy(running.folder, running.backend)
    with pytest.raises(RuntimeError, match="served by another process"):
        other.start()


def test_the_pages_tell_counts_and_health(runtime: FakeCri, tmp_path: Path) -> None:
    port = free_port()
    with proxy(runtime.socket, flags=[f"--http-address=127.0.0.1:{port}"]) as running:
        running.wait_for_log("recovered")
        with connected(running.socket) as channel:
            channel.unary_unary("/runtime.v1.RuntimeService/Version")(b"", timeout=5)
            channel.unary_unary("/test.Bytes/Echo")(b"x", timeout=5)
            status, text = fetch(f"http://127.0.0.1:{port}/metrics")
        assert status == 200
        assert (
            'koord_runtime_proxy_call_duration_seconds_count{method="Version",'
            'service="runtime.v1.RuntimeService"} 1.0' in text
        )
        assert 'service="other"} 1.0' in text
        assert "koord_runtime_proxy_runtime_up 1.0" in text
        for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds"):
            assert f"\nprocess_{name} " in text
        assert fetch(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
        assert fetch(f"http://127.0.0.1:{port}/readyz") == (200, "ok\n")
        assert fetch(f"http://127.0.0.1:{port}/nothing")[0] == 404
        (running.hook_dir / "broken.json").write_text("{")
        wait_until(lambda: fetch(f"http://127.0.0.1:{port}/healthz")[0] == 503, "503")
        assert "broken.json: not JSON" in fetch(f"http://127.0.0.1:{port}/healthz")[1]


def test_a_journal_that_cannot_be_written_turns_health_red(
    runtime: FakeCri, tmp_path: Path
) -> None:
    port = free_port()
    with proxy(runtime.socket, flags=[f"--http-address=127.0.0.1:{port}"]) as running:
        running.wait_for_log("recovered")
        assert fetch(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n")
        running.stop()
        journal = running.folder / "state" / "journal"
        journal.unlink()
        os.mkfifo(journal)
        running.start()
        status, text = fetch(f"http://127.0.0.1:{port}/healthz")
        assert status == 503
        assert text == f"{journal} cannot be read: not a regular file: move it away\n"


def test_as_many_clients_may_wait_as_the_kernel_allows(running: Proxy) -> None:
    """A proxy that is busy or starting refuses nobody; asyncio's own default is 100."""
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert allowed > 200, "this machine's net.core.somaxconn is too small for the test"
    os.kill(running.pid, signal.SIGSTOP)
    clients = []
    try:
        for _ in range(200):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            clients.append(client)
            client.connect(str(running.socket))  # BlockingIOError where the queue is full
    finally:
        os.kill(running.pid, signal.SIGCONT)
        for client in clients:
            client.close()


def test_the_status_shows_each_hook_server_and_its_policy(runtime: FakeCri, tmp_path: Path) -> None:
    port = free_port()
    with proxy(runtime.socket, flags=[f"--http-address=127.0.0.1:{port}"]) as running:
        running.wait_for_log("recovered")
        running.register(running.folder / "a.sock", ["PreRunPodSandbox"], name="a.json")
        running.register(running.folder / "b.sock", STAGES, policy="Fail", name="b.json")
        (running.hook_dir / "c.json").write_text(
            '{"remote-endpoint": "/run/c.sock", "failure-policy": "Sometimes"}'
        )
        running.wait_for_log("Sometimes")
        with connected(running.socket) as channel, suppress(grpc.RpcError):
            channel.unary_unary("/runtime.v1.RuntimeService/RunPodSandbox")(
                cri.RunPodSandboxRequest().SerializeToString(), timeout=5
            )
        status, text = fetch(f"http://127.0.0.1:{port}/status")
        assert status == 200
        shown = json.loads(text)
        assert shown["runtime"] == {"socket": str(runtime.socket), "up": True}
        assert shown["recovered"] is True
        assert shown["journalProblem"] == ""
        assert (shown["pods"], shown["containers"]) == (0, 0)
        ignoring, failing = shown["hookServers"]
        assert (ignoring["name"], ignoring["failurePolicy"]) == ("a.json", "Ignore")
        assert ignoring["stages"] == ["PreRunPodSandbox"]
        assert (failing["name"], failing["failurePolicy"]) == ("b.json", "Fail")
        assert failing["socket"] == str(running.folder / "b.sock")
        assert failing["stages"] == sorted(STAGES)
        for server in (ignoring, failing):
            assert (server["state"], server["trips"]) == ("open", 1)
            assert server["reason"] == "No such file or directory"
        policy = "c.json: failure-policy: 'Sometimes' is neither Fail nor Ignore"
        assert shown["unusableRegistrations"] == {"c.json": policy}
        assert fetch(f"http://127.0.0.1:{port}/healthz") == (
            503,
            f"{policy}\nb.json: calls fail (failure policy Fail): No such file or directory\n",
        )
