"""What the resource formulas take: one node, its report and its pods, reduced to integers.

CPU counts in milli-cores, memory in bytes. Source: manager.md 8.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from apis.annotations import parse_resource_status
from apis.core import (
    Node,
    Pod,
    is_active,
    pod_priority_class_with_default,
    pod_qos,
    pod_requests,
)
from apis.decode import decode_field, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RAW_ALLOCATABLE,
    ANNOTATION_RESOURCE_STATUS,
    CPU,
    MEMORY,
)
from apis.nodemetric import NodeMetricStatus, ResourceMap
from apis.qos import PriorityClass, QoSClass
from apis.quantity import Quantity, ResourceList
from apis.topology import parse_node_reservation


@dataclass(frozen=True, slots=True)
class Amount:
    """CPU in milli-cores and memory in bytes."""

    cpu: int = 0
    memory: int = 0

    @classmethod
    def of(cls, resources: Mapping[str, Quantity]) -> Self:
        cpu, memory = resources.get(CPU), resources.get(MEMORY)
        return cls(cpu.milli_value() if cpu else 0, memory.value() if memory else 0)

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cpu + other.cpu, self.memory + other.memory)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.cpu - other.cpu, self.memory - other.memory)

    def largest(self, other: Amount) -> Amount:
        """Return the larger of each."""
        return Amount(max(self.cpu, other.cpu), max(self.memory, other.memory))

    def smallest(self, other: Amount) -> Amount:
        """Return the smaller of each."""
        return Amount(min(self.cpu, other.cpu), min(self.memory, other.memory))

    def at_least_zero(self) -> Amount:
        return self.largest(_NOTHING)

    def percent(self, cpu_percent: int, memory_percent: int) -> Amount:
        """Return that share of each, truncated towards zero."""
        return Amount(
            truncate(self.cpu * cpu_percent, 100), truncate(self.memory * memory_percent, 100)
        )

    def split(self, parts: int) -> Amount:
        """Return one of `parts` equal parts, rounded up."""
        return Amount(-(-self.cpu // parts), -(-self.memory // parts))


_NOTHING: Final = Amount()


def truncate(dividend: int, divisor: int) -> int:
    """Divide, dropping the fraction towards zero."""
    quotient = abs(dividend) // divisor
    return quotient if dividend >= 0 else -quotient


def total(amounts: Iterable[Amount]) -> Amount:
    """Return the sum."""
    cpu = memory = 0
    for amount in amounts:
        cpu += amount.cpu
        memory += amount.memory
    return Amount(cpu, memory)


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What a pod means to the formulas."""

    key: tuple[str, str]
    """(namespace, name)"""
    request: Amount
    priority: PriorityClass
    """With default."""
    lse: bool
    numa_nodes: tuple[int, ...] = ()


def pod_facts(pod: Pod) -> PodFacts | None:
    """Return the facts of a running or pending pod, None for one that has ended."""
    if not is_active(pod):
        return None
    numa: tuple[int, ...] = ()
    status = pod.metadata.annotations.get(ANNOTATION_RESOURCE_STATUS)
    if status:
        try:
            parsed = parse_resource_status(status, obj=pod.ref)
            numa = tuple(sorted({entry.node for entry in parsed.numa_node_resources}))
        except InputError:
            # The node reports this pod; for the sums it then is a pod without NUMA binding.
            numa = ()
    return PodFacts(
        key=(pod.metadata.namespace, pod.metadata.name),
        request=Amount.of(pod_requests(pod)),
        priority=pod_priority_class_with_default(pod),
        lse=pod_qos(pod) is QoSClass.LSE,
        numa_nodes=numa,
    )


LOW_PRIORITIES: Final = frozenset({PriorityClass.BATCH, PriorityClass.FREE})
_PRIORITIES: Final = {member.value: member for member in PriorityClass}


def priority_of(text: str) -> PriorityClass:
    """Return the class that a report names; NONE for an unknown name."""
    return _PRIORITIES.get(text, PriorityClass.NONE)


def usage_of(resources: ResourceMap) -> Amount:
    return Amount.of(resources.resources)


_decode_resources = field_decoder(ResourceList)


@dataclass(frozen=True)
class NodeInputs:
    """One node at one moment. `metric` is the report's status; None when there is none."""

    node: Node
    metric: NodeMetricStatus | None
    pods: tuple[PodFacts, ...]
    """Running and pending ones."""

    @cached_property
    def capacity(self) -> Amount:
        return Amount.of(self.node.status.capacity)

    @cached_property
    def allocatable(self) -> Amount:
        """Allocatable as the kubelet reported it: before amplification, where that is on."""
        raw = self.node.metadata.annotations.get(ANNOTATION_RAW_ALLOCATABLE)
        reported = Amount.of(self.node.status.allocatable)
        if not raw:
            return reported
        try:
            resources = decode_field(
                _decode_resources,
                raw,
                obj=f"Node {self.node.metadata.name}",
                field=f'metadata.annotations["{ANNOTATION_RAW_ALLOCATABLE}"]',
            )
        except InputError:
            return reported
        amount = Amount.of(resources)
        return Amount(amount.cpu or reported.cpu, amount.memory or reported.memory)

    @cached_property
    def kubelet_reserved(self) -> Amount:
        return (self.capacity - self.allocatable).at_least_zero()

    @cached_property
    def annotation_reserved(self) -> Amount:
        text = self.node.metadata.annotations.get(ANNOTATION_NODE_RESERVATION)
        if not text:
            return _NOTHING
        try:
            reservation = parse_node_reservation(text, obj=f"Node {self.node.metadata.name}")
        except InputError:
            return _NOTHING
        return Amount.of(reservation.amounts())

    @cached_property
    def reserved(self) -> Amount:
        return self.kubelet_reserved.largest(self.annotation_reserved)

    @cached_property
    def system_usage(self) -> Amount:
        info = self.metric.node_metric if self.metric else None
        return usage_of(info.system_usage) if info else _NOTHING

    def host_usage(self, counted: frozenset[PriorityClass]) -> Amount:
        """Return what host applications of the given classes use; NONE is an unnamed class."""
        if self.metric is None:
            return _NOTHING
        return total(
            usage_of(application.usage)
            for application in self.metric.host_application_metric
            if priority_of(application.priority) in counted
        )

    @cached_property
    def pod_usage(self) -> dict[tuple[str, str], Amount]:
        if self.metric is None:
            return {}
        return {
            (report.namespace, report.name): usage_of(report.pod_usage)
            for report in self.metric.pods_metric
        }

    @cached_property
    def high_priority_pods(self) -> tuple[PodFacts, ...]:
        return tuple(pod for pod in self.pods if pod.priority not in LOW_PRIORITIES)

    @cached_property
    def dangling_usage(self) -> Amount:
        """Use of reported pods that the API server does not list as active (any more, or yet).

        What the node measured is in use, whatever the pod is said to be.
        """
        if self.metric is None:
            return _NOTHING
        active = {pod.key for pod in self.pods}
        return total(
            usage_of(report.pod_usage)
            for report in self.metric.pods_metric
            if (report.namespace, report.name) not in active
            and priority_of(report.priority) not in LOW_PRIORITIES
        )
