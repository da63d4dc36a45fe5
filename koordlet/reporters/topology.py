"""The NodeResourceTopology of this node: computed from facts, and merged into the object.

Annotations describe the CPUs and who has them; zones describe the NUMA nodes. The scheduler and the
hooks of this node read them. Fields: docs/facts/koordlet.md, "Topology".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import canonical_json, encode, to_plain
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_BASIC_INFO,
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_CPU_TOPOLOGY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_POD_CPU_ALLOCS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    CPU,
    LABEL_ENABLE_NUMA_RESERVATION,
    LABEL_MANAGED_BY,
    MANAGED_BY_KOORDINATOR,
    MEMORY,
)
from apis.quantity import Quantity
from apis.topology import (
    CPUBasicInfo,
    CPUInfo,
    CPUSharedPool,
    CPUTopology,
    NodeReservation,
    ZoneResource,
    parse_node_reservation,
    parse_system_qos_resource,
)
from hooks.facts import NodeMeta
from hooks.subject import Pod
from koordlet.qos.strategies.cpu_owners import packed, reserved_cpus
from koordlet.reporters.allocatable import raw_allocatable
from koordlet.reporters.cpu_pools import pools
from koordlet.reporters.stored import Plain
from koordlet.sources.kubelet_settings import KubeletSettings
from linux.cpus import Cpu
from linux.numa_memory import HUGE_PAGES_BYTES, CpuKind, NumaMemory

ZONE_TYPE: Final = "Node"

_POLICIES: Final[Mapping[str, str]] = {
    "single-numa-node": "SingleNUMANode",
    "restricted": "Restricted",
    "best-effort": "BestEffort",
}


class Facts(msgspec.Struct, frozen=True):
    """Everything that the object is computed from. kubelet: None where it shall not be asked.

    memory: by NUMA node. exclusive: the state of kubelet's CPU manager, by the pod's uid.
    """

    cpus: tuple[Cpu, ...]
    memory: Mapping[int, NumaMemory]
    kind: CpuKind
    kubelet: KubeletSettings | None
    exclusive: Mapping[str, CpuSet]
    pods: Sequence[Pod]
    node: NodeMeta
    huge_pages: bool = False


class Topology(msgspec.Struct, frozen=True):
    """What koordlet wants in the object. problems: bad input that another value stands in for."""

    annotations: Mapping[str, str]
    labels: Mapping[str, str]
    policies: tuple[str, ...]
    zones: tuple[tuple[str, tuple[ZoneResource, ...]], ...]
    problems: tuple[str, ...] = ()


def topology(facts: Facts) -> Topology:
    """Return what the object shall hold. Raises InputError for a bad annotation of class SYSTEM.

    The CPUs of that class cannot be guessed, so the last good object stays.
    """
    node, obj = facts.node, f"Node {facts.node.name}"
    system_text = node.annotations.get(ANNOTATION_SYSTEM_QOS_RESOURCE) or "null"
    system = parse_system_qos_resource(system_text, obj=obj)
    problems: list[str] = []
    reservation_text = node.annotations.get(ANNOTATION_NODE_RESERVATION)
    reservation: NodeReservation | None = None
    if reservation_text:
        try:
            reservation = parse_node_reservation(reservation_text, obj=obj)
        except InputError as error:
            problems.append(f"{error}; nothing is reserved")
    reserved = NO_CPUS if reservation is None else reserved_cpus(facts.cpus, reservation)
    set_apart = reserved
    if system is not None and system.cpuset_exclusive:
        set_apart |= system.cpus
    kubelet = facts.kubelet
    static = kubelet is not None and kubelet.static
    found = pools(
        facts.cpus,
        facts.pods,
        exclusive=facts.exclusive if static else {},
        set_apart=set_apart,
    )
    labels = {}
    if numa_reservation := node.labels.get(LABEL_ENABLE_NUMA_RESERVATION):
        labels[LABEL_ENABLE_NUMA_RESERVATION] = numa_reservation
    allocatable: Mapping[str, int] = node.allocatable
    try:
        allocatable = {**allocatable, **raw_allocatable(node)}
    except InputError as error:
        problems.append(str(error))
    return Topology(
        annotations={
            ANNOTATION_CPU_BASIC_INFO: encode(_basic_info(facts.kind)).decode(),
            ANNOTATION_CPU_TOPOLOGY: encode(_cpu_topology(facts.cpus)).decode(),
            ANNOTATION_CPU_SHARED_POOLS: canonical_json(_pools(found.ls)),
            ANNOTATION_BE_CPU_SHARED_POOLS: canonical_json(_pools(found.be)),
            ANNOTATION_CPU_MANAGER_POLICY: canonical_json(_cpu_manager(facts.cpus, kubelet)),
            ANNOTATION_POD_CPU_ALLOCS: (
                encode(found.by_kubelet).decode() if found.by_kubelet else "null"
            ),
            ANNOTATION_NODE_RESERVATION: canonical_json(_reservation(reservation, reserved)),
            ANNOTATION_SYSTEM_QOS_RESOURCE: (
                "null"
                if system is None
                else canonical_json(
                    {"cpuset": str(system.cpus), "cpusetExclusive": system.cpuset_exclusive}
                )
            ),
        },
        labels=labels,
        policies=(_policy(kubelet),),
        zones=_zones(facts, allocatable if numa_reservation == "true" else None),
        problems=tuple(problems),
    )


# --- annotations ---------------------------------------------------------------------------------


def _basic_info(kind: CpuKind) -> CPUBasicInfo:
    return CPUBasicInfo(
        cpu_model=kind.model,
        hyper_thread_enabled=kind.hyper_threads,
        turbo_enabled=kind.turbo,
        cat_l3_cbm_mask=kind.cat_mask,
        vendor_id=kind.vendor,
    )


def _cpu_topology(cpus: Sequence[Cpu]) -> CPUTopology:
    return CPUTopology(
        tuple(
            CPUInfo(id=cpu.cpu, core=cpu.core, socket=cpu.socket, node=cpu.node)
            for cpu in sorted(cpus, key=lambda cpu: cpu.cpu)
        )
    )


def _pools(found: Sequence[CPUSharedPool]) -> list[Plain]:
    return [{"socket": pool.socket, "node": pool.node, "cpuset": str(pool.cpus)} for pool in found]


def _cpu_manager(cpus: Sequence[Cpu], kubelet: KubeletSettings | None) -> Plain:
    if kubelet is None:
        return {}
    shown: Plain = {"policy": kubelet.cpu_manager_policy}
    if kubelet.cpu_manager_options:
        shown["options"] = dict(kubelet.cpu_manager_options)
    if kubelet.static:
        reserved = kubelet.reserved_cpus or packed(cpus, -(-kubelet.reserved_milli_cpu // 1000))
        if reserved:
            shown["reservedCPUs"] = str(reserved)
    return shown


def _reservation(reservation: NodeReservation | None, reserved: CpuSet) -> Plain:
    if reservation is None:
        return {}
    shown: Plain = {}
    if reservation.resources:
        shown["resources"] = to_plain(reservation.resources)
    if reserved:
        shown["reservedCPUs"] = str(reserved)
    if reservation.apply_policy:
        shown["applyPolicy"] = reservation.apply_policy
    return shown


def _policy(kubelet: KubeletSettings | None) -> str:
    prefix = "" if kubelet is None else _POLICIES.get(kubelet.topology_policy, "")
    if kubelet is None or not prefix:
        return "None"
    return f"{prefix}{'PodLevel' if kubelet.topology_scope == 'pod' else 'ContainerLevel'}"


# --- zones ---------------------------------------------------------------------------------------


def _zones(
    facts: Facts, allocatable: Mapping[str, int] | None
) -> tuple[tuple[str, tuple[ZoneResource, ...]], ...]:
    """Return (name, resources) of each NUMA node with CPUs or memory, by number.

    allocatable: of the node, not amplified: what it keeps for itself is taken from the zones in
    equal parts. None takes nothing.
    """
    cpus = {
        number: 1000 * sum(cpu.node == number for cpu in facts.cpus)
        for number in sorted({*facts.memory, *(cpu.node for cpu in facts.cpus)})
    }
    memory = {number: _plain_memory(facts, number) for number in cpus}
    kept_cpu, kept_memory = 0, 0
    if allocatable is not None:
        capacity = facts.node.capacity
        kept_cpu = _share(capacity, allocatable, CPU, sum(map(bool, cpus.values())))
        kept_memory = _share(capacity, allocatable, MEMORY, sum(map(bool, memory.values())))
    found = []
    for number, milli_cpu in cpus.items():
        size = memory[number]
        if not milli_cpu and not size:
            continue  # a device that the kernel counts as a NUMA node
        resources = {
            CPU: (Quantity.of_milli(milli_cpu), Quantity.of_milli(max(milli_cpu - kept_cpu, 0))),
            MEMORY: (Quantity.of_bytes(size), Quantity.of_bytes(max(size - kept_memory, 0))),
        }
        for suffix in HUGE_PAGES_BYTES:
            pages = Quantity.of_bytes(_huge_pages(facts, number, suffix))
            resources[f"hugepages-{suffix}"] = (pages, pages)
        found.append(
            (
                f"node-{number}",
                tuple(
                    ZoneResource(name, capacity, allocatable, allocatable)
                    for name, (capacity, allocatable) in sorted(resources.items())
                ),
            )
        )
    return tuple(found)


def _huge_pages(facts: Facts, number: int, suffix: str) -> int:
    known = facts.memory.get(number)
    return known.huge_pages_bytes.get(suffix, 0) if known is not None and facts.huge_pages else 0


def _plain_memory(facts: Facts, number: int) -> int:
    """Return the memory of a NUMA node without its huge pages, if those are reported."""
    known = facts.memory.get(number)
    if known is None:
        return 0
    pages = sum(_huge_pages(facts, number, suffix) for suffix in HUGE_PAGES_BYTES)
    return max(known.total_bytes - pages, 0)


def _share(
    capacity: Mapping[str, int], allocatable: Mapping[str, int], resource: str, zones: int
) -> int:
    """Return what one zone gives up: (capacity - allocatable) / zones, rounded up."""
    has, offers = capacity.get(resource), allocatable.get(resource)
    if has is None or offers is None or not zones:
        return 0
    return -(-max(has - offers, 0) // zones)


# --- the object ----------------------------------------------------------------------------------


def new_object(name: str, node_uid: str) -> Plain:
    """Return the object to create, owned by its Node; `merged` fills it."""
    return {
        "metadata": {
            "name": name,
            "labels": {LABEL_MANAGED_BY: MANAGED_BY_KOORDINATOR},
            "ownerReferences": [owner_of(name, node_uid)],
        },
        "topologyPolicies": ["None"],
        "zones": [],
    }


def owner_of(name: str, node_uid: str) -> Plain:
    """Return the reference with which an object goes when its Node goes."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "name": name,
        "uid": node_uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def merged(stored: Plain, wanted: Topology) -> Plain:
    """Return the stored object with what koordlet wants in it.

    Annotations, labels and resources of zones that others wrote stay; zones that the machine does
    not have go. An annotation that says the same in other words stays as it is.
    """
    metadata = stored.get("metadata") or {}
    annotations = dict(metadata.get("annotations") or {})
    for key, text in wanted.annotations.items():
        if key not in annotations or not _same_json(annotations[key], text):
            annotations[key] = text
    labels = {**(metadata.get("labels") or {}), **wanted.labels}
    return {
        **stored,
        "metadata": {
            **metadata,
            "annotations": annotations,
            **({"labels": labels} if labels else {}),
        },
        "topologyPolicies": list(wanted.policies),
        "zones": _merged_zones(stored.get("zones") or [], wanted),
    }


