"""The controller of NodeSLOs: one object for each Node, its spec from slo-controller-config.

An annotation of the object names the node entry that each block came from. Rules:
docs/facts/manager.md, "NodeSLO and NodeMetric".
"""

from __future__ import annotations

from typing import Any, Final

from apis.core import Node
from apis.decode import canonical_json
from apis.keys import ANNOTATION_NETWORK_BANDWIDTH
from apis.meta import ObjectReference
from apis.node_strategy import conform_node_slo, node_slo_spec
from apis.slo_config import NODE_SLO_BLOCKS
from cluster.manager.config_source import NODE_SLO, SLOConfigSource
from cluster.manager.objects import StoredNodeSLO, conformed_spec, plain_spec
from cluster.manager.per_node import PerNode
from cluster.metrics import ManagerMetrics
from kube.cache import Cache
from kube.client import Client
from kube.events import EventRecorder
from kube.patches import merge_patch
from kube.resources import NODE_SLOS

ANNOTATION_APPLIED_ENTRIES: Final = "slo.koordinator.sh/applied-entries"
"""JSON object: key of slo-controller-config -> name of the node entry that applied."""


def node_slo_controller(
    client: Client,
    nodes: Cache[Node],
    node_slos: Cache[StoredNodeSLO],
    source: SLOConfigSource,
    events: EventRecorder,
    metrics: ManagerMetrics,
) -> PerNode[StoredNodeSLO]:
    """Return the controller that keeps NodeSLOs equal to the configuration of their nodes."""
    return PerNode(
        client,
        NODE_SLOS,
        nodes,
        node_slos,
        source,
        name="nodeslo",
        wanted=_Rules(source, events, metrics).wanted,
        annotation=ANNOTATION_NETWORK_BANDWIDTH,
        part=NODE_SLO,
        matters=lambda _: True,
        outcomes=metrics.node_slo,
    )


class _Rules:
    """Computes the desired NodeSLO of a node from the configuration."""

    def __init__(
        self, source: SLOConfigSource, events: EventRecorder, metrics: ManagerMetrics
    ) -> None:
        self._source = source
        self._events = events
        self._metrics = metrics

    def wanted(self, node: Node, stored: StoredNodeSLO | None) -> dict[str, Any]:
        """Return the object to create, or the merge patch; {} if nothing differs."""
        data = bytes(stored.spec) if stored is not None else b""
        current = plain_spec(data)
        spec, entries = self._spec(node, current)
        applied = canonical_json(entries) if entries else None
        if stored is None:
            metadata: dict[str, Any] = {"name": node.metadata.name}
            if applied:
                metadata["annotations"] = {ANNOTATION_APPLIED_ENTRIES: applied}
            return {"metadata": metadata, "spec": spec}
        patch: dict[str, Any] = {}
        if conformed_spec(data) != spec:
            patch["spec"] = merge_patch(current, spec)
        if stored.metadata.annotations.get(ANNOTATION_APPLIED_ENTRIES) != applied:
            patch["metadata"] = {"annotations": {ANNOTATION_APPLIED_ENTRIES: applied}}
        return patch

    def _spec(self, node: Node, current: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        extensions = current.get("extensions")
        kept = extensions.get("Object") if isinstance(extensions, dict) else None
        result = node_slo_spec(
            self._source.config,
            name=node.metadata.name,
            labels=node.metadata.labels,
            annotations=node.metadata.annotations,
            extensions=kept if isinstance(kept, dict) else None,
        )
        self._metrics.node_slo_parse.labels(
            "failed" if result.problems else "succeeded",
            "getSystemConfigSpec" if result.problems else "",
        ).inc()
        for problem in result.problems:
            self._events.warning(
                ObjectReference(
                    api_version="v1",
                    kind="Node",
                    name=node.metadata.name,
                    uid=node.metadata.uid,
                ),
                "InvalidNodeConfig",
                problem,
            )
        spec = dict(result.spec)
        conformed: dict[str, Any] | None = None
        for key in self._source.never_good:
            block = NODE_SLO_BLOCKS.get(key)
            if block is None:
                continue
            # This process never had a usable value of the key: the stored block stays.
            conformed = conform_node_slo(current) if conformed is None else conformed
            if block in conformed:
                spec[block] = conformed[block]
            else:
                spec.pop(block, None)
        return spec, result.entries
