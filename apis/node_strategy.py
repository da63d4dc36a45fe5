"""What one node gets of slo-controller-config: its colocation strategy and its NodeSLO.

docs/facts/apis.md, "slo-controller-config". Different from upstream on purpose: a node entry of
system-config that names no bandwidth inherits the cluster's (upstream resets it to 0), and label
ratios are exact decimals (upstream's 0.29 is 28 percent).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from apis.conform import conform
from apis.decode import decode_object, embedded_object
from apis.effective_nodeslo import overlay
from apis.errors import InputError, InputErrors
from apis.keys import (
    ANNOTATION_COLOCATION_STRATEGY,
    ANNOTATION_NETWORK_BANDWIDTH,
    CONFIG_CPU_BURST,
    CONFIG_HOST_APPLICATION,
    CONFIG_RESOURCE_QOS,
    CONFIG_RESOURCE_THRESHOLD,
    CONFIG_SYSTEM,
    LABEL_CPU_RECLAIM_RATIO,
    LABEL_MEMORY_RECLAIM_RATIO,
    LABEL_MID_STATIC_CPU_RESERVED_RATIO,
    LABEL_MID_STATIC_MEMORY_RESERVED_RATIO,
)
from apis.nodeslo import (
    NodeSLOSpec,
)
from apis.quantity import ZERO, parse_quantity
from apis.slo_config import (
    LARGEST_KEY,
    ColocationStrategy,
    SLOConfig,
    Sparse,
    Strategies,
    check_durations,
)

_RATIO_LABELS: Final = (
    (LABEL_CPU_RECLAIM_RATIO, "cpuReclaimThresholdPercent"),
    (LABEL_MEMORY_RECLAIM_RATIO, "memoryReclaimThresholdPercent"),
    (LABEL_MID_STATIC_CPU_RESERVED_RATIO, "midStaticCPUReservedPercent"),
    (LABEL_MID_STATIC_MEMORY_RESERVED_RATIO, "midStaticMemoryReservedPercent"),
)
_LARGEST_RATIO: Final = Decimal(1000)
"""Chosen: upstream has no bound, no sensible ratio is above 2, and in percent it fits an int32."""


class NodeColocation(msgspec.Struct, frozen=True):
    """The colocation strategy of one node and where it came from."""

    strategy: ColocationStrategy
    entry: str | None
    """Name of the node entry, None where the cluster's strategy applies."""
    enabled: bool
    """Whether co-location is on: the cluster's switch and the merged one."""
    problems: tuple[str, ...] = ()
    """What of the node's own labels and annotation could not be used."""


