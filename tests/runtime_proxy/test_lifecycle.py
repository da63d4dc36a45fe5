"""The process from its start to its end, as systemd, an operator and kubelet see it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy import main
from service.systemd import Notifier
from tests.runtime_proxy.fake_cri import connected, fake_cri
from tests.runtime_proxy.processes import AS_MODULE, ROOT, STAGES, echo, hook_service, proxy
from tests.waiting import wait_until


@contextmanager
def supervisor(folder: Path) -> Iterator[socket.socket]:
    """The socket on which systemd gets a service's notifications, at `folder`/notify."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(folder / "notify"))
        listener.settimeout(15)
        yield listener


def test_systemd_is_notified_of_the_start_of_each_watchdog_period_and_of_the_end(
    tmp_path: Path,
) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "250000"}
    with (
        supervisor(tmp_path) as systemd,
        proxy(tmp_path / "no.sock", environment=environment) as running,
    ):
        assert systemd.recv(200) == b"READY=1\nSTATUS=serving"
        assert [systemd.recv(200) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        assert running.stop() == 0
        received = []
        systemd.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                received.append(systemd.recv(200))
    assert b"STOPPING=1\nSTATUS=letting running calls end" in received


class _Enough(Exception):
    """Ends a loop that has no end."""


@pytest.mark.parametrize("watchdog_s", [0.5, 10.0])
def test_the_watchdog_is_notified_twice_in_its_period(
    watchdog_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sd_watchdog_enabled(3) advises: a notification that comes late does no harm."""
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        if len(waits) == 3:
            raise _Enough

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(_Enough):
        asyncio.run(main._watchdog(Notifier({"WATCHDOG_USEC": str(int(watchdog_s * 1e6))})))
    assert all(watchdog_s / 4 <= wait_s <= watchdog_s / 2 for wait_s in waits)


def test_without_a_watchdog_there_is_nothing_to_notify() -> None:
    asyncio.run(asyncio.wait_for(main._watchdog(Notifier({})), 10))


def test_a_socket_that_cannot_be_served_ends_the_process_with_status_1(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    flags = (f"--koord-runtimeproxy-endpoint={path}", "--state-dir=", "--http-address=")
    ended = subprocess.run(
        [*AS_MODULE, *flags], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert b"is not a socket: remove it or choose another" in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert path.read_text() == "data"


def test_pods_come_before_metrics_when_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, fake_cri(tmp_path) as runtime:
        flags = [f"--http-address=127.0.0.1:{other.getsockname()[1]}"]
        with (
            proxy(runtime.socket, flags=flags) as running,
            connected(running.socket) as channel,
        ):
            assert channel.unary_unary("/test.Bytes/Echo")(b"x", timeout=5) == b"x"
            assert "no /metrics and /healthz" in running.log_text()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_order(tmp_path: Path, how: signal.Signals) -> None:
    with proxy(tmp_path / "no.sock") as running:
        assert running.stop(how) == 0
        assert not running.socket.exists()
        assert "ended calls_cut_off=0" in running.log_text()


def test_a_call_that_outlasts_the_drain_is_cut_off(tmp_path: Path) -> None:
    flags = ["--drain-timeout=100ms"]
    with fake_cri(tmp_path) as runtime, proxy(runtime.socket, flags=flags) as running:
        with connected(running.socket) as channel:
            hang = channel.unary_unary("/test.Bytes/Hang").future(b"", timeout=20)
            assert runtime.hanging.wait(5)
            assert running.stop() == 0
            assert hang.exception().code() is grpc.StatusCode.UNAVAILABLE
        assert "ended calls_cut_off=1" in running.log_text()


def test_the_after_stages_of_the_last_call_are_finished_before_the_process_ends(
    tmp_path: Path,
) -> None:
    def slow(request: Any) -> Any:
        time.sleep(0.3)
        return echo(request)

    with (
        fake_cri(tmp_path) as runtime,
        proxy(runtime.socket) as running,
        hook_service(tmp_path / "hook.sock", {"PostStopContainer": slow}) as service,
    ):
        running.register(service.socket, STAGES)
        with connected(running.socket) as channel:

            def call(method: str, request: Any) -> Any:
                invoke = channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
                answer = invoke(request.SerializeToString(), timeout=10)
                return getattr(cri, f"{method}Response").FromString(answer)

            sandbox = call("RunPodSandbox", cri.RunPodSandboxRequest()).pod_sandbox_id
            call("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id=sandbox))
            call("StopPodSandbox", cri.StopPodSandboxRequest(pod_sandbox_id=sandbox))
        service.wait_for("PostStopContainer")
        assert running.stop() == 0
        assert len(service.asked("PostStopPodSandbox")) == 1


def test_a_broken_upgrade_leaves_the_process_serving_and_the_next_one_takes_over(
    tmp_path: Path,
) -> None:
    script = tmp_path / "koord-runtime-proxy"
    working = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from runtime_proxy.main import main\nsys.exit(main())\n"
    )
    script.write_text(working)
    program = (sys.executable, str(script))
    with (
        fake_cri(tmp_path) as runtime,
        proxy(runtime.socket, program=program) as running,
        connected(running.socket) as channel,
    ):
        echo_call = channel.unary_unary("/test.Bytes/Echo")
        script.write_text("raise SystemExit('a release that does not start')\n")
        os.kill(running.pid, signal.SIGHUP)
        running.wait_for_log("the successor does not serve")
        assert echo_call(b"x", timeout=5) == b"x"
        script.write_text(working)
        os.kill(running.pid, signal.SIGHUP)
        running.wait_for_log("handed over")
        successor = running.successor()
        try:
            assert running.process is not None
            assert running.process.wait(15) == 0
            assert echo_call(b"y", timeout=5, wait_for_ready=True) == b"y"
        finally:
            os.kill(successor, signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{successor}").exists(), "the successor's end")


def test_hundreds_of_calls_may_wait_for_a_busy_proxy(tmp_path: Path) -> None:
    """kubelet opens many connections at once after a restart; also systemd's socket stays open."""
    with proxy(tmp_path / "no.sock") as running, ExitStack() as clients:
        os.kill(running.pid, signal.SIGSTOP)
        try:
            for _ in range(300):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(running.socket))  # BlockingIOError without room to wait
        finally:
            os.kill(running.pid, signal.SIGCONT)
