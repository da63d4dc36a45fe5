"""From a profile of the configuration to the plugins that it means.

Tables that depend on arguments are shared between the profiles whose arguments are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from apis.decode import encode
from apis.numa import CPUBindPolicy
from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.configuration.arguments import (
    DefaultingType,
    FitStrategy,
    NodeResourcesFitArgs,
)
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.koordinator_arguments import (
    AllocationStrategy,
    ElasticQuotaArgs,
    GPUSharedResourceTemplatesConfig,
    LoadAwareSchedulingArgs,
    NUMACompat,
    ReservationArgs,
    ScoringStrategy,
)
from cluster.scheduler.configuration.points import Point
from cluster.scheduler.configuration.profiles import Profile as ProfileConfiguration
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.permit import COSCHEDULING
from cluster.scheduler.cycle.preemption import Arguments as PreemptionArguments
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.between_pods.near_pods import NetworkTopologyScore
from cluster.scheduler.plugins.between_pods.pod_affinity import (
    InterPodAffinity,
    InterPodAffinityScore,
)
from cluster.scheduler.plugins.between_pods.topology_spread import (
    PodTopologySpread,
    PodTopologySpreadScore,
)
from cluster.scheduler.plugins.contract import (
    Admission,
    Allocator,
    Explainer,
    Filter,
    Preference,
    Restored,
    Score,
    SetScore,
)
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.devices.settings import Settings as DeviceSettings
from cluster.scheduler.plugins.devices.settings import settings_of
from cluster.scheduler.plugins.nodes.image_locality import ImageLocality
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.scheduling_hint import NAME as _HINT
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA, ElasticQuotaAdmission
from cluster.scheduler.plugins.quotas.settings import quota_settings
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
from cluster.scheduler.plugins.unsupported import Unsupported
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.plugins.volumes.limits import NodeVolumeLimits
from cluster.scheduler.plugins.volumes.restrictions import VolumeRestrictions
from cluster.scheduler.plugins.volumes.zone import VolumeZone
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.gang_definitions import GangDefaults
from cluster.scheduler.tables.load import LoadSettings, LoadTable
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of all profiles, and the tables that they brought."""

    profiles: Mapping[str, Profile]
    loads: tuple[LoadTable, ...]
    numa: NumaTable
    devices: DeviceTable
    templates: GPUSharedResourceTemplatesConfig | None
    """Which ConfigMap has the templates of shared GPUs: of the first profile with DeviceShare."""
    volume_timeouts: Mapping[str, float]
    """How long the claims of a pod may take to be bound, in seconds, by scheduler name."""
    network: NetworkTopology
    gangs: Mapping[str, GangDefaults]
    """Of the profiles that schedule gangs, by scheduler name."""
    quotas: QuotaTable | None
    """The table of quotas, if a profile schedules by them."""
    quota_preemption: Mapping[str, bool]
    """Of the profiles where pods of a quota preempt each other, by scheduler name: whether those of
    the default quota do so too."""
    quota_arguments: ElasticQuotaArgs | None
    """Of the first profile that schedules by quotas: they set how quotas count for all."""
    quota_admissions: Mapping[str, ElasticQuotaAdmission]
    """Of the profiles that schedule by quotas, by scheduler name."""
    reservations: Mapping[str, ReservationArgs]
    """Of the profiles that schedule reservations, by scheduler name."""
    preemption: Mapping[str, PreemptionArguments]
    """Of the profiles that preempt, by scheduler name."""
    gang_preemption: frozenset[str]
    """Scheduler names of the profiles in which a gang makes room for all of its pods at once."""


