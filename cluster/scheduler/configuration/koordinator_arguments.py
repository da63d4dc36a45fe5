"""Arguments of Koordinator's plugins: `pluginConfig[].args` of kind <plugin>Args.

Names and defaults are upstream's; docs/facts/scheduler.md, "Plugin arguments". An argument that is
left out takes the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, field

from apis.keys import (
    ANNOTATION_PRE_ALLOCATABLE_PRIORITY,
    CPU,
    FPGA,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    HUAWEI_NPU_CORE,
    LABEL_IS_PRE_ALLOCATABLE,
    MEMORY,
    RDMA,
)
from apis.quantity import Quantity
from cluster.scheduler.configuration.arguments import (
    CPU_AND_MEMORY,
    AtLeastOne,
    NotNegative,
    NotNegative64,
    Percent,
    ResourceSpec,
)
from cluster.scheduler.configuration.strict import Seconds, Section

Weight = Annotated[int, Meta(ge=1, le=100)]
AtLeastOne64 = Annotated[int, Meta(ge=1, le=2**63 - 1)]


# --- LoadAwareScheduling -------------------------------------------------------------------------

DEFAULT_ESTIMATOR: Final = "defaultEstimator"
DEFAULT_RESOURCE_WEIGHTS: Final[Mapping[str, int]] = {CPU: 1, MEMORY: 1}
DEFAULT_USAGE_THRESHOLDS: Final[Mapping[str, int]] = {CPU: 65, MEMORY: 95}
DEFAULT_SCALING_FACTORS: Final[Mapping[str, int]] = {CPU: 85, MEMORY: 70}


class AggregationType(StrEnum):
    """Which statistic of a node's usage; NONE: the latest average."""

    NONE = ""
    AVG = "avg"
    P50 = "p50"
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"


class AggregatedArgs(Section, frozen=True):
    """Filter and score by percentiles. A duration of None: the longest that the node reports."""

    usage_thresholds: Mapping[str, Percent] = field(default_factory=dict)
    usage_aggregation_type: AggregationType = AggregationType.NONE
    usage_aggregated_duration: Seconds | None = None
    score_aggregation_type: AggregationType = AggregationType.NONE
    score_aggregated_duration: Seconds | None = None


class LoadCompat(StrEnum):
    """Upstream's behaviour where the plugin's own differs; docs/compatibility.md."""

    RESERVATIONS_ARE_NO_LOAD = "ReservationsAreNoLoad"


class LoadAwareSchedulingArgs(Section, frozen=True):
    """Thresholds and factors are percents by resource name. compat: our own argument."""

    filter_expired_node_metrics: bool = True
    node_metric_expiration_seconds: AtLeastOne64 = 180
    enable_schedule_when_node_metrics_expired: bool = False
    resource_weights: Mapping[str, Weight] = field(default_factory=dict)
    dominant_resource_weight: Percent = 0
    usage_thresholds: Mapping[str, Percent] = field(default_factory=dict)
    prod_usage_thresholds: Mapping[str, Percent] = field(default_factory=dict)
    prod_usage_include_sys: bool = False
    score_according_prod_usage: bool = False
    estimator: str = DEFAULT_ESTIMATOR
    estimated_scaling_factors: Mapping[str, Weight] = field(default_factory=dict)
    estimated_seconds_after_pod_scheduled: NotNegative64 | None = None
    estimated_seconds_after_initialized: NotNegative64 | None = None
    allow_customize_estimation: bool = False
    aggregated: AggregatedArgs | None = None
    supported_resources: tuple[str, ...] = ()
    compat: tuple[LoadCompat, ...] = ()


# --- NodeNUMAResource, DeviceShare ---------------------------------------------------------------


class AllocationStrategy(StrEnum):
    """How the plugin ranks nodes by what is allocated."""

    LEAST_ALLOCATED = "LeastAllocated"
    MOST_ALLOCATED = "MostAllocated"


