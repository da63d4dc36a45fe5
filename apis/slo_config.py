"""The config map slo-controller-config: cluster strategies and node entries.

Every key loads on its own: a key that cannot be used keeps its last good value and is reported; an
entry that cannot be used takes the cluster's strategy and is reported. Overlay is per field and
lists replace. docs/facts/apis.md, "slo-controller-config".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field

from apis.conform import conform
from apis.decode import Wire, decode_object, embedded_object
from apis.effective_nodeslo import decode_nodeslo, overlay
from apis.errors import InputError, InputErrors
from apis.keys import (
    CONFIG_COLOCATION,
    CONFIG_CPU_BURST,
    CONFIG_CPU_NORMALIZATION,
    CONFIG_HOST_APPLICATION,
    CONFIG_RESOURCE_AMPLIFICATION,
    CONFIG_RESOURCE_QOS,
    CONFIG_RESOURCE_THRESHOLD,
    CONFIG_SYSTEM,
)
from apis.members import named_members, respell, unknown_phrase
from apis.meta import LabelSelector, matches, parse_duration, selector_problem
from apis.nodeslo import (
    CPUBurstStrategy,
    HostApplication,
    ResourceQOSStrategy,
    ResourceThresholdStrategy,
    SystemStrategy,
)

AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Percent = Annotated[int, Meta(ge=0, le=100)]


class MetricAggregatePolicy(Wire, frozen=True):
    durations: tuple[str, ...] = ("5m", "10m", "30m")


class ColocationStrategy(Wire, frozen=True):
    """How much of a node is given to batch and mid pods. Bounds are the run-time rules."""

    enable: bool = False
    metric_aggregate_duration_seconds: AtLeastOne = 300
    metric_report_interval_seconds: AtLeastOne = 60
    metric_aggregate_policy: MetricAggregatePolicy = MetricAggregatePolicy()
    metric_memory_collect_policy: Literal[
        "usageWithHotPageCache", "usageWithoutPageCache", "usageWithPageCache"
    ] = "usageWithoutPageCache"
    cpu_reclaim_threshold_percent: NotNegative = 60
    cpu_calculate_policy: str = "usage"
    memory_reclaim_threshold_percent: NotNegative = 65
    memory_calculate_policy: str = "usage"
    degrade_time_minutes: AtLeastOne = 15
    update_time_threshold_seconds: AtLeastOne = 300
    resource_diff_threshold: Annotated[float, Meta(gt=0, le=1e9)] = 0.1
    mid_reclaim_mode: str = ""
    mid_cpu_threshold_percent: Percent = field(name="midCPUThresholdPercent", default=100)
    mid_memory_threshold_percent: Percent = 100
    mid_unallocated_percent: Percent = 0
    mid_static_cpu_reserved_percent: NotNegative = field(
        name="midStaticCPUReservedPercent", default=0
    )
    mid_static_memory_reserved_percent: NotNegative = 0
    batch_cpu_threshold_percent: NotNegative | None = field(
        name="batchCPUThresholdPercent", default=None
    )
    batch_memory_threshold_percent: NotNegative | None = None
    extensions: dict[str, Any] = field(default_factory=dict)


class CPURatios(Wire, frozen=True):
    """Normalisation ratios of one CPU model by hyper-threading and turbo."""

    base_ratio: float | None = None
    hyper_thread_enabled_ratio: float | None = None
    turbo_enabled_ratio: float | None = None
    hyper_thread_turbo_enabled_ratio: float | None = None


class CPUNormalizationStrategy(Wire, frozen=True):
    enable: bool = False
    default_ratio: float | None = None
    ratio_model: dict[str, CPURatios] = field(default_factory=dict)


class ResourceAmplificationStrategy(Wire, frozen=True):
    enable: bool = False
    resource_amplification_ratio: dict[str, float] = field(default_factory=dict)


class _Applications(Wire, frozen=True):
    applications: tuple[HostApplication, ...] = ()


S = TypeVar("S")


class NodeEntry(msgspec.Struct, Generic[S], frozen=True):
    """One node entry, already merged over the cluster's strategy."""

    name: str
    selector: LabelSelector | None
    strategy: S


