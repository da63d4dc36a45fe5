"""How each plugin is made: from the arguments of a profile, over tables that all profiles share.

A table that depends on arguments is shared between the profiles whose arguments are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from apis.decode import encode
from apis.numa import CPUBindPolicy
from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.configuration.arguments import (
    DefaultingType,
    FitStrategy,
    NodeResourcesFitArgs,
)
from cluster.scheduler.configuration.koordinator_arguments import (
    AllocationStrategy,
    LoadAwareSchedulingArgs,
    LoadCompat,
    NUMACompat,
    ScoringStrategy,
)
from cluster.scheduler.configuration.points import Point
from cluster.scheduler.configuration.profiles import Profile as ProfileConfiguration
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.between_pods.pod_affinity import (
    InterPodAffinity,
)
from cluster.scheduler.plugins.between_pods.topology_spread import (
    PodTopologySpread,
)
from cluster.scheduler.plugins.contract import (
    Restored,
    Score,
)
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter
from cluster.scheduler.plugins.devices.settings import Settings as DeviceSettings
from cluster.scheduler.plugins.devices.settings import settings_of
from cluster.scheduler.plugins.nodes.declared_features import NodeDeclaredFeatures
from cluster.scheduler.plugins.nodes.image_locality import ImageLocality
from cluster.scheduler.plugins.nodes.node_affinity import NamedNodes, NodeAffinity
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.scheduling_hint import NAME as _HINT
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.plugins.reservations.pre_allocation import PreAllocating
from cluster.scheduler.plugins.reservations.pre_allocation import Settings as PreAllocationSettings
from cluster.scheduler.plugins.reservations.reservation import NAME as _RESERVATION
from cluster.scheduler.plugins.reservations.reservation import Reservation
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.fit_plus import (
    NodeResourcesFitPlus,
    ScarceResourceAvoidance,
    Strategy,
)
from cluster.scheduler.plugins.resources.load_aware import LoadAwareScheduling
from cluster.scheduler.plugins.resources.resource_scores import (
    BalancedAllocation,
    LeastAllocated,
    MostAllocated,
    RequestedToCapacityRatio,
)
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.plugins.volumes.limits import NodeVolumeLimits
from cluster.scheduler.plugins.volumes.restrictions import VolumeRestrictions
from cluster.scheduler.plugins.volumes.zone import VolumeZone
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.load import LoadSettings, LoadTable
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class _NumaNodes:
    """The table of NUMA nodes as a part of the tables. Its facts come from several objects."""

    numa: NumaTable

    def set_node(self, row: int, node: SchedulingNode) -> None:
        """Do nothing: `sources.node_facts` sets the facts."""

    def forget_node(self, row: int) -> None:
        self.numa.forget(row)

    def place(self, booking: Booking, row: int) -> None:
        self.numa.place(booking, row)

    def remove(self, booking: Booking, row: int) -> None:
        self.numa.remove(booking, row)


class SharedTables:
    """The tables that plugins bring, made once for all profiles.

    quotas: None where no profile schedules by quotas. loads: by arguments, as JSON.
    """

    def __init__(
        self, tables: Tables, quotas: QuotaTable | None, gates: Mapping[str, bool]
    ) -> None:
        self._tables = tables
        self._gates = gates
        self.quotas = quotas
        self.loads: dict[bytes, LoadTable] = {}
        self.numa = NumaTable(tables.nodes)
        tables.add_node_part(_NumaNodes(self.numa))
        self.network = NetworkTopology(tables.nodes)
        self.devices = DeviceTable(tables.nodes)
        tables.add_part(self.devices)

    def device_settings(self, of: ProfileConfiguration) -> DeviceSettings:
        """Return what a profile and the gate say about devices."""
        adaption = self._gates.get("DevicePluginAdaption", False)
        return settings_of(
            of.arguments.device_share,
            adaption=adaption,
            follows_hints=_HINT in of.plugins.get(Point.PRE_FILTER, ()),
        )

    def load(self, arguments: LoadAwareSchedulingArgs) -> LoadTable:
        """Return the table of load of these arguments, shared where they mean the same."""
        settings = _load_settings(arguments)
        key = encode(settings)
        table = self.loads.get(key)
        if table is None:
            table = self.loads[key] = LoadTable(self._tables.nodes, settings)
            self._tables.add_node_part(table)
        return table


def _load_settings(arguments: LoadAwareSchedulingArgs) -> LoadSettings:
    aggregated = arguments.aggregated
    filter_window = score_window = None
    if aggregated is not None:
        if aggregated.usage_aggregation_type:
            seconds = int(aggregated.usage_aggregated_duration or 0)
            filter_window = (aggregated.usage_aggregation_type.value, seconds)
        if aggregated.score_aggregation_type:
            seconds = int(aggregated.score_aggregated_duration or 0)
            score_window = (aggregated.score_aggregation_type.value, seconds)
    return LoadSettings(
        factors=arguments.estimated_scaling_factors,
        weights=arguments.resource_weights,
        thresholds=arguments.usage_thresholds,
        prod_thresholds=arguments.prod_usage_thresholds,
        aggregated_thresholds=aggregated.usage_thresholds if aggregated else {},
        filter_window=filter_window,
        score_window=score_window,
        supported=arguments.supported_resources,
        expires_after=float(arguments.node_metric_expiration_seconds),
        prod_includes_system=arguments.prod_usage_include_sys,
        seconds_after_scheduled=float(arguments.estimated_seconds_after_pod_scheduled or 0),
        seconds_after_initialized=float(arguments.estimated_seconds_after_initialized or 0),
        customized=arguments.allow_customize_estimation,
        reservations=LoadCompat.RESERVATIONS_ARE_NO_LOAD not in arguments.compat,
    )


def fit_score(arguments: NodeResourcesFitArgs) -> Score:
    """Return the score of the strategy that a profile names for NodeResourcesFit."""
    strategy = arguments.scoring_strategy
    weights = tuple((each.name, each.weight) for each in strategy.resources)
    if strategy.type is FitStrategy.MOST_ALLOCATED:
        return MostAllocated(weights)
    if strategy.type is FitStrategy.REQUESTED_TO_CAPACITY_RATIO:
        ratio = strategy.requested_to_capacity_ratio
        points = tuple((p.utilization, p.score) for p in ratio.shape) if ratio else ()
        return RequestedToCapacityRatio(points, weights)
    return LeastAllocated(weights)


def _scoring(strategy: ScoringStrategy) -> Scoring:
    return Scoring(
        most_allocated=strategy.type is AllocationStrategy.MOST_ALLOCATED,
        weights={each.name: each.weight for each in strategy.resources},
    )


def _make_node_affinity(shared: SharedTables, of: ProfileConfiguration) -> NodeAffinity:
    names_nodes = "NodeAffinity" in of.plugins.get(Point.PRE_FILTER, ())
    return NodeAffinity(
        of.arguments.node_affinity.added_affinity, NamedNodes() if names_nodes else None
    )


def _make_fit(shared: SharedTables, of: ProfileConfiguration) -> NodeResourcesFit:
    arguments = of.arguments.node_resources_fit
    return NodeResourcesFit(
        ignored=frozenset(arguments.ignored_resources),
        ignored_groups=frozenset(arguments.ignored_resource_groups),
        restored=restored(of),
    )


def restored(of: ProfileConfiguration) -> Restored | None:
    """Return what reservations give back; None in a profile that does not look at them."""
    if _RESERVATION not in of.plugins.get(Point.RESERVE, ()):
        return None
    return Restoring(pre_allocating(of))


def pre_allocating(of: ProfileConfiguration) -> PreAllocating:
    """Return what lets a reservation take over pods that run, as a profile configures it."""
    arguments = of.arguments.reservation.pre_allocation_config
    return PreAllocating(
        PreAllocationSettings(
            cluster=arguments.enable_cluster_mode,
            label=arguments.cluster_label_key,
            priority=arguments.cluster_priority_annotation_key,
            prefer_free=arguments.prefer_no_pre_allocated_pods,
        )
    )


def _make_reservation(shared: SharedTables, of: ProfileConfiguration) -> Reservation:
    arguments = of.arguments.reservation
    return Reservation(
        ignored=frozenset(arguments.ignored_resources),
        ignored_groups=frozenset(arguments.ignored_resource_groups),
    )


def _make_spread(shared: SharedTables, of: ProfileConfiguration) -> PodTopologySpread:
    arguments = of.arguments.pod_topology_spread
    return PodTopologySpread(
        defaults=arguments.constraints,
        system_defaults=arguments.defaulting_type is DefaultingType.SYSTEM,
    )


def _make_affinity(shared: SharedTables, of: ProfileConfiguration) -> InterPodAffinity:
    arguments = of.arguments.inter_pod_affinity
    return InterPodAffinity(
        hard_weight=arguments.hard_pod_affinity_weight,
        ignore_existing=arguments.ignore_preferred_terms_of_existing_pods,
    )


def _make_load_aware(shared: SharedTables, of: ProfileConfiguration) -> LoadAwareScheduling:
    arguments = of.arguments.load_aware_scheduling
    return LoadAwareScheduling(
        shared.load(arguments),
        hold_back_expired=arguments.filter_expired_node_metrics,
        pass_expired=arguments.enable_schedule_when_node_metrics_expired,
        dominant_weight=arguments.dominant_resource_weight,
        score_by_prod=arguments.score_according_prod_usage,
        restored=restored(of),
    )


def _make_numa(shared: SharedTables, of: ProfileConfiguration) -> NodeNUMAResource:
    arguments = of.arguments.node_numa_resource
    others: tuple[DeviceShareAllocator, ...] = ()
    devices = of.arguments.device_share
    shares = "DeviceShare" in of.plugins.get(Point.RESERVE, ())
    if shares and not devices.disable_device_numa_topology_alignment:
        others = (DeviceShareAllocator(shared.devices, shared.device_settings(of), restored(of)),)
    return NodeNUMAResource(
        shared.numa,
        Settings(
            default_bind_policy=CPUBindPolicy(arguments.default_cpu_bind_policy.value),
            scoring=_scoring(arguments.scoring_strategy),
            numa_scoring=_scoring(arguments.numa_scoring_strategy),
            wider_restricted=NUMACompat.RESTRICTED_ACCEPTS_WIDER_SETS in arguments.compat,
            lse_shares_cores=NUMACompat.LSE_PODS_SHARE_CORES in arguments.compat,
            follows_hints=_HINT in of.plugins.get(Point.PRE_FILTER, ()),
        ),
        others,
        restored(of),
    )


def _make_fit_plus(shared: SharedTables, of: ProfileConfiguration) -> NodeResourcesFitPlus:
    return NodeResourcesFitPlus(
        tuple(
            (name, Strategy(each.type is AllocationStrategy.MOST_ALLOCATED, each.weight))
            for name, each in of.arguments.node_resources_fit_plus.resources.items()
        )
    )


MAKERS: Final[Mapping[str, Callable[[SharedTables, ProfileConfiguration], Any]]] = {
    "NodeUnschedulable": lambda shared, of: NodeUnschedulable(),
    "TaintToleration": lambda shared, of: TaintToleration(),
    "NodeAffinity": _make_node_affinity,
    "NodePorts": lambda shared, of: NodePorts(restored(of)),
    "NodeDeclaredFeatures": lambda shared, of: NodeDeclaredFeatures(),
    "Reservation": _make_reservation,
    "NodeResourcesFit": _make_fit,
    "PodTopologySpread": _make_spread,
    "InterPodAffinity": _make_affinity,
    "NodeResourcesBalancedAllocation": lambda shared, of: BalancedAllocation(
        tuple(r.name for r in of.arguments.node_resources_balanced_allocation.resources)
    ),
    "ImageLocality": lambda shared, of: ImageLocality(),
    "VolumeRestrictions": lambda shared, of: VolumeRestrictions(),
    "NodeVolumeLimits": lambda shared, of: NodeVolumeLimits(),
    "VolumeBinding": lambda shared, of: VolumeBinding(),
    "VolumeZone": lambda shared, of: VolumeZone(),
    "LoadAwareScheduling": _make_load_aware,
    "DeviceShare": lambda shared, of: DeviceShareFilter(
        shared.devices, shared.device_settings(of), restored(of)
    ),
    "NodeNUMAResource": _make_numa,
    "NodeResourcesFitPlus": _make_fit_plus,
    _HINT: lambda shared, of: SchedulingHintNodes(of.arguments.scheduling_hint.max_hint_nodes),
    "ScarceResourceAvoidance": lambda shared, of: ScarceResourceAvoidance(
        frozenset(of.arguments.scarce_resource_avoidance.resources)
    ),
}
"""How each plugin is made. Plugins without an entry decide nothing about nodes (PrioritySort,
DefaultBinder, NodeName: a pod that names its node is never scheduled)."""
