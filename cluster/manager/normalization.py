"""CPU normalisation and resource amplification: ratios of a node that make CPU models comparable.

Annotations hold both ratios as decimals with two digits; here they are integers in hundredths.
Amplification uses the normalisation of the same reconcile (upstream: of the previous one). Rules:
docs/facts/manager.md, "Normalisation and amplification".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Final

from apis.core import Node
from apis.decode import decode_field, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_CPU_BASIC_INFO,
    ANNOTATION_CPU_NORMALIZATION_RATIO,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    CPU,
    LABEL_CPU_NORMALIZATION_ENABLED,
)
from apis.slo_config import CPUNormalizationStrategy, ResourceAmplificationStrategy
from apis.topology import NodeResourceTopology, parse_cpu_basic_info
from cluster.ratios import hundredths, ratio_text

_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_NO_RATIOS: Final[Mapping[str, int]] = MappingProxyType({})
_LARGEST_RATIO: Final = 1000.0
"""Chosen, as in the node webhook: a larger ratio is a typing error. Amounts in bytes would overflow
int64 only with ratios that are a hundred thousand times larger."""
_decode_ratios = field_decoder(dict[str, float])
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def normalization_enabled(node: Node, strategy: CPUNormalizationStrategy) -> bool:
    """Return whether normalisation is on: by the node's label, without one by the strategy.

    Raises InputError for a label that is not a boolean.
    """
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
    # Upstream's range, which admission enforces too.
    if not 1.0 <= ratio <= 5.0:
        raise InputError(
            obj="cpu-normalization-config", field=where, value=ratio, problem="expected 1.0..5.0"
        )
    return hundredths(ratio)


def annotated_normalization(node: Node) -> int | None:
    """Return the annotated ratio in hundredths; None if it is absent or unreadable.

    A text of 32 characters or more is not parsed: the longest ratio that is written has seven.
    """
    text = node.metadata.annotations.get(ANNOTATION_CPU_NORMALIZATION_RATIO)
    try:
        value = Decimal(text) if text and len(text) < 32 else None
    except InvalidOperation:
        return None
    if value is None or not value.is_finite() or not 0 < value < 1000:
        return None
    return int(value * 100)


@dataclass(frozen=True, slots=True)
class Amplification:
    """The ratios of amplified resources in hundredths, and the problems of the strategy."""

    percents: dict[str, int]
    problems: tuple[str, ...] = ()


def amplification(
    normalization: int | None,
    strategy: ResourceAmplificationStrategy,
    carried: Mapping[str, int] = _NO_RATIOS,
) -> Amplification:
    """Return the amplification ratios of a node.

    normalization: the node's ratio in hundredths; it multiplies the ratio of cpu, which may itself
    be below 1. carried: the ratios in the node's annotation. A product below 1 is raised to 1. With
    a product above 1000 the resource keeps its carried ratio. Both add a problem. A ratio does not
    affect other resources.
    """
    ratios = dict(strategy.resource_amplification_ratio) if strategy.enable else {}
    normalized = (normalization or 100) / 100
    if normalized > 1:
        ratios.setdefault(CPU, 1.0)
    percents: dict[str, int] = {}
    problems: list[str] = []
    for resource, ratio in ratios.items():
        # A ratio that is not positive counts as 1 before it is multiplied, as upstream reads it.
        product = (ratio if ratio > 0 else 1.0) * normalized if resource == CPU else ratio
        problem = ""
        if product > _LARGEST_RATIO:
            problem = f"expected at most {_LARGEST_RATIO:g}; the last ratio stays in force"
            percent = carried.get(resource)
        else:
            # Rounded once, after the product: 1.25 x 1.15 is 1.44.
            percent = max(100, hundredths(product))
            if product < 1 or ratio <= 0:
                problem = "a ratio below 1 counts as 1"
        if problem:
            error = InputError(
                obj="resource-amplification-config",
                field=f"resourceAmplificationRatio[{resource}]",
                value=ratio,
                problem=problem,
            )
            problems.append(str(error))
        if percent is not None:
            percents[resource] = percent
    return Amplification(percents, tuple(problems))


def annotated_amplification(node: Node) -> dict[str, int]:
    """Return the annotated ratios in hundredths, without those out of range; {} if unreadable."""
    text = node.metadata.annotations.get(ANNOTATION_RESOURCE_AMPLIFICATION_RATIO)
    if not text:
        return {}
    try:
        ratios = decode_field(_decode_ratios, text, obj="", field="")
    except InputError:
        return {}
    return {
        name: hundredths(ratio) for name, ratio in ratios.items() if 1 <= ratio <= _LARGEST_RATIO
    }


def amplification_text(percents: Mapping[str, int]) -> str:
    """Return the JSON of the annotation: keys sorted, two decimals."""
    members = (f'"{name}":{ratio_text(percents[name])}' for name in sorted(percents))
    return "{" + ",".join(members) + "}"
