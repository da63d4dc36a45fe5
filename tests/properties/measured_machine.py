"""Random lives of a node whose strategies measure it: loads rise and fall, samples are missing.

Adds to `node_machine` the product's collectors and strategies (`measured.py`) in place of steered
claims, and what disturbs them: rounds that are late or fail, counters that start again, groups that
vanish while they are read, a suspended machine, writes that the kernel refuses in the middle of a
step, daemons that end there. After each round, what a strategy claims is within its law's bounds;
at rest the kernel has it; at the end nothing is left.
"""

from __future__ import annotations

import errno
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from apis.cpuset import CpuSet
from hooks.claim import Claim, Op
from hooks.standing import Claims
from linux.resources import UNLIMITED, Resource
from tests.properties.cpus import NONE, CpuPlan, Cpus
from tests.properties.measured import LONGEST_TTL_S, Load, MeasuredNode
from tests.properties.node_machine import NodeMachine
from tests.properties.pods import BATCH_CONTAINERS, Kind
from tests.properties.twin import differences
from tests.simulated import Crash, Profile
from tests.simulated.cpu import CpuState

SUPPRESS, BURST, PRESSURE = "BECPUSuppress", "CPUBurst", "PressureSuppress"
_MIB = 1 << 20
_LEAST_QUOTA_US = 2000
_LEAST_CPUS = 2
_FLOOR_QUOTA_US = 100_000
_FLOOR_BYTES = 128 * _MIB
_MOST_BURST = 3.0
_MOST_GROWTH = 0.1
"""docs/qos.md: the least quota and CPUs of suppression, pressure control's floors, the largest
factor of a quota with the default of `cfsQuotaBurstPercent`, and the part of the node by which a
quota grows in a round."""
_READINGS = (
    "cpu.stat", "cpuacct.usage", "cpuacct.stat", "cpu.pressure", "memory.pressure", "io.pressure",
    "memory.current", "memory.usage_in_bytes", "memory.stat", "memory.events", "memory.peak",
    "memory.max_usage_in_bytes", "memory.numa_stat", "memory.events.local",
)  # fmt: skip
"""What the kernel counts of loads, which the twin has not."""


def _suppressing(policy: str, **fields: Any) -> dict[str, Any]:
    return {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressPolicy": policy, **fields}}


_BURSTING = {"cpuBurstStrategy": {"policy": "auto", "sharePoolThresholdPercent": 80}}
_EVICTING = {
    "evictEnabledPriorityThreshold": 9999,
    "cpuEvictThresholdPercent": 70,
    "cpuEvictBESatisfactionLowerPercent": 40,
    "cpuEvictBESatisfactionUpperPercent": 80,
    "cpuEvictTimeWindowSeconds": 3,
    "memoryEvictThresholdPercent": 20,
}
CONFIGURED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "CPU sets": _suppressing("cpuset"),
    "CPU sets, high": _suppressing("cpuset", cpuSuppressThresholdPercent=100),
    "CPU sets, at least half": _suppressing("cpuset", cpuSuppressMinPercent=50),
    "quota": _suppressing("cfsQuota"),
    "quota, at least a fifth": _suppressing("cfsQuota", cpuSuppressMinPercent=20),
    "burst": _BURSTING,
    "burst beside CPU sets": _BURSTING | _suppressing("cpuset"),
    "all, with evictions": _BURSTING | _suppressing("cfsQuota", **_EVICTING),
}


