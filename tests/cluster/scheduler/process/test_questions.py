"""What a ScheduleExplanation is answered."""

from __future__ import annotations

from typing import Any, cast

import pytest

from apis.core import ObjectMeta
from apis.schedule_explanation import (
    ScheduleExplanation,
    ScheduleExplanationSpec,
    ScheduleExplanationStatus,
)
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.questions import NO_PODS, Questions, kept_question
from kube.client import Client
from kube.connection import Connection
from tests.cluster.scheduler.making import make_node, make_pod

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
""",
    obj="test",
)
_TAINT = [{"key": "a", "effect": "NoSchedule"}]
_KOORD: dict[str, Any] = {"schedulerName": "koord-scheduler"}


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _core() -> SchedulerCore:
    client = Client(Connection("http://127.0.0.1:1"), user_agent="test")
    return SchedulerCore(client, _CONFIGURATION, cast(Any, _Silent()), seed=3, clock=lambda: 100.0)


def test_nodes_that_hold_a_pod_back_are_named_by_plugin_and_reason() -> None:
    core = _core()
    questions = Questions(core)
    core.nodes.put(make_node("small", allocatable={"cpu": "1"}))
    core.nodes.put(make_node("tainted", taints=_TAINT, allocatable={"cpu": "1"}))
    core.pods.put(make_pod("full", requests={"cpu": "1"}, node="large"))
    core.nodes.put(make_node("large", allocatable={"cpu": "2"}))
    core.pods.put(make_pod("a", requests={"cpu": "2"}, **_KOORD))
    assert core.attempts.next(100.0)
    status = questions.answer("default", "default/a")
    assert (status.schedulable, status.schedulable_after_preemption) == (False, False)
    assert status.failed_message.startswith("0/3 nodes are available: ")
    (detail,) = status.detailed_explanation
    assert detail.schedule_explanation is not None
    found = [
        (each.failed_plugin, each.reason, each.preempt_might_help, each.failed_nodes)
        for each in detail.schedule_explanation.node_failed_details
    ]
    assert found == [
        ("NodeResourcesFit", "Insufficient cpu", False, ("small",)),
        ("NodeResourcesFit", "Insufficient cpu", True, ("large",)),
        ("TaintToleration", "node(s) had untolerated taint(s)", False, ("tainted",)),
    ]


def test_a_question_covers_a_pod_a_label_and_a_gang() -> None:
    core = _core()
    questions = Questions(core)
    core.nodes.put(make_node("n", allocatable={"cpu": "4"}))
    label = {"scheduling.koordinator.sh/questioned-object-key": "job"}
    gang = {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "1",
    }
    core.pods.put(make_pod("j0", requests={"cpu": "1"}, labels=label, **_KOORD))
    core.pods.put(make_pod("j1", requests={"cpu": "9"}, labels=label, **_KOORD))
    core.pods.put(make_pod("m0", requests={"cpu": "1"}, annotations=gang, **_KOORD))
    while core.attempts.next(100.0):
        pass

    def placed(key: str) -> tuple[bool, list[str]]:
        status = questions.answer("default", key)
        (detail,) = status.detailed_explanation
        assert detail.schedule_explanation is not None
        results = detail.schedule_explanation.feasible_scheduling_result
        return status.schedulable, [each.name for each in results]

    assert placed("default/j0") == (True, ["j0"])
    assert placed("default/job") == (False, ["j0"])
    assert placed("default/g") == (True, ["m0"])
    assert placed("default/g, default/j0") == (True, ["j0", "m0"])
    for key in ("default/missing", ""):
        assert questions.answer("default", key).failed_message == NO_PODS


def test_a_pod_of_another_scheduler_has_no_details() -> None:
    core = _core()
    core.nodes.put(make_node("n"))
    core.pods.put(make_pod("a", schedulerName="other"))
    status = Questions(core).answer("default", "default/a")
    assert not status.schedulable
    (detail,) = status.detailed_explanation
    assert detail.schedule_explanation is not None
    assert detail.schedule_explanation.node_failed_details == ()


def test_pods_of_other_namespaces_are_left_out_and_that_is_said() -> None:
    core = _core()
    questions = Questions(core)
    core.nodes.put(make_node("n", allocatable={"cpu": "4"}))
    core.pods.put(make_pod("secret", namespace="kube-system", node="n", **_KOORD))
    core.pods.put(make_pod("web", namespace="team-a", node="n", **_KOORD))
    left_out = "keys do not begin with team-a/ and are left out"
    status = questions.answer("team-a", "kube-system/secret")
    assert status == ScheduleExplanationStatus(
        failed_message=f"{NO_PODS}; spec.questionObjectKey: 1 of 1 {left_out}"
    )
    status = questions.answer("team-a", "kube-system/secret, team-a/web")
    assert status.failed_message == f"spec.questionObjectKey: 1 of 2 {left_out}"
    (detail,) = status.detailed_explanation
    assert detail.schedule_explanation is not None
    found = [each.name for each in detail.schedule_explanation.feasible_scheduling_result]
    assert found == ["web"]


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("default/a" + "x" * 4087, ""),
        ("default/a" + "x" * 4088, "spec.questionObjectKey is longer than 4096 characters"),
        (",".join(["default/a"] * 64), ""),
        (
            ",".join(["default/a"] * 65),
            "spec.questionObjectKey has 65 keys; at most 64 are answered",
        ),
    ],
)
def test_a_question_of_excessive_length_is_refused(key: str, refused: str) -> None:
    asked = ScheduleExplanation(spec=ScheduleExplanationSpec(question_object_key=key))
    kept = kept_question(asked).spec.question_object_key
    assert len(kept) <= 4097
    answered = Questions(_core()).answer("default", kept).failed_message
    assert answered == (refused or NO_PODS)


def test_the_cache_keeps_the_question_alone() -> None:
    meta = ObjectMeta(
        name="a", namespace="b", uid="u", resource_version="7", creation_timestamp="2026-01-01"
    )
    spec = ScheduleExplanationSpec(question_object_key="b/c", ttl="1h")
    asked = ScheduleExplanation(
        metadata=ObjectMeta(
            name="a",
            namespace="b",
            uid="u",
            resource_version="7",
            creation_timestamp="2026-01-01",
            annotations={"large": "x" * 9999},
        ),
        spec=ScheduleExplanationSpec(
            question_object_key="b/c", ttl="1h", question_object_template={"large": "x" * 9999}
        ),
        status=ScheduleExplanationStatus(failed_message="x" * 9999),
    )
    assert kept_question(asked) == ScheduleExplanation(metadata=meta, spec=spec)


def test_a_status_names_a_hundred_nodes_and_pods_and_counts_the_others() -> None:
    core = _core()
    questions = Questions(core)
    label = {"scheduling.koordinator.sh/questioned-object-key": "job"}
    for number in range(120):
        core.nodes.put(make_node(f"n{number:03}", allocatable={"cpu": "1"}))
        placed = make_pod(f"j{number:03}", node=f"n{number:03}", labels=label, **_KOORD)
        core.pods.put(placed)
    core.pods.put(make_pod("large", requests={"cpu": "2"}, labels=label, **_KOORD))
    assert core.attempts.next(100.0)
    status = questions.answer("default", "default/job")
    (detail,) = status.detailed_explanation
    attempt = detail.schedule_explanation
    assert attempt is not None
    assert len(attempt.feasible_scheduling_result) == 100
    assert status.failed_message.endswith("; 100 of 120 pods with a node are listed")
    (failed,) = attempt.node_failed_details
    assert failed.reason == "Insufficient cpu (100 of 120 nodes named)"
    assert failed.failed_nodes == tuple(f"n{number:03}" for number in range(100))


def test_node_and_message_are_those_of_why() -> None:
    core = _core()
    core.nodes.put(make_node("n", allocatable={"cpu": "4"}))
    gated: dict[str, Any] = {"schedulingGates": [{"name": "later"}], **_KOORD}
    pods = [
        make_pod("bound", node="n", **_KOORD),
        make_pod("placed", requests={"cpu": "1"}, **_KOORD),
        make_pod("large", requests={"cpu": "9"}, **_KOORD),
        make_pod("gated", **gated),
    ]
    for pod in pods:
        core.pods.put(pod)
    while core.attempts.next(100.0):
        pass
    for pod in pods:
        why = core.why(f"default/{pod.metadata.name}")
        assert why is not None
        expected = why["node"], why.get("message", "")
        assert core.node_and_message(pod) == expected
        assert any(expected), pod.metadata.name
