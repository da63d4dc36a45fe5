"""Which CPUs pods share, and which ones are set apart: pure computation.

    LS pool = all - kubelet's exclusive CPUs - CPUs of every pod with an allocation - set apart
    BE pool = all - kubelet's exclusive CPUs - CPUs of LSE pods                     - set apart

Set apart are the node's reservation and the CPUs of class SYSTEM, if these are exclusive. CPUs that
kubelet reserves for the system stay in both pools. Rules: docs/facts/koordlet.md, "Topology".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from apis.cpuset import NO_CPUS, CpuSet
from apis.qos import QoSClass
from apis.topology import CPUSharedPool, PodCPUAlloc
from hooks.subject import Pod
from koordlet.qos.strategies.cpu_owners import allocated
from linux.cpus import Cpu


class Pools(msgspec.Struct, frozen=True):
    """ls, be: one pool for each NUMA node, sorted by socket, then node. by_kubelet: what kubelet's
    static policy gave to pods that Koordinator does not manage, sorted by uid."""

    ls: tuple[CPUSharedPool, ...]
    be: tuple[CPUSharedPool, ...]
    by_kubelet: tuple[PodCPUAlloc, ...]


def pools(
    cpus: Sequence[Cpu],
    pods: Iterable[Pod],
    *,
    exclusive: Mapping[str, CpuSet],
    set_apart: CpuSet,
) -> Pools:
    """Return the pools.

    exclusive: pod uid -> CPUs in the state of kubelet's CPU manager, empty without static policy.
    """
    everything = CpuSet(cpu.cpu for cpu in cpus)
    known = {pod.uid: pod for pod in pods}
    allocations = {uid: allocated(pod) for uid, pod in known.items()}
    by_kubelet = {
        uid: given
        for uid, given in sorted(exclusive.items())
        if given and not _managed(known.get(uid), allocations.get(uid, NO_CPUS))
    }
    left = everything - CpuSet.union(by_kubelet.values())
    alive = {uid: pod for uid, pod in known.items() if not pod.ended}
    ls = left - CpuSet.union(allocations.get(uid, NO_CPUS) for uid in alive)
    be = left - CpuSet.union(
        allocations.get(uid, NO_CPUS) for uid, pod in alive.items() if pod.qos is QoSClass.LSE
    )
    return Pools(
        ls=_by_numa(cpus, ls, set_apart),
        be=_by_numa(cpus, be, set_apart),
        by_kubelet=tuple(_alloc(uid, given, known.get(uid)) for uid, given in by_kubelet.items()),
    )


def _managed(pod: Pod | None, allocated: CpuSet) -> bool:
    """Return whether koordlet sets the CPUs of this pod, even if kubelet gave it some."""
    return pod is not None and (pod.qos in (QoSClass.LS, QoSClass.BE) or bool(allocated))


def _alloc(uid: str, given: CpuSet, pod: Pod | None) -> PodCPUAlloc:
    return PodCPUAlloc(
        namespace="" if pod is None else pod.namespace,
        name="" if pod is None else pod.name,
        uid=uid,
        cpuset=str(given),
        managed_by_kubelet=True,
    )


def _by_numa(cpus: Sequence[Cpu], pool: CpuSet, set_apart: CpuSet) -> tuple[CPUSharedPool, ...]:
    """Return a pool for each NUMA node that has a CPU of it; CPUs set apart are left out then."""
    numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
    for cpu in cpus:
        if cpu.cpu in pool:
            numbers[cpu.socket, cpu.node].append(cpu.cpu)
    return tuple(
        CPUSharedPool(socket=socket, node=node, cpus=CpuSet(numbers[socket, node]) - set_apart)
        for socket, node in sorted(numbers)
    )
