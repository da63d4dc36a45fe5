"""NodeSLO: one object per Node, its spec from slo-controller-config.

The object says in an annotation which node entry gave which block. Writes are merge patches of
what differs, and only of that. Source: manager.md section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from apis.core import Node
from apis.decode import canonical_json
from apis.keys import ANNOTATION_NETWORK_BANDWIDTH
from apis.meta import ObjectReference
from apis.slo_config import conform_node_slo, node_slo_spec
from cluster.manager.config_source import NODE_SLO, SLOConfigSource
from cluster.manager.metrics import ManagerMetrics
from cluster.manager.objects import StoredNodeSLO, conformed_spec, plain_spec
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, encode_object
from kube.events import EventRecorder
from kube.queue import WorkQueue
from kube.resources import NODE_SLOS
from kube.webhook import merge_patch

ANNOTATION_APPLIED_ENTRIES: Final = "slo.koordinator.sh/applied-entries"
"""JSON object: key of slo-controller-config -> name of the node entry that applied."""

_BLOCK_OF_KEY: Final[Mapping[str, str]] = {
    "resource-threshold-config": "resourceUsedThresholdWithBE",
    "resource-qos-config": "resourceQOSStrategy",
    "cpu-burst-config": "cpuBurstStrategy",
    "system-config": "systemStrategy",
    "host-application-config": "hostApplications",
}


class NodeSLOController:
    """Keeps NodeSLO objects equal to what the configuration says of their nodes."""

    name = "nodeslo"

    def __init__(
        self,
        client: Client,
        nodes: Cache[Node],
        node_slos: Cache[StoredNodeSLO],
        source: SLOConfigSource,
        events: EventRecorder,
        metrics: ManagerMetrics,
    ) -> None:
        self._client = client
        self._nodes = nodes
        self._node_slos = node_slos
        self._source = source
        self._events = events
        self._metrics = metrics
        self.queue = WorkQueue(self.name)
        self.writes = 0
        nodes.subscribe(self._node_changed)
        node_slos.subscribe(lambda event: self.queue.add(event.new.metadata.name))
        source.subscribe(self._config_changed)

    def _node_changed(self, event: Event[Node]) -> None:
        old, new = event.old, event.new
        if (
            event.change is not Change.MODIFIED
            or old is None
            or old.metadata.labels != new.metadata.labels
            or old.metadata.annotations.get(ANNOTATION_NETWORK_BANDWIDTH)
            != new.metadata.annotations.get(ANNOTATION_NETWORK_BANDWIDTH)
        ):
            self.queue.add(new.metadata.name)

    def _config_changed(self, part: str) -> None:
        if part == NODE_SLO:
            for name in self._nodes.items:
                self.queue.add(name)

    async def reconcile(self, name: str) -> float | None:
        """Create, patch or delete the NodeSLO of one node."""
        node = self._nodes.get(name)
        stored = self._node_slos.get(name)
        try:
            if node is None:
                self.queue.forget(name)
                if stored is not None:
                    await self._client.delete(NODE_SLOS, name, uid=stored.metadata.uid)
                    self.writes += 1
                return None
            await self._write(node, stored)
        except ApiError:
            reason = "deleteNodeSLO" if node is None else "updateNodeSLO"
            self._metrics.node_slo.labels("failed", reason).inc()
            raise
        self._metrics.node_slo.labels("succeeded", "").inc()
        return None

    async def _write(self, node: Node, stored: StoredNodeSLO | None) -> None:
        name = node.metadata.name
        data = bytes(stored.spec) if stored is not None else b""
        current = plain_spec(data)
        wanted, entries = self._wanted(node, current)
        applied = canonical_json(entries) if entries else None
        if stored is None:
            metadata: dict[str, Any] = {"name": name}
            if applied:
                metadata["annotations"] = {ANNOTATION_APPLIED_ENTRIES: applied}
            body = encode_object(NODE_SLOS, {"metadata": metadata, "spec": wanted})
            try:
                await self._client.create(NODE_SLOS, body)
                self.writes += 1
            except ApiError as error:
                # The cache is behind: the object's own event brings us back.
                if not error.already_exists:
                    raise
            return
        patch: dict[str, Any] = {}
        if conformed_spec(data) != wanted:
            patch["spec"] = merge_patch(current, wanted)
        if stored.metadata.annotations.get(ANNOTATION_APPLIED_ENTRIES) != applied:
            patch["metadata"] = {"annotations": {ANNOTATION_APPLIED_ENTRIES: applied}}
        if not patch:
            return
        try:
            await self._client.patch(NODE_SLOS, name, msgspec.json.encode(patch))
            self.writes += 1
        except ApiError as error:
            if not error.not_found:
                raise

    def _wanted(self, node: Node, current: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
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
            block = _BLOCK_OF_KEY.get(key)
            if block is None:
                continue
            # This key was never readable here; what an earlier manager wrote stays.
            conformed = conform_node_slo(current) if conformed is None else conformed
            if block in conformed:
                spec[block] = conformed[block]
            else:
                spec.pop(block, None)
        return spec, result.entries
