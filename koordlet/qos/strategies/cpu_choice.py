"""Which CPUs a group of pods gets: spread over the NUMA nodes, whole cores first. Pure.

The rule of `spread` is upstream's (docs/facts/koordlet.md, "CPU suppression"). `choose` keeps what
the group has: every CPU that moves costs a migration of the tasks on it and a write to every
cgroup of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from apis.cpuset import CpuSet
from linux.cpus import Cpu


def choose(count: int, free: CpuSet, present: CpuSet, topology: Sequence[Cpu]) -> CpuSet:
    """Return `count` CPUs of `free`, or all of `free` if it has fewer.

    present: the set so far. Of it stays what is free. Too many are reduced by `spread`; missing
    ones are first the siblings of CPUs that stay, so that no core is shared with other pods, then
    those that `spread` takes.
    """
    kept = present & free
    if len(kept) >= count:
        return spread(count, kept, topology)
    others = free - kept
    used_cores = {cpu.core for cpu in topology if cpu.cpu in kept}
    siblings = [cpu.cpu for cpu in topology if cpu.core in used_cores and cpu.cpu in others]
    kept |= CpuSet(siblings[: count - len(kept)])
    return kept | spread(count - len(kept), free - kept, topology)


def spread(count: int, free: CpuSet, topology: Sequence[Cpu]) -> CpuSet:
    """Return `count` CPUs of `free` without a history, or all of `free` if it has fewer.

    The CPUs of one NUMA node and socket are a group, the largest group first. While two or more are
    needed, each group in turn gives two threads of one core; then each gives one CPU.
    """
    if len(free) <= count:
        return free
    groups = _groups(free, topology)
    chosen: list[int] = []
    turn = 0
    without = 0  # groups in a row that had no pair left
    while count - len(chosen) >= 2 and without < len(groups):
        group = groups[turn % len(groups)]
        turn += 1
        pair = _first_pair(group)
        without = 0 if pair else without + 1
        for cpu in pair:
            group.remove(cpu)
            chosen.append(cpu.cpu)
    while len(chosen) < count and any(groups):
        group = groups[turn % len(groups)]
        turn += 1
        if group:
            chosen.append(group.pop(0).cpu)
    return CpuSet(chosen)


def _groups(free: CpuSet, topology: Sequence[Cpu]) -> list[list[Cpu]]:
    by_place: dict[tuple[int, int], list[Cpu]] = {}
    for cpu in sorted(topology, key=lambda cpu: (cpu.core, cpu.cpu)):
        if cpu.cpu in free:
            by_place.setdefault((cpu.node, cpu.socket), []).append(cpu)
    return sorted(by_place.values(), key=lambda group: (-len(group), min(cpu.cpu for cpu in group)))


def _first_pair(group: Sequence[Cpu]) -> tuple[Cpu, ...]:
    """Return the first two neighbours on one core, () if there are none."""
    for one, other in pairwise(group):
        if one.core == other.core:
            return one, other
    return ()


def share(count: int, part: CpuSet, rest: CpuSet) -> int:
    """Return how many of `count` CPUs come from `part`: its share of both sets, rounded down."""
    together = len(part) + len(rest)
    return count * len(part) // together if together else 0