def _same_json(one: str, other: str) -> bool:
    try:
        return bool(msgspec.json.decode(one) == msgspec.json.decode(other))
    except msgspec.DecodeError:
        return False


def _merged_zones(stored: list[Any], wanted: Topology) -> list[Plain]:
    known = {str(zone.get("name")): zone for zone in stored if isinstance(zone, dict)}
    zones = []
    for name, resources in wanted.zones:
        zone = known.get(name, {})
        ours: dict[str, Plain] = {each.name: to_plain(each) for each in resources}
        # The stored order stays: another order would be a write for nothing.
        both: dict[str, Plain] = {}
        for each in zone.get("resources") or ():
            if isinstance(each, dict):
                key = str(each.get("name"))
                both[key] = ours.get(key, each)
        zones.append(
            {
                **zone,
                "name": name,
                "type": ZONE_TYPE,
                "resources": list({**both, **ours}.values()),
            }
        )
    return zones


class KeptTopology(msgspec.Struct, frozen=True):
    """The topology as `koordlet.reporters.keeping` keeps it."""

    wanted: Topology

    @property
    def problems(self) -> tuple[str, ...]:
        return self.wanted.problems

    @property
    def absent(self) -> bool:
        return False

    def create(self, name: str, node_uid: str) -> Plain:
        return new_object(name, node_uid)

    def merge(self, stored: Plain) -> Plain:
        return merged(stored, self.wanted)
