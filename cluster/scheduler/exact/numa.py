"""Which NUMA nodes a pod gets, with which amounts, and its CPUs there.

A set of NUMA nodes is a mask: bit n stands for the NUMA node with id n. Each provider of hints
(CPUs and memory here, devices elsewhere) says which sets it could use, and which of these are as
narrow as the machine allows; the sets that all providers could use are ranked together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final, NamedTuple

from apis.keys import CPU
from apis.numa import NUMAExclusive, NUMATopologyPolicy
from cluster.scheduler.exact.cpus import allocate_cpus, usable_cpus
from cluster.scheduler.exact.even import split_evenly
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.numa.cpu_topology import cores_of
from cluster.scheduler.tables.numa.demand import FULL, CpuDemand
from cluster.scheduler.tables.numa.facts import amplify
from cluster.scheduler.tables.numa.state import NumaState, Status

MISSING: Final = "node(s) missing NUMA resources"
INVALID_TOPOLOGY: Final = "node(s) invalid CPU Topology"
UNALIGNED: Final = "Unaligned NUMA Hint"
NO_NUMA_NODES: Final = "node(s) Insufficient NUMA Node resources"


class Hint(NamedTuple):
    """A set of NUMA nodes that a provider could use.

    preferred: no narrower set could do on this machine when it is empty. score: 0..100.
    mixes: pods of one NUMA node and pods that span several would meet.
    """

    preferred: bool
    score: int = 0
    mixes: bool = False


Hints = Mapping[int, Hint]
"""Set of NUMA nodes -> hint. An empty mapping means that the provider could use none."""


Provider = Callable[[Sequence[int]], Hints | None]
"""Says which of some sets of NUMA nodes it could use; None without an opinion."""


@dataclass(frozen=True, slots=True)
class NumaDemand:
    """What a pod is to get on one node.

    amounts: what the pod requests, more than 0 each. cpus: None for a pod that is bound to none.
    policy: of pod and node together. wider_restricted: Restricted also accepts sets that are wider
    than the narrowest one that the machine has room for.
    """

    amounts: Amounts
    cpus: CpuDemand | None = None
    policy: NUMATopologyPolicy = NUMATopologyPolicy.NONE
    exclusive: NUMAExclusive = NUMAExclusive.UNSET
    wider_restricted: bool = False


@dataclass(frozen=True, slots=True)
class Scoring:
    """How sets of NUMA nodes, or nodes, are ranked: by the share that is free, or in use.

    weights: resource name -> weight, at least 1.
    """

    most_allocated: bool
    weights: Mapping[str, int]


class Placement(NamedTuple):
    """cpus: mask. numa: (NUMA id, amounts) by id; cpu not amplified."""

    cpus: int = 0
    numa: tuple[tuple[int, Amounts], ...] = ()


# --- one set of NUMA nodes -----------------------------------------------------------------------


@lru_cache(maxsize=256)
def subsets(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return all sets of these NUMA nodes except the empty one, by size, then by value."""
    return tuple(
        mask
        for size in range(1, len(ids) + 1)
        for mask in sorted(sum(1 << n for n in chosen) for chosen in combinations(ids, size))
    )


class _Room(NamedTuple):
    """What each NUMA node has for a demand: free and total, by resource name.

    cpu of a demand for bound CPUs is counted in CPUs.
    """

    need: dict[str, int]
    free: dict[str, dict[int, int]]
    total: dict[str, dict[int, int]]

    def lacking(self) -> str | None:
        """Return a resource of which all NUMA nodes together have too little."""
        for name, need in self.need.items():
            if sum(self.free[name].values()) < need:
                return name
        return None


def _free_for(state: NumaState, demand: CpuDemand) -> int:
    """Return the CPUs that this pod may get: no core of another pod that wants it alone."""
    if not demand.alone_on_core:
        return state.free
    assert state.topology is not None
    return state.free & ~cores_of(state.topology, state.alone)


