"""The NUMA table: CPUs and NUMA nodes of each node, and what pods have of them.

A pod counts here if its allocation has CPUs or amounts of NUMA nodes, whether or not its node's
objects can be used at the time. What follows from facts and allocations is worked out for a row
when either changes, as columns for all nodes at once and as a `NumaState` for one node.

A reservation and the pods that use it count together, with the larger of what is reserved and what
its pods have. So the pods' amounts are not counted twice, and what is left of the reservation is
free only for a pod that uses it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from apis.cpuset import CpuSet
from apis.keys import CPU
from apis.numa import CPUExclusivePolicy, NodeCPUBindPolicy, NUMATopologyPolicy
from cluster.scheduler.tables.amounts import Vector
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.numa.cpu_topology import cores_of, one_of_each_core, whole_cores
from cluster.scheduler.tables.numa.demand import pod_specs
from cluster.scheduler.tables.numa.facts import (
    MOST_NUMA_NODES,
    NO_FACTS,
    NO_RATIO,
    NumaFacts,
    amplify,
)
from cluster.scheduler.tables.numa.state import NumaNode, NumaState, Status

N = TypeVar("N", bound=np.generic)

POLICIES: Final = tuple(NUMATopologyPolicy)
"""A number in the column `policy` is an index here; 0 means no policy."""

BIND_POLICIES: Final = tuple(NodeCPUBindPolicy)
"""A number in the column `bind_policy` is an index here; 0 means no policy."""

WHOLE_NODE: Final = MOST_NUMA_NODES
"""In counts of CPUs: the place of the whole node's count, behind those of its NUMA nodes."""

MOST_NUMA_NAMES: Final = 128
"""Resources that the NUMA nodes of all nodes have together. Chosen: as many as one node's own
resources that count. Each takes 1 MB with 8,192 nodes; twice as many could take 256 MB."""

ANY, IN_WHOLE_CORES, ONE_OF_A_CORE, ANY_ALONE, ONE_OF_A_CORE_ALONE = range(5)
"""Kinds of counts of free CPUs: all; those of wholly free cores; one of each core; and the first
and third without the cores of pods that let no other such pod on them."""

Key = tuple[int, str]
"""NUMA id and resource name."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one booking has of its node. amounts: not amplified, without the cpu of bound CPUs.

    group: UID of the reservation that the pod uses, else the pod's own.
    bound_cpu: the recorded cpu of bound CPUs; counts while it is not known where they are.
    """

    uid: str
    group: str
    cpus: int
    amounts: Mapping[Key, int]
    bound_cpu: Mapping[Key, int]
    exclusive: CPUExclusivePolicy
    alone: bool


def _share(booking: Booking) -> _Share | None:
    allocation = booking.allocation
    if not allocation.cpus and not allocation.numa:
        return None
    specs = booking.shape.derived(pod_specs)
    bound = bool(allocation.cpus)
    recorded: dict[Key, int] = {}
    for node, resources in allocation.numa:
        for name, amount in resources.items():
            # Of others' annotations an entry may be negative or come twice.
            recorded[node, name] = recorded.get((node, name), 0) + max(0, amount)
    bound_cpu = {key: amount for key, amount in recorded.items() if bound and key[1] == CPU}
    amounts = {key: amount for key, amount in recorded.items() if key not in bound_cpu}
    return _Share(
        uid=booking.uid,
        group=allocation.reservation or booking.uid,
        cpus=allocation.cpus.mask,
        amounts=amounts,
        bound_cpu=bound_cpu,
        exclusive=specs.cpus.preferred_cpu_exclusive_policy,
        alone=specs.alone_on_core and bound,
    )


