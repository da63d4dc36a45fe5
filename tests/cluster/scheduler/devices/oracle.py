"""What the rules of DeviceShare say about one pod on one node, one device after the other.

Written from docs/scheduler.md, "DeviceShare", and docs/facts/scheduler.md, "Device allocation",
over plain values. It shares no code with columns, candidates, partitions or the topology; requests
are taken as they were parsed. Slow and obvious.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from apis.keys import GPU_MEMORY, GPU_MEMORY_RATIO, RDMA
from apis.meta import matches
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.tables.devices.request import (
    DeviceRequest,
    Exclusive,
    Scope,
    TypeRequest,
)

Switch = tuple[int, str]
_GIB = 1 << 30


@dataclass(frozen=True)
class Failed:
    """Why the pod gets no devices. resolvable: evictions could help."""

    text: str
    resolvable: bool = True


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


@dataclass
class Node:
    """silent: by type, devices that pods requested without saying which they got.

    partitions: whether the built-in table of eight linked GPUs applies. honor: it is mandatory.
    """

    devices: list[Device]
    silent: dict[str, int]
    partitions: bool = False
    honor: bool = False

    def of(self, type_: str) -> list[Device]:
        return [one for one in self.devices if one.type == type_]

    def selected(self, wanted: TypeRequest) -> list[Device]:
        return [
            one
            for one in self.of(wanted.type)
            if wanted.selector is None or matches(wanted.selector, one.labels)
        ]


def node_of(
    machine: Sequence[Mapping[str, Any]],
    pods: Sequence[tuple[DeviceRequest, Devices]],
    *,
    partitions: bool = False,
    honor: bool = False,
) -> Node:
    """Return a node. machine: as a Device object lists it. pods: requests, and what they got."""
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
    node = Node(devices, {}, partitions, honor)
    for request, given in pods:
        for type_, wanted in request.types.items():
            if not given.get(type_):
                node.silent[type_] = node.silent.get(type_, 0) + wanted.count
        for type_, allocations in given.items():
            for one in allocations:
                device = next(each for each in node.of(type_) if each.minor == one.minor)
                device.used = True
                for name, quantity in one.resources.items():
                    if name in device.free:
                        device.free[name] -= quantity.value()
                if one.extension is not None:
                    device.functions_used |= {vf.bus_id for vf in one.extension.vfs}
                if request.types[type_].exclusive is Exclusive.PCIE:
                    for each in node.of(type_):
                        each.alone |= each.place is not None and each.place == device.place
    return node


def _amount(text: str) -> int:
    return int(text.removesuffix("Gi")) * _GIB if text.endswith("Gi") else int(text)


# --- which devices -------------------------------------------------------------------------------


def able(node: Node, wanted: TypeRequest, *, functions: bool = True) -> list[Device]:
    """Return the devices that can give what is asked of each. functions: also a virtual one."""
    in_use = {one.place for one in node.of(wanted.type) if one.used and one.place is not None}
    found = []
    for one in node.selected(wanted):
        if not one.healthy or one.alone:
            continue
        if wanted.exclusive is Exclusive.PCIE and (one.used or one.place in in_use):
            continue
        if any(one.free.get(name, 0) < amount for name, amount in one.takes(wanted).items()):
            continue
        if functions and wanted.functions is not None and not one.function(wanted):
            continue
        found.append(one)
    return found


def decide(node: Node, request: DeviceRequest) -> dict[str, list[Device]] | Failed:
    """Return the devices of each type, or why there are too few: jointly listed types first."""
    chosen: dict[str, list[Device]] = {}
    if request.joint:
        jointly = _jointly(node, request)
        if isinstance(jointly, Failed):
            return jointly
        chosen = jointly
    for type_ in request.types:
        if type_ not in chosen:
            alone = _alone(node, request, request.types[type_])
            if isinstance(alone, Failed):
                return alone
            chosen[type_] = alone
    return {type_: sorted(chosen[type_], key=lambda one: one.minor) for type_ in request.types}


def _enough(node: Node, wanted: TypeRequest, least: int) -> tuple[list[Device], Failed | None]:
    """Return the able devices, and why they are too few."""
    if not node.of(wanted.type):
        return [], Failed(f"Insufficient {wanted.type} devices", resolvable=False)
    silent = node.silent.get(wanted.type, 0)
    found = able(node, wanted)
    if least > 0 and len(found) - silent >= least:
        return found, None
    if wanted.functions is not None and least > 0:
        without = able(node, wanted, functions=False)
        if len(without) - silent >= least:
            return found, Failed(f"Insufficient {wanted.type} VirtualFunctions")
    return found, Failed(f"Insufficient {wanted.type} devices")


def _alone(
    node: Node,
    request: DeviceRequest,
    wanted: TypeRequest,
    only: set[Switch] | None = None,
) -> list[Device] | Failed:
    """Return devices of one type. only: the switches that they may be on."""
    least = len(node.selected(wanted)) if wanted.every else wanted.count
    found, failed = _enough(node, wanted, least)
    failed = failed or _impossible(node, wanted)
    if failed is not None:
        return failed
    if only is not None:
        found = [one for one in found if one.place in only]
        if len(found) - node.silent.get(wanted.type, 0) < least:
            return _NOT_JOINT
    return _choose(node, request, wanted, found, least)


_NOT_JOINT = Failed("node(s) Device Joint-Allocate rules violation")


def _demands_scope(wanted: TypeRequest) -> bool:
    single = wanted.count == 1 and not wanted.every
    return wanted.scope is not Scope.NONE and not (wanted.scope is Scope.DEVICE and single)


def _name(wanted: TypeRequest) -> str:
    return "GPU" if wanted.type == "gpu" else wanted.type


def _impossible(node: Node, wanted: TypeRequest) -> Failed | None:
    """Return why the scope cannot be kept whatever is free."""
    if not _demands_scope(wanted):
        return None
    if wanted.shared and wanted.count > 1:
        return Failed("node(s) Unsupported Multi-Shared GPU", resolvable=False)
    if wanted.scope is Scope.DEVICE:
        return _out_of_scope(wanted)
    if any(one.place is None for one in node.of(wanted.type)):
        return Failed(f"node(s) missing {_name(wanted)} Device Topology Tree", resolvable=False)
    return None


def _out_of_scope(wanted: TypeRequest) -> Failed:
    return Failed(f"Insufficient Topology Scoped {_name(wanted)} Devices")


def _choose(
    node: Node, request: DeviceRequest, wanted: TypeRequest, found: list[Device], count: int
) -> list[Device] | Failed:
    """Return `count` of the found devices: as a partition, by topology, or by score."""
    if wanted.type == "gpu" and not wanted.shared:
        partition = _partition(node, request, wanted, found)
        if partition is not None:
            return partition
    by_score = sorted(found, key=lambda one: (-one.score(wanted), one.minor))
    known = all(one.place is not None for one in node.of(wanted.type))
    if wanted.type != "gpu" and wanted.scope is Scope.NONE:
        return by_score[:count]
    if not _demands_scope(wanted) and ((wanted.shared and wanted.count > 1) or not known):
        return by_score[:count]
    return _close(node, wanted, found, count)


# --- partitions ----------------------------------------------------------------------------------

_TABLE = {
    size: [tuple(range(first, first + size)) for first in range(0, 8, size)]
    for size in (1, 2, 4, 8)
}


def _partition(
    node: Node, request: DeviceRequest, wanted: TypeRequest, found: list[Device]
) -> list[Device] | Failed | None:
    """Return a partition; None where none is demanded and none is free."""
    demanded = node.honor or request.partition is not None
    if not node.partitions:
        missing = Failed("node(s) missing GPU Partition Table", resolvable=False)
        return missing if demanded else None
    if wanted.count not in _TABLE:
        unsupported = Failed("node(s) Unsupported number of GPU requests", resolvable=False)
        return unsupported if demanded else None
    free = {one.minor: one for one in found if not one.used}
    best: tuple[int, tuple[int, ...]] | None = None
    for minors in _TABLE[wanted.count]:
        if not set(minors) <= set(free):
            continue
        scope = wanted.scope
        if _demands_scope(wanted) and len({_subtree(free[each], scope) for each in minors}) > 1:
            continue
        rest = set(free) - set(minors)
        stays = sum(
            weight
            for size, weight in ((8, 10_000), (4, 100), (2, 1))
            if size >= wanted.count
            for other in _TABLE[size]
            if set(other) <= rest
        )
        if best is None or stays > best[0]:
            best = stays, minors
    if best is None:
        return Failed("Insufficient Partitioned GPU Devices") if demanded else None
    return [free[minor] for minor in best[1]]


# --- topology ------------------------------------------------------------------------------------


def _subtree(one: Device, scope: Scope) -> tuple[object, ...]:
    """Return which part of the machine of this level the device is in."""
    assert one.place is not None
    numa, pcie = one.place
    if scope is Scope.NODE:
        return ()
    return (numa,) if scope is Scope.NUMA_NODE else (numa, pcie)


def _close(
    node: Node, wanted: TypeRequest, found: list[Device], count: int
) -> list[Device] | Failed:
    """Return devices of the deepest subtree with enough of them; of these the one most in use."""
    of_type = node.of(wanted.type)
    for level in (Scope.PCIE, Scope.NUMA_NODE, Scope.NODE):
        if _demands_scope(wanted) and level < wanted.scope:
            break
        parts: dict[tuple[object, ...], list[Device]] = {}
        for one in found:
            parts.setdefault(_subtree(one, level), []).append(one)
        ranked = []
        for part, members in parts.items():
            if len(members) < count:
                continue
            in_use = 0
            for above in (Scope.NODE, Scope.NUMA_NODE, Scope.PCIE):
                if above <= level:
                    same = _subtree(members[0], above)
                    in_use += any(one.used and _subtree(one, above) == same for one in of_type)
            best_score = max(one.score(wanted) for one in members) if wanted.shared else 0
            ranked.append((-in_use, -best_score, part, members))
        if ranked:
            members = min(ranked, key=lambda each: each[:3])[3]
            if wanted.shared:
                return sorted(members, key=lambda one: (-one.score(wanted), one.minor))[:count]
            return sorted(members, key=lambda one: one.minor)[:count]
    return _out_of_scope(wanted)


# --- several types -------------------------------------------------------------------------------


def _jointly(node: Node, request: DeviceRequest) -> dict[str, list[Device]] | Failed:
    primary, *others = request.joint
    wanted = request.types[primary]
    only: set[Switch] | None = None
    if request.same_pcie and others:
        only = {one.place for one in node.devices if one.place is not None and one.place[1]}
        for type_ in others:
            needed = request.types[type_].count if wanted.count == 1 else 1
            places = [one.place for one in able(node, request.types[type_])]
            only = {place for place in only if places.count(place) >= needed}
    first = _alone(node, request, wanted, only)
    if isinstance(first, Failed):
        for type_ in request.joint:
            by_itself = _alone(node, request, request.types[type_])
            if isinstance(by_itself, Failed):
                return by_itself
        return _NOT_JOINT
    chosen = {primary: first}
    switches = list(dict.fromkeys(_switch(one) for one in first))
    for type_ in others:
        second = _beside(node, request, request.types[type_], switches)
        if isinstance(second, Failed):
            return second
        if request.same_pcie and {_switch(one) for one in second} != set(switches):
            return _NOT_JOINT
        chosen[type_] = second
    return chosen


def _switch(one: Device) -> Switch | None:
    return one.place if one.place is not None and one.place[1] else None


def _beside(
    node: Node, request: DeviceRequest, wanted: TypeRequest, switches: list[Switch | None]
) -> list[Device] | Failed:
    """Return devices of another type near those of the primary, from their switches in turn."""
    most = max(wanted.count, len(switches))
    least = most if request.same_pcie else wanted.count
    found, failed = _enough(node, wanted, least)
    failed = failed or _impossible(node, wanted)
    if failed is not None:
        return failed
    if request.same_pcie:
        found = [one for one in found if _switch(one) in switches and _switch(one) is not None]
        if len(found) - node.silent.get(wanted.type, 0) < least:
            return _NOT_JOINT
    linked = wanted.type == "gpu" and (node.honor or request.partition is not None)
    if wanted.scope is not Scope.NONE or linked:
        return _choose(node, request, wanted, found, wanted.count)
    ordered = sorted(found, key=lambda one: (-one.score(wanted), one.minor))
    lanes = [[one for one in ordered if _switch(one) == switch] for switch in switches]
    taken: list[Device] = []
    for turn in range(len(ordered)):
        taken += [lane[turn] for lane in lanes if turn < len(lane)]
    taken += [one for one in ordered if one not in taken]
    return taken[:most]


# --- score ---------------------------------------------------------------------------------------


def node_score(node: Node, request: DeviceRequest) -> int:
    """Return the sum over types of what stays free of the selected devices, in percent."""
    score = 0
    for wanted in request.types.values():
        devices = node.selected(wanted)
        count = len(devices) if wanted.every else wanted.count
        parts = []
        for name in (GPU_MEMORY_RATIO, GPU_MEMORY, RDMA):
            total = sum(one.total.get(name, 0) for one in devices)
            if total == 0:
                continue
            each = wanted.each.get(name, 0)
            if wanted.type == "gpu" and each == 0:
                memory = sum(one.total.get(GPU_MEMORY, 0) for one in devices) // len(devices)
                if name == GPU_MEMORY and GPU_MEMORY_RATIO in wanted.each:
                    each = wanted.each[GPU_MEMORY_RATIO] * memory // 100
                elif name == GPU_MEMORY_RATIO and GPU_MEMORY in wanted.each:
                    each = wanted.each[GPU_MEMORY] * 100 // memory
            left = sum(one.free.get(name, 0) for one in devices) - each * count
            parts.append(left * 100 // total if 0 <= left <= total else 0)
        score += sum(parts) // len(parts) if parts else 0
    return score
