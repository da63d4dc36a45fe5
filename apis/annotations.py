"""Every pod annotation and label that the node reads, as a typed value or an InputError.

Each `parse_*` takes the text and the name of the pod for errors. They run while a container is
created, so short texts are answered from bounded caches. Device allocations have their own page,
`apis.device`. The keys stand in `apis.keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct, field

from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import Embedded, decode_field, decode_text, field_decoder, remembered
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BLKIO_QOS,
    ANNOTATION_CPU_BURST,
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_CPU_QOS,
    ANNOTATION_EVICTION_POLICY,
    ANNOTATION_EVICTION_PRIORITY,
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    ANNOTATION_MEMORY_QOS,
    ANNOTATION_NETWORK_QOS,
    ANNOTATION_OOM_SCORE_ADJ,
    ANNOTATION_OOM_SCORE_ADJ_SPEC,
    ANNOTATION_RAW_ALLOCATABLE,
    ANNOTATION_RESCTRL,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_CORE_SCHED_GROUP_ID,
    LABEL_CORE_SCHED_POLICY,
    LABEL_PRIORITY,
)
from apis.nodeslo import BlockCfg, CPUBurstPolicy, IOCfg
from apis.quantity import ZERO, Quantity, ResourceList

S = TypeVar("S")
T = TypeVar("T")


def annotation_field(key: str) -> str:
    """Return how errors name an annotation."""
    return f'metadata.annotations["{key}"]'


def _unchanged(value: T) -> T:
    return value


def _parser(type_: type[S], key: str, finish: Callable[[S], T]) -> Callable[[str, str], T]:
    """Return (text, obj) -> value for the annotation `key`, whose JSON is a `type_`."""
    decoder = field_decoder(type_)
    where = annotation_field(key)
    return remembered(lambda text: decode_text(decoder, text, field=where), finish, field=where)


# --- resource-status ---------------------------------------------------------------------------


class NUMANodeResource(Embedded, frozen=True):
    node: Annotated[int, Meta(ge=0, le=1023)] = 0
    resources: ResourceList = field(default_factory=dict)


class ResourceStatus(Struct, frozen=True):
    """What the scheduler allocated to a pod: CPUs (empty for none) and shares of NUMA nodes."""

    cpus: CpuSet = NO_CPUS
    numa_node_resources: tuple[NUMANodeResource, ...] = ()


class _ResourceStatus(Embedded, frozen=True):
    cpuset: str = ""
    numa_node_resources: tuple[NUMANodeResource, ...] | None = None


def _resource_status(raw: _ResourceStatus) -> ResourceStatus:
    try:
        cpus = CpuSet.parse(raw.cpuset)
    except ValueError as error:
        raise InputError(
            obj="",
            field=annotation_field(ANNOTATION_RESOURCE_STATUS) + ".cpuset",
            value=raw.cpuset,
            problem=str(error),
        ) from None
    return ResourceStatus(cpus=cpus, numa_node_resources=raw.numa_node_resources or ())


_parse_resource_status = _parser(_ResourceStatus, ANNOTATION_RESOURCE_STATUS, _resource_status)


def parse_resource_status(text: str, *, obj: str) -> ResourceStatus:
    """Return the scheduler's CPU and NUMA allocation of a pod."""
    return _parse_resource_status(text, obj)


# --- raw-allocatable -----------------------------------------------------------------------------

_decode_raw_allocatable: Final = field_decoder(ResourceList)


def parse_raw_allocatable(text: str, *, obj: str) -> ResourceList:
    """Return what a Node had to allocate before amplification. Raises InputError."""
    return decode_field(
        _decode_raw_allocatable, text, obj=obj, field=annotation_field(ANNOTATION_RAW_ALLOCATABLE)
    )


# --- extended-resource-spec --------------------------------------------------------------------


class ExtendedResources(Embedded, frozen=True):
    requests: ResourceList = field(default_factory=dict)
    limits: ResourceList = field(default_factory=dict)


class ExtendedResourceSpec(Embedded, frozen=True):
    """Batch and Mid resources of each container, by container name."""

    containers: dict[str, ExtendedResources] = field(default_factory=dict)


_parse_extended_resource_spec = _parser(
    ExtendedResourceSpec, ANNOTATION_EXTENDED_RESOURCE_SPEC, _unchanged
)


