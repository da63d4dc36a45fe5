"""The status of the NodeMetric: measurements, pods and the object's spec become one report.

`node_metric_status` is a pure function; `koordlet.reporters.node_metric_loop` sends its result.
The manager computes batch and mid resources from it. Fields, windows and units are upstream's:
docs/facts/koordlet.md, "NodeMetric".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.device import DeviceInfo, DeviceType
from apis.keys import CPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, MEMORY
from apis.meta import format_duration, format_time, parse_duration
from apis.nodemetric import (
    AggregatedUsage,
    HostApplicationMetricInfo,
    NodeMetricInfo,
    NodeMetricSpec,
    NodeMetricStatus,
    NUMAUsage,
    PodMetricInfo,
    ProdMetric,
    ResourceMap,
)
from apis.qos import priority_class_with_default, qos_class_with_default
from apis.quantity import Quantity, ResourceList
from hooks.subject import HostAppSubject, Pod
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.measurement.series import Aggregate, Metric, Series

_SPANNED: Final = 0.5
"""The share of a window that its samples must span, so that its percentiles are reported;
upstream's."""
_LONGEST_WINDOW_S: Final = 86400.0
"""Longer windows are cut; chosen: no store of a node keeps more than a day."""


class Policy(msgspec.Struct, frozen=True):
    """How the node reports. Defaults and lower bounds are upstream's.

    windows: the texts of the durations for percentiles. memory: the name of the memory policy.
    """

    report_interval_s: float = 60.0
    aggregate_s: float = 300.0
    windows: tuple[str, ...] = ("5m0s", "10m0s", "30m0s")
    memory: str = "usageWithoutPageCache"


_LEAST_INTERVAL_S: Final = 30.0
_LEAST_AGGREGATE_S: Final = 60.0
_LONGEST_AGGREGATE_S: Final = 1800.0
"""Chosen: as long as the node's samples are kept. Those of 110 pods with two containers each take
29 MiB then (5 MiB over 300 s); twice the value doubles that."""
_LONGEST_INTERVAL_S: Final = 86400.0
"""Chosen: a typing error must not stop reports for years."""
_MOST_WINDOWS: Final = 16
"""Chosen: each costs ten sorts of its samples; upstream's default has three."""


def policy_of(spec: NodeMetricSpec) -> tuple[Policy, tuple[str, ...]]:
    """Return the policy of a spec, with defaults for what it lacks, and the problems of the rest.

    A bad field counts as missing.
    """
    given = spec.metric_collect_policy
    default = Policy()
    if given is None:
        return default, ()
    problems: list[str] = []
    interval = given.report_interval_seconds
    if interval is None:
        interval_s = default.report_interval_s
    else:
        interval_s = min(max(float(interval), _LEAST_INTERVAL_S), _LONGEST_INTERVAL_S)
    aggregate = given.aggregate_duration_seconds
    if aggregate is None:
        aggregate_s = default.aggregate_s
    else:
        aggregate_s = min(max(float(aggregate), _LEAST_AGGREGATE_S), _LONGEST_AGGREGATE_S)
        if aggregate > _LONGEST_AGGREGATE_S:
            problems.append(
                f"spec.metricCollectPolicy.aggregateDurationSeconds: {aggregate}: longer than the"
                f" {_LONGEST_AGGREGATE_S:.0f} s for which samples are kept; that many seconds count"
            )
    windows = default.windows
    if given.node_aggregate_policy is not None and given.node_aggregate_policy.durations:
        kept = []
        for text in given.node_aggregate_policy.durations[:_MOST_WINDOWS]:
            try:
                nanoseconds = parse_duration(text)
            except ValueError as error:
                nanoseconds = 0
                problem = str(error)
            else:
                problem = "must be longer than 0"
            if nanoseconds > 0:
                kept.append(format_duration(nanoseconds))
            else:
                problems.append(
                    f"spec.metricCollectPolicy.nodeAggregatePolicy.durations: {text!r}: {problem}"
                )
        windows = tuple(kept) or default.windows
    memory = given.node_memory_collect_policy or default.memory
    if memory not in _MEMORY:
        problems.append(
            f"spec.metricCollectPolicy.nodeMemoryCollectPolicy: {memory!r}: not one of"
            f" {', '.join(_MEMORY)}"
        )
        memory = default.memory
    return Policy(interval_s, aggregate_s, windows, memory), tuple(problems)


