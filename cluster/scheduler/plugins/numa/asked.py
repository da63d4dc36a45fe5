"""What a pod asks of each node about CPUs and NUMA nodes: its wishes and the node's together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import CPU, MEMORY
from apis.numa import CPUBindPolicy, NodeCPUBindPolicy, NUMAExclusive, NUMATopologyPolicy
from cluster.scheduler.exact.numa import NumaDemand, Scoring
from cluster.scheduler.plugins.contract import Mask, zeros
from cluster.scheduler.plugins.numa.reasons import (
    CONFLICT,
    FRACTION,
    INVALID,
    MISMATCH,
    MULTIPLE,
    bit,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa.demand import (
    FULL,
    SPREAD,
    CpuDemand,
    PodSpecs,
    own_bind_policy,
    pod_specs,
)
from cluster.scheduler.tables.numa.facts import NO_RATIO, NumaFacts
from cluster.scheduler.tables.numa.table import BIND_POLICIES, POLICIES, NumaTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

UNBOUND, FULL_PREFERRED, FULL_REQUIRED, SPREAD_PREFERRED, SPREAD_REQUIRED = range(5)
"""How the CPUs of a pod would be bound on a node."""

_NODE_FULL: Final = BIND_POLICIES.index(NodeCPUBindPolicy.FULL_PCPUS_ONLY)
_NODE_SPREAD: Final = BIND_POLICIES.index(NodeCPUBindPolicy.SPREAD_BY_PCPUS)


_MOST_AMPLIFIED: Final = 2**46
"""Milli-cores. Chosen: times the largest ratio (1000, in hundredths) it fits the 64 bits of a
column, and no machine has 70 billion cores."""

_DEFAULT_SCORING: Final = Scoring(most_allocated=False, weights={CPU: 1, MEMORY: 1})


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of the plugin.

    default_bind_policy: FULL, SPREAD or UNSET (pods without a policy are not bound).
    scoring: of nodes. numa_scoring: of NUMA nodes within a node; its kind is also the order in
    which NUMA nodes are filled where the node has no strategy of its own.
    wider_restricted: see NumaDemand. lse_shares_cores: LSE pods may share a core with each other.
    follows_hints: a pod's scheduling hint may ask for the allocation that is recorded on the pod.
    """

    default_bind_policy: CPUBindPolicy = FULL
    scoring: Scoring = _DEFAULT_SCORING
    numa_scoring: Scoring = _DEFAULT_SCORING
    wider_restricted: bool = False
    lse_shares_cores: bool = False
    follows_hints: bool = False


