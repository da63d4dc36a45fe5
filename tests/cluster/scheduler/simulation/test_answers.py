"""The answers of a simulation as JSON has them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.errors import InputError
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.reading import default_configuration, read_configuration
from cluster.scheduler.simulation.answers import Question, count_capacity, place_all, place_pods
from cluster.scheduler.simulation.objects import FileObject
from tests.cluster.scheduler.simulation.dumps import PACKED, node, pod, workload

Tree = dict[str, Any]
_OTHER = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles: [{schedulerName: other}]
"""
_NOW = 1_767_225_600.0


def _objects(*trees: Tree) -> tuple[FileObject, ...]:
    found = []
    for tree in trees:
        group, slash, _ = tree["apiVersion"].partition("/")
        meta = tree["metadata"]
        raw = msgspec.json.encode(tree)
        found.append(
            FileObject(
                group if slash else "", tree["kind"], meta.get("namespace", ""), meta["name"],
                raw, "f",
            )
        )  # fmt: skip
    return tuple(found)


def _question(
    *trees: Tree, configuration: SchedulerConfiguration | None = None, **more: Any
) -> Question:
    return Question(_objects(*trees), configuration or default_configuration(), _NOW, **more)


def _quiet(text: str) -> None:
    """Show nothing."""


def test_what_becomes_of_given_pods_and_of_those_that_are_evicted_for_them() -> None:
    question = _question(node("n1"), pod("old", "6", on="n1", priority=1), seed=3)
    given = _objects(pod("new", "6", priority=9), pod("huge", "9"))
    found = place_pods(question, given, progress=_quiet)
    assert {name: found[name] for name in ("at", "seed", "nodes", "notes", "evicted")} == {
        "at": "2026-01-01T00:00:00Z",
        "seed": 3,
        "nodes": 1,
        "notes": [],
        "evicted": [{"pod": "default/old", "was": "n1"}],
    }
    new, huge = found["pods"]
    assert {name: new[name] for name in ("pod", "state", "node")} == {
        "pod": "default/new", "state": "placed", "node": "n1"
    }  # fmt: skip
    assert "message" not in new and "was" not in new
    assert (huge["state"], huge["node"]) == ("unschedulable", "")
    assert "Insufficient cpu" in huge["message"]


def test_a_given_pod_that_runs_is_placed_again_and_its_node_is_shown() -> None:
    question = _question(node("n1"), pod("a", "6", on="n1"), pod("b", "1"))
    found = place_pods(question, _objects(pod("a", "6"), pod("b", "1")), progress=_quiet)
    assert [each.get("was") for each in found["pods"]] == ["n1", None]
    assert found["evicted"] == []


def test_all_pods_under_two_configurations() -> None:
    cluster = (node("n1"), node("n2"), pod("a", on="n1"), pod("b", on="n1"), pod("c"))
    packed = read_configuration(PACKED, obj="packed")
    question = _question(*cluster)
    shown: list[str] = []
    found = place_all(question, against=packed, progress=shown.append)
    assert shown == ["placing all pods under the other configuration"]
    assert {each["pod"]: each.get("was") for each in found["pods"]} == {
        "default/a": "n1", "default/b": "n1", "default/c": None
    }  # fmt: skip
    assert (found["nodesUsed"], found["nodesUsedNow"], found["nodesUsedAgainst"]) == (2, 1, 1)
    node_of = {each["pod"]: each["node"] for each in found["pods"]}
    others = {each["pod"]: each for each in found["differences"]}
    assert others
    for name, each in others.items():
        assert each["node"] == node_of[name] != each["againstNode"]
        assert (each["state"], each["againstState"]) == ("placed", "placed")
    alone = place_all(question, against=None, progress=_quiet)
    assert "differences" not in alone and "nodesUsedAgainst" not in alone
    same = place_all(question, against=default_configuration(), progress=_quiet)
    assert same["differences"] == []


@pytest.mark.parametrize("named", [True, False])
def test_a_scheduler_name_needs_a_profile_in_both_configurations(named: bool) -> None:
    other = read_configuration(_OTHER, obj="other")
    configuration = other if named else default_configuration()
    question = _question(
        node("n1"), pod("a"), configuration=configuration, scheduler_name="default-scheduler"
    )
    with pytest.raises(InputError) as caught:
        place_all(question, against=other, progress=_quiet)
    error = caught.value
    assert (error.obj, error.field, error.value) == ("command line", "--as", "default-scheduler")
    assert error.hint == "its profiles: other"


def test_a_cluster_without_pods_of_the_schedulers_is_an_error() -> None:
    question = _question(node("n1"), pod("a", schedulerName="theirs"))
    with pytest.raises(InputError) as caught:
        place_all(question, against=None, progress=_quiet)
    error = caught.value
    assert (error.obj, error.field) == ("the cluster", "spec.schedulerName")
    assert error.value == "default-scheduler"
    assert error.hint is not None and "--as" in error.hint


def test_a_file_without_pods_is_an_error() -> None:
    with pytest.raises(InputError, match="has no Pod and no workload"):
        place_pods(_question(node("n1")), _objects(node("n2")), progress=_quiet)


def test_the_capacity_for_a_workload_is_asked_once_for_all_its_replicas() -> None:
    question = _question(node("n1"), node("n2", cpu=4))
    given = _objects(workload("Deployment", "web", 3, "2"), pod("big", "4"))
    found = count_capacity(question, given, limit=100, progress=_quiet)
    web, big = found["capacity"]
    assert {name: web[name] for name in ("pod", "count", "more", "nodes")} == {
        "pod": "default/web-0", "count": 6, "more": False, "nodes": {"n1": 4, "n2": 2}
    }  # fmt: skip
    assert list(web["nodes"]) == ["n1", "n2"]
    assert (big["pod"], big["count"], big["nodes"]) == ("default/big", 3, {"n1": 2, "n2": 1})
    limited = count_capacity(question, given, limit=2, progress=_quiet)["capacity"][0]
    assert (limited["count"], limited["more"]) == (2, True)
