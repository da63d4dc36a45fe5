"""CPU normalisation and resource amplification: ratios on a node that make its CPUs comparable.

Both ratios are decimals with two digits; they count in hundredths here, so arithmetic is exact.
Sources: manager.md sections 10 and 11. Amplification uses the normalisation of the same round, and
an error leaves the last annotation in force (upstream is one round late and deletes it).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Final

from apis.core import Node
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_CPU_BASIC_INFO,
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    CPU,
    LABEL_CPU_NORMALIZATION_ENABLED,
)
from apis.slo_config import CPUNormalizationStrategy, ResourceAmplificationStrategy
from apis.topology import NodeResourceTopology, parse_cpu_basic_info
from cluster.ratios import hundredths, ratio_text

_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def normalization_enabled(node: Node, strategy: CPUNormalizationStrategy) -> bool:
    """Return whether the node's label, else the strategy, switches normalisation on."""
    label = node.metadata.labels.get(LABEL_CPU_NORMALIZATION_ENABLED)
    if label is None:
        return strategy.enable
    if label in _TRUE:
        return True
    if label in _FALSE:
        return False
    raise InputError(
        obj=f"Node {node.metadata.name}",
        field=f'metadata.labels["{LABEL_CPU_NORMALIZATION_ENABLED}"]',
        value=label,
        problem="expected true or false",
    )


def normalization_percent(
    node: Node, topology: NodeResourceTopology | None, strategy: CPUNormalizationStrategy
) -> int:
    """Return the node's ratio in hundredths, 100 when switched off. Raises InputError."""
    if not normalization_enabled(node, strategy):
        return 100
    name = node.metadata.name
    text = topology.metadata.annotations.get(ANNOTATION_CPU_BASIC_INFO) if topology else None
    if text is None:
        raise InputError(
            obj=f"NodeResourceTopology {name}",
            field=f'metadata.annotations["{ANNOTATION_CPU_BASIC_INFO}"]',
            value="(absent)",
            problem="the node has not reported its CPU model yet",
            hint="koordlet writes it with the gate NodeTopologyReport",
        )
    info = parse_cpu_basic_info(text, obj=f"NodeResourceTopology {name}")
    ratios = strategy.ratio_model.get(info.cpu_model)
    ratio = strategy.default_ratio
    if ratios is not None:
        member = {
            (True, True): ratios.hyper_thread_turbo_enabled_ratio,
            (True, False): ratios.hyper_thread_enabled_ratio,
            (False, True): ratios.turbo_enabled_ratio,
            (False, False): ratios.base_ratio,
        }[info.hyper_thread_enabled, info.turbo_enabled]
        ratio = member if member is not None else ratio
    where = f"ratioModel[{info.cpu_model!r}]"
    if ratio is None:
        raise InputError(
            obj="cpu-normalization-config",
            field=where,
            value="(absent)",
            problem="no ratio for this CPU model, and no defaultRatio",
        )
    if not 1.0 <= ratio <= 5.0:
        raise InputError(
            obj="cpu-normalization-config", field=where, value=ratio, problem="expected 1.0..5.0"
        )
    return hundredths(ratio)


def annotated_normalization(node: Node) -> int | None:
    """Return the ratio that the node carries, in hundredths; None if none or not readable."""
    text = node.metadata.annotations.get(ANNOTATION_CPU_NORMALIZATION_RATIO)
    try:
        value = Decimal(text) if text and len(text) < 32 else None
    except InvalidOperation:
        return None
    if value is None or not value.is_finite() or not 0 < value < 1000:
        return None
    return int(value * 100)


def amplification_percents(
    normalization: int | None, strategy: ResourceAmplificationStrategy
) -> dict[str, int]:
    """Return the ratio of each resource in hundredths; empty when nothing is amplified.

    normalization: the node's ratio in hundredths. Raises InputError for a ratio below 1.
    """
    ratios: Mapping[str, float] = strategy.resource_amplification_ratio if strategy.enable else {}
    percents: dict[str, int] = {}
    for resource, ratio in ratios.items():
        if not 1.0 <= ratio <= 1000.0:
            raise InputError(
                obj="resource-amplification-config",
                field=f"resourceAmplificationRatio[{resource}]",
                value=ratio,
                problem="expected a ratio of at least 1",
            )
        percents[resource] = hundredths(ratio)
    # Rounded once, after the product: 1.25 x 1.15 is 1.44.
    cpu = hundredths(ratios.get(CPU, 1.0) * (normalization or 100) / 100)
    if cpu > 100:
        percents[CPU] = cpu
    return percents


def amplification_text(percents: Mapping[str, int]) -> str:
    """Return the annotation's JSON: keys sorted, two decimals."""
    members = (f'"{name}":{ratio_text(percents[name])}' for name in sorted(percents))
    return "{" + ",".join(members) + "}"
