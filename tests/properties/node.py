"""A node in memory that runs the product's own parts, beside a twin that never had it.

`OperatedNode` acts as kubelet, runtime, scheduler and operator around a `Daemon`. Whatever they do
is done on the twin too, with kubelet's own values: what the node must look like when everything is
switched off again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from apis.cpuset import CpuSet
from hooks.decision import Decision
from hooks.observed import Container as ContainerMessage
from hooks.observed import ContainerState
from hooks.observed import Sandbox as SandboxMessage
from hooks.subject import ContainerSubject, Requested, SandboxSubject
from koordlet.reconciler.reports import PassReport
from koordlet.transports.nri_handler import NriHandler
from linux.resctrl import MOUNT as RESCTRL
from linux.resources import Resource
from nri_plugin.capabilities import runtime_profile
from tests.properties import host_apps
from tests.properties.answers import files_of
from tests.properties.cpus import PLANS, CpuManager, CpuPlan, Cpus, Pools
from tests.properties.daemon import BE_CPU_MANAGER, Daemon
from tests.properties.pods import (
    Kind,
    Running,
    RunningContainer,
    over,
    overlay,
    requested,
    told,
)
from tests.simulated import Kubelet, Profile, SimulatedKernel
from tests.simulated.cpuset import CpusetState, effective
from tests.simulated.kernel import UNDER_TEST, Write
from tests.simulated.kubelet import Limits
from tests.simulated.profiles import Runtime

SHARED = PLANS["shared"]
_RUNTIMES = {
    Runtime.CONTAINERD: ("containerd", "v2.1.0"),
    Runtime.CRIO: ("cri-o", "1.34.0"),
    Runtime.DOCKER: ("containerd", "v1.7.0"),
}
CONTAINERS = ("c0", "c1")
"""The containers of every pod; each may run or not."""
Event = Callable[[NriHandler], object]


class OperatedNode(Daemon):
    """See the module."""

    def __init__(self, profile: Profile, plan: CpuPlan = SHARED) -> None:
        self.profile = profile
        self.cpus = CpuManager(profile.topology, plan)
        self.pools = Pools()
        name, version = _RUNTIMES[profile.runtime]
        self.runtime = runtime_profile(name, version, cgroup_version=profile.cgroup)
        kernel, self.twin = SimulatedKernel(profile), SimulatedKernel(profile)
        self.kubelet, self.twin_kubelet = Kubelet(kernel), Kubelet(self.twin)
        self.pods: list[Running] = []
        self.apps: set[str] = set()
        self.late: list[Event] = []
        self.refusals: list[Write] = []
        self._made = 0
        super().__init__(kernel)
        kernel.on_write(self._watch)

    # What is told of CPUs

    def publish_topology(self) -> None:
        """Tell the share pools as they are now."""
        self.pools = self.cpus.pools()
        self.change(topology=self.pools.facts(self.profile.topology))

    def expected_cpus(self, pod: Running, pools: Pools) -> Cpus | None:
        """The CPUs that a pod's containers run on, from the world's own books; None: not ours.

        The rows of docs/policies.md, "CPUSetAllocator", once more and in other words.
        """
        gates = self.inputs.settings.feature_gates
        kind = pod.kind
        pools = pools.within(self.inputs.kernel.pods_cpus)
        if not gates["CPUSetAllocator"]:
            return None
        if pod.cpus:
            return pod.cpus
        batch = kind.qos == "BE"
        if kind.numa and (not batch or gates.get(BE_CPU_MANAGER)):
            own = (pools.be if batch else pools.ls).get(pod.node)
            if own:
                return own
        if kind.qos == "SYSTEM" and pools.system:
            return pools.system
        if kind.qos != "LS" and (kind.kube_qos == "BestEffort" or pools.static):
            return None
        return pools.together or None

    # Passes

    def settle(self) -> PassReport:
        """Let the daemon hear everything and finish; returns the last pass, which is quiet."""
        self.kernel.faults.clear()
        self.kernel.restart_program()
        self.look_at_cpus()
        self.deliver_late()
        self.synchronize()
        report = PassReport()
        for number in range(12):
            self.kernel.clock.advance(700)
            self.executor.look_again()
            report = self.reconcile()
            # Who left is given a pass to come back in, so two quiet ones say nothing yet.
            quiet = not (report.written or report.restored)
            if quiet and number > 1 and report.failed == len(self.starved()):
                break
        return report

    # What the runtime tells

    def tell(self, event: Event, times: int, *, late: bool = False) -> None:
        """Send an event: not at all, once, twice; late: only at the next `deliver_late`."""
        if late:
            self.late.append(event)
            return
        for _ in range(times if self.connected else 0):
            event(self.handler)
            self.drain()

    def deliver_late(self) -> None:
        events, self.late = self.late, []
        for event in events:
            if self.connected:
                event(self.handler)
                self.drain()

    def synchronize(self) -> None:
        """Register anew: the runtime tells all it has, and applies what the answer says."""
        self.connected = True
        self.handler.configured(self.runtime)
        sandboxes = [self._sandbox_message(pod) for pod in self.pods]
        containers = [self._container_message(c) for pod in self.pods for c in pod.containers]
        by_id = {c.here.id: c for pod in self.pods for c in pod.containers}
        for container_id, decision in list(self.handler.synchronize(sandboxes, containers)):
            self._apply_update(by_id[container_id], decision, Requested())
        self.drain()

    def _sandbox_message(self, pod: Running) -> SandboxMessage:
        assert pod.here.sandbox is not None
        sandbox = pod.here.sandbox
        subject = SandboxSubject(pod=told(pod), id=sandbox.id, cgroup=sandbox.cgroup)
        return SandboxMessage(subject, pid=sandbox.pid)

    def _container_message(
        self, container: RunningContainer, asked: Requested | None = None
    ) -> ContainerMessage:
        assert container.pod.here.sandbox is not None
        subject = ContainerSubject(
            pod=told(container.pod),
            name=container.name,
            id=container.here.id,
            cgroup=container.here.cgroup,
            requested=asked or Requested(),
        )
        return ContainerMessage(
            subject,
            container.pod.here.sandbox.id,
            current=container.stored,
            state=ContainerState.RUNNING,
            pid=container.here.pid,
        )

    # What kubelet does

    def add_pod(self, kind: Kind, *, times: int = 1, late: bool = False) -> Running | None:
        """A pod is scheduled here; None if there is no CPU left for it alone."""
        self._made += 1
        number = self._made % self.profile.topology.nodes
        here = self.kubelet.add_pod(kind.limits, kind.limits, qos=kind.kube_qos)
        twin = self.twin_kubelet.add_pod(kind.limits, kind.limits, qos=kind.kube_qos)
        pod = Running(kind, f"{kind.name}-{self._made}", here, twin, number)
        if not self._fits(pod):
            self.cpus.take_back(here.uid)
            self.kubelet.remove_pod(here)
            self.twin_kubelet.remove_pod(twin)
            return None
        self.pods.append(pod)
        message = self._sandbox_message(pod)
        self.tell(lambda handler: handler.run_sandbox(message), times, late=late)
        return pod

    def _fits(self, pod: Running) -> bool:
        """The scheduler's and kubelet's CPUs for the pod, if there are enough."""
        kind, uid = pod.kind, pod.here.uid
        if kind.exclusive_cpus:
            pod.cpus = self.cpus.give(
                uid,
                kind.exclusive_cpus,
                node=pod.node,
                whole_cores=kind.whole_cores,
                lse=kind.qos == "LSE",
            )
            if not pod.cpus:
                return False
        pinned = kind.pinned_cpus
        return not pinned or all(self.cpus.pin(uid, name, pinned) for name in CONTAINERS)

    def _asked_cpus(self, pod: Running, name: str) -> str:
        cpus = self.cpus.asked_by_kubelet(pod.here.uid, name)
        return str(CpuSet(cpus)) if cpus else ""

    def start_container(self, pod: Running, *, hooked: bool, times: int = 1) -> bool:
        """A container is created, with or without our say; False when the runtime could not."""
        taken = {container.name for container in pod.containers}
        name = next(name for name in CONTAINERS if name not in taken)
        limits = replace(pod.kind.limits, cpus=self._asked_cpus(pod, name))
        twin = pod.twin.start(limits)
        twin_id = twin.id
        asked = requested(limits, pod.kind.kube_qos, self.kernel.memory_bytes)
        adjusted: dict[str, str] = {}
        rdt_class = ""
        oom_score_adj: int | None = None
        stored = asked
        if hooked and self.connected:
            assert pod.here.sandbox is not None
            subject = ContainerSubject(
                pod=told(pod),
                name=name,
                id=twin_id,
                cgroup=twin.cgroup,
                requested=asked,
            )
            message = ContainerMessage(subject, pod.here.sandbox.id)
            decision: Decision | None = None
            for _ in range(times):
                decision = self.handler.create_container(message)
                self.drain()
            if decision is not None:
                adjusted = files_of(decision, self.runtime.creation, self.profile)
                rdt_class = self._rdt_class(decision)
                oom_score_adj = self._oom_score_adj(decision)
                stored = over(asked, decision)
        try:
            here = pod.here.start(limits, adjusted=adjusted, oom_score_adj=oom_score_adj)
        except OSError:
            self.twin_kubelet.stop_container(twin)
            return False
        assert here.id == twin_id, "the twin went another way"
        if rdt_class:
            for task in self.kernel.threads_of(here.pid):
                task.closid = rdt_class
        container = RunningContainer(name, pod, here, twin, limits, stored)
        pod.containers.append(container)
        started = self._container_message(container)
        self.tell(lambda handler: handler.start_container(started), times if hooked else 0)
        return True

    def stop_container(self, container: RunningContainer, *, times: int, late: bool) -> None:
        self.kubelet.stop_container(container.here)
        self.twin_kubelet.stop_container(container.twin)
        container.pod.containers.remove(container)
        message = self._container_message(container)
        self.tell(lambda handler: handler.stop_container(message), times, late=late)
        self.tell(lambda handler: handler.remove_container(message), times, late=late)

    def remove_pod(self, pod: Running, *, times: int, late: bool) -> None:
        message = self._sandbox_message(pod)
        self.kubelet.remove_pod(pod.here)
        self.twin_kubelet.remove_pod(pod.twin)
        self.pods.remove(pod)
        self.cpus.take_back(pod.here.uid)
        self.tell(lambda handler: handler.stop_sandbox(message), times, late=late)
        self.tell(lambda handler: handler.remove_sandbox(message), times, late=late)

    def resize(self, container: RunningContainer, limits: Limits, *, hooked: bool) -> None:
        """An in-place resize: kubelet asks, we may answer, the runtime writes."""
        limits = replace(limits, cpus=container.limits.cpus)
        asked = msgspec.structs.replace(requested(limits, "Burstable", 0), cpus=None)
        self._update(container, limits, asked, hooked=hooked)

    def pin_again(self, container: RunningContainer) -> bool:
        """Kubelet's static CPU manager looks after a container; False if it finds nothing to do."""
        cpus = self._asked_cpus(container.pod, container.name)
        if cpus == container.limits.cpus:
            return False
        limits = replace(container.limits, cpus=cpus)
        self._update(container, limits, Requested(cpus=CpuSet.parse(cpus)), hooked=True)
        return True

    def _update(
        self, container: RunningContainer, limits: Limits, asked: Requested, *, hooked: bool
    ) -> None:
        container.limits = limits
        self.twin_kubelet.resize(container.twin, limits)
        try:
            self._carry_out(container, limits, asked, hooked=hooked)
        except OSError:
            # Named a CPU that has just gone offline: kubelet asks until it is done.
            self.look_at_cpus()
            self._carry_out(container, limits, asked, hooked=hooked)

    def _carry_out(
        self, container: RunningContainer, limits: Limits, asked: Requested, *, hooked: bool
    ) -> None:
        decision: Decision | None = None
        if hooked and self.connected:
            decision = self.handler.update_container(self._container_message(container, asked))
            self.drain()
        if decision is None:
            container.stored = overlay(asked, container.stored)
            self.kubelet.resize(container.here, limits)
        else:
            self._apply_update(container, decision, asked)

    def _apply_update(
        self, container: RunningContainer, decision: Decision, asked: Requested
    ) -> None:
        container.stored = over(overlay(asked, container.stored), decision)
        files = files_of(decision, self.runtime.update, self.profile)
        if asked != Requested():
            self.kubelet.resize(container.here, container.limits, adjusted=files)
            return
        for file, text in files.items():
            path = self.kubelet.path(container.here.cgroup, file)
            try:
                self.kernel.write_as("runtime", path, text)
            except OSError:
                return  # the runtime logs a failed update, the reconciler repairs it

    def _rdt_class(self, decision: Decision) -> str:
        """The control group that a creation names: one that exists, as in `nri_plugin.replies`."""
        outcome = decision.outcomes.get((Resource.RESCTRL_GROUP, ""))
        exists = outcome is not None and outcome.value in self.resctrl_groups()
        return str(outcome.value) if outcome is not None and exists else ""

    def _oom_score_adj(self, decision: Decision) -> int | None:
        outcome = decision.outcomes.get((Resource.OOM_SCORE_ADJ, ""))
        if outcome is None or Resource.OOM_SCORE_ADJ not in self.runtime.creation:
            return None
        assert isinstance(outcome.value, int)
        return outcome.value

    def fork(self, container: RunningContainer) -> None:
        """A process of the container starts another one, on both."""
        self.kernel.fork(container.here.task)
        self.twin.fork(container.twin.task)

    # What the operator does

    def start_app(self, name: str) -> None:
        """A host application starts in a group of its own; nothing if it runs."""
        if name not in self.apps:
            host_apps.start(self.kernel, self.kubelet, host_apps.APPS[name])
            host_apps.start(self.twin, self.twin_kubelet, host_apps.APPS[name])
            self.apps.add(name)

    def end_app(self, name: str) -> None:
        if name in self.apps:
            cgroup = host_apps.APPS[name].cgroup(self.kubelet)
            self.kernel.remove_group(cgroup)
            self.twin.remove_group(cgroup)
            self.apps.remove(name)

    def make_control_group(self, name: str) -> None:
        """An operator makes a group with half of everything, if there is room on both."""
        kernels = (self.kernel.resctrl, self.twin.resctrl)
        if any(of is None or name in of.groups or len(of.groups) >= of.closids for of in kernels):
            return
        for kernel in (self.kernel, self.twin):
            kernel.make(f"{RESCTRL}/{name}")
            half = (1 << kernel.profile.rdt.l3_ways // 2) - 1 if kernel.profile.rdt else 0
            kernel.write_as("operator", f"{RESCTRL}/{name}/schemata", f"L3:0={half:x}\n")

    def daemon_reload(self) -> None:
        """systemd puts its view of every unit back, on both."""
        self.kubelet.systemd.daemon_reload()
        self.twin_kubelet.systemd.daemon_reload()

    def set_online(self, cpu: int, *, online: bool) -> None:
        """A CPU goes, if nobody has it alone, or comes back; on both.

        Nor the last one of a group on v1, which moves the group's tasks to the one above for good.
        """
        books = self.cpus
        if not online and (not books.may_go_offline(cpu) or self._is_a_groups_last(cpu)):
            return
        for kernel in (self.kernel, self.twin):
            kernel.set_online(cpu, online=online)
        books.offline = books.offline - {cpu} if online else books.offline | {cpu}
        if not online and self.profile.cgroup == 1:
            books.lost |= {cpu}

    def _is_a_groups_last(self, cpu: int) -> bool:
        groups = self.kernel.hierarchy("cpuset").root.walk()
        sets = (group.state(CpusetState).cpus for group in groups)
        return self.profile.cgroup == 1 and frozenset({cpu}) in sets

    # Looking

    def _watch(self, write: Write) -> None:
        if write.writer == UNDER_TEST and write.error:
            self.refusals.append(write)

    def text(self, cgroup: str, file: str) -> str:
        return self.kernel.text(self.kubelet.path(cgroup, file))

    def kernel_cpus(self, cgroup: str) -> Cpus:
        """The CPUs that a group's tasks may run on, here."""
        return _effective(self.kernel, cgroup)

    def twin_cpus(self, cgroup: str) -> Cpus:
        return _effective(self.twin, cgroup)


def _effective(kernel: SimulatedKernel, cgroup: str) -> Cpus:
    return effective(kernel.group(cgroup, "cpuset"), "cpus")
