"""/sys: CPUs, caches, NUMA nodes, and the switches of Alibaba's memory features."""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING

from tests.simulated.profiles import Feature, Topology
from tests.simulated.values import list_text, refuse, signed
from tests.simulated.vfs import SYSFS_MAGIC, File, Folder, Link, Tree, text

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel


def _line(members: frozenset[int]) -> str:
    return list_text(members) + "\n"


def _online_of(kernel: SimulatedKernel, members: frozenset[int]) -> File:
    """A list file that shows those of the CPUs that are online."""
    return File(lambda: _line(members & kernel.online_cpus))


def _put_cpu(kernel: SimulatedKernel, tree: Tree, cpu: int) -> None:
    topology = kernel.profile.topology
    base = f"devices/system/cpu/cpu{cpu}"
    siblings = topology.cpus_where("core", topology.core_of(cpu))
    package = topology.cpus_where("socket", topology.socket_of(cpu))

    tree.put(f"{base}/topology/core_id", text(f"{topology.core_id_of(cpu)}\n"))
    tree.put(f"{base}/topology/physical_package_id", text(f"{topology.socket_of(cpu)}\n"))
    for name in ("thread_siblings_list", "core_cpus_list"):
        tree.put(f"{base}/topology/{name}", _online_of(kernel, siblings))
    for name in ("core_siblings_list", "package_cpus_list"):
        tree.put(f"{base}/topology/{name}", _online_of(kernel, package))
    caches = (
        (0, 1, "Data", topology.core_of(cpu), siblings),
        (1, 1, "Instruction", topology.core_of(cpu), siblings),
        (2, 2, "Unified", topology.core_of(cpu), siblings),
        (3, 3, "Unified", topology.l3_of(cpu), topology.cpus_where("l3", topology.l3_of(cpu))),
    )
    for index, level, kind, number, shared in caches:
        cache = f"{base}/cache/index{index}"
        tree.put(f"{cache}/level", text(f"{level}\n"))
        tree.put(f"{cache}/type", text(f"{kind}\n"))
        if kernel.profile.machine == "x86_64":
            # arm64 without an ACPI cache id has no such file.
            tree.put(f"{cache}/id", text(f"{number}\n"))
        tree.put(
            f"{cache}/shared_cpu_list",
            _online_of(kernel, shared),
        )
    tree.put(f"{base}/node{topology.node_of(cpu)}", Link(f"../../node/node{topology.node_of(cpu)}"))
    if cpu:
        tree.put(f"{base}/online", _online(kernel, cpu))


def _online(kernel: SimulatedKernel, cpu: int) -> File:
    def write(content: str) -> None:
        number = signed(content.strip())
        if number not in (0, 1):
            refuse(errno.EINVAL)
        kernel.set_online(cpu, online=bool(number))

    return File(lambda: f"{int(cpu in kernel.online_cpus)}\n", write)


def _node_meminfo(kernel: SimulatedKernel, node: int) -> str:
    total = kernel.profile.topology.memory_bytes_per_node // 1024
    first = node == min(kernel.online_nodes)
    used = sum(task.anon_bytes for task in kernel.tasks.values()) // 1024 if first else 0
    cache = kernel.file_bytes() // 1024 if first else 0
    rows = {
        "MemTotal": total,
        "MemFree": total - used - cache,
        "MemUsed": used + cache,
        "Active(file)": 0,
        "Inactive(file)": cache,
        "SReclaimable": 0,
    }
    return "".join(
        f"Node {node} {name + ':':<15} {number:>8} kB\n" for name, number in rows.items()
    )


def _distance(topology: Topology, node: int, other: int) -> str:
    if node == other:
        return "10"
    same = node // topology.nodes_per_socket == other // topology.nodes_per_socket
    return "12" if same else "21"


def _switch(kernel: SimulatedKernel, name: str, high: int) -> File:
    kernel.switches.setdefault(name, 0)

    def write(content: str) -> None:
        number = signed(content.strip())
        if not 0 <= number <= high:
            refuse(errno.EINVAL)
        kernel.switches[name] = number

    return File(lambda: f"{kernel.switches[name]}\n", write)


SCHED_FEATURES = ("GENTLE_FAIR_SLEEPERS", "WAKEUP_PREEMPTION", "HRTICK")
_FEATURES_OFF = frozenset({"HRTICK"})


def _sched_features(kernel: SimulatedKernel) -> File:
    """All features in a row; one word, with or without NO_, switches one."""
    for name in SCHED_FEATURES:
        kernel.switches[name] = int(name not in _FEATURES_OFF)

    def read() -> str:
        words = [name if kernel.switches[name] else f"NO_{name}" for name in SCHED_FEATURES]
        return " ".join(words) + "\n"

    def write(content: str) -> None:
        word = content.strip()
        name = word.removeprefix("NO_")
        if name not in SCHED_FEATURES:
            refuse(errno.EINVAL, f"{name} is not a feature")
        kernel.switches[name] = int(not word.startswith("NO_"))

    return File(read, write)


def make_sysfs(kernel: SimulatedKernel) -> Tree:
    """The /sys of this kernel, less /sys/fs."""
    tree = Tree(SYSFS_MAGIC, Folder(closed=True))
    topology = kernel.profile.topology
    everything = frozenset(range(topology.cpus))
    for cpu in range(topology.cpus):
        _put_cpu(kernel, tree, cpu)
    cpu_base = "devices/system/cpu"
    tree.put(f"{cpu_base}/online", File(lambda: _line(kernel.online_cpus)))
    tree.put(f"{cpu_base}/offline", File(lambda: _line(everything - kernel.online_cpus)))
    tree.put(f"{cpu_base}/present", text(_line(everything)))
    tree.put(f"{cpu_base}/possible", text(_line(everything)))
    tree.put(f"{cpu_base}/smt/active", text(f"{int(topology.threads > 1)}\n"))
    old = kernel.profile.kernel < (5, 13)
    features = "sched_features" if old else "sched/features"
    tree.put(f"kernel/debug/{features}", _sched_features(kernel))
    node_base = "devices/system/node"
    for node in range(topology.nodes):
        cpus = topology.cpus_where("node", node)
        tree.put(f"{node_base}/node{node}/cpulist", _online_of(kernel, cpus))
        tree.put(f"{node_base}/node{node}/meminfo", File(partial(_node_meminfo, kernel, node)))
        distances = [_distance(topology, node, other) for other in range(topology.nodes)]
        tree.put(f"{node_base}/node{node}/distance", text(" ".join(distances) + "\n"))
        for size in (2048, 1048576):
            tree.put(
                f"{node_base}/node{node}/hugepages/hugepages-{size}kB/nr_hugepages", text("0\n")
            )
        tree.put(f"bus/node/devices/node{node}", Link(f"../../../devices/system/node/node{node}"))
    for name in ("online", "possible", "has_cpu", "has_memory"):
        tree.put(f"{node_base}/{name}", File(lambda: _line(kernel.online_nodes)))
    if kernel.profile.has(Feature.ALIBABA):
        for name, high in (
            ("kernel/mm/memcg_reaper/reap_background", 1),
            ("kernel/mm/pagecache_limit/enabled", 1),
            ("kernel/mm/kidled/scan_period_in_seconds", 32767),
            ("kernel/mm/kidled/use_hierarchy", 1),
        ):
            tree.put(name, _switch(kernel, name, high))
    return tree
