"""The CPUs of a machine: which of them share a physical core, a socket and a NUMA node.

Sets of CPUs are masks: bit n stands for CPU n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from apis.cpuset import CpuSet


class Cpu(NamedTuple):
    """A logical CPU. core: the number of its physical core, unique within socket and NUMA node."""

    id: int
    core: int
    socket: int
    numa: int


class Core(NamedTuple):
    """A physical core: the mask of its CPUs (hardware threads), and where it is."""

    mask: int
    socket: int
    numa: int


class Pattern(NamedTuple):
    """Cores whose CPUs are equally far apart. offsets: from the lowest CPU of a core, with 0.

    lowest: mask of the lowest CPU of each core. A usual machine has one pattern: (0, 1), or
    (0, half the count of CPUs).
    """

    offsets: tuple[int, ...]
    lowest: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The CPUs of a machine.

    cpus: mask of all CPUs. cores: ordered by socket, then by number of the core.
    numa, sockets: id -> mask, by id. Ids may have gaps.
    core_step: largest common divisor of the sizes of the cores; a set of whole cores has a multiple
    of it as its size. widest_core: size of the largest core. Both are 2 on a usual machine; they
    differ where some cores have one thread, or a thread is offline.
    patterns: the cores again, by how far their CPUs are apart; the masks of all cores of one
    pattern are worked out together.
    """

    cpus: int
    cores: tuple[Core, ...]
    numa: Mapping[int, int]
    sockets: Mapping[int, int]
    core_step: int
    widest_core: int
    patterns: tuple[Pattern, ...]


def cpu_topology(cpus: Iterable[Cpu]) -> CpuTopology:
    """Return the topology of these CPUs. Raises ValueError for none, and for an id given twice."""
    everything = 0
    cores: dict[tuple[int, int, int], int] = {}
    numa: dict[int, int] = {}
    sockets: dict[int, int] = {}
    for cpu in cpus:
        bit = 1 << cpu.id
        if everything & bit:
            raise ValueError(f"CPU {cpu.id} is listed twice")
        everything |= bit
        key = cpu.socket, cpu.core, cpu.numa
        cores[key] = cores.get(key, 0) | bit
        numa[cpu.numa] = numa.get(cpu.numa, 0) | bit
        sockets[cpu.socket] = sockets.get(cpu.socket, 0) | bit
    if not everything:
        raise ValueError("there are no CPUs")
    sizes = [mask.bit_count() for mask in cores.values()]
    return CpuTopology(
        cpus=everything,
        cores=tuple(Core(cores[key], key[0], key[2]) for key in sorted(cores)),
        numa=MappingProxyType(dict(sorted(numa.items()))),
        sockets=MappingProxyType(dict(sorted(sockets.items()))),
        core_step=math.gcd(*sizes),
        widest_core=max(sizes),
        patterns=_patterns(cores.values()),
    )


def _patterns(cores: Iterable[int]) -> tuple[Pattern, ...]:
    lowest_by_offsets: dict[tuple[int, ...], int] = {}
    for core in cores:
        cpus = tuple(CpuSet.of_mask(core))
        offsets = tuple(cpu - cpus[0] for cpu in cpus)
        lowest_by_offsets[offsets] = lowest_by_offsets.get(offsets, 0) | 1 << cpus[0]
    return tuple(Pattern(offsets, lowest) for offsets, lowest in lowest_by_offsets.items())


def cores_of(topology: CpuTopology, cpus: int) -> int:
    """Return all CPUs of the physical cores that have a CPU in `cpus`."""
    result = 0
    for offsets, lowest in topology.patterns:
        some = 0
        for offset in offsets:
            some |= cpus >> offset
        some &= lowest
        for offset in offsets:
            result |= some << offset
    return result


def whole_cores(topology: CpuTopology, cpus: int) -> int:
    """Return the CPUs of `cpus` whose physical core lies in `cpus` as a whole."""
    result = 0
    for offsets, lowest in topology.patterns:
        whole = lowest
        for offset in offsets:
            whole &= cpus >> offset
        for offset in offsets:
            result |= whole << offset
    return result


def one_of_each_core(topology: CpuTopology, cpus: int, preferred: int = 0) -> int:
    """Return one CPU of each core that has some in `cpus`: a preferred one, else the lowest."""
    first = cpus & preferred
    if first:
        result = one_of_each_core(topology, first)
        return result | one_of_each_core(topology, cpus & ~cores_of(topology, first))
    result = 0
    for offsets, lowest in topology.patterns:
        left = lowest
        for offset in offsets:
            found = left & cpus >> offset
            result |= found << offset
            left &= ~found
    return result
