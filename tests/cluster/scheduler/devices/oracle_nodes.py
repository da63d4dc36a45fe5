"""Nodes with devices for the oracle, as plain values: what there is, and what pods hold of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apis.keys import GPU_MEMORY, GPU_MEMORY_RATIO, RDMA
from apis.meta import matches
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.tables.devices.request import DeviceRequest, Exclusive, TypeRequest

Switch = tuple[int, str]
_GIB = 1 << 30


@dataclass(eq=False)
class Device:
    """A device of the node, and what pods have of it. place: NUMA node and PCIe switch, if known.

    alone: a pod has the switch of the device for itself.
    """

    type: str
    minor: int
    total: dict[str, int]
    healthy: bool
    labels: dict[str, str]
    place: Switch | None
    functions: list[str]
    free: dict[str, int] = field(default_factory=dict)
    used: bool = False
    functions_used: set[str] = field(default_factory=set)
    alone: bool = False

    def takes(self, wanted: TypeRequest) -> dict[str, int]:
        """Return what one device gives, GPU memory in both units."""
        amounts = dict(wanted.each)
        memory = self.total.get(GPU_MEMORY, 0)
        if self.type == "gpu" and memory:
            if GPU_MEMORY not in amounts and amounts.get(GPU_MEMORY_RATIO, 0):
                amounts[GPU_MEMORY] = amounts[GPU_MEMORY_RATIO] * memory // 100
            elif GPU_MEMORY_RATIO not in amounts and amounts.get(GPU_MEMORY, 0):
                amounts[GPU_MEMORY_RATIO] = amounts[GPU_MEMORY] * 100 // memory
        return amounts

    def function(self, wanted: TypeRequest) -> str:
        """Return the virtual function that would be given, "" for none."""
        left = [bus for bus in self.functions if bus not in self.functions_used]
        return min(left, default="") if wanted.functions is not None else ""

    def score(self, wanted: TypeRequest) -> int:
        """Return the mean part in percent that stays free (LeastAllocated)."""
        parts = []
        for name in (GPU_MEMORY_RATIO, GPU_MEMORY, RDMA):
            total = self.total.get(name, 0)
            if total:
                left = self.free[name] - self.takes(wanted).get(name, 0)
                parts.append(left * 100 // total if 0 <= left <= total else 0)
        return sum(parts) // len(parts) if parts else 0


@dataclass(frozen=True)
class Partition:
    """GPUs that are linked with each other. bandwidth: bytes/s."""

    minors: tuple[int, ...]
    score: int = 1
    bandwidth: int = 0


@dataclass(frozen=True)
class Limits:
    """Which devices a pod may get. numa: those of these NUMA nodes, None for all.

    reserved: what a reservation has left of its devices, which come first. only: no other devices
    of their types, and no more of each.
    """

    numa: frozenset[int] | None = None
    reserved: Mapping[tuple[str, int], Mapping[str, int]] = field(default_factory=dict)
    only: bool = False


@dataclass
class Node:
    """silent: by type, devices that pods requested without saying which they got.

    partitions: of linked GPUs, None without a table. honor: they are mandatory. templates: of a
    shared NPU, by name; those of the node's model.
    """

    devices: list[Device]
    silent: dict[str, int]
    partitions: Sequence[Partition] | None = None
    honor: bool = False
    templates: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    limits: Limits = Limits()

    def of(self, type_: str) -> list[Device]:
        return [one for one in self.devices if one.type == type_]

    def selected(self, wanted: TypeRequest) -> list[Device]:
        return [
            one
            for one in self.of(wanted.type)
            if wanted.selector is None or matches(wanted.selector, one.labels)
        ]

    def allowed(self, wanted: TypeRequest) -> list[Device]:
        """Return the devices that the selector and the limits allow."""
        return [
            one
            for one in self.selected(wanted)
            if _within(one, self.limits.numa)
            and (not self.limited(one.type) or (one.type, one.minor) in self.limits.reserved)
        ]

    def limited(self, type_: str) -> bool:
        return self.limits.only and any(type_ == held for held, _ in self.limits.reserved)

    def reserves(self, one: Device) -> bool:
        return (one.type, one.minor) in self.limits.reserved


def _within(one: Device, numa: frozenset[int] | None) -> bool:
    return numa is None or (one.place is not None and one.place[0] in {*numa, -1})


@dataclass(frozen=True)
class Held:
    """What a pod requested and got. group: the reservation that it uses, or is itself (own)."""

    request: DeviceRequest
    given: Devices
    group: str = ""
    own: bool = False


def node_of(
    machine: Sequence[Mapping[str, Any]],
    pods: Sequence[Held],
    *,
    partitions: Sequence[Partition] | None = None,
    honor: bool = False,
    templates: Mapping[str, Mapping[str, int]] | None = None,
    free: str = "",
) -> Node:
    """Return a node. machine: as a Device object lists it. free: a reservation that counts as free;
    what its pods got does not."""
    devices = []
    for plain in machine:
        resources = {name: _amount(text) for name, text in plain["resources"].items()}
        at = plain.get("topology")
        total = resources if plain["health"] else {}
        devices.append(
            Device(
                plain["type"],
                plain["minor"],
                total,
                plain["health"],
                plain["labels"],
                (at["nodeID"], at["pcieID"]) if at else None,
                [vf["busID"] for group in plain.get("vfGroups", ()) for vf in group["vfs"]],
                dict(total),
            )
        )
    node = Node(devices, {}, partitions, honor, templates or {})
    staying = [pod for pod in pods if not (pod.own and pod.group == free)]
    for pod in staying:
        for type_, wanted in pod.request.types.items():
            if not pod.given.get(type_):
                node.silent[type_] = node.silent.get(type_, 0) + wanted.count
        for type_, allocations in pod.given.items():
            for one in allocations:
                device = next(each for each in node.of(type_) if each.minor == one.minor)
                device.used = True
                if one.extension is not None:
                    device.functions_used |= {vf.bus_id for vf in one.extension.vfs}
                if pod.request.types[type_].exclusive is Exclusive.PCIE:
                    for each in node.of(type_):
                        each.alone |= each.place is not None and each.place == device.place
    for device in node.devices:
        for name in device.free:
            device.free[name] -= sum(
                max(held_of([pod], device, name), others)
                for pod, others in _with_owners(staying, device, name)
            )
    return node


def _with_owners(pods: Sequence[Held], device: Device, name: str) -> list[tuple[Held, int]]:
    """Return each pod that counts by itself, with what the pods that use it as a reservation have;
    pods of a reservation that is not among `pods` count by themselves."""
    there = {pod.group for pod in pods if pod.own}
    return [
        (
            pod,
            held_of([one for one in pods if one.group == pod.group and not one.own], device, name)
            if pod.own
            else 0,
        )
        for pod in pods
        if pod.own or pod.group not in there
    ]


def held_of(pods: Sequence[Held], device: Device, name: str) -> int:
    """Return how much pods have of a resource of a device."""
    return sum(
        one.resources[name].value()
        for pod in pods
        for one in pod.given.get(device.type, ())
        if one.minor == device.minor and name in one.resources
    )


def left_of(
    machine: Node, pods: Sequence[Held], group: str
) -> dict[tuple[str, int], dict[str, int]]:
    """Return what a reservation has left of each of its devices."""
    owners = [pod for pod in pods if pod.group == group and not pod.own]
    return {
        (type_, one.minor): {
            name: max(0, quantity.value() - held_of(owners, device, name))
            for name, quantity in one.resources.items()
        }
        for pod in pods
        if pod.own and pod.group == group
        for type_, allocations in pod.given.items()
        for one in allocations
        for device in machine.of(type_)
        if device.minor == one.minor
    }


def _amount(text: str) -> int:
    return int(text.removesuffix("Gi")) * _GIB if text.endswith("Gi") else int(text)
