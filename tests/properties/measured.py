"""A node in memory whose strategies are the product's, and measure the simulated kernel.

Sampler, collectors, store, runner, board and the file of leases are connected as the daemon
connects them, without threads: a second of the node is one call. What containers use, how they are
throttled and how long they wait is the world's to say, as loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hooks.facts import Settings
from hooks.standing import Standing
from koordlet.daemon.dynamic.on_node import Converted, NodesTargets, node_amounts, pod_on_node
from koordlet.measurement.collecting import Collector, Targets
from koordlet.measurement.collectors.best_effort import BestEffortCollector
from koordlet.measurement.collectors.cgroups import PodCollector
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.collectors.psi import PressureCollector
from koordlet.measurement.collectors.rdt import ResctrlCollector
from koordlet.measurement.collectors.system import SystemCollector
from koordlet.measurement.kernel_files import HostFiles
from koordlet.measurement.sampler import Sampler
from koordlet.measurement.store import Store, View
from koordlet.node.hardware import Machine, read_machine
from koordlet.qos.lease_file import LeaseFile
from koordlet.qos.runner import NOTHING, Outcome, Runner
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.qos.strategy import Situation
from koordlet.state.merging import PodView
from tests.properties.cpus import CpuPlan, Cpus
from tests.properties.node import SHARED, OperatedNode
from tests.properties.pods import Kind, Running, RunningContainer
from tests.simulated import Profile
from tests.simulated.cpu import CpuState
from tests.simulated.small import Pressure

STRATEGY_GATES: Final = tuple(gate for each in STRATEGIES for gate in each.gates)
LONGEST_TTL_S: Final = max(each.ttl_s for each in STRATEGIES)
_LISTS_S: Final = 5.0
"""For how long the daemon's strategies wait for the first list of pods."""
_PERIODS_A_SECOND: Final = 10
_US_OF_PERCENT: Final = 10_000
"""Microseconds of waiting in a second, for each percent of the time."""


@dataclass
class Load:
    """What a container does. throttled: share of its periods. pressure: percent of the time that
    it waits, by resource."""

    cores: float = 0.0
    throttled: float = 0.0
    pressure: float = 0.0
    waits_for: str = "cpu"


