"""The daemon's metrics: upstream's series, and our own.

Nothing is counted twice: the parts of the daemon keep plain numbers, and one collector converts
them to metric families at each scrape. Upstream's series: docs/facts/koordlet.md, "Metrics".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from apis.cpuset import CpuSet
from hooks.stage import RepairKey, Stage, TimingKey
from hooks.state import State as ValueState
from hooks.subject import Subject
from koordlet.exposition import container_metrics, node_metrics, strategy_metrics
from koordlet.exposition.container_metrics import CookieKey, Standing
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.measurement.sampler import SamplerStatus
from koordlet.qos.runner import StrategyStatus
from koordlet.reconciler.reports import ReconcileStats
from linux.resources import Resource
from nri_plugin.statistics import State, Statistics
from service.histogram import Histogram

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Readings(Protocol):
    """The numbers, read on the event loop."""

    @property
    def node_name(self) -> str: ...

    @property
    def started_at(self) -> float: ...

    @property
    def timings(self) -> Iterable[Mapping[TimingKey, Histogram]]:
        """Durations of policies in milliseconds, one mapping for each decider."""
        ...

    @property
    def nri(self) -> Statistics | None: ...

    @property
    def pods(self) -> int: ...

    @property
    def containers(self) -> int: ...

    @property
    def unprotected(self) -> int: ...

    @property
    def policies(self) -> Mapping[str, str]:
        """Policy -> state: "on", "off", "degraded"."""
        ...

    @property
    def generation(self) -> int: ...

    @property
    def events(self) -> Mapping[str, int]:
        """Event kind -> count."""
        ...

    @property
    def problems(self) -> int: ...

    @property
    def source_ages(self) -> Mapping[str, float]:
        """Seconds since each source last answered; without those that never did."""
        ...

    @property
    def repairs(self) -> Mapping[RepairKey, Histogram]:
        """Durations of policies in the reconciler, in milliseconds, by what they claimed."""
        ...

    @property
    def write_durations(self) -> Mapping[tuple[str, str], Histogram]:
        """Durations of kernel writes, in milliseconds, by type of the updater and status."""
        ...

    @property
    def kubelet_durations(self) -> Mapping[tuple[str, str], Histogram]:
        """Durations of requests to kubelet by path and status code, in seconds."""
        ...

    @property
    def reconcile_stats(self) -> ReconcileStats | None: ...

    @property
    def values(self) -> Mapping[tuple[Resource, ValueState], int]:
        """(resource, state) -> count of values."""
        ...

    @property
    def of_processes(self) -> Iterable[Standing]:
        """The states of the values of `container_metrics.OF_PROCESSES`."""
        ...

    @property
    def cookie_changes(self) -> Mapping[CookieKey, int]: ...

    @property
    def subjects(self) -> Iterable[Subject]: ...

    @property
    def gauges(self) -> Iterable[Gauge]:
        """The gauges of strategies and collectors, and of the prediction."""
        ...

    @property
    def external_gauges(self) -> Iterable[Gauge]:
        """The gauges of reports for other programs of the cluster."""
        ...

    @property
    def allocatable(self) -> Mapping[str, int] | None:
        """What the Node object offers, by resource; None without the object."""
        ...

    @property
    def strategies(self) -> Iterable[StrategyStatus]: ...

    @property
    def measuring(self) -> SamplerStatus | None:
        """None where nothing is measured."""
        ...

    @property
    def evictions(self) -> tuple[int, Mapping[tuple[str, str], int]]:
        """Evicted pods since the start, and by (namespace, name) of the last minutes."""
        ...

    @property
    def share_pools(self) -> tuple[CpuSet, CpuSet] | None:
        """CPUs of the share pool and of the best-effort pool; None without a topology."""
        ...

    @property
    def per_cpu_metric(self) -> bool: ...

    @property
    def loop_lag_s(self) -> float: ...


class Registries:
    """The internal, the external and the merged registry, for upstream's three paths."""

    def __init__(self, readings: Readings) -> None:
        self.internal = CollectorRegistry(auto_describe=False)
        self.external = CollectorRegistry(auto_describe=False)
        self.merged = CollectorRegistry(auto_describe=False)
        for registry in (self.internal, self.merged):
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            registry.register(_Internal(readings))
        for registry in (self.external, self.merged):
            registry.register(_External(readings))

    @staticmethod
    def text(registry: CollectorRegistry) -> bytes:
        """Return the exposition of a registry."""
        return generate_latest(registry)


