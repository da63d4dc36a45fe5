"""NodeSLO: what a node is told to do, typed, with every default filled in.

The stored object is sparse. `decode_nodeslo` overlays it field by field on the default table, lets
null and absent mean "default", replaces blocks that are switched off by the values that undo them,
and names every field that cannot be used. Field types double as the CRD's schema
(`apis.crd`), so both stay one truth. Sources: api.md section 4, koordlet.md section 11.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, decode_leniently, parse_json_object, without_nulls
from apis.errors import InputError, InputErrors
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
    """`resourceUsedThresholdWithBE`: suppression and eviction. Percents of node capacity."""

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
    cpu_policy: Annotated[CPUPolicy, _FREE_TEXT] = CPUPolicy.GROUP_IDENTITY
    net_qos_policy: Annotated[NetQOSPolicy, _FREE_TEXT] = field(
        name="netQOSPolicy", default=NetQOSPolicy.TC
    )


class CPUQOS(Wire, frozen=True):
    """The defaults here are the values that undo CPU QoS."""

    enable: bool = False
    group_identity: Annotated[
        int, Meta(ge=-1, le=2, extra_json_schema=_INT64, extra=_NODE_ONLY)
    ] = 0
    """bvt, used with `CPUPolicy.GROUP_IDENTITY`."""
    sched_idle: NodeSwitch = 0
    """cpu.idle, used with `CPUPolicy.CORE_SCHED`."""
    core_expeller: bool = False


class MemoryQOS(Wire, frozen=True):
    """The defaults here are the values that undo memory QoS."""

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
    """Bytes."""
    page_cache_reclaim_sync: bool | None = None


class BlockType(StrEnum):
    DEVICE = "device"
    VOLUME_GROUP = "volumegroup"
    POD_VOLUME = "podvolume"


class IOCfg(Wire, frozen=True):
    """Limits and cost model of one block device; latencies in microseconds, rates per second."""

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
    name: Annotated[str, Meta(max_length=4096, extra=_NODE_ONLY)] = ""
    type: Annotated[BlockType, _FREE_TEXT] | None = None
    io_cfg: IOCfg = field(name="ioCfg", default_factory=IOCfg)


class BlkIOQOS(Wire, frozen=True):
    enable: bool = False
    blocks: tuple[BlockCfg, ...] = ()


class ResctrlQOS(Wire, frozen=True):
    """The defaults here give the whole cache and the whole memory bandwidth."""

    enable: bool = False
    cat_range_start_percent: Percent = 0
    cat_range_end_percent: Percent = 100
    mba_percent: Percent = 100


class NetworkQOS(Wire, frozen=True):
    """Each rate is an int, percent of the node's bandwidth, or a quantity text in bits/s."""

    enable: bool = False
    ingress_request: Annotated[int | str, Meta(extra_json_schema={"default": 0})] = 0
    ingress_limit: Annotated[int | str, Meta(extra_json_schema={"default": 100})] = 0
    egress_request: Annotated[int | str, Meta(extra_json_schema={"default": 0})] = 0
    egress_limit: Annotated[int | str, Meta(extra_json_schema={"default": 100})] = 0


def bandwidth_bits(rate: int | str, *, total_bits: int) -> int:
    """Return bits per second of a rate of `NetworkQOS` on a node with `total_bits`.

    Raises ValueError for a percent outside 0..100 and for a text that is no quantity >= 0.
    """
    if isinstance(rate, int):
        if not 0 <= rate <= 100:
            raise ValueError("a percent of the bandwidth lies in 0..100")
        return total_bits * rate // 100
    bits = parse_quantity(rate).value()
    if bits < 0:
        raise ValueError("a bandwidth is not negative")
    return bits


class ResourceQOS(Wire, frozen=True):
    cpu_qos: CPUQOS = field(name="cpuQOS", default_factory=CPUQOS)
    memory_qos: MemoryQOS = field(name="memoryQOS", default_factory=MemoryQOS)
    blkio_qos: BlkIOQOS = field(name="blkioQOS", default_factory=BlkIOQOS)
    resctrl_qos: ResctrlQOS = field(name="resctrlQOS", default_factory=ResctrlQOS)
    network_qos: NetworkQOS = field(name="networkQOS", default_factory=NetworkQOS)