class Strategies(msgspec.Struct, Generic[S], frozen=True):
    """The cluster's strategy and the node entries of one key, in the order of the config map."""

    cluster: S
    entries: tuple[NodeEntry[S], ...] = ()

    def of(self, labels: Mapping[str, str]) -> tuple[S, str | None]:
        """Return what a node with `labels` gets, and the name of the entry or None for cluster."""
        for entry in self.entries:
            if matches(entry.selector, labels):
                return entry.strategy, entry.name
        return self.cluster, None


Sparse = dict[str, Any]
"""A strategy as the objects carry it: only what was said or has a manager default."""

_DEFAULT_THRESHOLD: Final[Sparse] = {
    "enable": False,
    "cpuSuppressThresholdPercent": 65,
    "cpuSuppressPolicy": "cpuset",
    "memoryEvictThresholdPercent": 70,
    "cpuEvictPolicy": "evictByRealLimit",
}
_DEFAULT_BURST: Final[Sparse] = {
    "policy": "none",
    "cpuBurstPercent": 1000,
    "cfsQuotaBurstPercent": 300,
    "cfsQuotaBurstPeriodSeconds": -1,
    "sharePoolThresholdPercent": 50,
}
_DEFAULT_SYSTEM: Final[Sparse] = {"totalNetworkBandwidth": "0"}


class SLOConfig(msgspec.Struct, frozen=True):
    """All keys, loaded. The defaults are what holds without a config map."""

    colocation: Strategies[Sparse] = Strategies({})
    threshold: Strategies[Sparse] = Strategies(_DEFAULT_THRESHOLD)
    resource_qos: Strategies[Sparse] = Strategies({})
    cpu_burst: Strategies[Sparse] = Strategies(_DEFAULT_BURST)
    system: Strategies[Sparse] = Strategies(_DEFAULT_SYSTEM)
    host_applications: Strategies[Sparse] = Strategies({})
    cpu_normalization: Strategies[Sparse] = Strategies({})
    resource_amplification: Strategies[Sparse] = Strategies({})


class Effect(StrEnum):
    """What follows from a problem; the text is meant for people."""

    KEY_KEPT = "the last good value stays in force"
    CLUSTER_STRATEGY = "the cluster strategy applies"
    IGNORED = "ignored"


UNKNOWN_MEMBER: Final = "UnknownMember"
"""Reason of the event about members that no field matches."""


class ConfigProblem(msgspec.Struct, frozen=True):
    """A part of a key that is not in force: the whole key, one entry, or unknown members."""

    key: str
    reason: str
    """Reason of the event: which family of keys could not be read, or `UNKNOWN_MEMBER`."""
    message: str
    effect: Effect


class _Key(msgspec.Struct, frozen=True):
    name: str
    member: str
    type: type[msgspec.Struct]
    defaults: Sparse
    cluster_in: str | None
    entries_in: str
    reason: str
    empty_is_absent: bool = False
    entries_replace: bool = False