def parse_extended_resource_spec(text: str, *, obj: str) -> ExtendedResourceSpec:
    """Return the extended resources that admission copied from the pod's containers."""
    return _parse_extended_resource_spec(text, obj)


# --- QoS of one pod ----------------------------------------------------------------------------


class PodCPUQOS(Embedded, frozen=True):
    """A pod's own CPU QoS; None leaves a field to the class."""

    enable: bool | None = None
    group_identity: Annotated[int, Meta(ge=-1, le=2)] | None = None
    sched_idle: Annotated[int, Meta(ge=0, le=1)] | None = None
    core_expeller: bool | None = None


_parse_cpu_qos = _parser(PodCPUQOS, ANNOTATION_CPU_QOS, _unchanged)


def parse_cpu_qos(text: str, *, obj: str) -> PodCPUQOS:
    """Return the pod's own CPU QoS."""
    return _parse_cpu_qos(text, obj)


class PodMemoryQOSPolicy(StrEnum):
    """DEFAULT (also spelled "") takes the class's settings under the pod's own, AUTO the
    recommended ones, NONE switches memory QoS off."""

    DEFAULT = "default"
    NONE = "none"
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> PodMemoryQOSPolicy | None:
        return cls.DEFAULT if value == "" else None


Factor = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class PodMemoryQOS(Embedded, frozen=True):
    """A pod's own memory QoS; None leaves a field to the policy, and no policy is DEFAULT."""

    policy: PodMemoryQOSPolicy | None = None
    min_limit_percent: Factor | None = None
    low_limit_percent: Factor | None = None
    throttling_percent: Factor | None = None
    wmark_ratio: Annotated[int, Meta(ge=0, le=100)] | None = None
    wmark_scale_permill: Annotated[int, Meta(ge=1, le=1000)] | None = None
    wmark_min_adj: Annotated[int, Meta(ge=-25, le=50)] | None = None
    priority_enable: Annotated[int, Meta(ge=0, le=1)] | None = None
    priority: Annotated[int, Meta(ge=0, le=12)] | None = None
    oom_kill_group: Annotated[int, Meta(ge=0, le=1)] | None = None
    page_cache_enable: bool | None = None
    page_cache_limit_percent: Annotated[int, Meta(ge=0, le=100)] | None = None
    page_cache_limit_size: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    page_cache_reclaim_sync: bool | None = None


_parse_memory_qos = _parser(PodMemoryQOS, ANNOTATION_MEMORY_QOS, _unchanged)


def parse_memory_qos(text: str, *, obj: str) -> PodMemoryQOS:
    """Return the pod's own memory QoS."""
    return _parse_memory_qos(text, obj)


class PodCPUBurst(Embedded, frozen=True):
    """A pod's own CPU burst; None leaves a field to the node's strategy."""

    policy: CPUBurstPolicy | None = None
    cpu_burst_percent: Annotated[int, Meta(ge=0, le=10000)] | None = None
    cfs_quota_burst_percent: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    cfs_quota_burst_period_seconds: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


_parse_cpu_burst = _parser(PodCPUBurst, ANNOTATION_CPU_BURST, _unchanged)


def parse_cpu_burst(text: str, *, obj: str) -> PodCPUBurst:
    """Return the pod's own CPU burst settings."""
    return _parse_cpu_burst(text, obj)


class PodIOCfg(IOCfg, Embedded, frozen=True):
    """`IOCfg` as an annotation has it."""


class PodBlockCfg(BlockCfg, Embedded, frozen=True):
    """`BlockCfg` as an annotation has it."""

    io_cfg: PodIOCfg = field(name="ioCfg", default_factory=PodIOCfg)


class PodBlkIOQOS(Embedded, frozen=True):
    blocks: tuple[PodBlockCfg, ...] = ()


_parse_blkio_qos = _parser(PodBlkIOQOS, ANNOTATION_BLKIO_QOS, _unchanged)


def parse_blkio_qos(text: str, *, obj: str) -> PodBlkIOQOS:
    """Return the pod's own block I/O limits."""
    return _parse_blkio_qos(text, obj)


class PodNetworkQOS(Struct, frozen=True):
    """Bandwidth limits in bits per second; None where the annotation says nothing or 0."""

    ingress_limit_bits: int | None = None
    egress_limit_bits: int | None = None