def node_colocation(
    config: SLOConfig, *, name: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> NodeColocation:
    """Return the colocation strategy of a node: cluster, entry, annotation, then ratio labels."""
    sparse, entry = config.colocation.of(labels)
    problems: list[str] = []
    text = annotations.get(ANNOTATION_COLOCATION_STRATEGY)
    where = f'metadata.annotations["{ANNOTATION_COLOCATION_STRATEGY}"]'
    if text:
        try:
            said = embedded_object(text, obj=f"Node {name} {where}", largest=LARGEST_KEY)
            conformed = conform(said, ColocationStrategy)
            if conformed.unknown:
                problems.append(
                    f"Node {name} {where}: unknown members are ignored: {conformed.unknown}"
                )
            merged = overlay(sparse, conformed.tree)
            checked = decode_object(merged, ColocationStrategy, obj=f"Node {name} {where}")
            check_durations(checked, obj=f"Node {name} {where}")
            sparse = merged
        except (InputError, InputErrors) as error:
            problems.append(str(error))
    for label, member in _RATIO_LABELS:
        ratio = labels.get(label)
        if ratio is None:
            continue
        try:
            sparse = {**sparse, member: ratio_percent(ratio)}
        except ValueError as error:
            problems.append(
                str(
                    InputError(
                        obj=f"Node {name}",
                        field=f'metadata.labels["{label}"]',
                        value=ratio,
                        problem=str(error),
                    )
                )
            )
    strategy = decode_object(sparse, ColocationStrategy, obj=f"Node {name}")
    return NodeColocation(
        strategy=strategy,
        entry=entry,
        enabled=bool(config.colocation.cluster.get("enable")) and strategy.enable,
        problems=tuple(problems),
    )


def ratio_percent(text: str) -> int:
    """Return a ratio such as 0.29 in whole percents, truncated. Raises ValueError."""
    try:
        ratio = Decimal(text) if len(text) <= 63 and "_" not in text else Decimal("nan")
    except InvalidOperation:
        ratio = Decimal("nan")
    if not ratio.is_finite() or not 0 <= ratio <= _LARGEST_RATIO:
        raise ValueError("expected a decimal ratio of at least 0, such as 0.65")
    return int(ratio * 100)


class NodeSLOResult(msgspec.Struct, frozen=True):
    """The blocks of a NodeSLO spec, which entry gave each of them, and what went wrong."""

    spec: Sparse
    entries: dict[str, str]
    """Key of the config map -> name of the entry that applied; the cluster's is left out."""
    problems: tuple[str, ...] = ()


def node_slo_spec(
    config: SLOConfig,
    *,
    name: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    extensions: Mapping[str, Any] | None = None,
) -> NodeSLOResult:
    """Return the NodeSLO spec of a node as it is stored.

    `extensions` is what the stored object's extension map holds; it is kept.
    """
    entries: dict[str, str] = {}
    problems: list[str] = []

    def block(key: str, strategies: Strategies[Sparse]) -> Sparse:
        strategy, entry = strategies.of(labels)
        if entry is not None:
            entries[key] = entry
        return strategy

    system = block(CONFIG_SYSTEM, config.system)
    bandwidth = annotations.get(ANNOTATION_NETWORK_BANDWIDTH)
    if bandwidth is not None:
        try:
            amount = parse_quantity(bandwidth)
            if amount < ZERO:
                raise ValueError("a bandwidth must not be negative")
            system = {**system, "totalNetworkBandwidth": str(amount)}
        except ValueError as error:
            problems.append(
                str(
                    InputError(
                        obj=f"Node {name}",
                        field=f'metadata.annotations["{ANNOTATION_NETWORK_BANDWIDTH}"]',
                        value=bandwidth,
                        problem=str(error),
                        hint="the bandwidth of system-config applies",
                    )
                )
            )
    spec: Sparse = {
        "resourceUsedThresholdWithBE": block(CONFIG_RESOURCE_THRESHOLD, config.threshold),
        "resourceQOSStrategy": block(CONFIG_RESOURCE_QOS, config.resource_qos),
        "cpuBurstStrategy": block(CONFIG_CPU_BURST, config.cpu_burst),
        "systemStrategy": system,
        "extensions": {"Object": dict(extensions or {})},
    }
    applications = block(CONFIG_HOST_APPLICATION, config.host_applications).get("applications")
    if applications:
        spec["hostApplications"] = applications
    return NodeSLOResult(with_server_defaults(spec), entries, tuple(problems))


_NETWORK_DEFAULTS: Final = {
    "ingressRequest": 0,
    "ingressLimit": 100,
    "egressRequest": 0,
    "egressLimit": 100,
}


def with_server_defaults(spec: Sparse) -> Sparse:
    """Return the spec as the API server stores it: the CRD fills in networkQOS.

    Comparing and writing this form keeps an unchanged object unwritten.
    """
    strategy = spec.get("resourceQOSStrategy")
    if not isinstance(strategy, dict):
        return spec
    filled = dict(strategy)
    for name, qos in strategy.items():
        if isinstance(qos, dict) and isinstance(qos.get("networkQOS"), dict):
            filled[name] = {**qos, "networkQOS": {**_NETWORK_DEFAULTS, **qos["networkQOS"]}}
    return {**spec, "resourceQOSStrategy": filled}


def conform_node_slo(spec: Sparse) -> Sparse:
    """Return a stored spec in the spelling of `node_slo_spec`, to compare the two."""
    return with_server_defaults(conform(spec, NodeSLOSpec).tree)
