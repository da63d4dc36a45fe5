"""What pods and nodes say about CPU binding and NUMA placement, and what a scheduler records.

Pods carry `resource-spec` (how CPUs are bound) and `numa-topology-spec` (how NUMA nodes are
aligned) as annotations; a scheduler adds `resource-status` (what the pod got), which
`apis.annotations.parse_resource_status` reads. Nodes carry labels and an annotation with ratios.
docs/facts/scheduler.md, "CPUs and NUMA nodes".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

from msgspec import Meta, field

from apis.annotations import ResourceStatus, annotation_field
from apis.decode import (
    Embedded,
    canonical_json,
    decode_field,
    decode_optional_field,
    field_decoder,
    to_plain,
)
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NUMA_TOPOLOGY_SPEC,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_RESOURCE_SPEC,
    LABEL_CPU_BIND_POLICY,
    LABEL_NUMA_ALLOCATE_STRATEGY,
    LABEL_NUMA_TOPOLOGY_POLICY,
)

E = TypeVar("E", bound=StrEnum)


class CPUBindPolicy(StrEnum):
    """How the CPUs of a pod lie on physical cores. DEFAULT leaves it to the scheduler's
    configuration; CONSTRAINED_BURST binds no CPUs; UNSET says nothing."""

    UNSET = ""
    DEFAULT = "Default"
    FULL_PCPUS = "FullPCPUs"
    SPREAD_BY_PCPUS = "SpreadByPCPUs"
    CONSTRAINED_BURST = "ConstrainedBurst"


class CPUExclusivePolicy(StrEnum):
    """What a pod prefers not to share with pods of the same policy: a core or a NUMA node."""

    NONE = "None"
    PCPU_LEVEL = "PCPULevel"
    NUMA_NODE_LEVEL = "NUMANodeLevel"

    @classmethod
    def _missing_(cls, value: object) -> CPUExclusivePolicy | None:
        return cls.NONE if value == "" else None


class NUMATopologyPolicy(StrEnum):
    """How strictly the resources of a pod are aligned to NUMA nodes."""

    NONE = ""
    BEST_EFFORT = "BestEffort"
    RESTRICTED = "Restricted"
    SINGLE_NUMA_NODE = "SingleNUMANode"


class NUMAExclusive(StrEnum):
    """Whether pods of one NUMA node and pods that span several may share a NUMA node.

    UNSET leaves it to the policy.
    """

    UNSET = ""
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class NodeCPUBindPolicy(StrEnum):
    """How a node binds the CPUs of every pod that requests CPU."""

    NONE = "None"
    FULL_PCPUS_ONLY = "FullPCPUsOnly"
    SPREAD_BY_PCPUS = "SpreadByPCPUs"


class NUMAAllocateStrategy(StrEnum):
    """Which NUMA nodes are filled first. UNSET leaves it to the scheduler's configuration."""

    UNSET = ""
    MOST_ALLOCATED = "MostAllocated"
    LEAST_ALLOCATED = "LeastAllocated"
    DISTRIBUTE_EVENLY = "DistributeEvenly"


# --- annotations of pods -------------------------------------------------------------------------


class ResourceSpec(Embedded, frozen=True):
    """How a pod wants its CPUs bound. A required policy refuses nodes; a preferred one does not."""

    required_cpu_bind_policy: CPUBindPolicy = field(
        name="requiredCPUBindPolicy", default=CPUBindPolicy.UNSET
    )
    preferred_cpu_bind_policy: CPUBindPolicy = field(
        name="preferredCPUBindPolicy", default=CPUBindPolicy.UNSET
    )
    preferred_cpu_exclusive_policy: CPUExclusivePolicy = field(
        name="preferredCPUExclusivePolicy", default=CPUExclusivePolicy.NONE
    )


class NUMATopologySpec(Embedded, frozen=True):
    """How a pod wants its resources aligned to NUMA nodes."""

    numa_topology_policy: NUMATopologyPolicy = field(
        name="numaTopologyPolicy", default=NUMATopologyPolicy.NONE
    )
    single_numa_node_exclusive: NUMAExclusive = field(
        name="singleNUMANodeExclusive", default=NUMAExclusive.UNSET
    )