class _Memory(msgspec.Struct, frozen=True):
    """The series that one memory policy reports."""

    node: Metric
    system: Metric
    pod: Metric
    host_app: Metric


_WITHOUT_CACHE: Final = _Memory(
    Metric.NODE_MEMORY, Metric.SYSTEM_MEMORY, Metric.POD_MEMORY, Metric.HOST_APP_MEMORY
)
_MEMORY: Final[Mapping[str, _Memory]] = {
    # Hot pages are known of the node and of pods alone.
    "usageWithHotPageCache": _Memory(
        Metric.NODE_MEMORY_WITH_HOT_PAGES,
        Metric.SYSTEM_MEMORY,
        Metric.POD_MEMORY_WITH_HOT_PAGES,
        Metric.HOST_APP_MEMORY,
    ),
    "usageWithoutPageCache": _WITHOUT_CACHE,
    "usageWithPageCache": _Memory(
        Metric.NODE_MEMORY_WITH_PAGE_CACHE,
        Metric.SYSTEM_MEMORY_WITH_PAGE_CACHE,
        Metric.POD_MEMORY_WITH_PAGE_CACHE,
        Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE,
    ),
}


class Gpu(msgspec.Struct, frozen=True):
    """What a usage entry needs to know of a GPU. minor: number of the device node."""

    minor: int
    memory_bytes: int
    healthy: bool = True


def measured(measurements: BulkMeasurements, *, within_s: float) -> frozenset[str]:
    """Return the uids of the pods with samples of CPU and memory in the window."""
    cpu = measurements.averages(Metric.POD_CPU, within_s=within_s)
    memory = measurements.averages(Metric.POD_MEMORY, within_s=within_s)
    return frozenset(of for of, _ in cpu.keys() & memory.keys())


def node_metric_status(
    measurements: BulkMeasurements,
    pods: Sequence[Pod],
    host_apps: Sequence[HostAppSubject],
    policy: Policy,
    *,
    wall_s: float,
    gpus: Mapping[str, Gpu] | None = None,
    reclaimable: ResourceMap | None = None,
    peak: ResourceMap | None = None,
) -> NodeMetricStatus:
    """Return the report of this moment.

    wall_s: seconds since the epoch. gpus: by UUID. reclaimable, peak: the prediction; None where
    there is none, and then the report has an empty reclaimable amount and no peak.
    """
    memory = _memory_in_force(measurements, policy)
    return NodeMetricStatus(
        update_time=format_time(datetime.fromtimestamp(wall_s, UTC)),
        node_metric=_node(measurements, policy, memory, gpus or {}),
        pods_metric=_pods(measurements, pods, policy, memory, gpus or {}),
        host_application_metric=_host_apps(measurements, host_apps, policy, memory),
        prod_reclaimable_metric=ProdMetric(reclaimable or ResourceMap()),
        prod_peak_metric=None if peak is None else ProdMetric(peak),
    )


def amounts(cpu_milli: int, memory_bytes: int) -> ResourceMap:
    """Return CPU in milli-cores and memory in bytes, in the notations that upstream writes."""
    return ResourceMap({CPU: Quantity.of_milli(cpu_milli), MEMORY: Quantity.of_bytes(memory_bytes)})


def _usage(cpu_cores: float, memory_bytes: float) -> ResourceMap:
    return amounts(max(int(cpu_cores * 1000), 0), max(int(memory_bytes), 0))


def _memory_in_force(measurements: BulkMeasurements, policy: Policy) -> _Memory:
    """Return the series of the policy, or those without page cache if it has no samples.

    Its collector may be off, or the kernel may not count cold pages. A report without any use
    would count as missing.
    """
    wanted = _MEMORY[policy.memory]
    known = measurements.latest(Series(wanted.node), within_s=policy.aggregate_s)
    return wanted if known is not None else _WITHOUT_CACHE