class ScoringStrategy(Section, frozen=True):
    """resources: those of the plugin's default when none are given."""

    type: AllocationStrategy
    resources: tuple[ResourceSpec, ...] = ()


class CPUBindPolicy(StrEnum):
    """How CPUs are chosen for pods that name no policy; NONE: LSE and LSR pods are not bound."""

    NONE = ""
    FULL_PCPUS = "FullPCPUs"
    SPREAD_BY_PCPUS = "SpreadByPCPUs"


_LEAST_CPU_AND_MEMORY: Final = ScoringStrategy(
    type=AllocationStrategy.LEAST_ALLOCATED, resources=CPU_AND_MEMORY
)


class NUMACompat(StrEnum):
    """Upstream's behaviour where the plugin's own differs; docs/compatibility.md."""

    RESTRICTED_ACCEPTS_WIDER_SETS = "RestrictedAcceptsWiderSets"
    LSE_PODS_SHARE_CORES = "LSEPodsShareCores"
    ONLY_POD_LEVEL_SINGLE_NUMA_NODE = "OnlyPodLevelSingleNUMANode"


class NodeNUMAResourceArgs(Section, frozen=True):
    """numa_scoring_strategy: ranks the NUMA nodes of one node. compat: our own argument."""

    default_cpu_bind_policy: CPUBindPolicy = field(
        name="defaultCPUBindPolicy", default=CPUBindPolicy.FULL_PCPUS
    )
    scoring_strategy: ScoringStrategy = _LEAST_CPU_AND_MEMORY
    numa_scoring_strategy: ScoringStrategy = _LEAST_CPU_AND_MEMORY
    compat: tuple[NUMACompat, ...] = ()


DEFAULT_DEVICE_RESOURCES: Final = tuple(
    ResourceSpec(name=name) for name in (GPU_MEMORY_RATIO, GPU_MEMORY, RDMA, FPGA)
)


class GPUSharedResourceTemplatesConfig(Section, frozen=True):
    """The ConfigMap of templates, and the resources whose requests it applies to."""

    config_map_namespace: str = "koordinator-system"
    config_map_name: str = "gpu-shared-resource-templates"
    matched_resources: tuple[str, ...] = (HUAWEI_NPU_CORE,)


class GPUShareUnsupportedModel(Section, frozen=True):
    """A model of GPU that is given to one pod at a time."""

    vendor: str
    model: str


class DeviceShareArgs(Section, frozen=True):
    """allocator: without effect, as upstream."""

    allocator: str = ""
    scoring_strategy: ScoringStrategy = ScoringStrategy(
        type=AllocationStrategy.LEAST_ALLOCATED, resources=DEFAULT_DEVICE_RESOURCES
    )
    disable_device_numa_topology_alignment: bool = field(
        name="disableDeviceNUMATopologyAlignment", default=False
    )
    gpu_shared_resource_templates_config: GPUSharedResourceTemplatesConfig = (
        GPUSharedResourceTemplatesConfig()
    )
    gpu_share_unsupported_models: tuple[GPUShareUnsupportedModel, ...] = ()


# --- Reservation, Coscheduling, ElasticQuota -----------------------------------------------------


class PreAllocationConfig(Section, frozen=True):
    """Reservations that take over what running pods hold."""

    enable_cluster_mode: bool = False
    cluster_label_key: str = LABEL_IS_PRE_ALLOCATABLE
    cluster_priority_annotation_key: str = ANNOTATION_PRE_ALLOCATABLE_PRIORITY
    prefer_no_pre_allocated_pods: bool = False


class ReservationSelectorIndexArgs(Section, frozen=True):
    """Which labels of reservations are indexed."""

    enabled: bool = False
    key_prefixes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class ReservationCompat(StrEnum):
    """Upstream's behaviour where the plugin's own differs; docs/compatibility.md."""

    PODS_WITHOUT_AFFINITY_PASS_TAINTS = "PodsWithoutAffinityPassTaints"
    PENDING_RESERVATIONS_NEVER_EXPIRE = "PendingReservationsNeverExpire"


