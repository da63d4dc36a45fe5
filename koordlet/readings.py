"""The daemon's numbers as `koordlet.metrics` reads them, when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hooks.subject import Subject
from koordlet.container_metrics import CookieKey, Standing
from koordlet.decider import RepairKey, TimingKey
from koordlet.executor.slots import State as ValueState
from koordlet.machine import TimedHost, WriteKey
from koordlet.reconciler import ReconcileStats
from linux.cpuset import CpuSet
from linux.resources import Resource
from nri_plugin.statistics import Statistics
from service.histogram import Histogram

if TYPE_CHECKING:
    from koordlet.daemon import Daemon


class DaemonReadings:
    """Implements `koordlet.metrics.Readings`. Belongs to the event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.node_name = daemon.node_name
        self.started_at = daemon.started_at

    @property
    def loop_lag_s(self) -> float:
        return self._daemon.loop_lag_s

    @property
    def nri(self) -> Statistics | None:
        return self._daemon.nri

    @property
    def timings(self) -> Iterable[Mapping[TimingKey, Histogram]]:
        return (self._daemon.hook_decider.timings, self._daemon.repair_decider.timings)

    @property
    def pods(self) -> int:
        return self._daemon.state.counts[0]

    @property
    def containers(self) -> int:
        return self._daemon.state.counts[1]

    @property
    def unprotected(self) -> int:
        return len(self._daemon.state.unprotected())

    @property
    def policies(self) -> Mapping[str, str]:
        return {name: state for name, (state, _) in self._daemon.rules.states().items()}

    @property
    def generation(self) -> int:
        return self._daemon.engine.generation

    @property
    def events(self) -> Mapping[str, int]:
        return self._daemon.events_log.totals

    @property
    def problems(self) -> int:
        return len(self._daemon.feeds.objects.problems)

    @property
    def repairs(self) -> Mapping[RepairKey, Histogram]:
        return self._daemon.repair_decider.repairs

    @property
    def write_durations(self) -> Mapping[WriteKey, Histogram]:
        return self._daemon.host.write_durations if isinstance(self._daemon.host, TimedHost) else {}

    @property
    def kubelet_durations(self) -> Mapping[str, Histogram]:
        kubelet = self._daemon.feeds.kubelet
        return kubelet.durations if kubelet is not None else {}

    @property
    def reconcile_stats(self) -> ReconcileStats | None:
        return self._daemon.reconciler.stats if self._daemon.reconciler is not None else None

    @property
    def values(self) -> Mapping[tuple[Resource, ValueState], int]:
        return self._daemon.values

    @property
    def of_processes(self) -> Iterable[Standing]:
        return self._daemon.of_processes

    @property
    def cookie_changes(self) -> Mapping[CookieKey, int]:
        return self._daemon.executor.cookie_changes if self._daemon.executor is not None else {}

    @property
    def subjects(self) -> Iterable[Subject]:
        return self._daemon.snapshot.subjects

    @property
    def share_pools(self) -> tuple[CpuSet, CpuSet] | None:
        topology = self._daemon.rules.inputs.topology
        if topology is None:
            return None
        return (
            CpuSet(cpu for pool in topology.shared_pools for cpu in pool.cpus),
            CpuSet(cpu for pool in topology.be_shared_pools for cpu in pool.cpus),
        )

    @property
    def per_cpu_metric(self) -> bool:
        return self._daemon.config.feature_gates.get("PerCPUMetric", False)
