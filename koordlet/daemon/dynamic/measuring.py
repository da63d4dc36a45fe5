"""The collectors of this daemon, and the sampling thread around them.

With `measuring.enabled: false` there is neither, and no strategy runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from apis.qos import QoSClass
from hooks.facts import Settings
from hooks.subject import HostAppSubject
from koordlet.configuration.config import Config
from koordlet.configuration.gates import GATES
from koordlet.daemon.dynamic.on_node import Converted
from koordlet.exposition.collector_metrics import Latest
from koordlet.measurement.accelerators.nvml import Answer
from koordlet.measurement.collecting import (
    Collector,
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Targets,
)
from koordlet.measurement.collectors.best_effort import BestEffortCollector
from koordlet.measurement.collectors.cgroups import PodCollector
from koordlet.measurement.collectors.cold_memory import ColdMemoryCollector
from koordlet.measurement.collectors.cpi import CpiCollector, local_counters
from koordlet.measurement.collectors.disks import DiskCollector, FileSystemCollector, local_space
from koordlet.measurement.collectors.gpu import GpuCollector
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.network import NetworkCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.collectors.psi import PressureCollector
from koordlet.measurement.collectors.rdt import ResctrlCollector
from koordlet.measurement.collectors.system import SystemCollector, SystemNumaCollector
from koordlet.measurement.kernel_files import HostFiles, KernelFiles, LocalFiles
from koordlet.measurement.sampler import Sampler, SavedFile
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from koordlet.measurement.store import Store, View
from koordlet.qos.strategies.candidates import batch_cpu_request
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost

SAVED: Final = "measurements"
"""The file of the samples, in the run directory."""


def sampler(
    config: Config,
    host: Host,
    *,
    cpus: int,
    boot: str,
    targets: Callable[[], Targets],
    settings: Callable[[], Settings],
    step: Callable[[View], None],
) -> Sampler:
    """Return the sampling thread, not started.

    cpus: of the machine. boot: the id of this boot. targets, settings: return the newest values.
    step: called after each round with the measurements, in the sampling thread.
    """
    store = Store()
    here: Callable[[str], str] = host.here if isinstance(host, LocalHost) else str
    files: KernelFiles = LocalFiles(here) if isinstance(host, LocalHost) else HostFiles(host)
    return Sampler(
        store=store,
        collectors=collectors(config, host, here, cpus),
        files=files,
        targets=targets,
        enabled=lambda collector: enabled(collector, config, settings()),
        after_round=step,
        saved_file=SavedFile(f"{config.run_dir}/{SAVED}", boot),
        tick_s=float(config.measuring.interval),
    )


def collectors(
    config: Config, host: Host, here: Callable[[str], str], cpus: int
) -> Sequence[Collector]:
    """Return all collectors, in the order of a round: some use the samples of those before them.

    here: maps a path of the node to a path of this process. cpus: of the machine.
    """
    measuring = config.measuring
    each_s = float(measuring.interval)
    return (
        NodeCollector(cpus, interval_s=each_s),
        PodCollector(cpus, interval_s=each_s),
        HostAppCollector(cpus, interval_s=each_s),
        BestEffortCollector(cpus, interval_s=each_s),
        SystemCollector(interval_s=each_s),
        SystemNumaCollector(),
        DiskCollector(host, interval_s=float(measuring.storage_interval)),
        FileSystemCollector(host, lambda path: local_space(here(path))),
        NetworkCollector(host, interval_s=each_s),
        PressureCollector(interval_s=float(measuring.psi_interval)),
        CpiCollector(
            local_counters(here),
            cycle_s=float(measuring.cpi_interval),
            window_s=float(measuring.cpi_window),
        ),
        ColdMemoryCollector(host, interval_s=float(measuring.cold_page_interval)),
        ResctrlCollector(host, interval_s=float(measuring.resctrl_interval)),
        GpuCollector(host, interval_s=each_s),
    )


def enabled(collector: Collector, config: Config, settings: Settings) -> bool:
    """Return whether a collector shall run now: its gate, and the field beside it, are on."""
    if collector.name == ResctrlCollector.name and not config.measuring.resctrl:
        return False
    gate = collector.gate
    return gate is None or settings.gate(gate, default=GATES[gate].default)


_OWN_INTERVALS: Final = {
    Metric.NODE_PSI: PressureCollector.name,
    Metric.POD_PSI: PressureCollector.name,
    Metric.CONTAINER_PSI: PressureCollector.name,
    Metric.RESCTRL_LLC: ResctrlCollector.name,
    Metric.NODE_DISK_READ: DiskCollector.name,
    Metric.NODE_DISK_WRITE: DiskCollector.name,
    Metric.NODE_DISK_BUSY: DiskCollector.name,
    Metric.NODE_FILESYSTEM_SIZE: FileSystemCollector.name,
    Metric.NODE_FILESYSTEM_USED: FileSystemCollector.name,
    Metric.NODE_NETWORK_RECEIVE: NetworkCollector.name,
    Metric.NODE_NETWORK_SEND: NetworkCollector.name,
    Metric.NODE_GPU_CORE: GpuCollector.name,
    Metric.NODE_GPU_MEMORY: GpuCollector.name,
}
"""The collector of each metric that is shown, where a sample is one of its intervals old."""


def latest_of(sampler: Sampler, config: Config, now: float) -> Latest:
    """Return what gives the newest samples of a metric, as far as they count as the latest."""
    intervals = {each.name: each.interval_s for each in sampler.collectors}
    # A container is counted once in a cycle, and not in each window.
    own_s = {metric: intervals[name] for metric, name in _OWN_INTERVALS.items()}
    own_s[Metric.CONTAINER_CPI] = float(config.measuring.cpi_interval)
    view = sampler.store.view(now)
    return lambda metric: view.latest_of(metric, within_s=LATEST_PERIODS * own_s[metric])


def bandwidth_counts(sampler: Sampler) -> Mapping[Series, int]:
    """Return the bytes that the classes' control groups have moved since they exist."""
    for collector in sampler.collectors:
        if isinstance(collector, ResctrlCollector):
            return collector.counts
    return {}


