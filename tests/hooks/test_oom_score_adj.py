"""OOM scores by annotation."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import ANNOTATION_OOM_SCORE_ADJ as FOR_POD
from apis.keys import ANNOTATION_OOM_SCORE_ADJ_SPEC as BY_CONTAINER
from hooks.policies.oom_score_adj import POLICY
from linux.resources import Resource
from tests.hooks.making import a_container, a_pod, a_sandbox, decide, node, only_fault, values


@pytest.mark.parametrize(
    ("annotations", "score"),
    [
        ({}, None),
        ({FOR_POD: "-500"}, -500),
        ({FOR_POD: "1000"}, 1000),
        ({FOR_POD: "-1000"}, -1000),
        ({FOR_POD: "0"}, 0),
        ({FOR_POD: "+7"}, 7),
        ({BY_CONTAINER: {"main": -500, "sidecar": 200}}, -500),
        ({BY_CONTAINER: {"sidecar": 200}}, None),
        ({BY_CONTAINER: {"sidecar": 200}, FOR_POD: "100"}, 100),
        ({BY_CONTAINER: {"main": 0}, FOR_POD: "100"}, 0),
        ({BY_CONTAINER: "", FOR_POD: "100"}, 100),
        ({FOR_POD: ""}, None),
    ],
)
@pytest.mark.parametrize("qos", ["LSR", "BE", "SYSTEM", ""])
def test_the_container_counts_before_the_pod(
    annotations: dict[str, Any], score: int | None, qos: str
) -> None:
    container = a_container(a_pod(qos, annotations=annotations))
    assert decide(container, node(), POLICY).value(Resource.OOM_SCORE_ADJ) == score


@pytest.mark.parametrize("bad", [5000, -1001, "5", 1.5, True, [1], {}])
def test_a_bad_score_of_one_container_costs_the_others_nothing(bad: Any) -> None:
    pod = a_pod(annotations={BY_CONTAINER: {"main": -500, "sidecar": bad}, FOR_POD: "100"})
    assert values(decide(a_container(pod), node(), POLICY)) == {"oom_score_adj": -500}
    refused = decide(a_container(pod, "sidecar"), node(), POLICY)
    assert values(refused) == {}  # the pod's score is not what was asked for it either
    assert f'{BY_CONTAINER}"].sidecar' in only_fault(refused)
    assert values(decide(a_container(pod, "other"), node(), POLICY)) == {"oom_score_adj": 100}


def test_a_sandbox_keeps_its_score() -> None:
    pod = a_pod(annotations={FOR_POD: "100"})
    assert values(decide(a_sandbox(pod), node(), POLICY)) == {}


@pytest.mark.parametrize(
    ("key", "annotation", "named"),
    [
        (FOR_POD, "high", "'high'"),
        (FOR_POD, "1001", "'1001'"),
        (FOR_POD, "-1001", "'-1001'"),
        (FOR_POD, "1.5", "'1.5'"),
        (FOR_POD, "1_0", "'1_0'"),
        (FOR_POD, "9" * 5000, "999"),
        (BY_CONTAINER, "{", "not valid JSON"),
        (BY_CONTAINER, {"main": 1001}, "main"),
        (BY_CONTAINER, {"main": "5"}, "main"),
        (BY_CONTAINER, [5], BY_CONTAINER),
    ],
)
def test_a_bad_annotation_is_named(key: str, annotation: Any, named: str) -> None:
    decision = decide(a_container(a_pod(annotations={key: annotation})), node(), POLICY)
    assert decision.outcomes == {}
    message = only_fault(decision)
    assert "Pod default/web" in message and key in message and named in message