class NumaTable:
    """Columns by row, each at least as long as the node table after `follow`.

    policy, bind_policy: see POLICIES and BIND_POLICIES. cpu_ratio: hundredths, at least 100.
    core_step: of the topology, 0 where there is none. bound: count of allocated CPUs.
    free_cpus: [row, kind, NUMA slot or WHOLE_NODE]. managed_cpus: [row, NUMA slot], those that pods
    may have at all. slots: count of NUMA nodes with resources; the n-th by id has slot n.
    status: [row, slot], a Status. total, free: resource name -> [row, slot], amplified.
    has: resource name -> whether a NUMA node of the row has the resource. Each of these three has
    the resources that a node has now.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        capacity = len(nodes.alive)
        self._capacity = capacity
        self.policy = np.zeros(capacity, dtype=np.int8)
        self.bind_policy = np.zeros(capacity, dtype=np.int8)
        self.cpu_ratio = np.full(capacity, NO_RATIO, dtype=np.int64)
        self.core_step = np.zeros(capacity, dtype=np.int64)
        self.bound = np.zeros(capacity, dtype=np.int64)
        self.free_cpus = np.zeros((capacity, 5, MOST_NUMA_NODES + 1), dtype=np.int64)
        self.managed_cpus = np.zeros((capacity, MOST_NUMA_NODES), dtype=np.int64)
        self.slots = np.zeros(capacity, dtype=np.int64)
        self.status = np.zeros((capacity, MOST_NUMA_NODES), dtype=np.int8)
        self.total: dict[str, Vector] = {}
        self.free: dict[str, Vector] = {}
        self.has: dict[str, NDArray[np.bool_]] = {}
        self._named: dict[int, set[str]] = {}
        """Row -> the resources of its NUMA nodes."""
        self._facts: dict[int, NumaFacts] = {}
        self._shares: dict[int, dict[str, _Share]] = {}
        self._with_policy: set[int] = set()

    # --- reading ---------------------------------------------------------------------------------

    @property
    def any_policy(self) -> bool:
        """Whether a node asks something of pods that ask nothing themselves."""
        alive = self._nodes.alive
        return any(alive[row] for row in self._with_policy)

    def facts(self, row: int) -> NumaFacts:
        return self._facts.get(row, NO_FACTS)

    def state(
        self, row: int, *, reservation: str = "", without: frozenset[str] = frozenset()
    ) -> NumaState:
        """Return the node as an allocation sees it.

        reservation: UID of a reservation whose remainder counts as free; its CPUs are preferred.
        without: UIDs of pods that count as gone.
        """
        facts = self.facts(row)
        shares = self._shares.get(row, {})
        left = [s for uid, s in shares.items() if uid != reservation and uid not in without]
        state = _state(facts, left)
        reserved = shares.get(reservation)
        if reserved is None:
            return state
        return replace(state, preferred=reserved.cpus & state.free)

    def unused_cpus(self, row: int, reservation: str) -> int:
        """Return how many CPUs a reservation has that no pod was given."""
        shares = self._shares.get(row, {})
        reserved = shares.get(reservation)
        if reserved is None:
            return 0
        used = 0
        for share in shares.values():
            if share.uid != reservation:
                used |= share.cpus
        return (reserved.cpus & ~used).bit_count()

    def reserved_names(self, row: int, reservation: str) -> frozenset[str]:
        """Return the resources of NUMA nodes that a reservation has."""
        reserved = self._shares.get(row, {}).get(reservation)
        if reserved is None:
            return frozenset()
        return frozenset(name for _, name in _used_by(self.facts(row), reserved))

    def reserved_state(self, row: int, reservation: str, names: Container[str]) -> NumaState:
        """Return the node as if of these resources only the remainder of a reservation were free.

        A reservation without CPUs or amounts of NUMA nodes restricts nothing.
        """
        state = self.state(row, reservation=reservation)
        facts = self.facts(row)
        shares = self._shares.get(row, {})
        reserved = shares.get(reservation)
        if reserved is None:
            return state
        left = dict(_used_by(facts, reserved))
        for share in shares.values():
            if share.group == reservation and share.uid != reservation:
                for key, amount in _used_by(facts, share).items():
                    left[key] = left.get(key, 0) - amount
        free = state.preferred if CPU in names and reserved.cpus else state.free
        return replace(state, free=free, numa=_emptied(state, left, names))

    # --- changing --------------------------------------------------------------------------------

    def set_node(self, row: int, facts: NumaFacts) -> list[str]:
        """Take the facts about the node of a row; return the resources that do not count.

        There are MOST_NUMA_NAMES resources at most. A resource that was left out counts when its
        node's facts are set next and another one is not on any node any more.
        """
        named = {name for amounts in facts.zones.values() for name in amounts}
        left_out: list[str] = []
        if len(self.total) + len(named - self.total.keys()) > MOST_NUMA_NAMES:
            facts, left_out = self._within_bounds(row, facts, named)
        self._facts[row] = facts
        asks = facts.policy or facts.bind_policy is not NodeCPUBindPolicy.NONE
        if asks or facts.cpu_ratio > NO_RATIO:
            self._with_policy.add(row)
        else:
            self._with_policy.discard(row)
        self._refresh(row)
        return left_out

    def _within_bounds(
        self, row: int, facts: NumaFacts, named: set[str]
    ) -> tuple[NumaFacts, list[str]]:
        """Return the facts with the resources that count, and the names of the others."""
        going = {
            name
            for name in self._named.get(row, set()) - named
            if np.count_nonzero(self.has[name]) == 1
        }
        left = MOST_NUMA_NAMES - len(self.total) + len(going)
        new = sorted(named - self.total.keys(), key=lambda name: ("/" in name, name))
        left_out = new[max(left, 0) :]
        zones = {
            numa: {name: amount for name, amount in amounts.items() if name not in left_out}
            for numa, amounts in facts.zones.items()
        }
        return replace(facts, zones=MappingProxyType(zones)), left_out

    def forget(self, row: int) -> None:
        """Drop the facts about the node of a row, which was deleted."""
        self._facts.pop(row, None)
        self._with_policy.discard(row)
        self._refresh(row)

    def place(self, booking: Booking, row: int) -> None:
        """Count a booking on the node of this row."""
        share = _share(booking)
        if share is not None:
            self._shares.setdefault(row, {})[booking.uid] = share
            self._refresh(row)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did with the same booking."""
        shares = self._shares.get(row)
        if shares is None or shares.pop(booking.uid, None) is None:
            return
        if not shares:
            del self._shares[row]
        self._refresh(row)

    def follow(self) -> None:
        """Make the columns as long as those of the node table."""
        capacity = len(self._nodes.alive)
        if capacity <= self._capacity:
            return
        for attribute, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, attribute, _longer(column, capacity))
        self.cpu_ratio[self._capacity :] = NO_RATIO
        for name in self.total:
            self.total[name] = _longer(self.total[name], capacity)
            self.free[name] = _longer(self.free[name], capacity)
            self.has[name] = _longer(self.has[name], capacity)
        self._capacity = capacity

    def _refresh(self, row: int) -> None:
        self.follow()
        facts = self.facts(row)
        state = _state(facts, self._shares.get(row, {}).values())
        topology = facts.topology
        self.policy[row] = POLICIES.index(facts.policy)
        self.bind_policy[row] = BIND_POLICIES.index(facts.bind_policy)
        self.cpu_ratio[row] = facts.cpu_ratio
        self.core_step[row] = topology.core_step if topology is not None else 0
        bound = CpuSet.union(CpuSet.of_mask(s.cpus) for s in self._shares.get(row, {}).values())
        self.bound[row] = len(bound)
        self.slots[row] = len(state.numa)
        self.free_cpus[row] = _counts(state)
        self.managed_cpus[row] = 0
        self.status[row] = 0
        had = self._named.pop(row, set())
        named = {name for numa in state.numa.values() for name in numa.total}
        if named:
            self._named[row] = named
        for name in had:
            self.total[name][row] = 0
            self.free[name][row] = 0
            self.has[name][row] = False
        for slot, (node, numa) in enumerate(state.numa.items()):
            self.status[row, slot] = numa.status
            if topology is not None:
                there = state.managed & topology.numa.get(node, 0)
                self.managed_cpus[row, slot] = there.bit_count()
            for name, amount in numa.total.items():
                if name not in self.total:
                    self._add_resource(name)
                self.total[name][row, slot] = amount
                self.free[name][row, slot] = numa.free[name]
                self.has[name][row] = True
        for name in had - named:
            if not self.has[name].any():
                del self.total[name], self.free[name], self.has[name]
        self._nodes.touch(row)

    def _add_resource(self, name: str) -> None:
        self.total[name] = np.zeros((self._capacity, MOST_NUMA_NODES), dtype=np.int64)
        self.free[name] = np.zeros((self._capacity, MOST_NUMA_NODES), dtype=np.int64)
        self.has[name] = np.zeros(self._capacity, dtype=np.bool_)


