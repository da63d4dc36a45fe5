"""NodeMetric: one object per Node, its spec telling the node what to report and how often.

Source: manager.md section 5.
"""

from __future__ import annotations

from typing import Any

import msgspec

from apis.core import Node
from apis.keys import ANNOTATION_COLOCATION_STRATEGY
from apis.meta import format_duration, parse_duration
from apis.nodemetric import NodeMetric, NodeMetricCollectPolicy
from apis.slo_config import ColocationStrategy, node_colocation
from cluster.manager.config_source import COLOCATION, SLOConfigSource
from cluster.manager.metrics import ManagerMetrics
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, encode_object
from kube.queue import WorkQueue
from kube.resources import NODE_METRICS


def collect_policy(strategy: ColocationStrategy) -> dict[str, Any]:
    """Return the spec's policy; with co-location off the defaults hold, and nodes still report."""
    rules = strategy if strategy.enable else ColocationStrategy()
    return {
        "aggregateDurationSeconds": rules.metric_aggregate_duration_seconds,
        "reportIntervalSeconds": rules.metric_report_interval_seconds,
        "nodeAggregatePolicy": {
            "durations": [
                format_duration(parse_duration(text))
                for text in rules.metric_aggregate_policy.durations
            ]
        },
        "nodeMemoryCollectPolicy": rules.metric_memory_collect_policy,
    }


class NodeMetricController:
    """Keeps the spec of NodeMetric objects; their status belongs to the nodes."""

    name = "nodemetric"

    def __init__(
        self,
        client: Client,
        nodes: Cache[Node],
        node_metrics: Cache[NodeMetric],
        source: SLOConfigSource,
        metrics: ManagerMetrics,
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._node_metrics = node_metrics
        self._source = source
        self._metrics = metrics
        self.queue = WorkQueue(self.name)
        self.writes = 0
        nodes.subscribe(self._node_changed)
        node_metrics.subscribe(self._metric_changed)
        source.subscribe(self._config_changed)

    def _node_changed(self, event: Event[Node]) -> None:
        old, new = event.old, event.new
        if (
            event.change is not Change.MODIFIED
            or old is None
            or old.metadata.labels != new.metadata.labels
            or old.metadata.annotations.get(ANNOTATION_COLOCATION_STRATEGY)
            != new.metadata.annotations.get(ANNOTATION_COLOCATION_STRATEGY)
        ):
            self.queue.add(new.metadata.name)

    def _metric_changed(self, event: Event[NodeMetric]) -> None:
        old, new = event.old, event.new
        # Reports come every minute from every node and change no spec.
        if event.change is not Change.MODIFIED or old is None or old.spec != new.spec:
            self.queue.add(new.metadata.name)

    def _config_changed(self, part: str) -> None:
        if part == COLOCATION:
            for name in self._nodes.items:
                self.queue.add(name)

    async def reconcile(self, name: str) -> float | None:
        """Create, patch or delete the NodeMetric of one node."""
        node = self._nodes.get(name)
        stored = self._node_metrics.get(name)
        try:
            if node is None:
                self.queue.forget(name)
                if stored is not None:
                    await self._client.delete(NODE_METRICS, name, uid=stored.metadata.uid)
                    self.writes += 1
                return None
            await self._write(node, stored)
        except ApiError:
            reason = "deleteNodeMetric" if node is None else "updateNodeMetric"
            self._metrics.node_metric.labels("failed", reason).inc()
            raise
        self._metrics.node_metric.labels("succeeded", "").inc()
        return None

    async def _write(self, node: Node, stored: NodeMetric | None) -> None:
        if not self._source.colocation_known:
            return
        if stored is not None and not self._source.colocation_healthy:
            return
        name = node.metadata.name
        colocation = node_colocation(
            self._source.config,
            name=name,
            labels=node.metadata.labels,
            annotations=node.metadata.annotations,
        )
        self._metrics.node_metric_parse.labels("succeeded", "").inc()
        wanted = collect_policy(colocation.strategy)
        if stored is None:
            body = encode_object(
                NODE_METRICS, {"metadata": {"name": name}, "spec": {"metricCollectPolicy": wanted}}
            )
            try:
                await self._client.create(NODE_METRICS, body)
                self.writes += 1
            except ApiError as error:
                if not error.already_exists:
                    raise
        elif stored.spec.metric_collect_policy != msgspec.convert(wanted, NodeMetricCollectPolicy):
            patch = msgspec.json.encode({"spec": {"metricCollectPolicy": wanted}})
            try:
                await self._client.patch(NODE_METRICS, name, patch)
                self.writes += 1
            except ApiError as error:
                if not error.not_found:
                    raise
