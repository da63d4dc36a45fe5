"""A simulated node that is measured round by round, on the simulated kernel's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from koordlet.measurement.collecting import (
    Collector,
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Targets,
)
from koordlet.measurement.collectors.best_effort import BestEffortCollector
from koordlet.measurement.collectors.cgroups import PodCollector
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.collectors.system import SystemCollector, SystemNumaCollector
from koordlet.measurement.kernel_files import HostFiles
from koordlet.measurement.sampler import Sampler
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from linux.cgroup_paths import Layout
from linux.discovery import discover
from tests.simulated import Kubelet, Pod, Profile, SimulatedKernel

GIB = 1 << 30


def all_collectors(cpus: int) -> list[Collector]:
    return [
        NodeCollector(cpus),
        PodCollector(cpus),
        HostAppCollector(cpus),
        BestEffortCollector(cpus),
        SystemCollector(),
        SystemNumaCollector(),
    ]


@dataclass
class SimulatedNode:
    """A machine with a kubelet, and a sampler whose targets are the kubelet's pods."""

    profile: Profile
    kernel: SimulatedKernel = field(init=False)
    kubelet: Kubelet = field(init=False)
    layout: Layout = field(init=False)
    sampler: Sampler = field(init=False)
    batch_cpu_milli: dict[str, int] = field(default_factory=dict)
    """uid -> batch-cpu request, of the pods with the label BE."""

    def __post_init__(self) -> None:
        self.kernel = SimulatedKernel(self.profile)
        self.kernel.clock.advance(1000)
        self.kubelet = Kubelet(self.kernel)
        self.layout = discover(self.kernel)
        self.targets = Targets(self.layout)
        self.host_apps: tuple[HostAppTarget, ...] = ()
        self.sampler = Sampler(
            Store(),
            all_collectors(self.cpus),
            HostFiles(self.kernel),
            lambda: self.targets,
            clock=lambda: self.kernel.clock.now,
        )

    @property
    def cpus(self) -> int:
        return self.kernel.possible_cpus

    def retarget(self) -> None:
        """Publish the pods as they are now."""
        self.targets = Targets(
            self.layout, tuple(map(self._target, self.kubelet.pods.values())), self.host_apps
        )

    def _target(self, pod: Pod) -> PodTarget:
        return PodTarget(
            uid=pod.uid,
            cgroup=pod.cgroup,
            containers=tuple(ContainerTarget(one.id, one.cgroup) for one in pod.containers),
            best_effort=pod.uid in self.batch_cpu_milli,
            batch_cpu_request_milli=self.batch_cpu_milli.get(pod.uid, 0),
        )

    def round(self, seconds: float = 1.0) -> None:
        """Let time pass, then measure."""
        self.kernel.clock.advance(seconds)
        self.sampler.round(self.kernel.clock.now)

    def latest(self, metric: Metric, of: str = "", *, within_s: float = 0.5) -> float | None:
        """The sample of the last round."""
        view = self.sampler.store.view(self.kernel.clock.now)
        return view.latest(Series(metric, of), within_s=within_s)

    def errors(self) -> Sequence[str]:
        """What collectors complain about."""
        return [
            f"{one.name}: {one.error}"
            for one in self.sampler.status(self.kernel.clock.now).collectors
            if one.error
        ]
