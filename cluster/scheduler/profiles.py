"""From the profiles of the configuration to the plugins that each means, point by point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.configuration.arguments import PreemptionCompat
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.koordinator_arguments import (
    ElasticQuotaArgs,
    GPUSharedResourceTemplatesConfig,
    NUMACompat,
    ReservationArgs,
    ReservationCompat,
)
from cluster.scheduler.configuration.points import Point
from cluster.scheduler.configuration.profiles import Profile as ProfileConfiguration
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.node_search import Arguments as PreemptionArguments
from cluster.scheduler.cycle.permit import COSCHEDULING
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.plugin_makers import (
    MAKERS,
    SharedTables,
    fit_score,
    pre_allocating,
    restored,
)
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
    Score,
    SetScore,
)
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA, ElasticQuotaAdmission
from cluster.scheduler.plugins.quotas.settings import quota_settings
from cluster.scheduler.plugins.reservations.reservation import NAME as _RESERVATION
from cluster.scheduler.plugins.reservations.reservation import Reservation
from cluster.scheduler.plugins.unsupported import Unsupported
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.gang_definitions import GangDefaults
from cluster.scheduler.tables.load import LoadTable
from cluster.scheduler.tables.network_topology import NetworkTopology
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of all profiles, and the tables that they brought."""

    profiles: Mapping[str, Profile]
    loads: tuple[LoadTable, ...]
    expired_load_passes: bool
    """Whether a node may take a pod because its report has expired, in any profile."""
    numa: NumaTable
    pod_level_alone: bool
    """See `parse_numa_facts`; of the first profile with NodeNUMAResource."""
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
    reservations = {
        each.scheduler_name: each.arguments.reservation
        for each in configuration.profiles
        if _RESERVATION in each.plugins.get(Point.RESERVE, ())
    }
    for first in islice(reservations.values(), 1):
        passing = ReservationCompat.PODS_WITHOUT_AFFINITY_PASS_TAINTS in first.compat
        tables.reservations.taints_for_all = not passing
    shared = SharedTables(tables, quotas, configuration.gates)
    profiles = {each.scheduler_name: _profile(shared, each) for each in configuration.profiles}
    return Plugins(
        profiles=profiles,
        loads=tuple(shared.loads.values()),
        expired_load_passes=any(
            each.arguments.load_aware_scheduling.enable_schedule_when_node_metrics_expired
            for each in configuration.profiles
        ),
        numa=shared.numa,
        pod_level_alone=next(
            (
                NUMACompat.ONLY_POD_LEVEL_SINGLE_NUMA_NODE
                in each.arguments.node_numa_resource.compat
                for each in configuration.profiles
                if "NodeNUMAResource" in each.plugins.get(Point.RESERVE, ())
            ),
            False,
        ),
        devices=shared.devices,
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
        network=shared.network,
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
        reservations=reservations,
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
    if Preemption.name not in points:
        return PreemptionArguments(
            reservation.min_candidate_nodes_percentage,
            reservation.min_candidate_nodes_absolute,
            by_reservation,
        )
    return PreemptionArguments(
        default.min_candidate_nodes_percentage,
        default.min_candidate_nodes_absolute,
        by_reservation,
        protects=PreemptionCompat.EVICTS_PROTECTED_PODS not in default.compat,
    )


def _profile(shared: SharedTables, of: ProfileConfiguration) -> Profile:
    """Return a profile's plugins; one that is enabled at several points is made once."""
    filters: list[Filter] = []
    scores: list[tuple[Score, int]] = []
    set_scores: list[tuple[SetScore, int]] = []
    reserves = _RESERVATION in of.plugins.get(Point.RESERVE, ())
    admissions: list[Admission] = [Unsupported(reservations=reserves)]
    allocators: list[Allocator] = []
    explainers: list[Explainer] = []
    made: dict[str, Any] = {}

    def plugin(name: str) -> Any:
        maker = MAKERS.get(name)
        if name not in made and maker is not None:
            made[name] = maker(shared, of)
        return made.get(name)

    preferences: list[Preference] = []
    for name in of.plugins.get(Point.PRE_FILTER, ()):
        if isinstance(each := plugin(name), SchedulingHintNodes):
            admissions.append(each)
            filters.append(each)
            preferences.append(each)
        elif isinstance(each, NodeAffinity) and each.named is not None:
            admissions.append(each.named)
            filters.append(each.named)
    for name in of.plugins.get(Point.FILTER, ()):
        if (each := plugin(name)) is not None:
            filters.append(each)
    for name in of.plugins.get(Point.SCORE, ()):
        each, weight = plugin(name), of.score_weights[name]
        if name == "NodeResourcesFit":
            scores.append((fit_score(of.arguments.node_resources_fit), weight))
        elif isinstance(each, PodTopologySpread):
            set_scores.append((PodTopologySpreadScore(each), weight))
        elif isinstance(each, InterPodAffinity):
            set_scores.append((InterPodAffinityScore(each), weight))
        elif isinstance(each, Reservation):
            set_scores.append((each, weight))
            scores.append((pre_allocating(of), weight))
        elif name == COSCHEDULING:
            if of.arguments.coscheduling.aware_network_topology:
                set_scores.append((NetworkTopologyScore(shared.network), weight))
        elif isinstance(each, DeviceShareFilter):
            settings = shared.device_settings(of)
            scores.append((DeviceShareScore(shared.devices, settings), weight))
        elif each is not None and not isinstance(each, VolumeBinding):
            # VolumeBinding scores with an alpha feature only, whose `shape` is refused.
            scores.append((each, weight))
    for name in of.plugins.get(Point.RESERVE, ()):
        each = plugin(name)
        if isinstance(each, NodeNUMAResource):
            admissions.append(each)
            allocators.append(each)
        elif isinstance(each, DeviceShareFilter):
            settings = shared.device_settings(of)
            allocators.append(DeviceShareAllocator(shared.devices, settings, restored(of)))
        elif isinstance(each, VolumeBinding):
            allocators.append(each)
    # Devices come from the NUMA nodes of the pod, whatever the order in the configuration.
    allocators.sort(key=lambda each: isinstance(each, DeviceShareAllocator))
    if reserves:
        # The reservation is chosen first, by what the others can give through it.
        reservation = replace(plugin(_RESERVATION), others=tuple(allocators))
        admissions.append(reservation)
        allocators.insert(0, reservation)
        pre_allocation = pre_allocating(of)
        admissions.append(pre_allocation)
        filters.append(pre_allocation)
        allocators.append(pre_allocation)
        explainers.append(reservation)
    if ELASTIC_QUOTA in of.plugins.get(Point.PRE_FILTER, ()):
        assert shared.quotas is not None
        arguments = of.arguments.elastic_quota
        # The last: a pod that asks for what no node has is refused with that.
        admissions.append(
            ElasticQuotaAdmission(
                shared.quotas,
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