class _Internal(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        node = readings.node_name
        start = GaugeMetricFamily(
            "koordlet_start_time", "When the daemon started, in seconds.", labels=["node"]
        )
        start.add_metric([node], readings.started_at)
        yield start
        yield from _hook_durations(node, readings.timings)
        yield from _gauges(readings)
        if readings.nri is not None:
            yield from _nri(readings.nri)
        yield from _repair(readings)
        yield from _pools(readings)
        yield from container_metrics.of_processes(node, readings.of_processes)
        yield from container_metrics.of_cookies(node, readings.cookie_changes)
        yield from strategy_metrics.of_gauges(node, readings.gauges)
        yield from strategy_metrics.of_strategies(readings.strategies)
        yield from strategy_metrics.of_collectors(readings.measuring)
        yield from strategy_metrics.of_evictions(node, *readings.evictions)


class _External(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        yield from container_metrics.of_amounts(readings.node_name, readings.subjects)
        if (allocatable := readings.allocatable) is not None:
            yield from node_metrics.of_allocatable(readings.node_name, allocatable)
        yield from strategy_metrics.of_gauges(readings.node_name, readings.external_gauges)


def _hook_durations(
    node: str, timings: Iterable[Mapping[TimingKey, Histogram]]
) -> Iterator[Metric]:
    hooks = HistogramMetricFamily(
        "koordlet_runtime_hook_invoked_duration_milliseconds",
        "Time that a policy took in a hook.",
        labels=["node", "hook", "stage", "status"],
    )
    for table in timings:
        for (policy, stage, succeeded), histogram in tuple(table.items()):
            if stage == Stage.RECONCILE:
                continue
            status = "succeeded" if succeeded else "failed"
            hooks.add_metric([node, policy, stage, status], histogram.cumulative(), histogram.sum)
    yield hooks


def _repair(readings: Readings) -> Iterator[Metric]:
    node = readings.node_name
    invoked = HistogramMetricFamily(
        "koordlet_runtime_hook_reconciler_invoked_duration_milliseconds",
        "Time that a policy took in the reconciler.",
        labels=["node", "level", "resource_type", "status"],
    )
    for (level, resource, succeeded), histogram in tuple(readings.repairs.items()):
        status = "succeeded" if succeeded else "failed"
        invoked.add_metric([node, level, resource, status], histogram.cumulative(), histogram.sum)
    yield invoked
    writes = HistogramMetricFamily(
        "koordlet_resource_update_duration_milliseconds",
        "Time that a kernel write took.",
        labels=["type", "status"],
    )
    for (kind, status), histogram in tuple(readings.write_durations.items()):
        writes.add_metric([kind, status], histogram.cumulative(), histogram.sum)
    yield writes
    requests = HistogramMetricFamily(
        "koordlet_kubelet_request_duration_seconds",
        "Time that a request to kubelet took.",
        labels=["verb", "path", "code"],
    )
    for (path, code), histogram in tuple(readings.kubelet_durations.items()):
        requests.add_metric(["get", path, code], histogram.cumulative(), histogram.sum)
    yield requests
    values = GaugeMetricFamily(
        "koordlet_values", "Desired kernel values by state.", labels=["resource", "state"]
    )
    for (of, state), count in readings.values.items():
        values.add_metric([of.value, state.value], count)
    yield values
    stats = readings.reconcile_stats
    if stats is None:
        return
    for name, text, value in (
        ("passes", "Reconcile passes.", stats.passes),
        ("pod_updates", "Updates of single pods between passes.", stats.pod_updates),
        (
            "standing_updates",
            "Updates of single subjects whose standing claims changed, between passes.",
            stats.standing_updates,
        ),
        ("crashed_passes", "Reconcile passes that failed by a defect.", stats.crashed_passes),
        ("writes", "Kernel writes.", stats.written),
        ("refused_writes", "Kernel writes that were refused.", stats.failed),
        ("restored", "Original values restored.", stats.restored),
        ("foreign_changes", "Writes by others to managed files.", stats.foreign_changes),
    ):
        yield CounterMetricFamily(f"koordlet_reconcile_{name}", text, value=float(value))
    for name, text, level_ in (
        ("last_cpu_milliseconds", "Processor time of the last pass.", stats.last.cpu_ms),
        ("last_finished_time", "When the last pass ended, in seconds.", stats.last_finished_at),
        ("journal_records", "Original values in the journal.", stats.journal_records),
    ):
        yield GaugeMetricFamily(f"koordlet_reconcile_{name}", text, value=float(level_))
    yield GaugeMetricFamily(
        "koordlet_journal_failed",
        "1 while originals cannot be recorded, so that no kernel file is written.",
        value=1.0 if stats.journal_error else 0.0,
    )


def _pools(readings: Readings) -> Iterator[Metric]:
    pools = readings.share_pools
    if pools is None:
        return
    node = readings.node_name
    for name, cpus in zip(("share_pool", "be_share_pool"), pools, strict=True):
        cores = GaugeMetricFamily(
            f"koordlet_cpuset_{name}_cpu_cores", "CPUs of the pool.", labels=["node"]
        )
        cores.add_metric([node], len(cpus))
        yield cores
        if readings.per_cpu_metric:
            info = GaugeMetricFamily(
                f"koordlet_cpuset_{name}_info",
                "1 for each CPU of the pool.",
                labels=["node", "cpu"],
            )
            for cpu in cpus:
                info.add_metric([node, str(cpu)], 1)
            yield info


def _gauges(readings: Readings) -> Iterator[Metric]:
    yield GaugeMetricFamily("koordlet_pods", "Pods that the runtime reported.", value=readings.pods)
    yield GaugeMetricFamily("koordlet_containers", "Live containers.", value=readings.containers)
    yield GaugeMetricFamily(
        "koordlet_containers_unprotected",
        "Live containers that no hook saw at creation, or that lack what only creation sets.",
        value=readings.unprotected,
    )
    yield GaugeMetricFamily(
        "koordlet_event_loop_lag_seconds",
        "Delay of the event loop when it was last measured.",
        value=readings.loop_lag_s,
    )
    yield GaugeMetricFamily(
        "koordlet_engine_generation", "Counts the rebuilds of the rules.", value=readings.generation
    )
    yield GaugeMetricFamily(
        "koordlet_objects_problems",
        "Files, objects and fields that could not be used.",
        value=readings.problems,
    )
    ages = GaugeMetricFamily(
        "koordlet_source_age_seconds", "Since the source last answered.", labels=["source"]
    )
    for source, age in readings.source_ages.items():
        ages.add_metric([source], age)
    yield ages
    policies = GaugeMetricFamily(
        "koordlet_policy_state", "1 for the state that a policy is in.", labels=["policy", "state"]
    )
    for policy, state in readings.policies.items():
        policies.add_metric([policy, state], 1)
    yield policies
    events = CounterMetricFamily("koordlet_events", "Events by kind.", labels=["kind"])
    for kind, count in readings.events.items():
        events.add_metric([kind], count)
    yield events


def _nri(nri: Statistics) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "koordlet_nri_state", "1 for the state of the NRI connection.", labels=["state"]
    )
    for each in State:
        state.add_metric([each.value], 1 if nri.state is each else 0)
    yield state
    for name, text, value in (
        ("connected_seconds", "Time with a synchronized connection.", nri.connected_s),
        ("unprotected_seconds", "Time in which no container was adjusted.", nri.unprotected_s),
        ("connections", "Connections made.", nri.connections),
        ("dials", "Connections tried.", nri.dials),
        ("disconnections", "Connections lost.", nri.disconnections),
        ("synchronizations", "Full states received.", nri.synchronizations),
        (
            "truncated_synchronizations",
            "Answers to a full state that left updates to the reconciler.",
            nri.truncated_synchronizations,
        ),
        ("adjustments", "Containers adjusted at creation.", nri.adjustments),
        ("updates", "Container updates in replies.", nri.updates),
        ("unusable_values", "Decided values that no reply could hold.", nri.unusable_values),
        ("refused", "CRI calls refused on purpose.", nri.refused),
        ("handler_faults", "Defects of the daemon in hooks.", nri.handler_faults),
        ("created_while_away", "Containers created without us.", nri.created_while_away),
    ):
        yield CounterMetricFamily(f"koordlet_nri_{name}", text, value=float(value))
    missed = CounterMetricFamily(
        "koordlet_nri_missed_adjustments",
        "Adjustments that the runtime did not get.",
        labels=["reason"],
    )
    for reason, count in tuple(nri.missed.items()):
        missed.add_metric([reason.value], count)
    yield missed
    latency = HistogramMetricFamily(
        "koordlet_nri_hook_duration_seconds",
        "From the arrival of a request to its reply.",
        labels=["method"],
    )
    for method, histogram in tuple(nri.hook_latency.items()):
        latency.add_metric([method], histogram.cumulative(), histogram.sum)
    yield latency
