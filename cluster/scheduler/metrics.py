"""Metrics of the scheduler, by kube-scheduler's names where it has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from cluster.exposition import Registry, number_text
from cluster.scheduler.binding.placement import Bound, Outcome
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Placed, Unplaced
from cluster.scheduler.cycle.waiting import Place
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.quotas.exposition import quota_lines
from cluster.scheduler.tables.quotas.table import QuotaTable

_DECISION_BOUNDS: Final = tuple(0.00005 * 2.0**power for power in range(16))
"""50 microseconds to 1.6 s. kube-scheduler's buckets begin at 1 ms, above most decisions here."""
_NODE_BOUNDS: Final = tuple(2.0**power for power in range(24))
"""Upstream's, 1 to 8,388,608."""
_SLI_BOUNDS: Final = tuple(0.01 * 2.0**power for power in range(20))
"""kube-scheduler's, 10 ms to 1.5 h."""
_PATCH_BOUNDS: Final = tuple(0.001 * 2.0**power for power in range(15))
"""Upstream's."""

_VICTIMS_BOUNDS: Final = tuple(2.0**power for power in range(7))
"""kube-scheduler's, 1 to 64."""


class SchedulerMetrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self, queue: SchedulingQueue[Any]) -> None:
        self.registry = Registry()
        self._queue = queue
        self.attempts = self.registry.counter(
            "scheduler_schedule_attempts_total",
            "Attempts to schedule a pod, by result: scheduled, unschedulable or error.",
            "result",
            "profile",
        )
        self.decisions = self.registry.histogram(
            "scheduler_scheduling_algorithm_duration_seconds",
            "Duration of a decision.",
            bounds=_DECISION_BOUNDS,
        )
        self.tried = self.registry.histogram(
            "scheduler_scheduling_attempt_duration_seconds",
            "Duration of a decision, by its result: scheduled or unschedulable.",
            "result",
            "profile",
            bounds=_DECISION_BOUNDS,
        )
        self.evaluated = self.registry.histogram(
            "scheduler_pod_scheduling_evaluated_nodes",
            "Nodes that a pod was tried on.",
            bounds=_NODE_BOUNDS,
        )
        self.feasible = self.registry.histogram(
            "scheduler_pod_scheduling_feasible_nodes",
            "Nodes that could take a pod.",
            bounds=_NODE_BOUNDS,
        )
        self.waited = self.registry.histogram(
            "scheduler_pod_scheduling_sli_duration_seconds",
            "From a pod's creation to its binding.",
            bounds=_SLI_BOUNDS,
        )
        self.preemptions = self.registry.counter(
            "scheduler_preemption_attempts_total", "Preemptions that found victims."
        )
        self.victims = self.registry.histogram(
            "scheduler_preemption_victims", "Victims of a preemption.", bounds=_VICTIMS_BOUNDS
        )
        self.registry.also(self._pending)
        self.quota_statuses = self.registry.histogram(
            "scheduler_update_elastic_quota_status_duration_seconds",
            "Duration of a patch of an ElasticQuota's status.",
            bounds=_PATCH_BOUNDS,
        )

    def decided(self, outcome: Placed | Unplaced, profile: str, seconds: float) -> None:
        """Count a decision. One that placed the pod counts as scheduled when it is bound."""
        self.decisions.labels().observe(seconds)
        unplaced = isinstance(outcome, Unplaced)
        result = "unschedulable" if unplaced else "scheduled"
        self.tried.labels(result, profile).observe(seconds)
        if isinstance(outcome, Unplaced):
            nodes, feasible = outcome.diagnosis.nodes, 0
        else:
            nodes, feasible = (
                outcome.evaluation.tables.nodes.count,
                len(outcome.evaluation.feasible),
            )
        self.evaluated.labels().observe(nodes)
        self.feasible.labels().observe(feasible)
        if unplaced:
            self.attempts.labels("unschedulable", profile).inc()

    def bound(self, outcome: Outcome, pod: PendingPod[Any]) -> None:
        """Count the outcome of a binding."""
        result = "scheduled" if isinstance(outcome, Bound) else "error"
        self.attempts.labels(result, pod.shape.scheduler_name).inc()
        if isinstance(outcome, Bound):
            self.waited.labels().observe(max(0.0, time.time() - pod.created))

    def preempts(self, victims: int) -> None:
        """Count a preemption."""
        self.preemptions.labels().inc()
        self.victims.labels().observe(victims)

    def show_quotas(self, table: QuotaTable) -> None:
        """Show the gauges of quotas from now on."""
        self.registry.also(lambda: quota_lines(table))

    def _pending(self) -> Iterator[str]:
        name = "scheduler_pending_pods"
        yield f"# HELP {name} Pods without a node, by where they wait.\n# TYPE {name} gauge\n"
        for place in Place:
            if place is not Place.IN_FLIGHT:
                yield f'{name}{{queue="{place.value}"}} {number_text(self._queue.count(place))}\n'
