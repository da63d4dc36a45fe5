"""What a Node offers beyond its own CPU and memory: decided here, written as the smallest patch.

One reconcile turns everything known about a node into the resources, annotations and labels that
it should carry, compares them with what it carries, and writes only what differs enough. A node
whose report grows stale is visited again at the moment it does, so it cannot keep offering what
nobody measures. Source: manager.md sections 7, 8.6 and 14.

Left on purpose: own keys are patched instead of the whole status being replaced; a refresh writes
only if something differs; GPU and RDMA follow their devices also while co-location is off; zone
resources are withdrawn together with the node's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from apis.core import Node, Pod
from apis.decode import canonical_json, decode_field, decode_object, json_decoder, to_plain
from apis.device import Device
from apis.errors import InputError
from apis.explanation import (
    ANNOTATION_RESOURCE_EXPLANATION,
    Explanation,
    NodeExplanation,
    explanation_text,
)
from apis.keys import (
    ANNOTATION_CPU_BASIC_INFO,
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
from apis.meta import ObjectReference, parse_time
from apis.nodemetric import NodeMetric
from apis.qos import PriorityClass
from apis.quantity import ZERO, Quantity, ResourceList, add_resources
from apis.slo_config import (
    ColocationStrategy,
    CPUNormalizationStrategy,
    NodeColocation,
    ResourceAmplificationStrategy,
    node_colocation,
)
from apis.topology import NodeResourceTopology, Zone, ZoneResource, numa_id
from cluster.manager.batch import amplified, batch_resources, batch_zone_resources
from cluster.manager.config_source import NODE_RESOURCE, SLOConfigSource
from cluster.manager.devices import GPU_RESOURCES, gpu_labels, gpu_resources, rdma_resources
from cluster.manager.metrics import ManagerMetrics
from cluster.manager.mid import mid_resources
from cluster.manager.node_inputs import Amount, NodeInputs, PodFacts, pod_facts
from cluster.manager.normalization import (
    amplification_percents,
    amplification_text,
    annotated_normalization,
    normalization_percent,
    ratio_text,
)
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client
from kube.events import EventRecorder
from kube.queue import WorkQueue
from kube.resources import NODE_RESOURCE_TOPOLOGIES, NODES

PLUGINS: Final = (
    "MidResource",
    "BatchResource",
    "CPUNormalization",
    "ResourceAmplification",
    "GPUDeviceResource",
    "RDMADeviceResource",
)

_BATCH: Final = (BATCH_CPU, BATCH_MEMORY)
_MID: Final = (MID_CPU, MID_MEMORY)
_LATENESS_SECONDS: Final = 1.0


class _ThirdParty(msgspec.Struct):
    priority: str = ""
    resources: ResourceList = msgspec.field(default_factory=dict)


class _ThirdPartyAllocations(msgspec.Struct):
    allocations: list[_ThirdParty] = msgspec.field(default_factory=list)


_decode_third_party = json_decoder(_ThirdPartyAllocations)


@dataclass(slots=True)
class Wanted:
    """What a node should carry. A resource, annotation or label that is None is to be removed."""

    resources: dict[str, Quantity | None] = field(default_factory=dict)
    exact: set[str] = field(default_factory=set)
    """Resources that are counts: any difference is written."""
    annotations: dict[str, str | None] = field(default_factory=dict)
    """Annotations that cause a write when they differ."""
    along: dict[str, str | None] = field(default_factory=dict)
    """Annotations that ride along when resources are written."""
    labels: dict[str, str] = field(default_factory=dict)
    zones: dict[int, Amount] | None = None
    """Batch resources by NUMA node; empty withdraws them, None leaves them alone."""
    normalization: int = 100
    problems: list[str] = field(default_factory=list)
    stale_in: float | None = None
    """Seconds until the report is stale, None without a fresh one."""


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


def decide(view: NodeView, *, plugins: frozenset[str], gpu_shares: bool, now: datetime) -> Wanted:
    """Return what the node should carry."""
    wanted = Wanted()
    wanted.problems += view.colocation.problems
    if view.colocation.enabled:
        _decide_ratios(view, wanted, plugins)
        _decide_extended(view, wanted, plugins, now)
    else:
        _withdraw(wanted, plugins, "co-location is off for this node")
        if "ResourceAmplification" in plugins:
            wanted.annotations[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = None
    if "GPUDeviceResource" in plugins:
        offered = gpu_resources(view.device, share_counts=gpu_shares)
        wanted.resources.update({name: offered.get(name) for name in GPU_RESOURCES})
        wanted.exact.update(GPU_RESOURCES)
        wanted.labels.update(gpu_labels(view.device))
    if "RDMADeviceResource" in plugins:
        wanted.resources[RDMA] = rdma_resources(view.device).get(RDMA)
        wanted.exact.add(RDMA)
    return wanted


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
        try:
            percents = amplification_percents(ratio, view.amplification)
        except InputError as error:
            wanted.problems.append(str(error))
        else:
            wanted.annotations[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = (
                amplification_text(percents) if percents else None
            )


def _decide_extended(
    view: NodeView, wanted: Wanted, plugins: frozenset[str], now: datetime
) -> None:
    strategy = view.colocation.strategy
    problem, stale_in = freshness(view.metric, strategy, now)
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
        names += _BATCH
        wanted.zones = {}
        wanted.along[ANNOTATION_ORIGIN_EXTENDED_ALLOCATABLE] = canonical_json(
            {"resources": dict.fromkeys(_BATCH, "0")}
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
        return f"NodeMetric {metric.metadata.name} was never reported", None
    try:
        updated = parse_time(text)
    except ValueError:
        return f"NodeMetric {metric.metadata.name} has no readable updateTime", None
    left = strategy.degrade_time_minutes * 60 - (now - updated).total_seconds()
    if left < 0:
        return (
            f"NodeMetric {metric.metadata.name} is stale: reported at {text}, "
            f"degradeTimeMinutes {strategy.degrade_time_minutes}",
            None,
        )
    return None, left


def third_party(node: Node) -> tuple[ResourceList, str | None]:
    """Return what others hand out of the node's batch resources, and a problem with reading it."""
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
    return add_resources(*batch), None


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


