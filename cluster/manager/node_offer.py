"""What a Node should offer: extended resources, annotations, labels, batch resources of zones.

`decide` is a pure function of everything that is known about a node. Formulas and what is written
where: docs/facts/manager.md, "Batch resources", "Mid resources" and "What is written to a Node".

Two deliberate differences from upstream: GPU and RDMA resources follow the devices also while
co-location is off, and zone resources are withdrawn together with the node's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from apis.core import Node
from apis.decode import Embedded, canonical_json, decode_field, field_decoder
from apis.device import Device
from apis.errors import InputError
from apis.explanation import (
    ANNOTATION_RESOURCE_EXPLANATION,
    Explanation,
    NodeExplanation,
    explanation_text,
)
from apis.keys import (
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_ORIGIN_EXTENDED_ALLOCATABLE,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_THIRD_PARTY_ALLOCATIONS,
    BATCH_CPU,
    BATCH_MEMORY,
    MID_CPU,
    MID_MEMORY,
    RDMA,
)
from apis.meta import parse_time
from apis.node_strategy import NodeColocation
from apis.nodemetric import NodeMetric
from apis.qos import PriorityClass
from apis.quantity import ZERO, Quantity, ResourceList, add_resources
from apis.slo_config import (
    ColocationStrategy,
    CPUNormalizationStrategy,
    ResourceAmplificationStrategy,
)
from apis.topology import NodeResourceTopology, numa_id
from cluster.manager.amounts import Amount
from cluster.manager.batch import amplified, batch_resources, batch_zone_resources
from cluster.manager.devices import GPU_RESOURCES, gpu_labels, gpu_resources, rdma_resources
from cluster.manager.mid import mid_resources
from cluster.manager.node_inputs import NodeInputs
from cluster.manager.normalization import (
    amplification,
    amplification_text,
    annotated_amplification,
    annotated_normalization,
    normalization_percent,
)
from cluster.ratios import ratio_text

PLUGINS: Final = (
    "MidResource",
    "BatchResource",
    "CPUNormalization",
    "ResourceAmplification",
    "GPUDeviceResource",
    "RDMADeviceResource",
)

BATCH: Final = (BATCH_CPU, BATCH_MEMORY)
_MID: Final = (MID_CPU, MID_MEMORY)


class _ThirdParty(Embedded, frozen=True):
    name: str = ""
    priority: str = ""
    resources: ResourceList = msgspec.field(default_factory=dict)


class _ThirdPartyAllocations(Embedded, frozen=True):
    allocations: tuple[_ThirdParty, ...] = ()


_decode_third_party = field_decoder(_ThirdPartyAllocations)


@dataclass(slots=True)
class Wanted:
    """The desired state of a node. None removes a resource or annotation."""

    resources: dict[str, Quantity | None] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    """Resources of which any difference is written, because they count devices."""
    annotations: dict[str, str | None] = field(default_factory=dict)
    """Annotations that are written as soon as they differ."""
    along: dict[str, str | None] = field(default_factory=dict)
    """Annotations that are written only together with resources."""
    labels: dict[str, str] = field(default_factory=dict)
    zones: dict[int, Amount] | None = None
    """Batch resources by NUMA node; empty removes them, None leaves them unchanged."""
    normalization: int = 100
    """In hundredths; 100 changes nothing."""
    problems: list[str] = field(default_factory=list)
    implausible: tuple[InputError, ...] = ()
    """Amounts of the report that were out of range and are bounded."""
    stale_in: float | None = None
    """Seconds until the report becomes stale, None without a fresh report."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything that is known about one node."""

    inputs: NodeInputs
    metric: NodeMetric | None
    topology: NodeResourceTopology | None
    device: Device | None
    colocation: NodeColocation
    normalization: CPUNormalizationStrategy
    amplification: ResourceAmplificationStrategy
    device_readable: bool = True
    """False where the node has a Device that cannot be decoded."""

    @property
    def follows_devices(self) -> bool:
        """Whether the manager sets the GPU and RDMA resources of this node.

        Without a Device and with co-location off they belong to a device plugin. If the manager
        removed them, kubelet would report them again, and so on.
        """
        if self.device is None:
            return self.device_readable and self.colocation.enabled
        return True


