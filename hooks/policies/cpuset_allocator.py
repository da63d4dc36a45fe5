"""CPUSetAllocator: on which CPUs a container runs.

A pod with allocated CPUs gets exactly these, and no CFS quota; all others run in the share pools,
which hold the CPUs that are not allocated. Best-effort pods are left to CPU suppression, and
without allocated CPUs everything is left to kubelet if its static policy is on.

The first matching row of the table in docs/facts/policies.md, "CPU sets", decides; comments below
carry the row's number. Pools are joined as sets, so an empty pool adds nothing. A CPU that the
kernel gives no pod is left out, because a runtime cannot make a container with it.
Row 8, the empty set, cannot be requested from a runtime: it is not a claim, which withdraws an
earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_
from typing import Final

import msgspec
from msgspec.structs import replace

from apis.annotations import (
    NUMANodeResource,
    ResourceStatus,
    annotation_field,
    parse_resource_status,
)
from apis.cpuset import NO_CPUS, CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    BATCH_CPU,
    CPU,
)
from apis.qos import KubeQoS, QoSClass
from apis.topology import CPUSharedPool, parse_system_qos_resource
from hooks.claim import Claim, Rank
from hooks.facts import NodeInputs
from hooks.policy import Partial, Policy, never
from hooks.subject import ContainerSubject, HostAppSubject, Level, Pod, PodSubject, SandboxSubject
from linux.resources import UNLIMITED, Resource

NAME: Final = "CPUSetAllocator"

_STATUS: Final = f"annotation {ANNOTATION_RESOURCE_STATUS}"
_LS_POOLS: Final = f"NodeResourceTopology annotation {ANNOTATION_CPU_SHARED_POOLS}"
_BE_POOLS: Final = f"NodeResourceTopology annotation {ANNOTATION_BE_CPU_SHARED_POOLS}"
_SYSTEM: Final = f"NodeResourceTopology annotation {ANNOTATION_SYSTEM_QOS_RESOURCE}"
_SYSTEM_OF_NODE: Final = f"Node annotation {ANNOTATION_SYSTEM_QOS_RESOURCE}"
_NO_STATUS: Final = ResourceStatus()


class Pools(msgspec.Struct, frozen=True):
    """Share pools: the CPUs of each NUMA node, their union, and the annotation they came from."""

    by_node: Mapping[int, CpuSet]
    together: CpuSet
    source: str


class Topology(msgspec.Struct, frozen=True):
    """What the node's NodeResourceTopology says.

    system: the CPUs of class SYSTEM. The Node's annotation counts first: an administrator writes it
        there, and upstream's koordlet copies it to the NodeResourceTopology.
    lacking: CPUs of the share pools that this machine lacks. They are in none of the sets.
    """

    ls: Pools
    be: Pools
    system: CpuSet
    system_source: str
    kubelet_static: bool
    lacking: CpuSet


class Rule(msgspec.Struct, frozen=True):
    """topology: None without a NodeResourceTopology; allocated CPUs are claimed even then.

    pods_cpus: as in `KernelFacts`.
    """

    topology: Topology | None
    pods_cpus: CpuSet | None
    be_cpu_manager: bool
    unset_quota: bool


def parse(inputs: NodeInputs) -> Rule | Partial:
    facts, topology, bad = inputs.topology, None, None
    if facts is not None:
        system, source = facts.system_qos, _SYSTEM
        text = inputs.node.annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE)
        if text:
            try:
                system = parse_system_qos_resource(text, obj=f"Node {inputs.node.name}")
                source = _SYSTEM_OF_NODE
            except InputError as error:
                bad = error
        there = inputs.kernel.pods_cpus
        topology = Topology(
            ls=_pools(facts.shared_pools, _LS_POOLS, there),
            be=_pools(facts.be_shared_pools, _BE_POOLS, there),
            system=_within(system.cpus, there) if system else NO_CPUS,
            system_source=source,
            kubelet_static=facts.cpu_manager_policy.policy == "static",
            lacking=_lacking(facts.shared_pools, there),
        )
    rule = Rule(
        topology=topology,
        pods_cpus=inputs.kernel.pods_cpus,
        be_cpu_manager=inputs.settings.gate("BECPUManager", default=False),
        unset_quota=not inputs.settings.disable_unset_cpu_quota,
    )
    if bad is None:
        return rule
    return Partial(rule, bad, lambda last: _with_system_of(last, rule))


def _with_system_of(last: Rule, rule: Rule) -> Rule:
    """Keep the last CPUs of class SYSTEM only: an old pool could overlap new allocations."""
    if last.topology is None or rule.topology is None:
        return rule
    kept = last.topology
    topology = replace(rule.topology, system=kept.system, system_source=kept.system_source)
    return replace(rule, topology=topology)


def _within(cpus: CpuSet, there: CpuSet | None) -> CpuSet:
    return cpus if there is None else cpus & there


def _pools(pools: Iterable[CPUSharedPool], source: str, there: CpuSet | None) -> Pools:
    by_node: dict[int, CpuSet] = {}
    for pool in pools:
        by_node[pool.node] = by_node.get(pool.node, NO_CPUS) | _within(pool.cpus, there)
    return Pools(by_node, reduce(or_, by_node.values(), NO_CPUS), source)


def _lacking(pools: Iterable[CPUSharedPool], there: CpuSet | None) -> CpuSet:
    named = CpuSet.union(pool.cpus for pool in pools)
    return named - _within(named, there)


def allocated_cpus(pod: Pod) -> CpuSet:
    """Return the CPUs that the scheduler allocated to the pod. Raises InputError."""
    text = pod.annotations.get(ANNOTATION_RESOURCE_STATUS)
    if not text:
        return NO_CPUS
    return parse_resource_status(text, obj=pod.obj).cpus


def claim_cpus(rule: Rule, subject: ContainerSubject | SandboxSubject) -> Claim | None:
    """Return the claim for the CPU set of a container or sandbox; comments: rows of the table."""
    pod = subject.pod
    text = pod.annotations.get(ANNOTATION_RESOURCE_STATUS)
    status = parse_resource_status(text, obj=pod.obj) if text else _NO_STATUS  # 1
    if status.cpus:  # 2
        cpus, lacks = status.cpus, ""
        there = _within(cpus, rule.pods_cpus)
        if not there:
            raise InputError(
                obj=pod.obj,
                field=f"{annotation_field(ANNOTATION_RESOURCE_STATUS)}.cpuset",
                value=str(status.cpus),
                problem=f"this node has none of these CPUs for pods, only {rule.pods_cpus}",
                hint="was the pod allocated on another machine, or did its CPUs go offline?",
            )
        if there != cpus:
            cpus, lacks = there, f"this node has no CPU {cpus - there} for pods"
        return _claim(
            cpus, "CPUs allocated to the pod", f"{_STATUS}.cpuset", Rank.POD, degraded=lacks
        )
    topology = rule.topology
    if topology is None:  # 3
        return None
    short = ""
    if status.numa_node_resources and (pod.qos is not QoSClass.BE or rule.be_cpu_manager):  # 4, 5
        nodes = [entry.node for entry in status.numa_node_resources if _has_cpu(entry)]
        if nodes:
            pools = topology.be if pod.qos is QoSClass.BE else topology.ls
            cpus = reduce(or_, (pools.by_node.get(node, NO_CPUS) for node in nodes))
            named = ",".join(map(str, nodes))
            if cpus:
                reason = f"share pool of the allocated NUMA nodes {named}"
                return _claim(cpus, reason, f"{_STATUS}.numaNodeResources", Rank.POD)
            short = f"the share pools of the allocated NUMA nodes {named} are empty"
    if pod.qos is QoSClass.SYSTEM and topology.system:  # 6
        return _claim(topology.system, "CPUs reserved for SYSTEM pods", topology.system_source)
    if pod.qos is not QoSClass.LS:  # 7 is the pools, as 10
        if pod.kube_qos is KubeQoS.BESTEFFORT:  # 8
            return None
        if topology.kubelet_static:  # 9
            return None
    if not topology.ls.together:
        return None
    if not short and pod.qos in (QoSClass.LSE, QoSClass.LSR):
        short = f"an {pod.qos} pod without allocated CPUs"
    return _claim(topology.ls.together, "all share pools", topology.ls.source, degraded=short)  # 10


def _has_cpu(entry: NUMANodeResource) -> bool:
    cpu, batch = entry.resources.get(CPU), entry.resources.get(BATCH_CPU)
    return bool(cpu) or (batch is not None and batch.nano > 0)


def _claim(
    cpus: CpuSet, reason: str, source: str, rank: Rank = Rank.DEFAULT, degraded: str = ""
) -> Claim:
    return Claim(
        resource=Resource.CPUSET_CPUS,
        value=cpus,
        policy=NAME,
        reason=reason,
        source=source,
        rank=rank,
        degraded=degraded,
    )


_NO_QUOTA: Final = Claim(
    resource=Resource.CPU_CFS_QUOTA,
    value=UNLIMITED,
    policy=NAME,
    reason="a pod with allocated CPUs needs no quota",
    source=f"{_STATUS}.cpuset",
    rank=Rank.POD,
)


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claim]:
    if rule.unset_quota and allocated_cpus(subject.pod):
        yield _NO_QUOTA


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claim]:
    claim = claim_cpus(rule, subject)
    if claim is not None:
        yield claim
    if rule.unset_quota and allocated_cpus(subject.pod):
        yield _NO_QUOTA


def claim_sandbox(rule: Rule, subject: SandboxSubject) -> Iterator[Claim]:
    claim = claim_cpus(rule, subject)
    if claim is not None:
        yield claim


def claim_host_app(rule: Rule, subject: HostAppSubject) -> Iterator[Claim]:
    """LS host applications run in the share pools; nothing is claimed for other classes."""
    topology = rule.topology
    if subject.qos is QoSClass.LS and topology is not None and topology.ls.together:
        yield _claim(
            topology.ls.together,
            f"all share pools, for the LS host application {subject.name}",
            topology.ls.source,
        )


def _degraded(rule: Rule) -> str:
    if rule.topology is None:
        return "no NodeResourceTopology yet: only allocated CPUs are claimed, no share pools"
    lacking = rule.topology.lacking
    return f"left out of the share pools: CPU {lacking}, which this node lacks" if lacking else ""


POLICY: Final = Policy(
    name=NAME,
    gate="CPUSetAllocator",
    gate_default=True,
    summary="which CPUs a container runs on: its own, or the share pools",
    parse=parse,
    claims={
        Level.POD: claim_pod,
        Level.SANDBOX: claim_sandbox,
        Level.CONTAINER: claim_container,
        Level.HOST_APP: claim_host_app,
    },
    degraded=_degraded,
    individual=never,
)