class ResourceQOSStrategy(Wire, frozen=True):
    """QoS of each class. `lsr_class` also serves LSE; of `cgroup_root` only blkio_qos is used."""

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
    policy: Annotated[CPUBurstPolicy, _FREE_TEXT] = CPUBurstPolicy.NONE
    cpu_burst_percent: Annotated[int, Meta(ge=0, le=10000, extra_json_schema=_INT64)] = 1000
    """Burst buffer in percent of the limit."""
    cfs_quota_burst_percent: Int64 = 300
    """Ceiling of a raised quota in percent of the limit."""
    cfs_quota_burst_period_seconds: Int64 = -1
    """How long a quota may stay raised; -1 has no end."""
    share_pool_threshold_percent: Int64 = 50


class SystemStrategy(Wire, frozen=True):
    """Host kernel knobs; None leaves a knob alone."""

    min_free_kbytes_factor: Int64 | None = None
    watermark_scale_factor: Int64 | None = None
    memcg_reap_back_ground: Int64 | None = None
    sched_group_identity_enabled: Int64 | None = None
    sched_idle_saver_wmark_ns: Int64 | None = field(name="schedIdleSaverWmark", default=None)
    sched_features: dict[str, bool] = field(default_factory=dict)
    page_cache_limit_enabled: Int64 | None = None
    total_network_bandwidth: Quantity = ZERO
    """Bits per second."""


class CgroupBase(_Choice):
    CGROUP_ROOT = "CgroupRoot"
    KUBEPODS = "Kubepods"
    KUBEPODS_BURSTABLE = "KubepodsBurstable"
    KUBEPODS_BESTEFFORT = "KubepodsBesteffort"


class CgroupPath(Wire, frozen=True):
    """Where a host application's cgroup lies. Both directories are checked to stay inside base."""

    base: Annotated[CgroupBase, _FREE_TEXT] | None = None
    parent_dir: str = ""
    relative_path: str = ""


class HostApplicationStrategy(Wire, frozen=True):
    """Reserved by the API; empty so far."""


class HostApplication(Wire, frozen=True):
    name: str = ""
    priority: Annotated[PriorityClass, _FREE_TEXT] = PriorityClass.NONE
    qos: Annotated[QoSClass, _FREE_TEXT] = QoSClass.NONE
    cgroup_path: CgroupPath | None = None
    strategy: HostApplicationStrategy | None = None


class NodeSLOSpec(Wire, frozen=True):
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
    """Always empty."""


