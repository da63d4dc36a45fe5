"""Which sets of NUMA nodes have room for a pod, for many nodes at once.

The rules are those of `exact.numa`: a set has room if each of its NUMA nodes has some, and all
together have enough, of every resource that the pod requests and the node's NUMA nodes have. Here
the sums of all sets are worked out together, for nodes with the same count of NUMA nodes. A set is
a column: bit n of its number stands for the NUMA node in slot n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import CPU
from apis.numa import NUMAExclusive, NUMATopologyPolicy
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.contract import percent_of, zeros
from cluster.scheduler.plugins.numa.asked import (
    FULL_REQUIRED,
    UNBOUND,
    Asked,
    Bools,
    Ints,
    amplified,
)
from cluster.scheduler.tables.numa.facts import NO_RATIO
from cluster.scheduler.tables.numa.state import Status
from cluster.scheduler.tables.numa.table import (
    ANY,
    ANY_ALONE,
    IN_WHOLE_CORES,
    ONE_OF_A_CORE,
    ONE_OF_A_CORE_ALONE,
    POLICIES,
    WHOLE_NODE,
    NumaTable,
)

_NOTHING: Final = -(2**55)
"""Stands for nothing free: no set with such a NUMA node has enough. Eight of them, and eight of the
largest amounts (2^52), fit 64 bits."""

_SINGLE: Final = POLICIES.index(NUMATopologyPolicy.SINGLE_NUMA_NODE)
_RESTRICTED: Final = POLICIES.index(NUMATopologyPolicy.RESTRICTED)
_BEST_EFFORT: Final = POLICIES.index(NUMATopologyPolicy.BEST_EFFORT)

_KIND: Final = np.array([ANY, ANY, IN_WHOLE_CORES, ANY, ONE_OF_A_CORE])
_KIND_ALONE: Final = np.array(
    [ANY_ALONE, ANY_ALONE, IN_WHOLE_CORES, ANY_ALONE, ONE_OF_A_CORE_ALONE]
)
"""The count of free CPUs that a way of binding can use."""


@dataclass(frozen=True, slots=True)
class Need:
    """One resource: how much is needed by row, and what each slot has free and in total."""

    name: str
    need: Ints
    free: Ints
    total: Ints


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with the same count of NUMA nodes.

    at: positions in Asked.rows. room: [position, set] whether the set has room.
    admitted: [position, set] whether the policy accepts the set, and it has room. preferred, mixes:
    [position, set].
    last_resort: by position, whether all NUMA nodes together do, as BestEffort accepts in the end.
    """

    at: NDArray[np.intp]
    slots: int
    room: Bools
    admitted: Bools
    preferred: Bools
    mixes: Bools
    last_resort: Bools


def usable_counts(table: NumaTable, asked: Asked) -> Ints:
    """Return the count of CPUs that the pod can use, [position, slot or WHOLE_NODE]."""
    kinds = (_KIND_ALONE if asked.alone else _KIND)[asked.binding]
    counts: Ints = table.free_cpus[asked.rows, kinds]
    return counts