class MeasuredNode(OperatedNode):
    """See the module."""

    strategies = tuple(each.name for each in STRATEGIES)

    def __init__(self, profile: Profile, plan: CpuPlan = SHARED) -> None:
        self.loads: dict[str, Load] = {}
        self.ever: dict[str, tuple[Kind, Cpus]] = {}
        """Every pod that ever was, by UID: the daemon may still know one that is gone."""
        self._policies: Mapping[str, Any] = {}
        self._configured: Mapping[str, Any] = {}
        self.outcome: Outcome = NOTHING
        super().__init__(profile, plan)

    @property
    def now(self) -> float:
        return self.kernel.clock.now

    def _start(self) -> None:
        self._leases = {}
        super()._start()
        self._started_at = self.now
        self._machine: Machine = read_machine(self.kernel)
        self._lease_file = LeaseFile(str(self.folder / "leases"), boot="b1")
        self.runner = Runner(
            STRATEGIES, self.board, self.events, intervals={}, clock=lambda: self.now
        )
        ttl_s = self.runner.times_to_live(self.inputs.settings)
        carried = self._lease_file.resumed(ttl_s, self.now, types=self.runner.kept_types)
        self.runner.resume(carried.states)
        self.board.resume(carried.leases)
        self._views: tuple[PodView, ...] = ()
        self._targets = NodesTargets()
        self._pods_on_node = Converted(partial(pod_on_node, listed=False))
        self._measured: View | None = None
        self._sampler = Sampler(
            store=Store(),
            collectors=self._collectors(),
            files=HostFiles(self.kernel),
            targets=self._newest_targets,
            after_round=self._after_round,
            clock=lambda: self.now,
        )

    def _collectors(self) -> tuple[Collector, ...]:
        cpus = self.profile.topology.cpus
        return (
            NodeCollector(cpus),
            PodCollector(cpus),
            HostAppCollector(cpus),
            BestEffortCollector(cpus),
            SystemCollector(),
            PressureCollector(interval_s=1.0),
            ResctrlCollector(self.kernel, interval_s=1.0),
        )

    def restart(self, *, torn: Mapping[str, bytes] | None = None, for_long: bool = False) -> None:
        if for_long:
            self.pass_time(2 * LONGEST_TTL_S)
        super().restart(torn=torn or {})

    # Time

    def second(self, seconds: float = 1.0) -> None:
        """Time passes, a round of measurements follows, and the strategies are stepped."""
        self.measure(seconds)
        self.act()

    def measure(self, seconds: float = 1.0) -> None:
        """The first half of a second: the round."""
        self.pass_time(seconds)
        self._measured = None
        self._sampler.round(self.now)

    def act(self) -> None:
        """The second half: the steps, and what they change in the kernel."""
        self.outcome = NOTHING
        if self._measured is not None:
            self._step(self._measured)
        self.board.expire(self.now)
        self._follow()

    def pass_time(self, seconds: float) -> None:
        """Pods run, and nothing measures them."""
        self.kernel.clock.advance(seconds)
        for pod in self.pods:
            for container in pod.containers:
                load = self.loads.get(container.here.id)
                if load is not None:
                    self._use(pod, container, load, seconds)

    def _use(self, pod: Running, container: RunningContainer, load: Load, seconds: float) -> None:
        container.here.task.cpu_seconds += load.cores * seconds
        periods = int(_PERIODS_A_SECOND * seconds)
        waited_us = int(load.pressure * _US_OF_PERCENT * seconds)
        for cgroup in (container.here.cgroup, pod.here.cgroup):
            group = self.kernel.group(cgroup)
            state = group.state(CpuState)
            state.periods += periods
            state.throttled += int(periods * load.throttled)
            *_, before = group.state(Pressure).some.get(load.waits_for, (0.0, 0.0, 0.0, 0))
            shown = (load.pressure,) * 3
            self.kernel.set_pressure(cgroup, load.waits_for, (*shown, before + waited_us))

    def _after_round(self, view: View) -> None:
        """Only notes the samples: what is raised here is logged and not seen by a test."""
        self._measured = view

    def _step(self, measured: View) -> None:
        if not self.state.complete and self.now - self._started_at < _LISTS_S:
            return
        situation = Situation(
            now=measured.now,
            wall=measured.now,
            inputs=self.inputs,
            node=node_amounts(self._machine, self.inputs.node),
            pods=self._pods_on_node.of(self._published()),
            host_apps=self.state.host_apps,
            measurements=measured,
        )
        self.outcome = self.runner.run(situation, lambda: self.inputs.settings)
        self._lease_file.keep(self.board.leases, self.runner.kept_states, self.now)

    def _published(self) -> tuple[PodView, ...]:
        views = tuple(self.state.pod_views())
        if views != self._views:
            self._views = views
        return self._views

    def _newest_targets(self) -> Targets:
        return self._targets.of(self.layout, self._published(), self.state.host_apps)

    # What strategies say

    def stand(self, strategy: str, standing: Standing) -> None:
        """Here the strategies are the product's: a second passes."""
        self.second()

    def end_leases(self) -> None:
        """The strategies stall for longer than any of their claims lives."""
        self.pass_time(LONGEST_TTL_S + 1)
        self.board.expire(self.now)
        assert not self.board.leases, self.board.leases
        self._follow()

    # What objects and settings say

    def configure(self, spec: Mapping[str, Any]) -> None:
        """Change the strategies' part of the NodeSLO."""
        self._configured = spec
        self.set_slo(self._policies)

    def set_slo(self, spec: Mapping[str, Any]) -> None:
        """Change the policies' part of the NodeSLO."""
        self._policies = spec
        super().set_slo({**spec, **self._configured})

    def set_gates(self, gates: Mapping[str, bool]) -> None:
        """Strategies run as long as any policy does."""
        super().set_gates({**gates, **dict.fromkeys(STRATEGY_GATES, any(gates.values()))})
        self.runner.settings_changed(self.inputs.settings)

    def switch_strategies(self, *, on: bool) -> None:
        before = self.inputs.settings.feature_gates
        self.change(
            settings=Settings(feature_gates={**before, **dict.fromkeys(STRATEGY_GATES, on)})
        )
        self.runner.settings_changed(self.inputs.settings)
        self._follow()

    def look_at_cpus(self) -> None:
        super().look_at_cpus()
        self._machine = read_machine(self.kernel)

    @property
    def online(self) -> Cpus:
        """The CPUs that the strategies count with."""
        there = frozenset(cpu.cpu for cpu in self._machine.cpus)
        pods_cpus = self.inputs.kernel.pods_cpus
        return there if pods_cpus is None else there & frozenset(pods_cpus)

    @property
    def cpu_milli(self) -> int:
        return self._machine.cpu_milli

    # What kubelet does

    def add_pod(self, kind: Kind, *, times: int = 1, late: bool = False) -> Running | None:
        pod = super().add_pod(kind, times=times, late=late)
        if pod is not None:
            self.ever[pod.here.uid] = kind, pod.cpus
        return pod

    @property
    def known(self) -> Mapping[str, tuple[Kind, Cpus]]:
        """Sort and CPUs of the pods that the daemon knows, by UID."""
        return {view.pod.uid: self.ever[view.pod.uid] for view in self.state.pod_views()}
