"""What `koordctl why` prints of texts that others wrote, without a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from koordctl.main import main
from koordctl.why import text
from tests.answering import answering

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


def test_nor_do_those_of_a_scheduler_without_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    body = json.dumps({"message": f"not known {_ESCAPE}"}).encode()
    with answering(404, body) as (port, _, _):
        status = main(["why", "a", "--scheduler", f"http://127.0.0.1:{port}"])
    error = capsys.readouterr().err
    assert (status, "not known \\x1b]0;owned\\x07" in error) == (2, True)
    assert "\x1b" not in error
