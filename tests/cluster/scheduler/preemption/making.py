"""Tables, pods and a search for victims, from the oracle's plain values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apis.meta import LabelSelector
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.node_search import Arguments
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.cycle.trial import RowChecks
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import Budget, DisruptionBudgets
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.preemption.oracle import OracleBudgets, OracleNode, OraclePod

PROFILE = Profile("koord-scheduler", filters=(NodeUnschedulable(), NodePorts(), NodeResourcesFit()))


class Bed:
    """One cluster."""

    def __init__(
        self,
        nodes: Sequence[OracleNode],
        budgets: OracleBudgets | None = None,
        *,
        profile: Profile = PROFILE,
        arguments: Arguments | None = None,
    ) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        self.budgets = DisruptionBudgets()
        self.nominator: Nominator[PodShape] = Nominator()
        budgets = budgets or OracleBudgets()
        for app, allowed in budgets.allowed.items():
            selector = LabelSelector(match_labels={"app": app})
            self.budgets.set(Budget("default", app, selector, allowed, budgets.disrupted))
        for node in nodes:
            amounts = {"cpu": f"{node.cpu}m", "pods": str(node.most_pods)}
            self.tables.upsert_node(make_node(node.name, allocatable=amounts))
            for pod in node.pods:
                self.tables.place(self.booking(pod, node.name))
            for pod in node.promised:
                self.nominator.nominate(self.pending(pod), node.name)
        self.evaluator = Evaluator(profile, self.tables)
        self.preemption = Preemption(
            self.evaluator, self.tables, self.nominator, self.budgets, arguments
        )

    def shape(self, pod: OraclePod) -> PodShape:
        labels = {"app": pod.app} if pod.app else {}
        if pod.spared:
            labels["scheduling.koordinator.sh/disable-preemptible"] = "true"
        container = {
            "name": "c",
            "resources": {"requests": {"cpu": f"{pod.cpu}m"}},
            "ports": [{"containerPort": 1, "hostPort": pod.port}] if pod.port else [],
        }
        return self.shapes.of(
            make_pod(pod.name, labels=labels, containers=[container], priority=pod.priority)
        )

    def booking(self, pod: OraclePod, node: str) -> Booking:
        return Booking(f"default/{pod.name}", pod.name, self.shape(pod), node, start=pod.start)

    def pending(self, pod: OraclePod) -> PendingPod[PodShape]:
        return PendingPod(f"default/{pod.name}", pod.name, pod.priority, self.shape(pod), 0.0)

    def find(self, pod: OraclePod) -> Candidate | NotFound:
        """Search for victims, as after an attempt that found no node."""
        pending = self.pending(pod)
        evaluation = self.evaluator.evaluate(pending.shape)
        resolvable = diagnose(pending.shape, self.tables, evaluation.masks).resolvable
        checks = RowChecks(self.evaluator.profile, self.tables, self.nominator)
        promised = [row for row in evaluation.feasible if not checks.fits(pending, int(row))]
        rows = np.union1d(resolvable, np.array(promised, dtype=np.intp))
        return self.preemption.find(pending, rows, salt=5)

    def row(self, name: str) -> int:
        row = self.tables.nodes.row(name)
        assert row is not None
        return row

    def state(self) -> object:
        """Return what the tables hold, for comparisons."""
        nodes = self.tables.nodes
        rows = slice(0, len(nodes))
        return (
            dict(self.tables.bookings),
            [dict(self.tables.on(row)) for row in range(len(nodes))],
            nodes.requested[rows].tolist(),
            nodes.scored[rows].tolist(),
            nodes.pods[rows].tolist(),
            [sorted(self.tables.ports.rows_in_conflict("TCP", port, "")) for port in (1, 2)],
        )
