"""koordctl explain node: the formula, its terms and what is offered now."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from apis.core import Node
from apis.decode import dec_hook
from apis.errors import InputError
from apis.explanation import ANNOTATION_RESOURCE_EXPLANATION, NodeExplanation, explanation_text
from cluster.manager.batch import batch_resources
from koordctl.node import explain_node
from tests.cluster import nodes


def explained() -> Node:
    given = nodes.inputs(
        nodes.node(),
        nodes.report(system=("1", "1Gi"), at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")),
    )
    result = batch_resources(given, nodes.strategy(batchCPUThresholdPercent=50))
    text = explanation_text(NodeExplanation(result.explanations))
    found: Node = msgspec.convert(
        {
            "metadata": {"name": "n1", "annotations": {ANNOTATION_RESOURCE_EXPLANATION: text}},
            "status": {"allocatable": {"kubernetes.io/batch-cpu": "8k"}},
        },
        Node,
        dec_hook=dec_hook,
    )
    return found


def test_a_resource_is_explained_term_by_term() -> None:
    plain, text = explain_node(explained(), "batch-cpu")
    lines = text.splitlines()
    assert lines[0] == (
        "kubernetes.io/batch-cpu = min(max(capacity - margin - system_used - hp_used, 0), cap)"
    )
    assert [line.split()[:2] for line in lines[1:7]] == [
        ["capacity", "16000"],
        ["margin", "6400"],
        ["system_used", "1000"],
        ["hp_used", "0"],
        ["cap", "8000"],
        ["result", "8000"],
    ]
    assert "NodeMetric n1" in lines[3]
    assert lines[3].endswith("s ago)")
    assert lines[-1].strip() == "offered now: 8k"
    assert plain["kubernetes.io/batch-cpu"]["result"] == 8000


def test_without_an_explanation_the_answer_says_what_to_look_at() -> None:
    with pytest.raises(InputError, match="check that koord-manager runs"):
        explain_node(nodes.node(), None)
    with pytest.raises(InputError, match=r"it explains kubernetes\.io/batch-cpu"):
        explain_node(explained(), "mid-cpu")
