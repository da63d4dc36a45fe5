"""`koordctl why` without a scheduler: what the pod, the lease and explanations say; its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from koordctl import why as why_module
from koordctl.main import main
from koordctl.why import score_lines, text
from tests.koordctl.served import serving

_POD = "/api/v1/namespaces/shop/pods/web"
_LEASE = "/apis/coordination.k8s.io/v1/namespaces/koordinator-system/leases/koord-scheduler"
_EXPLANATIONS = "/apis/scheduling.koordinator.sh/v1alpha1/namespaces/shop/scheduleexplanations"
_NOWHERE = "http://127.0.0.1:1"


def _pod(node: str = "", **condition: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "False", "message": "not yet"}]
    if condition:
        conditions.append({"type": "PodScheduled", **condition})
    return {
        "metadata": {"name": "web", "namespace": "shop", "uid": "u-1"},
        "spec": {"nodeName": node, "schedulerName": "mine", "containers": [{"name": "c"}]},
        "status": {"conditions": conditions},
    }


def _explanation(name: str, of: str, plugin: str = "NodeResourcesFit") -> dict[str, Any]:
    failed = {"failedPlugin": plugin, "reason": "Insufficient cpu", "failedNodes": ["n1", "n2"]}
    domain = {"scheduleExplanation": {"nodeFailedDetails": [failed]}}
    return {
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"questionObjectKey": of},
        "status": {"failedMessage": "said", "detailedExplanation": [domain]},
    }


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why_module, "DEFAULT_SCHEDULER", _NOWHERE)
    monkeypatch.delenv("KUBECONFIG", raising=False)


def _asked(
    answers: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    with serving(answers) as server:
        config = server.kubeconfig(folder)
        status = main(["why", "shop/web", "--kubeconfig", config, *arguments])
    captured = capsys.readouterr()
    assert server.agents == {"koordctl"}
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("pod", "state", "further"),
    [
        (_pod(), "unknown", {}),
        (_pod("n3"), "bound", {}),
        (_pod("n3", status="True", reason="", message="done"), "bound", {}),
        (
            _pod("", status="False", reason="Unschedulable", message="no node"),
            "unschedulable",
            {"message": "no node"},
        ),
        (
            _pod("", status="False", reason="SchedulingGated", message="gated"),
            "gated",
            {"message": "gated"},
        ),
        (
            _pod("", status="False", reason="", lastTransitionTime="2001-09-09T01:46:40Z"),
            "unschedulable",
            {"message": "", "decidedAt": "2001-09-09T01:46:40Z"},
        ),
    ],
)
def test_the_condition_of_a_pod_says_its_state(
    pod: dict[str, Any],
    state: str,
    further: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = _asked({_POD: pod}, tmp_path, capsys, "-o", "json")
    assert status == 0
    found = json.loads(out)
    without = found.pop("withoutScheduler")
    assert without.startswith(f"{_NOWHERE}: no scheduler answers: ")
    assert found == {
        "pod": "shop/web",
        "uid": "u-1",
        "schedulerName": "mine",
        "state": state,
        "node": pod["spec"]["nodeName"],
        "source": "the pod's condition PodScheduled",
        **further,
    }


def test_the_leader_and_the_explanation_of_this_pod_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [
        _explanation("other", "shop/web-2"),
        _explanation("mine", "shop/web", "Mine"),
        _explanation("later", "shop/web"),
    ]
    answers = {
        _POD: _pod(),
        _LEASE: {"spec": {"holderIdentity": "koord-scheduler_7f_0f1e"}},
        _EXPLANATIONS: {"items": items},
    }
    _, out, _ = _asked(answers, tmp_path, capsys, "-o", "json")
    found = json.loads(out)
    assert found["leader"] == "koord-scheduler_7f"
    assert found["source"] == "the pod's condition PodScheduled, and ScheduleExplanation mine"
    assert found["explanation"]["failedMessage"] == "said"
    _, out, _ = _asked(answers, tmp_path, capsys)
    assert "  kubectl -n koordinator-system port-forward koord-scheduler_7f 10251" in out
    assert out.splitlines()[-2:] == [
        "NODES  PLUGIN  REASON            SUCH AS",
        "2      Mine    Insufficient cpu  n1 n2",
    ]


@pytest.mark.parametrize("code", [403, 404])
def test_a_lease_or_explanations_that_may_not_be_read_are_left_out(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {_POD: _pod(), _LEASE: code, _EXPLANATIONS: code}
    status, out, _ = _asked(answers, tmp_path, capsys, "-o", "json")
    assert status == 0
    assert {"leader", "explanation"}.isdisjoint(json.loads(out))


@pytest.mark.parametrize("path", [_POD, _LEASE, _EXPLANATIONS])
def test_a_server_that_fails_is_named_after_the_scheduler(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {_POD: _pod(), _LEASE: {"spec": {}}, _EXPLANATIONS: {}, path: 422}
    status, out, err = _asked(answers, tmp_path, capsys)
    assert (status, out) == (2, "")
    assert err.startswith(f"koordctl: {_NOWHERE}: no scheduler answers: ")
    assert "; the API server: " in err and "said 422" in err


def test_the_kubeconfig_of_the_environment_is_used_without_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({_POD: _pod("n3")}) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig(tmp_path))
        assert main(["why", "shop/web", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["node"] == "n3"


@pytest.mark.parametrize(
    ("pod", "path"),
    [("web", "default/web"), ("/web", "default/web"), ("a%/b ?", "a%25/b%20%3F")],
)
def test_the_scheduler_is_asked_for_the_pod_at_its_url(
    pod: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving({f"/apis/v1/pods/{path}": {"pod": "p", "state": "s", "node": "n"}}) as server:
        assert main(["why", pod, "-o", "json", "--scheduler", f"{server.url}/"]) == 0
    assert server.asked == [f"/apis/v1/pods/{path}"]
    found = json.loads(capsys.readouterr().out)
    assert found == {"pod": "p", "state": "s", "node": "n", "source": server.url}


@pytest.mark.parametrize(
    ("answer", "said"), [(503, "said 503"), ([], "HTTP 200"), ({"message": "x"}, None)]
)
def test_an_answer_that_is_none_is_said(
    answer: Any, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving({"/apis/v1/pods/default/web": answer}) as server:
        status = main(["why", "web", "-o", "json", "--scheduler", server.url])
    captured = capsys.readouterr()
    if said is None:
        assert (status, json.loads(captured.out)["message"]) == (0, "x")
    else:
        assert (status, captured.err) == (2, f"koordctl: {server.url}: {said}\n")


def test_a_scheduler_at_a_url_without_port_is_asked_at_port_80(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Refusing:
        def __init__(self, host: str, port: int, *, timeout: float) -> None:
            asked.append((host, port, timeout))

        def request(self, method: str, path: str) -> None:
            raise ConnectionRefusedError

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr("koordctl.why.http.client.HTTPConnection", Refusing)
    assert main(["why", "web", "--scheduler", "http://scheduler"]) == 2
    assert asked == [("scheduler", 80, 5.0), "closed"]
    # An error without a text is named by its kind.
    said = "koordctl: http://scheduler: no scheduler answers: ConnectionRefusedError\n"
    assert capsys.readouterr().err == said


# --- text ----------------------------------------------------------------------------------------

_FOUND: dict[str, Any] = {
    "pod": "shop/web",
    "state": "unschedulable",
    "node": "",
    "schedulerName": "koord-scheduler",
    "decidedAt": "2001-09-09T01:46:40Z",
    "source": "http://127.0.0.1:10251",
    "message": "0/3 nodes are available",
    "nearest": [
        {"nodes": 2, "text": "2 of 3 nodes lack only cpu", "examples": ["n1", "n2"]},
        {"nodes": 1, "text": "1 of 3 nodes has a taint", "examples": ["n3"]},
    ],
    "scores": {
        "nodes": 3,
        "feasible": 2,
        "best": [
            {"node": "n1", "total": 150, "scores": {"Fit": 100, "Balance": 50}},
            {"node": "n22", "total": 90, "scores": {"Balance": 90, "Fit": 0}},
        ],
    },
    "explanation": {
        "detailedExplanation": [
            {},
            {"scheduleExplanation": None},
            {
                "scheduleExplanation": {
                    "nodeFailedDetails": [
                        {
                            "failedPlugin": "Fit",
                            "reason": "Insufficient cpu",
                            "failedNodes": ["n1", "n2", "n3", "n4"],
                        },
                        {"failedPlugin": "Taint", "reason": "a taint"},
                    ]
                }
            },
        ]
    },
}
_SHOWN = """\
shop/web: unschedulable
  decided 2001-09-09 01:46, by koord-scheduler; source: http://127.0.0.1:10251

