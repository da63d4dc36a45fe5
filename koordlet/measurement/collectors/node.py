"""CPU and memory of the node and of its NUMA nodes. Files: docs/measurement.md, "Node"."""

from __future__ import annotations

import os
from typing import Final

from apis.cpuset import CpuSet
from koordlet.measurement.collecting import Round
from koordlet.measurement.counters import Rate, number_after, within
from koordlet.measurement.kernel_files import KernelFile, close_all
from koordlet.measurement.series import Metric, Series

_NODES: Final = "/sys/devices/system/node"
_STAT_BYTES: Final = 256 * 1024
"""The lines of the CPUs come first in /proc/stat: at most 8192 CPUs x about 100 bytes would be
800 KiB; 256 KiB hold 2,500 CPUs."""
_TOPOLOGY_EVERY_S: Final = 60.0
"""How often the NUMA nodes are listed again: CPUs are taken off and on seldom."""
_TICKS_PER_S: Final = float(os.sysconf("SC_CLK_TCK"))
"""The unit of /proc/stat, USER_HZ: 100 a second on all systems of today."""
_MEMORY_KEYS: Final = (b"MemFree:", b"Active(file):", b"Inactive(file):", b"SReclaimable:")


class NodeCollector:
    """CPU and memory of the node and of its NUMA nodes."""

    name = "node"
    gate = None

    def __init__(self, cpus: int, *, interval_s: float = 1.0, retention_s: float = 1830.0) -> None:
        """cpus: of the machine. retention_s: upstream's reports aggregate nodes over 30 min."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._cpus = cpus
        self._stat: KernelFile | None = None
        self._meminfo: KernelFile | None = None
        self._rate = Rate(interval_s)
        self._cpu_rates: dict[int, Rate] = {}
        self._numa: dict[int, tuple[frozenset[int], KernelFile | None]] = {}
        self._listed_at = -float("inf")

    def sample(self, round_: Round) -> dict[Series, float]:
        try:
            return self._sample(round_)
        except (OSError, ValueError):
            self.close()
            raise

    def close(self) -> None:
        close_all((self._stat, self._meminfo, *(file for _, file in self._numa.values())))
        self._stat = self._meminfo = None
        self._numa = {}
        self._listed_at = -float("inf")
        self._rate.forget()
        self._cpu_rates = {}

    def _sample(self, round_: Round) -> dict[Series, float]:
        if self._stat is None:
            self._stat = round_.files.open("/proc/stat", _STAT_BYTES)
        if self._meminfo is None:
            self._meminfo = round_.files.open("/proc/meminfo")
        if round_.now - self._listed_at >= _TOPOLOGY_EVERY_S:
            self._list_numa(round_)
        samples: dict[Series, float] = {}
        stat = self._stat.read()
        at = round_.clock()
        rate = self._rate.per_second(busy_ticks(stat[: stat.index(b"\n")]), at)
        used = None if rate is None else within(rate / _TICKS_PER_S, self._cpus)
        if used is not None:
            samples[Series(Metric.NODE_CPU)] = used
        meminfo = self._meminfo.read()
        total = number_after(meminfo, b"\nMemTotal:")
        available = number_after(meminfo, b"\nMemAvailable:")
        samples[Series(Metric.NODE_MEMORY)] = max(total - available, 0)
        free = number_after(meminfo, b"\nMemFree:")
        samples[Series(Metric.NODE_MEMORY_WITH_PAGE_CACHE)] = max(total - free, 0)
        if self._numa:
            self._sample_numa(round_, stat, at, samples)
        return samples

    def _sample_numa(
        self, round_: Round, stat: bytes, at: float, samples: dict[Series, float]
    ) -> None:
        rates = self._rates(stat, at)
        for number, (cpus, file) in self._numa.items():
            of = str(number)
            known = [rate for cpu in cpus if (rate := rates.get(cpu)) is not None]
            if known or not cpus:
                samples[Series(Metric.NODE_NUMA_CPU, of)] = sum(known)
            if file is None:
                continue
            try:
                samples[Series(Metric.NODE_NUMA_MEMORY, of)] = numa_memory(file.read())
            except (OSError, ValueError) as error:
                round_.problem(f"NUMA node {number}: {error}")

    def _rates(self, stat: bytes, at: float) -> dict[int, float]:
        """Return the cores' worth that each online CPU was busy, 0..1."""
        rates: dict[int, float] = {}
        end = stat.rfind(b"\ncpu")
        for line in stat[: stat.find(b"\n", end + 1)].split(b"\n")[1:]:
            cpu = int(line[3 : line.index(b" ")])
            counter = self._cpu_rates.get(cpu)
            if counter is None:
                counter = self._cpu_rates[cpu] = Rate(self.interval_s)
            rate = counter.per_second(busy_ticks(line), at)
            busy = None if rate is None else within(rate / _TICKS_PER_S, 1.0)
            if busy is not None:
                rates[cpu] = busy
        return rates

    def _list_numa(self, round_: Round) -> None:
        """List the NUMA nodes. Where the kernel lists none, there are no series of them."""
        self._listed_at = round_.now
        close_all(file for _, file in self._numa.values())
        self._numa = {}
        try:
            names = round_.files.listdir(_NODES)
        except OSError:
            return
        for name in names:
            if name[:4] != "node" or not name[4:].isdigit():
                continue
            at = f"{_NODES}/{name}"
            try:
                listed = round_.files.open(f"{at}/cpulist")
                try:
                    cpus = frozenset(CpuSet.parse(listed.read().decode().strip()))
                finally:
                    listed.close()
                self._numa[int(name[4:])] = (cpus, round_.files.open(f"{at}/meminfo", 8192))
            except (OSError, ValueError) as error:
                round_.problem(f"NUMA {name}: {error}")


def busy_ticks(line: bytes) -> int:
    """Return user + nice + system + irq + softirq of a line of /proc/stat."""
    fields = line.split(None, 8)
    return int(fields[1]) + int(fields[2]) + int(fields[3]) + int(fields[6]) + int(fields[7])


def numa_memory(meminfo: bytes) -> int:
    """Return bytes in use of a NUMA node, without page cache and reclaimable slabs."""
    free = 0
    for key in _MEMORY_KEYS:
        free += _numa_field(meminfo, key)
    return max(_numa_field(meminfo, b"MemTotal:") - free, 0)


def _numa_field(meminfo: bytes, key: bytes) -> int:
    """Return a field of `nodeN/meminfo`, whose lines begin with "Node N "."""
    return number_after(meminfo, b" " + key)
