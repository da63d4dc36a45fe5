"""The daemon's numbers, as `koordlet.exposition.metrics` reads them at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from apis.cpuset import CpuSet
from hooks.stage import RepairKey, TimingKey
from hooks.state import State as ValueState
from hooks.subject import Subject
from koordlet.daemon.parts import Parts
from koordlet.exposition.container_metrics import CookieKey, Standing
from koordlet.exposition.network_metrics import of_network
from koordlet.exposition.node_metrics import of_usage
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.measurement.sampler import SamplerStatus
from koordlet.measurement.series import LATEST_PERIODS
from koordlet.node.machine import TimedHost
from koordlet.qos.runner import StrategyStatus
from koordlet.reconciler.reports import ReconcileStats
from linux.resources import Resource
from nri_plugin.statistics import Statistics
from service.histogram import Histogram


class DaemonReadings:
    """Implements `koordlet.exposition.metrics.Readings`. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.node_name = parts.node_name
        self.started_at = parts.started_at

    @property
    def loop_lag_s(self) -> float:
        return self._parts.health.loop_lag_s

    @property
    def nri(self) -> Statistics | None:
        return self._parts.nri.statistics

    @property
    def timings(self) -> Iterable[Mapping[TimingKey, Histogram]]:
        self._parts.after_reply.catch_up()  # hooks are counted a moment after their replies
        return (self._parts.hook_decider.timings, self._parts.repair_decider.timings)

    @property
    def pods(self) -> int:
        return self._parts.state.counts[0]

    @property
    def containers(self) -> int:
        return self._parts.state.counts[1]

    @property
    def unprotected(self) -> int:
        return len(self._parts.state.unprotected())

    @property
    def policies(self) -> Mapping[str, str]:
        return {name: state for name, (state, _) in self._parts.rules.states().items()}

    @property
    def generation(self) -> int:
        return self._parts.engine.generation

    @property
    def events(self) -> Mapping[str, int]:
        return self._parts.events.totals

    @property
    def problems(self) -> int:
        return len(self._parts.feeds.objects.problems)

    @property
    def source_ages(self) -> Mapping[str, float]:
        now = time.monotonic()
        return {
            each.name: now - each.answered_at
            for each in self._parts.feeds.statuses
            if each.answered_at is not None
        }

    @property
    def repairs(self) -> Mapping[RepairKey, Histogram]:
        return self._parts.repair_decider.repairs

    @property
    def write_durations(self) -> Mapping[tuple[str, str], Histogram]:
        host = self._parts.host
        return host.write_durations if isinstance(host, TimedHost) else {}

    @property
    def kubelet_durations(self) -> Mapping[tuple[str, str], Histogram]:
        kubelet = self._parts.feeds.kubelet
        return kubelet.durations if kubelet is not None else {}

    @property
    def reconcile_stats(self) -> ReconcileStats | None:
        reconciler = self._parts.passes.reconciler
        return None if reconciler is None else reconciler.stats

    @property
    def values(self) -> Mapping[tuple[Resource, ValueState], int]:
        return self._parts.passes.values

    @property
    def of_processes(self) -> Iterable[Standing]:
        return self._parts.passes.of_processes

    @property
    def cookie_changes(self) -> Mapping[CookieKey, int]:
        executor = self._parts.passes.executor
        return {} if executor is None else executor.cookie_changes

    @property
    def subjects(self) -> Iterable[Subject]:
        return self._parts.passes.snapshot.subjects

    @property
    def gauges(self) -> Iterable[Gauge]:
        of_strategies = self._parts.dynamics.runner.gauges(time.monotonic())
        parts = self._parts
        usage: Iterable[Gauge] = ()
        if (view := parts.measuring.view()) is not None:
            within_s = LATEST_PERIODS * float(parts.config.measuring.interval)
            usage = of_usage(
                lambda metric: view.latest_of(metric, within_s=within_s), parts.dynamics.host_apps
            )
        return [
            *of_strategies,
            *parts.reporting.gauges,
            *of_network(parts.network_qos.status),
            *usage,
        ]

    @property
    def allocatable(self) -> Mapping[str, int] | None:
        node = self._parts.feeds.objects.node
        return None if node is None else node.allocatable

    @property
    def external_gauges(self) -> Iterable[Gauge]:
        return self._parts.reporting.external_gauges

    @property
    def measuring(self) -> SamplerStatus | None:
        return self._parts.measuring.status()

    @property
    def strategies(self) -> Iterable[StrategyStatus]:
        return self._parts.dynamics.runner.statuses

    @property
    def evictions(self) -> tuple[int, Mapping[tuple[str, str], int]]:
        reports = self._parts.evictions.evictor.reports
        return reports.evictions, reports.details()

    @property
    def share_pools(self) -> tuple[CpuSet, CpuSet] | None:
        topology = self._parts.rules.inputs.topology
        if topology is None:
            return None
        return (
            CpuSet.union(pool.cpus for pool in topology.shared_pools),
            CpuSet.union(pool.cpus for pool in topology.be_shared_pools),
        )

    @property
    def per_cpu_metric(self) -> bool:
        return self._parts.config.feature_gates.get("PerCPUMetric", False)