_decode_resource_spec: Final = field_decoder(ResourceSpec)
_decode_numa_topology_spec: Final = field_decoder(NUMATopologySpec)


def parse_resource_spec(text: str, *, obj: str) -> ResourceSpec:
    """Return how the pod wants its CPUs bound. Raises InputError."""
    where = annotation_field(ANNOTATION_RESOURCE_SPEC)
    spec = decode_optional_field(_decode_resource_spec, text, obj=obj, field=where)
    return spec or ResourceSpec()


def parse_numa_topology_spec(text: str, *, obj: str) -> NUMATopologySpec:
    """Return how the pod wants its resources aligned to NUMA nodes. Raises InputError."""
    where = annotation_field(ANNOTATION_NUMA_TOPOLOGY_SPEC)
    spec = decode_optional_field(_decode_numa_topology_spec, text, obj=obj, field=where)
    return spec or NUMATopologySpec()


def resource_spec_text(spec: ResourceSpec) -> str:
    """Return the annotation that `parse_resource_spec` reads as `spec`."""
    return canonical_json(spec)


def resource_status_text(status: ResourceStatus) -> str:
    """Return the annotation that `apis.annotations.parse_resource_status` reads as `status`.

    `cpuset` is written even when it is empty, `numaNodeResources` only with entries.
    """
    plain: dict[str, object] = {"cpuset": str(status.cpus)}
    if status.numa_node_resources:
        plain["numaNodeResources"] = [
            {"node": entry.node, "resources": to_plain(entry.resources)}
            for entry in status.numa_node_resources
        ]
    return canonical_json(plain)


# --- labels and annotations of nodes -------------------------------------------------------------


def _label(labels: Mapping[str, str], key: str, type_: type[E], default: E, *, obj: str) -> E:
    text = labels.get(key, "")
    if not text:
        return default
    try:
        return type_(text)
    except ValueError:
        choices = ", ".join(member.value for member in type_ if member.value)
        raise InputError(
            obj=obj,
            field=f'metadata.labels["{key}"]',
            value=text,
            problem=f"expected one of {choices}",
        ) from None


def node_cpu_bind_policy(labels: Mapping[str, str], *, obj: str) -> NodeCPUBindPolicy:
    """Return the node's policy for all pods; NONE without the label. Raises InputError."""
    none = NodeCPUBindPolicy.NONE
    return _label(labels, LABEL_CPU_BIND_POLICY, NodeCPUBindPolicy, none, obj=obj)


def numa_allocate_strategy(labels: Mapping[str, str], *, obj: str) -> NUMAAllocateStrategy:
    """Return which NUMA nodes are filled first; UNSET without the label. Raises InputError."""
    unset = NUMAAllocateStrategy.UNSET
    return _label(labels, LABEL_NUMA_ALLOCATE_STRATEGY, NUMAAllocateStrategy, unset, obj=obj)


def node_numa_topology_policy(labels: Mapping[str, str], *, obj: str) -> NUMATopologyPolicy:
    """Return the node's NUMA policy; NONE without the label. Raises InputError."""
    none = NUMATopologyPolicy.NONE
    return _label(labels, LABEL_NUMA_TOPOLOGY_POLICY, NUMATopologyPolicy, none, obj=obj)


Ratio = Annotated[float, Meta(gt=0, le=1000)]
"""The upper bound is the webhook's for the configured ratios."""

_decode_ratios: Final = field_decoder(dict[str, Ratio])


def parse_amplification_ratios(text: str, *, obj: str) -> Mapping[str, int]:
    """Return resource name -> ratio in hundredths, rounded half up. Raises InputError.

    The annotation holds decimals with two digits, as admission writes them.
    """
    where = annotation_field(ANNOTATION_RESOURCE_AMPLIFICATION_RATIO)
    ratios = decode_field(_decode_ratios, text, obj=obj, field=where)
    return MappingProxyType({name: int(ratio * 100 + 0.5) for name, ratio in ratios.items()})
