"""What a pod asks about CPUs and NUMA nodes.

docs/scheduler.md, "NodeNUMAResource", says which pods are bound to CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from apis.errors import InputError
from apis.keys import ANNOTATION_NUMA_TOPOLOGY_SPEC, ANNOTATION_RESOURCE_SPEC
from apis.numa import (
    CPUBindPolicy,
    CPUExclusivePolicy,
    NUMATopologySpec,
    ResourceSpec,
    parse_numa_topology_spec,
    parse_resource_spec,
)
from apis.qos import PriorityClass, QoSClass
from cluster.scheduler.tables.shapes import PodShape

FULL: Final = CPUBindPolicy.FULL_PCPUS
SPREAD: Final = CPUBindPolicy.SPREAD_BY_PCPUS


@dataclass(frozen=True, slots=True)
class CpuDemand:
    """CPUs that a pod is to be bound to.

    count: at least 1. policy: FULL or SPREAD. required: the policy is a condition, not a wish.
    exclusive: what the pod prefers not to share with pods of the same value.
    alone_on_core: the pod must not share a core with another pod of which this is true.
    """

    count: int
    policy: CPUBindPolicy
    required: bool = False
    exclusive: CPUExclusivePolicy = CPUExclusivePolicy.NONE
    alone_on_core: bool = False


@dataclass(frozen=True, slots=True)
class PodSpecs:
    """The annotations of a pod about CPUs and NUMA nodes.

    may_bind: pods of this class may ask to be bound to CPUs (LSE and LSR of priority prod).
    alone_on_core: see CpuDemand; true for LSE pods.
    error: an annotation cannot be used; the defaults stand in its place.
    """

    cpus: ResourceSpec
    numa: NUMATopologySpec
    may_bind: bool
    alone_on_core: bool
    error: InputError | None


def pod_specs(shape: PodShape) -> PodSpecs:
    """Return what the pod asks; for `PodShape.derived`. Errors name the pod as "Pod"."""
    cpus, numa, error = ResourceSpec(), NUMATopologySpec(), None
    try:
        text = shape.annotations.get(ANNOTATION_RESOURCE_SPEC)
        if text:
            cpus = parse_resource_spec(text, obj="Pod")
        text = shape.annotations.get(ANNOTATION_NUMA_TOPOLOGY_SPEC)
        if text:
            numa = parse_numa_topology_spec(text, obj="Pod")
    except InputError as found:
        error = found
    may_bind = (
        shape.qos in (QoSClass.LSE, QoSClass.LSR) and shape.priority_class is PriorityClass.PROD
    )
    return PodSpecs(cpus, numa, may_bind, shape.qos is QoSClass.LSE, error)


def own_bind_policy(
    specs: PodSpecs, milli_cpu: int, default: CPUBindPolicy
) -> tuple[CPUBindPolicy, bool]:
    """Return the bind policy that the pod has by itself, and whether it is required.

    FULL or SPREAD, or UNSET for a pod that is not bound. A required policy counts before a
    preferred one. `Default`, and no preferred policy, stand for `default`. Pods without a cpu
    request, and policies other than FULL and SPREAD, bind nothing.
    """
    if not specs.may_bind or milli_cpu <= 0:
        return CPUBindPolicy.UNSET, False
    required = specs.cpus.required_cpu_bind_policy
    policy = required or specs.cpus.preferred_cpu_bind_policy or CPUBindPolicy.DEFAULT
    if policy is CPUBindPolicy.DEFAULT:
        policy = default
    if policy not in (FULL, SPREAD):
        return CPUBindPolicy.UNSET, False
    return policy, required is not CPUBindPolicy.UNSET
