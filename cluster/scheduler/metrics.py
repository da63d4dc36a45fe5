"""Metrics of the scheduler, by kube-scheduler's names where it has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from cluster.exposition import Registry, bucket_lines, head_lines, label_text, number_text
from cluster.scheduler.binding.placement import Bound, Outcome
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Placed, Unplaced
from cluster.scheduler.cycle.timings import Timings
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.quotas.exposition import quota_lines
from cluster.scheduler.tables.quotas.table import QuotaTable
from service.histogram import Histogram

_DECISION_BOUNDS: Final = tuple(0.00005 * 2.0**power for power in range(16))
"""50 microseconds to 1.6 s. kube-scheduler's buckets begin at 1 ms, above most decisions here."""
_NODE_BOUNDS: Final = tuple(2.0**power for power in range(24))
"""Upstream's, 1 to 8,388,608."""
_SLI_BOUNDS: Final = tuple(0.01 * 2.0**power for power in range(20))
"""kube-scheduler's, 10 ms to 1.5 h."""
_ATTEMPT_BOUNDS: Final = tuple(0.00005 * 2.0**power for power in range(20))
"""50 microseconds to 26 s: with its binding an attempt takes as long as the API server."""
_TRIES_BOUNDS: Final = tuple(2.0**power for power in range(5))
"""kube-scheduler's, 1 to 16."""
_MOST_TRIES_NAMED: Final = 15
"""Above it, the label `attempts` of kube-scheduler is "15+"."""
_MILLISECOND_BOUNDS: Final = tuple(0.001 * 2.0**power for power in range(15))
"""Upstream's, of patches of quotas and of pods of a planned gang: 1 ms to 16 s."""

_VICTIMS_BOUNDS: Final = tuple(2.0**power for power in range(7))
"""kube-scheduler's, 1 to 64."""


class Tried(NamedTuple):
    """An attempt that has a node. number: of the pod's attempts, from 1. entered: when the pod
    first passed its gates, in seconds as the queue counts them. began: of the attempt, by
    time.perf_counter."""

    number: int
    entered: float
    began: float


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
        self.planned = self.registry.histogram(
            "scheduler_batch_algorithm_by_pod_duration_seconds",
            "Duration of checking and booking one pod on the node that the plan of its gang has.",
            bounds=_MILLISECOND_BOUNDS,
        )
        self.tried = self.registry.histogram(
            "scheduler_scheduling_attempt_duration_seconds",
            "Duration of an attempt, by its result: scheduled or error (with the binding), or"
            " unschedulable.",
            "result",
            "profile",
            bounds=_ATTEMPT_BOUNDS,
        )
        self.tries = self.registry.histogram(
            "scheduler_pod_scheduling_attempts",
            "Attempts that a pod took until it was bound.",
            bounds=_TRIES_BOUNDS,
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
            "From passing its gates to the binding of a pod, by the number of its attempts.",
            "attempts",
            bounds=_SLI_BOUNDS,
        )
        self.preemptions = self.registry.counter(
            "scheduler_preemption_attempts_total", "Searches for victims."
        )
        self.victims = self.registry.histogram(
            "scheduler_preemption_victims", "Victims of a preemption.", bounds=_VICTIMS_BOUNDS
        )
        self.registry.also(self._pending)
        self.quota_statuses = self.registry.histogram(
            "scheduler_update_elastic_quota_status_duration_seconds",
            "Duration of a patch of an ElasticQuota's status.",
            bounds=_MILLISECOND_BOUNDS,
        )

    def decided(self, outcome: Placed | Unplaced, profile: str, seconds: float) -> None:
        """Count a decision. One that placed the pod counts as scheduled when it is bound."""
        self.decisions.labels().observe(seconds)
        if isinstance(outcome, Unplaced):
            self.tried.labels("unschedulable", profile).observe(seconds)
            self.attempts.labels("unschedulable", profile).inc()
            nodes, feasible = outcome.diagnosis.nodes, 0
        else:
            nodes, feasible = (
                outcome.evaluation.tables.nodes.count,
                len(outcome.evaluation.feasible),
            )
        self.evaluated.labels().observe(nodes)
        self.feasible.labels().observe(feasible)

    def bound(
        self, outcome: Outcome, pod: PendingPod[Any], tried: Tried, now: float, clock: float
    ) -> None:
        """Count the outcome of a binding. now: as `tried.entered`. clock: as `tried.began`."""
        profile = pod.shape.scheduler_name
        result = "scheduled" if isinstance(outcome, Bound) else "error"
        self.attempts.labels(result, profile).inc()
        self.tried.labels(result, profile).observe(clock - tried.began)
        if isinstance(outcome, Bound):
            self.tries.labels().observe(tried.number)
            named = f"{_MOST_TRIES_NAMED}+" if tried.number > _MOST_TRIES_NAMED else tried.number
            self.waited.labels(str(named)).observe(max(0.0, now - tried.entered))

    def preempts(self, victims: int) -> None:
        """Count the victims of a preemption."""
        self.victims.labels().observe(victims)

    def show_timings(self, timings: Mapping[str, Timings]) -> None:
        """Show the durations of decisions from now on. timings: by scheduler name."""
        self.registry.also(lambda: _timing_lines(timings))

    def show_quotas(self, table: QuotaTable) -> None:
        """Show the gauges of quotas from now on."""
        self.registry.also(lambda: quota_lines(table))

    def _pending(self) -> Iterator[str]:
        name = "scheduler_pending_pods"
        yield head_lines(name, "Pods without a node, by where they wait.")
        for place in QueueState:
            if place is not QueueState.IN_FLIGHT:
                yield f'{name}{{queue="{place.value}"}} {number_text(self._queue.count(place))}\n'
        name = "scheduler_queue_incoming_pods_total"
        yield head_lines(name, "Pods that came to a place of the queue, by why.", "counter")
        for key, count in sorted(self._queue.incoming.items()):
            yield f"{name}{{{label_text(('event', 'queue'), key)}}} {count}\n"


def _timing_lines(timings: Mapping[str, Timings]) -> Iterator[str]:
    name = "scheduler_framework_extension_point_duration_seconds"
    yield head_lines(name, "Duration of a step of a decision, all plugins together.", "histogram")
    for profile, each in timings.items():
        for (step, status), buckets in tuple(each.points.items()):
            labels = label_text(("extension_point", "profile", "status"), (step, profile, status))
            yield from bucket_lines(name, labels, buckets)
    name = "scheduler_plugin_execution_duration_seconds"
    yield head_lines(
        name,
        "Duration of a call of a plugin, for all of its nodes, in a tenth of the decisions.",
        "histogram",
    )
    together: dict[tuple[str, str, str], Histogram] = {}
    for each in timings.values():
        for key, buckets in tuple(each.plugins.items()):
            together.setdefault(key, Histogram(buckets.bounds)).add(buckets)
    for key, buckets in together.items():
        labels = label_text(("plugin", "extension_point", "status"), key)
        yield from bucket_lines(name, labels, buckets)
    name = "scheduler_plugin_evaluation_total"
    yield head_lines(name, "Nodes that a plugin looked at.", "counter")
    for profile, each in timings.items():
        for (plugin, step), tally in tuple(each.evaluated.items()):
            labels = label_text(("plugin", "extension_point", "profile"), (plugin, step, profile))
            yield f"{name}{{{labels}}} {tally.nodes}\n"
