"""What the rules of DeviceShare say about one pod on one node, one device after the other.

Written from docs/scheduler.md, "DeviceShare" and "Reservation", and docs/facts/scheduler.md,
"Device allocation" and "GPU partitions", over plain values. It shares no code with columns,
candidates, partitions or the topology; requests are taken as they were parsed. Slow and obvious.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from apis.keys import GPU_MEMORY, GPU_MEMORY_RATIO, RDMA
from cluster.scheduler.tables.devices.request import (
    DeviceRequest,
    Exclusive,
    Scope,
    TypeRequest,
)
from tests.cluster.scheduler.devices.oracle_nodes import Device, Node, Partition, Switch


@dataclass(frozen=True)
class Failed:
    """Why the pod gets no devices. resolvable: evictions could help."""

    text: str
    resolvable: bool = True


# --- which devices -------------------------------------------------------------------------------


def able(node: Node, wanted: TypeRequest, *, functions: bool = True) -> list[Device]:
    """Return the devices that can give what is asked of each. functions: also a virtual one."""
    in_use = {one.place for one in node.of(wanted.type) if one.used and one.place is not None}
    found = []
    for one in node.allowed(wanted):
        if not one.healthy or one.alone:
            continue
        if wanted.exclusive is Exclusive.PCIE and (one.used or one.place in in_use):
            continue
        left = node.limits.reserved.get((one.type, one.minor), {})
        free = {
            name: min(amount, left.get(name, 0)) if node.limited(one.type) else amount
            for name, amount in one.free.items()
        }
        if any(free.get(name, 0) < amount for name, amount in one.takes(wanted).items()):
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
    if node.limits.numa is not None and least > 0:
        anywhere = replace(node, limits=replace(node.limits, numa=None))
        if len(able(anywhere, wanted)) - silent >= least:
            return found, Failed("Insufficient NUMA Scoped Devices")
    return found, Failed(f"Insufficient {wanted.type} devices")


def _alone(
    node: Node,
    request: DeviceRequest,
    wanted: TypeRequest,
    only: set[Switch] | None = None,
) -> list[Device] | Failed:
    """Return devices of one type. only: the switches that they may be on."""
    least = len(node.allowed(wanted)) if wanted.every else wanted.count
    found, failed = _enough(node, wanted, least)
    failed = failed or _impossible(node, wanted)
    if failed is not None:
        return failed
    if only is not None:
        found = [one for one in found if one.place in only]
        if len(found) - node.silent.get(wanted.type, 0) < least:
            return _NOT_JOINT
    failed = _without_template(node, wanted)
    if failed is not None:
        return failed
    return _reserved_first(
        node, found, least, lambda pool: _choose(node, request, wanted, pool, least)
    )


def _without_template(node: Node, wanted: TypeRequest) -> Failed | None:
    """Return why a shared NPU cannot be divided like this."""
    if wanted.type != "gpu" or template_of(node, wanted) is not None:
        return None
    return Failed("no matched GPU shared resource template", resolvable=False)


def template_of(node: Node, wanted: TypeRequest) -> str | None:
    """Return the template that a share is, "" for one that needs none; None if there is none."""
    if not wanted.shared or "huawei.com/npu-core" not in wanted.each:
        return ""
    return min((name for name, has in node.templates.items() if has == wanted.each), default=None)


def _reserved_first(
    node: Node,
    found: list[Device],
    least: int,
    choose: Callable[[list[Device]], list[Device] | Failed],
) -> list[Device] | Failed:
    """Choose of the reserved devices alone if these do, else of all."""
    mine = [one for one in found if node.reserves(one)]
    chosen = choose(mine) if len(mine) >= least else None
    return choose(found) if chosen is None or isinstance(chosen, Failed) else chosen


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
    by_score = _by_score(node, wanted, found)
    known = all(one.place is not None for one in node.of(wanted.type))
    if wanted.type != "gpu" and wanted.scope is Scope.NONE:
        return by_score[:count]
    if not _demands_scope(wanted) and ((wanted.shared and wanted.count > 1) or not known):
        return by_score[:count]
    return _close(node, wanted, found, count)


# --- partitions ----------------------------------------------------------------------------------

EIGHT_LINKED = [
    Partition(tuple(range(first, first + size)))
    for size in (1, 2, 4, 8)
    for first in range(0, 8, size)
]
"""Of the models with a built-in table."""


def _partition(
    node: Node, request: DeviceRequest, wanted: TypeRequest, found: list[Device]
) -> list[Device] | Failed | None:
    """Return a partition; None where none is demanded and none is free."""
    demanded = node.honor or request.partition is not None
    if node.partitions is None:
        missing = Failed("node(s) missing GPU Partition Table", resolvable=False)
        return missing if demanded else None
    of_size = [each for each in node.partitions if len(each.minors) == wanted.count]
    if not of_size:
        unsupported = Failed("node(s) Unsupported number of GPU requests", resolvable=False)
        return unsupported if demanded else None
    free = {one.minor: one for one in found if not one.used}
    highest = max(each.score for each in of_size)
    feasible = []
    for each in of_size:
        if not set(each.minors) <= set(free):
            continue
        spec = request.partition
        if spec is not None and each.bandwidth < spec.bandwidth:
            continue
        if spec is not None and spec.restricted and each.score < highest:
            continue
        scope = wanted.scope
        if _demands_scope(wanted) and len({_subtree(free[n], scope) for n in each.minors}) > 1:
            continue
        stays = _stays(node.partitions, set(free) - set(each.minors), wanted.count)
        feasible.append((-each.score, -stays, each.minors))
    if not feasible:
        return Failed("Insufficient Partitioned GPU Devices") if demanded else None
    return [free[minor] for minor in min(feasible)[2]]


def _stays(partitions: Sequence[Partition], rest: set[int], least: int) -> int:
    """Return how much the partitions are worth that stay free; for each size, those with the
    highest score count."""
    worth = 0
    for size, weight in ((8, 10_000), (4, 100), (2, 1)):
        of_size = [each for each in partitions if len(each.minors) == size >= least]
        highest = max((each.score for each in of_size), default=0)
        worth += sum(
            weight * each.score
            for each in of_size
            if each.score == highest and set(each.minors) <= rest
        )
    return worth


def _by_score(node: Node, wanted: TypeRequest, found: list[Device]) -> list[Device]:
    return sorted(found, key=lambda one: (not node.reserves(one), -one.score(wanted), one.minor))


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
    ranked = []
    for level in (Scope.PCIE, Scope.NUMA_NODE, Scope.NODE):
        if _demands_scope(wanted) and level < wanted.scope:
            break
        parts: dict[tuple[object, ...], list[Device]] = {}
        for one in found:
            parts.setdefault(_subtree(one, level), []).append(one)
        for part, members in parts.items():
            if len(members) < count:
                continue
            in_use = 0
            for above in (Scope.NODE, Scope.NUMA_NODE, Scope.PCIE):
                if above <= level:
                    same = _subtree(members[0], above)
                    in_use += any(one.used and _subtree(one, above) == same for one in of_type)
            best_score = max(one.score(wanted) for one in members) if wanted.shared else 0
            # As many reserved devices as possible, then the deepest part of the machine.
            mine = min(count, sum(node.reserves(one) for one in members))
            ranked.append((-mine, -level, -in_use, -best_score, part, members))
    if not ranked:
        return _out_of_scope(wanted)
    members = min(ranked, key=lambda each: each[:5])[5]
    if wanted.shared:
        return _by_score(node, wanted, members)[:count]
    return sorted(members, key=lambda one: (not node.reserves(one), one.minor))[:count]


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
    failed = _without_template(node, wanted)
    if failed is not None:
        return failed
    linked = wanted.type == "gpu" and (node.honor or request.partition is not None)
    if wanted.scope is not Scope.NONE or linked:
        return _reserved_first(
            node, found, least, lambda pool: _choose(node, request, wanted, pool, wanted.count)
        )
    return _reserved_first(
        node, found, least, lambda pool: _in_turn(node, wanted, switches, pool)[:most]
    )


def _in_turn(
    node: Node, wanted: TypeRequest, switches: list[Switch | None], found: list[Device]
) -> list[Device]:
    """Return the devices near the primary's first, one of each switch in turn; reserved ones
    before all others, wherever they are."""
    ordered = _by_score(node, wanted, found)
    if any(type_ == wanted.type for type_, _ in node.limits.reserved):
        return ordered
    lanes = [[one for one in ordered if _switch(one) == switch] for switch in switches]
    taken: list[Device] = []
    for turn in range(len(ordered)):
        taken += [lane[turn] for lane in lanes if turn < len(lane)]
    taken += [one for one in ordered if one not in taken]
    return taken


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