def _longer(column: NDArray[N], capacity: int) -> NDArray[N]:
    result: NDArray[N] = np.zeros((capacity, *column.shape[1:]), dtype=column.dtype)
    result[: len(column)] = column
    return result


# --- one row -------------------------------------------------------------------------------------


def _state(facts: NumaFacts, shares: Iterable[_Share]) -> NumaState:
    """Return what these pods leave free of a node."""
    by_group: dict[str, list[_Share]] = {}
    cpus = alone = 0
    held: dict[CPUExclusivePolicy, int] = {}
    statuses: dict[int, Status] = {}
    for share in shares:
        by_group.setdefault(share.group, []).append(share)
        cpus |= share.cpus
        alone |= share.cpus if share.alone else 0
        if share.cpus and share.exclusive is not CPUExclusivePolicy.NONE:
            held[share.exclusive] = held.get(share.exclusive, 0) | share.cpus
        spanned = _spanned(facts, share)
        status = Status.SINGLE if len(spanned) == 1 else Status.SHARED
        for node in spanned:
            statuses[node] = max(status, statuses.get(node, Status.IDLE))
    used: dict[Key, int] = {}
    for group, members in by_group.items():
        for key, amount in _used_by_group(facts, group, members).items():
            used[key] = used.get(key, 0) + amount
    topology = facts.topology
    managed = topology.cpus & ~facts.reserved if topology is not None else 0
    bindable = _bindable(facts, managed, by_group)
    return NumaState(
        topology=topology,
        free=managed & ~cpus,
        managed=managed,
        held=held,
        alone=alone,
        strategy=facts.strategy,
        cpu_ratio=facts.cpu_ratio,
        bindable=bindable,
        numa=MappingProxyType(
            {
                node: NumaNode(
                    total,
                    {n: max(0, amount - used.get((node, n), 0)) for n, amount in total.items()},
                    statuses.get(node, Status.IDLE),
                )
                for node, total in facts.zones.items()
            }
        ),
    )


