"""All tables together. Only the sources of objects and bookings change them.

Plugins of all profiles read one set of tables, so no booking of one profile is hidden from another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.tables.amounts import ResourceNames
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.images import ImageTable
from cluster.scheduler.tables.matching import MatchTable
from cluster.scheduler.tables.mentions import Mentions
from cluster.scheduler.tables.namespaces import NamespaceTable
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.occupants import Occupants
from cluster.scheduler.tables.ports import PortTable
from cluster.scheduler.tables.reduction import Reduction
from cluster.scheduler.tables.reservations.table import ReservationTable
from cluster.scheduler.tables.volumes.attachments import AttachmentTable
from cluster.scheduler.tables.volumes.table import VolumeTable


class Part(Protocol):
    """A table that follows bookings beside the node table. Neither method may fail."""

    def place(self, booking: Booking, row: int) -> None:
        """Count a booking on the node of this row."""
        ...

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did with the same booking."""
        ...


class NodePart(Part, Protocol):
    """A table that follows Node objects too."""

    def set_node(self, row: int, node: SchedulingNode) -> None:
        """Take a new node, or the new state of a known one."""
        ...

    def forget_node(self, row: int) -> None:
        """Forget a node; its bookings are removed already."""
        ...


class BookingPart(Protocol):
    """A table that follows all bookings, with those on nodes that are not known."""

    def place(self, booking: Booking) -> None:
        """Count a booking. Must not fail."""
        ...

    def remove(self, booking: Booking) -> None:
        """Take back what `place` did with the same booking. Must not fail."""
        ...


Taken = tuple[str, Booking]
"""UID of the reservation that takes a pod over, and the booking that the pod had before."""


