"""What is free on one node, for the exact allocation of CPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from apis.keys import CPU
from apis.numa import CPUExclusivePolicy, NUMAAllocateStrategy
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.numa.cpu_topology import CpuTopology


class Status(IntEnum):
    """Which pods a NUMA node has: none, those of one NUMA node only, or some that span several.

    A pod counts where it has CPUs of its own or amounts of a NUMA node.
    """

    IDLE = 0
    SINGLE = 1
    SHARED = 2


@dataclass(frozen=True, slots=True)
class NumaNode:
    """total, free: amplified amounts, never negative."""

    total: Amounts
    free: Amounts
    status: Status


@dataclass(frozen=True, slots=True)
class NumaState:
    """A node as an allocation sees it.

    Sets of CPUs are masks. free: CPUs that may be allocated. managed: CPUs that pods may have at
    all. held: exclusive policy -> CPUs of pods that have it. alone: CPUs of pods that let no other
    such pod on their cores. preferred: free CPUs that are taken first (of a reservation).
    cpu_ratio: what an allocated CPU counts in the NUMA nodes' cpu, in hundredths.
    bindable: NUMA id -> how many of its free CPUs may be allocated, where pods have cpu of the NUMA
    node as an amount: these pods run on the CPUs that are left.
    """

    topology: CpuTopology | None
    free: int
    managed: int
    held: Mapping[CPUExclusivePolicy, int]
    alone: int
    strategy: NUMAAllocateStrategy
    cpu_ratio: int
    numa: Mapping[int, NumaNode]
    bindable: Mapping[int, int]
    preferred: int = 0


def narrowed(state: NumaState, cpus: int, numa: Iterable[tuple[int, Amounts]]) -> NumaState:
    """Return the state with nothing free but these CPUs (a mask) and amounts of NUMA nodes.

    An allocation in it is the given one, or none. Amounts of cpu are not compared: those that are
    recorded for bound CPUs are not amplified.
    """
    given = dict(numa)
    nodes = {}
    for number, node in state.numa.items():
        amounts = given.get(number, {})
        free = {
            name: free if name == CPU else min(free, amounts[name])
            for name, free in node.free.items()
            if name in amounts
        }
        nodes[number] = replace(node, free=free)
    return replace(state, free=state.free & cpus, preferred=state.preferred & cpus, numa=nodes)
