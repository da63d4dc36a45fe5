"""Who has which CPU, and which are left for best-effort pods. Pure.

LSE pods have their CPUs to themselves, LSR pods share theirs with best-effort pods alone; the
scheduler's allocation stands in an annotation of the pod. The node's reservation and the exclusive
CPUs of the system class belong to no pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from apis.annotations import parse_resource_status
from apis.cpuset import NO_CPUS, CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
)
from apis.qos import QoSClass
from apis.topology import parse_node_reservation, parse_system_qos_resource
from hooks.subject import Pod
from koordlet.qos.strategy import Situation


class Owners(NamedTuple):
    """Who has the CPUs. free: what best-effort pods may use; lsr: those of `free` that LSR pods
    own. errors: bad annotations of the node."""

    everything: CpuSet
    free: CpuSet
    lsr: CpuSet
    errors: tuple[InputError, ...] = ()


def owners_of(situation: Situation) -> Owners:
    """Return the CPUs that best-effort pods may use.

    Where two pods name one CPU, the stricter class counts. Pods that ended own nothing.
    """
    inputs, kernel = situation.inputs, situation.inputs.kernel
    everything = CpuSet(cpu.cpu for cpu in situation.node.cpus)
    if kernel.pods_cpus is not None:
        everything &= kernel.pods_cpus
    errors: list[InputError] = []
    obj = f"Node {inputs.node.name}"
    reserved = exclusive = NO_CPUS
    try:
        text = inputs.node.annotations.get(ANNOTATION_NODE_RESERVATION) or "null"
        reserved = parse_node_reservation(text, obj=obj).reserved_cpus
    except InputError as error:
        errors.append(error)
    system = inputs.topology.system_qos if inputs.topology is not None else None
    try:
        text = inputs.node.annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE) or ""
        system = parse_system_qos_resource(text, obj=obj) if text else system
    except InputError as error:
        errors.append(error)
    if system is not None and system.cpuset_exclusive:
        exclusive = system.cpus
    lse = CpuSet.union(allocated(pod) for pod in _living(situation, QoSClass.LSE))
    lsr = CpuSet.union(allocated(pod) for pod in _living(situation, QoSClass.LSR))
    free = everything - reserved - exclusive - lse
    if kubelet_is_static(situation):
        # The pools lack what kubelet gave to single containers.
        assert inputs.topology is not None
        pools = CpuSet.union(pool.cpus for pool in inputs.topology.be_shared_pools)
        free = free & pools or free
    return Owners(everything, free, free & lsr, tuple(errors))


def _living(situation: Situation, qos: QoSClass) -> Iterator[Pod]:
    return (one.pod for one in situation.pods if one.pod.qos is qos and not one.pod.ended)


def allocated(pod: Pod) -> CpuSet:
    """Return the CPUs that the scheduler gave the pod; none where the annotation is bad, which
    `CPUSetAllocator` reports."""
    text = pod.annotations.get(ANNOTATION_RESOURCE_STATUS)
    if not text:
        return NO_CPUS
    try:
        return parse_resource_status(text, obj=pod.obj).cpus
    except InputError:
        return NO_CPUS


def kubelet_is_static(situation: Situation) -> bool:
    """Return whether kubelet gives CPUs to single containers itself."""
    topology = situation.inputs.topology
    return topology is not None and topology.cpu_manager_policy.policy == "static"