def _bindable(
    facts: NumaFacts, managed: int, by_group: Mapping[str, Sequence[_Share]]
) -> Mapping[int, int]:
    """Return NumaState.bindable: what amounts and bound CPUs leave of a NUMA node's CPUs."""
    topology = facts.topology
    shares = [share for members in by_group.values() for share in members]
    given = {node for share in shares for node, name in share.amounts if name == CPU}
    if topology is None or not given:
        return MappingProxyType({})
    used: dict[Key, int] = {}
    for group, members in by_group.items():
        # CPUs that were reserved since are none of those that are counted below.
        there = [replace(share, cpus=share.cpus & managed) for share in members]
        for key, amount in _used_by_group(facts, group, there).items():
            used[key] = used.get(key, 0) + amount
    one = amplify(1000, facts.cpu_ratio)
    return MappingProxyType(
        {
            node: max(0, (cpus & managed).bit_count() - -(-used.get((node, CPU), 0) // one))
            for node, cpus in topology.numa.items()
            if node in given
        }
    )


def _emptied(
    state: NumaState, left: Mapping[Key, int], names: Container[str]
) -> dict[int, NumaNode]:
    """Return the NUMA nodes with at most these amounts of these resources free."""
    return {
        node: NumaNode(
            numa.total,
            {
                n: max(0, min(amount, left.get((node, n), 0))) if n in names else amount
                for n, amount in numa.free.items()
            },
            numa.status,
        )
        for node, numa in state.numa.items()
    }


def _spanned(facts: NumaFacts, share: _Share) -> set[int]:
    nodes = {node for (node, _), amount in share.amounts.items() if amount > 0}
    if facts.topology is not None:
        nodes |= {node for node, mask in facts.topology.numa.items() if mask & share.cpus}
    return nodes


def _used_by(facts: NumaFacts, share: _Share) -> dict[Key, int]:
    """Return the amplified amounts that a pod has; its CPUs count where they are."""
    used = dict(share.amounts)
    if facts.topology is None:
        return used | {k: amplify(a, facts.cpu_ratio) for k, a in share.bound_cpu.items()}
    if share.cpus:
        for node, mask in facts.topology.numa.items():
            count = (mask & share.cpus).bit_count()
            if count:
                used[node, CPU] = used.get((node, CPU), 0) + amplify(1000 * count, facts.cpu_ratio)
    return used


def _used_by_group(facts: NumaFacts, group: str, members: Iterable[_Share]) -> dict[Key, int]:
    """Return the larger of what is reserved and what the pods of the reservation have."""
    reserved: dict[Key, int] = {}
    used: dict[Key, int] = {}
    for share in members:
        into = reserved if share.uid == group else used
        for key, amount in _used_by(facts, share).items():
            into[key] = into.get(key, 0) + amount
    return {key: max(reserved.get(key, 0), used.get(key, 0)) for key in reserved | used}


def _counts(state: NumaState) -> NDArray[np.int64]:
    """Return the counts of free CPUs, [kind, slot or WHOLE_NODE]."""
    counts = np.zeros((5, MOST_NUMA_NODES + 1), dtype=np.int64)
    topology, free = state.topology, state.free
    if topology is None or not free:
        return counts
    alone = free & ~cores_of(topology, state.alone)
    usable = (
        free,
        whole_cores(topology, free),
        one_of_each_core(topology, free),
        alone,
        one_of_each_core(topology, alone),
    )
    slots = {node: slot for slot, node in enumerate(state.numa)}
    places = [(slot, topology.numa.get(node, 0)) for node, slot in slots.items()]
    places.append((WHOLE_NODE, topology.cpus))
    for kind, cpus in enumerate(usable):
        for place, there in places:
            counts[kind, place] = (cpus & there).bit_count()
        step = topology.core_step if kind == IN_WHOLE_CORES else 1
        for node, most in state.bindable.items():
            more = (cpus & topology.numa[node]).bit_count() - most // step * step
            if more > 0:
                counts[kind, WHOLE_NODE] -= more
                if node in slots:
                    counts[kind, slots[node]] -= more
    return counts