class _PodNetworkQOS(Embedded, frozen=True):
    ingress_limit: Quantity | None = None
    egress_limit: Quantity | None = None


def _network_qos(raw: _PodNetworkQOS) -> PodNetworkQOS:
    for name, limit in (("ingressLimit", raw.ingress_limit), ("egressLimit", raw.egress_limit)):
        if limit is not None and limit < ZERO:
            raise InputError(
                obj="",
                field=f"{annotation_field(ANNOTATION_NETWORK_QOS)}.{name}",
                value=str(limit),
                problem="a bandwidth must not be negative",
            )
    return PodNetworkQOS(
        ingress_limit_bits=raw.ingress_limit.value() if raw.ingress_limit else None,
        egress_limit_bits=raw.egress_limit.value() if raw.egress_limit else None,
    )


_parse_network_qos = _parser(_PodNetworkQOS, ANNOTATION_NETWORK_QOS, _network_qos)


def parse_network_qos(text: str, *, obj: str) -> PodNetworkQOS:
    """Return the pod's own bandwidth limits."""
    return _parse_network_qos(text, obj)


# --- resctrl -----------------------------------------------------------------------------------

PercentOf = Annotated[int, Meta(ge=0, le=100)]


class SchemataConfig(Embedded, frozen=True):
    """A share of a cache (`range`, two percents) or of memory bandwidth (`percent`, 0 = unset)."""

    percent: PercentOf = 0
    range: Annotated[tuple[PercentOf, ...], Meta(max_length=2)] = ()


class SchemataPerCacheConfig(Embedded, frozen=True):
    cache_id: Annotated[int, Meta(ge=0, le=2**31 - 1)] = field(name="cacheID", default=0)
    percent: PercentOf = 0
    range: Annotated[tuple[PercentOf, ...], Meta(max_length=2)] = ()


class ResctrlResource(Embedded, frozen=True):
    schemata: SchemataConfig = SchemataConfig()
    schemata_per_cache: tuple[SchemataPerCacheConfig, ...] = ()


class PodResctrl(Embedded, frozen=True):
    """A pod's own cache and memory bandwidth."""

    llc: ResctrlResource = ResctrlResource()
    mb: ResctrlResource = ResctrlResource()


def _resctrl(resctrl: PodResctrl) -> PodResctrl:
    shares = [("llc.schemata", resctrl.llc.schemata.range)]
    shares += [
        (f"llc.schemataPerCache[{index}]", entry.range)
        for index, entry in enumerate(resctrl.llc.schemata_per_cache)
    ]
    for where, share in shares:
        if share and (len(share) != 2 or share[0] >= share[1]):
            raise InputError(
                obj="",
                field=f"{annotation_field(ANNOTATION_RESCTRL)}.{where}.range",
                value=list(share),
                problem="expected [start, end] in percent with start < end",
            )
    return resctrl


_parse_resctrl = _parser(PodResctrl, ANNOTATION_RESCTRL, _resctrl)


def parse_resctrl(text: str, *, obj: str) -> PodResctrl:
    """Return the pod's own cache and memory bandwidth shares."""
    return _parse_resctrl(text, obj)


# --- OOM score, eviction -----------------------------------------------------------------------

_LEAST_OOM_SCORE: Final = -1000
_MOST_OOM_SCORE: Final = 1000
"""The kernel's range of oom_score_adj."""
_INTEGER_DIGITS: Final = 20
"""Characters: the longest 64-bit integer with its sign."""


def _integer(text: str, *, where: str, low: int, high: int) -> int:
    stripped = text.strip()
    try:
        if len(stripped) > _INTEGER_DIGITS or not stripped.isascii() or "_" in stripped:
            raise ValueError
        value = int(stripped)
    except ValueError:
        raise InputError(obj="", field=where, value=text, problem="expected an integer") from None
    if not low <= value <= high:
        raise InputError(obj="", field=where, value=text, problem=f"expected {low}..{high}")
    return value


def parse_oom_score_adj(text: str, *, obj: str) -> int:
    """Return the OOM score adjustment of all containers of a pod, -1000..1000."""
    try:
        where = annotation_field(ANNOTATION_OOM_SCORE_ADJ)
        return _integer(text, where=where, low=_LEAST_OOM_SCORE, high=_MOST_OOM_SCORE)
    except InputError as error:
        raise error.about(obj) from None