def _room(state: NumaState, demand: NumaDemand) -> _Room:
    """Return the room for the resources that the node's NUMA nodes have, and for CPUs."""
    names = [
        name
        for name in demand.amounts
        if any(name in node.total for node in state.numa.values())
        and not (name == CPU and demand.cpus)
    ]
    need = {name: demand.amounts[name] for name in names}
    free = {name: {i: node.free.get(name, 0) for i, node in state.numa.items()} for name in names}
    total = {name: {i: node.total.get(name, 0) for i, node in state.numa.items()} for name in names}
    cpus = demand.cpus
    if cpus is not None:
        assert state.topology is not None
        usable = usable_cpus(state.topology, _free_for(state, cpus), cpus, state.preferred)
        need[CPU] = cpus.count
        free[CPU], total[CPU] = {}, {}
        step = state.topology.core_step if cpus.policy is FULL and cpus.required else 1
        counts = any(CPU in node.total for node in state.numa.values())
        for i, node in state.numa.items():
            there = state.topology.numa.get(i, 0)
            one = amplify(1000, state.cpu_ratio)
            have, most = (usable & there).bit_count(), (state.managed & there).bit_count()
            if counts:
                have = min(have, node.free.get(CPU, 0) // one)
                most = min(most, node.total.get(CPU, 0) // one)
            have = min(have, state.bindable.get(i, have))
            free[CPU][i], total[CPU][i] = have // step * step, most // step * step
    return _Room(need, free, total)


def _members(mask: int, ids: Iterable[int]) -> list[int]:
    return [node for node in ids if mask >> node & 1]


def mixes(state: NumaState, mask: int) -> bool:
    """Return whether a pod on this set would make pods of one NUMA node and wider ones meet."""
    nodes = _members(mask, state.numa)
    worst = Status.SHARED if len(nodes) == 1 else Status.SINGLE
    return any(state.numa[node].status is worst for node in nodes)


def place_in(state: NumaState, demand: NumaDemand, mask: int) -> Placement | Unfit:
    """Divide the demand evenly over a set of NUMA nodes."""
    room = _room(state, demand)
    nodes = _members(mask, state.numa)
    amounts: dict[int, dict[str, int]] = {node: {} for node in nodes}
    for name, need in room.need.items():
        if name == CPU and demand.cpus:
            continue
        shares = split_evenly(need, {node: room.free[name][node] for node in nodes})
        if sum(shares.values()) < need:
            return Unfit(f"Insufficient NUMA {name}")
        for node, share in shares.items():
            if share:
                amounts[node][name] = share
    cpus = 0
    if demand.cpus is not None:
        found = _cpus_in(state, demand.cpus, {node: room.free[CPU][node] for node in nodes})
        if isinstance(found, Unfit):
            return found
        cpus = found
        assert state.topology is not None
        for node in nodes:
            count = (cpus & state.topology.numa.get(node, 0)).bit_count()
            if count:
                amounts[node][CPU] = 1000 * count
    numa = tuple((node, dict(sorted(a.items()))) for node, a in sorted(amounts.items()) if a)
    return Placement(cpus, numa)


def _cpus_in(state: NumaState, demand: CpuDemand, limits: Mapping[int, int]) -> int | Unfit:
    """Return CPUs divided evenly over NUMA nodes.

    Where cores differ in size, equal shares may not consist of whole cores; the division that the
    limits allow and that is nearest is taken then.
    """
    topology = state.topology
    assert topology is not None
    if sum(limits.values()) < demand.count:
        return Unfit(f"Insufficient NUMA {CPU}")
    step = topology.core_step if demand.policy is FULL and demand.required else 1
    shares = split_evenly(demand.count, limits, step=step)
    return allocate_cpus(
        topology,
        _free_for(state, demand) & sum(topology.numa.get(node, 0) for node in limits),
        demand,
        strategy=state.strategy,
        held=state.held.get(demand.exclusive, 0),
        preferred=state.preferred,
        shares=shares,
        limits=limits,
    )


# --- hints ---------------------------------------------------------------------------------------


def numa_hints(state: NumaState, demand: NumaDemand, scoring: Scoring) -> Hints | None:
    """Return the sets of NUMA nodes with room for the demand; None if it needs none of them.

    A set is preferred if the empty machine has no room in fewer NUMA nodes. Sets are numbered here:
    bit n of the number stands for the n-th NUMA node.
    """
    room = _room(state, demand)
    if not room.need:
        return None
    ids = tuple(state.numa)
    sizes = _sums_of_sets([1] * len(ids))
    capable = _sets_with_room(room.need, room.total, len(sizes))
    narrowest = min((sizes[number] for number in capable), default=0)
    numbers = _sets_with_room(room.need, room.free, len(sizes))
    masks = _sums_of_sets([1 << node for node in ids])
    scores = _scores(state, demand, scoring)
    wide = demand.wider_restricted and demand.policy is NUMATopologyPolicy.RESTRICTED
    hints: dict[int, Hint] = {}
    for number in numbers:
        mask = masks[number]
        mixed = demand.exclusive is not NUMAExclusive.UNSET and mixes(state, mask)
        if mixed and demand.exclusive is NUMAExclusive.REQUIRED:
            continue
        hints[mask] = Hint(wide or sizes[number] == narrowest, scores(number), mixed)
    return hints


def _sums_of_sets(values: Iterable[int]) -> list[int]:
    """Return the sum of the values in each set, by the set's number; the empty one is 0."""
    sums = [0]
    for value in values:
        sums += [known + value for known in sums]
    return sums


def _sets_with_room(
    need: Mapping[str, int], amounts: Mapping[str, Mapping[int, int]], count: int
) -> list[int]:
    """Return the sets with enough, and something in each NUMA node, of everything needed."""
    numbers = list(range(1, count))
    for name, least in need.items():
        there = list(amounts[name].values())
        empty = sum(1 << position for position, amount in enumerate(there) if not amount)
        sums = _sums_of_sets(there)
        numbers = [n for n in numbers if sums[n] >= least and not n & empty]
    return numbers


def _scores(state: NumaState, demand: NumaDemand, scoring: Scoring) -> Callable[[int], int]:
    """Return a function from a set's number to its score."""
    request = dict(demand.amounts)
    if demand.cpus is not None:
        request[CPU] = demand.cpus.count * amplify(1000, state.cpu_ratio)
    nodes = state.numa.values()
    # As in all scores, an extended resource counts only if the pod requests it.
    names = [name for name in scoring.weights if "/" not in name or request.get(name)]
    totals = {n: _sums_of_sets(node.total.get(n, 0) for node in nodes) for n in names}
    frees = {n: _sums_of_sets(node.free.get(n, 0) for node in nodes) for n in names}

    def of_set(number: int) -> int:
        total = {name: sums[number] for name, sums in totals.items()}
        used = {n: total[n] - frees[n][number] + request.get(n, 0) for n in total}
        return score(scoring, total, used)

    return of_set


def score(scoring: Scoring, total: Amounts, used: Amounts) -> int:
    """Return the weighted mean, 0..100, of the share of each resource that is free, or in use.

    Resources without a total are left out. All divisions round down.
    """
    weighted = weights = 0
    for name, weight in scoring.weights.items():
        most = total.get(name, 0)
        if most <= 0:
            continue
        taken = used.get(name, 0)
        if scoring.most_allocated:
            share = min(taken, most) * 100 // most
        else:
            share = max(0, most - taken) * 100 // most
        weighted += weight * share
        weights += weight
    return weighted // weights if weights else 0


def affinities(policy: NUMATopologyPolicy, ids: Iterable[int], hints: Sequence[Hints]) -> list[int]:
    """Return the sets of NUMA nodes that the policy admits, the best one first.

    Of the sets that every provider could use, those come first that all prefer; then those that do
    not mix pods of one NUMA node with wider ones; then the narrower, the one with the larger sum of
    scores, the smaller value. Restricted and SingleNUMANode admit preferred sets only, BestEffort
    any set and in the end all NUMA nodes. hints: of each provider that has an opinion, at
    least one.
    """
    everything = sum(1 << node for node in ids)
    common = set(hints[0]).intersection(*hints[1:])
    ranked: list[tuple[bool, bool, int, int, int]] = []
    for mask in common:
        preferred = all(provider[mask].preferred for provider in hints)
        mixed = any(provider[mask].mixes for provider in hints)
        total = sum(provider[mask].score for provider in hints)
        ranked.append((not preferred, mixed, mask.bit_count(), -total, mask))
    ranked.sort()
    if policy is NUMATopologyPolicy.BEST_EFFORT:
        result = [rank[-1] for rank in ranked]
        return result if everything in common else [*result, everything]
    single = policy is NUMATopologyPolicy.SINGLE_NUMA_NODE
    return [
        mask
        for unpreferred, _, size, _, mask in ranked
        if (size == 1 if single else not unpreferred)
    ]


# --- the whole allocation ------------------------------------------------------------------------


def allocate(
    state: NumaState,
    demand: NumaDemand,
    scoring: Scoring,
    *,
    others: Sequence[Provider] = (),
) -> Placement | Unfit:
    """Return what the pod gets on this node.

    others: other providers of hints. The first admitted set in which everything can be placed is
    taken.
    """
    if demand.cpus is not None and state.topology is None:
        return Unfit(INVALID_TOPOLOGY)
    if demand.policy is NUMATopologyPolicy.NONE:
        return _without_policy(state, demand)
    if not state.numa:
        return Unfit(MISSING)
    own = numa_hints(state, demand, scoring)
    sets = subsets(tuple(state.numa)) if own is None else tuple(own)
    hints = [] if own is None else [own]
    hints += [given for provider in others if (given := provider(sets)) is not None]
    if not hints:
        return Placement()
    last = _why_none(state, demand, own)
    for mask in affinities(demand.policy, state.numa, hints):
        if demand.exclusive is NUMAExclusive.REQUIRED and mixes(state, mask):
            continue
        placed = place_in(state, demand, mask)
        if isinstance(placed, Placement):
            return placed
        last = placed
    return last


def _why_none(state: NumaState, demand: NumaDemand, own: Hints | None) -> Unfit:
    """Return why there may be no set that the policy admits."""
    if own is None or own:
        return Unfit(UNALIGNED)
    room = _room(state, demand)
    if _sets_with_room(room.need, room.free, 1 << len(state.numa)):
        return Unfit(UNALIGNED)  # pods of one NUMA node and wider ones would meet in each
    lacking = room.lacking()
    return Unfit(f"Insufficient NUMA {lacking}" if lacking else NO_NUMA_NODES)


def _without_policy(state: NumaState, demand: NumaDemand) -> Placement | Unfit:
    if demand.cpus is None:
        return Placement()
    assert state.topology is not None
    cpus = allocate_cpus(
        state.topology,
        _free_for(state, demand.cpus),
        demand.cpus,
        strategy=state.strategy,
        held=state.held.get(demand.cpus.exclusive, 0),
        preferred=state.preferred,
        limits=state.bindable,
    )
    return cpus if isinstance(cpus, Unfit) else Placement(cpus)
