"""koordctl doctor: what it finds about machine, daemon and objects."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from koordctl import render
from koordctl.client import Client
from koordctl.doctor import examine
from koordctl.main import main
from koordctl.offline import config_in_force
from koordlet.configuration.config_file import as_tree
from tests.answering import answering as kubelet_answering
from tests.koordctl.asked import Ask, answering, with_daemon
from tests.koordlet.daemon.bed import Node, node, until


def test_doctor_uses_the_running_daemons_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sockets and directories are in no file at the default place."""

    async def test(n: Node, ask: Ask) -> None:
        await ask("doctor", "-o", "json")
        findings = json.loads(capsys.readouterr().out)
        assert config_in_force(as_tree(n.daemon.parts.config)) == n.daemon.parts.config
        (socket,) = (each for each in findings if each["check"] == "NRI socket")
        assert n.daemon.parts.config.nri.socket in socket["found"]

    with_daemon(test)


def test_doctor_examines_machine_and_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        status = await ask("doctor", "-o", "json")
        findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        checks = {finding["check"]: finding for finding in findings}
        assert checks["daemon"]["state"] == "ok"
        assert "containerd" in checks["NRI"]["found"]
        assert status == int(any(finding["state"] == "fail" for finding in findings))
        assert checks["NRI socket"]["state"] == "ok"

    with_daemon(test)


def test_doctor_names_a_right_that_kubelet_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    refused = b"Forbidden (user=koordlet, verb=get, resource=nodes, subresource(s)=[pods proxy])"

    async def run() -> None:
        with kubelet_answering(403, refused) as (port, _, _):
            kubelet = {"enabled": True, "readOnly": True, "readOnlyPort": port}
            async with node(kubelet=kubelet) as n, n.running() as daemon:
                sources = daemon.parts.feeds
                await until(
                    "the refusal", lambda: [one for one in sources.statuses if one.failures]
                )
                asked = ["--run-dir", str(n.folder / "run"), "doctor", "-o", "json"]
                await asyncio.to_thread(main, asked)

    asyncio.run(asyncio.wait_for(run(), 30))
    findings = json.loads(capsys.readouterr().out)
    (found,) = [each for each in findings if each["check"] == "source kubelet"]
    assert found["state"] == "warn"
    assert "neither nodes/pods nor nodes/proxy" in found["found"]


def test_doctor_reports_objects_that_other_users_may_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = tmp_path / "objects.d"
    objects.mkdir(mode=0o755)
    (objects / "slo.yaml").write_text("")
    tree = {"nodeName": "n1", "kubepodsRoot": "koordctl-test-none", "objectsDir": str(objects)}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    asked = ["--run-dir", str(tmp_path), "doctor", "-o", "json", "--config", f"{tmp_path}/c.yaml"]
    for mode, states in ((0o644, ["ok"]), (0o666, ["ok", "warn"])):
        (objects / "slo.yaml").chmod(mode)
        main(asked)
        found = [f for f in json.loads(capsys.readouterr().out) if f["check"] == "objects"]
        assert [each["state"] for each in found] == states
    assert f"users other than root may write {objects}/slo.yaml" in found[-1]["found"]


def test_a_daemon_that_hangs_is_waited_for_once_and_to_be_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koordctl.client._TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "admin.sock"))
        listener.listen()
        findings = examine(config_path=None, run_dir=None, client=Client(str(tmp_path)))
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    (daemon,) = [each for each in findings if each["check"] == "daemon"]
    assert (daemon["state"], daemon["fix"]) == ("fail", "systemctl restart koordlet")