def needs(table: NumaTable, asked: Asked) -> list[Need]:
    """Return what has to be found in the NUMA nodes. cpu of bound rows is counted in CPUs."""
    rows, bound = asked.rows, asked.binding != UNBOUND
    found: list[Need] = []
    for name, amount in asked.amounts:
        if name == CPU or name not in table.total:
            continue
        has = table.has[name][rows]
        need = np.where(has, amount, 0)
        absent = ~has[:, np.newaxis]
        free = np.where(absent, 1, table.free[name][rows])
        total = np.where(absent, 1, table.total[name][rows])
        found.append(Need(name, need, free, total))
    milli = dict(asked.amounts).get(CPU, 0)
    if milli <= 0:
        return found
    usable = usable_counts(table, asked)[:, :WHOLE_NODE]
    managed = table.managed_cpus[rows]
    has = table.has[CPU][rows] if CPU in table.has else np.zeros(len(rows), dtype=np.bool_)
    if CPU in table.total:
        free, total = table.free[CPU][rows], table.total[CPU][rows]
    else:
        free = total = np.zeros_like(managed)
    one = (1000 * table.cpu_ratio[rows] // NO_RATIO)[:, np.newaxis]
    step = np.where(asked.binding == FULL_REQUIRED, np.maximum(table.core_step[rows], 1), 1)
    counted = has[:, np.newaxis]
    bound_free = np.where(counted, np.minimum(usable, free // one), usable)
    bound_total = np.where(counted, np.minimum(managed, total // one), managed)
    bound_free = bound_free // step[:, np.newaxis] * step[:, np.newaxis]
    bound_total = bound_total // step[:, np.newaxis] * step[:, np.newaxis]
    is_bound = bound[:, np.newaxis]
    need = np.where(bound, asked.cpus, np.where(has, milli, 0))
    free = np.where(is_bound, bound_free, np.where(counted, free, 1))
    total = np.where(is_bound, bound_total, np.where(counted, total, 1))
    found.append(Need(CPU, need, free, total))
    return found


def anything_needed(asked: Asked, found: Sequence[Need]) -> Bools:
    """Return the rows of whose NUMA nodes the pod needs something."""
    needed = np.zeros(len(asked.rows), dtype=np.bool_)
    for one in found:
        needed |= one.need > 0
    return needed


def lacks_in_total(table: NumaTable, asked: Asked, need: Need) -> Bools:
    """Return the rows whose NUMA nodes all together have too little of a resource."""
    slots = np.arange(WHOLE_NODE) < table.slots[asked.rows][:, np.newaxis]
    short: Bools = np.where(slots, need.free, 0).sum(axis=1) < need.need
    return short


def groups(table: NumaTable, asked: Asked, found: Sequence[Need]) -> Iterator[Group]:
    """Yield which sets of NUMA nodes have room, for all rows with NUMA nodes."""
    slots = table.slots[asked.rows]
    for count in np.unique(slots[slots > 0]):
        at = np.flatnonzero(slots == count)
        yield _group(table, asked, found, at, int(count))


def _group(
    table: NumaTable, asked: Asked, found: Sequence[Need], at: NDArray[np.intp], slots: int
) -> Group:
    sizes = _sizes(slots)
    room = np.ones((len(at), 1 << slots), dtype=np.bool_)
    capable = room.copy()
    room[:, 0] = capable[:, 0] = False
    last_resort = np.ones(len(at), dtype=np.bool_)
    for one in found:
        need = one.need[at][:, np.newaxis]
        free = one.free[at, :slots]
        room &= _sums(np.where(free > 0, free, _NOTHING)) >= need
        total = one.total[at, :slots]
        capable &= _sums(np.where(total > 0, total, _NOTHING)) >= need
        last_resort &= free.sum(axis=1) >= one.need[at]
    status = table.status[asked.rows[at], :slots]
    single = _sums((status == Status.SINGLE).astype(np.int64)) > 0
    shared = _sums((status == Status.SHARED).astype(np.int64)) > 0
    mixes = np.where(sizes == 1, shared, single)
    usable = room
    if asked.exclusive is NUMAExclusive.UNSET:
        mixes = np.zeros_like(mixes)
    elif asked.exclusive is NUMAExclusive.REQUIRED:
        usable = room & ~mixes
        last_resort &= ~mixes[:, -1]
    narrowest = np.where(capable, sizes, slots + 1).min(axis=1)
    policy = asked.policy[at][:, np.newaxis]
    preferred = sizes == narrowest[:, np.newaxis]
    if asked.wider_restricted:
        preferred = preferred | (policy == _RESTRICTED)
    accepted = np.where(policy == _SINGLE, sizes == 1, preferred | (policy == _BEST_EFFORT))
    last_resort &= policy[:, 0] == _BEST_EFFORT
    return Group(at, slots, room, usable & accepted, preferred, mixes, last_resort)


def chosen_sets(table: NumaTable, asked: Asked, group: Group, scoring: Scoring) -> Ints:
    """Return the set that the policy takes, by position of the group; 0 for none.

    The order is that of `exact.numa.affinities`.
    """
    sizes = _sizes(group.slots)
    rank = np.where(group.preferred, 0, 2) + group.mixes
    rank = np.where(group.admitted, rank * (group.slots + 1) + sizes, 1 << 20)
    best = rank.min(axis=1)
    candidates = group.admitted & (rank == best[:, np.newaxis])
    chosen = zeros(len(group.at))
    highest = np.full(len(group.at), -1)
    for column in np.flatnonzero(candidates.any(axis=0)):
        where = np.flatnonzero(candidates[:, column])
        sets = np.full(len(where), column)
        scores = scores_of_sets(table, asked, group.at[where], sets, scoring)
        better = scores > highest[where]
        chosen[where[better]] = column
        highest[where[better]] = scores[better]
    everything = (1 << group.slots) - 1
    return np.where((chosen == 0) & group.last_resort, everything, chosen)


def scores_of_sets(
    table: NumaTable, asked: Asked, at: NDArray[np.intp], sets: Ints, scoring: Scoring
) -> Ints:
    """Return the score of one set of NUMA nodes for each position of Asked.rows; 0 of no set."""
    rows = asked.rows[at]
    member = (sets[:, np.newaxis] >> np.arange(WHOLE_NODE) & 1).astype(np.bool_)
    weighted = zeros(len(rows))
    weights = zeros(len(rows))
    requests = dict(asked.amounts)
    for name, weight in scoring.weights.items():
        # As in all scores, an extended resource counts only if the pod requests it.
        if name not in table.total or ("/" in name and not requests.get(name)):
            continue
        total = np.where(member, table.total[name][rows], 0).sum(axis=1)
        free = np.where(member, table.free[name][rows], 0).sum(axis=1)
        request = np.full(len(rows), requests.get(name, 0))
        if name == CPU:
            bound = asked.binding[at] != UNBOUND
            cpus = amplified(np.int64(asked.cpus * 1000), table.cpu_ratio[rows])
            request = np.where(bound, cpus, request)
        taken = total - free + request
        part = np.minimum(taken, total) if scoring.most_allocated else np.maximum(total - taken, 0)
        weighted += weight * percent_of(part, total)
        weights += weight * (total > 0)
    return weighted // np.maximum(weights, 1)


def _sums(amounts: Ints) -> Ints:
    """Return the sums of all sets: [position, set] for [position, slot]."""
    positions, slots = amounts.shape
    sums = zeros((positions, 1 << slots))
    for slot in range(slots):
        sums[:, 1 << slot : 2 << slot] = sums[:, : 1 << slot] + amounts[:, slot : slot + 1]
    return sums


@lru_cache(maxsize=16)
def _sizes(slots: int) -> Ints:
    """Return the count of NUMA nodes of each set."""
    return np.array([number.bit_count() for number in range(1 << slots)], dtype=np.int64)
