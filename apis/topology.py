"""NodeResourceTopology: the CPU pools of a node, who owns them, and its NUMA zones.

The facts that hooks need stand in JSON annotations; here they become values once per change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, field

from apis.core import ObjectMeta
from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import Embedded, Wire, decode_optional_field, field_decoder
from apis.errors import InputError, InputErrors
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_BASIC_INFO,
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_CPU_TOPOLOGY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_POD_CPU_ALLOCS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
)
from apis.meta import Int64
from apis.quantity import Quantity, ResourceList


class TopologyCost(Wire, frozen=True):
    """Cost of reaching a zone from another.

    name: Name of the other zone.
    value: The cost; a smaller one is nearer.
    """

    name: str
    value: Int64


class TopologyAttribute(Wire, frozen=True):
    """A named fact about a zone.

    name: Name of the fact.
    value: Its value.
    """

    name: str
    value: str


class ZoneResource(Wire, frozen=True, omit_defaults=False):
    """Amounts of one resource of a zone.

    name: Name of the resource.
    capacity: Amount that the zone has.
    allocatable: Amount that pods may use.
    available: Amount that is left for pods.
    """

    name: str
    capacity: Quantity
    allocatable: Quantity
    available: Quantity


class Zone(Wire, frozen=True):
    """A part of the node, such as a NUMA node.

    name: Name of the zone: node- and the number of the NUMA node.
    type: Type of the zone: Node for a NUMA node.
    parent: Name of the zone that this one is a part of.
    resources: Resources of the zone.
    costs: Costs of reaching other zones.
    attributes: Further facts about the zone.
    """

    name: str
    type: str
    parent: str = ""
    resources: tuple[ZoneResource, ...] = ()
    costs: tuple[TopologyCost, ...] = ()
    attributes: tuple[TopologyAttribute, ...] = ()


class NodeResourceTopology(Wire, frozen=True):
    """NUMA zones of the node of the same name, and in its annotations the CPUs and who has them.

    topology_policies: Topology manager policy and scope of the kubelet.
    zones: The zones of the node.
    """

    metadata: ObjectMeta = ObjectMeta()
    topology_policies: tuple[str, ...] = ()
    zones: tuple[Zone, ...] = ()


def numa_id(zone: Zone) -> int | None:
    """Return the NUMA node number of a zone named `node-<number>`, None for other zones."""
    prefix, dash, number = zone.name.rpartition("-")
    if prefix == "node" and dash and number.isascii() and number.isdigit() and len(number) < 6:
        return int(number)
    return None


# --- annotations -------------------------------------------------------------------------------

CpuNumber = Annotated[int, Meta(ge=-1, le=8191)]


class CPUSharedPool(Struct, frozen=True):
    """The CPUs of one NUMA node that pods share."""

    socket: int
    node: int
    cpus: CpuSet


class CPUManagerPolicy(Struct, frozen=True):
    """Kubelet's CPU manager: `policy` is "static", "none" or "" when kubelet was not asked."""

    policy: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    reserved_cpus: CpuSet = NO_CPUS


class SystemQOSResource(Struct, frozen=True):
    """CPUs set apart for pods of class SYSTEM."""

    cpus: CpuSet
    cpuset_exclusive: bool


class CPUBasicInfo(Embedded, frozen=True):
    cpu_model: str = ""
    hyper_thread_enabled: bool = False
    turbo_enabled: bool = False
    cat_l3_cbm_mask: str = field(name="catL3CbmMask", default="")
    vendor_id: str = field(name="vendorID", default="")


class CPUInfo(Embedded, frozen=True, omit_defaults=False):
    id: CpuNumber
    core: CpuNumber
    socket: CpuNumber
    node: CpuNumber


class CPUTopology(Embedded, frozen=True, omit_defaults=False):
    detail: tuple[CPUInfo, ...] = ()


