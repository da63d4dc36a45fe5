"""The CPUs of a machine, as values: definitions only. `linux.topology` reads them from sysfs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apis.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online logical CPU.

    l3: the cache's id, which is also its resctrl domain; where the firmware gives no id, the
    caches' rank by their smallest CPU; -1 without such a cache.
    """

    cpu: int
    core: int
    socket: int
    node: int
    l3: int


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """All online CPUs, sorted by node, socket, core, CPU."""

    cpus: tuple[Cpu, ...]
    nodes: Mapping[int, CpuSet]

    @property
    def online(self) -> CpuSet:
        return CpuSet(cpu.cpu for cpu in self.cpus)
