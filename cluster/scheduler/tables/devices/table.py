"""The device table: what every node's devices have and what bookings leave of them, in columns.

Only nodes with a Device have a slot, so a cluster of 5,000 nodes with 200 GPU nodes has 200. The
devices of a slot are padded to the same number. Bookings are kept by the pod's UID: a pod that
was deleted and created again under one name is two pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.device import Device, DeviceAllocation
from apis.errors import InputError
from apis.keys import (
    LABEL_GPU_MODEL,
    LABEL_GPU_MODEL_OLD,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
)
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.devices.columns import DeviceColumns, segments_of
from cluster.scheduler.tables.devices.inventory import (
    NodeInventory,
    read_inventory,
    without_health,
)
from cluster.scheduler.tables.devices.node import (
    Holding,
    HoldingGroup,
    NodeDevices,
    Switch,
    device_states,
    holding_of,
)
from cluster.scheduler.tables.devices.partitions import (
    NO_PARTITIONS,
    PartitionRules,
    partition_rules,
)
from cluster.scheduler.tables.devices.request import (
    DEVICE_RESOURCES,
    DeviceRequest,
    Exclusive,
    device_request,
)
from cluster.scheduler.tables.nodes import NodeTable, Rows

NO_SLOT: Final = -1


@dataclass(slots=True)
class _Node:
    """What is known of one node: its devices, and the bookings that concern devices.

    device_gone: the Device was deleted; the devices stay, as not healthy, until the node goes.
    """

    name: str
    slot: int = NO_SLOT
    inventory: NodeInventory | None = None
    device_gone: bool = False
    bookings: dict[str, Booking] = field(default_factory=dict)
    groups: dict[str, HoldingGroup] = field(default_factory=dict)
    labels: Mapping[str, str] | None = None
    rules: PartitionRules = NO_PARTITIONS
    view: NodeDevices | None = None


class DeviceTable:
    """The devices of all nodes. A `Part` of the tables: it follows the bookings."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._known: dict[str, _Node] = {}
        self._slots: list[_Node | None] = []
        self._free_slots: list[int] = []
        self.columns: Mapping[str, DeviceColumns] = {
            type_: DeviceColumns(type_) for type_ in DEVICE_RESOURCES
        }
        self.templates: Mapping[str, Mapping[str, Amounts]] = MappingProxyType({})
        """Shared GPU templates: "<vendor>-<model>" -> template -> amounts of one device."""
        self._slot_of_row = np.zeros(0, dtype=np.intp)
        self._membership = -1
        self._changed = False

    # --- reading -------------------------------------------------------------------------------

    def slots(self, rows: Rows) -> NDArray[np.intp]:
        """Return the slot of each row, NO_SLOT for nodes without a Device."""
        self._follow_nodes()
        return self._slot_of_row[rows]

    def view(self, row: int, *, without: Set[str] = frozenset()) -> NodeDevices | None:
        """Return the devices of a node as a pod may see them; None if it has no Device.

        without: UIDs of pods, or of reservations, whose holdings count as free.
        """
        slot = int(self.slots(np.array([row], dtype=np.intp))[0])
        node = self._slots[slot] if slot != NO_SLOT else None
        if node is None or node.inventory is None:
            return None
        if not without:
            if node.view is None:
                node.view = _view(node, node.inventory, frozenset())
            return node.view
        return _view(node, node.inventory, without)

    def remainder(self, row: int, reservation: str) -> Mapping[str, Mapping[int, Amounts]]:
        """Return what a reservation on this node has left, by type and minor.

        A device that is used up stands there with amounts of 0.
        """
        node = self._known.get(self._nodes.name(row))
        group = node.groups.get(reservation) if node is not None else None
        return group.remainder() if group is not None else {}

    def holding(self, row: int, devices: Mapping[str, tuple[DeviceAllocation, ...]]) -> Holding:
        """Return what an allocation would hold of the devices of a node; nothing without any."""
        node = self._known.get(self._nodes.name(row))
        if node is None or node.inventory is None:
            return {}
        return holding_of(devices, node.inventory)

    def rules(self, slot: int) -> PartitionRules:
        """Return the GPU partitions of the node with this slot."""
        self._follow_nodes()
        node = self._slots[slot]
        return node.rules if node is not None else NO_PARTITIONS

    def inventory(self, slot: int) -> NodeInventory | None:
        node = self._slots[slot]
        return node.inventory if node is not None else None

    # --- changing ------------------------------------------------------------------------------

    def set_device(self, device: Device) -> tuple[InputError, ...]:
        """Take the state of a Device; return what of it cannot be used."""
        inventory, errors = read_inventory(device)
        node = self._node(device.metadata.name)
        node.device_gone = False
        self._set_inventory(node, inventory)
        return errors

    def delete_device(self, name: str) -> None:
        """Count the devices of a node as not healthy. Bookings stay until their pods go."""
        node = self._known.get(name)
        if node is None or node.inventory is None:
            return
        node.device_gone = True
        if self._nodes.row(name) is None:
            self._drop_slot(node)
        else:
            self._set_inventory(node, without_health(node.inventory))

    def set_templates(self, templates: Mapping[str, Mapping[str, Amounts]]) -> None:
        """Take the templates of shared GPUs; what was decided about nodes is decided again."""
        self.templates = MappingProxyType(dict(templates))
        for node in self._slots:
            if node is not None:
                self._touch(node)

    def place(self, booking: Booking, row: int) -> None:
        """Count what a booking holds. The row is that of `booking.node`."""
        if not _concerns_devices(booking):
            return
        node = self._node(booking.node)
        node.bookings[booking.uid] = booking
        self._count(node, booking, 1)
        self._touch(node)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did with the same booking."""
        node = self._known.get(booking.node)
        if node is None or booking.uid not in node.bookings:
            return
        self._count(node, node.bookings.pop(booking.uid), -1)
        self._touch(node)
        if not node.bookings and node.inventory is None:
            del self._known[node.name]

    def _node(self, name: str) -> _Node:
        node = self._known.get(name)
        if node is None:
            node = self._known[name] = _Node(name)
        return node

    def _touch(self, node: _Node) -> None:
        node.view = None
        row = self._nodes.row(node.name)
        if row is not None:
            self._nodes.touch(row)

    def _set_inventory(self, node: _Node, inventory: NodeInventory) -> None:
        node.inventory = inventory
        node.labels = None  # the partition rules are worked out again
        if node.slot == NO_SLOT:
            node.slot = self._new_slot(node)
        segments = segments_of(unit for units in inventory.units.values() for unit in units)
        for type_, columns in self.columns.items():
            units = inventory.units.get(type_, ())
            if len(units) > columns.present.shape[1]:
                width = columns.present.shape[1]
                while width < len(units):
                    width *= 2
                columns.grow(len(columns.present), width)
            columns.set(node.slot, units, segments)
        node.groups = {}
        for booking in node.bookings.values():
            self._count(node, booking, 1)
        self._changed = True
        self._touch(node)

    def _new_slot(self, node: _Node) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slots[slot] = node
            return slot
        slot = len(self._slots)
        self._slots.append(node)
        for columns in self.columns.values():
            if slot == len(columns.present):
                columns.grow(2 * slot, columns.present.shape[1])
        return slot

    def _drop_slot(self, node: _Node) -> None:
        for columns in self.columns.values():
            columns.clear(node.slot)
        self._slots[node.slot] = None
        self._free_slots.append(node.slot)
        node.slot = NO_SLOT
        node.inventory = None
        node.groups = {}
        node.view = None
        self._changed = True
        if not node.bookings:
            del self._known[node.name]

    def _count(self, node: _Node, booking: Booking, sign: int) -> None:
        """Change the columns by one booking of a node with devices."""
        if node.inventory is None:
            return
        key = booking.allocation.reservation or booking.uid
        group = node.groups.setdefault(key, HoldingGroup())
        before = group.held()
        holding = holding_of(booking.allocation.devices, node.inventory)
        if key != booking.uid:
            if sign > 0:
                group.owners[booking.uid] = holding
            else:
                del group.owners[booking.uid]
        else:
            group.own = holding if sign > 0 else None
        self._apply(node, node.inventory, before, -1)
        self._apply(node, node.inventory, group.held(), 1)
        if group.is_empty():
            del node.groups[key]
        for type_, switches in _closed_by(booking, node.inventory).items():
            for index, unit in enumerate(node.inventory.units.get(type_, ())):
                if unit.switch in switches:
                    self.columns[type_].closed[node.slot, index] += sign
        for type_, count in _unattributed(booking).items():
            self.columns[type_].unattributed[node.slot] += sign * count

    def _apply(self, node: _Node, inventory: NodeInventory, holding: Holding, sign: int) -> None:
        for (type_, minor), share in holding.items():
            for index, unit in enumerate(inventory.units.get(type_, ())):
                if unit.minor == minor:
                    functions = len(share.functions & unit.functions) if share.functions else 0
                    columns = self.columns[type_]
                    columns.count(node.slot, index, share.amounts, functions, sign)

    def _follow_nodes(self) -> None:
        """Bring slots and partition rules in line with the nodes there are now."""
        if self._membership == self._nodes.membership and not self._changed:
            return
        self._membership = self._nodes.membership
        self._changed = False
        slot_of_row = np.full(len(self._nodes), NO_SLOT, dtype=np.intp)
        for node in list(self._slots):
            if node is None or node.inventory is None:
                continue
            row = self._nodes.row(node.name)
            if row is None:
                if node.device_gone:
                    self._drop_slot(node)
                continue
            slot_of_row[row] = node.slot
            labels = self._nodes.labels.of(row)
            if labels is not node.labels:
                node.labels = labels
                node.rules = _rules(node.inventory, labels)
                node.view = None
        self._slot_of_row = slot_of_row


def _concerns_devices(booking: Booking) -> bool:
    if booking.allocation.devices:
        return True
    return isinstance(booking.shape.derived(device_request), DeviceRequest)


def _view(node: _Node, inventory: NodeInventory, without: Set[str]) -> NodeDevices:
    staying = [booking for uid, booking in node.bookings.items() if uid not in without]
    closed: dict[str, set[Switch]] = {}
    unattributed: dict[str, int] = {}
    for booking in staying:
        for type_, switches in _closed_by(booking, inventory).items():
            closed.setdefault(type_, set()).update(switches)
        for type_, count in _unattributed(booking).items():
            unattributed[type_] = unattributed.get(type_, 0) + count
    holdings = [
        group.held(without, with_own=key not in without) for key, group in node.groups.items()
    ]
    return NodeDevices(
        states=MappingProxyType(device_states(inventory, holdings, closed)),
        vendor=inventory.vendor,
        model=inventory.model,
        partitions=node.rules,
        unattributed=unattributed,
    )


def _closed_by(booking: Booking, inventory: NodeInventory) -> dict[str, set[Switch]]:
    """Return the PCIe switches that a pod has for itself, by type."""
    request = booking.shape.derived(device_request)
    if not isinstance(request, DeviceRequest):
        return {}
    closed: dict[str, set[Switch]] = {}
    for type_, wanted in request.types.items():
        if wanted.exclusive is Exclusive.PCIE:
            minors = {device.minor for device in booking.allocation.devices.get(type_, ())}
            units = inventory.units.get(type_, ())
            closed[type_] = {
                unit.switch for unit in units if unit.minor in minors and unit.switch is not None
            }
    return closed


def _unattributed(booking: Booking) -> dict[str, int]:
    """Return the devices that a pod requested and that its allocation does not name, by type."""
    request = booking.shape.derived(device_request)
    if not isinstance(request, DeviceRequest):
        return {}
    return {
        type_: wanted.count
        for type_, wanted in request.types.items()
        if not booking.allocation.devices.get(type_)
    }


def _rules(inventory: NodeInventory, labels: Mapping[str, str]) -> PartitionRules:
    return partition_rules(
        inventory.partitions,
        inventory.partition_policy,
        unreadable=inventory.partitions_unreadable,
        vendor=labels.get(LABEL_GPU_VENDOR, ""),
        model=labels.get(LABEL_GPU_MODEL) or labels.get(LABEL_GPU_MODEL_OLD, ""),
        node_policy=labels.get(LABEL_GPU_PARTITION_POLICY, ""),
    )
