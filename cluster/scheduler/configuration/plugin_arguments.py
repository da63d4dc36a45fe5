"""The arguments of every plugin: of which type, by which rules, and all together for a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from cluster.scheduler.configuration.argument_rules import (
    check_fit_plus,
    check_node_affinity,
    check_preemption,
    check_scarce,
    check_spread,
    check_volume_binding,
    complete_balanced,
    complete_device_share,
    complete_elastic_quota,
    complete_fit,
    complete_load_aware,
    complete_numa,
    complete_reservation,
)
from cluster.scheduler.configuration.arguments import (
    DefaultPreemptionArgs,
    DynamicResourcesArgs,
    InterPodAffinityArgs,
    NodeAffinityArgs,
    NodeResourcesBalancedAllocationArgs,
    NodeResourcesFitArgs,
    PodTopologySpreadArgs,
    VolumeBindingArgs,
)
from cluster.scheduler.configuration.koordinator_arguments import (
    CoschedulingArgs,
    DeviceShareArgs,
    ElasticQuotaArgs,
    LoadAwareSchedulingArgs,
    NodeNUMAResourceArgs,
    NodeResourcesFitPlusArgs,
    ReservationArgs,
    ScarceResourceAvoidanceArgs,
    SchedulingHintArgs,
)
from cluster.scheduler.configuration.strict import Problems, Section


def _as_read(args: Any, problems: Problems) -> Any:
    return args


class Rule(NamedTuple):
    """How the arguments of one plugin are read.

    member: of `Arguments`. complete: fills in dependent defaults and notes problems. idle: JSON
    names of arguments that are read without effect -> why.
    """

    member: str
    type: type[Section]
    complete: Callable[[Any, Problems], Any] = _as_read
    idle: Mapping[str, str] = {}


_WORKERS: Final = "controllers of koord-scheduler need no parallel workers"

ARGUMENTS: Final[Mapping[str, Rule]] = {
    "NodeResourcesFit": Rule("node_resources_fit", NodeResourcesFitArgs, complete_fit),
    "NodeResourcesBalancedAllocation": Rule(
        "node_resources_balanced_allocation", NodeResourcesBalancedAllocationArgs, complete_balanced
    ),
    "PodTopologySpread": Rule("pod_topology_spread", PodTopologySpreadArgs, check_spread),
    "InterPodAffinity": Rule("inter_pod_affinity", InterPodAffinityArgs),
    "NodeAffinity": Rule("node_affinity", NodeAffinityArgs, check_node_affinity),
    "VolumeBinding": Rule("volume_binding", VolumeBindingArgs, check_volume_binding),
    "DefaultPreemption": Rule("default_preemption", DefaultPreemptionArgs, check_preemption),
    "DynamicResources": Rule("dynamic_resources", DynamicResourcesArgs),
    "LoadAwareScheduling": Rule(
        "load_aware_scheduling", LoadAwareSchedulingArgs, complete_load_aware
    ),
    "NodeNUMAResource": Rule("node_numa_resource", NodeNUMAResourceArgs, complete_numa),
    "DeviceShare": Rule(
        "device_share",
        DeviceShareArgs,
        complete_device_share,
        {"allocator": "deprecated upstream; there is one allocator"},
    ),
    "Reservation": Rule(
        "reservation",
        ReservationArgs,
        complete_reservation,
        {
            "controllerWorkers": _WORKERS,
            "reservationSelectorIndex": "owners of all reservations are looked up by their labels",
        },
    ),
    "Coscheduling": Rule(
        "coscheduling",
        CoschedulingArgs,
        idle={
            "controllerWorkers": _WORKERS,
            "skipCheckScheduleCycle": "upstream does not read it either",
        },
    ),
    "ElasticQuota": Rule("elastic_quota", ElasticQuotaArgs, complete_elastic_quota),
    "NodeResourcesFitPlus": Rule(
        "node_resources_fit_plus", NodeResourcesFitPlusArgs, check_fit_plus
    ),
    "ScarceResourceAvoidance": Rule(
        "scarce_resource_avoidance", ScarceResourceAvoidanceArgs, check_scarce
    ),
    "SchedulingHint": Rule("scheduling_hint", SchedulingHintArgs),
}


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of all plugins of a profile, complete, whether the plugin is enabled or not."""

    node_resources_fit: NodeResourcesFitArgs
    node_resources_balanced_allocation: NodeResourcesBalancedAllocationArgs
    pod_topology_spread: PodTopologySpreadArgs
    inter_pod_affinity: InterPodAffinityArgs
    node_affinity: NodeAffinityArgs
    volume_binding: VolumeBindingArgs
    default_preemption: DefaultPreemptionArgs
    dynamic_resources: DynamicResourcesArgs
    load_aware_scheduling: LoadAwareSchedulingArgs
    node_numa_resource: NodeNUMAResourceArgs
    device_share: DeviceShareArgs
    reservation: ReservationArgs
    coscheduling: CoschedulingArgs
    elastic_quota: ElasticQuotaArgs
    node_resources_fit_plus: NodeResourcesFitPlusArgs
    scarce_resource_avoidance: ScarceResourceAvoidanceArgs
    scheduling_hint: SchedulingHintArgs


def arguments(given: Mapping[str, Section]) -> Arguments:
    """Return all arguments: those of the plugins in `given`, complete, and defaults of the others.

    given: plugin name -> arguments.
    """
    members: dict[str, Any] = {
        rule.member: given[name] if name in given else default_arguments(name)
        for name, rule in ARGUMENTS.items()
    }
    return Arguments(**members)


def default_arguments(name: str) -> Any:
    """Return the complete arguments of a plugin that the file gives none."""
    rule = ARGUMENTS[name]
    problems = Problems(name)
    complete = rule.complete(rule.type(), problems)
    assert not problems.errors, problems.errors
    return complete