class Tables:
    """The cluster as of now. A pod counts once, wherever it was last placed."""

    def __init__(self) -> None:
        self.resources = ResourceNames()
        self.nodes = NodeTable(self.resources)
        self.images = ImageTable()
        self.ports = PortTable()
        mentions = Mentions()
        self.reduction = Reduction(mentions)
        self.matches = MatchTable(mentions)
        self.namespaces = NamespaceTable()
        self.occupants = Occupants(self.resources, self.on, lambda: len(self.nodes))
        self.volumes = VolumeTable(self.nodes)
        self.attachments = AttachmentTable(self.nodes, self.volumes)
        self._parts: list[Part] = [
            self.ports,
            self.matches,
            self.occupants,
            self.attachments,
        ]
        self._node_parts: list[NodePart] = [self.attachments]
        self._booking_parts: list[BookingPart] = [self.volumes]
        self._bookings: dict[str, Booking] = {}
        self._on_row: dict[int, dict[str, Booking]] = {}
        self.reservations = ReservationTable(self.nodes, self._in_force, mentions)
        self._taken: dict[str, Taken] = {}
        """By the UID of the pod that is taken over."""
        self._waiting: dict[str, dict[str, Booking]] = {}
        """Bookings on nodes that are not known, by node name: a pod may be read before its node."""

    def add_part(self, part: Part) -> None:
        """Have a table follow the bookings on known nodes. Call it before there are any."""
        self._parts.append(part)

    def add_node_part(self, part: NodePart) -> None:
        """Have a table follow nodes and bookings. Call it before there are any."""
        self._node_parts.append(part)
        self.add_part(part)

    def add_booking_part(self, part: BookingPart) -> None:
        """Have a table follow all bookings. Call it before there are any."""
        self._booking_parts.append(part)

    # --- reading -------------------------------------------------------------------------------

    @property
    def bookings(self) -> Mapping[str, Booking]:
        """All bookings by the pod's UID, with those on unknown nodes."""
        return MappingProxyType(self._bookings)

    def on(self, row: int) -> Mapping[str, Booking]:
        """Return the bookings on a node by the pod's UID."""
        return MappingProxyType(self._on_row.get(row, {}))

    def taken(self, uid: str) -> Taken | None:
        """Return what a pod is taken over by, as long as that may be undone; None for others."""
        return self._taken.get(uid)

    def reaches_volume(self, volume: str, node: str) -> bool | None:
        """Return whether a volume can be reached from a node; None if the node is not known."""
        row, found = self.nodes.row(node), self.volumes.volume(volume)
        if row is None:
            return None
        return found is not None and bool(self.volumes.rows_of(found)[row])

    # --- changing ------------------------------------------------------------------------------

    def place(self, booking: Booking, taken: Taken | None = None) -> None:
        """Put a booking in force. A former one of the same pod is removed first.

        taken: as `taken` returned it, for a booking that was removed and is put back.
        """
        if booking.uid in self._bookings:
            self.remove(booking.uid)
        self._bookings[booking.uid] = booking
        for part in self._booking_parts:
            part.place(booking)
        row = self.nodes.row(booking.node)
        if row is None:
            self._waiting.setdefault(booking.node, {})[booking.uid] = booking
        else:
            self._place(booking, row)
        if taken is not None:
            self._taken[booking.uid] = taken
        for uid in booking.allocation.takes:
            self._take(uid, booking)

    def _take(self, uid: str, by: Booking) -> None:
        """Have a pod use the reservation `by`, until that is removed or the pod is placed again."""
        before = self._bookings.get(uid)
        if before is not None and before.node == by.node:
            allocation = replace(before.allocation, reservation=by.uid)
            self.place(replace(before, allocation=allocation))
            self._taken[uid] = by.uid, before

    def remove(self, uid: str) -> Booking | None:
        """Take a pod's booking back; return it, or None if the pod has none."""
        booking = self._bookings.pop(uid, None)
        if booking is None:
            return None
        for part in reversed(self._booking_parts):
            part.remove(booking)
        row = self.nodes.row(booking.node)
        if row is None:
            waiting = self._waiting[booking.node]
            del waiting[uid]
            if not waiting:
                del self._waiting[booking.node]
        else:
            self._remove(booking, row)
        self._taken.pop(uid, None)
        for taken in booking.allocation.takes:
            by, before = self._taken.get(taken, ("", booking))
            if by == uid:
                self.place(before)
        return booking

    def upsert_node(self, node: SchedulingNode) -> int:
        """Add a node or take its new state; return its row. Bookings that waited for it count."""
        self._count_requests(self.nodes.learn(node.status.allocatable, node.metadata.name))
        self.reservations.follow_resources()
        row = self.nodes.upsert(node)
        self.images.set(row, node.status.images)
        for part in self._node_parts:
            part.set_node(row, node)
        for booking in self._waiting.pop(node.metadata.name, {}).values():
            self._place(booking, row)
        return row

    def delete_node(self, name: str) -> None:
        """Remove a node. Its bookings wait: pods outlive their node's object for a while."""
        row = self.nodes.row(name)
        if row is None:
            return
        bookings = list(self.on(row).values())
        for booking in bookings:
            self._remove(booking, row)
        for part in reversed(self._node_parts):
            part.forget_node(row)
        self.nodes.delete(name)
        self.images.set(row, ())
        if bookings:
            self._waiting[name] = {booking.uid: booking for booking in bookings}

    def _count_requests(self, names: Collection[str]) -> None:
        """Count what the bookings request of resources that had no column until now."""
        if not names:
            return
        new = frozenset(names)
        for row, bookings in self._on_row.items():
            for booking in bookings.values():
                requests = booking.shape.requests
                if not new.isdisjoint(requests) and not self.reservations.counts(booking):
                    for name in new & requests.keys():
                        self.nodes.request(row, name, requests[name])
        for row, use in self.reservations.uses():
            for name in new & use.amounts.keys():
                self.nodes.request(row, name, use.amounts[name])

    def _in_force(self, uid: str) -> tuple[Booking, int] | None:
        """Return a pod's booking that counts on a node, and the node's row."""
        booking = self._bookings.get(uid)
        row = self.nodes.row(booking.node) if booking is not None else None
        if row is None:
            return None
        counted = self._on_row.get(row, {}).get(uid)
        return (counted, row) if counted is not None else None

    def _place(self, booking: Booking, row: int) -> None:
        self._on_row.setdefault(row, {})[booking.uid] = booking
        if self.reservations.counts(booking):
            self.nodes.add_use(row, self.reservations.place(booking, row))
        else:
            self.nodes.place(row, booking.shape)
        for part in self._parts:
            part.place(booking, row)

    def _remove(self, booking: Booking, row: int) -> None:
        del self._on_row[row][booking.uid]
        for part in reversed(self._parts):
            part.remove(booking, row)
        if self.reservations.counts(booking):
            self.nodes.add_use(row, self.reservations.remove(booking, row))
        else:
            self.nodes.remove(row, booking.shape)
