"""The collectors of this daemon: their order, intervals and switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hooks.facts import Settings
from koordlet.configuration.config import Config
from koordlet.configuration.gates import GATES
from koordlet.measurement.collecting import Collector
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
from koordlet.measurement.series import Metric
from linux.host import Host


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


def shown_intervals(collectors: Sequence[Collector], config: Config) -> Mapping[Metric, float]:
    """Return the seconds between two samples of each metric that is shown."""
    intervals = {each.name: each.interval_s for each in collectors}
    # A container is counted once in a cycle, and not in each window.
    return {metric: intervals[name] for metric, name in _OWN_INTERVALS.items()} | {
        Metric.CONTAINER_CPI: float(config.measuring.cpi_interval)
    }


REPORTED: Final = (
    PodCollector.name,
    HostAppCollector.name,
    SystemNumaCollector.name,
    ColdMemoryCollector.name,
    GpuCollector.name,
)
"""The collectors beside the node's and the system's whose means the NodeMetric has."""