_KEYS: Final = (
    _Key(
        CONFIG_COLOCATION,
        "colocation",
        ColocationStrategy,
        {},
        None,
        "nodeConfigs",
        "ColocationCfgUnmarshalFailed",
        empty_is_absent=True,
    ),
    _Key(
        CONFIG_RESOURCE_THRESHOLD,
        "threshold",
        ResourceThresholdStrategy,
        _DEFAULT_THRESHOLD,
        "clusterStrategy",
        "nodeStrategies",
        "SLOCfgUnmarshalFailed",
    ),
    _Key(
        CONFIG_RESOURCE_QOS,
        "resource_qos",
        ResourceQOSStrategy,
        {},
        "clusterStrategy",
        "nodeStrategies",
        "SLOCfgUnmarshalFailed",
    ),
    _Key(
        CONFIG_CPU_BURST,
        "cpu_burst",
        CPUBurstStrategy,
        _DEFAULT_BURST,
        "clusterStrategy",
        "nodeStrategies",
        "SLOCfgUnmarshalFailed",
    ),
    _Key(
        CONFIG_SYSTEM,
        "system",
        SystemStrategy,
        _DEFAULT_SYSTEM,
        "clusterStrategy",
        "nodeStrategies",
        "SLOCfgUnmarshalFailed",
    ),
    _Key(
        CONFIG_HOST_APPLICATION,
        "host_applications",
        _Applications,
        {},
        None,
        "nodeConfigs",
        "SLOCfgUnmarshalFailed",
        entries_replace=True,
    ),
    _Key(
        CONFIG_CPU_NORMALIZATION,
        "cpu_normalization",
        CPUNormalizationStrategy,
        {},
        None,
        "nodeConfigs",
        "CPUNormalizationCfgUnmarshalFailed",
    ),
    _Key(
        CONFIG_RESOURCE_AMPLIFICATION,
        "resource_amplification",
        ResourceAmplificationStrategy,
        {},
        None,
        "nodeConfigs",
        "ResourceAmplificationCfgUnmarshalFailed",
    ),
)

MEMBERS: Final[Mapping[str, str]] = {key.name: key.member for key in _KEYS}
"""Key of the config map -> member of `SLOConfig`."""
NODE_SLO_BLOCKS: Final[Mapping[str, str]] = {
    CONFIG_RESOURCE_THRESHOLD: "resourceUsedThresholdWithBE",
    CONFIG_RESOURCE_QOS: "resourceQOSStrategy",
    CONFIG_CPU_BURST: "cpuBurstStrategy",
    CONFIG_SYSTEM: "systemStrategy",
    CONFIG_HOST_APPLICATION: "hostApplications",
}
"""Key of the config map -> block of a NodeSLO's spec, for the keys that make one."""

LARGEST_KEY: Final = 2 * 1024 * 1024
"""Bytes of one key's text; chosen: the API server stores objects of at most 1.5 MiB."""


def load_slo_config(
    data: Mapping[str, str], *, old: SLOConfig, obj: str
) -> tuple[SLOConfig, list[ConfigProblem]]:
    """Return the configuration that `data` (of the config map) says, over the last good one.

    A key that is absent has its default. A key whose text, cluster strategy or shape cannot be used
    keeps `old`'s value; an entry that cannot be used takes the cluster's strategy.
    """
    problems: list[ConfigProblem] = []
    changes: dict[str, Strategies[Sparse]] = {}
    for key in _KEYS:
        text = data.get(key.name)
        if text is None or (key.empty_is_absent and not text):
            changes[key.member] = Strategies(key.defaults)
            continue
        found = _Problems(key)
        try:
            changes[key.member] = _load(key, text, found, obj=obj)
        except (InputError, InputErrors) as error:
            changes[key.member] = getattr(old, key.member)
            problems.append(ConfigProblem(key.name, key.reason, str(error), Effect.KEY_KEPT))
        else:
            problems += found.problems
    return SLOConfig(**changes), problems


class _Problems:
    """Collects problems of one key that leave the rest of the key in force."""

    def __init__(self, key: _Key) -> None:
        self._key = key
        self.problems: list[ConfigProblem] = []

    def entry(self, message: str) -> None:
        """Note that an entry takes the cluster's strategy."""
        key = self._key
        self.problems.append(ConfigProblem(key.name, key.reason, message, Effect.CLUSTER_STRATEGY))

    def unknown(self, place: str, unknown: str) -> None:
        """Note members that no field matches, if there are any."""
        if unknown:
            message = f"{place}: unknown members: {unknown}"
            problem = ConfigProblem(self._key.name, UNKNOWN_MEMBER, message, Effect.IGNORED)
            self.problems.append(problem)


