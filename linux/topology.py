"""The CPU topology from sysfs, with core numbers that are unique on the machine.

sysfs repeats core numbers in each package, while the NodeResourceTopology and the scheduler rely on
machine-wide numbers: a core's number is the rank of its smallest CPU among the cores. Offline CPUs
are left out, and NUMA nodes may be sparse. Files: docs/facts/kernel.md, "CPU topology".
"""

from __future__ import annotations

from typing import Final

from apis.cpuset import CpuSet
from linux.cpus import Cpu, CpuTopology
from linux.host import Host

POSSIBLE_CPUS: Final = "/sys/devices/system/cpu/possible"
"""The file of the CPUs that this machine can ever have, offline ones included."""


def _text(host: Host, path: str) -> str:
    return host.read(path).decode("ascii", "replace").strip()


def _first(host: Host, *paths: str) -> str:
    """Return the text of the first file that exists: newer kernels renamed some."""
    for path in paths[:-1]:
        try:
            return _text(host, path)
        except FileNotFoundError:
            continue
    return _text(host, paths[-1])


def read_topology(host: Host, *, sys_root: str = "/sys") -> CpuTopology:
    """Read the topology; OSError or ValueError when sysfs is not readable."""
    base = f"{sys_root}/devices/system"
    online = CpuSet.parse(_text(host, f"{base}/cpu/online"))
    nodes = _nodes(host, base, online)
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    first_of: dict[int, int] = {}
    for cpu in online:
        at = f"{base}/cpu/cpu{cpu}/topology"
        siblings = CpuSet.parse(_first(host, f"{at}/core_cpus_list", f"{at}/thread_siblings_list"))
        first_of[cpu] = next(iter(siblings & online), cpu)
    l3_of = _l3(host, base, online)
    rank = {first: number for number, first in enumerate(sorted(set(first_of.values())))}
    cpus = [
        Cpu(
            cpu=cpu,
            core=rank[first_of[cpu]],
            # -1 where the firmware gives no package (some arm64 machines): one package then.
            socket=max(int(_text(host, f"{base}/cpu/cpu{cpu}/topology/physical_package_id")), 0),
            node=node_of.get(cpu, 0),
            l3=l3_of[cpu],
        )
        for cpu in online
    ]
    cpus.sort(key=lambda cpu: (cpu.node, cpu.socket, cpu.core, cpu.cpu))
    return CpuTopology(tuple(cpus), nodes)


def _nodes(host: Host, base: str, online: CpuSet) -> dict[int, CpuSet]:
    try:
        names = host.listdir(f"{base}/node")
    except FileNotFoundError:
        return {0: online}
    numbers = sorted(int(name[4:]) for name in names if name[:4] == "node" and name[4:].isdigit())
    found = {
        number: CpuSet.parse(_text(host, f"{base}/node/node{number}/cpulist")) & online
        for number in numbers
    }
    return found or {0: online}


def _l3(host: Host, base: str, online: CpuSet) -> dict[int, int]:
    """Return each CPU's L3 number."""
    numbers: dict[int, int] = {}
    without_id: dict[int, int] = {}
    for cpu in online:
        numbers[cpu] = -1
        cache = f"{base}/cpu/cpu{cpu}/cache"
        try:
            names = host.listdir(cache)
        except FileNotFoundError:
            continue
        for name in sorted(names):
            if not name.startswith("index") or _text(host, f"{cache}/{name}/level") != "3":
                continue
            try:
                numbers[cpu] = int(_text(host, f"{cache}/{name}/id"))
            except FileNotFoundError:
                shared = CpuSet.parse(_text(host, f"{cache}/{name}/shared_cpu_list"))
                without_id[cpu] = next(iter(shared), cpu)
    rank = {first: number for number, first in enumerate(sorted(set(without_id.values())))}
    return numbers | {cpu: rank[first] for cpu, first in without_id.items()}
