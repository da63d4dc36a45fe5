"""The order in which CPUs are allocated, said slowly: lists of CPUs and one rule after the other.

Written from the rules of docs/scheduler.md for machines whose sockets, NUMA nodes and cores are all
alike, without looking at the product's masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.scheduler.tables.numa.cpu_topology import Cpu


class Machine(NamedTuple):
    sockets: int
    numa_per_socket: int
    cores_per_numa: int
    threads: int
    far_siblings: bool = False

    def cpus(self) -> list[Cpu]:
        """CPUs with neighbouring siblings (0, 1), or with siblings half the machine apart."""
        cpus = []
        nodes = self.sockets * self.numa_per_socket
        cores = nodes * self.cores_per_numa
        for core in range(cores):
            numa = core // self.cores_per_numa
            for thread in range(self.threads):
                near = core * self.threads + thread
                number = core + thread * cores if self.far_siblings else near
                cpus.append(Cpu(number, core, numa // self.numa_per_socket, numa))
        return cpus


def interleave(cpus: Iterable[Cpu], cores: Sequence[int]) -> list[Cpu]:
    of_core = {core: sorted(c for c in cpus if c.core == core) for core in cores}
    result: list[Cpu] = []
    turn = 0
    while any(len(threads) > turn for threads in of_core.values()):
        result += [threads[turn] for threads in of_core.values() if len(threads) > turn]
        turn += 1
    return result


def take(
    machine: Machine,
    available: set[int],
    held: set[int],
    count: int,
    *,
    full: bool,
    exclusive: str,
    most: bool,
) -> set[int]:
    everything = machine.cpus()
    free = [cpu for cpu in everything if cpu.id in available]
    held_cpus = [cpu for cpu in everything if cpu.id in held]
    held_cores = {cpu.core for cpu in held_cpus}
    marked_numa = {cpu.numa for cpu in held_cpus} if exclusive == "NUMANodeLevel" else set()
    # Cores and NUMA nodes that are left out in each attempt but the last.
    attempts: list[tuple[set[int], set[int]]] = []
    if marked_numa:
        attempts.append((set(), marked_numa))
    attempts.append((held_cores if exclusive.endswith("Level") else set(), set()))
    way = 1 if most else -1
    taken: list[Cpu] = []

    def free_of_socket(socket: int) -> int:
        return len([cpu for cpu in free if cpu.socket == socket])

    def numa_order(lists: dict[int, list[Cpu]], sizes: dict[int, int]) -> list[int]:
        return sorted(
            lists,
            key=lambda numa: (
                way * sizes[numa],
                way * free_of_socket(numa // machine.numa_per_socket),
                numa,
            ),
        )

    def whole(cpus: list[Cpu]) -> list[Cpu]:
        return [
            cpu
            for core in sorted({cpu.core for cpu in cpus})
            for cpu in sorted(c for c in cpus if c.core == core)
            if len([c for c in cpus if c.core == core]) == machine.threads
        ]

    numas = sorted({cpu.numa for cpu in everything})
    sockets = sorted({cpu.socket for cpu in everything})
    if full or machine.threads == 1:
        for filtered in (True, False):
            lists = {
                numa: whole([cpu for cpu in free if cpu.numa == numa])
                for numa in numas
                if not (filtered and numa in marked_numa)
            }
            for numa in numa_order(lists, {numa: len(cpus) for numa, cpus in lists.items()}):
                if len(lists[numa]) >= count:
                    return {cpu.id for cpu in lists[numa][:count]}
        by_socket = {s: whole([cpu for cpu in free if cpu.socket == s]) for s in sockets}
        for socket in sorted(sockets, key=lambda s: (way * len(by_socket[s]), s)):
            if len(by_socket[socket]) >= count:
                return {cpu.id for cpu in by_socket[socket][:count]}
        remembered = []
        for socket in sorted(sockets, key=lambda s: (-len(by_socket[s]), s)):
            if len(by_socket[socket]) <= count - len(taken):
                taken += by_socket[socket]
            else:
                remembered.append(socket)
        for socket in sorted(remembered, key=lambda s: (len(by_socket[s]), s)):
            cpus = by_socket[socket]
            while cpus and count - len(taken) >= machine.threads:
                taken += cpus[: machine.threads]
                cpus = cpus[machine.threads :]
    if not full and not taken:
        for without in (*attempts, None):
            lists, sizes = {}, {}
            for numa in numas:
                cpus = spared([c for c in sorted(free) if c.numa == numa], without)
                sizes[numa] = len(cpus)
                lists[numa] = one_each(cpus) if without else cpus
            for numa in numa_order(lists, sizes):
                if len(lists[numa]) >= count:
                    return ids(interleaved(lists[numa])[:count])
        for without in (attempts[-1], None):
            lists, sizes = {}, {}
            for socket in sockets:
                cpus = spared([c for c in sorted(free) if c.socket == socket], without)
                sizes[socket] = len(cpus)
                lists[socket] = one_each(cpus) if without else cpus
            for socket in sorted(sockets, key=lambda s: (way * sizes[s], s)):
                if len(lists[socket]) >= count:
                    return ids(interleaved(lists[socket])[:count])
    for without in (*attempts, None):
        left = [cpu for cpu in free if cpu not in taken]
        usable = spared(left, without)
        cores = sorted(
            {(cpu.core, cpu.socket, cpu.numa) for cpu in usable},
            key=lambda at: (
                -len([c for c in taken if c.socket == at[1]]),
                way * len([c for c in left if c.socket == at[1]]),
                way * len([c for c in left if c.numa == at[2]]),
                len([c for c in left if c.core == at[0]]),
                at[1],
                at[0],
            ),
        )
        order = interleave(usable, [core for core, _, _ in cores])
        taken += order[: count - len(taken)]
    return ids(taken)


def spared(cpus: list[Cpu], without: tuple[set[int], set[int]] | None) -> list[Cpu]:
    cores, numas = without or (set(), set())
    return [cpu for cpu in cpus if cpu.core not in cores and cpu.numa not in numas]


def one_each(cpus: list[Cpu]) -> list[Cpu]:
    seen: set[int] = set()
    result = []
    for cpu in cpus:
        if cpu.core not in seen:
            seen.add(cpu.core)
            result.append(cpu)
    return result


def interleaved(cpus: list[Cpu]) -> list[Cpu]:
    return interleave(cpus, [cpu.core for cpu in one_each(cpus)])


def ids(cpus: Iterable[Cpu]) -> set[int]:
    return {cpu.id for cpu in cpus}