class NodeSLO(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: NodeSLOSpec = field(default_factory=NodeSLOSpec)
    status: NodeSLOStatus = NodeSLOStatus()


# --- defaults and overlay ----------------------------------------------------------------------


def _class_defaults(
    *, group_identity: int, core_expeller: bool, wmark_ratio: int, wmark_min_adj: int, cat_end: int
) -> dict[str, Any]:
    wmark_scale = 20 if wmark_ratio else 50
    return {
        "cpuQOS": {"groupIdentity": group_identity, "coreExpeller": core_expeller},
        "memoryQOS": {
            "wmarkRatio": wmark_ratio,
            "wmarkScalePermill": wmark_scale,
            "wmarkMinAdj": wmark_min_adj,
        },
        "resctrlQOS": {"catRangeEndPercent": cat_end},
    }


# Only what differs from the field defaults above, which are the values that undo a block.
_DEFAULT_SPEC: Final[dict[str, Any]] = {
    "resourceQOSStrategy": {
        "lsrClass": _class_defaults(
            group_identity=2, core_expeller=True, wmark_ratio=95, wmark_min_adj=-25, cat_end=100
        ),
        "lsClass": _class_defaults(
            group_identity=2, core_expeller=True, wmark_ratio=95, wmark_min_adj=-25, cat_end=100
        ),
        "beClass": _class_defaults(
            group_identity=-1, core_expeller=False, wmark_ratio=95, wmark_min_adj=50, cat_end=30
        ),
    }
}

_LARGEST_NODESLO: Final = 2 * 1024 * 1024
_MOST_HOST_APPLICATIONS: Final = 1024
_LONGEST_PATH: Final = 2048


def decode_nodeslo(raw: bytes | str | dict[str, Any], *, obj: str) -> NodeSLOSpec:
    """Return the effective spec of a NodeSLO object, or of a bare spec.

    Absent and null fields take their defaults; blocks of LSR, LS and BE whose merged `enable` is
    false become the values that undo them. Raises InputErrors that names every unusable field.
    """
    plain = parse_json_object(raw, obj=obj, largest=_LARGEST_NODESLO)
    prefix = ""
    if "spec" in plain or "apiVersion" in plain or "kind" in plain:
        prefix = "spec"
        spec_given = plain.get("spec")
        plain = {} if spec_given is None else spec_given
        if not isinstance(plain, dict):
            raise InputErrors(
                [InputError(obj=obj, field="spec", value=plain, problem="expected an object")]
            )
    merged = overlay(_DEFAULT_SPEC, plain)
    spec, errors = decode_leniently(merged, NodeSLOSpec, obj=obj, largest=_LARGEST_NODESLO)
    # With an element of a list left out the indices of what decoded are not the object's.
    if spec is not None and not any(error.field.endswith("]") for error in errors):
        errors.extend(_beyond_types(spec, obj))
    if errors or spec is None:
        raise InputErrors([_prefixed(error, prefix) for error in errors])
    return switched_off_undone(spec)


def default_nodeslo() -> NodeSLOSpec:
    """Return the spec that holds on a node without a NodeSLO."""
    return _DEFAULT


def overlay(below: Any, above: Any) -> Any:
    """Return `above` laid over `below`: objects merge by key, null and absent keep what is below.

    Scalars and lists of `above` replace. Neither argument is changed.
    """
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            if value is not None:
                merged[key] = overlay(below.get(key), value)
        return merged
    return without_nulls(above)


def switched_off_undone(spec: NodeSLOSpec) -> NodeSLOSpec:
    """Replace CPU, memory and resctrl blocks of LSR, LS and BE that are off by undoing values."""
    strategy = spec.resource_qos_strategy
    return msgspec.structs.replace(
        spec,
        resource_qos_strategy=msgspec.structs.replace(
            strategy,
            lsr_class=_undone(strategy.lsr_class),
            ls_class=_undone(strategy.ls_class),
            be_class=_undone(strategy.be_class),
        ),
    )


def _undone(block: ResourceQOS) -> ResourceQOS:
    return msgspec.structs.replace(
        block,
        cpu_qos=block.cpu_qos if block.cpu_qos.enable else CPUQOS(),
        memory_qos=block.memory_qos if block.memory_qos.enable else MemoryQOS(),
        resctrl_qos=block.resctrl_qos if block.resctrl_qos.enable else ResctrlQOS(),
    )


def path_problem(path: str) -> str | None:
    """Return why `path` cannot name a directory below a cgroup, or None if it can."""
    if len(path) > _LONGEST_PATH:
        return f"longer than {_LONGEST_PATH} characters"
    if "\0" in path or not path.isprintable():
        return "has characters that do not print"
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        return "must not contain . or .."
    if any(len(part.encode()) > 255 for part in parts):
        return "has a component longer than 255 bytes"
    return None


def _beyond_types(spec: NodeSLOSpec, obj: str) -> list[InputError]:
    errors: list[InputError] = []

    def add(where: str, value: object, problem: str) -> None:
        errors.append(InputError(obj=obj, field=where, value=value, problem=problem))

    strategy = spec.resource_qos_strategy
    for name, block in (
        ("lsrClass", strategy.lsr_class),
        ("lsClass", strategy.ls_class),
        ("beClass", strategy.be_class),
        ("systemClass", strategy.system_class),
    ):
        network = block.network_qos
        for member, rate in (
            ("ingressRequest", network.ingress_request),
            ("ingressLimit", network.ingress_limit),
            ("egressRequest", network.egress_request),
            ("egressLimit", network.egress_limit),
        ):
            try:
                bandwidth_bits(rate, total_bits=0)
            except ValueError as error:
                add(f"resourceQOSStrategy.{name}.networkQOS.{member}", rate, str(error))
    if spec.system_strategy.total_network_bandwidth < ZERO:
        add(
            "systemStrategy.totalNetworkBandwidth",
            str(spec.system_strategy.total_network_bandwidth),
            "a bandwidth is not negative",
        )
    if len(spec.host_applications) > _MOST_HOST_APPLICATIONS:
        add(
            "hostApplications",
            len(spec.host_applications),
            f"more than {_MOST_HOST_APPLICATIONS} applications",
        )
    for index, application in enumerate(spec.host_applications):
        if application.cgroup_path is None:
            continue
        for member, path in (
            ("parentDir", application.cgroup_path.parent_dir),
            ("relativePath", application.cgroup_path.relative_path),
        ):
            problem = path_problem(path)
            if problem:
                add(f"hostApplications[{index}].cgroupPath.{member}", path, problem)
    return errors


def _prefixed(error: InputError, prefix: str) -> InputError:
    if not prefix:
        return error
    return InputError(
        obj=error.obj,
        field=f"{prefix}.{error.field}",
        value=error.value,
        problem=error.problem,
        hint=error.hint,
    )


_DEFAULT: Final = decode_nodeslo({}, obj="NodeSLO defaults")
