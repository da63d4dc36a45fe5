"""Changes of claims, volumes, classes and CSI objects into the tables and the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apis.storage import (
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
    VolumeAttachment,
)
from cluster.scheduler import registrations as kinds
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.sources.complaints import Complaints
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.attachments import limits_of, unused_limits
from cluster.scheduler.tables.volumes.objects import (
    claim_of,
    class_of,
    largest_volume,
    volume_of,
)
from cluster.scheduler.tables.volumes.places import place_of_selector
from kube.cache import Cache, Change, Event, object_key
from kube.client import Client
from kube.resources import (
    CSI_DRIVERS,
    CSI_NODES,
    CSI_STORAGE_CAPACITIES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    STORAGE_CLASSES,
    VOLUME_ATTACHMENTS,
)

_ACTIONS = {
    Change.ADDED: Action.ADD,
    Change.MODIFIED: Action.UPDATE_OTHER,
    Change.DELETED: Action.DELETE,
}


class VolumeSource:
    """Caches of everything about volumes. The caller runs each cache in `caches`."""

    def __init__(
        self,
        client: Client,
        tables: Tables,
        queue: SchedulingQueue[PodShape],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._queue = queue
        self._clock = clock
        self.complaints = Complaints()
        """Of CSINodes."""
        self.claims: Cache[PersistentVolumeClaim] = Cache(
            client, PERSISTENT_VOLUME_CLAIMS, PersistentVolumeClaim
        )
        self.volumes: Cache[PersistentVolume] = Cache(client, PERSISTENT_VOLUMES, PersistentVolume)
        classes: Cache[StorageClass] = Cache(client, STORAGE_CLASSES, StorageClass)
        nodes: Cache[CSINode] = Cache(client, CSI_NODES, CSINode)
        drivers: Cache[CSIDriver] = Cache(client, CSI_DRIVERS, CSIDriver)
        storage: Cache[CSIStorageCapacity] = Cache(
            client, CSI_STORAGE_CAPACITIES, CSIStorageCapacity
        )
        attachments: Cache[VolumeAttachment] = Cache(client, VOLUME_ATTACHMENTS, VolumeAttachment)
        self.caches: tuple[Cache[Any], ...] = (
            self.claims,
            self.volumes,
            classes,
            nodes,
            drivers,
            storage,
            attachments,
        )
        self.claims.subscribe(self._claim_event)
        self.volumes.subscribe(self._volume_event)
        classes.subscribe(self._class_event)
        nodes.subscribe(self._csi_node_event)
        drivers.subscribe(self._driver_event)
        storage.subscribe(self._storage_event)
        attachments.subscribe(self._attachment_event)

    def _claim_event(self, event: Event[PersistentVolumeClaim]) -> None:
        if event.change is Change.DELETED:
            self._tables.volumes.delete_claim(object_key(event.new))
        else:
            self._tables.volumes.set_claim(claim_of(event.new))
        self._wake(kinds.CLAIM, event)

    def _volume_event(self, event: Event[PersistentVolume]) -> None:
        if event.change is Change.DELETED:
            self._tables.volumes.delete_volume(event.new.metadata.name)
        else:
            self._tables.volumes.set_volume(volume_of(event.new))
        self._wake(kinds.VOLUME, event)

    def _class_event(self, event: Event[StorageClass]) -> None:
        if event.change is Change.DELETED:
            self._tables.volumes.delete_class(event.new.metadata.name)
        else:
            self._tables.volumes.set_class(class_of(event.new))
        self._wake(kinds.STORAGE_CLASS, event)

    def _csi_node_event(self, event: Event[CSINode]) -> None:
        name, deleted = event.new.metadata.name, event.change is Change.DELETED
        limits = None if deleted else limits_of(event.new)
        self.complaints.set(f"CSINode {name}", () if deleted else unused_limits(event.new))
        self._tables.attachments.set_limits(name, limits)
        self._wake(kinds.CSI_NODE, event)

    def _driver_event(self, event: Event[CSIDriver]) -> None:
        reports = event.change is not Change.DELETED and event.new.spec.storage_capacity
        self._tables.volumes.set_driver(event.new.metadata.name, reports_storage=reports)
        self._wake(kinds.CSI_DRIVER, event)

    def _storage_event(self, event: Event[CSIStorageCapacity]) -> None:
        report, key = event.new, object_key(event.new)
        if event.change is Change.DELETED or report.node_topology is None:
            # Without a topology no node can reach the storage.
            self._tables.volumes.delete_storage(key)
        else:
            self._tables.volumes.set_storage(
                key,
                report.storage_class_name,
                place_of_selector(report.node_topology),
                largest_volume(report),
            )
        self._wake(kinds.STORAGE_CAPACITY, event)

    def _attachment_event(self, event: Event[VolumeAttachment]) -> None:
        name, spec = event.new.metadata.name, event.new.spec
        if event.change is Change.DELETED or not spec.source.persistent_volume_name:
            self._tables.attachments.delete_attachment(name)
        else:
            self._tables.attachments.set_attachment(
                name, spec.node_name, spec.attacher, spec.source.persistent_volume_name
            )
        self._wake(kinds.ATTACHMENT, event)

    def _wake(self, kind: str, event: Event[Any]) -> None:
        deleted = event.change is Change.DELETED
        self._queue.cluster_event(
            ClusterEvent(
                kind,
                _ACTIONS[event.change],
                event.new if deleted else event.old,
                None if deleted else event.new,
            ),
            self._clock(),
        )
