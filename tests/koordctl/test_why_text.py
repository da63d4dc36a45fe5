"""What `koordctl why` prints of texts that others wrote, without a cluster."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from koordctl import why
from koordctl.main import main
from koordctl.why import score_lines, text
from kube.client import ApiError
from tests.answering import answering
from tests.kube.scripted import api, status

_ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "member",
    ["pod", "state", "node", "schedulerName", "source", "withoutScheduler", "leader", "message"],
)
def test_escape_sequences_of_others_do_not_reach_the_terminal(member: str) -> None:
    found: dict[str, Any] = {
        "pod": "default/web",
        "state": "unschedulable",
        "node": "n1",
        "schedulerName": "koord-scheduler",
        "source": "the pod's condition PodScheduled",
        "withoutScheduler": "no scheduler answers",
        "leader": "koord-scheduler-abc",
        "message": "0/2 nodes are available",
    }
    plain = text(found)
    assert found[member] in plain
    shown = text(found | {member: found[member] + _ESCAPE})
    assert found[member] in shown
    assert "\\x1b]0;owned\\x07" in shown
    assert "\x1b]" not in shown


def test_the_scores_of_many_plugins_stay_in_columns() -> None:
    plugins = [f"PluginOfAVeryLongName{number}" for number in range(9)]
    scores = {
        "nodes": 3,
        "feasible": 2,
        "best": [
            {"node": node, "total": 9, "scores": dict.fromkeys(plugins, 1)}
            for node in ("n1", "a-longer-name")
        ],
    }
    header, *rows = score_lines(scores)[1].splitlines()
    assert len(rows) == 2
    for row in rows:
        assert [at for at, one in enumerate(row) if one == "1" and row[at - 1] == " "] == [
            header.index(name) for name in plugins
        ]


def test_nearest_nodes_stand_in_a_table() -> None:
    found: dict[str, Any] = {
        "pod": "default/web",
        "state": "unschedulable",
        "node": "",
        "schedulerName": "koord-scheduler",
        "source": "koord-scheduler",
        "nearest": [{"nodes": 2, "text": "2 of 3 nodes lack only cpu", "examples": ["n1", "n2"]}],
    }
    header, row = text(found).splitlines()[-2:]
    assert header.split("  ") == ["NODES", "WHAT WOULD HAVE TO CHANGE", " SUCH AS"]
    assert row.startswith("2 ") and "  2 of 3 nodes lack only cpu  " in row
    assert row.index("n1 n2") == header.index("SUCH AS")


@pytest.mark.parametrize("code", [403, 404, 500])
def test_an_explanation_that_may_not_be_read_is_left_out_and_other_errors_are_said(
    code: int,
) -> None:
    async def refusing(_: web.Request) -> web.StreamResponse:
        return status(code, "Reason", "the text")

    async def run() -> Any:
        async with api(refusing) as client:
            return await why._explanation_of(client, "default", "web")

    if code == 500:
        with pytest.raises(ApiError, match="the text"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) is None


def test_a_pod_that_the_scheduler_does_not_know_is_said_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    body = json.dumps({"message": "pod 'default/nope' is not known"}).encode()
    with answering(404, body) as (port, _, _):
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(why, "DEFAULT_SCHEDULER", url)
        status = main(["why", "nope", "--kubeconfig", str(tmp_path / "none")])
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith(f"koordctl: {url}: pod 'default/nope' is not known; the API server: ")


def test_nor_do_those_of_a_scheduler_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"message": f"not known {_ESCAPE}"}).encode()
    with answering(404, body) as (port, _, _):
        status = main(["why", "a", "--scheduler", f"http://127.0.0.1:{port}"])
    error = capsys.readouterr().err
    assert (status, "not known \\x1b]0;owned\\x07" in error) == (2, True)
    assert "\x1b" not in error
