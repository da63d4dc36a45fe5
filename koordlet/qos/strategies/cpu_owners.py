"""Who has which CPU, and which are left for best-effort pods. Pure.

LSE pods have their CPUs to themselves, LSR pods share theirs with best-effort pods alone; the
scheduler's allocation stands in an annotation of the pod. The node's reservation and the exclusive
CPUs of the system class belong to no pod. A reservation names its CPUs, or is an amount: then as
many CPUs are reserved as kubelet would choose. The report of the topology names the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from apis.annotations import parse_resource_status
from apis.cpuset import NO_CPUS, CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    CPU,
)
from apis.qos import QoSClass
from apis.topology import (
    NodeReservation,
    SystemQOSResource,
    parse_node_reservation,
    parse_system_qos_resource,
)
from hooks.facts import NodeInputs
from hooks.subject import Pod
from koordlet.qos.strategy import Situation
from linux.cpus import Cpu


class SetApart(NamedTuple):
    """The CPUs that belong to no pod.

    reserved: by the node's annotation. by_amount: whether that has an amount and no list. system:
    the CPUs of the system class, None without any; pods keep off them if they are exclusive.
    errors: bad annotations of the node, which set nothing apart.
    """

    reserved: CpuSet
    by_amount: bool
    system: SystemQOSResource | None
    errors: tuple[InputError, ...] = ()

    @property
    def cpus(self) -> CpuSet:
        """The CPUs that pods keep off."""
        if self.system is not None and self.system.cpuset_exclusive:
            return self.reserved | self.system.cpus
        return self.reserved


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
    apart = set_apart(situation.node.cpus, inputs)
    lse = CpuSet.union(allocated(pod) for pod in _living(situation, QoSClass.LSE))
    lsr = CpuSet.union(allocated(pod) for pod in _living(situation, QoSClass.LSR))
    free = everything - apart.cpus - lse
    if kubelet_is_static(situation):
        # The pools lack what kubelet gave to single containers.
        assert inputs.topology is not None
        pools = CpuSet.union(pool.cpus for pool in inputs.topology.be_shared_pools)
        free = free & pools or free
    return Owners(everything, free, free & lsr, apart.errors)


def set_apart(cpus: Sequence[Cpu], inputs: NodeInputs) -> SetApart:
    """Return the CPUs that belong to no pod. cpus: of the machine."""
    errors: list[InputError] = []
    obj = f"Node {inputs.node.name}"
    reservation = NodeReservation()
    try:
        text = inputs.node.annotations.get(ANNOTATION_NODE_RESERVATION) or "null"
        reservation = parse_node_reservation(text, obj=obj)
    except InputError as error:
        errors.append(error)
    system = inputs.topology.system_qos if inputs.topology is not None else None
    try:
        text = inputs.node.annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE) or ""
        system = parse_system_qos_resource(text, obj=obj) if text else system
    except InputError as error:
        errors.append(error)
    return SetApart(
        reserved=reserved_cpus(cpus, reservation),
        by_amount=not reservation.reserved_cpus,
        system=system,
        errors=tuple(errors),
    )


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


def reserved_cpus(cpus: Sequence[Cpu], reservation: NodeReservation) -> CpuSet:
    """Return the CPUs that the node's annotation reserves: its list, else as many as its amount."""
    if reservation.reserved_cpus:
        return reservation.reserved_cpus
    amount = reservation.resources.get(CPU)
    return NO_CPUS if amount is None else packed(cpus, max(amount.value(), 0))


def packed(cpus: Sequence[Cpu], count: int) -> CpuSet:
    """Return `count` CPUs as kubelet packs them; all of them if there are fewer.

    Whole sockets first, then whole cores, then single threads; the lowest numbers first.
    """
    chosen: list[int] = []
    for unit in (_socket, _core, _thread):
        groups: dict[int, list[int]] = defaultdict(list)
        taken = set(chosen)
        for cpu in cpus:
            if cpu.cpu not in taken:
                groups[unit(cpu)].append(cpu.cpu)
        whole: dict[int, int] = defaultdict(int)
        for cpu in cpus:
            whole[unit(cpu)] += 1
        for number in sorted(groups, key=lambda number: min(groups[number])):
            group = groups[number]
            if len(group) == whole[number] and len(chosen) + len(group) <= count:
                chosen += group
    return CpuSet(chosen)


def _socket(cpu: Cpu) -> int:
    return cpu.socket


def _core(cpu: Cpu) -> int:
    return cpu.core


def _thread(cpu: Cpu) -> int:
    return cpu.cpu


def kubelet_is_static(situation: Situation) -> bool:
    """Return whether kubelet gives CPUs to single containers itself."""
    topology = situation.inputs.topology
    return topology is not None and topology.cpu_manager_policy.policy == "static"
