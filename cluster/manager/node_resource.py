"""The controller of the resources that Nodes offer: which change requeues which node, and when.

A node is requeued for the moment at which its report becomes stale, so that it stops offering
resources without another event. Upstream has no such timer. What is written:
docs/facts/manager.md, "Freshness of a report" and "What is written to a Node".
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from apis.core import Node, Pod
from apis.decode import decode_object
from apis.device import Device
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_CPU_BASIC_INFO,
    BATCH_CPU,
    BATCH_MEMORY,
    MID_CPU,
    MID_MEMORY,
)
from apis.meta import ObjectReference
from apis.node_strategy import node_colocation
from apis.nodemetric import NodeMetric
from apis.slo_config import (
    ColocationStrategy,
    CPUNormalizationStrategy,
    ResourceAmplificationStrategy,
)
from apis.topology import NodeResourceTopology
from cluster.manager.config_source import NODE_RESOURCE, SLOConfigSource
from cluster.manager.node_inputs import NodeInputs, PodFacts, pod_facts
from cluster.manager.node_offer import PLUGINS, NodeView, Wanted, decide
from cluster.manager.node_patches import (
    metadata_patch,
    status_patch,
    without_explanation,
    zones_patch,
)
from cluster.metrics import ManagerMetrics
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client
from kube.events import EventRecorder
from kube.queue import WorkQueue
from kube.resources import NODE_RESOURCE_TOPOLOGIES, NODES, Resource

_log = logging.getLogger(__name__)

_LATENESS_SECONDS: Final = 1.0
"""Added to the time at which a report becomes stale. Chosen: rounding and small steps of the clock
must not let the visit come too early, which would cost another one."""
_IMPLAUSIBLE_SHOWN: Final = 3
"""Amounts in one log line and one event. An event holds 1,024 characters, which three amounts fill
if names of pods are long."""


class NodeResourceController:
    """Keeps the resources, annotations and labels of Nodes and the zones of topologies."""

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
        self._implausible: dict[str, frozenset[str]] = {}
        self._pods: dict[str, dict[str, PodFacts]] = {}
        pods.subscribe(self._pod_changed)
        nodes.subscribe(self._node_changed)
        node_metrics.subscribe(self._metric_changed)
        topologies.subscribe(self._topology_changed)
        devices.subscribe(self._device_changed)
        source.subscribe(self._config_changed)

    # Events requeue a node only if an input changed; heartbeats of kubelet do not.

    def _pod_changed(self, event: Event[Pod]) -> None:
        if event.old is not None and event.old.spec.node_name:
            active = self._pods.get(event.old.spec.node_name, {})
            active.pop(event.key, None)
            if not active:
                self._pods.pop(event.old.spec.node_name, None)
        facts = pod_facts(event.new) if event.new.spec.node_name else None
        if event.change is not Change.DELETED and facts is not None:
            self._pods.setdefault(event.new.spec.node_name, {})[event.key] = facts

    def _node_changed(self, event: Event[Node]) -> None:
        old, new = event.old, event.new
        if event.change is Change.DELETED:
            self._forget(new.metadata.name)
            return
        if (
            old is None
            or old.metadata.labels != new.metadata.labels
            or old.metadata.annotations != new.metadata.annotations
            or old.status.allocatable != new.status.allocatable
            or old.status.capacity != new.status.capacity
        ):
            self.queue.add(new.metadata.name)

    def _forget(self, name: str) -> None:
        self._written_at.pop(name, None)
        self._problems.pop(name, None)
        self._implausible.pop(name, None)
        self.queue.forget(name)

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
        """Return the inputs of one node, None if the node does not exist."""
        node = self._nodes.get(name)
        if node is None:
            return None
        config = self._source.config
        labels = node.metadata.labels
        metric = self._node_metrics.get(name)
        normalization, _ = config.cpu_normalization.of(labels)
        amplification, _ = config.resource_amplification.of(labels)
        return NodeView(
            inputs=NodeInputs(
                node=node,
                metric=metric.status if metric is not None else None,
                pods=tuple(self._pods.get(name, {}).values()),
            ),
            metric=metric,
            topology=self._topologies.get(name),
            device=self._devices.get(name),
            device_readable=not self._devices.left_out(name),
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
        """Write what differs on one node; return seconds until it is due again.

        It is due when its report becomes stale or its next refresh is due, whichever is first.
        """
        view = self.view(name)
        if view is None:
            # A reconcile that ran while the node was deleted has added entries again.
            self._forget(name)
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
        self._report(view.inputs.node, wanted)
        await self._write(name, view, wanted)
        self._metrics.node_resource.labels("succeeded", "").inc()
        pauses = [view.colocation.strategy.update_time_threshold_seconds + _LATENESS_SECONDS]
        if wanted.stale_in is not None:
            pauses.append(wanted.stale_in + _LATENESS_SECONDS)
        return min(pauses)

    async def _write(self, name: str, view: NodeView, wanted: Wanted) -> None:
        """Write what differs. A refused part does not prevent the other writes."""
        node = view.inputs.node
        strategy = view.colocation.strategy
        threshold = strategy.resource_diff_threshold
        refused: list[ApiError] = []

        async def write(
            resource: Resource, patch: Mapping[str, Any], failure: str, subresource: str = ""
        ) -> bool:
            if not patch:
                return False
            try:
                await self._client.patch(
                    resource, name, msgspec.json.encode(patch), subresource=subresource
                )
            except ApiError as error:
                smaller = without_explanation(patch)
                if error.too_large and smaller is not None:
                    return await write(resource, smaller, failure, subresource)
                self._metrics.node_resource.labels("failed", failure).inc()
                if not error.not_found:
                    refused.append(error)
                return False
            self.writes += 1
            return True

        if view.topology is not None:
            zones = zones_patch(view.topology, wanted, threshold=threshold)
            await write(NODE_RESOURCE_TOPOLOGIES, zones, "updateNodeResourceTopology")
        refresh = "due" if self._due(name, strategy) else ""
        status = status_patch(node, wanted, threshold=threshold, refresh=refresh)
        if await write(NODES, status, "updateNodeStatus", "status"):
            self._written_at[name] = time.monotonic()
        await write(NODES, metadata_patch(node, wanted), "patchNodeMeta")
        if refused:
            raise refused[0]

    def _due(self, name: str, strategy: ColocationStrategy) -> bool:
        written = self._written_at.get(name)
        if written is None:
            # Unknown after a start: the first refreshes are spread over one interval, so that a
            # fail-over does not write all nodes at once.
            written = self._started - random.uniform(0, strategy.update_time_threshold_seconds)
            self._written_at[name] = written
        return time.monotonic() - written >= strategy.update_time_threshold_seconds

    def _report(self, node: Node, wanted: Wanted) -> None:
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
        about = ObjectReference(api_version="v1", kind="Node", name=name, uid=node.metadata.uid)
        if problems != self._problems.get(name, ()):
            self._problems[name] = problems
            for problem in problems:
                self._events.warning(about, "InvalidNodeConfig", problem)
        self._tell_implausible(name, about, wanted.implausible)
        for counter in self._calculated:
            counter.inc()

    def _tell_implausible(
        self, name: str, about: ObjectReference, found: tuple[InputError, ...]
    ) -> None:
        """Report bounded amounts once, and again only when other fields are concerned."""
        fields = frozenset(error.field for error in found)
        if fields == self._implausible.get(name, frozenset()):
            return
        if not fields:
            del self._implausible[name]
            return
        self._implausible[name] = fields
        shown = "; ".join(str(error) for error in found[:_IMPLAUSIBLE_SHOWN])
        more = len(found) - _IMPLAUSIBLE_SHOWN
        text = f"{shown}; and {more} more" if more > 0 else shown
        _log.warning("%s", text)
        self._events.warning(about, "ImplausibleUsage", text)