# --- what to write -----------------------------------------------------------------------------


def differs(old: Quantity | None, new: Quantity | None, threshold: float) -> bool:
    """Return whether an offered amount changed enough to be written."""
    if old is None or new is None:
        return (old is None) != (new is None)
    change = abs(new.milli_value() - old.milli_value())
    return change > abs(old.milli_value()) * threshold


def status_patch(node: Node, wanted: Wanted, *, threshold: float, refresh: str) -> dict[str, Any]:
    """Return the merge patch of nodes/status, {} if nothing needs to be written.

    threshold: relative change that is worth a write. refresh: "due" writes any difference, ""
    only those above the threshold.
    """
    allocatable, capacity = node.status.allocatable, node.status.capacity
    urgent = any(
        differs(
            allocatable.get(name),
            new,
            0.0 if refresh == "due" or name in wanted.exact else threshold,
        )
        or (name in capacity) != (new is not None)
        for name, new in wanted.resources.items()
    )
    if not urgent:
        return {}
    parts: dict[str, dict[str, str | None]] = {"capacity": {}, "allocatable": {}}
    for name, new in wanted.resources.items():
        for part, stored in (("capacity", capacity), ("allocatable", allocatable)):
            if stored.get(name) != new:
                parts[part][name] = None if new is None else str(new)
    patch: dict[str, Any] = {"status": {part: what for part, what in parts.items() if what}}
    annotations = {
        key: text
        for key, text in wanted.along.items()
        if node.metadata.annotations.get(key) != text
    }
    if annotations:
        patch["metadata"] = {"annotations": annotations}
    return patch


def metadata_patch(node: Node, wanted: Wanted) -> dict[str, Any]:
    """Return the merge patch of the Node's annotations and labels, {} if they are right."""
    metadata: dict[str, Any] = {}
    annotations = {
        key: text
        for key, text in wanted.annotations.items()
        if node.metadata.annotations.get(key) != text
    }
    labels = {
        key: text for key, text in wanted.labels.items() if node.metadata.labels.get(key) != text
    }
    if annotations:
        metadata["annotations"] = annotations
    if labels:
        metadata["labels"] = labels
    return {"metadata": metadata} if metadata else {}