def make_plugins(configuration: SchedulerConfiguration, tables: Tables) -> Plugins:
    """Build every profile's plugins over one set of tables."""
    quota_arguments = _quota_arguments(configuration)
    quotas = None
    if quota_arguments is not None:
        quotas = QuotaTable(quota_settings(quota_arguments, configuration.gates))
        tables.add_booking_part(quotas)
        tables.add_node_part(_QuotaNodes(quotas))
    if configuration.gates.get("OmitNodeLabelsForReservation", False):
        tables.reservations.omit_node_labels()
    making = _Making(tables, quotas, configuration.gates)
    profiles = {each.scheduler_name: making.profile(each) for each in configuration.profiles}
    return Plugins(
        profiles=profiles,
        loads=tuple(making.loads.values()),
        numa=making.numa,
        devices=making.devices,
        templates=next(
            (
                each.arguments.device_share.gpu_shared_resource_templates_config
                for each in configuration.profiles
                if "DeviceShare" in each.plugins.get(Point.FILTER, ())
            ),
            None,
        ),
        volume_timeouts={
            each.scheduler_name: float(each.arguments.volume_binding.bind_timeout_seconds)
            for each in configuration.profiles
        },
        network=making.network,
        gangs={
            each.scheduler_name: GangDefaults(
                wait_s=float(each.arguments.coscheduling.default_timeout),
                match_policy=each.arguments.coscheduling.default_match_policy,
                gathers=each.arguments.coscheduling.aware_network_topology,
            )
            for each in configuration.profiles
            if COSCHEDULING in each.plugins.get(Point.PERMIT, ())
        },
        quotas=quotas,
        quota_arguments=quota_arguments,
        quota_preemption={
            each.scheduler_name: not each.arguments.elastic_quota.disable_default_quota_preemption
            for each in configuration.profiles
            if ELASTIC_QUOTA in each.plugins.get(Point.POST_FILTER, ())
            and ELASTIC_QUOTA in each.plugins.get(Point.PRE_FILTER, ())
        },
        quota_admissions={
            name: admission
            for name, profile in profiles.items()
            for admission in profile.admissions
            if isinstance(admission, ElasticQuotaAdmission)
        },
        reservations={
            each.scheduler_name: each.arguments.reservation
            for each in configuration.profiles
            if _RESERVATION in each.plugins.get(Point.RESERVE, ())
        },
        preemption={
            each.scheduler_name: arguments
            for each in configuration.profiles
            if (arguments := _preemption_of(each)) is not None
        },
        gang_preemption=frozenset(
            each.scheduler_name for each in configuration.profiles if _preempts_for_gangs(each)
        ),
    )


def _quota_arguments(configuration: SchedulerConfiguration) -> ElasticQuotaArgs | None:
    for each in configuration.profiles:
        if ELASTIC_QUOTA in each.plugins.get(Point.PRE_FILTER, ()):
            return each.arguments.elastic_quota
    return None


@dataclass(frozen=True, slots=True)
class _QuotaNodes:
    """The table of quotas as a part of the tables that follows nodes; bookings reach it without
    their nodes."""

    quotas: QuotaTable

    def set_node(self, row: int, node: SchedulingNode) -> None:
        self.quotas.set_node(row, node)

    def forget_node(self, row: int) -> None:
        self.quotas.forget_node(row)

    def place(self, booking: Booking, row: int) -> None:
        """Do nothing: the table follows all bookings."""

    def remove(self, booking: Booking, row: int) -> None:
        """Do nothing: the table follows all bookings."""


def _preempts_for_gangs(profile: ProfileConfiguration) -> bool:
    points = profile.plugins.get(Point.POST_FILTER, ())
    return COSCHEDULING in points and profile.arguments.coscheduling.enable_preemption


def _preemption_of(profile: ProfileConfiguration) -> PreemptionArguments | None:
    """Return the arguments of a profile's preemption; None without any.

    Reservation with `enablePreemption` preempts too, for pods and for Reservations, and so does
    Coscheduling with `enablePreemption`, for pods without a gang. Where DefaultPreemption is
    enabled, its arguments say how many nodes are tried.
    """
    points = profile.plugins.get(Point.POST_FILTER, ())
    default, reservation = profile.arguments.default_preemption, profile.arguments.reservation
    by_reservation = _RESERVATION in points and reservation.enable_preemption
    if Preemption.name not in points and not by_reservation and not _preempts_for_gangs(profile):
        return None
    of = default if Preemption.name in points else reservation
    return PreemptionArguments(
        of.min_candidate_nodes_percentage, of.min_candidate_nodes_absolute, by_reservation
    )


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


