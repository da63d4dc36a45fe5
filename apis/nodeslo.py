"""NodeSLO: what a node does for the resources of its pods.

Field types double as the CRD's schema and docstrings as its descriptions (`apis.crd`), so reader,
schema and `kubectl explain` stay one truth. `apis.effective_nodeslo` fills in the defaults.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import AnyObject, Int32, Int64
from apis.qos import PriorityClass, QoSClass
from apis.quantity import ZERO, Quantity, parse_quantity

_INT64: Final = {"format": "int64"}
# The CRD leaves these free; the node refuses values that no kernel file takes.
_NODE_ONLY: Final = {"node_only": True}
_FREE_TEXT: Final = Meta(extra=_NODE_ONLY)

Percent = Annotated[int, Meta(ge=0, le=100, extra_json_schema=_INT64)]
NonNegative = Annotated[int, Meta(ge=0, le=2**63 - 1, extra_json_schema=_INT64)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1, extra_json_schema=_INT64)]
NodePercent = Annotated[int, Meta(ge=0, le=100, extra_json_schema=_INT64, extra=_NODE_ONLY)]
NodeSwitch = Annotated[int, Meta(ge=0, le=1, extra_json_schema=_INT64, extra=_NODE_ONLY)]


class _Choice(StrEnum):
    """The empty text means the first member, which is the default, as upstream reads it."""

    @classmethod
    def _missing_(cls, value: object) -> _Choice | None:
        return next(iter(cls)) if value == "" else None


# --- thresholds --------------------------------------------------------------------------------


class CPUSuppressPolicy(_Choice):
    """By what best-effort CPU is held down."""

    CPUSET = "cpuset"
    CFS_QUOTA = "cfsQuota"


class CPUEvictPolicy(_Choice):
    """Against what the CPU satisfaction of best-effort pods is measured."""

    BY_REAL_LIMIT = "evictByRealLimit"
    BY_ALLOCATABLE = "evictByAllocatable"


class ResourceThresholdStrategy(Wire, frozen=True):
    """Suppression of best-effort CPU, and eviction. Percents are of what the node has.

    enable: Switches all of this block on.
    cpu_suppress_threshold_percent: CPU use of the node above which best-effort pods get less CPU.
    cpu_suppress_min_percent: Share of the node's CPU that suppression leaves to best-effort pods.
    cpu_suppress_policy: By what best-effort CPU is held down: cpuset (fewer CPUs) or cfsQuota.
    memory_evict_threshold_percent: Memory use of the node at which eviction starts.
    memory_evict_lower_percent: Memory use at which eviction stops; the threshold less 2 if not set.
    memory_allocatable_evict_threshold_percent: Requested memory, in percent of what is allocatable,
        at which eviction starts.
    memory_allocatable_evict_lower_percent: Requested memory, in percent of what is allocatable, at
        which eviction stops.
    cpu_evict_be_satisfaction_upper_percent: CPU that best-effort pods can get, in percent of what
        they request, at which eviction stops.
    cpu_evict_be_satisfaction_lower_percent: CPU that best-effort pods can get, in percent of what
        they request, below which eviction starts.
    cpu_evict_be_usage_threshold_percent: CPU that best-effort pods use, in percent of what they can
        get, that is needed besides for eviction to start.
    cpu_evict_time_window_seconds: Seconds over which CPU use is averaged for eviction.
    cpu_evict_threshold_percent: CPU use of the node at which eviction by CPU use starts.
    cpu_evict_lower_percent: CPU use at which that eviction stops; the threshold less 2 if not set.
    cpu_allocatable_evict_threshold_percent: Requested CPU, in percent of what is allocatable, at
        which eviction starts.
    cpu_allocatable_evict_lower_percent: Requested CPU, in percent of what is allocatable, at which
        eviction stops.
    cpu_evict_policy: What the CPU of best-effort pods is compared with: evictByRealLimit (what
        suppression leaves them) or evictByAllocatable.
    evict_enabled_priority_threshold: Highest pod priority that eviction by use may end.
    allocatable_evict_priority_threshold: Highest pod priority that eviction by requests may end.
    """

    enable: bool = False
    cpu_suppress_threshold_percent: Percent = 65
    cpu_suppress_min_percent: Percent | None = None
    cpu_suppress_policy: Annotated[CPUSuppressPolicy, _FREE_TEXT] = CPUSuppressPolicy.CPUSET
    memory_evict_threshold_percent: Percent = 70
    memory_evict_lower_percent: Percent | None = None
    memory_allocatable_evict_threshold_percent: NonNegative | None = None
    memory_allocatable_evict_lower_percent: NonNegative | None = None
    cpu_evict_be_satisfaction_upper_percent: NodePercent | None = field(
        name="cpuEvictBESatisfactionUpperPercent", default=None
    )
    cpu_evict_be_satisfaction_lower_percent: NodePercent | None = field(
        name="cpuEvictBESatisfactionLowerPercent", default=None
    )
    cpu_evict_be_usage_threshold_percent: NodePercent | None = field(
        name="cpuEvictBEUsageThresholdPercent", default=None
    )
    cpu_evict_time_window_seconds: Int64 | None = None
    cpu_evict_threshold_percent: Percent | None = None
    cpu_evict_lower_percent: Percent | None = None
    cpu_allocatable_evict_threshold_percent: NonNegative | None = None
    cpu_allocatable_evict_lower_percent: NonNegative | None = None
    cpu_evict_policy: Annotated[CPUEvictPolicy, _FREE_TEXT] = CPUEvictPolicy.BY_REAL_LIMIT
    evict_enabled_priority_threshold: Int32 | None = None
    allocatable_evict_priority_threshold: Int32 | None = None


# --- QoS of a class ----------------------------------------------------------------------------


class CPUPolicy(_Choice):
    """Which kernel mechanism carries CPU QoS."""

    GROUP_IDENTITY = "groupIdentity"
    CORE_SCHED = "coreSched"


class NetQOSPolicy(_Choice):
    """Which mechanism carries network QoS."""

    TC = "tc"
    TERWAY_QOS = "terway-qos"


class QOSPolicies(Wire, frozen=True):
    """Which mechanism carries each kind of QoS.

    cpu_policy: groupIdentity (cpu.bvt_warp_ns) or coreSched (core scheduling and cpu.idle).
    net_qos_policy: tc or terway-qos.
    """

    cpu_policy: Annotated[CPUPolicy, _FREE_TEXT] = CPUPolicy.GROUP_IDENTITY
    net_qos_policy: Annotated[NetQOSPolicy, _FREE_TEXT] = field(
        name="netQOSPolicy", default=NetQOSPolicy.TC
    )


class CPUQOS(Wire, frozen=True):
    """CPU QoS of the pods of a class.

    enable: Switches CPU QoS of the class on.
    group_identity: Value of cpu.bvt_warp_ns, from -1 (yields) to 2 (preempts). Used with the policy
        groupIdentity.
    sched_idle: 1 makes the pods' groups idle (cpu.idle). Used with the policy coreSched.
    core_expeller: Gives pods of the class core-scheduling groups of their own, so that idle tasks
        leave the sibling threads. Used with the policy coreSched.

    The defaults here are the values that undo CPU QoS.
    """

    enable: bool = False
    group_identity: Annotated[
        int, Meta(ge=-1, le=2, extra_json_schema=_INT64, extra=_NODE_ONLY)
    ] = 0
    sched_idle: NodeSwitch = 0
    core_expeller: bool = False


class MemoryQOS(Wire, frozen=True):
    """Memory QoS of the pods of a class.

    enable: Switches memory QoS of the class on.
    min_limit_percent: memory.min in percent of the memory request; 0 leaves it alone.
    low_limit_percent: memory.low in percent of the memory request; 0 leaves it alone.
    throttling_percent: memory.high, as the percentage of the way from request to limit (of a
        container without a limit: to the node's allocatable memory); 0 leaves it alone.
    wmark_ratio: memory.wmark_ratio: memory use, in percent of the limit, at which asynchronous
        reclaim starts; 0 is off. Anolis kernels only.
    wmark_scale_permill: memory.wmark_scale_factor: how far asynchronous reclaim goes, in 1/1000 of
        the limit. Anolis kernels only.
    wmark_min_adj: memory.wmark_min_adj: shifts the global watermark for these pods, in percent;
        negative values protect them from direct reclaim. Anolis kernels only.
    priority_enable: 1 lets the kernel choose OOM victims by priority. Anolis kernels only.
    priority: Priority when OOM victims are chosen; groups with a lower one end first. Anolis
        kernels only.
    oom_kill_group: memory.oom.group: 1 ends all processes of a container together.
    page_cache_enable: Limits the page cache of the containers. Anolis kernels only.
    page_cache_limit_percent: Limit of the page cache in percent of the memory limit; 0 is off.
    page_cache_limit_size: Limit of the page cache in bytes, before the percentage; 0 is off.
    page_cache_reclaim_sync: Reclaims page cache synchronously when true, in the background when
        false.

    The defaults here are the values that undo memory QoS.
    """

    enable: bool = False
    min_limit_percent: NonNegative = 0
    low_limit_percent: NonNegative = 0
    throttling_percent: NonNegative = 0
    wmark_ratio: Percent = 0
    wmark_scale_permill: Annotated[int, Meta(ge=1, le=1000, extra_json_schema=_INT64)] = 50
    wmark_min_adj: Annotated[int, Meta(ge=-25, le=50, extra_json_schema=_INT64)] = 0
    priority_enable: NodeSwitch = 0
    priority: Annotated[int, Meta(ge=0, le=12, extra_json_schema=_INT64, extra=_NODE_ONLY)] = 0
    oom_kill_group: NodeSwitch = 0
    page_cache_enable: bool | None = None
    page_cache_limit_percent: Percent | None = None
    page_cache_limit_size: (
        Annotated[int, Meta(ge=0, le=2**63 - 1, extra_json_schema=_INT64, extra=_NODE_ONLY)] | None
    ) = None
    page_cache_reclaim_sync: bool | None = None


class BlockType(StrEnum):
    DEVICE = "device"
    VOLUME_GROUP = "volumegroup"
    POD_VOLUME = "podvolume"


class IOCfg(Wire, frozen=True):
    """Limits and cost model of one block device.

    read_iops: Reads per second at most; 0 means no limit.
    write_iops: Writes per second at most; 0 means no limit.
    read_bps: Bytes read per second at most; 0 means no limit.
    write_bps: Bytes written per second at most; 0 means no limit.
    io_weight_percent: Share of the device among groups, from 1 to 100; 100 if not set.
    read_latency_us: Latency target of reads in microseconds. For whole devices.
    write_latency_us: Latency target of writes in microseconds. For whole devices.
    read_latency_percent: Percentile of reads that must meet the latency target.
    write_latency_percent: Percentile of writes that must meet the latency target.
    enable_user_model: Uses the cost model below instead of the kernel's own.
    model_read_bps: Bytes per second that the device reads in sequence.
    model_write_bps: Bytes per second that the device writes in sequence.
    model_read_seq_iops: Sequential reads of 4 KiB per second.
    model_write_seq_iops: Sequential writes of 4 KiB per second.
    model_read_rand_iops: Random reads of 4 KiB per second.
    model_write_rand_iops: Random writes of 4 KiB per second.
    """

    read_iops: NonNegative | None = field(name="readIOPS", default=None)
    write_iops: NonNegative | None = field(name="writeIOPS", default=None)
    read_bps: NonNegative | None = field(name="readBPS", default=None)
    write_bps: NonNegative | None = field(name="writeBPS", default=None)
    io_weight_percent: Annotated[int, Meta(ge=1, le=100, extra_json_schema=_INT64)] | None = field(
        name="ioWeightPercent", default=None
    )
    read_latency_us: Int64 | None = field(name="readLatency", default=None)
    write_latency_us: Int64 | None = field(name="writeLatency", default=None)
    read_latency_percent: Percent | None = None
    write_latency_percent: Percent | None = None
    enable_user_model: bool | None = None
    model_read_bps: Positive | None = field(name="modelReadBPS", default=None)
    model_write_bps: Positive | None = field(name="modelWriteBPS", default=None)
    model_read_seq_iops: Positive | None = field(name="modelReadSeqIOPS", default=None)
    model_write_seq_iops: Positive | None = field(name="modelWriteSeqIOPS", default=None)
    model_read_rand_iops: Positive | None = field(name="modelReadRandIOPS", default=None)
    model_write_rand_iops: Positive | None = field(name="modelWriteRandIOPS", default=None)


class BlockCfg(Wire, frozen=True):
    """Settings of one block device.

    name: Path of the device such as /dev/sdb, or name of a volume group or of a pod's volume.
    type: What the name is: device, volumegroup or podvolume.
    io_cfg: Limits and cost model.
    """

    name: Annotated[str, Meta(max_length=4096, extra=_NODE_ONLY)] = ""
    type: Annotated[BlockType, _FREE_TEXT] | None = None
    io_cfg: IOCfg = field(name="ioCfg", default_factory=IOCfg)


class BlkIOQOS(Wire, frozen=True):
    """Block I/O QoS of a class.

    enable: Switches block I/O QoS of the class on.
    blocks: Block devices and their settings.
    """

    enable: bool = False
    blocks: tuple[BlockCfg, ...] = ()


class ResctrlQOS(Wire, frozen=True):
    """Last-level cache and memory bandwidth of a class, by resctrl.

    enable: Switches resctrl QoS of the class on.
    cat_range_start_percent: Where the class's part of the cache begins, in percent of the cache.
    cat_range_end_percent: Where the class's part of the cache ends, in percent of the cache.
    mba_percent: Memory bandwidth in percent of the whole.

    The defaults here give the whole cache and the whole memory bandwidth.
    """

    enable: bool = False
    cat_range_start_percent: Percent = 0
    cat_range_end_percent: Percent = 100
    mba_percent: Percent = 100


class NetworkQOS(Wire, frozen=True):
    """Network bandwidth of a class. A number is a percentage of the node's bandwidth, a text a
    quantity in bits per second such as 50M.

    enable: Switches network QoS of the class on.
    ingress_request: Incoming bandwidth that the class is guaranteed.
    ingress_limit: Incoming bandwidth that the class may use.
    egress_request: Outgoing bandwidth that the class is guaranteed.
    egress_limit: Outgoing bandwidth that the class may use.
    """

    enable: bool = False
    ingress_request: Annotated[int | str, Meta(extra_json_schema={"default": 0})] = 0
    ingress_limit: Annotated[int | str, Meta(extra_json_schema={"default": 100})] = 0
    egress_request: Annotated[int | str, Meta(extra_json_schema={"default": 0})] = 0
    egress_limit: Annotated[int | str, Meta(extra_json_schema={"default": 100})] = 0


def bandwidth_bits(rate: int | str, *, total_bits: int) -> int:
    """Return bits per second of a rate of `NetworkQOS` on a node with `total_bits`.

    Raises ValueError for a percent outside 0..100 and for a text that is not a quantity >= 0.
    """
    if isinstance(rate, int):
        if not 0 <= rate <= 100:
            raise ValueError("a percent of the bandwidth lies in 0..100")
        return total_bits * rate // 100
    bits = parse_quantity(rate).value()
    if bits < 0:
        raise ValueError("a bandwidth must not be negative")
    return bits


class ResourceQOS(Wire, frozen=True):
    """QoS settings of one class.

    cpu_qos: CPU QoS.
    memory_qos: Memory QoS.
    blkio_qos: Block I/O QoS.
    resctrl_qos: Last-level cache and memory bandwidth.
    network_qos: Network bandwidth.
    """

    cpu_qos: CPUQOS = field(name="cpuQOS", default_factory=CPUQOS)
    memory_qos: MemoryQOS = field(name="memoryQOS", default_factory=MemoryQOS)
    blkio_qos: BlkIOQOS = field(name="blkioQOS", default_factory=BlkIOQOS)
    resctrl_qos: ResctrlQOS = field(name="resctrlQOS", default_factory=ResctrlQOS)
    network_qos: NetworkQOS = field(name="networkQOS", default_factory=NetworkQOS)


class ResourceQOSStrategy(Wire, frozen=True):
    """QoS settings by class.

    policies: Which mechanism carries each kind of QoS.
    lsr_class: Settings of LSR pods, and of LSE pods too.
    ls_class: Settings of LS pods.
    be_class: Settings of BE pods.
    system_class: Settings of SYSTEM pods.
    cgroup_root: Settings of the root cgroup; only blkioQOS is used.
    """

    policies: QOSPolicies = field(default_factory=QOSPolicies)
    lsr_class: ResourceQOS = field(default_factory=ResourceQOS)
    ls_class: ResourceQOS = field(default_factory=ResourceQOS)
    be_class: ResourceQOS = field(default_factory=ResourceQOS)
    system_class: ResourceQOS = field(default_factory=ResourceQOS)
    cgroup_root: ResourceQOS = field(default_factory=ResourceQOS)

    def of(self, qos: QoSClass) -> ResourceQOS | None:
        """Return the block for a QoS class; None for NONE, whose block depends on Kubernetes QoS.

        Callers that fall back by Kubernetes QoS first map it with
        `apis.qos.qos_class_with_default`.
        """
        match qos:
            case QoSClass.LSE | QoSClass.LSR:
                return self.lsr_class
            case QoSClass.LS:
                return self.ls_class
            case QoSClass.BE:
                return self.be_class
            case QoSClass.SYSTEM:
                return self.system_class
            case QoSClass.NONE:
                return None


# --- CPU burst, system, host applications ------------------------------------------------------


class CPUBurstPolicy(_Choice):
    NONE = "none"
    CPU_BURST_ONLY = "cpuBurstOnly"
    CFS_QUOTA_BURST_ONLY = "cfsQuotaBurstOnly"
    AUTO = "auto"


class CPUBurstStrategy(Wire, frozen=True):
    """CPU burst of the node's pods.

    policy: none, cpuBurstOnly (the kernel's CFS burst), cfsQuotaBurstOnly (quotas of throttled
        containers are raised) or auto (both).
    cpu_burst_percent: Burst that a container may accumulate, in percent of its CPU limit.
    cfs_quota_burst_percent: Ceiling of a raised quota, in percent of the CPU limit.
    cfs_quota_burst_period_seconds: Seconds that a quota may stay raised; -1 is without end.
    share_pool_threshold_percent: CPU use of the shared pool above which raised quotas go down.
    """

    policy: Annotated[CPUBurstPolicy, _FREE_TEXT] = CPUBurstPolicy.NONE
    cpu_burst_percent: Annotated[int, Meta(ge=0, le=10000, extra_json_schema=_INT64)] = 1000
    cfs_quota_burst_percent: Int64 = 300
    cfs_quota_burst_period_seconds: Int64 = -1
    share_pool_threshold_percent: Int64 = 50


class SystemStrategy(Wire, frozen=True):
    """Kernel settings of the host. What is not set is left alone.

    min_free_kbytes_factor: vm.min_free_kbytes in 1/10000 of the node's memory; 100 is usual.
    watermark_scale_factor: vm.watermark_scale_factor; 150 is usual.
    memcg_reap_back_ground: 1 reaps dead memory cgroups in the background. Anolis kernels only.
    sched_group_identity_enabled: kernel.sched_group_identity_enabled. Anolis kernels only.
    sched_idle_saver_wmark_ns: kernel.sched_idle_saver_wmark in nanoseconds. Anolis kernels only.
    sched_features: Scheduler features by name: true switches one on, false switches it off.
    page_cache_limit_enabled: 1 switches limits of the page cache on. Anolis kernels only.
    total_network_bandwidth: Bandwidth of the node in bits per second, of which percentages are
        taken.
    """

    min_free_kbytes_factor: Int64 | None = None
    watermark_scale_factor: Int64 | None = None
    memcg_reap_back_ground: Int64 | None = None
    sched_group_identity_enabled: Int64 | None = None
    sched_idle_saver_wmark_ns: Int64 | None = field(name="schedIdleSaverWmark", default=None)
    sched_features: dict[str, bool] = field(default_factory=dict)
    page_cache_limit_enabled: Int64 | None = None
    total_network_bandwidth: Quantity = ZERO


class CgroupBase(_Choice):
    CGROUP_ROOT = "CgroupRoot"
    KUBEPODS = "Kubepods"
    KUBEPODS_BURSTABLE = "KubepodsBurstable"
    KUBEPODS_BESTEFFORT = "KubepodsBesteffort"


class CgroupPath(Wire, frozen=True):
    """Where the cgroup of a host application lies: base, then parentDir, then relativePath.

    base: Directory to start at: CgroupRoot, Kubepods, KubepodsBurstable or KubepodsBesteffort.
    parent_dir: Directory below the base.
    relative_path: Directory below parentDir.

    Both directories are checked to stay inside the base.
    """

    base: Annotated[CgroupBase, _FREE_TEXT] | None = None
    parent_dir: str = ""
    relative_path: str = ""


class HostApplicationStrategy(Wire, frozen=True):
    """Settings of one host application. Reserved; it has no members yet."""


class HostApplication(Wire, frozen=True):
    """Processes outside of pods that take part in QoS.

    name: Name of the application, unique on the node.
    priority: Priority class: koord-prod, koord-mid, koord-batch or koord-free.
    qos: QoS class: LSE, LSR, LS, BE or SYSTEM.
    cgroup_path: Where its cgroup lies; by the QoS class if not set.
    strategy: Settings of this application alone. Reserved.
    """

    name: str = ""
    priority: Annotated[PriorityClass, _FREE_TEXT] = PriorityClass.NONE
    qos: Annotated[QoSClass, _FREE_TEXT] = QoSClass.NONE
    cgroup_path: CgroupPath | None = None
    strategy: HostApplicationStrategy | None = None


class NodeSLOSpec(Wire, frozen=True):
    """What a node does for the resources of its pods. Every part is optional.

    resource_used_threshold_with_be: Suppression of best-effort CPU, and eviction.
    resource_qos_strategy: QoS settings by class.
    cpu_burst_strategy: CPU burst of the node's pods.
    system_strategy: Kernel settings of the host.
    extensions: Strategies of other parties, kept as they are.
    host_applications: Processes outside of pods that take part in QoS.
    """

    resource_used_threshold_with_be: ResourceThresholdStrategy = field(
        name="resourceUsedThresholdWithBE", default_factory=ResourceThresholdStrategy
    )
    resource_qos_strategy: ResourceQOSStrategy = field(
        name="resourceQOSStrategy", default_factory=ResourceQOSStrategy
    )
    cpu_burst_strategy: CPUBurstStrategy = field(default_factory=CPUBurstStrategy)
    system_strategy: SystemStrategy = field(default_factory=SystemStrategy)
    extensions: AnyObject = field(default_factory=dict)
    host_applications: tuple[HostApplication, ...] = ()


class NodeSLOStatus(Wire, frozen=True):
    """Reserved; it has no members."""


class NodeSLO(Wire, frozen=True):
    """What one node, of the same name, does for the resources of its pods. koord-manager writes it
    from the ConfigMap slo-controller-config.

    spec: The settings.
    status: Reserved; it has no members.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: NodeSLOSpec = field(default_factory=NodeSLOSpec)
    status: NodeSLOStatus = NodeSLOStatus()
