"""The command line and the process around the daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from koordlet.daemon.run_dir import prepare_run_dir, writes_for_root
from koordlet.executor.network import FILE_NAME as NETWORK_QOS
from koordlet.executor.network import Network
from koordlet.main import main
from linux.htb import HtbClass
from linux.packet_classes import Member, PacketClasses, Present
from service.append_log import encode_line
from service.locks import lock_directory
from tests.beds.network import device, require_shaping


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_NAME", "agent_mode", "NRI_PLUGIN_SOCKET"):
        monkeypatch.delenv(name, raising=False)


def config(folder: Path, **lines: str) -> str:
    path = folder / "config.yaml"
    lines = {"nodeName": "n1", "runDir": str(folder / "run"), **lines}
    path.write_text("\n".join(f"{key}: {value}" for key, value in lines.items()))
    return str(path)


def test_help_teaches_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for words in ("koordlet run", "check-config", "restore", "-feature-gates", "agent_mode"):
        assert words in shown


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "unknown command 'fly'"),
        (["run", "fast"], "takes flags only"),
        (["check-config", "-addrr=1"], "did you mean -addr?"),
        (["check-config", "--config", "/does/not/exist"], "no such file"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_wrong(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("word", ["version", "--version"])
def test_every_spelling_of_the_flag_prints_the_version(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 0
    assert "koordlet 0.1.0" in capsys.readouterr().out


def test_check_config_prints_what_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, featureGates="{CoreSched: true}")
    assert main(["check-config", "--config", path, "-addr=:1", "-tsdb-path=/x"]) == 0
    shown = capsys.readouterr().out
    assert "# flag -tsdb-path has no effect" in shown
    assert "address: :1" in shown
    assert "CoreSched: true" in shown


def test_check_config_reports_all_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, foo="1", featureGates="{Nope: true}", nri="{pluginIndex: 7}")
    assert main(["check-config", "--config", path]) == 2
    assert len(capsys.readouterr().err.splitlines()) >= 2


def test_a_second_daemon_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.logs.set_up", lambda **_: None)
    path = config(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    descriptor = os.open(run_dir / "koordlet.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, b"4711\n")
        assert main(["run", "--config", path]) == 1
        assert "process 4711 holds" in caplog.text
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("command", ["run", "restore"])
def test_a_run_directory_of_its_own_lets_no_second_daemon_near_the_pods(
    command: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.logs.set_up", lambda **_: None)
    monkeypatch.setattr("koordlet.process.writes_for_root", lambda: True)
    pods = tmp_path / "cgroup" / "cpu" / "kubepods"
    pods.mkdir(parents=True)
    mounts = tmp_path / "proc" / "1" / "mounts"
    mounts.parent.mkdir(parents=True)
    mounts.write_text("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "journal").touch(mode=0o600)
    path = config(
        tmp_path,
        cgroupRoot=str(tmp_path / "cgroup"),
        procRoot=str(tmp_path / "proc"),
        objectsDir=str(tmp_path / "objects.d"),
        nri="{enabled: false}",
        http='{address: ""}',
    )
    other = lock_directory(str(pods))
    try:
        assert main([command, "--config", path]) == 1
        assert f"process {os.getpid()} holds {pods}" in caplog.text + capsys.readouterr().err
    finally:
        os.close(other)


def machine(tmp_path: Path) -> str:
    """Make an empty machine of files; returns a configuration for it."""
    (tmp_path / "cgroup" / "cpu" / "kubepods").mkdir(parents=True)
    boot = tmp_path / "proc" / "sys" / "kernel" / "random" / "boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b1\n")
    mounts = tmp_path / "proc" / "1" / "mounts"
    mounts.parent.mkdir(parents=True)
    mounts.write_text("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n")
    (tmp_path / "run").mkdir(mode=0o700)
    cgroups, proc = str(tmp_path / "cgroup"), str(tmp_path / "proc")
    return config(tmp_path, cgroupRoot=cgroups, procRoot=proc)


@pytest.mark.parametrize(
    ("journal", "says"),
    [
        (None, "it is not there."),
        (b"", "its first line is not that of a journal of this version."),
        (
            b"other\n",
            "its first line is not that of a journal of this version; the file is kept as",
        ),
        (
            encode_line(b"koordlet journal 2, boot b1") + b"garbage\n",
            "1 lines cannot be read; the file is kept as",
        ),
    ],
)
def test_restore_says_what_it_cannot_know_without_the_whole_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], journal: bytes | None, says: str
) -> None:
    path = machine(tmp_path)
    (tmp_path / "run" / "koordlet.lock").touch()
    if journal is not None:
        (tmp_path / "run" / "journal").write_bytes(journal)
    assert main(["restore", "--config", path]) == 1
    error = capsys.readouterr().err
    assert f"journal: {says}" in error
    assert "A pod that is created again, or a reboot, brings kubelet's values back" in error


def test_restore_puts_nothing_back_from_a_journal_that_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = machine(tmp_path)
    (tmp_path / "run" / "journal").mkdir()
    assert main(["restore", "--config", path]) == 1
    assert "not a regular file" in capsys.readouterr().err


def _table() -> Present | None:
    """Return what our table of nftables holds, None without one."""
    packets = PacketClasses()
    try:
        return packets.read()
    finally:
        packets.close()


@pytest.mark.root
def test_restore_takes_the_traffic_classes_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_shaping()
    path = machine(tmp_path)
    (tmp_path / "run" / "koordlet.lock").touch()
    node = HtbClass(1, 0, 1000, 1000, 10, 10)
    with device() as (namespace, index):
        before = namespace.tc("qdisc show dev eth0")
        network = Network(str(tmp_path / "run" / NETWORK_QOS))
        members: dict[Member, int] = {"10.0.0.1": 1}
        namespace.run(network.apply, index, classes=[node], default=1, members=members)
        network.close()
        assert "htb 4b4f:" in namespace.tc("qdisc show dev eth0")
        assert namespace.run(_table) is not None
        namespace.run(main, ["restore", "--config", path])
        assert namespace.tc("qdisc show dev eth0") == before
        assert namespace.run(_table) is None
        assert "traffic classes of network QoS are removed" in capsys.readouterr().out
        namespace.run(main, ["restore", "--config", path])
        assert "traffic classes" not in capsys.readouterr().out


def test_restore_that_cannot_take_the_traffic_classes_away_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(self: Network) -> bool:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Network, "remove", refused)
    path = machine(tmp_path)
    (tmp_path / "run" / "koordlet.lock").touch()
    (tmp_path / "run" / NETWORK_QOS).touch()
    assert main(["restore", "--config", path]) == 1
    shown = capsys.readouterr()
    assert "the traffic classes of network QoS stay" in shown.err
    assert "values restored" in shown.out, "what else was changed is restored all the same"


def test_restore_where_no_daemon_has_run_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restore", "--config", config(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"nothing to restore: {tmp_path}/run has no file of a daemon. If one ")
    assert "what it changed is not known" in said


def test_restore_does_not_take_a_journal_that_it_may_not_see_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "stat", refused)
    assert main(["restore", "--config", config(tmp_path)]) == 1
    assert "run it as root" in capsys.readouterr().err


@pytest.mark.parametrize(("effective", "may"), [("0000000000000000", False), ("2", True)])
def test_a_daemon_that_could_write_nothing_does_not_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    effective: str,
    may: bool,
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tkoordlet\nCapEff:\t{effective}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert writes_for_root(str(status)) is may


def test_the_run_directory_is_made_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    prepare_run_dir(str(path))
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_run_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(OSError, match="writable by others"):
        prepare_run_dir(str(path))


_STUCK = """
import threading
from koordlet import process
process._LEAVE_S = 0.1
threading.Thread(target=threading.Event().wait).start()
process._leave_soon(3)
"""


def test_a_thread_that_waits_for_ever_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "a thread did not end in time" in done.stderr