def zones_patch(
    topology: NodeResourceTopology, wanted: Wanted, *, threshold: float
) -> dict[str, Any]:
    """Return the merge patch that puts batch resources into the zones, {} if they are right."""
    if wanted.zones is None:
        return {}
    changed = False
    zones: list[Zone] = []
    for position, zone in enumerate(topology.zones):
        number = numa_id(zone)
        amount = wanted.zones.get(position if number is None else number)
        new: dict[str, Quantity] = {}
        if amount is not None and zone.type == "Node":
            cpu = amplified(amount.cpu, wanted.normalization)
            new = {BATCH_CPU: Quantity.of(cpu), BATCH_MEMORY: Quantity.of_bytes(amount.memory)}
        kept = {resource.name: resource for resource in zone.resources}
        for name in _BATCH:
            old = kept.get(name)
            quantity = new.get(name)
            if not differs(old.allocatable if old else None, quantity, threshold):
                continue
            changed = True
            if quantity is None:
                del kept[name]
            else:
                kept[name] = ZoneResource(name, quantity, quantity, quantity)
        ordered = tuple(kept[name] for name in sorted(kept))
        zones.append(msgspec.structs.replace(zone, resources=ordered))
    if not changed:
        return {}
    return {
        "metadata": {"resourceVersion": topology.metadata.resource_version},
        "zones": to_plain(zones),
    }


# --- the controller ----------------------------------------------------------------------------