def _load(key: _Key, text: str, found: _Problems, *, obj: str) -> Strategies[Sparse]:
    where = f"{obj} data[{key.name}]"
    plain = embedded_object(text, obj=where, largest=LARGEST_KEY)
    frame = [key.entries_in] if key.cluster_in is None else [key.cluster_in, key.entries_in]
    members, others = named_members(plain, frame)
    said, said_at = others, where
    if key.cluster_in is not None:
        said, said_at = members.get(key.cluster_in, {}), f"{where}.{key.cluster_in}"
        found.unknown(where, unknown_phrase(others, frame))
        if not isinstance(said, dict):
            raise InputError(
                obj=where, field=key.cluster_in, value=said, problem="expected an object"
            )
    conformed = conform(said, key.type)
    found.unknown(said_at, conformed.unknown)
    cluster: Sparse = overlay(key.defaults, conformed.tree)
    _check(key, cluster, obj=where)
    raw_entries = members.get(key.entries_in, [])
    if not isinstance(raw_entries, list):
        raise InputError(
            obj=where, field=key.entries_in, value=raw_entries, problem="expected a list"
        )
    entries: list[NodeEntry[Sparse]] = []
    for index, raw in enumerate(raw_entries):
        place = f"{where}.{key.entries_in}[{index}]"
        frame_of_entry, said = (
            named_members(raw, _ENTRY_FRAME) if isinstance(raw, dict) else ({}, raw)
        )
        try:
            selector: LabelSelector | None = None
            selector = _selector(frame_of_entry.get("nodeSelector"), found, obj=place)
            entries.append(_entry(key, said, frame_of_entry, selector, cluster, found, obj=place))
        except (InputError, InputErrors) as error:
            found.entry(str(error))
            name = frame_of_entry.get("name")
            entries.append(NodeEntry(str(name or f"#{index}"), selector, cluster))
    return Strategies(cluster, tuple(entries))


_ENTRY_FRAME: Final = ("name", "nodeSelector")
"""Members of a node entry that stand beside its strategy's."""


def _entry(
    key: _Key,
    said: Any,
    frame: Mapping[str, Any],
    selector: LabelSelector | None,
    cluster: Sparse,
    found: _Problems,
    *,
    obj: str,
) -> NodeEntry[Sparse]:
    if not isinstance(said, dict):
        raise InputError(obj=obj, field="(entry)", value=said, problem="expected an object")
    name = frame.get("name", "")
    if not isinstance(name, str):
        raise InputError(obj=obj, field="name", value=name, problem="expected a text")
    conformed = conform(said, key.type)
    found.unknown(obj, conformed.unknown)
    strategy: Sparse = conformed.tree
    if not key.entries_replace:
        strategy = overlay(cluster, strategy)
    _check(key, strategy, obj=obj)
    return NodeEntry(name, selector, strategy)


def _selector(plain: Any, found: _Problems, *, obj: str) -> LabelSelector | None:
    if plain is None:
        return None
    spelt = respell(plain, LabelSelector)
    found.unknown(f"{obj}.nodeSelector", spelt.unknown)
    selector = decode_object({"nodeSelector": spelt.tree}, _Selector, obj=obj).node_selector
    problem = selector_problem(selector)
    if problem:
        raise InputError(obj=obj, field="nodeSelector", value=plain, problem=problem)
    return selector


class _Selector(Wire, frozen=True):
    node_selector: LabelSelector


def _check(key: _Key, strategy: Sparse, *, obj: str) -> None:
    value = decode_object(strategy, key.type, obj=obj)
    # What a node would refuse must not be sent to it.
    block = NODE_SLO_BLOCKS.get(key.name)
    if block is not None:
        applications = key.name == CONFIG_HOST_APPLICATION
        said = strategy.get("applications", []) if applications else strategy
        decode_nodeslo({block: said}, obj=obj)
    if isinstance(value, ColocationStrategy):
        check_durations(value, obj=obj)


def check_durations(strategy: ColocationStrategy, *, obj: str) -> None:
    """Raise InputError for a duration that cannot be read."""
    for duration in strategy.metric_aggregate_policy.durations:
        try:
            parse_duration(duration)
        except ValueError as error:
            raise InputError(
                obj=obj,
                field="metricAggregatePolicy.durations",
                value=duration,
                problem=str(error),
            ) from None
