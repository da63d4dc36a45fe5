"""One node with both sides: koordlet reports and puts into force, the scheduler reads and binds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from apis.annotations import parse_resource_status
from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import decode_object
from apis.keys import ANNOTATION_RESOURCE_STATUS, LABEL_QOS_CLASS
from apis.qos import KubeQoS
from apis.topology import NodeResourceTopology, parse_node_cpu_facts
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.numa.facts import NumaFacts, parse_numa_facts
from cluster.scheduler.tables.numa.record import recorded_allocation
from cluster.scheduler.tables.numa.state import NumaState
from cluster.scheduler.tables.shapes import PodShape
from hooks.facts import KernelFacts, NodeMeta
from hooks.policies.cpuset_allocator import POLICY
from hooks.subject import Pod, make_pod
from koordlet.reporters.topology import Facts, Topology, merged, new_object, topology
from linux.numa_memory import CpuKind
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import NumaCluster
from tests.cluster.scheduler.with_koordlet.machines import Machine, Setting
from tests.hooks.making import EVERYTHING, a_container, decide, node, values

NAME = "n1"


class BothSides:
    """stored: the NodeResourceTopology as the API server has it. running: pods by name."""

    def __init__(self, machine: Machine, setting: Setting) -> None:
        self.machine = machine
        self.setting = setting
        self.stored: dict[str, Any] = new_object(NAME, "uid-1")
        self.wanted: Topology
        self.cluster = NumaCluster()
        self.running: dict[str, Pod] = {}
        self.bookings: dict[str, Booking] = {}
        self._node = make_node(
            NAME,
            annotations=setting.annotations(),
            allocatable={"cpu": str(len(machine.online) * setting.ratio // 100)},
        )
        self.row = self.cluster.tables.upsert_node(self._node)
        self.report()

    # --- koordlet reports, the scheduler reads ---------------------------------------------------

    def report(self) -> None:
        """Let koordlet write what it sees now, and the scheduler read it."""
        self.wanted = topology(
            Facts(
                cpus=self.machine.cpus,
                memory=self.machine.memory,
                kind=CpuKind("Xeon", "GenuineIntel", True, False, "fff"),
                kubelet=self.setting.kubelet,
                exclusive=self.setting.exclusive,
                pods=tuple(self.running.values()),
                node=NodeMeta(NAME, annotations=self.setting.annotations()),
                huge_pages=self.setting.huge_pages,
            )
        )
        assert not self.wanted.problems
        self.stored = json.loads(json.dumps(merged(self.stored, self.wanted)))
        self.cluster.table.set_node(self.row, self.read())

    def read(self) -> NumaFacts:
        """Return the scheduler's facts of the object, which it must understand without an error."""
        read = decode_object(self.stored, NodeResourceTopology, obj="NodeResourceTopology n1")
        facts, errors = parse_numa_facts(self._node, read)
        assert not errors, errors
        return facts

    @property
    def state(self) -> NumaState:
        return self.cluster.table.state(self.row)

    @property
    def free(self) -> CpuSet:
        """What the scheduler would still give to pods."""
        return CpuSet.of_mask(self.state.free)

    @property
    def pools(self) -> CpuSet:
        """What koordlet lets pods share."""
        facts = parse_node_cpu_facts(self.wanted.annotations, obj=NAME)
        return CpuSet.union(pool.cpus for pool in facts.shared_pools)

    # --- the scheduler writes, koordlet puts into force ------------------------------------------

    def schedule(self, name: str, shape: PodShape, qos: str) -> bool:
        """Bind a pod if the node passes; koordlet sees its annotations."""
        plugin = self.cluster.plugin
        if int(plugin.filter_row(shape, self.cluster.tables, self.row)):
            return False
        given = plugin.allocate(shape, self.cluster.tables, self.row, Allocation())
        if not isinstance(given, Allocation):
            # Counts of CPUs, which the filter looks at, are not exact on such machines.
            assert len({len(core) for core in self.machine.cores}) > 1, given
            return False
        booking = Booking(
            key=f"default/{name}", uid=f"uid-{name}", shape=shape, node=NAME, allocation=given
        )
        self.cluster.tables.place(booking)
        self.bookings[name] = booking
        written = plugin.record(booking, self.cluster.tables).annotations
        self.running[name] = make_pod(
            namespace="default",
            name=name,
            uid=booking.uid,
            labels={LABEL_QOS_CLASS: qos} if qos else {},
            annotations={key: text for key, text in written.items() if text is not None},
            kube_qos=KubeQoS.GUARANTEED,
            phase="Running",
        )
        return True

    def end(self, name: str) -> None:
        """Let a pod succeed: its object stays, and holds nothing."""
        self.cluster.tables.remove(self.bookings.pop(name).uid)
        self.running[name] = msgspec.structs.replace(self.running[name], phase="Succeeded")

    def recorded(self, name: str) -> CpuSet:
        text = self.running[name].annotations.get(ANNOTATION_RESOURCE_STATUS)
        return parse_resource_status(text, obj=name).cpus if text else NO_CPUS

    def in_force(self, name: str) -> CpuSet | None:
        """Return the CPUs that koordlet gives a container of the pod; None: it leaves them."""
        inputs = node(
            topology=parse_node_cpu_facts(self.stored["metadata"]["annotations"], obj=NAME),
            annotations=self.setting.annotations(),
            kernel=KernelFacts(supported=EVERYTHING, pods_cpus=self.machine.online),
        )
        decision = decide(a_container(self.running[name]), inputs, POLICY)
        assert not decision.faults, decision.faults
        cpus: CpuSet | None = values(decision).get("cpuset.cpus")
        return cpus

    def restarted(self) -> NumaCluster:
        """Return what a new scheduler knows that reads the node and its bound pods."""
        other = NumaCluster()
        row = other.tables.upsert_node(self._node)
        other.table.set_node(row, self.read())
        for name, booking in self.bookings.items():
            cpus, numa = recorded_allocation(self.running[name].annotations, obj=name)
            allocation = Allocation(cpus=cpus, numa=numa)
            other.tables.place(replace(booking, allocation=allocation))
        return other
