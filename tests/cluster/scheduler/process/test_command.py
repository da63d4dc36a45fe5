"""The command koord-scheduler: how it starts, and what it says when it cannot or when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import service.logs
import service.open_files
from apis.errors import InputError
from cluster.flags import FlagError
from cluster.scheduler import main as module
from cluster.scheduler.configuration.flags import help_text
from cluster.scheduler.main import main
from cluster.scheduler.process import RightsMissing
from kube.client import ApiError, Unreachable
from kube.leader import LeadershipLost
from tests.cluster.scheduler.configuration.files import file


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command sets up for its whole process must not outlive the test."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(service.logs, "set_up", lambda **form: given.append(form))
    monkeypatch.setattr(service.open_files, "raise_limit", lambda: None)
    return given


def test_each_mistake_of_a_file_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.json"
    filters = {"filter": {"enabled": [{"name": "LoadAware"}]}}
    tree = file(profiles=[{"plugins": filters}], parallelism=0, podMaxBackoffSeconds=-1)
    path.write_text(json.dumps(tree))
    assert main([f"--config={path}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(f"koord-scheduler: {path}: ") for line in lines)
    assert sum("did you mean LoadAwareScheduling" in line for line in lines) == 1


def test_a_kubeconfig_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kubeconfig"
    assert main([f"--kubeconfig={path}"]) == 2
    assert f"No such file or directory: '{path}'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "-help", "--help"])
def test_help_is_printed_whatever_else_is_given(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--no-such-flag", flag]) == 0
    assert capsys.readouterr().out == f"{help_text()}\n"


def test_an_unknown_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--no-such-flag=1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("koord-scheduler: ")
    assert "no-such-flag" in error


_KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: k, user: u}}]
clusters: [{name: k, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
"""


_MISTAKE = InputError(obj="f", field="", value=None, problem="it is odd")


class _Process:
    """In place of a SchedulerProcess: keeps what it is made of, and ends at once."""

    made: dict[str, Any]
    ends_with: Exception | None
    garbage_is_collected: bool

    def __init__(self, client: Any, configuration: Any, **given: Any) -> None:
        type(self).made = {"client": client, "configuration": configuration, **given}
        self.plugins: Any = type("Plugins", (), {"profiles": {"koord-scheduler": None}})

    async def run(self, stop: asyncio.Event) -> None:
        names = {task.get_name() for task in asyncio.all_tasks()}
        type(self).garbage_is_collected = "garbage collection" in names
        assert not stop.is_set()
        if self.ends_with is not None:
            raise self.ends_with


class _Endpoints:
    addresses: tuple[str, ...] = ()

    def __init__(self, process: Any, settings: Any) -> None: ...
    async def start(self, stack: AsyncExitStack) -> None: ...


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Process]]:
    class Process(_Process):
        ends_with = None

    monkeypatch.setattr(module, "SchedulerProcess", Process)
    monkeypatch.setattr(module, "Endpoints", _Endpoints)
    yield Process


@pytest.fixture
def kubeconfig(tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    path.write_text(_KUBECONFIG)
    return f"--kubeconfig={path}"


@pytest.mark.parametrize(
    ("ends_with", "status", "printed"),
    [
        (None, 0, ""),
        (LeadershipLost("the lease is another's"), 1, ""),
        (RightsMissing("nodes are forbidden"), 1, ""),
        (FlagError("the port is taken"), 2, "koord-scheduler: the port is taken\n"),
        (_MISTAKE, 2, "koord-scheduler: f: it is odd\n"),
        (ApiError(status=500, reason="", message="no", what="x"), 1, ""),
        (Unreachable("away"), 1, ""),
        (OSError("no port"), 1, ""),
    ],
)
def test_the_status_says_whether_another_start_may_help(
    ends_with: Exception | None,
    status: int,
    printed: str,
    process: type[_Process],
    kubeconfig: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process.ends_with = ends_with
    assert main([kubeconfig]) == status
    assert capsys.readouterr().err == printed


def test_what_is_given_reaches_the_process(
    process: type[_Process], kubeconfig: str, logs: list[dict[str, Any]]
) -> None:
    flags = ("--pod-max-in-unschedulable-pods-duration=7m", "--kube-api-qps=8", "--v=5")
    assert main([kubeconfig, *flags, "--enable-network-topology-manager=true"]) == 0
    made = process.made
    assert made["longest_unschedulable_s"] == 420.0
    assert made["network_status"] is True
    assert made["auditor"] is None
    assert made["controllers"] == {"Coscheduling", "ElasticQuota", "Reservation"}
    assert made["configuration"].client_connection.qps == 8
    assert process.garbage_is_collected
    assert main([kubeconfig, "--controller-plugins=ElasticQuota", "--v=4"]) == 0
    assert process.made["controllers"] == {"ElasticQuota"}
    assert process.made["network_status"] is False
    assert logs == [{"level": "debug", "form": "json"}, {"level": "info", "form": "json"}]
