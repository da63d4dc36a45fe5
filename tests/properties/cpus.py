"""A model of who has which CPUs: the scheduler, kubelet's static CPU manager, the share pools.

Three parties allocate CPUs: the scheduler to LSR and LSE pods (through annotations), kubelet's
static policy to Guaranteed containers (through its requests), the operator to the system. The rest
are the share pools that NodeResourceTopology reports, one for each NUMA node. The scheduler takes
the highest CPUs, kubelet the lowest; where they would meet, a pod does not fit.
Facts: docs/policies.md, "CPUs".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from apis.cpuset import CpuSet
from apis.topology import CPUManagerPolicy, CPUSharedPool, NodeCPUFacts, SystemQOSResource
from tests.simulated import Topology

Cpus = frozenset[int]
NONE: Cpus = frozenset()


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """How the operator set the node up. reserved, system: how many cores of their own."""

    reserved_cores: int = 0
    system_cores: int = 0
    static: bool = False


PLANS = {
    "shared": CpuPlan(),
    "reserved": CpuPlan(reserved_cores=1),
    "system": CpuPlan(system_cores=1),
    "static": CpuPlan(static=True),
    "static and reserved": CpuPlan(reserved_cores=1, static=True),
}


@dataclass(frozen=True, slots=True)
class Pools:
    """What one NodeResourceTopology says. ls, be: NUMA node -> CPUs; empty pools are left out."""

    ls: dict[int, Cpus] = field(default_factory=dict)
    be: dict[int, Cpus] = field(default_factory=dict)
    system: Cpus = NONE
    static: bool = False

    @property
    def together(self) -> Cpus:
        return NONE.union(*self.ls.values())

    def within(self, cpus: CpuSet | None) -> Pools:
        """Return the pools less what pods cannot have."""
        if cpus is None:
            return self
        there = frozenset(cpus)
        return replace(
            self,
            ls={node: of & there for node, of in self.ls.items()},
            be={node: of & there for node, of in self.be.items()},
            system=self.system & there,
        )

    def facts(self, topology: Topology) -> NodeCPUFacts:
        """The same as the daemon reads it."""
        system = None
        if self.system:
            system = SystemQOSResource(CpuSet(self.system), True)
        return NodeCPUFacts(
            shared_pools=_told(self.ls, topology),
            be_shared_pools=_told(self.be, topology),
            cpu_manager_policy=CPUManagerPolicy("static" if self.static else "none"),
            system_qos=system,
        )


def _told(pools: dict[int, Cpus], topology: Topology) -> tuple[CPUSharedPool, ...]:
    return tuple(
        CPUSharedPool(node // topology.nodes_per_socket, node, CpuSet(cpus))
        for node, cpus in sorted(pools.items())
    )


class CpuManager:
    """The node's CPUs. Pods go by their UID, containers by their pod's UID and their name."""

    def __init__(self, topology: Topology, plan: CpuPlan) -> None:
        self.topology = topology
        self.plan = plan
        self.all: Cpus = frozenset(range(topology.cpus))
        cores = iter(range(topology.cores))
        self.reserved = self._next_cores(cores, plan.reserved_cores)
        self.system = self._next_cores(cores, plan.system_cores)
        self.given: dict[str, Cpus] = {}
        self.lse: set[str] = set()
        self.pinned: dict[tuple[str, str], Cpus] = {}
        self.overruled: dict[tuple[str, str], Cpus] = {}
        self.offline: Cpus = NONE
        self.lost: Cpus = NONE

    def _next_cores(self, cores: Iterator[int], count: int) -> Cpus:
        taken = [next(cores) for _ in range(count)]
        return NONE.union(*(self.topology.cpus_where("core", core) for core in taken))

    # Giving

    def give(self, uid: str, count: int, *, node: int, whole_cores: bool, lse: bool) -> Cpus:
        """The scheduler's CPUs for a pod, from `node` first; none when they do not fit.

        One CPU at least stays in the share pools.
        """
        free = self.all - self.reserved - self.system - NONE.union(*self.given.values())
        free -= NONE.union(*self.pinned.values()) | self.offline | self.lost
        near = self.topology.cpus_where("node", node)
        chosen: list[int] = []
        for core in sorted(range(self.topology.cores), reverse=True, key=lambda core: (
            bool(self.topology.cpus_where("core", core) & near), core,
        )):  # fmt: skip
            cpus = self.topology.cpus_where("core", core)
            if whole_cores and not cpus <= free:
                continue
            chosen += sorted(cpus & free)
        taken = frozenset(chosen[:count])
        if len(taken) < count or free == taken:
            return NONE
        self.given[uid] = taken
        if lse:
            self.lse.add(uid)
        return taken

    def pin(self, uid: str, name: str, count: int) -> bool:
        """Kubelet gives a container of a Guaranteed pod CPUs; False when they do not fit.

        It knows nothing of the scheduler's and pins those pods too; what it gives them counts for
        nobody else. Two that would both count must not meet.
        """
        if not self.plan.static:
            return True
        free = self.all - self.reserved - self._pinned()
        if uid not in self.given:
            free -= self.system | NONE.union(*self.given.values())
        if len(free) <= count:
            return False
        of = self.overruled if uid in self.given else self.pinned
        of[uid, name] = frozenset(sorted(free)[:count])
        return True

    def _pinned(self) -> Cpus:
        return NONE.union(*self.pinned.values(), *self.overruled.values())

    def asked_by_kubelet(self, uid: str, name: str) -> Cpus:
        """What kubelet wants a container to run on; nothing without the static policy."""
        if not self.plan.static:
            return NONE
        own = self.pinned.get((uid, name)) or self.overruled.get((uid, name))
        return own or self.all - self._pinned()

    def take_back(self, uid: str) -> None:
        """A pod is gone, or was not admitted."""
        self.given.pop(uid, None)
        self.lse.discard(uid)
        for of in (self.pinned, self.overruled):
            for key in [key for key in of if key[0] == uid]:
                del of[key]

    # Offline and online

    def may_go_offline(self, cpu: int) -> bool:
        """Tell whether nobody has the CPU alone, and others are left for the pools.

        kubelet's static policy does not know of CPUs that go: its containers could not be made.
        """
        alone = self.reserved | self.system | NONE.union(*self.given.values())
        left = self.all - alone - self.offline - self.lost - {cpu}
        return not self.plan.static and cpu not in alone | self.offline and bool(left)

    # Telling

    def pools(self) -> Pools:
        """The share pools: the complement of what somebody has alone and of what is reserved."""
        left = self.all - self.reserved - self.system - NONE.union(*self.pinned.values())
        left -= self.offline
        exclusive = NONE.union(*self.given.values())
        alone = NONE.union(*(self.given[uid] for uid in self.lse))
        return Pools(
            ls=self._by_node(left - exclusive),
            be=self._by_node(left - alone),
            system=self.system,
            static=self.plan.static,
        )

    def _by_node(self, cpus: Cpus) -> dict[int, Cpus]:
        nodes = {
            node: cpus & self.topology.cpus_where("node", node)
            for node in range(self.topology.nodes)
        }
        return {node: of for node, of in nodes.items() if of}