_REPORTED: Final = (
    PodCollector.name,
    HostAppCollector.name,
    SystemNumaCollector.name,
    ColdMemoryCollector.name,
    GpuCollector.name,
)
"""The collectors beside the node's and the system's whose means the NodeMetric has."""
_REPORT_SPARE_S: Final = 30.0
"""Kept beyond a report's window. Chosen: a report that is built late misses nothing."""


def keep_for_reports(sampler: Sampler, window_s: float) -> None:
    """Keep the samples of pods and others as long as reports average them. Any thread.

    window_s: what the NodeMetric's spec asks for; collectors keep their own retention at least.
    """
    for collector in sampler.collectors:
        if collector.name in _REPORTED:
            retention_s = max(collector.retention_s, window_s + _REPORT_SPARE_S)
            sampler.store.keep(collector.name, max(retention_s, collector.interval_s))


def gpu_answer(sampler: Sampler | None) -> Answer | None:
    """Return what NVML answered last; None without a GPU, or while nothing is measured."""
    for collector in () if sampler is None else sampler.collectors:
        if isinstance(collector, GpuCollector):
            return collector.latest
    return None


class NodesTargets:
    """Converts what the event loop published. Belongs to the sampling thread."""

    def __init__(self) -> None:
        self._made_of: tuple[object, ...] = ()
        self._targets = Targets()
        self._pods = Converted(pod_target)

    def of(
        self,
        layout: Layout | None,
        views: Collection[PodView],
        host_apps: Sequence[HostAppSubject],
    ) -> Targets:
        """Return what is measured; the same value for the same arguments."""
        made_of = (layout, views, host_apps)
        if len(self._made_of) != 3 or any(
            one is not other for one, other in zip(made_of, self._made_of, strict=True)
        ):
            self._made_of = made_of
            self._targets = Targets(
                layout=layout,
                pods=self._pods.of(views),
                host_apps=tuple(HostAppTarget(each.name, each.cgroup) for each in host_apps),
            )
        return self._targets


def pod_target(view: PodView) -> PodTarget:
    """Return what is measured of a pod."""
    pod = view.pod
    return PodTarget(
        uid=pod.uid,
        cgroup=pod.cgroup,
        containers=tuple(
            ContainerTarget(each.id, each.cgroup) for each in view.started if each.cgroup
        ),
        best_effort=pod.qos is QoSClass.BE,
        batch_cpu_request_milli=0 if pod.ended else batch_cpu_request(pod),
    )
