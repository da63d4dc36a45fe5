"""A run directory that takes no new files: hooks are answered, no kernel file is written."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from koordlet.daemon.run_dir import LOCK, daemon_lock
from protos.nri.v1alpha1 import nri_pb2 as nri
from service import append_log
from service.locks import LockHeld, node_lock
from tests import waiting
from tests.conftest import require
from tests.fake_runtime.adaptation import Behaviour, FakeRuntime
from tests.fake_runtime.profiles import B
from tests.koordlet.daemon.bed import (
    ONE_CPU,
    SLO,
    Node,
    events,
    node,
    node_object,
    run,
    until,
)
from tests.koordlet.daemon.process import plain_machine, readiness, running
from tests.ports import free_port


def read_only(*_: object, **__: object) -> int:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_run_directory_that_becomes_read_only_keeps_no_container_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            first, second = n.kubelet.add_pod(ONE_CPU), n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(first)
                path = n.kubelet.path(first.cgroup, "cpu.max")
                await until("the quota", lambda: n.kernel.text(path) == "80000 100000")
                with monkeypatch.context() as patched:
                    patched.setattr(append_log.AppendLog, "_append", read_only)
                    patched.setattr(append_log, "_open_scratch", read_only)
                    await n.run_pod(second)
                    created = await n.create(second, "c2")
                    assert created.adjust.linux.resources.cpu.quota.value == 80_000
                    (reason,) = await reasons_not_ready(n)
                    assert reason.startswith("no kernel file is written: ")
                    assert reason.endswith("Read-only file system")
                    path = n.kubelet.path(second.cgroup, "cpu.max")
                    assert n.kernel.text(path) == "100000 100000"
                    daemon.parts.health.report_journal()
                    daemon.parts.health.report_journal()
                    (message,) = events(n, "run-dir")
                    assert "new containers are adjusted" in message
                n.put(node_object("2.0"))
                await until("the quota", lambda: n.kernel.text(path) == "50000 100000")
                assert daemon.parts.health.not_ready() == []
                daemon.parts.health.report_journal()
                assert events(n, "run-dir")[-1] == "is written again"

    run(test)


async def reasons_not_ready(n: Node) -> list[str]:
    await until("a reason", n.daemon.parts.health.not_ready)
    return n.daemon.parts.health.not_ready()


def test_an_admin_socket_that_cannot_be_made_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            with monkeypatch.context() as patched:
                patched.setattr("service.unix.listen", read_only)
                async with n.running() as daemon:
                    await n.run_pod(pod)
                    created = await n.create(pod, "c1")
                    assert created.adjust.linux.resources.cpu.quota.value == 80_000
                    (message,) = events(n, "admin")
                    assert message.startswith("koordctl cannot connect: Read-only file system")
                    await daemon._endpoints.open_missing()
                    assert events(n, "admin") == [message]
                    patched.undo()
                    await daemon._endpoints.open_missing()
                    assert (await n.ask("GET", "/status"))[0] == 200
                    assert events(n, "admin")[-1] == "koordctl can connect"

    run(test)


def test_an_admin_socket_of_another_process_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def served(path: str) -> int:
        raise OSError(f"{path} is served by another process")

    async def test() -> None:
        async with node() as n:
            monkeypatch.setattr("service.unix.listen", served)
            with pytest.raises(OSError, match="served by another process"):
                async with n.running():
                    pass

    run(test)


# --- locks -------------------------------------------------------------------------------------


@contextmanager
def without_new_files() -> Iterator[None]:
    """As if every file system were read-only: nothing can be made or opened for writing."""
    opened = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        return read_only() if flags & (os.O_RDWR | os.O_CREAT) else opened(path, flags, mode)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", refusing)
        yield


def test_a_lock_file_that_cannot_be_written_is_locked_all_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / LOCK)
    with node_lock(path):
        pass
    with without_new_files():
        held = pytest.raises(LockHeld, match=f"process {os.getpid()} holds {path}")
        with node_lock(path), held, node_lock(path):
            pass
        with node_lock(path):
            pass


def test_without_a_lock_file_the_run_directory_itself_is_locked(tmp_path: Path) -> None:
    with without_new_files():
        held = pytest.raises(LockHeld, match=f"process {os.getpid()} holds {tmp_path}")
        with daemon_lock(str(tmp_path)), held, daemon_lock(str(tmp_path)):
            pass
        with daemon_lock(str(tmp_path)):
            pass
    assert list(tmp_path.iterdir()) == []


# --- a real read-only mount --------------------------------------------------------------------

_ON_READ_ONLY = """
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
shift
exec "$@"
"""
_UID = "aaaa-1111"
_PATIENCE_S = 60.0
"""How long the process may take to start, and for each answer. On a machine that is busy with other
programs its start alone took more than ten seconds, and the runtime's own limit is two seconds."""


