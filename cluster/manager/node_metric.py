"""The controller of NodeMetrics: one object for each Node, whose spec configures its reports.

Rules: docs/facts/manager.md, "NodeSLO and NodeMetric".
"""

from __future__ import annotations

from typing import Any

import msgspec

from apis.core import Node
from apis.keys import ANNOTATION_COLOCATION_STRATEGY
from apis.meta import format_duration, parse_duration
from apis.node_strategy import node_colocation
from apis.nodemetric import NodeMetric, NodeMetricCollectPolicy
from apis.slo_config import ColocationStrategy
from cluster.manager.config_source import COLOCATION, SLOConfigSource
from cluster.manager.per_node import PerNode
from cluster.metrics import ManagerMetrics
from kube.cache import Cache, Change, Event
from kube.client import Client
from kube.resources import NODE_METRICS


def collect_policy(strategy: ColocationStrategy) -> dict[str, Any]:
    """Return `metricCollectPolicy`; with co-location off its defaults, so that nodes report."""
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


def node_metric_controller(
    client: Client,
    nodes: Cache[Node],
    node_metrics: Cache[NodeMetric],
    source: SLOConfigSource,
    metrics: ManagerMetrics,
) -> PerNode[NodeMetric]:
    """Return the controller of the specs of NodeMetrics; koordlet writes the status."""

    def wanted(node: Node, stored: NodeMetric | None) -> dict[str, Any] | None:
        if not source.colocation_known:
            return None
        if stored is not None and not source.colocation_healthy:
            return None
        colocation = node_colocation(
            source.config,
            name=node.metadata.name,
            labels=node.metadata.labels,
            annotations=node.metadata.annotations,
        )
        metrics.node_metric_parse.labels("succeeded", "").inc()
        policy = collect_policy(colocation.strategy)
        spec = {"metricCollectPolicy": policy}
        if stored is None:
            return {"metadata": {"name": node.metadata.name}, "spec": spec}
        if stored.spec.metric_collect_policy == msgspec.convert(policy, NodeMetricCollectPolicy):
            return None
        return {"spec": spec}

    return PerNode(
        client,
        NODE_METRICS,
        nodes,
        node_metrics,
        source,
        name="nodemetric",
        wanted=wanted,
        annotation=ANNOTATION_COLOCATION_STRATEGY,
        part=COLOCATION,
        matters=_changes_the_spec,
        outcomes=metrics.node_metric,
    )


def _changes_the_spec(event: Event[NodeMetric]) -> bool:
    """Return whether an event changes the spec; each node's report changes only the status."""
    old = event.old
    return event.change is not Change.MODIFIED or old is None or old.spec != event.new.spec
