"""Nodes are left out of the search only where no trial would find victims."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from apis.meta import LabelSelector
from apis.scheduling_pod import decode_scheduling_node, decode_scheduling_pod
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.trial import RowChecks
from cluster.scheduler.cycle.victim_columns import by_amounts, freeable, headroom_without_victims
from cluster.scheduler.cycle.victims import by_amounts_on, by_trial, default_victims
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import Budget, DisruptionBudgets
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler import random_cluster

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles: [{schedulerName: default-scheduler}]
"""
_OWNERS = {
    app: {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": app, "uid": app}
    for app in random_cluster.APPS
}


class _Cluster:
    """Small nodes with many pods of three priorities."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tables = Tables()
        self.shapes = Shapes()
        plugins = make_plugins(read_configuration(_CONFIGURATION, obj="test"), self.tables)
        self.scheduling = Scheduling(self.tables, plugins.profiles, seed=1)
        for body in random_cluster.nodes(self.random, 8):
            self.tables.upsert_node(decode_scheduling_node(msgspec.json.encode(body)))
        for number in range(60):
            name, node = f"p{number}", f"n{self.random.randrange(8):02}"
            shape = self.shape(name, node, priority=self.random.choice((0, 1, 20)))
            self.tables.place(Booking(f"default/{name}", name, shape, node, start=number))

    def shape(self, name: str, node: str = "", *, priority: int) -> PodShape:
        body: dict[str, Any] = random_cluster.pod(self.random, name, node=node, owners=_OWNERS)
        body["metadata"]["namespace"] = "default"
        body["spec"] |= {"priority": priority, "schedulerName": "default-scheduler"}
        return self.shapes.of(decode_scheduling_pod(msgspec.json.encode(body)))

    def pending(self, name: str, priority: int) -> PendingPod[PodShape]:
        shape = self.shape(name, priority=priority)
        return PendingPod(f"default/{name}", name, priority, shape, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_where_a_trial_finds_victims_the_node_is_not_left_out(seed: int) -> None:
    cluster = _Cluster(seed)
    tables, scheduling, budgets = cluster.tables, cluster.scheduling, DisruptionBudgets()
    profile = scheduling.profile("default-scheduler")
    checks = RowChecks(profile, tables)
    every = np.flatnonzero(tables.nodes.alive[: len(tables.nodes)])
    left_out = found = 0
    for number in range(40):
        shape = cluster.shape(f"new{number}", priority=10)
        pod = PendingPod(f"default/new{number}", f"new{number}", 10, shape, 0.0)
        try:
            evaluation = scheduling.evaluate(shape)
        except Refusal:
            continue
        rows = np.setdiff1d(every, evaluation.feasible)
        may_open = set(freeable(tables, pod, rows, evaluation, default_victims).tolist())
        for row in rows.tolist():
            candidate = by_trial(checks, pod, row, default_victims, budgets)
            assert candidate is None or row in may_open, (number, row)
            found += candidate is not None
        left_out += len(rows) - len(may_open)
    assert left_out > 10
    assert found > 10


@pytest.mark.parametrize("seed", range(3))
def test_one_node_by_amounts_has_the_victims_that_all_at_once_have(seed: int) -> None:
    cluster = _Cluster(seed)
    tables, budgets = cluster.tables, DisruptionBudgets()
    names = sorted(each.key.partition("/")[2] for each in tables.bookings.values())
    for allowed, app in enumerate(random_cluster.APPS):
        selector = LabelSelector(match_labels={"app": app})
        # Pods that count as disrupted already use up nothing of one budget.
        disrupted = frozenset(cluster.random.sample(names, len(names) // 4) if allowed == 1 else ())
        budgets.set(Budget("default", app, selector, allowed, disrupted))
    every = np.flatnonzero(tables.nodes.alive[: len(tables.nodes)])
    compared = 0
    for number in range(30):
        pod = cluster.pending(f"new{number}", cluster.random.choice((1, 10, 100)))
        requested = NodeResourcesFit().looked_at(pod.shape)
        asked = (requested, default_victims, budgets)
        promised = {
            row: tuple(cluster.pending(f"promised{n}", 100) for n in range(number % 4))
            for row in cluster.random.sample(every.tolist(), 5)
        }
        costs = by_amounts(tables, pod, every, *asked, promised)
        found = {
            int(row): costs.candidate(element, tables) for element, row in enumerate(costs.rows)
        }
        assert {
            row: by_amounts_on(tables, pod, row, *asked, promised.get(row, ()))
            for row in every.tolist()
        } == {row: found.get(row) for row in every.tolist()}
        compared += len(found)
    assert compared > 30


@pytest.mark.parametrize("seed", range(2))
def test_the_headroom_without_victims_is_what_fits_one_after_another(seed: int) -> None:
    cluster = _Cluster(seed)
    tables, budgets = cluster.tables, DisruptionBudgets()
    every = np.flatnonzero(tables.nodes.alive[: len(tables.nodes)])
    found: set[int] = set()
    for number in range(20):
        pod = cluster.pending(f"new{number}", 10)
        requested = NodeResourcesFit().looked_at(pod.shape)
        promised = {
            row: (cluster.pending("promised", 100),)
            for row in cluster.random.sample(every.tolist(), 5)
        }
        headroom = headroom_without_victims(
            tables, pod, every, requested, default_victims, promised
        )
        for row in every.tolist():
            beside = list(promised.get(row, ()))
            fit = 0
            while by_amounts_on(tables, pod, row, requested, default_victims, budgets, beside):
                beside.append(pod)
                fit += 1
            assert headroom[row] == fit
            found.add(fit)
    assert len(found) > 2


def test_no_eviction_makes_room_for_a_resource_that_no_node_has() -> None:
    cluster = _Cluster(0)
    tables, budgets = cluster.tables, DisruptionBudgets()
    every = np.flatnonzero(tables.nodes.alive[: len(tables.nodes)])
    pod = cluster.pending("new", 100)
    requested = [("cpu", 1), ("example.com/none", 3)]
    costs = by_amounts(tables, pod, every, requested, default_victims, budgets)
    assert not len(costs.rows)
    # The others have no pod that may be a victim.
    assert costs.short == {"Insufficient example.com/none": len(every) - costs.without}
    assert not headroom_without_victims(tables, pod, every, requested, default_victims).any()
    for row in every.tolist():
        assert by_amounts_on(tables, pod, row, requested, default_victims, budgets) is None
