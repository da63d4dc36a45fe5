"""The machine's CPUs and memory, as strategies count with them."""

from __future__ import annotations

import msgspec

from linux.cpus import Cpu
from linux.host import Host
from linux.procfs import total_memory_bytes
from linux.topology import read_topology


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
    memory_bytes = total_memory_bytes(host)
    if not memory_bytes:
        raise ValueError("/proc/meminfo cannot be read, or has no MemTotal")
    return Machine(cpus=cpus, memory_bytes=memory_bytes)