# --- the node ------------------------------------------------------------------------------------


def _node(
    measurements: BulkMeasurements, policy: Policy, memory: _Memory, gpus: Mapping[str, Gpu]
) -> NodeMetricInfo:
    return NodeMetricInfo(
        node_usage=_with_devices(
            _average(
                measurements, Series(Metric.NODE_CPU), Series(memory.node), policy.aggregate_s
            ),
            _node_gpus(measurements, policy, gpus),
        ),
        aggregated_node_usages=_windows(
            measurements, Series(Metric.NODE_CPU), Series(memory.node), policy
        ),
        system_usage=_average(
            measurements,
            Series(Metric.SYSTEM_CPU),
            Series(memory.system),
            policy.aggregate_s,
        ),
        aggregated_system_usages=_windows(
            measurements, Series(Metric.SYSTEM_CPU), Series(memory.system), policy
        ),
        numa_usages=_numa(measurements, policy),
    )


def _average(
    measurements: BulkMeasurements, cpu: Series, memory: Series, within_s: float
) -> ResourceMap:
    cores = measurements.average(cpu, within_s=within_s)
    used = measurements.average(memory, within_s=within_s)
    if cores is None or used is None:
        return ResourceMap()
    return _usage(cores, used)


def _with_devices(usage: ResourceMap, devices: tuple[DeviceInfo, ...]) -> ResourceMap:
    return msgspec.structs.replace(usage, devices=devices) if devices else usage


_STATISTICS: Final = (
    ("avg", "average"),
    ("p50", "p50"),
    ("p90", "p90"),
    ("p95", "p95"),
    ("p99", "p99"),
)


def _windows(
    measurements: BulkMeasurements, cpu: Series, memory: Series, policy: Policy
) -> tuple[AggregatedUsage, ...]:
    found = []
    for text in policy.windows:
        window_s = parse_duration(text) / 1e9
        within_s = min(window_s, _LONGEST_WINDOW_S)
        cores = measurements.aggregate(cpu, within_s=within_s)
        used = measurements.aggregate(memory, within_s=within_s)
        usage = {}
        for name, attribute in _STATISTICS:
            if _spans(cores, window_s) and _spans(used, window_s):
                usage[name] = _usage(getattr(cores, attribute), getattr(used, attribute))
            else:
                usage[name] = ResourceMap()
        found.append(AggregatedUsage(usage=usage, duration=text))
    return tuple(found)


def _spans(aggregate: Aggregate | None, window_s: float) -> bool:
    return aggregate is not None and aggregate.span_s >= _SPANNED * window_s


def _numa(measurements: BulkMeasurements, policy: Policy) -> tuple[NUMAUsage, ...]:
    within_s = policy.aggregate_s
    node = _by_object(measurements, Metric.NODE_NUMA_CPU, Metric.NODE_NUMA_MEMORY, within_s)
    system = _by_object(measurements, Metric.SYSTEM_NUMA_CPU, Metric.SYSTEM_NUMA_MEMORY, within_s)
    numbers = sorted((int(of), of) for of in node if of.isdecimal())
    return tuple(
        NUMAUsage(
            numa_node_id=number,
            node_usage=_usage(*node[of]),
            system_usage=_usage(*system[of]) if of in system else ResourceMap(),
        )
        for number, of in numbers
    )


def _by_object(
    measurements: BulkMeasurements, cpu: Metric, memory: Metric, within_s: float
) -> dict[str, tuple[float, float]]:
    """Return (cores, bytes), averaged over the window, of the objects that have both."""
    cores = measurements.averages(cpu, within_s=within_s)
    used = measurements.averages(memory, within_s=within_s)
    return {key[0]: (cores[key], used[key]) for key in cores.keys() & used.keys()}


# --- pods and host applications ------------------------------------------------------------------


