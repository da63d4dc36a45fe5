"""The options of each command: their defaults, what they lead to, and the exit status."""

from __future__ import annotations

import argparse
import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apis.core import Node
from apis.decode import dec_hook
from apis.errors import InputError
from apis.explanation import (
    ANNOTATION_RESOURCE_EXPLANATION,
    Explanation,
    NodeExplanation,
    Term,
    explanation_text,
)
from koordctl import client as client_module
from koordctl import main as main_module
from koordctl.client import Client, Unreachable
from koordctl.help_texts import EPILOG
from koordctl.main import command_line, main, read_manifests
from koordctl.node import explain_node
from koordctl.top import screen
from koordlet import VERSION
from tests.koordctl.answers import EXPLAINED, PLANNED, STATUS
from tests.koordctl.asked import answering
from tests.koordctl.looks import look
from tests.koordctl.served import serving

_COMMON = {"run_dir": None, "output": "table"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KOORDLET_RUN_DIR", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("explain pod a/b", {"kind": "pod", "name": "a/b", "resource": None, "kubeconfig": None}),
        (
            "explain node n1 mid-cpu --kubeconfig k",
            {"kind": "node", "name": "n1", "resource": "mid-cpu", "kubeconfig": "k"},
        ),
        ("plan --objects d", {"objects": "d", "offline": False, "config": None}),
        (
            "plan --objects d --offline --config c",
            {"objects": "d", "offline": True, "config": "c"},
        ),
        ("status", {}),
        ("top", {"sort": "cpu", "interval": 2.0, "once": False}),
        (
            "top --sort name --interval 0.5 --once",
            {"sort": "name", "interval": 0.5, "once": True},
        ),
        ("report", {"file": None}),
        ("report --file f", {"file": "f"}),
        ("replay r", {"recording": "r", "nodeslo": None}),
        ("replay r --nodeslo s", {"recording": "r", "nodeslo": "s"}),
        ("events", {}),
        ("why a", {"pod": "a", "scheduler": None, "kubeconfig": None}),
        ("why a --scheduler u --kubeconfig k", {"pod": "a", "scheduler": "u", "kubeconfig": "k"}),
        (
            "simulate --cluster d",
            {
                "cluster": "d",
                "pods": None,
                "config": None,
                "feature_gates": "",
                "against": None,
                "capacity": False,
                "limit": 10_000,
                "scores": False,
                "scheduler_name": "",
                "seed": 0,
                "context": None,
            },
        ),
        (
            "simulate --cluster d --pods p --config c --feature-gates A=true --against b"
            " --capacity --limit 1 --scores --as koord --seed -4 --context x",
            {
                "cluster": "d",
                "pods": "p",
                "config": "c",
                "feature_gates": "A=true",
                "against": "b",
                "capacity": True,
                "limit": 1,
                "scores": True,
                "scheduler_name": "koord",
                "seed": -4,
                "context": "x",
            },
        ),
        ("doctor", {"config": None}),
        ("doctor --config c", {"config": "c"}),
        ("restore", {"config": None}),
        ("restore --config c", {"config": "c"}),
        ("-o json status", {"output": "json"}),
        ("--output json status --output table", {"output": "table"}),
        ("--run-dir /a status", {"run_dir": "/a"}),
        ("--run-dir /a status --run-dir /b/../c", {"run_dir": "/c"}),
    ],
)
def test_a_command_line_is_read_so(line: str, options: dict[str, Any]) -> None:
    found = vars(command_line().parse_args(line.split()))
    assert callable(found.pop("command"))
    assert found == _COMMON | options


@pytest.mark.parametrize(
    ("value", "run_dir"), [("", None), ("/run/other", "/run/other"), ("rel", "{cwd}/rel")]
)
def test_the_run_directory_of_the_environment_is_a_default(
    value: str, run_dir: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOORDLET_RUN_DIR", value)
    expected = run_dir and run_dir.format(cwd=os.getcwd())
    assert command_line().parse_args(["status"]).run_dir == expected
    assert command_line().parse_args(["status", "--run-dir", "/x"]).run_dir == "/x"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "explain",
        "explain pod",
        "explain cow x",
        "plan",
        "replay",
        "why",
        "simulate",
        "top --sort age",
        "top --interval 0.09",
        "top --interval 3601",
        "top --interval nan",
        "top --interval x",
        "simulate --cluster d --limit 0",
        "simulate --cluster d --limit x",
        "simulate --cluster d --seed x",
        "status -o yaml",
        "status extra",
    ],
)
def test_a_wrong_command_line_ends_with_2_and_the_usage(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err.startswith("usage: koordctl")


@pytest.mark.parametrize("interval", ["0.1", "3600"])
def test_the_shortest_and_the_longest_interval_are_taken(interval: str) -> None:
    assert command_line().parse_args(["top", "--interval", interval]).interval == float(interval)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"koordctl {VERSION}\n")


