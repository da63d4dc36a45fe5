"""The inputs of the resource formulas: one node, its report and its pods, as integers.

CPU is in milli-cores, memory in bytes. Terms: docs/facts/manager.md, "Batch resources".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

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
)
from apis.nodemetric import NodeMetricStatus
from apis.qos import PriorityClass, QoSClass
from apis.quantity import ResourceList
from apis.topology import parse_node_reservation
from cluster.manager.amounts import NOTHING, Amount, total
from cluster.manager.node_report import NodeReport, read_report


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The values of a pod that the formulas use."""

    key: tuple[str, str]
    """(namespace, name)"""
    request: Amount
    priority: PriorityClass
    """Priority class with default."""
    lse: bool
    numa_nodes: tuple[int, ...] = ()


def pod_facts(pod: Pod) -> PodFacts | None:
    """Return the facts of a running or pending pod, None for an ended pod."""
    if not is_active(pod):
        return None
    numa: tuple[int, ...] = ()
    status = pod.metadata.annotations.get(ANNOTATION_RESOURCE_STATUS)
    if status:
        try:
            parsed = parse_resource_status(status, obj=pod.ref)
            numa = tuple(sorted({entry.node for entry in parsed.numa_node_resources}))
        except InputError:
            # The koordlet of the node reports the error; here the pod counts as not bound.
            numa = ()
    return PodFacts(
        key=(pod.metadata.namespace, pod.metadata.name),
        request=Amount.of(pod_requests(pod)),
        priority=pod_priority_class_with_default(pod),
        lse=pod_qos(pod) is QoSClass.LSE,
        numa_nodes=numa,
    )


LOW_PRIORITIES: Final = frozenset({PriorityClass.BATCH, PriorityClass.FREE})

_decode_resources = field_decoder(ResourceList)


@dataclass(frozen=True)
class NodeInputs:
    """One node at one moment. metric: status of its NodeMetric, None without one."""

    node: Node
    metric: NodeMetricStatus | None
    pods: tuple[PodFacts, ...]
    """Running and pending pods of the node."""

    @cached_property
    def capacity(self) -> Amount:
        return Amount.of(self.node.status.capacity)

    @cached_property
    def allocatable(self) -> Amount:
        """Allocatable as kubelet reported it, before amplification."""
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
            return NOTHING
        try:
            reservation = parse_node_reservation(text, obj=f"Node {self.node.metadata.name}")
        except InputError:
            return NOTHING
        return Amount.of(reservation.amounts())

    @cached_property
    def reserved(self) -> Amount:
        return self.kubelet_reserved.largest(self.annotation_reserved)

    @cached_property
    def report(self) -> NodeReport | None:
        """The node's report, bounded by its capacity; None without a NodeMetric."""
        if self.metric is None:
            return None
        return read_report(self.metric, capacity=self.capacity, node=self.node.metadata.name)

    @cached_property
    def system_usage(self) -> Amount:
        return self.report.system if self.report is not None else NOTHING

    def host_usage(self, counted: frozenset[PriorityClass]) -> Amount:
        """Return the use of host applications of the given classes; NONE: without a class."""
        hosts = self.report.hosts if self.report is not None else ()
        return total(used for priority, used in hosts if priority in counted)

    @cached_property
    def pod_usage(self) -> dict[tuple[str, str], Amount]:
        pods = self.report.pods if self.report is not None else ()
        return {each.key: each.used for each in pods}

    @cached_property
    def high_priority_pods(self) -> tuple[PodFacts, ...]:
        return tuple(pod for pod in self.pods if pod.priority not in LOW_PRIORITIES)

    @cached_property
    def dangling_usage(self) -> Amount:
        """Use of reported pods that the API server does not list as active.

        They ended or started a moment ago. Their measured use counts in both cases.
        """
        active = {pod.key for pod in self.pods}
        return total(
            each.used
            for each in (self.report.pods if self.report is not None else ())
            if each.key not in active and each.priority not in LOW_PRIORITIES
        )