@pytest.mark.root
def test_a_daemon_starts_on_a_read_only_run_directory_and_writes_once_it_can(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The process with its locks and sockets; what was missing is made up for after a remount."""
    folder = tmp_path_factory.mktemp("ro")
    container = folder / "cgroup" / "cpu" / "kubepods" / f"pod{_UID}" / "c1"
    port = free_port()
    config = plain_machine(folder, container, port)
    prefix = ("unshare", "--mount", "sh", "-ec", _ON_READ_ONLY, "-", str(folder / "run"))
    probe = subprocess.run([*prefix, "true"], check=False, capture_output=True)
    require(probe.returncode == 0, "a mount namespace (unshare --mount as root)")

    async def test() -> None:
        patient = Behaviour(request_timeout_s=_PATIENCE_S, registration_timeout_s=_PATIENCE_S)
        runtime = FakeRuntime(str(folder / "nri.sock"), B, patient)
        async with runtime.running():
            with running(config, folder / "koordlet.log", prefix=prefix) as process:
                await runtime.synchronized(timeout_s=_PATIENCE_S)
                linux = nri.LinuxPodSandbox(cgroup_parent=f"/kubepods/pod{_UID}")
                await runtime.run_pod_sandbox(
                    nri.PodSandbox(
                        id="s1",
                        name="web",
                        uid=_UID,
                        namespace="default",
                        labels={"koordinator.sh/qosClass": "LS"},
                        pid=1,
                        linux=linux,
                    )
                )
                message = nri.Container(id="c1", pod_sandbox_id="s1", name="main")
                message.linux.cgroups_path = f"/kubepods/pod{_UID}/c1"
                message.linux.resources.cpu.quota.value = 200_000
                message.linux.resources.cpu.period.value = 100_000
                created = await runtime.create_container(message)
                await runtime.start_container("c1")
                assert created.adjust.linux.resources.cpu.quota.value == 160_000
                reason = "journal cannot be written: Read-only file system"
                await waiting.until(
                    lambda: reason in readiness(port), "the reason", timeout_s=_PATIENCE_S
                )
                assert "no kernel file is written: " in readiness(port)
                quota = container / "cpu.cfs_quota_us"
                assert quota.read_text() == "200000\n"
                assert list((folder / "run").iterdir()) == []
                await asyncio.to_thread(make_writable, process.pid, folder / "run")
                await waiting.until(
                    lambda: quota.read_text().strip() == "160000",
                    "the quota",
                    timeout_s=_PATIENCE_S,
                )
                await waiting.until(
                    lambda: readiness(port) == "ok", "readiness", timeout_s=_PATIENCE_S
                )

    asyncio.run(test())


def make_writable(pid: int, mounted: Path) -> None:
    """Let a process's mount namespace write to `mounted` again."""
    enter = ("nsenter", "-t", str(pid), "-m", "mount", "-o", "remount,bind,rw")
    subprocess.run([*enter, str(mounted)], check=True, timeout=30)
