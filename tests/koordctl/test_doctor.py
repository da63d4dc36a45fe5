"""koordctl doctor: what it finds about machine, daemon and objects."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

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