class _Making:
    """Plugins by name, made when a profile first asks for them."""

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

    def profile(self, of: ProfileConfiguration) -> Profile:
        filters: list[Filter] = []
        scores: list[tuple[Score, int]] = []
        set_scores: list[tuple[SetScore, int]] = []
        reserves = _RESERVATION in of.plugins.get(Point.RESERVE, ())
        admissions: list[Admission] = [Unsupported(reservations=reserves)]
        allocators: list[Allocator] = []
        explainers: list[Explainer] = []
        made: dict[str, Any] = {}

        def plugin(name: str) -> Any:
            maker = _MAKERS.get(name)
            if name not in made and maker is not None:
                made[name] = maker(self, of)
            return made.get(name)

        preferences: list[Preference] = []
        for name in of.plugins.get(Point.PRE_FILTER, ()):
            if isinstance(each := plugin(name), SchedulingHintNodes):
                admissions.append(each)
                filters.append(each)
                preferences.append(each)
        for name in of.plugins.get(Point.FILTER, ()):
            if (each := plugin(name)) is not None:
                filters.append(each)
        for name in of.plugins.get(Point.SCORE, ()):
            each, weight = plugin(name), of.score_weights[name]
            if name == "NodeResourcesFit":
                scores.append((_fit_score(of.arguments.node_resources_fit), weight))
            elif isinstance(each, PodTopologySpread):
                set_scores.append((PodTopologySpreadScore(each), weight))
            elif isinstance(each, InterPodAffinity):
                set_scores.append((InterPodAffinityScore(each), weight))
            elif isinstance(each, Reservation):
                set_scores.append((each, weight))
            elif name == COSCHEDULING:
                if of.arguments.coscheduling.aware_network_topology:
                    set_scores.append((NetworkTopologyScore(self.network), weight))
            elif isinstance(each, DeviceShareFilter):
                settings = self.device_settings(of)
                scores.append((DeviceShareScore(self.devices, settings), weight))
            elif each is not None and not isinstance(each, VolumeBinding):
                # VolumeBinding scores with an alpha feature only, whose `shape` is refused.
                scores.append((each, weight))
        for name in of.plugins.get(Point.RESERVE, ()):
            each = plugin(name)
            if isinstance(each, NodeNUMAResource):
                admissions.append(each)
                allocators.append(each)
            elif isinstance(each, DeviceShareFilter):
                settings = self.device_settings(of)
                allocators.append(DeviceShareAllocator(self.devices, settings, _restored(of)))
            elif isinstance(each, VolumeBinding):
                allocators.append(each)
        # Devices come from the NUMA nodes of the pod, whatever the order in the configuration.
        allocators.sort(key=lambda each: isinstance(each, DeviceShareAllocator))
        if reserves:
            # The reservation is chosen first, by what the others can give through it.
            reservation = replace(plugin(_RESERVATION), others=tuple(allocators))
            admissions.append(reservation)
            allocators.insert(0, reservation)
            pre_allocating = _pre_allocating(of)
            admissions.append(pre_allocating)
            filters.append(pre_allocating)
            allocators.append(pre_allocating)
            explainers.append(reservation)
        if self.quotas is not None and ELASTIC_QUOTA in of.plugins.get(Point.PRE_FILTER, ()):
            arguments = of.arguments.elastic_quota
            # The last: a pod that asks for what no node has is refused with that.
            admissions.append(
                ElasticQuotaAdmission(
                    self.quotas,
                    runtime=arguments.enable_runtime_quota,
                    parents=arguments.enable_check_parent_quota,
                )
            )
        return Profile(
            scheduler_name=of.scheduler_name,
            admissions=tuple(admissions),
            filters=tuple(filters),
            scores=tuple(scores),
            set_scores=tuple(set_scores),
            allocators=tuple(allocators),
            preferences=tuple(preferences),
            explainers=tuple(explainers),
        )

    def device_settings(self, of: ProfileConfiguration) -> DeviceSettings:
        """Return what a profile and the gate say about devices."""
        adaption = self._gates.get("DevicePluginAdaption", False)
        return settings_of(of.arguments.device_share, adaption=adaption)

    def load(self, arguments: LoadAwareSchedulingArgs) -> LoadTable:
        """Return the table of load of these arguments, shared between equal ones."""
        key = encode(arguments)
        table = self.loads.get(key)
        if table is None:
            table = self.loads[key] = LoadTable(self._tables.nodes, _load_settings(arguments))
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
    )


def _fit_score(arguments: NodeResourcesFitArgs) -> Score:
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


def _make_fit(making: _Making, of: ProfileConfiguration) -> NodeResourcesFit:
    arguments = of.arguments.node_resources_fit
    return NodeResourcesFit(
        ignored=frozenset(arguments.ignored_resources),
        ignored_groups=frozenset(arguments.ignored_resource_groups),
        restored=_restored(of),
    )


def _restored(of: ProfileConfiguration) -> Restored | None:
    """Return what reservations give back; None in a profile that does not look at them."""
    if _RESERVATION not in of.plugins.get(Point.RESERVE, ()):
        return None
    return Restoring(_pre_allocating(of))


def _pre_allocating(of: ProfileConfiguration) -> PreAllocating:
    arguments = of.arguments.reservation.pre_allocation_config
    return PreAllocating(
        PreAllocationSettings(
            cluster=arguments.enable_cluster_mode,
            label=arguments.cluster_label_key,
            priority=arguments.cluster_priority_annotation_key,
            prefer_free=arguments.prefer_no_pre_allocated_pods,
        )
    )


def _make_reservation(making: _Making, of: ProfileConfiguration) -> Reservation:
    arguments = of.arguments.reservation
    return Reservation(
        ignored=frozenset(arguments.ignored_resources),
        ignored_groups=frozenset(arguments.ignored_resource_groups),
    )