def _oom_score_adj_spec(written: dict[str, Any]) -> Mapping[str, int | InputError]:
    scores: dict[str, int | InputError] = {}
    for name, value in written.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and _LEAST_OOM_SCORE <= value <= _MOST_OOM_SCORE:
            scores[name] = value
        elif value is not None:
            scores[name] = InputError(
                obj="",
                field=f"{annotation_field(ANNOTATION_OOM_SCORE_ADJ_SPEC)}.{name}",
                value=value,
                problem=f"expected an integer, {_LEAST_OOM_SCORE}..{_MOST_OOM_SCORE}",
            )
    return MappingProxyType(scores)


_parse_oom_score_adj_spec = _parser(
    dict[str, Any], ANNOTATION_OOM_SCORE_ADJ_SPEC, _oom_score_adj_spec
)


def parse_oom_score_adj_spec(text: str, *, obj: str) -> Mapping[str, int | InputError]:
    """Return the OOM score adjustment by container name.

    A bad value costs its own container: an error stands in its place, about no object yet.
    """
    return _parse_oom_score_adj_spec(text, obj)


_parse_eviction_policy = _parser(tuple[str, ...], ANNOTATION_EVICTION_POLICY, _unchanged)


def parse_eviction_policy(text: str, *, obj: str) -> frozenset[str]:
    """Return the names of the features that may evict the pod."""
    return frozenset(_parse_eviction_policy(text, obj))


def parse_eviction_priority(text: str, *, obj: str) -> int:
    """Return the eviction priority, an int32; lower is evicted first."""
    try:
        where = annotation_field(ANNOTATION_EVICTION_PRIORITY)
        return _integer(text, where=where, low=-(2**31), high=2**31 - 1)
    except InputError as error:
        raise error.about(obj) from None


# --- labels ------------------------------------------------------------------------------------


class CoreSchedPolicy(StrEnum):
    """NONE leaves the pod out; EXCLUSIVE gives it a group of its own."""

    DEFAULT = ""
    NONE = "none"
    EXCLUSIVE = "exclusive"


def core_sched_policy(labels: Mapping[str, str]) -> CoreSchedPolicy:
    """Return the pod's core scheduling policy; an unknown text is DEFAULT."""
    match labels.get(LABEL_CORE_SCHED_POLICY):
        case CoreSchedPolicy.NONE.value:
            return CoreSchedPolicy.NONE
        case CoreSchedPolicy.EXCLUSIVE.value:
            return CoreSchedPolicy.EXCLUSIVE
    return CoreSchedPolicy.DEFAULT


def core_sched_group_id(labels: Mapping[str, str]) -> str:
    """Return the pod's core scheduling group, "" when it names none."""
    return labels.get(LABEL_CORE_SCHED_GROUP_ID, "")


def parse_sub_priority(labels: Mapping[str, str], *, obj: str) -> int:
    """Return the label `koordinator.sh/priority`; 0x, 0o, 0b and a leading 0 (octal) are read.

    Missing or empty is 0. Raises InputError for anything but an int32.
    """
    text = labels.get(LABEL_PRIORITY, "")
    if not text:
        return 0
    unsigned = text.lstrip("+-")
    octal = len(unsigned) > 1 and unsigned[0] == "0" and unsigned.isdigit()
    try:
        value = int(text, 8) if octal else int(text, 0)
    except ValueError:
        value = None
    if value is None or not -(2**31) <= value < 2**31:
        raise InputError(
            obj=obj,
            field=f'metadata.labels["{LABEL_PRIORITY}"]',
            value=text,
            problem="expected a 32-bit integer",
        )
    return value


# --- node annotation read by the node ----------------------------------------------------------


def parse_cpu_normalization_ratio(text: str, *, obj: str) -> float:
    """Return the CPU normalisation ratio of a node, a finite decimal > 0."""
    where = annotation_field(ANNOTATION_CPU_NORMALIZATION_RATIO)
    try:
        ratio = float(text) if len(text) < 32 and "_" not in text else 0.0
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < 1000:
        raise InputError(obj=obj, field=where, value=text, problem="expected a decimal above 0")
    return ratio