class MeasuredMachine(NodeMachine):
    """The rules of `NodeMachine`, and those of loads and of measuring."""

    node: MeasuredNode
    quota_us = 0
    """What suppression claimed in the round before; 0 for nothing."""

    def _node_of(self, profile: Profile, plan: CpuPlan) -> MeasuredNode:
        return MeasuredNode(profile, plan)

    # Loads

    @rule(
        number=st.integers(0, 9),
        cores=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 8.0]),
        throttled=st.sampled_from([0.0, 0.0, 0.04, 0.5, 1.0]),
        pressure=st.sampled_from([0.0, 0.0, 8.0, 20.0, 100.0]),
        waits_for=st.sampled_from(["cpu", "memory", "io"]),
        mib=st.sampled_from([0, 8, 150, 200]),
        seconds=st.integers(0, 6),
    )
    def a_load_changes(
        self,
        number: int,
        cores: float,
        throttled: float,
        pressure: float,
        waits_for: str,
        mib: int,
        seconds: int,
    ) -> None:
        container = self._container(number)
        if container is None:
            return
        loads = self.node.loads
        loads[container.here.id] = Load(cores, throttled, pressure, waits_for)
        self.node.kernel.use_memory(container.here.task, mib * _MIB)
        self._seconds(seconds)

    @rule(
        services=st.sampled_from([0.0, 0.2, 2.0]),
        waits_for=st.sampled_from(["cpu", "memory", ""]),
        batch=st.sampled_from([0.0, 0.5, 3.0]),
        mib=st.sampled_from([8, 200]),
        seconds=st.integers(3, 12),
    )
    def all_pods_work(
        self, services: float, waits_for: str, batch: float, mib: int, seconds: int
    ) -> None:
        """Services wait, best-effort pods take CPU and memory: what strategies are for."""
        for pod in self.node.pods:
            best_effort = _is_best_effort(pod.kind)
            for container in pod.containers:
                load = Load(batch if best_effort else services)
                if waits_for and not best_effort:
                    load = Load(services, pressure=60.0, waits_for=waits_for)
                self.node.loads[container.here.id] = load
                self.node.kernel.use_memory(container.here.task, mib * _MIB)
        self._seconds(seconds)

    @rule(number=st.integers(0, 9))
    def counters_start_again(self, number: int) -> None:
        container = self._container(number)
        if container is not None:
            container.here.task.cpu_seconds = 0.0
            group = self.node.kernel.group(container.here.cgroup)
            group.state(CpuState).periods = group.state(CpuState).throttled = 0
            self._seconds(2)

    # Measuring

    @rule(count=st.integers(1, 8))
    def seconds_pass(self, count: int) -> None:
        self._seconds(count)

    @rule(seconds=st.sampled_from([2.0, 5.0, 9.9, 10.1, 30.0, 3600.0]))
    def a_round_is_late(self, seconds: float) -> None:
        """Also after a machine was suspended."""
        self._second(seconds)
        self._seconds(2)

    @rule(
        error=st.sampled_from([errno.EIO, errno.ENODEV, errno.ENOENT]),
        path=st.sampled_from(["/proc/stat", "*cpu*", "*.pressure", "*memory*", "*"]),
        count=st.integers(1, 12),
    )
    def samples_are_missing(self, error: int, path: str, count: int) -> None:
        for _ in range(count):
            # Only what the round reads: a pass reads other files, or the same ones later.
            self.node.kernel.faults.fail("read", error, path=path, nth=0)
            self.node.measure()
            self.node.kernel.faults.clear()
            self.node.act()
            self._check()

    @rule(number=st.integers(0, 9), nth=st.integers(1, 9))
    def a_container_vanishes_while_it_is_measured(self, number: int, nth: int) -> None:
        container = self._container(number)
        if container is None:
            return

        def vanish() -> None:
            if container in container.pod.containers:
                self.node.stop_container(container, times=0, late=False)

        self.node.kernel.faults.before("read", vanish, path="*cpu*", nth=nth)
        self._second()
        self.node.kernel.faults.clear()

    # Strategies

    @rule(name=st.sampled_from(sorted(CONFIGURED)), seconds=st.integers(0, 4))
    def the_strategies_are_configured(self, name: str, seconds: int) -> None:
        self.node.configure(CONFIGURED[name])
        self._seconds(seconds)

    @rule(on=st.booleans())
    def strategies_are_switched(self, on: bool) -> None:
        self.node.switch_strategies(on=on)
        if not on:
            assert not self.node.board.leases
            self._seconds(1)
            assert not self.node.board.leases

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0]))
    def the_strategies_stall(self, seconds: float) -> None:
        """Claims stay as long as they live, whatever the sampling thread does."""
        node = self.node
        before = node.board.leases
        node.pass_time(seconds)
        node.board.expire(node.now)
        alive = {name for name, lease in before.items() if lease.until > node.now}
        assert node.board.leases.keys() == alive

    @rule(
        nth=st.integers(1, 4),
        error=st.sampled_from([errno.EBUSY, errno.ENOSPC, errno.EIO, errno.EINVAL]),
    )
    def the_kernel_refuses_what_a_step_wants(self, nth: int, error: int) -> None:
        self.behind = True
        self.node.kernel.faults.fail("write", error, nth=nth)
        self._second()
        self.node.kernel.faults.clear()
        self.node.refusals.clear()

    @rule(nth=st.integers(1, 6))
    def the_daemon_is_killed_while_a_step_is_written(self, nth: int) -> None:
        self.behind = True
        self.node.kernel.faults.crash("write", nth=nth)
        try:
            self._second()
            self.node.kernel.faults.clear()
        except Crash:
            self.node.kernel.faults.clear()
            self.node.restart()

    def _seconds(self, count: int) -> None:
        for _ in range(count):
            self._second()

    def _second(self, seconds: float = 1.0) -> None:
        self.node.second(seconds)
        self._check()

    # What holds

    @invariant()
    def no_strategy_fails(self) -> None:
        if hasattr(self, "node"):
            broken = [each for each in self.node.runner.statuses if each.failures]
            assert not broken, broken

    @invariant()
    def claims_end_in_time(self) -> None:
        if hasattr(self, "node"):
            for name, lease in self.node.board.leases.items():
                assert lease.until <= self.node.now + LONGEST_TTL_S, name

    def _check(self) -> None:
        """The claims after a round."""
        self._suppression_is_within_its_bounds()
        self._squeezes_stay_above_their_floors()
        self._bursts_stay_below_their_ceiling()
        self._victims_are_pods_of_the_node()

    def _claimed(self, strategy: str) -> dict[str, Claims]:
        """The claims of the step of this moment, by subject."""
        lease = self.node.board.lease(strategy)
        status = next(each for each in self.node.runner.statuses if each.name == strategy)
        stepped = status.stepped_at == self.node.now and not status.problem
        return dict(lease.standing.by_subject) if lease and not lease.resumed and stepped else {}

    def _suppression_is_within_its_bounds(self) -> None:
        node = self.node
        if not any(
            claim.resource is Resource.CPU_CFS_QUOTA
            for claim in self._claimed(SUPPRESS).get("kubeqos/BestEffort", ())
        ):
            self.quota_us = 0
        status = next(each for each in node.runner.statuses if each.name == SUPPRESS)
        if not status.summary.startswith("best-effort pods"):
            return  # without measurements the last claims stand, of other bounds perhaps
        slo = node.inputs.slo.resource_used_threshold_with_be
        percent = max(slo.cpu_suppress_threshold_percent, slo.cpu_suppress_min_percent or 0)
        for claim in self._claimed(SUPPRESS).get("kubeqos/BestEffort", ()):
            if claim.resource is Resource.CPU_CFS_QUOTA:
                most = max(node.cpu_milli * percent // 100 * 100, _LEAST_QUOTA_US)
                assert isinstance(claim.value, int)
                # A change of 1 % of the node is left out.
                assert _LEAST_QUOTA_US <= claim.value <= most + node.cpu_milli, claim
                before, self.quota_us = self.quota_us, claim.value
                grown = claim.value - before if before else 0
                assert grown <= _MOST_GROWTH * node.cpu_milli * 100, (before, claim)
            elif claim.op is Op.WITHIN and status.summary.startswith("best-effort pods on"):
                self._cpus_are_free(claim, percent)

    def _cpus_are_free(self, claim: Claim, percent: int) -> None:
        node = self.node
        assert isinstance(claim.value, CpuSet)
        cpus = frozenset(claim.value)
        exclusive, shared = self._owned("LSE") | node.pools.system, self._owned("LSR")
        free = node.online - exclusive
        assert cpus <= free, claim
        assert min(_LEAST_CPUS, len(free)) <= len(cpus) or node.pools.static, claim
        # The amount rounded up to a CPU, and one CPU of noise.
        most = max(-(-node.cpu_milli * percent // 100_000), _LEAST_CPUS) + 1
        assert len(cpus) <= most, claim
        if not node.pools.static:
            assert len(cpus & shared) <= len(cpus) * len(shared & free) // len(free), claim

    def _owned(self, qos: str) -> Cpus:
        """The CPUs of the pods of a class that the daemon knows."""
        known = self.node.known.values()
        return NONE.union(*(cpus for kind, cpus in known if kind.qos == qos))

    def _squeezes_stay_above_their_floors(self) -> None:
        for key, claims in self._claimed(PRESSURE).items():
            for claim in claims:
                if claim.op is not Op.WITHIN:
                    continue
                assert isinstance(claim.value, int)
                if claim.resource is Resource.CPU_CFS_QUOTA:
                    assert key == "kubeqos/BestEffort" and claim.value >= _FLOOR_QUOTA_US, claim
                else:
                    kind, _ = self.node.known[key.removeprefix("pod/")]
                    assert _is_best_effort(kind), claim
                    requested = len(BATCH_CONTAINERS) * kind.batch_bytes
                    assert claim.value >= max(_FLOOR_BYTES, requested), claim

    def _bursts_stay_below_their_ceiling(self) -> None:
        for key, claims in self._claimed(BURST).items():
            for claim in claims:
                if claim.op is Op.MULTIPLY:
                    assert 1.0 < claim.factor <= _MOST_BURST + 1e-9, (key, claim)

    def _victims_are_pods_of_the_node(self) -> None:
        known = self.node.known
        for short in self.node.outcome.shortages:
            assert short.needed > 0, short
            victims = [each.pod.uid for each in short.victims]
            assert len(victims) == len(set(victims)) and set(victims) <= known.keys(), short
            if short.gate.startswith("BE"):
                kinds = [known[uid][0] for uid in victims]
                assert all(_is_best_effort(kind) for kind in kinds), short

    def _settled(self) -> None:
        super()._settled()
        self._seconds(3)  # two rounds have rates again, and one is acted on
        self._the_kernel_has_what_is_claimed()

    def _the_kernel_has_what_is_claimed(self) -> None:
        node = self.node
        root = node.board.standing.by_subject.get("kubeqos/BestEffort", ())
        bounds = [
            claim.value
            for claim in root
            if claim.resource is Resource.CPU_CFS_QUOTA
            and isinstance(claim.value, int)
            and claim.value != UNLIMITED
        ]
        name = "cpu.cfs_quota_us" if node.profile.cgroup == 1 else "cpu.max"
        quota = node.text(node.kubelet.qos_dir("BestEffort"), name).split()[0]
        assert quota in ([str(min(bounds))] if bounds else ["-1", "max"]), (quota, root)
        exclusive = self._owned("LSE") if "BECPUSuppress" in node.board.leases else NONE
        narrowed = any(claim.resource is Resource.CPUSET_CPUS for claim in root)
        for pod in node.pods:
            for container in pod.containers:
                if narrowed and pod.kind.kube_qos == "BestEffort" and not pod.cpus:
                    found = node.kernel_cpus(container.here.cgroup)
                    assert not found & exclusive, (pod.name, found)

    def _differences(self) -> list[str]:
        found = differences(self.node)
        note(f"{len(found)} differences with those of the loads")
        return [each for each in found if _file_of(each) not in _READINGS]


def _is_best_effort(kind: Kind) -> bool:
    return kind.qos == "BE" or kind.kube_qos == "BestEffort"


def _file_of(difference: str) -> str:
    """The name of the file that differs."""
    return difference.partition(":")[0].rpartition("/")[2]