def decide(view: NodeView, *, plugins: frozenset[str], gpu_shares: bool, now: datetime) -> Wanted:
    """Return the desired state of a node."""
    wanted = Wanted()
    wanted.problems += view.colocation.problems
    if view.colocation.enabled:
        _decide_ratios(view, wanted, plugins)
        _decide_extended(view, wanted, plugins, now)
    else:
        _withdraw(wanted, plugins, "co-location is off for this node")
        if "ResourceAmplification" in plugins:
            wanted.annotations[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = None
    if view.follows_devices:
        _follow_devices(view, wanted, plugins, gpu_shares)
    return wanted


def _follow_devices(
    view: NodeView, wanted: Wanted, plugins: frozenset[str], gpu_shares: bool
) -> None:
    if "GPUDeviceResource" in plugins:
        offered = gpu_resources(view.device, share_counts=gpu_shares)
        wanted.resources.update({name: offered.get(name) for name in GPU_RESOURCES})
        wanted.exact.update(GPU_RESOURCES)
        wanted.labels.update(gpu_labels(view.device))
    if "RDMADeviceResource" in plugins:
        wanted.resources[RDMA] = rdma_resources(view.device).get(RDMA)
        wanted.exact.add(RDMA)


def _decide_ratios(view: NodeView, wanted: Wanted, plugins: frozenset[str]) -> None:
    node = view.inputs.node
    current = annotated_normalization(node)
    ratio = current
    if "CPUNormalization" in plugins:
        try:
            ratio = normalization_percent(node, view.topology, view.normalization)
        except InputError as error:
            wanted.problems.append(str(error))
        else:
            if current is None or abs(current - ratio) > 1:
                wanted.annotations[ANNOTATION_CPU_NORMALIZATION_RATIO] = ratio_text(ratio)
            else:
                ratio = current
    wanted.normalization = ratio or 100
    if "ResourceAmplification" in plugins:
        found = amplification(ratio, view.amplification, annotated_amplification(node))
        wanted.problems += found.problems
        wanted.annotations[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = (
            amplification_text(found.percents) if found.percents else None
        )


def _decide_extended(
    view: NodeView, wanted: Wanted, plugins: frozenset[str], now: datetime
) -> None:
    strategy = view.colocation.strategy
    problem, stale_in = freshness(view.metric, strategy, now)
    if problem is None and view.inputs.report is not None:
        wanted.implausible = view.inputs.report.problems
        problem = view.inputs.report.unmeasured or None
    if problem is not None:
        _withdraw(wanted, plugins, problem)
        return
    wanted.stale_in = stale_in
    explanations: dict[str, Explanation] = {}
    if "BatchResource" in plugins:
        batch = batch_resources(view.inputs, strategy)
        explanations |= batch.explanations
        _offer_batch(view, wanted, batch.amount, explanations)
        zones = zone_allocatable(view.topology)
        wanted.zones = batch_zone_resources(view.inputs, zones, strategy) if zones else None
    if "MidResource" in plugins:
        mid = mid_resources(view.inputs, strategy)
        explanations |= mid.explanations
        wanted.resources[MID_CPU] = Quantity.of(mid.amount.cpu)
        wanted.resources[MID_MEMORY] = Quantity.of_bytes(mid.amount.memory)
    if explanations:
        wanted.along[ANNOTATION_RESOURCE_EXPLANATION] = explanation_text(
            NodeExplanation(explanations)
        )


def _offer_batch(
    view: NodeView, wanted: Wanted, amount: Amount, explanations: dict[str, Explanation]
) -> None:
    offered: ResourceList = {
        BATCH_CPU: Quantity.of(amplified(amount.cpu, wanted.normalization)),
        BATCH_MEMORY: Quantity.of_bytes(amount.memory),
    }
    wanted.along[ANNOTATION_ORIGIN_EXTENDED_ALLOCATABLE] = canonical_json({"resources": offered})
    taken, problem = third_party(view.inputs.node)
    if problem:
        wanted.problems.append(problem)
    for name, quantity in offered.items():
        left = max(quantity - taken.get(name, ZERO), ZERO)
        wanted.resources[name] = left
        notes = []
        if name == BATCH_CPU and wanted.normalization > 100:
            notes.append(f"x {ratio_text(wanted.normalization)} CPU normalization")
        if taken.get(name):
            notes.append(f"- {taken[name]} third-party allocations")
        if notes:
            explanations[name] = msgspec.structs.replace(
                explanations[name], note=f"offered {left}: result {', '.join(notes)}"
            )


def _withdraw(wanted: Wanted, plugins: frozenset[str], reason: str) -> None:
    names: list[str] = []
    if "MidResource" in plugins:
        names += _MID
    if "BatchResource" in plugins:
        names += BATCH
        wanted.zones = {}
        wanted.along[ANNOTATION_ORIGIN_EXTENDED_ALLOCATABLE] = canonical_json(
            {"resources": dict.fromkeys(BATCH, "0")}
        )
    wanted.resources.update(dict.fromkeys(names))
    wanted.along[ANNOTATION_RESOURCE_EXPLANATION] = explanation_text(
        NodeExplanation({name: Explanation("withdrawn", 0, note=reason) for name in names})
    )


def freshness(
    metric: NodeMetric | None, strategy: ColocationStrategy, now: datetime
) -> tuple[str | None, float | None]:
    """Return (why the report cannot be used, None) or (None, seconds until it is stale)."""
    if metric is None:
        return "the node has no NodeMetric", None
    text = metric.status.update_time
    if text is None:
        return f"NodeMetric {metric.metadata.name} has no status.updateTime: no report yet", None
    try:
        updated = parse_time(text)
    except ValueError:
        return f"NodeMetric {metric.metadata.name} has no readable updateTime: {text!r}", None
    left = strategy.degrade_time_minutes * 60 - (now - updated).total_seconds()
    if left < 0:
        return (
            f"NodeMetric {metric.metadata.name} is stale: reported at {text}, "
            f"degradeTimeMinutes {strategy.degrade_time_minutes}",
            None,
        )
    return None, left


def third_party(node: Node) -> tuple[ResourceList, str | None]:
    """Return the batch resources that other schedulers allocated, and a problem or None."""
    text = node.metadata.annotations.get(ANNOTATION_THIRD_PARTY_ALLOCATIONS)
    if not text:
        return {}, None
    try:
        found = decode_field(
            _decode_third_party,
            text,
            obj=f"Node {node.metadata.name}",
            field=f'metadata.annotations["{ANNOTATION_THIRD_PARTY_ALLOCATIONS}"]',
        )
    except InputError as error:
        return {}, str(error)
    batch = [
        entry.resources
        for entry in found.allocations
        if entry.priority == PriorityClass.BATCH.value
    ]
    taken = add_resources(*batch)
    negative = sorted(name for name, amount in taken.items() if amount < ZERO)
    if negative:
        problem = InputError(
            obj=f"Node {node.metadata.name}",
            field=f'metadata.annotations["{ANNOTATION_THIRD_PARTY_ALLOCATIONS}"]',
            value=str(taken[negative[0]]),
            problem=f"{negative[0]} is negative; it is ignored",
        )
        return {name: amount for name, amount in taken.items() if amount >= ZERO}, str(problem)
    return taken, None


def zone_allocatable(topology: NodeResourceTopology | None) -> dict[int, Amount]:
    """Return NUMA node -> allocatable cpu and memory; empty if no zone has either."""
    zones: dict[int, Amount] = {}
    for position, zone in enumerate(topology.zones if topology is not None else ()):
        if zone.type != "Node":
            continue
        number = numa_id(zone)
        amounts = {resource.name: resource.allocatable for resource in zone.resources}
        zones[position if number is None else number] = Amount.of(amounts)
    return zones if any(amount.cpu or amount.memory for amount in zones.values()) else {}
