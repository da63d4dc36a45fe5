"""The runtime proxy's units: installed as docs/runtime-proxy.md says, sandboxed, watched.

systemd holds the socket, so what a client must never see here is a refused connection; and a
restart or an upgrade under a stream of calls must not cost a single call.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.beds.cri import Cri, connected
from tests.e2e.manifests import ls_pod
from tests.runtime_proxy.processes import STAGES, echo, hook_service
from tests.vm.inside.node import CGROUPS, Node, run
from tests.vm.inside.service import CHECKOUT
from tests.waiting import wait_until

UNITS = Path("/etc/systemd/system")
SERVICE = "koord-runtime-proxy.service"
SOCKET_UNIT = "koord-runtime-proxy.socket"
SOCKET = Path("/run/koord-runtimeproxy/runtimeproxy.sock")
REGISTRATIONS = Path("/etc/runtime/hookserver.d")


def show(name: str) -> str:
    return run("systemctl", "show", SERVICE, "--value", "-p", name).strip()


def pid() -> int:
    return int(show("MainPID"))


def is_another(before: int) -> bool:
    return pid() not in (0, before) and show("ActiveState") == "active"


@pytest.fixture(scope="module")
def proxy(machine: Node) -> Iterator[Path]:
    """Both units enabled and started; the socket that kubelet is pointed at."""
    for unit in (SERVICE, SOCKET_UNIT):
        shutil.copy(CHECKOUT / "systemd" / unit, UNITS / unit)
    run("systemctl", "daemon-reload")
    try:
        run("systemctl", "enable", "--now", SOCKET_UNIT, SERVICE, timeout_s=90)
        yield SOCKET
    finally:
        run("systemctl", "disable", "--now", SOCKET_UNIT, SERVICE, check=False, timeout_s=60)
        for unit in (SERVICE, SOCKET_UNIT):
            (UNITS / unit).unlink()
        run("systemctl", "daemon-reload")


@pytest.fixture
def through(proxy: Path) -> Iterator[Cri]:
    with connected(proxy, timeout_s=60) as client:
        yield client


@contextmanager
def patience(text: str) -> Iterator[None]:
    """A drop-in while the test lasts."""
    dropin = UNITS / f"{SERVICE}.d/patience.conf"
    dropin.parent.mkdir(exist_ok=True)
    dropin.write_text(f"[Service]\n{text}\n")
    run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        shutil.rmtree(dropin.parent)
        run("systemctl", "daemon-reload")


@contextmanager
def stream_of_calls(callers: int = 3) -> Iterator[list[str]]:
    """Clients that call without a pause; yields what failed, and at the end insists on calls."""
    failed: list[str] = []
    made = [0] * callers
    stop = threading.Event()

    def call(number: int) -> None:
        with connected(SOCKET, timeout_s=60) as client:
            while not stop.is_set():
                try:
                    client.version()
                    client.sandboxes()
                    made[number] += 1
                except grpc.RpcError as error:
                    failed.append(f"{error.code()}: {error.details()}")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(made), "every client to have called")
        yield failed
        before = list(made)
        wait_until(
            lambda: all(now > then for now, then in zip(made, before, strict=True)),
            "every client to go on calling",
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_systemd_finds_nothing_wrong_with_the_units(proxy: Path) -> None:
    said = run("systemd-analyze", "verify", str(UNITS / SERVICE), str(UNITS / SOCKET_UNIT))
    assert "koord-runtime-proxy" not in said


def test_the_exposure_is_below_2(proxy: Path) -> None:
    said = run("systemd-analyze", "security", "--no-pager", SERVICE)
    exposure = next(line for line in said.splitlines() if "Overall exposure" in line)
    assert float(exposure.split(":")[1].split()[0]) < 2.0, exposure


def test_the_socket_is_roots_alone_and_systemds(proxy: Path) -> None:
    status = proxy.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_uid, status.st_gid) == (0, 0)
    assert run("systemctl", "show", SOCKET_UNIT, "--value", "-p", "NRefused").strip() == "0"


def test_the_sandbox_is_in_force(through: Cri) -> None:
    through.version()
    number = pid()
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{number}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    mounts = {}
    for line in Path(f"/proc/{number}/mountinfo").read_text().splitlines():
        fields = line.split()
        mounts[fields[4]] = fields[5].split(",")[0]
    assert mounts["/"] == "ro"
    assert mounts["/var/lib/koord-runtime-proxy"] == "rw"
    assert mounts["/sys/fs/cgroup"] == "ro"
    assert Path(f"/proc/{number}/oom_score_adj").read_text().strip() == "-999"


def test_a_pod_made_through_it_has_what_a_hook_gave(machine: Node, through: Cri) -> None:
    def shrink(request: object) -> object:
        answer = echo(request)
        answer.container_resources.cpu_quota = 40_000
        return answer

    socket = Path("/run/koord-test-hook.sock")
    registration = REGISTRATIONS / "test.json"
    direct = machine.cri
    with hook_service(socket, {"PreCreateContainer": shrink}) as service:
        registration.write_text(
            json.dumps({"remote-endpoint": str(socket), "runtime-hooks": list(STAGES)})
        )
        wait_until(lambda: "hook server is registered" in journal(), "the registration")
        machine.cri = through
        try:
            pod = machine.run_pod(ls_pod("through-the-unit"))
            assert pod.read("main", "cpu.max") == "40000 100000"
            assert service.asked("PreRunPodSandbox")
            machine.remove(pod)
        finally:
            machine.cri = direct
            registration.unlink()
            socket.unlink(missing_ok=True)
    assert not (CGROUPS / pod.cgroup).exists()


def journal() -> str:
    return run("journalctl", "-u", SERVICE, "-n", "200", "--no-pager", "-o", "cat")


@pytest.mark.parametrize("verb", ["restart", "reload"])
def test_a_stream_of_calls_loses_none(proxy: Path, verb: str) -> None:
    with stream_of_calls() as failed:
        for _ in range(2):
            before = pid()
            run("systemctl", verb, SERVICE, timeout_s=90)
            wait_until(lambda before=before: is_another(before), "another process", timeout_s=60)
    assert failed == []


def test_a_running_call_outlives_an_upgrade_and_a_restart(machine: Node, through: Cri) -> None:
    pod = machine.run_pod(ls_pod("long-call"))
    answers: list[int] = []

    def execute() -> None:
        command = ["/bin/sh", "-c", "sleep 4; exit 7"]
        answers.append(through.execute(pod.containers["main"], command).exit_code)

    for verb in ("reload", "restart"):
        before = pid()
        caller = threading.Thread(target=execute)
        caller.start()
        wait_until(lambda: runs("sleep 4; exit 7"), "the command runs in the container")
        run("systemctl", verb, SERVICE, timeout_s=90)
        wait_until(lambda before=before: is_another(before), "another process", timeout_s=60)
        caller.join(60)
    assert answers == [7, 7]
    machine.remove(pod)


def runs(command: str) -> bool:
    lines = (read_or_nothing(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
    return any(command in line for line in lines)


def read_or_nothing(path: Path) -> str:
    try:
        return path.read_text().replace("\0", " ")
    except OSError:
        return ""


def ends_and_comes_back(end: Callable[[int], None]) -> None:
    """A client that connects while no process serves waits for the new process, and is served."""
    before = pid()
    end(before)
    with connected(SOCKET, timeout_s=60) as client:
        client.version()
    wait_until(lambda: is_another(before), "systemd started another one", timeout_s=60)


def test_a_killed_proxy_comes_back_and_no_client_is_refused(proxy: Path) -> None:
    ends_and_comes_back(lambda number: os.kill(number, signal.SIGKILL))


def test_a_killed_successor_comes_back_too(proxy: Path) -> None:
    before = pid()
    run("systemctl", "reload", SERVICE)
    wait_until(lambda: is_another(before), "the successor", timeout_s=60)
    wait_until(lambda: not Path(f"/proc/{before}").exists(), "the old process to end")
    assert "not our child" not in run("journalctl", "-b", "-u", SERVICE, "--no-pager")
    ends_and_comes_back(lambda number: os.kill(number, signal.SIGKILL))


def test_a_hung_proxy_is_restarted_by_the_watchdog(proxy: Path) -> None:
    assert show("WatchdogUSec") == "30s"
    with patience("WatchdogSec=8\nTimeoutAbortSec=3"):
        run("systemctl", "restart", SERVICE, timeout_s=90)
        ends_and_comes_back(lambda number: os.kill(number, signal.SIGSTOP))
    run("systemctl", "restart", SERVICE, timeout_s=90)


def test_containerd_restarts_under_it(machine: Node, through: Cri) -> None:
    before = pid()
    run("systemctl", "restart", "containerd", timeout_s=90)
    machine.reconnect()
    wait_until(lambda: is_served(through), "the runtime is reached again")
    assert pid() == before


def is_served(client: Cri) -> bool:
    try:
        client.version()
    except grpc.RpcError:
        return False
    return True
