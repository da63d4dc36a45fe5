"""What a ScheduleExplanation is answered."""

from __future__ import annotations

from typing import Any, cast

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.questions import NO_PODS, Questions
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
    status = questions.answer("default/a")
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
        status = questions.answer(key)
        (detail,) = status.detailed_explanation
        assert detail.schedule_explanation is not None
        results = detail.schedule_explanation.feasible_scheduling_result
        return status.schedulable, [each.name for each in results]

    assert placed("default/j0") == (True, ["j0"])
    assert placed("default/job") == (False, ["j0"])
    assert placed("default/g") == (True, ["m0"])
    assert placed("default/g, default/j0") == (True, ["j0", "m0"])
    for key in ("default/missing", "other/job", ""):
        assert questions.answer(key).failed_message == NO_PODS


def test_a_pod_of_another_scheduler_has_no_details() -> None:
    core = _core()
    core.nodes.put(make_node("n"))
    core.pods.put(make_pod("a", schedulerName="other"))
    status = Questions(core).answer("default/a")
    assert not status.schedulable
    (detail,) = status.detailed_explanation
    assert detail.schedule_explanation is not None
    assert detail.schedule_explanation.node_failed_details == ()
