"""The state of the tables as JSON trees, by upstream's names. Pure functions over the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import numpy as np

from apis.cpuset import CpuSet
from apis.decode import encode
from apis.keys import ANNOTATION_RESERVE_POD, CPU, EPHEMERAL_STORAGE, MEMORY
from apis.meta import format_duration, format_time
from apis.quantity import Quantity
from apis.scheduling_pod import ContainerPort
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.tables.amounts import Amounts, Vector
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.devices.node import NodeDevices
from cluster.scheduler.tables.gangs import Gang, Step
from cluster.scheduler.tables.load import LoadTable
from cluster.scheduler.tables.numa.facts import NO_RATIO
from cluster.scheduler.tables.ports import ANY_ADDRESS
from cluster.scheduler.tables.quotas.figures import figures
from cluster.scheduler.tables.quotas.table import QuotaTable

Tree = dict[str, Any]

_BYTES: Final = frozenset({MEMORY, EPHEMERAL_STORAGE})


def quantities(amounts: Amounts) -> dict[str, str]:
    """Return amounts as a resource list."""
    return {name: _quantity(name, amount) for name, amount in sorted(amounts.items())}


def _quantity(name: str, amount: int) -> str:
    if name == CPU:
        return str(Quantity.of_milli(amount))
    is_memory = name in _BYTES or name.endswith("memory") or name.startswith("hugepages-")
    return str(Quantity.of_bytes(amount) if is_memory else Quantity.of(amount))


# --- a node ------------------------------------------------------------------------------------


def node(core: SchedulerCore, row: int) -> Tree:
    """Return what a node has, what its pods request, and the pods."""
    nodes = core.tables.nodes
    allocatable = nodes.resources.amounts(nodes.allocatable[row].tolist())
    requested = nodes.resources.amounts(nodes.requested[row].tolist())
    names = allocatable.keys() | requested.keys()
    remaining = {name: allocatable.get(name, 0) - requested.get(name, 0) for name in names}
    cpu, memory = nodes.scored[row].tolist()
    return {
        "name": nodes.name(row),
        "unschedulable": bool(nodes.unschedulable[row]),
        "allocatable": quantities(allocatable),
        "allowedPodNumber": int(nodes.allowed_pods[row]),
        "requested": quantities(requested),
        "nonZeroRequested": quantities({CPU: cpu, MEMORY: memory}),
        "remaining": quantities(remaining),
        "pods": [_booking(each) for each in _by_key(core.tables.on(row).values())],
    }


def _by_key(bookings: Iterable[Booking]) -> list[Booking]:
    return sorted(bookings, key=lambda booking: booking.key)


def _named(booking: Booking) -> Tree:
    namespace, _, name = booking.key.rpartition("/")
    return {"namespace": namespace, "name": name, "uid": booking.uid}


def _booking(booking: Booking) -> Tree:
    return _named(booking) | {
        "priority": booking.shape.priority,
        "requests": quantities(booking.shape.requests),
        **_allocation(booking.allocation),
    }


def _allocation(allocation: Allocation) -> Tree:
    tree: Tree = {}
    if allocation.cpus:
        tree["cpuset"] = str(allocation.cpus)
    if allocation.numa:
        tree["numaNodeResources"] = [
            {"node": node, "resources": quantities(amounts)} for node, amounts in allocation.numa
        ]
    if allocation.devices:
        tree["devices"] = {
            kind: [each.minor for each in given] for kind, given in allocation.devices.items()
        }
    if allocation.reservation:
        tree["reservation"] = allocation.reservation
    return tree


# --- load --------------------------------------------------------------------------------------


def load(table: LoadTable, row: int) -> Tree:
    """Return what a node's report lacks, and which pods cause that."""
    shares = [] if row >= len(table.reported) else list(table.on(row))

    def amounts(vector: Vector) -> dict[str, str]:
        values = zip(table.resources, vector.tolist(), strict=True)
        return quantities(dict(values))

    def pods_with(column: str) -> list[str]:
        return sorted(b.key for b, share in shares if getattr(share, column).any())

    tree: Tree = {
        "pods": [
            {"timestamp": _stamp(booking.start), "pod": _named(booking)}
            for booking in _by_key(booking for booking, _ in shares)
        ],
        "nodeDeltaPods": pods_with("delta"),
        "prodDeltaPods": pods_with("prod_delta"),
        "nodeEstimatedPods": pods_with("estimated"),
    }
    if row < len(table.reported):
        tree |= {
            "usage": amounts(table.base[row]),
            "prodUsage": amounts(table.prod_usage[row]),
            "nodeDelta": amounts(table.delta[row]),
            "prodDelta": amounts(table.prod_delta[row]),
            "nodeEstimated": amounts(table.estimated[row]),
            "reported": bool(table.reported[row]),
            "expired": bool(table.expired[row]),
        }
    return tree