class PodCPUAlloc(Embedded, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""
    cpuset: str = ""
    managed_by_kubelet: bool = False


class NodeReservation(Struct, frozen=True):
    """What is kept free of pods. `reserved_cpus`, if any, replaces the cpu amount by its size."""

    resources: ResourceList = field(default_factory=dict)
    reserved_cpus: CpuSet = NO_CPUS
    apply_policy: str = ""

    def amounts(self) -> ResourceList:
        """Return the reserved amounts with `reserved_cpus` applied."""
        if not self.reserved_cpus:
            return self.resources
        return {**self.resources, "cpu": Quantity.of(len(self.reserved_cpus))}


class _Pool(Embedded, frozen=True):
    socket: CpuNumber = 0
    node: CpuNumber = 0
    cpuset: str = ""


class _CPUManagerPolicy(Embedded, frozen=True):
    policy: str = ""
    options: dict[str, str] = field(default_factory=dict)
    reserved_cpus: str = field(name="reservedCPUs", default="")


class _NodeReservation(Embedded, frozen=True):
    resources: ResourceList = field(default_factory=dict)
    reserved_cpus: str = field(name="reservedCPUs", default="")
    apply_policy: str = ""


class _SystemQOS(Embedded, frozen=True):
    cpuset: str = ""
    cpuset_exclusive: bool | None = None


_decode_pools = field_decoder(tuple[_Pool, ...])
_decode_policy = field_decoder(_CPUManagerPolicy)
_decode_system_qos = field_decoder(_SystemQOS)
_decode_basic_info = field_decoder(CPUBasicInfo)
_decode_cpu_topology = field_decoder(CPUTopology)
_decode_pod_allocs = field_decoder(tuple[PodCPUAlloc, ...])
_decode_reservation = field_decoder(_NodeReservation)


def _field(key: str) -> str:
    return f'metadata.annotations["{key}"]'


def _cpus(text: str, *, obj: str, where: str) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except ValueError as error:
        raise InputError(obj=obj, field=where, value=text, problem=str(error)) from None


def parse_cpu_shared_pools(
    text: str, *, obj: str, key: str = ANNOTATION_CPU_SHARED_POOLS
) -> tuple[CPUSharedPool, ...]:
    """Return the pools of LS (or, with the other `key`, BE) pods. Raises InputError."""
    where = _field(key)
    pools = decode_optional_field(_decode_pools, text, obj=obj, field=where) or ()
    parsed = []
    for index, pool in enumerate(pools):
        cpus = _cpus(pool.cpuset, obj=obj, where=f"{where}[{index}].cpuset")
        parsed.append(CPUSharedPool(socket=pool.socket, node=pool.node, cpus=cpus))
    return tuple(parsed)


def parse_cpu_manager_policy(text: str, *, obj: str) -> CPUManagerPolicy:
    """Return kubelet's CPU manager policy. Raises InputError."""
    where = _field(ANNOTATION_CPU_MANAGER_POLICY)
    policy = decode_optional_field(_decode_policy, text, obj=obj, field=where)
    if policy is None:
        return CPUManagerPolicy()
    cpus = _cpus(policy.reserved_cpus, obj=obj, where=f"{where}.reservedCPUs")
    return CPUManagerPolicy(policy.policy, policy.options, cpus)


def parse_system_qos_resource(text: str, *, obj: str) -> SystemQOSResource | None:
    """Return the CPUs of class SYSTEM; None for "null" and for an empty set. Raises InputError."""
    where = _field(ANNOTATION_SYSTEM_QOS_RESOURCE)
    raw = decode_optional_field(_decode_system_qos, text, obj=obj, field=where)
    if raw is None:
        return None
    cpus = _cpus(raw.cpuset, obj=obj, where=f"{where}.cpuset")
    if not cpus:
        return None
    return SystemQOSResource(cpus=cpus, cpuset_exclusive=raw.cpuset_exclusive is not False)


def parse_cpu_basic_info(text: str, *, obj: str) -> CPUBasicInfo:
    """Return the CPU model facts. Raises InputError."""
    where = _field(ANNOTATION_CPU_BASIC_INFO)
    return decode_optional_field(_decode_basic_info, text, obj=obj, field=where) or CPUBasicInfo()


def parse_cpu_topology(text: str, *, obj: str) -> CPUTopology:
    """Return core, socket and NUMA node of each CPU. Raises InputError."""
    where = _field(ANNOTATION_CPU_TOPOLOGY)
    return decode_optional_field(_decode_cpu_topology, text, obj=obj, field=where) or CPUTopology()


def parse_pod_cpu_allocs(text: str, *, obj: str) -> tuple[PodCPUAlloc, ...]:
    """Return the CPUs that kubelet's static policy gave to pods. Raises InputError."""
    where = _field(ANNOTATION_POD_CPU_ALLOCS)
    allocs = decode_optional_field(_decode_pod_allocs, text, obj=obj, field=where) or ()
    for index, alloc in enumerate(allocs):
        _cpus(alloc.cpuset, obj=obj, where=f"{where}[{index}].cpuset")
    return allocs


def parse_node_reservation(text: str, *, obj: str) -> NodeReservation:
    """Return what the node's reservation annotation keeps free. Raises InputError."""
    where = _field(ANNOTATION_NODE_RESERVATION)
    reservation = decode_optional_field(_decode_reservation, text, obj=obj, field=where)
    if reservation is None:
        return NodeReservation()
    cpus = _cpus(reservation.reserved_cpus, obj=obj, where=f"{where}.reservedCPUs")
    return NodeReservation(reservation.resources, cpus, reservation.apply_policy)


class NodeCPUFacts(Struct, frozen=True):
    """What the annotations of a NodeResourceTopology say about CPUs, parsed together."""

    shared_pools: tuple[CPUSharedPool, ...] = ()
    be_shared_pools: tuple[CPUSharedPool, ...] = ()
    cpu_manager_policy: CPUManagerPolicy = CPUManagerPolicy()
    system_qos: SystemQOSResource | None = None
    pod_cpu_allocs: tuple[PodCPUAlloc, ...] = ()


def parse_node_cpu_facts(annotations: Mapping[str, str], *, obj: str) -> NodeCPUFacts:
    """Return what decides about CPUs; raise InputErrors naming all bad annotations.

    `pod_cpu_allocs` is left to `parse_pod_cpu_allocs`: it is only shown, so a bad one must not cost
    the pools.
    """
    errors: list[InputError] = []
    pools: dict[str, tuple[CPUSharedPool, ...]] = {}
    for key in (ANNOTATION_CPU_SHARED_POOLS, ANNOTATION_BE_CPU_SHARED_POOLS):
        try:
            pools[key] = parse_cpu_shared_pools(annotations.get(key) or "null", obj=obj, key=key)
        except InputError as error:
            errors.append(error)
    policy = CPUManagerPolicy()
    system_qos = None
    try:
        policy = parse_cpu_manager_policy(
            annotations.get(ANNOTATION_CPU_MANAGER_POLICY) or "null", obj=obj
        )
    except InputError as error:
        errors.append(error)
    try:
        system_qos = parse_system_qos_resource(
            annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE) or "null", obj=obj
        )
    except InputError as error:
        errors.append(error)
    if errors:
        raise InputErrors(errors)
    return NodeCPUFacts(
        shared_pools=pools[ANNOTATION_CPU_SHARED_POOLS],
        be_shared_pools=pools[ANNOTATION_BE_CPU_SHARED_POOLS],
        cpu_manager_policy=policy,
        system_qos=system_qos,
    )