def _make_spread(making: _Making, of: ProfileConfiguration) -> PodTopologySpread:
    arguments = of.arguments.pod_topology_spread
    return PodTopologySpread(
        defaults=arguments.constraints,
        system_defaults=arguments.defaulting_type is DefaultingType.SYSTEM,
    )


def _make_affinity(making: _Making, of: ProfileConfiguration) -> InterPodAffinity:
    arguments = of.arguments.inter_pod_affinity
    return InterPodAffinity(
        hard_weight=arguments.hard_pod_affinity_weight,
        ignore_existing=arguments.ignore_preferred_terms_of_existing_pods,
    )


def _make_load_aware(making: _Making, of: ProfileConfiguration) -> LoadAwareScheduling:
    arguments = of.arguments.load_aware_scheduling
    return LoadAwareScheduling(
        making.load(arguments),
        hold_back_expired=arguments.filter_expired_node_metrics,
        pass_expired=arguments.enable_schedule_when_node_metrics_expired,
        dominant_weight=arguments.dominant_resource_weight,
        score_by_prod=arguments.score_according_prod_usage,
    )


def _make_numa(making: _Making, of: ProfileConfiguration) -> NodeNUMAResource:
    arguments = of.arguments.node_numa_resource
    others: tuple[DeviceShareAllocator, ...] = ()
    devices = of.arguments.device_share
    shares = "DeviceShare" in of.plugins.get(Point.RESERVE, ())
    if shares and not devices.disable_device_numa_topology_alignment:
        others = (DeviceShareAllocator(making.devices, making.device_settings(of), _restored(of)),)
    return NodeNUMAResource(
        making.numa,
        Settings(
            default_bind_policy=CPUBindPolicy(arguments.default_cpu_bind_policy.value),
            scoring=_scoring(arguments.scoring_strategy),
            numa_scoring=_scoring(arguments.numa_scoring_strategy),
            wider_restricted=NUMACompat.RESTRICTED_ACCEPTS_WIDER_SETS in arguments.compat,
            lse_shares_cores=NUMACompat.LSE_PODS_SHARE_CORES in arguments.compat,
            follows_hints=_HINT in of.plugins.get(Point.PRE_FILTER, ()),
        ),
        others,
        _restored(of),
    )


def _make_fit_plus(making: _Making, of: ProfileConfiguration) -> NodeResourcesFitPlus:
    return NodeResourcesFitPlus(
        tuple(
            (name, Strategy(each.type is AllocationStrategy.MOST_ALLOCATED, each.weight))
            for name, each in of.arguments.node_resources_fit_plus.resources.items()
        )
    )


_MAKERS: Final[Mapping[str, Callable[[_Making, ProfileConfiguration], Any]]] = {
    "NodeUnschedulable": lambda making, of: NodeUnschedulable(),
    "TaintToleration": lambda making, of: TaintToleration(),
    "NodeAffinity": lambda making, of: NodeAffinity(of.arguments.node_affinity.added_affinity),
    "NodePorts": lambda making, of: NodePorts(_restored(of)),
    "Reservation": _make_reservation,
    "NodeResourcesFit": _make_fit,
    "PodTopologySpread": _make_spread,
    "InterPodAffinity": _make_affinity,
    "NodeResourcesBalancedAllocation": lambda making, of: BalancedAllocation(
        tuple(r.name for r in of.arguments.node_resources_balanced_allocation.resources)
    ),
    "ImageLocality": lambda making, of: ImageLocality(),
    "VolumeRestrictions": lambda making, of: VolumeRestrictions(),
    "NodeVolumeLimits": lambda making, of: NodeVolumeLimits(),
    "VolumeBinding": lambda making, of: VolumeBinding(),
    "VolumeZone": lambda making, of: VolumeZone(),
    "LoadAwareScheduling": _make_load_aware,
    "DeviceShare": lambda making, of: DeviceShareFilter(
        making.devices, making.device_settings(of), _restored(of)
    ),
    "NodeNUMAResource": _make_numa,
    "NodeResourcesFitPlus": _make_fit_plus,
    _HINT: lambda making, of: SchedulingHintNodes(of.arguments.scheduling_hint.max_hint_nodes),
    "ScarceResourceAvoidance": lambda making, of: ScarceResourceAvoidance(
        frozenset(of.arguments.scarce_resource_avoidance.resources)
    ),
}
"""How each plugin is made. Plugins without an entry decide nothing about nodes (PrioritySort,
DefaultBinder, NodeName: a pod that names its node is never scheduled)."""