class ReservationArgs(Section, frozen=True):
    """ignored_*: as NodeResourcesFitArgs, for what is checked against a reservation. compat: our
    own argument."""

    enable_preemption: bool = False
    min_candidate_nodes_percentage: Percent = 10
    min_candidate_nodes_absolute: NotNegative = 100
    controller_workers: AtLeastOne = 1
    gc_duration_seconds: NotNegative64 = 86400
    gc_interval_seconds: NotNegative64 = 60
    disable_garbage_collection: bool = False
    resync_interval_seconds: NotNegative64 = 60
    pre_allocation_config: PreAllocationConfig = PreAllocationConfig()
    ignored_resources: tuple[str, ...] = ()
    ignored_resource_groups: tuple[str, ...] = ()
    reservation_selector_index: ReservationSelectorIndexArgs = ReservationSelectorIndexArgs()
    compat: tuple[ReservationCompat, ...] = ()


class GangMatchPolicy(StrEnum):
    """Which pods of a gang count towards its minimum."""

    ONCE_SATISFIED = "once-satisfied"
    WAITING_AND_RUNNING = "waiting-and-running"
    ONLY_WAITING = "only-waiting"


class CoschedulingArgs(Section, frozen=True):
    """default_timeout: how long the pods of a gang wait for each other."""

    default_timeout: Seconds = Seconds(600)
    controller_workers: AtLeastOne = 1
    skip_check_schedule_cycle: bool = False
    enable_preemption: bool = False
    aware_network_topology: bool = False
    default_match_policy: GangMatchPolicy = GangMatchPolicy.ONCE_SATISFIED


class HookPluginConf(Section, frozen=True):
    """A hook of ElasticQuota, which upstream has as compiled Go code."""

    key: str = ""
    factory_key: str = ""
    factory_args: str = ""


_NO_LIMIT: Final = Quantity.of((2**63 - 1) // 5)
"""Upstream's: a fifth of the largest int64, so that sums of quotas do not overflow."""
NO_LIMIT: Final[Mapping[str, Quantity]] = {CPU: _NO_LIMIT, MEMORY: _NO_LIMIT}


class ElasticQuotaArgs(Section, frozen=True):
    """*_quota_group_max: limits of koordinator-default-quota and koordinator-system-quota."""

    delay_evict_time: Seconds = Seconds(120)
    revoke_pod_interval: Seconds = Seconds(1)
    default_quota_group_max: Mapping[str, Quantity] = field(default_factory=lambda: dict(NO_LIMIT))
    system_quota_group_max: Mapping[str, Quantity] = field(default_factory=lambda: dict(NO_LIMIT))
    quota_group_namespace: str = "koordinator-system"
    monitor_all_quotas: bool = False
    enable_check_parent_quota: bool = False
    enable_runtime_quota: bool = True
    enable_min_quota_scale: bool = True
    disable_default_quota_preemption: bool = True
    enable_queue_hint: bool = False
    quota_snapshot_update_interval: Seconds = Seconds(120)
    hook_plugins: tuple[HookPluginConf, ...] = ()


# --- small plugins -------------------------------------------------------------------------------


class WeightedStrategy(Section, frozen=True):
    """How one resource is scored, and its share."""

    type: AllocationStrategy
    weight: Weight


class NodeResourcesFitPlusArgs(Section, frozen=True):
    """resources: those that are scored if a pod requests them."""

    resources: Mapping[str, WeightedStrategy] = field(default_factory=dict)


class ScarceResourceAvoidanceArgs(Section, frozen=True):
    """resources: those that pods which do not request them should keep away from."""

    resources: tuple[str, ...] = ()


class SchedulingHintArgs(Section, frozen=True):
    """max_hint_nodes: preferred nodes of a hint that are tried."""

    max_hint_nodes: AtLeastOne = 100
