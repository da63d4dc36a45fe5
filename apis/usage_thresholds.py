"""The annotation of a Node that replaces the load thresholds of the scheduler's configuration."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

from apis.annotations import annotation_field
from apis.decode import Embedded, decode_text, field_decoder, remembered
from apis.errors import InputError
from apis.keys import ANNOTATION_USAGE_THRESHOLDS
from apis.meta import parse_duration

Percent = Annotated[int, Meta(ge=0, le=100)]


class UsageThresholds(Struct, frozen=True):
    """Percent of allocatable by resource; an empty map and None leave the configuration in force.

    window: percentile and seconds of the usage that `aggregated` is compared with; 0 seconds is
    the longest window that the node reports.
    """

    thresholds: dict[str, int] = field(default_factory=dict)
    prod_thresholds: dict[str, int] = field(default_factory=dict)
    aggregated: dict[str, int] | None = None
    window: tuple[str, int] | None = None


class _Aggregated(Embedded, frozen=True):
    usage_thresholds: dict[str, Percent] = field(default_factory=dict)
    usage_aggregation_type: str = ""
    usage_aggregated_duration: str = "0s"


class _UsageThresholds(Embedded, frozen=True):
    usage_thresholds: dict[str, Percent] = field(default_factory=dict)
    prod_usage_thresholds: dict[str, Percent] = field(default_factory=dict)
    aggregated_usage: _Aggregated | None = None


def _finish(raw: _UsageThresholds) -> UsageThresholds:
    aggregated = raw.aggregated_usage
    if aggregated is None or not aggregated.usage_thresholds:
        return UsageThresholds(raw.usage_thresholds, raw.prod_usage_thresholds)
    if not aggregated.usage_aggregation_type:
        return UsageThresholds(raw.usage_thresholds, raw.prod_usage_thresholds)
    try:
        seconds = parse_duration(aggregated.usage_aggregated_duration) // 1_000_000_000
    except ValueError as error:
        raise InputError(
            obj="",
            field=_FIELD + ".aggregatedUsage.usageAggregatedDuration",
            value=aggregated.usage_aggregated_duration,
            problem=str(error),
        ) from None
    return UsageThresholds(
        raw.usage_thresholds,
        raw.prod_usage_thresholds,
        aggregated.usage_thresholds,
        (aggregated.usage_aggregation_type, seconds),
    )


_FIELD = annotation_field(ANNOTATION_USAGE_THRESHOLDS)
_decoder = field_decoder(_UsageThresholds)
_parse = remembered(lambda text: decode_text(_decoder, text, field=_FIELD), _finish, field=_FIELD)


def parse_usage_thresholds(text: str, *, obj: str) -> UsageThresholds:
    """Return the thresholds of a node's own. Raises InputError."""
    return _parse(text, obj)