def _pods(
    measurements: BulkMeasurements,
    pods: Sequence[Pod],
    policy: Policy,
    memory: _Memory,
    gpus: Mapping[str, Gpu],
) -> tuple[PodMetricInfo, ...]:
    used = _by_object(measurements, Metric.POD_CPU, memory.pod, policy.aggregate_s)
    devices = _pod_gpus(measurements, policy, gpus)
    return tuple(
        PodMetricInfo(
            name=pod.name,
            namespace=pod.namespace,
            pod_usage=_with_devices(_usage(*used[pod.uid]), devices.get(pod.uid, ())),
            priority=priority_class_with_default(pod.labels, pod.priority, pod.kube_qos).value,
            qos=qos_class_with_default(pod.labels, pod.kube_qos).value,
        )
        for pod in sorted(pods, key=lambda pod: (pod.namespace, pod.name))
        if pod.uid in used
    )


def _host_apps(
    measurements: BulkMeasurements,
    host_apps: Sequence[HostAppSubject],
    policy: Policy,
    memory: _Memory,
) -> tuple[HostApplicationMetricInfo, ...]:
    used = _by_object(measurements, Metric.HOST_APP_CPU, memory.host_app, policy.aggregate_s)
    return tuple(
        HostApplicationMetricInfo(
            name=app.name, usage=_usage(*used[app.name]), priority=app.priority, qos=app.qos.value
        )
        for app in sorted(host_apps, key=lambda app: app.name)
        if app.name in used
    )


# --- GPUs ----------------------------------------------------------------------------------------


def _node_gpus(
    measurements: BulkMeasurements, policy: Policy, gpus: Mapping[str, Gpu]
) -> tuple[DeviceInfo, ...]:
    within_s = policy.aggregate_s
    percent = measurements.averages(Metric.NODE_GPU_CORE, within_s=within_s)
    used = measurements.averages(Metric.NODE_GPU_MEMORY, within_s=within_s)
    return tuple(
        _gpu(uuid, int(minor), percent[uuid, minor], used[uuid, minor], gpus.get(uuid))
        for uuid, minor in sorted(percent.keys() & used.keys(), key=_minor_then_uuid)
        if minor.isdecimal()
    )


def _pod_gpus(
    measurements: BulkMeasurements, policy: Policy, gpus: Mapping[str, Gpu]
) -> dict[str, tuple[DeviceInfo, ...]]:
    within_s = policy.aggregate_s
    percent = measurements.averages(Metric.POD_GPU_CORE, within_s=within_s)
    used = measurements.averages(Metric.POD_GPU_MEMORY, within_s=within_s)
    found: dict[str, list[tuple[str, str]]] = {}
    for of, detail in percent.keys() & used.keys():
        uuid, _, minor = detail.rpartition("/")
        if minor.isdecimal():
            found.setdefault(of, []).append((uuid, minor))
    return {
        of: tuple(
            _gpu(
                uuid,
                int(minor),
                percent[of, f"{uuid}/{minor}"],
                used[of, f"{uuid}/{minor}"],
                gpus.get(uuid),
            )
            for uuid, minor in sorted(names, key=_minor_then_uuid)
        )
        for of, names in found.items()
    }


def _minor_then_uuid(name: tuple[str, str]) -> tuple[int, str]:
    uuid, minor = name
    return (int(minor) if minor.isdecimal() else -1, uuid)


def _gpu(uuid: str, minor: int, percent: float, used_bytes: float, known: Gpu | None) -> DeviceInfo:
    resources: ResourceList = {
        GPU_CORE: Quantity.of(max(int(percent), 0)),
        GPU_MEMORY: Quantity.of_bytes(max(int(used_bytes), 0)),
    }
    if known is not None and known.memory_bytes > 0:
        ratio = int(100 * max(used_bytes, 0) / known.memory_bytes)
        resources[GPU_MEMORY_RATIO] = Quantity.of(ratio)
    return DeviceInfo(
        type=DeviceType.GPU.value,
        id=uuid,
        minor=minor,
        health=known is None or known.healthy,
        resources=resources,
    )
