"""Parses a NodeMetric: every amount is bounded, and every amount out of range becomes a problem.

A negative amount would offer more than the node has, and counts as 0. An amount above twice the
capacity cannot be a measurement, and counts as the capacity. A report without any use of the node,
neither of the whole node nor of its system, counts as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from apis.errors import InputError
from apis.keys import CPU, MEMORY
from apis.nodemetric import NodeMetricStatus, ResourceMap
from apis.qos import PriorityClass
from apis.quantity import Quantity
from cluster.manager.amounts import NOTHING, Amount, total

_FAR_ABOVE: Final = 2
"""Times the capacity. Chosen: a measured use can be a few percent above the capacity, because
counters are read one after the other, but not twice as large."""

_PRIORITIES: Final = {member.value: member for member in PriorityClass}


def priority_of(text: str) -> PriorityClass:
    """Return the class with a name; NONE for an unknown name."""
    return _PRIORITIES.get(text, PriorityClass.NONE)


@dataclass(frozen=True, slots=True)
class PodUse:
    """The measured use of one pod. key: (namespace, name)."""

    key: tuple[str, str]
    priority: PriorityClass
    used: Amount


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of one node. Amounts are bounded: at least 0, at most about the capacity."""

    at: str | None
    """Time of the report, RFC 3339; None if it is missing."""
    node: Amount | None
    """Use of the whole node; None if cpu or memory is missing."""
    system: Amount
    """Use by neither pods nor host applications. If it is not reported: the use of the node minus
    theirs."""
    pods: tuple[PodUse, ...]
    hosts: tuple[tuple[PriorityClass, Amount], ...]
    reclaimable: Amount
    unmeasured: str
    """Why the use of the node is not known; "" if it is known."""
    problems: tuple[InputError, ...]


def read_report(status: NodeMetricStatus, *, capacity: Amount, node: str) -> NodeReport:
    """Return the report in `status`. capacity: the capacity of that node."""
    reading = _Reading(f"NodeMetric {node}", capacity)
    pods = tuple(
        PodUse(
            (each.namespace, each.name),
            priority_of(each.priority),
            reading.amount(each.pod_usage, f"podsMetric[{each.namespace}/{each.name}].podUsage"),
        )
        for each in status.pods_metric
    )
    hosts = tuple(
        (
            priority_of(each.priority),
            reading.amount(each.usage, f"hostApplicationMetric[{each.name}].usage"),
        )
        for each in status.host_application_metric
    )
    whole: Mapping[str, Quantity] = {}
    system: Mapping[str, Quantity] = {}
    used = measured = NOTHING
    if status.node_metric is not None:
        whole = status.node_metric.node_usage.resources
        system = status.node_metric.system_usage.resources
        used = reading.amount(status.node_metric.node_usage, "nodeMetric.nodeUsage")
        measured = reading.amount(status.node_metric.system_usage, "nodeMetric.systemUsage")
    left = (
        used - total(each.used for each in pods) - total(amount for _, amount in hosts)
    ).at_least_zero()
    missing = [name for name in (CPU, MEMORY) if name not in whole and name not in system]
    reclaimable = status.prod_reclaimable_metric
    return NodeReport(
        at=status.update_time,
        node=used if CPU in whole and MEMORY in whole else None,
        system=Amount(
            measured.cpu if CPU in system else left.cpu,
            measured.memory if MEMORY in system else left.memory,
        ),
        pods=pods,
        hosts=hosts,
        reclaimable=(
            reading.amount(reclaimable.resource, "prodReclaimableMetric.resource")
            if reclaimable is not None
            else NOTHING
        ),
        unmeasured=(
            f"NodeMetric {node} reports no use of {' and '.join(missing)}: "
            "neither nodeUsage nor systemUsage contains it"
            if missing
            else ""
        ),
        problems=tuple(reading.problems),
    )


class _Reading:
    """Reads the amounts of one report and collects those out of range in `problems`."""

    def __init__(self, obj: str, capacity: Amount) -> None:
        self._obj = obj
        self._capacity = capacity
        self.problems: list[InputError] = []

    def amount(self, resources: ResourceMap, field: str) -> Amount:
        amounts = resources.resources
        read = Amount.of(amounts)
        cpu = self._bounded(read.cpu, self._capacity.cpu, amounts.get(CPU), f"{field}[{CPU}]")
        memory = self._bounded(
            read.memory, self._capacity.memory, amounts.get(MEMORY), f"{field}[{MEMORY}]"
        )
        return read if cpu == read.cpu and memory == read.memory else Amount(cpu, memory)

    def _bounded(self, value: int, capacity: int, quantity: Quantity | None, field: str) -> int:
        if 0 <= value <= _FAR_ABOVE * capacity or (value >= 0 and not capacity):
            return value
        bound, problem = (
            (0, "is negative; it counts as 0")
            if value < 0
            else (capacity, "is far above the node's capacity; it counts as the capacity")
        )
        self.problems.append(
            InputError(obj=self._obj, field=f"status.{field}", value=str(quantity), problem=problem)
        )
        return bound