class NodeResourceController:
    """Keeps the resources that nodes offer."""

    name = "noderesource"

    def __init__(
        self,
        client: Client,
        nodes: Cache[Node],
        pods: Cache[Pod],
        node_metrics: Cache[NodeMetric],
        topologies: Cache[NodeResourceTopology],
        devices: Cache[Device],
        source: SLOConfigSource,
        events: EventRecorder,
        metrics: ManagerMetrics,
        *,
        plugins: frozenset[str] = frozenset(PLUGINS),
        gpu_shares: bool = False,
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._node_metrics = node_metrics
        self._topologies = topologies
        self._devices = devices
        self._source = source
        self._events = events
        self._metrics = metrics
        self._plugins = plugins
        self._gpu_shares = gpu_shares
        self._calculated = tuple(
            metrics.plugin.labels(plugin, "succeeded", "ResourceCalculate") for plugin in plugins
        )
        self.queue = WorkQueue(self.name)
        self.writes = 0
        self._started = time.monotonic()
        self._written_at: dict[str, float] = {}
        self._problems: dict[str, tuple[str, ...]] = {}
        self._pods: dict[str, dict[str, tuple[tuple[str, str], PodFacts | None]]] = {}
        pods.subscribe(self._pod_changed)
        nodes.subscribe(self._node_changed)
        node_metrics.subscribe(self._metric_changed)
        topologies.subscribe(self._topology_changed)
        devices.subscribe(self._device_changed)
        source.subscribe(self._config_changed)

    # What changed decides which node is looked at again; heartbeats change nothing here.

    def _pod_changed(self, event: Event[Pod]) -> None:
        pod = event.new
        if event.old is not None and event.old.spec.node_name:
            self._pods.get(event.old.spec.node_name, {}).pop(event.key, None)
        if event.change is not Change.DELETED and pod.spec.node_name:
            key = (pod.metadata.namespace, pod.metadata.name)
            self._pods.setdefault(pod.spec.node_name, {})[event.key] = (key, pod_facts(pod))

    def _node_changed(self, event: Event[Node]) -> None:
        old, new = event.old, event.new
        if event.change is Change.DELETED:
            name = new.metadata.name
            self._written_at.pop(name, None)
            self._problems.pop(name, None)
            self.queue.forget(name)
            return
        if (
            old is None
            or old.metadata.labels != new.metadata.labels
            or old.metadata.annotations != new.metadata.annotations
            or old.status.allocatable != new.status.allocatable
            or old.status.capacity != new.status.capacity
        ):
            self.queue.add(new.metadata.name)

    def _metric_changed(self, event: Event[NodeMetric]) -> None:
        if (
            event.old is None
            or event.old.status != event.new.status
            or event.change is Change.DELETED
        ):
            self.queue.add(event.new.metadata.name)

    def _topology_changed(self, event: Event[NodeResourceTopology]) -> None:
        old, new = event.old, event.new
        if (
            old is None
            or old.zones != new.zones
            or old.metadata.annotations.get(ANNOTATION_CPU_BASIC_INFO)
            != new.metadata.annotations.get(ANNOTATION_CPU_BASIC_INFO)
        ):
            self.queue.add(new.metadata.name)

    def _device_changed(self, event: Event[Device]) -> None:
        old, new = event.old, event.new
        if (
            event.change is not Change.MODIFIED
            or old is None
            or old.spec != new.spec
            or old.metadata.labels != new.metadata.labels
        ):
            self.queue.add(new.metadata.name)

    def _config_changed(self, part: str) -> None:
        if part == NODE_RESOURCE:
            for name in self._nodes.items:
                self.queue.add(name)

    def view(self, name: str) -> NodeView | None:
        """Return what is known about a node, None if there is no such node."""
        node = self._nodes.get(name)
        if node is None:
            return None
        config = self._source.config
        labels = node.metadata.labels
        metric = self._node_metrics.get(name)
        listed = self._pods.get(name, {})
        normalization, _ = config.cpu_normalization.of(labels)
        amplification, _ = config.resource_amplification.of(labels)
        return NodeView(
            inputs=NodeInputs(
                node=node,
                metric=metric.status if metric is not None else None,
                pods=tuple(facts for _, facts in listed.values() if facts is not None),
                listed=frozenset(key for key, _ in listed.values()),
            ),
            metric=metric,
            topology=self._topologies.get(name),
            device=self._devices.get(name),
            colocation=node_colocation(
                config, name=name, labels=labels, annotations=node.metadata.annotations
            ),
            normalization=decode_object(
                normalization, CPUNormalizationStrategy, obj="cpu-normalization-config"
            ),
            amplification=decode_object(
                amplification,
                ResourceAmplificationStrategy,
                obj="resource-amplification-config",
            ),
        )

    async def reconcile(self, name: str) -> float | None:
        """Bring one node up to date; return seconds until its report is stale."""
        view = self.view(name)
        if view is None:
            self._metrics.node_resource.labels("succeeded", "reconcileNodeNotFound").inc()
            return None
        if not self._source.colocation_known:
            return None
        wanted = decide(
            view,
            plugins=self._plugins,
            gpu_shares=self._gpu_shares,
            now=datetime.now(UTC),
        )
        self._tell(view.inputs.node, wanted)
        await self._write(name, view, wanted)
        self._metrics.node_resource.labels("succeeded", "").inc()
        pauses = [view.colocation.strategy.update_time_threshold_seconds + _LATENESS_SECONDS]
        if wanted.stale_in is not None:
            pauses.append(wanted.stale_in + _LATENESS_SECONDS)
        return min(pauses)

    async def _write(self, name: str, view: NodeView, wanted: Wanted) -> None:
        node = view.inputs.node
        strategy = view.colocation.strategy
        threshold = strategy.resource_diff_threshold
        try:
            if view.topology is not None:
                zones = zones_patch(view.topology, wanted, threshold=threshold)
                if zones:
                    await self._patch(NODE_RESOURCE_TOPOLOGIES, name, zones)
            patch = status_patch(
                node,
                wanted,
                threshold=threshold,
                refresh="due" if self._due(name, strategy) else "",
            )
            if patch:
                await self._patch(NODES, name, patch, subresource="status")
                self._written_at[name] = time.monotonic()
            metadata = metadata_patch(node, wanted)
            if metadata:
                await self._patch(NODES, name, metadata)
        except ApiError as error:
            self._metrics.node_resource.labels("failed", "updateNodeStatus").inc()
            if not error.not_found:
                raise

    async def _patch(
        self, resource: Any, name: str, patch: Mapping[str, Any], *, subresource: str = ""
    ) -> None:
        await self._client.patch(
            resource, name, msgspec.json.encode(patch), subresource=subresource
        )
        self.writes += 1

    def _due(self, name: str, strategy: ColocationStrategy) -> bool:
        written = self._written_at.get(name)
        if written is None:
            # Unknown after a start: spread first refreshes, so a fail-over is no storm of writes.
            written = self._started - random.uniform(0, strategy.update_time_threshold_seconds)
            self._written_at[name] = written
        return time.monotonic() - written >= strategy.update_time_threshold_seconds

    def _tell(self, node: Node, wanted: Wanted) -> None:
        name = node.metadata.name
        for resource, unit in (
            (BATCH_CPU, "integer"),
            (BATCH_MEMORY, "byte"),
            (MID_CPU, "integer"),
            (MID_MEMORY, "byte"),
        ):
            amount = wanted.resources.get(resource)
            if amount is not None:
                self._metrics.set_allocatable(name, resource, unit, amount.value())
        problems = tuple(wanted.problems)
        if problems != self._problems.get(name, ()):
            self._problems[name] = problems
            about = ObjectReference(api_version="v1", kind="Node", name=name, uid=node.metadata.uid)
            for problem in problems:
                self._events.warning(about, "InvalidNodeConfig", problem)
        for counter in self._calculated:
            counter.inc()
