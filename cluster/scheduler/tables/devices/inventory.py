"""The devices of a node as its Device object describes them, checked and frozen.

A device that cannot be used as it is written is left out and named; the others count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from apis.device import Device, DeviceInfo
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_GPU_PARTITIONS,
    DEPRECATED_RESOURCES,
    LABEL_GPU_MODEL,
    LABEL_GPU_MODEL_OLD,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
)
from apis.quantity import Quantity
from cluster.scheduler.tables.amounts import Amounts, amount_of
from cluster.scheduler.tables.devices.partitions import PartitionTable, parse_partitions
from cluster.scheduler.tables.devices.request import DEVICE_RESOURCES

MOST_DEVICES: Final = 64
"""Of one type and node; chosen, as every row of a column is as wide as the widest. Machines of
today have 8 or 16 GPUs."""

NO_NUMA_NODE: Final = -1
"""Of a device whose NUMA node is not known: an accelerator whose file names none, or another
writer's. koordlet writes 0 for a GPU or RDMA function for which the kernel names none."""

_NO_AMOUNTS: Final[Amounts] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FunctionGroup:
    """Virtual functions of a device that share labels, by bus id in ascending order."""

    labels: Mapping[str, str]
    functions: tuple[tuple[str, int], ...]
    """(bus id, minor)."""


@dataclass(frozen=True, slots=True)
class DeviceUnit:
    """One device.

    minor: its number among those of its type. total: what it has; nothing if it is not healthy.
    has_topology: `numa` and `pcie` are known. numa: its NUMA node, NO_NUMA_NODE if it is not
    known. pcie: identity of its PCIe switch or root, "" if unknown.
    """

    type: str
    minor: int
    id: str
    healthy: bool
    total: Amounts
    has_topology: bool
    numa: int
    pcie: str
    labels: Mapping[str, str]
    function_groups: tuple[FunctionGroup, ...]

    @property
    def switch(self) -> tuple[int, str] | None:
        """NUMA node and PCIe id; None where the switch is not known."""
        return (self.numa, self.pcie) if self.has_topology and self.pcie else None

    @property
    def functions(self) -> frozenset[str]:
        """Bus ids of all virtual functions."""
        return frozenset(bus_id for group in self.function_groups for bus_id, _ in group.functions)


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """All devices of a node.

    units: by type; each type's devices ascend by minor. partitions: the GPU partitions of the
    Device's annotation, None without one. partition_policy: the Device's own label or "".
    """

    units: Mapping[str, tuple[DeviceUnit, ...]]
    vendor: str
    model: str
    partitions: PartitionTable | None
    partitions_unreadable: bool
    partition_policy: str


def read_inventory(device: Device) -> tuple[NodeInventory, tuple[InputError, ...]]:
    """Return the devices of a node, and what of the object cannot be used."""
    obj = f"Device {device.metadata.name}"
    errors: list[InputError] = []
    units: dict[str, dict[int, DeviceUnit]] = {}
    for index, info in enumerate(device.spec.devices):
        if info.type not in DEVICE_RESOURCES:
            continue
        of_type = units.setdefault(info.type, {})
        problem = _problem(info, of_type)
        if problem is None:
            unit = _unit(info)
            of_type[unit.minor] = unit
        else:
            member, value, text = problem
            path = f"spec.devices[{index}]{member}"
            errors.append(InputError(obj=obj, field=path, value=value, problem=text))
    partitions = None
    table = device.metadata.annotations.get(ANNOTATION_GPU_PARTITIONS)
    if table is not None:
        try:
            partitions = parse_partitions(table, obj=obj)
        except InputError as error:
            errors.append(error)
    labels = device.metadata.labels
    inventory = NodeInventory(
        units=MappingProxyType(
            {
                type_: tuple(of_type[minor] for minor in sorted(of_type))
                for type_, of_type in units.items()
            }
        ),
        vendor=labels.get(LABEL_GPU_VENDOR, ""),
        model=labels.get(LABEL_GPU_MODEL) or labels.get(LABEL_GPU_MODEL_OLD, ""),
        partitions=partitions,
        partitions_unreadable=table is not None and partitions is None,
        partition_policy=labels.get(LABEL_GPU_PARTITION_POLICY, ""),
    )
    return inventory, tuple(errors)


def without_health(inventory: NodeInventory) -> NodeInventory:
    """Return the inventory after its Device was deleted: the devices are there, none is healthy."""
    units = {
        type_: tuple(replace(unit, healthy=False, total=_NO_AMOUNTS) for unit in units)
        for type_, units in inventory.units.items()
    }
    return replace(inventory, units=MappingProxyType(units))


def device_amounts(resources: Mapping[str, Quantity]) -> dict[str, int]:
    """Return amounts by current resource names. An old name counts where its new one is absent."""
    amounts: dict[str, int] = {}
    for name, quantity in resources.items():
        current = DEPRECATED_RESOURCES.get(name, name)
        if current == name or current not in resources:
            amounts[current] = amount_of(current, quantity)
    return amounts


def _problem(info: DeviceInfo, known: Mapping[int, DeviceUnit]) -> tuple[str, object, str] | None:
    """Return the member, the value and the problem of a device that cannot be used."""
    if info.minor is None:
        return ".minor", "(absent)", "a device needs a minor number"
    if info.minor < 0:
        return ".minor", info.minor, "must not be negative"
    if info.minor in known:
        return ".minor", info.minor, f"another {info.type} device has this minor number"
    if len(known) >= MOST_DEVICES:
        return "", info.type, f"more than {MOST_DEVICES} devices of one type"
    for name, quantity in info.resources.items():
        if quantity.nano < 0:
            return f".resources.{name}", str(quantity), "must not be negative"
    return None


def _unit(info: DeviceInfo) -> DeviceUnit:
    assert info.minor is not None
    total: Amounts = _NO_AMOUNTS
    if info.health:
        known = DEVICE_RESOURCES[info.type]
        amounts = device_amounts(info.resources)
        total = MappingProxyType({name: amounts[name] for name in known if amounts.get(name)})
    topology = info.topology
    return DeviceUnit(
        type=info.type,
        minor=info.minor,
        id=info.id,
        healthy=info.health,
        total=total,
        has_topology=topology is not None,
        numa=topology.node_id if topology is not None else NO_NUMA_NODE,
        pcie=topology.pcie_id if topology is not None else "",
        labels=info.labels,
        function_groups=tuple(
            FunctionGroup(
                labels=group.labels,
                functions=tuple(
                    sorted((function.bus_id, function.minor) for function in group.vfs)
                ),
            )
            for group in info.vf_groups
        ),
    )
