"""What doctor says of kubelet, the runtime and rival agents: real processes under their names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from koordctl.client import Client
from koordctl.finding import Finding, Patient
from koordctl.neighbours import NEIGHBOURS, NRI_TABLE
from koordctl.processes import Process, program, running
from koordlet.configuration.config import Config, Cri, Nri
from linux.local import LocalHost

_SLEEP = "print(flush=True); import time; time.sleep(60)"


@contextmanager
def processes(*commands: tuple[str, ...]) -> Iterator[tuple[Process, ...]]:
    """Processes that call themselves so, as doctor finds them; others on this machine left out."""
    with ExitStack() as stack:
        pids = set()
        for name, *arguments in commands:
            started = stack.enter_context(
                subprocess.Popen(
                    [name, "-c", _SLEEP, *arguments],
                    executable=sys.executable,
                    stdout=subprocess.PIPE,
                )
            )
            stack.callback(started.kill)
            assert started.stdout is not None
            started.stdout.readline()
            pids.add(started.pid)
        yield tuple(each for each in running("/proc") if each.pid in pids)


def findings(found: tuple[Process, ...], config: Config | None = None) -> list[Finding]:
    quiet = Config(
        node_name="n1", nri=Nri(enabled=True, socket="/nowhere/nri.sock"), cri=Cri(enabled=True)
    )
    patient = Patient(config or quiet, LocalHost({}), Client("/nowhere"), found)
    return [finding for check in NEIGHBOURS for finding in check(patient)]


def states(found: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in found}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/koordlet", "run"], "koordlet"),
        (["/usr/bin/python3.11", "/opt/koordinator/bin/koordlet", "run"], "koordlet"),
        (["python3", "-u", "-X", "dev", "/x/koordlet"], "koordlet"),
        (["python3", "-m", "koordlet.main", "run"], "koordlet.main"),
        (["python3", "-c", "pass", "koordlet"], "python3"),
        (["journalctl", "-u", "koordlet"], "journalctl"),
        ([], ""),
    ],
)
def test_a_program_is_known_by_its_own_name(command: list[str], name: str) -> None:
    assert program(command) == name


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("--config=/a",), "/a"),
        (("--config", "/a"), "/a"),
        (("-config", "/a", "--config=/b"), "/b"),
        (("--config",), ""),
        (("--configs=/a",), None),
    ],
)
def test_a_flag_is_read_as_go_programs_read_it(
    arguments: tuple[str, ...], value: str | None
) -> None:
    process = Process(1, "kubelet", ("kubelet", *arguments), 0, "/proc")
    assert process.flag("config") == value


@pytest.mark.root
def test_kubelets_file_is_read_where_its_flag_says_and_its_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "cgroupDriver": "systemd",
                "cpuManagerPolicy": "none",
                "featureGates": {"MemoryQoS": True},
                "containerRuntimeEndpoint": "unix:///run/crio/crio.sock",
            }
        )
    )
    flags = (f"--config={path}", "--cpu-manager-policy=static", "--hostname-override", "other")
    with processes(("kubelet", *flags)) as found:
        said = findings(found)
    assert states(said)["kubelet CPU manager"] == "info"
    assert states(said)["kubelet MemoryQoS"] == "warn"
    assert next(f for f in said if f.check == "kubelet").found.endswith("cgroup driver systemd")
    assert next(f for f in said if f.check == "CRI socket").fix.startswith(
        "cri.socket: /run/crio/crio.sock"
    )
    assert "kubelet's node is other, koordlet's is n1" in str(said)


@pytest.mark.root
def test_doctor_reports_a_proxy_that_kubelet_does_not_use(tmp_path: Path) -> None:
    past = ("kubelet", "--container-runtime-endpoint=unix:///run/containerd/containerd.sock")
    through = ("kubelet", "--container-runtime-endpoint=unix:///run/koord-runtimeproxy/"
               "runtimeproxy.sock")  # fmt: skip
    with processes(past, ("koord-runtime-proxy",)) as found:
        told = [f for f in findings(found) if f.state == "warn"]
    assert ["past koord-runtime-proxy at /run/koord-runtimeproxy" in f.found for f in told] == [
        True
    ]
    with processes(through, ("koord-runtime-proxy",)) as found:
        assert "warn" not in states(findings(found)).values()


@pytest.mark.root
@pytest.mark.parametrize("state", ["off", "switched off by an import", "on"])
def test_containerds_file_is_read_where_its_flag_says(tmp_path: Path, state: str) -> None:
    path = tmp_path / "containerd.toml"
    imports = 'imports = ["conf.d/*.toml"]\n' if "import" in state else ""
    disabled = "true" if state == "off" else "false"
    path.write_text(f'version = 3\n{imports}[plugins."{NRI_TABLE}"]\ndisable = {disabled}\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "nri.toml").write_text(f'[plugins."{NRI_TABLE}"]\ndisable = true\n')
    with processes(("containerd", "--config", str(path))) as found:
        said = findings(found)
    assert states(said).get("containerd") == (None if state == "on" else "fail")


@pytest.mark.root
def test_doctor_reports_a_containerd_file_without_a_version(tmp_path: Path) -> None:
    """Tried with containerd 1.7.24: without the line NRI stays off, and nothing is said."""
    path = tmp_path / "containerd.toml"
    table = f'[plugins."{NRI_TABLE}"]\ndisable = false\n'
    for text, state in ((table, "warn"), (f"version = 2\n{table}", None)):
        path.write_text(text)
        with processes(("containerd", "--config", str(path))) as found:
            said = findings(found)
        assert states(said).get("containerd") == state


@pytest.mark.root
def test_dockers_own_containerd_needs_no_nri(tmp_path: Path) -> None:
    path = tmp_path / "containerd.toml"
    path.write_text('disabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
    with processes(("containerd", "--config", str(path))) as found:
        assert "containerd" not in states(findings(found))


@pytest.mark.root
def test_a_container_that_calls_itself_kubelet_makes_root_read_nothing(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2: [")
    new_mount_namespace = 0x20000  # CLONE_NEWNS
    script = f"import ctypes; ctypes.CDLL(None).unshare({new_mount_namespace}); {_SLEEP}"
    command = ["kubelet", "-c", script, f"--config={secret}"]
    with subprocess.Popen(command, executable=sys.executable, stdout=subprocess.PIPE) as started:
        try:
            assert started.stdout is not None
            started.stdout.readline()
            found = tuple(each for each in running("/proc") if each.pid == started.pid)
            said = findings(found)
        finally:
            started.kill()
    (kubelet,) = (finding for finding in said if finding.check == "kubelet")
    assert "mount namespace of its own" in kubelet.found
    assert "hunter2" not in str(said)


def test_a_users_process_makes_root_read_nothing() -> None:
    someone = Process(os.getpid(), "kubelet", ("kubelet", "--config=/etc/shadow"), 1000, "/proc")
    (kubelet,) = (finding for finding in findings((someone,)) if finding.check == "kubelet")
    assert "is not root's" in kubelet.found


def test_other_daemons_are_named() -> None:
    commands = (
        ("koordlet",),
        ("koordlet",),
        ("katalyst-agent",),
        ("nri-resource-policy-balloons",),
    )
    with processes(*commands) as found:
        said = findings(found)
    assert states(said)["duplicates"] == "fail"
    assert [f.check for f in said].count("other agents") == 2


def test_without_nri_containerd_is_not_examined() -> None:
    process = Process(1, "containerd", ("containerd",), 0, "/proc")
    config = msgspec.structs.replace(Config(node_name="n1"), nri=Nri(enabled=False))
    assert "containerd" not in states(findings((process,), config))


def test_rival_agents_are_named_with_what_they_set() -> None:
    rival = Process(41, "nri-resource-policy-balloons", ("nri-resource-policy-balloons",), 0, "/p")
    other = Process(42, "kube-proxy", ("kube-proxy",), 0, "/p")
    (found,) = [each for each in findings((rival, other)) if each.check == "other agents"]
    assert (found.state, found.found) == (
        "warn",
        "process 41 nri-resource-policy-balloons sets CPU sets and shares of containers, over NRI"
        " too",
    )
    assert "featureGates" in found.fix


def test_a_machine_without_kubelet_is_no_mistake() -> None:
    (found,) = [each for each in findings(()) if each.check == "kubelet"]
    assert (found.state, found.fix) == ("info", "")