def test_the_help_names_each_command_and_keeps_the_lines_of_its_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "usage: koordctl " in shown and "commands:\n  COMMAND\n" in shown
    for name in ("explain", "plan", "status", "top", "report", "replay", "events", "why",
                 "simulate", "doctor", "restore"):  # fmt: skip
        assert f"\n    {name} " in shown
    assert EPILOG.strip() in shown
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    shown = capsys.readouterr().out
    assert "\nConnection, policies, values, and unprotected containers.\n" in shown
    assert "\nexamples:\n" in shown


class Daemon:
    """What a daemon is asked, and its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any]) -> None:
        self.asked: list[tuple[Any, ...]] = []

        def answer(path: str, *details: Any) -> Any:
            self.asked.append((path, *details))
            found = answers[path]
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(Client, "get", lambda _, *details: answer(*details))
        monkeypatch.setattr(Client, "post", lambda _, *details: answer(*details))


@pytest.mark.parametrize(
    ("kind", "name", "asked"),
    [
        ("pod", "a/b", "a/b"),
        ("container", "c1", "c1"),
        ("subject", "node", "node"),
        ("file", "/sys/../x", "/x"),
        ("file", "x", "{cwd}/x"),
    ],
)
def test_an_explanation_is_asked_for_by_kind_and_name(
    kind: str, name: str, asked: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    daemon = Daemon(monkeypatch, {"/explain": EXPLAINED})
    assert main(["explain", kind, name]) == 0
    name = asked.format(cwd=os.getcwd())
    assert daemon.asked == [("/explain", {"kind": kind, "name": name})]
    assert capsys.readouterr().out.startswith("pod  Pod default/web\n")


def test_json_is_the_answer_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"lastAt": 0.0, "count": 1, "kind": "k", "object": "o", "message": "m"}
    answers = {
        "/explain": EXPLAINED,
        "/status": STATUS,
        "/events": [event],
        "/top": look(),
    }
    Daemon(monkeypatch, answers)
    for command, path in (
        (["explain", "pod", "x"], "/explain"),
        (["status"], "/status"),
        (["events"], "/events"),
        (["top"], "/top"),
    ):
        assert main([*command, "-o", "json"]) == 0
        shown = capsys.readouterr().out
        assert json.loads(shown) == answers[path]
        assert shown == json.dumps(answers[path], indent=2) + "\n"
    assert main(["events"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["never", "1", "k", "o", "m"]


def test_an_answer_of_another_version_is_said_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Daemon(monkeypatch, {"/events": [{"lastAt": 0.0}]})
    assert main(["events"]) == 2
    assert capsys.readouterr().err == (
        f"koordctl: koordctl {VERSION} does not understand the daemon's answer (KeyError: 'count');"
        " use the koordctl of the daemon's version, or -o json\n"
    )


@pytest.mark.parametrize(
    ("terminal", "options", "live"),
    [(True, [], True), (True, ["--once"], False), (False, [], False), (False, ["--once"], False)],
)
def test_top_is_live_on_a_terminal_and_printed_once_elsewhere(
    terminal: bool,
    options: list[str],
    live: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    followed: list[tuple[str, float, Any]] = []

    def follow(ask: Callable[[], Any], *, sort: str, interval_s: float) -> None:
        followed.append((sort, interval_s, ask()))

    monkeypatch.setattr(main_module, "follow", follow)
    Daemon(monkeypatch, {"/top": look()})
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert main(["top", "--sort", "name", "--interval", "9", *options]) == 0
    shown = capsys.readouterr().out
    assert followed == ([("name", 9.0, look())] if live else [])
    if not live:
        order = [line.split()[0] for line in shown.split("STALLED\n")[1].splitlines()]
        assert order == ["batch/<script>alert(1)</script>", "default/db-0", "default/web-0"]


def test_a_report_before_the_first_measurement_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unmeasured = {"measured": False}
    Daemon(monkeypatch, {"/history": {}, "/top": unmeasured})
    assert main(["report"]) == 2
    assert capsys.readouterr() == ("", f"koordctl: {screen(unmeasured)}\n")


# --- plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("problems", "status"), [(["a.yaml"], 1), ([""], 0), ([], 0)])
def test_a_plan_with_a_bad_file_ends_with_1(
    problems: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.yaml").write_text("x")
    found = [{"file": file, "object": "o", "message": "m"} for file in problems]
    daemon = Daemon(monkeypatch, {"/plan": {**PLANNED, "pods": None, "problems": found}})
    assert main(["plan", "--objects", str(tmp_path)]) == status
    assert daemon.asked == [("/plan", {"files": {"a.yaml": "x"}})]
    assert "2 writes, in this order" in capsys.readouterr().out


def test_without_a_daemon_a_plan_can_be_made_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("x")
    Daemon(monkeypatch, {"/plan": Unreachable("gone")})
    assert main(["plan", "--objects", str(tmp_path)]) == 2
    said = "koordctl: gone; or plan without the daemon: --offline\n"
    assert capsys.readouterr().err == said


def test_manifests_are_the_files_of_a_directory_by_their_endings(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yml", "c.json", ".d.yaml", "e.txt", "yaml", "f.yaml.bak"):
        (tmp_path / name).write_text(f"of {name} é")
    found = read_manifests(str(tmp_path))
    assert list(found) == ["a.yml", "b.yaml", "c.json"]
    assert found["b.yaml"] == "of b.yaml é"
    assert read_manifests(f"{tmp_path}/e.txt") == {"e.txt": "of e.txt é"}


def test_a_manifest_of_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    assert read_manifests("a.txt") == {"a.txt": "x"}


def test_manifests_that_cannot_be_planned_with_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert main(["plan", "--objects", str(tmp_path)]) == 2
        return capsys.readouterr().err.removeprefix("koordctl: ")

    assert said() == f"no manifests (*.yaml, *.yml, *.json) in {tmp_path}\n"
    (tmp_path / "a.yaml").write_bytes(b"\xff")
    assert said().startswith(f"cannot read {tmp_path}/a.yaml: not UTF-8: ")
    (tmp_path / "a.yaml").unlink()
    os.mkfifo(tmp_path / "a.yaml")
    assert said() == f"{tmp_path}/a.yaml is not a regular file; remove it from the directory\n"
    (tmp_path / "a.yaml").unlink()
    (tmp_path / "a.yaml").symlink_to("nowhere")
    assert said().startswith("cannot read the objects: ")


def test_all_manifests_of_a_plan_share_one_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    most = 2 << 20
    monkeypatch.setattr(main_module, "_MOST_MANIFEST_BYTES", most)
    (tmp_path / "a.yaml").write_text("x" * 1000)
    (tmp_path / "b.yaml").write_text("y" * (most - 1000))
    assert sum(map(len, read_manifests(str(tmp_path)).values())) == most
    (tmp_path / "c.yaml").write_text("")
    assert len(read_manifests(str(tmp_path))) == 3
    (tmp_path / "c.yaml").write_text("z")
    assert main(["plan", "--objects", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"koordctl: {tmp_path}/c.yaml: the manifests of one plan are limited to 2 MiB\n"
    )


# --- the daemon's socket -------------------------------------------------------------------------


def _ask(run_dir: str, answer: bytes) -> Any:
    with answering(Path(run_dir), answer):
        return Client(f"{run_dir}/").get("/status")


def test_the_socket_lies_in_the_run_directory() -> None:
    assert Client("/run/x//").socket_path == "/run/x/admin.sock"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, '{"error": "no such pod"}', "no such pod"),
        (503, "{}", "{path}: HTTP 503"),
        (500, "[1]", "{path}: HTTP 500"),
        (200, " not JSON \x1b[2J\n", "not JSON \\x1b[2J"),
    ],
)
def test_a_refusal_of_the_daemon_is_shown(
    status: int, body: str, said: str, tmp_path: Path
) -> None:
    answer = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with pytest.raises(client_module.Refused) as refused:
        _ask(str(tmp_path), answer)
    assert str(refused.value) == said.format(path=f"{tmp_path}/admin.sock")


def test_an_answer_is_json(tmp_path: Path) -> None:
    assert _ask(str(tmp_path), b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n[1, 20]") == [1, 20]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "no"), "{path}: permission denied; run koordctl as root"),
        (
            FileNotFoundError(2, "no"),
            "no daemon: {path} does not exist; start koordlet, or name its directory with"
            " --run-dir",
        ),
        (OSError("it\x07 broke "), "{path}: it\\x07 broke; is koordlet running?"),
        (http.client.BadStatusLine("x\n"), "{path}: x; is koordlet running?"),
    ],
)
def test_why_no_daemon_answers_is_one_line(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(client_module._UnixConnection, "connect", fail)
    with pytest.raises(Unreachable) as unreachable:
        Client("/r").get("/status")
    assert str(unreachable.value) == said.format(path="/r/admin.sock")


def test_a_query_and_a_body_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []

    class Answer:
        status = 200

        def read(self) -> bytes:
            return b"{}"

    def request(_: Any, method: str, target: str, body: bytes | None = None) -> None:
        sent.append((method, target, body))

    monkeypatch.setattr(client_module._UnixConnection, "request", request)
    monkeypatch.setattr(client_module._UnixConnection, "getresponse", lambda _: Answer())
    daemon = Client("/r")
    daemon.get("/explain", {"kind": "pod", "name": "a/b c"})
    daemon.get("/status")
    daemon.post("/plan", {"a": "é"})
    assert sent == [
        ("GET", "/explain?kind=pod&name=a%2Fb+c", None),
        ("GET", "/status", None),
        ("POST", "/plan", '{"a": "é"}'.encode()),
    ]


# --- explain node --------------------------------------------------------------------------------


def _node(**resources: int) -> dict[str, Any]:
    found = {
        f"kubernetes.io/{name.replace('_', '-')}": Explanation(
            "a - b", value, (Term("a", value + 1), Term("b", 1))
        )
        for name, value in resources.items()
    }
    text = explanation_text(NodeExplanation(found))
    return {
        "metadata": {"name": "n1", "annotations": {ANNOTATION_RESOURCE_EXPLANATION: text}},
        "status": {"allocatable": {"kubernetes.io/batch-cpu": "8k"}},
    }


def test_a_node_of_the_api_server_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"/api/v1/nodes/n1": _node(batch_memory=7, batch_cpu=5)}
    with serving(answers) as server:
        config = ["--kubeconfig", server.kubeconfig(tmp_path)]
        assert main(["explain", "node", "n1", *config]) == 0
        shown = capsys.readouterr().out
        assert main(["explain", "node", "n1", "batch-cpu", "-o", "json", *config]) == 0
        plain = json.loads(capsys.readouterr().out)
        monkeypatch.setenv("KUBECONFIG", config[1])
        assert main(["explain", "node", "n2"]) == 2
        assert "said 404" in capsys.readouterr().err
    assert server.agents == {"koordctl"}
    assert list(plain) == ["kubernetes.io/batch-cpu"]
    assert plain["kubernetes.io/batch-cpu"]["result"] == 5
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert [line for line in lines if line.startswith(("kubernetes", "offered"))] == [
        "kubernetes.io/batch-cpu = a - b",
        "offered now: 8k",
        "kubernetes.io/batch-memory = a - b",
        "offered now: nothing",
    ]


@pytest.mark.parametrize(
    ("annotated", "resource", "said"),
    [
        (
            False,
            None,
            (
                "(absent)",
                "koord-manager has not calculated resources for this node",
                "check that koord-manager runs, and that it is this project's",
            ),
        ),
        (
            True,
            "mid-cpu",
            (
                "kubernetes.io/mid-cpu",
                "koord-manager does not explain this resource",
                "it explains kubernetes.io/batch-cpu, kubernetes.io/batch-memory",
            ),
        ),
    ],
)
def test_a_node_without_an_explanation_says_what_to_look_at(
    annotated: bool, resource: str | None, said: tuple[str, str, str]
) -> None:
    tree = _node(batch_memory=7, batch_cpu=5) if annotated else {"metadata": {"name": "n1"}}
    node: Node = msgspec.convert(tree, Node, dec_hook=dec_hook)
    with pytest.raises(InputError) as refused:
        explain_node(node, resource)
    error = refused.value
    assert (error.obj, error.field) == (
        "Node n1",
        'metadata.annotations["node.koordinator.sh/resource-explanation"]',
    )
    assert (error.value, error.problem, error.hint) == said


@pytest.mark.parametrize(
    ("short", "resource"),
    [
        ("batch-cpu", "kubernetes.io/batch-cpu"),
        ("batch-memory", "kubernetes.io/batch-memory"),
        ("mid-cpu", "kubernetes.io/mid-cpu"),
        ("mid-memory", "kubernetes.io/mid-memory"),
        ("kubernetes.io/mid-cpu", "kubernetes.io/mid-cpu"),
    ],
)
def test_a_resource_has_a_short_name(short: str, resource: str) -> None:
    tree = _node(batch_cpu=1, batch_memory=2, mid_cpu=3, mid_memory=4)
    node: Node = msgspec.convert(tree, Node, dec_hook=dec_hook)
    assert list(explain_node(node, short)[0]) == [resource]


def test_the_commands_are_those_of_the_help() -> None:
    (commands,) = (
        each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction)
    )
    assert set(commands.choices) == {
        "explain", "plan", "status", "top", "report", "replay", "events", "why", "simulate",
        "doctor", "restore",
    }  # fmt: skip