def _stamp(seconds: float) -> str | None:
    return format_time(datetime.fromtimestamp(seconds, UTC)) if seconds else None


# --- CPUs and NUMA nodes -----------------------------------------------------------------------


def numa(core: SchedulerCore, row: int) -> Tree:
    """Return the CPUs and NUMA nodes of a node, and what pods have of them."""
    table = core.plugins.numa
    facts, state = table.facts(row), table.state(row)
    topology = facts.topology
    bookings = _by_key(core.tables.on(row).values())
    bound = [b for b in bookings if b.allocation.cpus or b.allocation.numa]
    tree: Tree = {
        "name": core.tables.nodes.name(row),
        "reservedCPUs": _cpus(facts.reserved),
        # One pod has a CPU at most.
        "maxRefCount": 1,
        "policy": facts.bind_policy.value,
        "numaTopologyPolicy": facts.policy.value,
        "numaAllocateStrategy": facts.strategy.value,
        "amplificationRatios": {CPU: facts.cpu_ratio / NO_RATIO},
        "numaNodeResources": _zones({node: zone.total for node, zone in state.numa.items()}),
        "remainingNUMANodeResources": _zones({n: zone.free for n, zone in state.numa.items()}),
        "allocatedNUMANodeResources": _zones(
            {
                node: {name: zone.total[name] - zone.free[name] for name in zone.total}
                for node, zone in state.numa.items()
            }
        ),
        "availableCPUs": _cpus(state.free),
        "allocatedCPUs": str(CpuSet.union(booking.allocation.cpus for booking in bound)),
        "allocatedPods": [_named(booking) | _allocation(booking.allocation) for booking in bound],
    }
    if topology is not None:
        tree["cpuTopology"] = {
            "numCPUs": topology.cpus.bit_count(),
            "numCores": len(topology.cores),
            "numNodes": len(topology.numa),
            "numSockets": len(topology.sockets),
            "cpuDetails": [
                {"cores": _cpus(core.mask), "node": core.numa, "socket": core.socket}
                for core in topology.cores
            ],
        }
    return tree


def _cpus(mask: int) -> str:
    return str(CpuSet.of_mask(mask))


def _zones(by_node: Mapping[int, Amounts]) -> list[Tree]:
    return [{"node": node, "resources": quantities(amounts)} for node, amounts in by_node.items()]


# --- devices -----------------------------------------------------------------------------------


def devices(core: SchedulerCore, row: int) -> Tree | None:
    """Return a node's devices, in sum and each by type and minor; None if it has no Device."""
    view = core.plugins.devices.view(row)
    if view is None:
        return None
    detail = {kind: _device_detail(view, kind) for kind in view.states}
    allocated: dict[str, dict[str, list[Tree]]] = {}
    for booking in _by_key(core.tables.on(row).values()):
        for kind, given in booking.allocation.devices.items():
            allocated.setdefault(kind, {})[booking.key] = [
                {
                    "minor": each.minor,
                    "resources": {name: str(each.resources[name]) for name in each.resources},
                }
                for each in given
            ]
    tree: Tree = {"allocateSet": allocated}
    for number, name in enumerate(("deviceTotal", "deviceFree", "deviceUsed")):
        by_kind = {
            kind: {minor: parts[number] for minor, parts in minors.items()}
            for kind, minors in detail.items()
        }
        tree[name] = {kind: quantities(_sum(minors.values())) for kind, minors in by_kind.items()}
        tree[f"{name}Detail"] = {
            kind: {str(minor): quantities(amounts) for minor, amounts in minors.items()}
            for kind, minors in by_kind.items()
        }
    return tree


def _device_detail(view: NodeDevices, kind: str) -> dict[int, tuple[Amounts, Amounts, Amounts]]:
    """Return total, free and used amounts of each device by minor."""
    return {
        state.unit.minor: (
            state.unit.total,
            state.free,
            {name: total - state.free.get(name, 0) for name, total in state.unit.total.items()},
        )
        for state in view.states[kind]
    }


def _sum(several: Iterable[Amounts]) -> dict[str, int]:
    total: dict[str, int] = {}
    for amounts in several:
        for name, amount in amounts.items():
            total[name] = total.get(name, 0) + amount
    return total


# --- gangs -------------------------------------------------------------------------------------


