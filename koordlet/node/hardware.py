"""The machine's CPUs and memory, as strategies count with them."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from linux.host import Host
from linux.topology import Cpu, read_topology

_MEM_TOTAL: Final = re.compile(rb"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


class Machine(msgspec.Struct, frozen=True):
    """cpus: those that are online. memory_bytes: what the kernel manages (MemTotal)."""

    cpus: tuple[Cpu, ...]
    memory_bytes: int

    @property
    def cpu_milli(self) -> int:
        return 1000 * len(self.cpus)


def read_machine(host: Host) -> Machine:
    """Read sysfs and /proc/meminfo; raises OSError or ValueError when they cannot be read."""
    cpus = read_topology(host).cpus
    found = _MEM_TOTAL.search(host.read("/proc/meminfo"))
    if found is None:
        raise ValueError("/proc/meminfo has no MemTotal")
    return Machine(cpus=cpus, memory_bytes=int(found[1]) << 10)
