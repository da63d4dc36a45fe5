"""A controller that keeps one object for each Node, under the Node's name.

It creates the object with the Node, patches what differs and deletes it after the Node. The caller
computes the contents. A conflict with another writer is not an error: the event of the object
requeues the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from apis.core import Node, ObjectMeta
from cluster.exposition import Family, Series
from cluster.manager.config_source import SLOConfigSource
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.queue import WorkQueue
from kube.resources import Resource


class Stored(Protocol):
    """An object of an API server, as the cache holds it."""

    @property
    def metadata(self) -> ObjectMeta: ...


Kept = TypeVar("Kept", bound=Stored)


class PerNode(Generic[Kept]):
    """The controller of the objects of one resource.

    wanted: (node, stored object) -> the object to create if none is stored, otherwise its merge
        patch; None or {} writes nothing.
    annotation: key of the Node's annotation that, like its labels, requeues the node.
    part: part of slo-controller-config that requeues all nodes.
    matters: whether an event of the objects themselves requeues the node.
    outcomes: counter of reconciles by (status, reason).
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        nodes: Cache[Node],
        kept: Cache[Kept],
        source: SLOConfigSource,
        *,
        name: str,
        wanted: Callable[[Node, Kept | None], dict[str, Any] | None],
        annotation: str,
        part: str,
        matters: Callable[[Event[Kept]], bool],
        outcomes: Family[Series],
    ) -> None:
        self.name = name
        self.queue = WorkQueue(name)
        self.writes = 0
        self._client = client
        self._resource = resource
        self._nodes = nodes
        self._kept = kept
        self._wanted = wanted
        self._annotation = annotation
        self._part = part
        self._matters = matters
        self._outcomes = outcomes
        nodes.subscribe(self._node_changed)
        kept.subscribe(self._kept_changed)
        source.subscribe(self._config_changed)

    def _node_changed(self, event: Event[Node]) -> None:
        if event.change is not Change.MODIFIED or event.old is None:
            self.queue.add(event.new.metadata.name)
            return
        old, new, key = event.old.metadata, event.new.metadata, self._annotation
        if old.labels != new.labels or old.annotations.get(key) != new.annotations.get(key):
            self.queue.add(new.name)

    def _kept_changed(self, event: Event[Kept]) -> None:
        if self._matters(event):
            self.queue.add(event.new.metadata.name)

    def _config_changed(self, part: str) -> None:
        if part == self._part:
            for name in self._nodes.items:
                self.queue.add(name)

    async def reconcile(self, name: str) -> float | None:
        """Create, patch or delete the object of one node."""
        node = self._nodes.get(name)
        kept = self._kept.get(name)
        try:
            if node is None:
                self.queue.forget(name)
                if self._nodes.left_out(name):
                    # The Node exists but cannot be decoded: its object stays as it is.
                    return None
                if kept is not None:
                    await self._client.delete(self._resource, name, uid=kept.metadata.uid)
                    self.writes += 1
                return None
            await self._write(node, kept)
        except (ApiError, Unreachable):
            verb = "delete" if node is None else "create" if kept is None else "update"
            self._outcomes.labels("failed", verb + self._resource.kind).inc()
            raise
        self._outcomes.labels("succeeded", "").inc()
        return None

    async def _write(self, node: Node, kept: Kept | None) -> None:
        wanted = self._wanted(node, kept)
        if not wanted:
            return
        try:
            if kept is None:
                await self._client.create(self._resource, encode_object(self._resource, wanted))
            else:
                patch = msgspec.json.encode(wanted)
                await self._client.patch(self._resource, node.metadata.name, patch)
            self.writes += 1
        except ApiError as error:
            # Created or deleted by another writer, which the cache does not show yet.
            if not (error.already_exists if kept is None else error.not_found):
                raise
