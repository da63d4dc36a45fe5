"""Whether a node takes a pod's CPUs and NUMA amounts, said slowly, one set of NUMA nodes at a time.

Written from docs/scheduler.md, "NodeNUMAResource", for machines whose cores are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from cluster.scheduler.tables.numa.cpu_topology import Cpu


@dataclass
class Placed:
    """A pod on the node. numa: NUMA id -> amounts; cpu of pods without CPUs of their own."""

    cpus: set[int] = field(default_factory=set)
    numa: dict[int, dict[str, int]] = field(default_factory=dict)
    lse: bool = False


@dataclass
class Node:
    """ratio: amplification of cpu in hundredths; `zones` are not amplified."""

    cpus: list[Cpu]
    zones: dict[int, dict[str, int]]
    reserved: set[int]
    ratio: int
    pods: list[Placed]


@dataclass
class Wish:
    """binding: "", "full", "full!", "spread" or "spread!"; an exclamation mark stands for required.

    exclusive: "", "Preferred" or "Required", with the policy's default applied.
    """

    amounts: dict[str, int]
    binding: str
    lse: bool
    policy: str
    exclusive: str


def takes(node: Node, wish: Wish) -> bool:
    count = wish.amounts.get("cpu", 0) // 1000
    usable = usable_cpus(node, wish)
    if wish.binding:
        threads = len([cpu for cpu in node.cpus if cpu.core == node.cpus[0].core])
        if wish.binding == "full!" and count % threads:
            return False
        if len(usable) < count:
            return False
    if not wish.policy:
        return True
    if not node.zones:
        return False
    listed = {name for amounts in node.zones.values() for name in amounts}
    needed = {n: a for n, a in wish.amounts.items() if n in listed}
    if wish.binding:
        needed["cpu"] = count
    if not needed:
        return True

    def room(numa: int, name: str, *, empty: bool) -> int:
        zone = node.zones[numa]
        if name != "cpu":
            free = zone.get(name, 0)
            if not empty:
                free -= sum(pod.numa.get(numa, {}).get(name, 0) for pod in node.pods)
            return max(0, free)
        reserved = len([cpu for cpu in node.cpus if cpu.numa == numa and cpu.id in node.reserved])
        free = zone.get("cpu", 0) - 1000 * reserved
        milli = max(0, free) * node.ratio // 100
        if not empty:
            bound = {cpu for pod in node.pods for cpu in pod.cpus}
            there = len([cpu for cpu in node.cpus if cpu.numa == numa and cpu.id in bound])
            shared = sum(pod.numa.get(numa, {}).get("cpu", 0) for pod in node.pods)
            milli = max(0, milli - shared - there * 1000 * node.ratio // 100)
        if not wish.binding:
            return milli
        everything = {cpu.id for cpu in node.cpus} - node.reserved
        cpus = everything if empty else usable
        whole = len([cpu for cpu in node.cpus if cpu.numa == numa and cpu.id in cpus])
        if "cpu" in listed:
            whole = min(whole, milli // (10 * node.ratio))
        if wish.binding == "full!":
            threads = len([cpu for cpu in node.cpus if cpu.core == node.cpus[0].core])
            whole -= whole % threads
        return whole

    def fits(numas: Sequence[int], *, empty: bool) -> bool:
        return all(
            all(room(numa, name, empty=empty) > 0 for numa in numas)
            and sum(room(numa, name, empty=empty) for numa in numas) >= amount
            for name, amount in needed.items()
        )

    def mixes(numas: Sequence[int]) -> bool:
        for numa in numas:
            spans = [len(spanned(node, pod)) for pod in node.pods if numa in spanned(node, pod)]
            if len(numas) == 1 and any(span > 1 for span in spans):
                return True
            if len(numas) > 1 and any(span == 1 for span in spans) and max(spans) == 1:
                return True
        return False

    ids = list(node.zones)
    sets = [c for size in range(1, len(ids) + 1) for c in combinations(ids, size)]
    able = [len(numas) for numas in sets if fits(numas, empty=True)]
    good = [numas for numas in sets if fits(numas, empty=False)]
    if wish.exclusive == "Required":
        good = [numas for numas in good if not mixes(numas)]
    if wish.policy == "SingleNUMANode":
        return any(len(numas) == 1 for numas in good)
    if wish.policy == "Restricted":
        return any(able and len(numas) == min(able) for numas in good)
    if good:
        return True
    if wish.exclusive == "Required" and mixes(ids):
        return False
    return all(
        sum(room(numa, name, empty=False) for numa in ids) >= amount
        for name, amount in needed.items()
    )


def usable_cpus(node: Node, wish: Wish) -> set[int]:
    taken = node.reserved | {cpu for pod in node.pods for cpu in pod.cpus}
    cores: dict[int, list[Cpu]] = {}
    for cpu in node.cpus:
        cores.setdefault(cpu.core, []).append(cpu)
    usable: set[int] = set()
    for cpus in cores.values():
        if wish.lse and any(c.id in pod.cpus for pod in node.pods if pod.lse for c in cpus):
            continue
        free = sorted(cpu.id for cpu in cpus if cpu.id not in taken)
        if wish.binding == "full!" and len(free) < len(cpus):
            continue
        usable |= set(free[:1] if wish.binding == "spread!" else free)
    return usable


def spanned(node: Node, pod: Placed) -> set[int]:
    there = {cpu.numa for cpu in node.cpus if cpu.id in pod.cpus}
    return there | {numa for numa, amounts in pod.numa.items() if any(amounts.values())}