0/3 nodes are available

NODES  WHAT WOULD HAVE TO CHANGE   SUCH AS
2      2 of 3 nodes lack only cpu  n1 n2
1      1 of 3 nodes has a taint    n3

2 of 3 nodes could take it; the best:
NODE  TOTAL  Fit  Balance
n1    150    100  50
n22   90     0    90

NODES  PLUGIN  REASON            SUCH AS
4      Fit     Insufficient cpu  n1 n2 n3
0      Taint   a taint
"""


@pytest.mark.usefixtures("terminal")
def test_an_answer_is_shown_whole() -> None:
    assert f"{text(_FOUND)}\n" == _SHOWN


def test_an_answer_without_reasons_has_two_lines() -> None:
    found = {"pod": "a/b", "state": "bound", "node": "n1", "schedulerName": "s", "source": "c"}
    assert text(found) == "a/b: bound on n1\n  by s; source: c"
    further = {"withoutScheduler": "no answer", "leader": "pod-1", "nearest": [], "message": ""}
    assert text(found | further).splitlines()[2:] == [
        "  scores and nearest nodes need the scheduler: no answer",
        "  kubectl -n koordinator-system port-forward pod-1 10251",
    ]


def test_without_a_node_that_could_take_it_there_are_no_scores() -> None:
    lines = score_lines({"nodes": 3, "feasible": 0, "best": []})
    assert lines == ["0 of 3 nodes could take it; the best:", ""]
