"""The network's topology and disruption budgets as they are watched."""

from __future__ import annotations

import msgspec
import pytest

from apis.decode import json_decoder
from apis.network_topology import ClusterNetworkTopology
from cluster.scheduler.cycle.events import Action
from cluster.scheduler.sources.disruption_budgets import (
    DISRUPTION_BUDGETS,
    DisruptionBudget,
    DisruptionBudgetSource,
)
from cluster.scheduler.sources.network_topology import NetworkTopologySource
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from kube.cache import Change, Event
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.sources.heard import HeardQueue
from tests.cluster.scheduler.tables.networks import RACKS, topology

_decode_budget = json_decoder(DisruptionBudget)


class _Network:
    def __init__(self) -> None:
        tables = Tables()
        tables.upsert_node(make_node("n", labels={"spine": "s", "rack": "r"}))
        self.network = NetworkTopology(tables.nodes)
        self.queue = HeardQueue()
        self.source = NetworkTopologySource(self.network, self.queue, clock=lambda: 0.0)

    def event(
        self,
        new: ClusterNetworkTopology,
        old: ClusterNetworkTopology | None = None,
        change: Change = Change.MODIFIED,
    ) -> bool:
        """Take an event; return whether pods are tried after it."""
        self.source.topology_event(Event(change, old, new))
        heard = self.queue.heard()
        assert heard in ([], [("ClusterNetworkTopology", Action.UPDATE_OTHER)])
        return bool(heard)


def test_the_default_topology_is_in_force_while_it_exists() -> None:
    bed = _Network()
    good = topology(*RACKS)
    assert bed.event(good, None, Change.ADDED)
    assert bed.network.tree() is not None
    assert bed.event(good, good, Change.DELETED)
    assert bed.network.tree() is None


def test_a_topology_of_another_name_and_a_written_status_change_nothing() -> None:
    bed = _Network()
    good = topology(*RACKS)
    other = msgspec.structs.replace(
        good, metadata=msgspec.structs.replace(good.metadata, name="other")
    )
    assert not bed.event(other)
    assert bed.network.tree() is None
    bed.event(good)
    assert not bed.event(good, good)
    assert bed.network.tree() is not None


def test_a_topology_that_cannot_be_used_leaves_the_last_good_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = _Network()
    good, bad = topology(*RACKS), topology(RACKS[0], *RACKS)
    bed.event(good)
    assert not bed.event(bad, good)
    assert "is given twice" in bed.source.problem
    assert "the former topology stays in force" in caplog.text
    assert bed.network.tree() is not None
    assert bed.event(good, bad)
    assert bed.source.problem == ""
    bed.event(bad, good)
    bed.event(bad, bad, Change.DELETED)
    assert bed.source.problem == ""


def test_a_budget_is_found_by_its_namespace_and_selector() -> None:
    budgets = DisruptionBudgets()
    source = DisruptionBudgetSource(budgets)
    budget = _decode_budget(
        msgspec.json.encode(
            {
                "metadata": {"name": "b", "namespace": "team"},
                "spec": {"selector": {"matchLabels": {"app": "web"}}},
                "status": {
                    "disruptionsAllowed": 2,
                    "disruptedPods": {"p1": "2026-01-01T00:00:00Z"},
                },
            }
        )
    )
    shape = Shapes().of(make_pod("p", namespace="team", labels={"app": "web"}))
    source.event(Event(Change.ADDED, None, budget))
    (found,) = budgets.of(shape)
    assert (found.key, found.allowed, set(found.disrupted)) == ("team/b", 2, {"p1"})
    assert budgets.of(Shapes().of(make_pod("p", labels={"app": "web"}))) == ()
    assert budgets.of(Shapes().of(make_pod("p", namespace="team", labels={"app": "db"}))) == ()
    source.event(Event(Change.DELETED, budget, budget))
    assert budgets.of(shape) == ()


def test_budgets_are_read_from_all_namespaces() -> None:
    assert DISRUPTION_BUDGETS.path() == "/apis/policy/v1/poddisruptionbudgets"
    assert DISRUPTION_BUDGETS.path(namespace="a") == (
        "/apis/policy/v1/namespaces/a/poddisruptionbudgets"
    )