def gang(core: SchedulerCore, of: Gang) -> Tree:
    """Return a gang with its members by how far they are."""
    definition = of.definition
    group = core.pod_groups.items.get(of.id) if of.by_pod_group else None
    tree: Tree = {
        "name": of.id,
        "createTime": group.metadata.creation_timestamp if group is not None else None,
        "gangGroup": list(of.group),
        "gangGroupInfo": {
            "gangGroupId": ",".join(of.group),
            "onceResourceSatisfied": of.once_satisfied,
        },
        "gangFrom": "GangFromPodGroupCrd" if of.by_pod_group else "GangFromPodAnnotation",
        "hasGangInit": definition is not None,
        "onceResourceSatisfied": of.once_satisfied,
        "children": _keys(core, of, *Step),
        "pendingChildren": _keys(core, of, Step.PENDING, Step.TRIED),
        "waitingForBindChildren": _keys(core, of, Step.WAITING, Step.BINDING),
        "boundChildren": _keys(core, of, Step.BOUND),
    }
    if definition is not None:
        tree |= {
            "waitTime": format_duration(int(definition.wait_s * 1e9)),
            "mode": definition.mode.value,
            "gangMatchPolicy": definition.match_policy.value,
            "minRequiredNumber": definition.min_member,
            "totalChildrenNum": definition.total,
        }
    return tree


def _keys(core: SchedulerCore, of: Gang, *steps: Step) -> list[str]:
    return sorted(_key(core, uid) for step in steps for uid in of.members[step])


def _key(core: SchedulerCore, uid: str) -> str:
    booking = core.tables.bookings.get(uid)
    if booking is not None:
        return booking.key
    return core.queue.key(uid) or uid


# --- quotas ------------------------------------------------------------------------------------


def quota(table: QuotaTable, name: str, *, pods: bool) -> Tree | None:
    """Return what a quota says, has and uses; None if it is not in force. pods: with its pods."""
    found = figures(table, name)
    if found is None:
        return None
    tree: Tree = {
        "name": found.name,
        "parentName": found.parent,
        "isParent": found.is_parent,
        # The runtime is worked out when it is asked for, so it is of the newest version.
        "runtimeVersion": table.version,
        "tree": found.tree,
        "allowLentResource": found.lends,
    }
    for member, amounts in (
        ("max", found.most),
        ("min", found.least),
        ("autoScaleMin", found.scaled_least),
        ("sharedWeight", found.weight),
        ("runtime", found.runtime),
        ("used", found.used),
        ("request", found.request),
        ("childRequest", found.child_request),
        ("nonPreemptibleUsed", found.firm_used),
        ("nonPreemptibleRequest", found.firm_request),
        ("selfUsed", found.own_used),
        ("selfRequest", found.own_request),
        ("selfNonPreemptibleUsed", found.own_firm_used),
        ("selfNonPreemptibleRequest", found.own_firm_request),
        ("allocated", found.allocated),
        ("guaranteed", found.guaranteed),
    ):
        tree[member] = quantities(amounts)
    node_of_tree = table.quotas.get(name)
    if pods and node_of_tree is not None:
        tree["podCache"] = {
            booking.key: {"uid": booking.uid, "node": booking.node}
            for booking in _by_key(table.pods(node_of_tree))
        }
    return tree


# --- reservations ------------------------------------------------------------------------------


def reservations(core: SchedulerCore, row: int) -> Tree:
    """Return the reservations on a node by name, and the pods that use them."""
    items = (_reservation(core, slot) for slot in core.tables.reservations.slots_on(row))
    return {"items": sorted(items, key=lambda item: (item["name"], item["uid"]))}


def _reservation(core: SchedulerCore, slot: int) -> Tree:
    tables = core.tables
    table = tables.reservations
    facts = table.facts(slot)
    own = tables.bookings[facts.uid]
    is_object = ANNOTATION_RESERVE_POD in own.shape.annotations
    names = tables.resources
    used = names.amounts(table.used[slot].tolist())
    left = names.amounts(table.remainder(np.array([slot], dtype=np.intp))[0].tolist())
    users = [tables.bookings[uid] for uid in table.owners_of(facts.uid) if uid in tables.bookings]
    return {
        "name": facts.name,
        "namespace": "" if is_object else own.key.rpartition("/")[0],
        "uid": facts.uid,
        "kind": "Reservation" if is_object else "Pod",
        "available": facts.available,
        "allocateOnce": facts.once,
        "allocatePolicy": facts.policy.name.capitalize(),
        "owners": msgspec.json.decode(encode(facts.owners)),
        "allocatable": quantities(facts.allocatable),
        "reserved": quantities(facts.reserved),
        "allocated": quantities(used),
        "allocatablePorts": _ports(own.shape.ports),
        "allocatedPorts": _ports(port for booking in users for port in booking.shape.ports),
        "availableResource": quantities(left),
        "allocatedResource": quantities(used),
        "assignedPods": [_named(booking) for booking in _by_key(users)],
    }


def _ports(ports: Iterable[ContainerPort]) -> list[Tree]:
    """Return host ports in the order of their numbers."""
    return [
        {"hostIP": address, "protocol": protocol, "hostPort": number}
        for number, protocol, address in sorted(
            (port.host_port, port.protocol, port.host_ip or ANY_ADDRESS) for port in ports
        )
    ]
