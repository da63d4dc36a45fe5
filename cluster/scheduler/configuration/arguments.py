"""Arguments of kube-scheduler's plugins: `pluginConfig[].args` of kind <plugin>Args.

Names, defaults and bounds are kube-scheduler's of version 1.35. An argument that is left out, and a
weight of 0, take the default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from apis.keys import CPU, MEMORY
from apis.scheduling_pod import NodeAffinity, TopologySpreadConstraint
from cluster.scheduler.configuration.strict import Seconds, Section

Percent = Annotated[int, Meta(ge=0, le=100)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NotNegative64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
WeightOrDefault = Annotated[int, Meta(ge=0, le=100)]
"""1 to 100 once it has been read; 0 in a file stands for the default, 1."""


class ResourceSpec(Section, frozen=True):
    """A resource and its share in a score."""

    name: str
    weight: WeightOrDefault = 1


CPU_AND_MEMORY: Final = (ResourceSpec(name=CPU), ResourceSpec(name=MEMORY))


class UtilizationShapePoint(Section, frozen=True):
    """A point of a piecewise linear function: percent of capacity in use -> score."""

    utilization: Percent
    score: Annotated[int, Meta(ge=0, le=10)]


class FitStrategy(StrEnum):
    """How NodeResourcesFit ranks nodes."""

    LEAST_ALLOCATED = "LeastAllocated"
    MOST_ALLOCATED = "MostAllocated"
    REQUESTED_TO_CAPACITY_RATIO = "RequestedToCapacityRatio"


class RequestedToCapacityRatioParam(Section, frozen=True):
    """shape: points in the order of their utilization."""

    shape: tuple[UtilizationShapePoint, ...] = ()


class FitScoringStrategy(Section, frozen=True):
    """requested_to_capacity_ratio: set if, and only if, that is the type."""

    type: FitStrategy
    resources: tuple[ResourceSpec, ...] = CPU_AND_MEMORY
    requested_to_capacity_ratio: RequestedToCapacityRatioParam | None = None


class NodeResourcesFitArgs(Section, frozen=True):
    """ignored_*: extended resources, and prefixes of their names, that the filter passes over."""

    ignored_resources: tuple[str, ...] = ()
    ignored_resource_groups: tuple[str, ...] = ()
    scoring_strategy: FitScoringStrategy = FitScoringStrategy(type=FitStrategy.LEAST_ALLOCATED)


class NodeResourcesBalancedAllocationArgs(Section, frozen=True):
    """resources: those whose shares should be even; all weights are 1."""

    resources: tuple[ResourceSpec, ...] = CPU_AND_MEMORY


class DefaultingType(StrEnum):
    """Where the constraints of pods without any come from."""

    SYSTEM = "System"
    LIST = "List"


class Unsatisfiable(StrEnum):
    """What happens to a pod whose constraint no node satisfies."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class SpreadPolicy(StrEnum):
    """Whether nodes that a pod's affinity or tolerations exclude count as domains."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class DefaultConstraint(Section, frozen=True):
    """A spread constraint of pods that have none. The selector follows from the pod's owner."""

    max_skew: AtLeastOne
    topology_key: str
    when_unsatisfiable: Unsatisfiable
    min_domains: AtLeastOne | None = None
    node_affinity_policy: SpreadPolicy = SpreadPolicy.HONOR
    node_taints_policy: SpreadPolicy = SpreadPolicy.IGNORE


SYSTEM_CONSTRAINTS: Final = (
    TopologySpreadConstraint(
        max_skew=3, topology_key="kubernetes.io/hostname", when_unsatisfiable="ScheduleAnyway"
    ),
    TopologySpreadConstraint(
        max_skew=5, topology_key="topology.kubernetes.io/zone", when_unsatisfiable="ScheduleAnyway"
    ),
)
"""kube-scheduler's constraints of defaultingType System."""


class PodTopologySpreadArgs(Section, frozen=True):
    """default_constraints: of defaultingType List; empty for System."""

    default_constraints: tuple[DefaultConstraint, ...] = ()
    defaulting_type: DefaultingType = DefaultingType.SYSTEM

    @property
    def constraints(self) -> tuple[TopologySpreadConstraint, ...]:
        """The constraints of a pod that has none of its own, without their selector."""
        if self.defaulting_type is DefaultingType.SYSTEM:
            return SYSTEM_CONSTRAINTS
        return tuple(
            TopologySpreadConstraint(
                max_skew=each.max_skew,
                topology_key=each.topology_key,
                when_unsatisfiable=each.when_unsatisfiable.value,
                min_domains=each.min_domains,
                node_affinity_policy=each.node_affinity_policy.value,
                node_taints_policy=each.node_taints_policy.value,
            )
            for each in self.default_constraints
        )


class InterPodAffinityArgs(Section, frozen=True):
    """hard_pod_affinity_weight: of existing pods' required affinity, in the score."""

    hard_pod_affinity_weight: Percent = 1
    ignore_preferred_terms_of_existing_pods: bool = False


class NodeAffinityArgs(Section, frozen=True):
    """added_affinity: holds for every pod of the profile besides the pod's own."""

    added_affinity: NodeAffinity | None = None


class VolumeBindingArgs(Section, frozen=True):
    """bind_timeout_seconds: how long PreBind waits for volumes to be bound."""

    bind_timeout_seconds: NotNegative64 = 600
    shape: tuple[UtilizationShapePoint, ...] = ()


class PreemptionCompat(StrEnum):
    """Upstream's behaviour where the plugin's own differs; docs/compatibility.md."""

    EVICTS_PROTECTED_PODS = "EvictsProtectedPods"


class DefaultPreemptionArgs(Section, frozen=True):
    """How many nodes preemption is tried on: the larger of the two, at most all.

    compat: our own argument.
    """

    min_candidate_nodes_percentage: Percent = 10
    min_candidate_nodes_absolute: NotNegative = 100
    compat: tuple[PreemptionCompat, ...] = ()


class DynamicResourcesArgs(Section, frozen=True):
    """Read, but without effect: dynamic resources are left out."""

    filter_timeout: Seconds = Seconds(10)
    binding_timeout: Seconds = Seconds(600)
