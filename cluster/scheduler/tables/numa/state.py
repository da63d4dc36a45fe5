"""What is free on one node, for the exact allocation of CPUs and NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from apis.numa import CPUExclusivePolicy, NUMAAllocateStrategy
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.numa.cpu_topology import CpuTopology
from cluster.scheduler.tables.numa.facts import NO_RATIO


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
    status: Status = Status.IDLE


@dataclass(frozen=True, slots=True)
class NumaState:
    """A node as an allocation sees it.

    Sets of CPUs are masks. free: CPUs that may be allocated. managed: CPUs that pods may have at
    all. held: exclusive policy -> CPUs of pods that have it. alone: CPUs of pods that let no other
    such pod on their cores. preferred: free CPUs that are taken first (of a reservation).
    cpu_ratio: what an allocated CPU counts in the NUMA nodes' cpu, in hundredths.
    """

    topology: CpuTopology | None
    free: int = 0
    managed: int = 0
    held: Mapping[CPUExclusivePolicy, int] = field(default_factory=dict)
    alone: int = 0
    preferred: int = 0
    strategy: NUMAAllocateStrategy = NUMAAllocateStrategy.UNSET
    cpu_ratio: int = NO_RATIO
    numa: Mapping[int, NumaNode] = field(default_factory=dict)
