"""The operator's command line: against a daemon in memory, and without one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from koordctl.main import main
from koordctl.render import explanation, with_unit
from koordlet.configuration.config import Config
from tests.koordctl.asked import POD_UID, Ask, answering, with_daemon
from tests.koordlet.daemon.bed import SLO, Node, node_object, until

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_a_pod_is_explained_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "pod", "default/pod-aaaa") == 0
        shown = capsys.readouterr().out
        assert "cpu.cfs_quota_us" in shown
        assert "applied" in shown
        assert "from Node annotation node.koordinator.sh/cpu-normalization-ratio" in shown
        assert "original 100000" in shown
        assert "written: 100000 -> 80000" in shown

    with_daemon(test)


def test_why_a_value_is_degraded_stands_there_once() -> None:
    short = "kept at the quota of 80000 µs"
    value: dict[str, Any] = {
        "resource": "cpu.cfs_burst_us",
        "key": "",
        "requested": None,
        "value": "800000",
        "observed": "80000",
        "state": "degraded",
        "why": "CPUBurst: 1000 % of the limit",
        "winner": {"source": "NodeSLO", "degraded": short},
        "modifiers": [],
        "losers": [],
        "detail": short,
        "original": "0",
    }
    subject = {"level": "pod", "name": "Pod default/web", "cgroup": "", "faults": []}
    shown = explanation({"subjects": [subject | {"values": [value]}]})
    assert shown.count(short) == 1
    value["detail"] = "the kernel keeps 80000"
    shown = explanation({"subjects": [subject | {"values": [value]}]})
    assert short in shown and "degraded: the kernel keeps 80000" in shown


@pytest.mark.parametrize(
    ("resource", "value", "shown"),
    [
        ("memory.limit_in_bytes", "134217728", "134217728 (128 MiB)"),
        ("memory.limit_in_bytes", "1610612736", "1610612736 (1.5 GiB)"),
        ("memory.limit_in_bytes", "4096", "4096"),
        ("memory.limit_in_bytes", "unlimited", "unlimited"),
        ("memory.limit_in_bytes", None, None),
        ("cpu.shares", "1048576", "1048576"),
    ],
)
def test_bytes_have_a_unit_that_a_person_reads(
    resource: str, value: str | None, shown: str | None
) -> None:
    assert with_unit(resource, value) == shown


@pytest.mark.parametrize("name", ["default/pod-aaaa/main", "c1c1c1c1", "containerd://c1c1c1c1c1"])
def test_a_container_is_found_by_name_and_by_id(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "container", name, "-o", "json") == 0
        (subject,) = json.loads(capsys.readouterr().out)["subjects"]
        quota = next(v for v in subject["values"] if v["resource"] == "cpu.cfs_quota_us")
        assert (quota["requested"], quota["value"]) == ("100000", "80000")

    with_daemon(test)


@pytest.mark.parametrize("name", ["default/pod-aaaa", "pod-aaaa", POD_UID, POD_UID[:8]])
def test_a_pod_is_found_by_name_and_by_uid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        assert await ask("explain", "pod", name, "-o", "json") == 0
        levels = [each["level"] for each in json.loads(capsys.readouterr().out)["subjects"]]
        assert levels == ["pod", "sandbox", "container"]

    with_daemon(test)


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(n: Node, ask: Ask) -> None:
        for kind, name, words in (
            ("pod", "nope", "known pods: default/pod-aaaa"),
            ("pod", "default/pod-aa", "known pods: default/pod-aaaa"),
            ("container", "nope", "known containers: default/pod-aaaa/main;"),
            ("container", "c1c1", "an id's first 8 characters"),
            ("subject", "nope", "known subjects: container/c1c1c1c1c1, kubeqos/BestEffort,"),
        ):
            assert await ask("explain", kind, name) == 2
            assert words in capsys.readouterr().err

    with_daemon(test)


def documented(command: str) -> set[str]:
    """Return the fields that the documentation promises: `a`, `a.b`, `a[].b`."""
    section = OPERATIONS.read_text().split("## JSON")[1].split("\n## ")[0]
    (paragraph,) = (text for text in section.split("\n\n") if f"`{command}`:" in text)
    text = paragraph.split(f"`{command}`:")[1].split("; `file` is")[0].split(". `")[0]
    fields: set[str] = set()
    for quoted in re.findall(r"`([^`]+)`", text):
        head, brace, names = quoted.partition("{")
        inner = [name for name in names.rstrip("}").split(",") if name != "..."]
        fields |= {head + name for name in inner} if brace else {quoted}
    return fields


def fields(tree: Any, path: str = "") -> set[str]:
    """Return the paths of all fields of an answer."""
    found = {path.removeprefix("."), f"{path}[]".removeprefix(".")}
    if isinstance(tree, dict):
        found |= {field for key, value in tree.items() for field in fields(value, f"{path}.{key}")}
    if isinstance(tree, list):
        found |= {field for value in tree for field in fields(value, f"{path}[]")}
    return found


@pytest.mark.parametrize("command", ["status", "plan", "events"])
def test_the_documented_fields_of_an_answer_are_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    be = {"cpuQOS": {"enable": True, "groupIdentity": -1}}
    slo = {**SLO, "spec": {"resourceQOSStrategy": {"beClass": be}}}
    (tmp_path / "new.yaml").write_text(yaml.safe_dump_all([node_object("2.0"), slo, {}]))
    asked = [command, "-o", "json"] + (["--objects", str(tmp_path)] if command == "plan" else [])

    async def test(n: Node, ask: Ask) -> None:
        n.put_text("bad.yaml", "kind: Bad")
        await until("the bad file", lambda: n.daemon.parts.feeds.objects.problems)
        await ask(*asked)
        answer = json.loads(capsys.readouterr().out)
        promised = documented(command)
        assert len(promised) >= 7
        # Nothing is amiss with this node's containers, sources and values.
        empty = {"unprotected", "sources", "reconciler.troubled"}
        unseen = {field for field in promised if "[]." in field and field.split("[].")[0] in empty}
        assert promised - unseen - fields(answer) == set()

    with_daemon(test)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status"], "start koordlet"),
        (["explain", "pod", "x"], "no daemon"),
        (["plan", "--objects", "/does/not/exist"], "cannot read the objects"),
        (["plan", "--objects", "."], "no manifests"),
        (["restore", "--config", "/does/not/exist"], "/does/not/exist: no such file"),
    ],
)
def test_without_a_daemon_a_command_says_what_to_do(
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--run-dir", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "does not understand the daemon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "does not understand the daemon"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\na\nb", "a\\nb"),
        (b"hello\r\n", "is koordlet running?"),
        (b"", "is koordlet running?"),
    ],
)
def test_an_answer_that_is_not_a_daemons_is_one_line(
    tmp_path: Path, answer: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon of another version, in the middle of an upgrade, or no koordlet at all."""
    with answering(tmp_path, answer):
        assert main(["--run-dir", str(tmp_path), "status"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_every_mistake_of_the_configuration_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("{runDir: here, foo: 1, objectsDir: there}")
    assert main(["restore", "--config", str(tmp_path / "c.yaml")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "foo = '1': unknown field" in told[0]


@pytest.mark.parametrize("named", [True, False])
def test_without_a_daemon_the_run_directory_is_the_named_one_else_that_of_the_configuration(
    tmp_path: Path,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("KOORDLET_RUN_DIR", raising=False)
    (tmp_path / "c.yaml").write_text(f"{{runDir: {tmp_path}/file}}")
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(SLO))
    config = ["--config", str(tmp_path / "c.yaml")]
    config += ["--run-dir", str(tmp_path / "named")] if named else []
    meant = "named" if named else "file"
    assert main(["restore", *config]) == 0
    assert f"{tmp_path}/{meant} has no file of a daemon" in capsys.readouterr().out
    planned: list[str] = []

    def plan_offline(config: Config, *_: object, **__: object) -> dict[str, object]:
        planned.append(config.run_dir)
        return {"problems": [], "policies": [], "writes": [], "pods": 1}

    monkeypatch.setattr("koordctl.offline.layout_of", lambda *_: None)
    monkeypatch.setattr("koordctl.offline.plan_offline", plan_offline)
    assert main(["plan", "--offline", "--objects", str(tmp_path / "slo.yaml"), *config]) == 0
    assert planned == [f"{tmp_path}/{meant}"]


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_run_directory_and_the_form_are_named_before_or_after_the_command(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--run-dir", str(tmp_path / "that"), "-o", "json"]
    assert main([*options, "status"] if place == "before" else ["status", *options]) == 2
    assert f"{tmp_path}/that/admin.sock does not exist" in capsys.readouterr().err


def test_a_wrong_command_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "cow", "x"])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