def test_doctor_goes_on_where_the_daemon_is_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{nodeName: n1, kubepodsRoot: koordctl-test-none}")
    config = ["--config", str(tmp_path / "c.yaml")]
    with answering(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"):
        main(["--run-dir", str(tmp_path), "doctor", "-o", "json", *config])
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert "cannot understand the daemon's answer" in findings["daemon"]["found"]
    assert "objects" in findings


def test_a_configuration_that_cannot_be_read_is_the_one_finding(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("{nodeNames: n1}")
    (found,) = examine(
        config_path=str(tmp_path / "c.yaml"), run_dir=None, client=Client(str(tmp_path))
    )
    assert (found["check"], found["state"]) == ("configuration", "fail")
    assert "nodeNames" in found["found"]
    assert found["fix"] == "koordlet check-config"


class Told(Client):
    """A daemon that answers with this status."""

    def __init__(self, **status: Any) -> None:
        self.status = {
            "pid": 7,
            "ready": True,
            "notReady": [],
            "unhealthy": "",
            "nri": {},
            "unprotected": [],
            "sources": [],
            "reports": {"objects": []},
            "objects": {"problems": []},
            **status,
        }

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        assert path == "/status"
        return self.status


def told(tmp_path: Path, **status: Any) -> list[tuple[str, str, str, str]]:
    """Return what is found about a daemon with this status: check, state, text, fix."""
    (tmp_path / "c.yaml").write_text("{nodeName: n1, kubepodsRoot: koordctl-test-none}")
    config = str(tmp_path / "c.yaml")
    findings = examine(config_path=config, run_dir=str(tmp_path), client=Told(**status))
    names = {"daemon", "NRI", "NRI time-out", "containers"}
    return [
        (each["check"], each["state"], each["found"], each["fix"])
        for each in findings
        if each["check"] in names or each["check"].startswith(("source ", "report "))
    ]


RUNTIME = {
    "name": "containerd",
    "version": "v1.7.2",
    "nri": "0.6",
    "nriReported": False,
    "requestTimeoutSeconds": 2.0,
    "registrationTimeoutSeconds": 5.0,
    "warnings": [],
}
NRI = (
    "NRI",
    "ok",
    "containerd v1.7.2, NRI 0.6 (inferred), time-outs: request 2 s, registration 5 s",
    "",
)


@pytest.mark.parametrize(
    ("status", "findings"),
    [
        ({}, [("daemon", "ok", "running as process 7 and ready", "")]),
        (
            {"ready": False, "notReady": ["no pods yet", "no NRI"]},
            [("daemon", "warn", "not ready: no pods yet; no NRI", "")],
        ),
        (
            {"unhealthy": "the reconciler hangs"},
            [("daemon", "fail", "the reconciler hangs", "systemctl restart koordlet")],
        ),
        ({"nri": {"runtime": RUNTIME}}, [NRI]),
        (
            {"nri": {"runtime": RUNTIME | {"warnings": ["values are lost"]}}},
            [NRI, ("NRI", "warn", "values are lost", "")],
        ),
        (
            {"unprotected": ["c1", "c2"]},
            [
                (
                    "containers",
                    "info",
                    "2 were not seen at creation; koordctl status names them",
                    "",
                )
            ],
        ),
        (
            {"sources": [{"name": "kubelet", "problem": "refused", "failures": 1}]},
            [("source kubelet", "warn", "refused", "")],
        ),
        ({"sources": [{"name": "kubelet", "problem": "not yet", "failures": 0}]}, []),
        (
            {"reports": {"objects": [{"kind": "NodeMetric", "problem": "refused"}]}},
            [("report NodeMetric", "warn", "refused", "")],
        ),
    ],
)
def test_what_a_daemon_says_of_itself_becomes_findings(
    status: dict[str, Any], findings: list[tuple[str, str, str, str]], tmp_path: Path
) -> None:
    found = told(tmp_path, **status)
    healthy = ("daemon", "ok", "running as process 7 and ready", "")
    assert [each for each in found if each != healthy] == [
        each for each in findings if each != healthy
    ]
    assert (healthy in found) == (not {"ready", "unhealthy"} & status.keys())


def test_findings_are_a_table_in_which_what_is_wrong_stands_out() -> None:
    findings = [
        {"check": state, "state": state, "found": "text", "fix": fix}
        for state, fix in (("ok", ""), ("info", ""), ("warn", "do this"), ("fail", "do that"))
    ]
    assert [line.split() for line in render.doctor(findings).splitlines()] == [
        ["CHECK", "FOUND"],
        ["ok", "ok", "text"],
        ["info", "info", "text"],
        ["WARN", "warn", "text.", "Fix:", "do", "this"],
        ["FAIL", "fail", "text.", "Fix:", "do", "that"],
    ]
