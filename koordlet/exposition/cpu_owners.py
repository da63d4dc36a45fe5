"""Who has each CPU of the machine, for `koordctl top` and `koordctl report`. Pure.

The CPUs that are set apart from pods come from the function that CPU suppression decides with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
)
from apis.qos import QoSClass
from hooks.facts import NodeInputs
from hooks.subject import Pod
from koordlet.exposition.overview import Plain, class_of
from koordlet.qos.strategies.cpu_owners import allocated, set_apart
from linux.cpus import Cpu

RESERVED: Final = "reserved"
"""Stands where a pod's owner has its QoS class."""


class _Owner(NamedTuple):
    cpus: CpuSet
    name: str
    class_: str
    why: str
    uid: str = ""


def topology(cpus: Sequence[Cpu], pods: Iterable[Pod], inputs: NodeInputs) -> Plain:
    """Return the CPUs by NUMA node, each with its owners; a CPU without one is shared.

    An owner has a name, a class (a QoS class, or `reserved`), the uid if it is a pod, and why: the
    input that says so. A CPU has several owners where pods share it, and where inputs contradict
    each other.
    """
    pods = tuple(pods)
    found = list(chain(_of_pods(pods), _of_kubelet(pods, inputs), _set_apart(cpus, inputs)))
    nodes: dict[int, list[Plain]] = {}
    for cpu in cpus:
        owners = [
            {"name": each.name, "class": each.class_, "uid": each.uid, "why": each.why}
            for each in found
            if cpu.cpu in each.cpus
        ]
        nodes.setdefault(cpu.node, []).append({"id": cpu.cpu, "core": cpu.core, "owners": owners})
    return {"nodes": [{"id": node, "cpus": nodes[node]} for node in sorted(nodes)]}


def _of_pods(pods: Iterable[Pod]) -> Iterator[_Owner]:
    """Yield the allocations of the scheduler, in the order of the pods' names."""
    for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name)):
        if not pod.ended and (own := allocated(pod)):
            why = f"annotation {ANNOTATION_RESOURCE_STATUS}"
            yield _Owner(own, f"{pod.namespace}/{pod.name}", str(class_of(pod)), why, pod.uid)


def _of_kubelet(pods: Iterable[Pod], inputs: NodeInputs) -> Iterator[_Owner]:
    """Yield what kubelet's static policy gave to pods, and what it keeps for the system."""
    if inputs.topology is None:
        return
    known = {pod.uid: pod for pod in pods}
    for alloc in inputs.topology.pod_cpu_allocs:
        pod = known.get(alloc.uid)
        if pod is not None and pod.ended:
            continue
        own = CpuSet.parse(alloc.cpuset)  # `parse_pod_cpu_allocs` has tried it
        name = f"{alloc.namespace}/{alloc.name}" if alloc.name else f"uid {alloc.uid}"
        class_ = "" if pod is None else str(class_of(pod))
        yield _Owner(own, name, class_, "kubelet's static CPU manager", alloc.uid)
    if kept := inputs.topology.cpu_manager_policy.reserved_cpus:
        why = "kubelet's configuration: no container gets them alone, and share pools keep them"
        yield _Owner(kept, "kubelet's reserved CPUs", RESERVED, why)


def _set_apart(cpus: Sequence[Cpu], inputs: NodeInputs) -> Iterator[_Owner]:
    apart = set_apart(cpus, inputs)
    if apart.reserved:
        why = f"annotation {ANNOTATION_NODE_RESERVATION} of the Node"
        if apart.by_amount:
            why += ": its amount of cpu, chosen as kubelet packs CPUs"
        yield _Owner(apart.reserved, "node reservation", RESERVED, why)
    if apart.system is not None:
        exclusive = "exclusive" if apart.system.cpuset_exclusive else "shared with pods"
        why = f"annotation {ANNOTATION_SYSTEM_QOS_RESOURCE} of the Node: {exclusive}"
        yield _Owner(apart.system.cpus, "system class", str(QoSClass.SYSTEM), why)