DEFAULT_SETTINGS: Final = Settings()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pod asks of some rows.

    rows: numbers of the rows. binding: how CPUs are bound there, by row. policy: index of the NUMA
    policy in force, by row. amounts: the pod's requests above 0. cpus: count of CPUs, if bound.
    """

    rows: NDArray[np.intp]
    binding: NDArray[np.int64]
    policy: NDArray[np.int64]
    amounts: tuple[tuple[str, int], ...]
    cpus: int
    alone: bool
    exclusive: NUMAExclusive
    wider_restricted: bool


def own_policy(settings: Settings, pod: PodShape) -> tuple[CPUBindPolicy, bool]:
    """Return the bind policy that the pod has by itself, and whether it is required."""
    milli = pod.requests.get(CPU, 0)
    return own_bind_policy(pod.derived(pod_specs), milli, settings.default_bind_policy)


def asks_anything(table: NumaTable, settings: Settings, pod: PodShape) -> bool:
    """Return whether the pod or any node has a policy about CPUs or NUMA nodes."""
    table.follow()
    return bool(
        own_policy(settings, pod)[0]
        or pod.derived(pod_specs).numa.numa_topology_policy
        or table.bind_policy.any()
        or table.policy.any()
    )


def asked_of(
    table: NumaTable, settings: Settings, pod: PodShape, rows: NDArray[np.intp]
) -> tuple[Asked, Mask]:
    """Return what the pod asks of each row, and the mask of what contradicts the node."""
    table.follow()
    specs = pod.derived(pod_specs)
    milli = pod.requests.get(CPU, 0)
    mask = zeros(len(rows))

    binding = np.full(len(rows), _binding(*own_policy(settings, pod)))
    if milli > 0:
        node = table.bind_policy[rows]
        full, spread = node == _NODE_FULL, node == _NODE_SPREAD
        mask |= bit(full & (binding == SPREAD_REQUIRED), CONFLICT)
        mask |= bit(spread & (binding == FULL_REQUIRED), CONFLICT)
        binding[full], binding[spread] = FULL_REQUIRED, SPREAD_REQUIRED
    bound = binding != UNBOUND
    step = table.core_step[rows]
    if milli % 1000:
        mask |= bit(bound, FRACTION)
    mask |= bit(bound & (step == 0), INVALID)
    odd = (milli // 1000) % np.maximum(step, 1) != 0
    mask |= bit((binding == FULL_REQUIRED) & odd, MULTIPLE)

    policy = table.policy[rows].astype(np.int64)
    own = POLICIES.index(specs.numa.numa_topology_policy)
    if own:
        mask |= bit((policy > 0) & (policy != own), MISMATCH)
        policy[:] = own
    asked = Asked(
        rows=rows,
        binding=binding,
        policy=policy,
        amounts=tuple((name, pod.requests[name]) for name in names_of(pod)),
        cpus=milli // 1000,
        alone=specs.alone_on_core and not settings.lse_shares_cores,
        exclusive=_exclusive(specs),
        wider_restricted=settings.wider_restricted,
    )
    return asked, mask


def demand_of(settings: Settings, pod: PodShape, facts: NumaFacts) -> NumaDemand:
    """Return what the pod is to get on a node with these facts."""
    specs = pod.derived(pod_specs)
    milli = pod.requests.get(CPU, 0)
    policy, required = own_policy(settings, pod)
    if milli > 0 and facts.bind_policy is NodeCPUBindPolicy.FULL_PCPUS_ONLY:
        policy, required = FULL, True
    elif milli > 0 and facts.bind_policy is NodeCPUBindPolicy.SPREAD_BY_PCPUS:
        policy, required = SPREAD, True
    cpus = None
    if policy:
        cpus = CpuDemand(
            count=milli // 1000,
            policy=policy,
            required=required,
            exclusive=specs.cpus.preferred_cpu_exclusive_policy,
            alone_on_core=specs.alone_on_core and not settings.lse_shares_cores,
        )
    return NumaDemand(
        amounts={name: pod.requests[name] for name in names_of(pod)},
        cpus=cpus,
        policy=specs.numa.numa_topology_policy or facts.policy,
        exclusive=_exclusive(specs),
        wider_restricted=settings.wider_restricted,
    )


def with_bound_cpus(
    table: NumaTable, requested: Ints, rows: NDArray[np.intp], *, unused: int = 0
) -> Ints:
    """Return requested cpu with allocated CPUs amplified; requests count them as they are.

    unused: how many of the allocated CPUs count as free.
    """
    bound = (table.bound[rows] - unused) * 1000
    ratio = table.cpu_ratio[rows]
    counts = (bound > 0) & (requested >= bound)
    return np.where(counts, requested - bound + amplified(bound, ratio), requested)


def names_of(pod: PodShape) -> list[str]:
    """Return the requested resources in a fixed order."""
    return sorted(name for name, amount in pod.requests.items() if amount > 0)


def numbers_of(tables: Tables, rows: Rows) -> NDArray[np.intp]:
    """Return the numbers of rows that may be a slice."""
    if isinstance(rows, slice):
        return np.arange(len(tables.nodes))[rows]
    return rows


def _binding(policy: CPUBindPolicy, required: bool) -> int:
    if policy is FULL:
        return FULL_REQUIRED if required else FULL_PREFERRED
    if policy is SPREAD:
        return SPREAD_REQUIRED if required else SPREAD_PREFERRED
    return UNBOUND


def _exclusive(specs: PodSpecs) -> NUMAExclusive:
    """Return whether wide and narrow pods may meet; a pod with a policy of its own has a default.

    Restricted and SingleNUMANode stand for Required. BestEffort, which is to refuse nothing that
    it need not, stands for Preferred.
    """
    stated = specs.numa.single_numa_node_exclusive
    match specs.numa.numa_topology_policy:
        case NUMATopologyPolicy.NONE:
            return stated
        case NUMATopologyPolicy.BEST_EFFORT:
            return stated or NUMAExclusive.PREFERRED
    return stated or NUMAExclusive.REQUIRED


def amplified(amounts: Ints | np.int64, ratio: Ints) -> Ints:
    """Return amounts * ratio, rounded up. ratio: hundredths, at least 100.

    An amount above _MOST_AMPLIFIED counts as that.
    """
    within: Ints = np.minimum(amounts, _MOST_AMPLIFIED)
    return np.where(ratio > NO_RATIO, -(-within * ratio // NO_RATIO), amounts)


def at_positions(asked: Asked, positions: NDArray[np.intp]) -> Asked:
    """Return what is asked of some of the rows."""
    return replace(
        asked,
        rows=asked.rows[positions],
        binding=asked.binding[positions],
        policy=asked.policy[positions],
    )
