"""What pods hold of a node's devices, and what is left, as one frozen value.

A pod holds shares of devices by its allocation. The owners of a reservation and the reservation
itself hold the same devices: together they count with the larger of what is reserved and what the
owners use, so a stranger sees neither twice.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from apis.device import DeviceAllocation, DeviceType
from apis.keys import GPU_MEMORY, GPU_MEMORY_RATIO
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.devices.inventory import DeviceUnit, NodeInventory, device_amounts
from cluster.scheduler.tables.devices.partitions import PartitionRules
from cluster.scheduler.tables.devices.request import DEVICE_RESOURCES, WHOLE

Place = tuple[str, int]
"""A device of a node: its type and minor."""

Switch = tuple[int, str]
"""A PCIe switch: NUMA node and PCIe id."""

NO_FUNCTIONS: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Share:
    """What is held of one device: amounts, and virtual functions by bus id."""

    amounts: Amounts
    functions: frozenset[str]


Holding = Mapping[Place, Share]
"""What one pod holds of the devices of its node."""


def with_gpu_memory(amounts: Mapping[str, int], total: Amounts) -> dict[str, int]:
    """Return amounts of a GPU with its memory both in bytes and as a ratio.

    bytes = ratio * total // 100, ratio = bytes * 100 // total: rounded down, so that whole shares
    that add up to 100 never exceed the memory. Without a known total the amounts stay as they are.
    """
    completed = dict(amounts)
    memory = total.get(GPU_MEMORY, 0)
    if memory > 0:
        ratio = completed.get(GPU_MEMORY_RATIO, 0)
        requested = completed.get(GPU_MEMORY, 0)
        if ratio > 0 and requested == 0:
            completed[GPU_MEMORY] = ratio * memory // WHOLE
        elif requested > 0 and ratio == 0:
            completed[GPU_MEMORY_RATIO] = requested * WHOLE // memory
    return completed


def holding_of(
    devices: Mapping[str, tuple[DeviceAllocation, ...]], inventory: NodeInventory
) -> Holding:
    """Return what an allocation holds, also of devices that the node does not have any more."""
    holding: dict[Place, Share] = {}
    for type_, allocations in devices.items():
        known = DEVICE_RESOURCES.get(type_)
        if known is None:
            continue
        units = {unit.minor: unit for unit in inventory.units.get(type_, ())}
        for allocation in allocations:
            amounts = device_amounts(allocation.resources)
            amounts = {name: amounts[name] for name in known if amounts.get(name, 0) > 0}
            unit = units.get(allocation.minor)
            if type_ == DeviceType.GPU and unit is not None:
                amounts = with_gpu_memory(amounts, unit.total)
            extension = allocation.extension
            functions = (
                frozenset(function.bus_id for function in extension.vfs)
                if extension is not None
                else NO_FUNCTIONS
            )
            place = type_, allocation.minor
            before = holding.get(place)
            if before is not None:
                amounts = _sum((before.amounts, amounts))
                functions |= before.functions
            holding[place] = Share(amounts, functions)
    return holding


@dataclass(slots=True)
class HoldingGroup:
    """A reservation with the pods that use it, or one pod that uses none.

    own: what the reservation or that pod holds, None where its booking is not known. owners: what
    the pods that use the reservation hold, by UID.
    """

    own: Holding | None = None
    owners: dict[str, Holding] = field(default_factory=dict)

    def is_empty(self) -> bool:
        return self.own is None and not self.owners

    def held(self, without: Container[str] = (), *, with_own: bool = True) -> Holding:
        """Return what the group holds. without: UIDs of owners to leave out."""
        owners = [holding for uid, holding in self.owners.items() if uid not in without]
        if with_own and self.own is not None:
            if not owners:
                return self.own
            used = _sum_of_holdings(owners)
            return {
                place: _larger(self.own.get(place), used.get(place))
                for place in self.own.keys() | used.keys()
            }
        return _sum_of_holdings(owners)

    def remainder(self) -> dict[str, dict[int, Amounts]]:
        """Return what the reservation holds and its owners do not use, by type and minor."""
        used = _sum_of_holdings(self.owners.values())
        left: dict[str, dict[int, Amounts]] = {}
        for (type_, minor), share in (self.own or {}).items():
            mine = used[type_, minor].amounts if (type_, minor) in used else {}
            left.setdefault(type_, {})[minor] = {
                name: max(0, amount - mine.get(name, 0)) for name, amount in share.amounts.items()
            }
        return left


def _sum_of_holdings(holdings: Iterable[Holding]) -> Holding:
    total: dict[Place, Share] = {}
    for holding in holdings:
        for place, share in holding.items():
            before = total.get(place)
            total[place] = (
                share
                if before is None
                else Share(
                    _sum((before.amounts, share.amounts)), before.functions | share.functions
                )
            )
    return total


def _sum(several: Iterable[Amounts]) -> dict[str, int]:
    total: dict[str, int] = {}
    for amounts in several:
        for name, amount in amounts.items():
            total[name] = total.get(name, 0) + amount
    return total


def _larger(one: Share | None, other: Share | None) -> Share:
    if one is None or other is None:
        found = one if one is not None else other
        assert found is not None
        return found
    amounts = {
        name: max(one.amounts.get(name, 0), other.amounts.get(name, 0))
        for name in one.amounts.keys() | other.amounts.keys()
    }
    return Share(amounts, one.functions | other.functions)


# --- what is left ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device and what is left of it.

    free: total minus what is held; negative where pods hold more than the device has. used: some
    pod holds a part of it. functions_used: its virtual functions in use, by bus id. closed: a pod
    has its PCIe switch for itself.
    """

    unit: DeviceUnit
    free: Amounts
    used: bool = False
    functions_used: frozenset[str] = NO_FUNCTIONS
    closed: bool = False


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """All devices of a node as one pod may see them.

    states: by type, ascending by minor. unattributed: by type, devices that pods on the node
    requested although nothing says which ones they got.
    """

    states: Mapping[str, tuple[DeviceState, ...]]
    vendor: str
    model: str
    partitions: PartitionRules
    unattributed: Mapping[str, int] = field(default_factory=dict)


def device_states(
    inventory: NodeInventory, holdings: Iterable[Holding], closed: Mapping[str, Container[Switch]]
) -> dict[str, tuple[DeviceState, ...]]:
    """Return every device with what `holdings` leave. closed: PCIe switches by type."""
    held: dict[Place, list[Share]] = {}
    for holding in holdings:
        for place, share in holding.items():
            held.setdefault(place, []).append(share)
    return {
        type_: tuple(
            _state(
                unit,
                held.get((type_, unit.minor), ()),
                unit.switch is not None and unit.switch in closed.get(type_, ()),
            )
            for unit in units
        )
        for type_, units in inventory.units.items()
    }


def _state(unit: DeviceUnit, shares: Iterable[Share], closed: bool) -> DeviceState:
    used = _sum(share.amounts for share in shares)
    return DeviceState(
        unit=unit,
        free={name: total - used.get(name, 0) for name, total in unit.total.items()},
        used=bool(shares),
        functions_used=frozenset().union(*(share.functions for share in shares)),
        closed=closed,
    )
