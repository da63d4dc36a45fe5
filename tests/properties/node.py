"""A node in memory that runs the product's own parts, beside a twin that never had it.

`OperatedNode` wires state, NRI handler, engine, executor, journal and reconciler as the daemon
does, on a simulated kernel, and acts as kubelet, runtime and scheduler. Whatever kubelet and the
runtime do is done on the twin too, with kubelet's own values: what the node must look like when
everything is switched off again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from apis.keys import (
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    ANNOTATION_OOM_SCORE_ADJ,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_QOS_CLASS,
)
from apis.nodeslo import decode_nodeslo
from apis.qos import KubeQoS
from apis.topology import CPUSharedPool, NodeCPUFacts
from hooks import subject as subjects
from hooks.decision import Decision
from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta, Settings
from hooks.policies import BUILTIN
from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Requested, SandboxSubject, make_pod
from koordlet.decider import Decider
from koordlet.events import Events
from koordlet.executor.executor import Executor
from koordlet.executor.executor import Limits as WriteLimits
from koordlet.journal import Journal
from koordlet.kernel import probe
from koordlet.nri_handler import NriHandler
from koordlet.reconciler import PassReport, Reconciler
from koordlet.requests_log import RequestsLog
from koordlet.snapshot import Snapshot
from koordlet.state import NodeState
from linux.cpuset import CpuSet
from linux.discovery import discover
from linux.resources import UNLIMITED, Resource, Value
from nri_plugin.capabilities import runtime_profile
from nri_plugin.handler import Container as ContainerMessage
from nri_plugin.handler import ContainerState
from nri_plugin.handler import Sandbox as SandboxMessage
from tests.simulated import Kubelet, Profile, SimulatedKernel
from tests.simulated.kernel import UNDER_TEST, Write
from tests.simulated.kubelet import (
    Container,
    KubeQos,
    Limits,
    Pod,
    linear_weight,
    quadratic_weight,
    shares_of,
)
from tests.simulated.profiles import WeightFormula

GIB = 1 << 30
NO_LIMITS = Limits()
ALL_GATES = {policy.gate: True for policy in BUILTIN}
NO_GATES = {policy.gate: False for policy in BUILTIN}
_RUNTIME = runtime_profile("containerd", "v2.1.0")
Event = Callable[[NriHandler], object]


@dataclass(frozen=True, slots=True)
class Kind:
    """A sort of pod: its class, and what its containers ask for."""

    name: str
    kube_qos: KubeQos
    qos: str = ""
    limits: Limits = NO_LIMITS
    batch_milli: int = 0
    batch_bytes: int = 0
    exclusive_cpus: int = 0
    oom_score_adj: int | None = None


KINDS = (
    Kind("guaranteed", "Guaranteed", limits=Limits(1000, 1000, GIB, memory_request_bytes=GIB)),
    Kind("latency", "Burstable", "LS", Limits(500, 2000, GIB, memory_request_bytes=GIB // 2)),
    Kind("unlimited", "Burstable", "LS", Limits(250)),
    Kind("reserved", "Guaranteed", "LSR", Limits(1000, 1000, GIB), exclusive_cpus=1),
    Kind("batch", "BestEffort", "BE", batch_milli=500, batch_bytes=GIB // 2),
    Kind("batch-unlimited", "BestEffort", "BE"),
    Kind("spare", "BestEffort", oom_score_adj=900),
)


@dataclass
class Running:
    """A pod on both kernels, with what the scheduler gave it."""

    kind: Kind
    name: str
    here: Pod
    twin: Pod
    cpus: frozenset[int] = frozenset()
    containers: list[RunningContainer] = field(default_factory=list)


@dataclass
class RunningContainer:
    name: str
    pod: Running
    here: Container
    twin: Container
    limits: Limits
    stored: Requested = NOTHING_REQUESTED


class OperatedNode:
    """See the module. Use as a context manager: it owns a folder for journal and requests log."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.folder = Path(tempfile.mkdtemp(prefix="koord-properties-"))
        self.kernel, self.twin = SimulatedKernel(profile), SimulatedKernel(profile)
        self.kubelet, self.twin_kubelet = Kubelet(self.kernel), Kubelet(self.twin)
        self.pods: list[Running] = []
        self.late: list[Event] = []
        self.refusals: list[Write] = []
        self.expected_refusals = 0
        self._made = 0
        self.layout = discover(self.kernel)
        self.probed = probe(self.kernel, self.layout)
        self.kernel.writes.clear()
        self.kernel.on_write(self._watch)
        self.inputs = NodeInputs(
            node=NodeMeta(name="n1", allocatable_memory_bytes=self.kernel.memory_bytes),
            kernel=self.probed.facts,
            settings=Settings(feature_gates=ALL_GATES),
        )
        self.engine = Engine.build(BUILTIN, self.inputs)
        self._start()

    def close(self) -> None:
        self.journal.close()
        self.reconciler.close()
        shutil.rmtree(self.folder)

    # The daemon

    def _start(self) -> None:
        """What the daemon makes at its start."""
        self.requests = RequestsLog(str(self.folder / "requests.log"))
        self.state = NodeState(
            remembered=self.requests.load(), layout=self.layout, awaited=["runtime"]
        )
        self.events = Events()
        self._work: list[Callable[[], None]] = []
        self._ended: list[str] = []
        self.handler = NriHandler(
            state=self.state,
            decider=Decider(self.events),
            events=self.events,
            requests=self.requests,
            surroundings=self,
        )
        self.journal = Journal(str(self.folder / "journal"), boot="b1")
        self.executor = Executor(
            self.kernel,
            self.layout,
            self.journal,
            limits=WriteLimits(),
            burst_above_quota=self.probed.burst_above_quota,
            clock=lambda: self.kernel.clock.now,
            wall_clock=lambda: self.kernel.clock.now,
        )
        self.reconciler = Reconciler(self.executor, self.journal, self._snapshot)
        self.connected = False

    def restart(self) -> None:
        """The daemon ends without a word and starts again; nothing is connected yet.

        What the runtime was handed reaches the journal with the pass that follows each reply at
        once; a kill within these milliseconds is left out.
        """
        self.kernel.restart_program()
        self.journal.update()
        self.requests.close()
        self.journal.close()
        self.reconciler.close()
        self._start()

    def _snapshot(self) -> Snapshot:
        return self.state.snapshot(self.engine)

    # `koordlet.nri_handler.Surroundings`

    def after_reply(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def state_changed(self, reason: str) -> None:
        """The tests run passes by hand."""

    def pod_appeared(self, uid: str) -> None:
        """There is no kubelet list here."""

    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None:
        self.journal.note_delivered(container_id, resource, requested, value, policy=policy)

    def ended(self, container_id: str) -> None:
        self._ended.append(container_id)

    def resctrl_groups(self) -> Collection[str]:
        return () if self.kernel.resctrl is None else [g for g in self.kernel.resctrl.groups if g]

    def _drain(self) -> None:
        work, self._work = self._work, []
        for each in work:
            each()

    # What objects and settings say

    def change(self, **inputs: Any) -> None:
        """Change node inputs and build the engine anew."""
        self.inputs = msgspec.structs.replace(self.inputs, **inputs)
        self.engine = Engine.build(BUILTIN, self.inputs, previous=self.engine)

    def set_slo(self, spec: Mapping[str, Any]) -> None:
        self.change(slo=decode_nodeslo(dict(spec), obj="NodeSLO n1"))

    def set_ratio(self, ratio: str) -> None:
        """The node's CPU normalization ratio; "" takes the annotation away."""
        annotations = {ANNOTATION_CPU_NORMALIZATION_RATIO: ratio} if ratio else {}
        self.change(node=msgspec.structs.replace(self.inputs.node, annotations=annotations))

    def set_gates(self, gates: Mapping[str, bool]) -> None:
        self.change(settings=Settings(feature_gates=gates))

    def publish_topology(self) -> None:
        """The share pools as they are now: everything that no pod has for itself."""
        topology = self.profile.topology
        free = frozenset(range(topology.cpus)) - self.exclusive_cpus()
        pools = []
        for node in range(topology.nodes):
            cpus = CpuSet(free & topology.cpus_where("node", node))
            if cpus:
                socket = node // topology.nodes_per_socket
                pools.append(CPUSharedPool(socket, node, str(cpus), frozenset(cpus)))
        self.change(topology=NodeCPUFacts(shared_pools=tuple(pools), be_shared_pools=tuple(pools)))

    def exclusive_cpus(self) -> frozenset[int]:
        return frozenset().union(*(pod.cpus for pod in self.pods))

    # Passes

    def reconcile(self) -> PassReport:
        ended, self._ended = self._ended, []
        report = self.reconciler.run_once("test")
        for container_id in ended:
            self.journal.done_with(container_id)
        return report

    def settle(self) -> PassReport:
        """Let the daemon hear everything and finish; returns the last pass, which is quiet."""
        self.kernel.faults.clear()
        self.kernel.restart_program()
        self.deliver_late()
        self.synchronize()
        report = PassReport()
        for _ in range(12):
            self.kernel.clock.advance(700)
            self.executor.look_again()
            report = self.reconcile()
            if not (report.written or report.failed or report.restored):
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
            self._drain()

    def deliver_late(self) -> None:
        events, self.late = self.late, []
        for event in events:
            if self.connected:
                event(self.handler)
                self._drain()

    def synchronize(self) -> None:
        """Register anew: the runtime tells all it has, and applies what the answer says."""
        self.connected = True
        self.handler.configured(_RUNTIME)
        sandboxes = [self._sandbox_message(pod) for pod in self.pods]
        containers = [self._container_message(c) for pod in self.pods for c in pod.containers]
        by_id = {c.here.id: c for pod in self.pods for c in pod.containers}
        for container_id, decision in list(self.handler.synchronize(sandboxes, containers)):
            self._apply_update(by_id[container_id], decision, Requested())
        self._drain()

    def _sandbox_message(self, pod: Running) -> SandboxMessage:
        assert pod.here.sandbox is not None
        sandbox = pod.here.sandbox
        subject = SandboxSubject(pod=self._pod(pod), id=sandbox.id, cgroup=sandbox.cgroup)
        return SandboxMessage(subject, pid=sandbox.pid)

    def _container_message(
        self, container: RunningContainer, requested: Requested | None = None
    ) -> ContainerMessage:
        assert container.pod.here.sandbox is not None
        subject = ContainerSubject(
            pod=self._pod(container.pod),
            name=container.name,
            id=container.here.id,
            cgroup=container.here.cgroup,
            requested=requested or Requested(),
        )
        return ContainerMessage(
            subject,
            container.pod.here.sandbox.id,
            current=container.stored,
            state=ContainerState.RUNNING,
            pid=container.here.pid,
        )

    def _pod(self, pod: Running) -> subjects.Pod:
        labels = {LABEL_QOS_CLASS: pod.kind.qos} if pod.kind.qos else {}
        annotations: dict[str, str] = {}
        if pod.cpus:
            annotations[ANNOTATION_RESOURCE_STATUS] = json.dumps({"cpuset": str(CpuSet(pod.cpus))})
        if pod.kind.batch_milli:
            amounts = {
                "kubernetes.io/batch-cpu": str(pod.kind.batch_milli),
                "kubernetes.io/batch-memory": str(pod.kind.batch_bytes),
            }
            both = {"requests": amounts, "limits": amounts}
            annotations[ANNOTATION_EXTENDED_RESOURCE_SPEC] = json.dumps(
                {"containers": dict.fromkeys(("c0", "c1", "c2", "c3"), both)}
            )
        if pod.kind.oom_score_adj is not None:
            annotations[ANNOTATION_OOM_SCORE_ADJ] = str(pod.kind.oom_score_adj)
        return make_pod(
            namespace="default",
            name=pod.name,
            uid=pod.here.uid,
            labels=labels,
            annotations=annotations,
            kube_qos=KubeQoS(pod.kind.kube_qos),
            cgroup=pod.here.cgroup,
        )

    # What kubelet does

    def add_pod(self, kind: Kind, *, times: int = 1, late: bool = False) -> Running | None:
        """A pod is scheduled here; None if there is no CPU left for it alone."""
        cpus: frozenset[int] = frozenset()
        if kind.exclusive_cpus:
            free = frozenset(range(self.profile.topology.cpus)) - self.exclusive_cpus() - {0}
            if len(free) < kind.exclusive_cpus:
                return None
            cpus = frozenset(sorted(free)[: kind.exclusive_cpus])
        self._made += 1
        pod = Running(
            kind,
            f"{kind.name}-{self._made}",
            self.kubelet.add_pod(kind.limits, kind.limits, qos=kind.kube_qos),
            self.twin_kubelet.add_pod(kind.limits, kind.limits, qos=kind.kube_qos),
            cpus,
        )
        self.pods.append(pod)
        message = self._sandbox_message(pod)
        self.tell(lambda handler: handler.run_sandbox(message), times, late=late)
        return pod

    def start_container(self, pod: Running, *, hooked: bool, times: int = 1) -> bool:
        """A container is created, with or without our say; False when the runtime could not."""
        limits, name = pod.kind.limits, f"c{len(pod.containers)}"
        twin = pod.twin.start(limits)
        twin_id = twin.id
        asked = _requested(limits)
        adjusted: dict[str, str] = {}
        stored = asked
        if hooked and self.connected:
            assert pod.here.sandbox is not None
            subject = ContainerSubject(
                pod=self._pod(pod),
                name=name,
                id=twin_id,
                cgroup=twin.cgroup,
                requested=asked,
            )
            message = ContainerMessage(subject, pod.here.sandbox.id)
            decision: Decision | None = None
            for _ in range(times):
                decision = self.handler.create_container(message)
                self._drain()
            if decision is not None:
                adjusted = self._files(decision, _RUNTIME.creation)
                stored = _over(asked, decision)
        try:
            here = pod.here.start(limits, adjusted=adjusted)
        except OSError:
            self.twin_kubelet.stop_container(twin)
            return False
        assert here.id == twin_id, "the twin went another way"
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
        self.tell(lambda handler: handler.stop_sandbox(message), times, late=late)
        self.tell(lambda handler: handler.remove_sandbox(message), times, late=late)

    def resize(self, container: RunningContainer, limits: Limits, *, hooked: bool) -> None:
        """An in-place resize: kubelet asks, we may answer, the runtime writes."""
        asked = _requested(limits)
        container.limits = limits
        self.twin_kubelet.resize(container.twin, limits)
        decision: Decision | None = None
        if hooked and self.connected:
            decision = self.handler.update_container(self._container_message(container, asked))
            self._drain()
        if decision is None:
            container.stored = asked
            self.kubelet.resize(container.here, limits)
        else:
            self._apply_update(container, decision, asked)

    def _apply_update(
        self, container: RunningContainer, decision: Decision, asked: Requested
    ) -> None:
        base = asked if asked != Requested() else container.stored
        container.stored = _over(base, decision)
        files = self._files(decision, _RUNTIME.update)
        if asked != Requested():
            self.kubelet.resize(container.here, container.limits, adjusted=files)
            return
        for file, text in files.items():
            path = self.kubelet.path(container.here.cgroup, file)
            try:
                self.kernel.write_as("runtime", path, text)
            except OSError:
                return  # the runtime logs a failed update, the reconciler repairs it

    def _files(self, decision: Decision, may: frozenset[Resource]) -> dict[str, str]:
        """A decision as the runtime writes it."""
        v2 = self.profile.cgroup == 2
        quadratic = self.kubelet.weights is WeightFormula.QUADRATIC
        weight = quadratic_weight if quadratic else linear_weight
        files: dict[str, str] = {}
        for (resource, _), outcome in decision.outcomes.items():
            value = outcome.value
            if resource not in may:
                continue
            match resource, value:
                case Resource.CPU_SHARES, int(number):
                    files |= (
                        {"cpu.weight": str(weight(number))} if v2 else {"cpu.shares": str(number)}
                    )
                case Resource.CPU_CFS_QUOTA, int(number) if v2:
                    files["cpu.max"] = f"{'max' if number < 0 else number} 100000"
                case Resource.CPU_CFS_QUOTA, int(number):
                    files["cpu.cfs_quota_us"] = str(number)
                case Resource.MEMORY_LIMIT, int(number) if v2:
                    files["memory.max"] = "max" if number < 0 else str(number)
                case Resource.MEMORY_LIMIT, int(number):
                    files["memory.limit_in_bytes"] = str(number)
                case Resource.CPUSET_CPUS, _:
                    files["cpuset.cpus"] = str(value)
                case ((Resource.MEMORY_MIN | Resource.MEMORY_LOW | Resource.MEMORY_HIGH), int(n)):
                    if v2:
                        files[resource.value] = "max" if n < 0 or n >= 1 << 62 else str(n)
                case _:
                    pass
        return files

    def daemon_reload(self) -> None:
        """systemd puts its view of every unit back, on both."""
        self.kubelet.systemd.daemon_reload()
        self.twin_kubelet.systemd.daemon_reload()

    # Looking

    def _watch(self, write: Write) -> None:
        if write.writer == UNDER_TEST and write.error:
            self.refusals.append(write)

    def text(self, cgroup: str, file: str) -> str:
        return self.kernel.text(self.kubelet.path(cgroup, file))


def _requested(limits: Limits) -> Requested:
    """What kubelet's CRI request says."""
    return Requested(
        cpu_shares=shares_of(limits.cpu_request_milli),
        cfs_quota_us=limits.quota_us,
        cfs_period_us=100_000,
        memory_limit_bytes=limits.memory_limit_bytes or UNLIMITED,
    )


def _over(asked: Requested, decision: Decision) -> Requested:
    """The specification that the runtime stores: the request with our values over it."""
    fields = {
        Resource.CPU_SHARES: "cpu_shares",
        Resource.CPU_CFS_QUOTA: "cfs_quota_us",
        Resource.MEMORY_LIMIT: "memory_limit_bytes",
        Resource.CPUSET_CPUS: "cpus",
    }
    changes = {
        fields[resource]: outcome.value
        for (resource, _), outcome in decision.outcomes.items()
        if resource in fields
    }
    return msgspec.structs.replace(asked, **changes)
