"""What a Node and its NodeResourceTopology say about CPUs and NUMA nodes, parsed once.

A field that cannot be used costs that fact alone; the error names object, field and value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final, TypeVar

from apis.core import Node
from apis.cpuset import CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_TOPOLOGY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_POD_CPU_ALLOCS,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    CPU,
)
from apis.numa import (
    NodeCPUBindPolicy,
    NUMAAllocateStrategy,
    NUMATopologyPolicy,
    node_cpu_bind_policy,
    node_numa_topology_policy,
    numa_allocate_strategy,
    parse_amplification_ratios,
)
from apis.quantity import Quantity
from apis.topology import (
    CPUManagerPolicy,
    CPUTopology,
    NodeReservation,
    NodeResourceTopology,
    PodCPUAlloc,
    SystemQOSResource,
    numa_id,
    parse_cpu_manager_policy,
    parse_cpu_topology,
    parse_node_reservation,
    parse_pod_cpu_allocs,
    parse_system_qos_resource,
)
from cluster.scheduler.tables.amounts import LARGEST_AMOUNT, Amounts, amounts_of
from cluster.scheduler.tables.numa.cpu_topology import Cpu, CpuTopology, cpu_topology

T = TypeVar("T")

MOST_NUMA_NODES: Final = 8
"""NUMA nodes of a machine whose resources are scheduled, as with kubelet's topology manager by
default. Every subset of them is looked at: 255 here, twice as many with one more."""

MOST_NUMA_RESOURCES: Final = 32
"""Resources that the NUMA nodes of one machine have together. Chosen: machines report cpu, memory,
the sizes of huge pages and some devices. Each takes columns of 1 MB with 8,192 nodes."""

_POLICIES: Final = {
    f"{policy.value}{scope}": policy
    for policy in NUMATopologyPolicy
    if policy
    for scope in ("", "PodLevel", "ContainerLevel")
}
"""Policies of kubelet, as a NodeResourceTopology has them."""
_KNOWN_TO_UPSTREAM: Final = {
    written: policy
    for written, policy in _POLICIES.items()
    if written in ("BestEffort", "Restricted", "SingleNUMANodePodLevel")
}
"""Of these only the last one is ever written by a koordlet."""

_KNOWN_TOPOLOGIES: Final = 256
"""Topologies that are kept, so that equal machines share one; chosen: a cluster has some dozens of
machine types. Each machine above that has a topology of its own, some 50 KiB with 256 cores."""

_NONE: Final[Mapping[int, Amounts]] = MappingProxyType({})

NO_RATIO: Final = 100
"""A ratio of 1 in hundredths."""


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """What a node is, whatever pods it has.

    topology: None if the node reports none that can be used.
    reserved: mask of CPUs that pods do not get (kubelet's pods, kubelet's and the node's
    reservations, CPUs of class SYSTEM). zones: NUMA id -> amounts for pods, amplified, by id.
    cpu_ratio: amplification of the node's cpu in hundredths, at least 100.
    """

    topology: CpuTopology | None = None
    reserved: int = 0
    zones: Mapping[int, Amounts] = field(default_factory=lambda: _NONE)
    policy: NUMATopologyPolicy = NUMATopologyPolicy.NONE
    bind_policy: NodeCPUBindPolicy = NodeCPUBindPolicy.NONE
    strategy: NUMAAllocateStrategy = NUMAAllocateStrategy.UNSET
    cpu_ratio: int = NO_RATIO


NO_FACTS: Final = NumaFacts()


def amplify(amount: int, ratio: int) -> int:
    """Return amount * ratio, rounded up. ratio: hundredths; one below 100 changes nothing."""
    return -(-amount * ratio // NO_RATIO) if ratio > NO_RATIO else amount


def parse_numa_facts(
    node: Node, topology: NodeResourceTopology | None, *, pod_level_alone: bool = False
) -> tuple[NumaFacts, tuple[InputError, ...]]:
    """Return the facts about a node, and what could not be used of its objects.

    pod_level_alone: of kubelet's policies only those count that upstream knows.
    """
    reading = _Reading(node, topology, _KNOWN_TO_UPSTREAM if pod_level_alone else _POLICIES)
    facts = reading.facts()
    return facts, tuple(reading.errors)


@lru_cache(maxsize=_KNOWN_TOPOLOGIES)
def _topology_of(listed: CPUTopology) -> CpuTopology:
    for cpu in listed.detail:
        if cpu.id < 0 or cpu.core < 0:
            raise ValueError(f"CPU {cpu.id} on core {cpu.core} has a negative number")
    return cpu_topology(
        Cpu(cpu.id, cpu.core, max(cpu.socket, 0), max(cpu.node, 0)) for cpu in listed.detail
    )


class _Reading:
    """Reads two objects and gathers their errors."""

    def __init__(
        self,
        node: Node,
        topology: NodeResourceTopology | None,
        policies: Mapping[str, NUMATopologyPolicy],
    ) -> None:
        self._policies = policies
        self.errors: list[InputError] = []
        self._node = node
        self._name = f"Node {node.metadata.name}"
        self._topology = topology
        self._topology_name = f"NodeResourceTopology {node.metadata.name}"

    def facts(self) -> NumaFacts:
        labels = self._node.metadata.labels
        kubelet = self._of_topology(
            ANNOTATION_CPU_MANAGER_POLICY, parse_cpu_manager_policy, CPUManagerPolicy()
        )
        topology = self._cpus()
        reserved = self._reserved(kubelet).mask
        if topology is not None:
            reserved &= topology.cpus
        node_ratios = self._ratios(self._node.metadata.annotations, self._name)
        return NumaFacts(
            topology=topology,
            reserved=reserved,
            zones=self._zones(topology, reserved, node_ratios),
            policy=self._policy(),
            bind_policy=self._bind_policy(kubelet),
            strategy=self._strategy(kubelet, labels),
            cpu_ratio=max(NO_RATIO, node_ratios.get(CPU, NO_RATIO)),
        )

    # --- pieces ----------------------------------------------------------------------------------

    def _kept(self, read: Callable[[], T], default: T) -> T:
        try:
            return read()
        except InputError as error:
            self.errors.append(error)
            return default

    def _of_topology(self, key: str, parse: Callable[..., T], default: T) -> T:
        text = self._topology.metadata.annotations.get(key) if self._topology else None
        if not text:
            return default
        return self._kept(lambda: parse(text, obj=self._topology_name), default)

    def _ratios(self, annotations: Mapping[str, str], obj: str) -> Mapping[str, int]:
        text = annotations.get(ANNOTATION_RESOURCE_AMPLIFICATION_RATIO)
        if not text:
            return {}
        return self._kept(lambda: parse_amplification_ratios(text, obj=obj), {})

    def _cpus(self) -> CpuTopology | None:
        """Return the CPUs. A socket or NUMA node of -1 (unknown) counts as 0."""
        listed = self._of_topology(ANNOTATION_CPU_TOPOLOGY, parse_cpu_topology, CPUTopology())
        if not listed.detail:
            return None
        try:
            return _topology_of(listed)
        except ValueError as error:
            self.errors.append(
                InputError(
                    obj=self._topology_name,
                    field=f'metadata.annotations["{ANNOTATION_CPU_TOPOLOGY}"].detail',
                    value=f"{len(listed.detail)} CPUs",
                    problem=str(error),
                )
            )
            return None

    def _reserved(self, kubelet: CPUManagerPolicy) -> CpuSet:
        none: tuple[PodCPUAlloc, ...] = ()
        allocs = self._of_topology(ANNOTATION_POD_CPU_ALLOCS, parse_pod_cpu_allocs, none)
        sets = [CpuSet.parse(alloc.cpuset) for alloc in allocs if alloc.managed_by_kubelet]
        system = self._system()
        if system is not None and system.cpuset_exclusive:
            sets.append(system.cpus)
        return CpuSet.union([kubelet.reserved_cpus, self._node_reservation(), *sets])

    def _node_reservation(self) -> CpuSet:
        """Return the CPUs that the node's annotation lists, else those that koordlet reports.

        koordlet chooses CPUs for a reservation that has an amount and no list, and keeps pods off.
        """
        nothing = NodeReservation()
        text = self._node.metadata.annotations.get(ANNOTATION_NODE_RESERVATION)
        if text:
            own = self._kept(lambda: parse_node_reservation(text, obj=self._name), nothing)
            if own.reserved_cpus:
                return own.reserved_cpus
        chosen = self._of_topology(ANNOTATION_NODE_RESERVATION, parse_node_reservation, nothing)
        return chosen.reserved_cpus

    def _system(self) -> SystemQOSResource | None:
        """Return the CPUs of class SYSTEM by the administrator's annotation on the node.

        While it cannot be used, koordlet keeps to the last good one, which it reports.
        """
        text = self._node.metadata.annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE)
        if text:
            try:
                return parse_system_qos_resource(text, obj=self._name)
            except InputError as error:
                self.errors.append(error)
        return self._of_topology(ANNOTATION_SYSTEM_QOS_RESOURCE, parse_system_qos_resource, None)

    def _policy(self) -> NUMATopologyPolicy:
        labels = self._node.metadata.labels
        none = NUMATopologyPolicy.NONE
        policy = self._kept(lambda: node_numa_topology_policy(labels, obj=self._name), none)
        if policy or self._topology is None:
            return policy
        for written in self._topology.topology_policies:
            if written in self._policies:
                return self._policies[written]
        return none

    def _bind_policy(self, kubelet: CPUManagerPolicy) -> NodeCPUBindPolicy:
        if kubelet.policy == "static" and kubelet.options.get("full-pcpus-only") == "true":
            return NodeCPUBindPolicy.FULL_PCPUS_ONLY
        labels = self._node.metadata.labels
        none = NodeCPUBindPolicy.NONE
        return self._kept(lambda: node_cpu_bind_policy(labels, obj=self._name), none)

    def _strategy(
        self, kubelet: CPUManagerPolicy, labels: Mapping[str, str]
    ) -> NUMAAllocateStrategy:
        unset = NUMAAllocateStrategy.UNSET
        strategy = self._kept(lambda: numa_allocate_strategy(labels, obj=self._name), unset)
        if strategy or kubelet.policy != "static":
            return strategy
        evenly = kubelet.options.get("distribute-cpus-across-numa") == "true"
        return NUMAAllocateStrategy.DISTRIBUTE_EVENLY if evenly else unset

    def _zones(
        self, topology: CpuTopology | None, reserved: int, node_ratios: Mapping[str, int]
    ) -> Mapping[int, Amounts]:
        """Return the amounts for pods by NUMA id.

        Amounts in a NodeResourceTopology with ratios are amplified already; others are amplified by
        the node's ratios here. Reserved CPUs are taken off. Of too many resources the first count:
        those of Kubernetes, then by name.
        """
        if self._topology is None:
            return MappingProxyType({})
        own = self._ratios(self._topology.metadata.annotations, self._topology_name)
        reported: dict[int, dict[str, Quantity]] = {}
        for zone in self._topology.zones:
            number = numa_id(zone) if zone.type == "Node" else None
            if number is not None:
                reported[number] = {one.name: one.allocatable for one in zone.resources}
        zones: dict[int, dict[str, int]] = {}
        counted = self._counted({name for resources in reported.values() for name in resources})
        for number, resources in reported.items():
            amounts = amounts_of({n: q for n, q in resources.items() if n in counted})
            taken = 0
            if topology is not None:
                taken = 1000 * (reserved & topology.numa.get(number, 0)).bit_count()
            if own:
                taken = amplify(taken, own.get(CPU, NO_RATIO))
            if CPU in amounts:
                amounts[CPU] -= taken
            if not own:
                for name, amount in amounts.items():
                    amounts[name] = amplify(amount, node_ratios.get(name, NO_RATIO))
            # Amplified, an amount could leave the 64 bits of a column.
            zones[number] = {
                name: min(max(0, amount), LARGEST_AMOUNT) for name, amount in amounts.items()
            }
        if len(zones) > MOST_NUMA_NODES:
            self.errors.append(
                InputError(
                    obj=self._topology_name,
                    field="zones",
                    value=f"{len(zones)} NUMA nodes",
                    problem=f"at most {MOST_NUMA_NODES} NUMA nodes are scheduled",
                )
            )
            return MappingProxyType({})
        return MappingProxyType(dict(sorted(zones.items())))

    def _counted(self, names: Set[str]) -> Set[str]:
        """Return the resources that count, and note it if these are not all."""
        if len(names) <= MOST_NUMA_RESOURCES:
            return names
        self.errors.append(
            InputError(
                obj=self._topology_name,
                field="zones",
                value=f"{len(names)} resources",
                problem=f"the first {MOST_NUMA_RESOURCES} count: those of Kubernetes, then by name",
            )
        )
        return set(sorted(names, key=lambda name: ("/" in name, name))[:MOST_NUMA_RESOURCES])
