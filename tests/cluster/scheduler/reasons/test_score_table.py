"""Why a pod is on its node."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.reasons.score_table import score_table
from cluster.scheduler.tables.tables import Tables
from kube.client import Client
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


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _core() -> SchedulerCore:
    async def make() -> SchedulerCore:
        return SchedulerCore(
            cast(Client, None), _CONFIGURATION, cast(Any, _Silent()), seed=3, clock=lambda: 100.0
        )

    return asyncio.run(make())


def _why(core: SchedulerCore, name: str) -> dict[str, Any]:
    found = core.why(f"default/{name}")
    assert found is not None
    msgspec.json.encode(found)
    return found


def test_the_best_nodes_are_shown_with_what_each_plugin_gave() -> None:
    core = _core()
    for number in range(9):
        core.nodes.put(make_node(f"n{number}", allocatable={"cpu": str(2 + number)}))
    core.pods.put(make_pod("a", requests={"cpu": "1"}, schedulerName="koord-scheduler"))
    assert core.attempts.next(100.0)
    found = _why(core, "a")
    assert found["state"] == "has a node"
    assert found["decidedAt"] == "1970-01-01T00:01:40Z"
    scores = found["scores"]
    assert (scores["nodes"], scores["feasible"], len(scores["best"])) == (9, 9, 5)
    assert scores["best"][0]["node"] == found["node"]
    totals = [row["total"] for row in scores["best"]]
    assert totals == sorted(totals, reverse=True)
    for row in scores["best"]:
        assert sum(row["scores"].values()) == row["total"]
        assert {"NodeResourcesFit", "NodeResourcesBalancedAllocation"} <= row["scores"].keys()


def test_a_refused_pod_shows_counts_and_the_nearest_nodes() -> None:
    core = _core()
    core.nodes.put(make_node("n0", allocatable={"cpu": "1"}))
    core.pods.put(make_pod("a", requests={"cpu": "2"}, schedulerName="koord-scheduler"))
    assert core.attempts.next(100.0)
    found = _why(core, "a")
    assert (found["state"], found["node"]) == ("unschedulable", "")
    assert found["counts"] == {"Insufficient cpu": 1}
    assert found["message"].startswith("0/1 nodes are available: 1 Insufficient cpu. preemption: ")
    assert ". One change away: 1 of 1" in found["message"]
    assert found["nearest"] == [
        {
            "text": "1 of 1 nodes lack only 1 of cpu",
            "nodes": 1,
            "examples": ["n0"],
            "constraints": [{"plugin": "NodeResourcesFit", "reason": "Insufficient cpu"}],
        }
    ]


def test_gates_gangs_and_foreign_pods_say_what_they_wait_for() -> None:
    core = _core()
    core.nodes.put(make_node("n0"))
    gang = {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "2",
    }
    koord: dict[str, Any] = {"schedulerName": "koord-scheduler"}
    core.pods.put(make_pod("gated", schedulingGates=[{"name": "x"}], **koord))
    core.pods.put(make_pod("alone", annotations=gang, **koord))
    core.pods.put(make_pod("foreign", schedulerName="other"))
    core.pods.put(make_pod("bound", node="n0", **koord))
    assert not core.attempts.next(100.0)
    assert _why(core, "gated")["message"] == "waiting for scheduling gates: [x]"
    assert _why(core, "alone")["state"] == "gated"
    assert "default/g" in _why(core, "alone")["message"]
    assert _why(core, "foreign")["state"] == "of another scheduler"
    assert (_why(core, "bound")["state"], _why(core, "bound")["node"]) == ("bound", "n0")
    assert core.why("default/missing") is None
    # A second pod of the same name is not explained by the decision about the first.
    core.pods.put(make_pod("a", requests={"cpu": "99"}, **koord))
    assert core.attempts.next(100.0)
    assert "message" in _why(core, "a")
    again = make_pod("a", **koord)
    again = msgspec.structs.replace(
        again, metadata=msgspec.structs.replace(again.metadata, uid="later")
    )
    core.pods.put(again)
    assert "message" not in _why(core, "a")


@pytest.mark.parametrize("count", [1, 4, 5, 6, 40])
def test_the_table_has_the_highest_totals_and_the_chosen_node(count: int) -> None:
    random = Random(count)
    tables = Tables()
    for number in range(count + 3):
        tables.upsert_node(make_node(f"n{number}"))
    feasible = np.sort(np.array(random.sample(range(count + 3), count), dtype=np.intp))
    scores = np.array([random.randrange(4) for _ in range(count + 3)], dtype=np.int64)
    totals = 2 * scores[feasible]
    for chosen in feasible.tolist():
        table = score_table(tables, feasible, totals, (("P", 2, scores),), chosen)
        assert table is not None
        assert [row.parts for row in table.rows] == [(row.total,) for row in table.rows]
        shown = [row.total for row in table.rows]
        assert len(shown) == min(count, 5)
        assert table.chosen in {row.node for row in table.rows}
        mine = int(totals[list(feasible).index(chosen)])
        rest = sorted(totals.tolist(), reverse=True)
        rest.remove(mine)
        assert shown == sorted([mine, *rest[:4]], reverse=True)
    missing = next(row for row in range(count + 3) if row not in feasible)
    assert score_table(tables, feasible, totals, (), missing) is None


def test_only_the_last_decisions_are_kept() -> None:
    explanations = Explanations()
    for number in range(9000):
        explanations.held_up(f"default/p{number}", "u", "a member of its gang", at=0.0)
    assert explanations.get("default/p0") is None
    assert explanations.get("default/p8999") is not None
