"""Annotations of a Pod that say how its load is estimated while no report shows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from apis.annotations import annotation_field
from apis.decode import decode_text, field_decoder, remembered
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_INITIALIZED,
    ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_POD_SCHEDULED,
)


class LoadEstimation(Struct, frozen=True):
    """What a pod sets for itself; what is missing or None is left to the scheduler's arguments.

    factors: percent of the pod's request or limit that it is expected to use, by resource.
    seconds_after_scheduled, seconds_after_initialized: how long the estimate counts although a
    report shows the pod; 0 for not at all.
    """

    factors: dict[str, int] = field(default_factory=dict)
    seconds_after_scheduled: int | None = None
    seconds_after_initialized: int | None = None


NO_ESTIMATION: Final = LoadEstimation()

Factor = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Percent. The bound is chosen: a factor times the largest amount of a resource (2^52) is a number
that every reader can hold. A factor above 100 is for a pod that bursts above its request."""

_SECONDS: Final = re.compile(r"\+?[0-9]{1,18}", re.ASCII)
"""As Go's ParseInt reads numbers that are not negative, up to 18 digits, which fit 64 bits."""

_FACTORS_FIELD: Final = annotation_field(ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS)
_factors_decoder: Final = field_decoder(dict[str, Factor])
_parse_factors: Final = remembered(
    lambda text: decode_text(_factors_decoder, text, field=_FACTORS_FIELD),
    lambda value: value,
    field=_FACTORS_FIELD,
)


def read_load_estimation(
    annotations: Mapping[str, str], *, obj: str
) -> tuple[LoadEstimation, tuple[InputError, ...]]:
    """Return what a pod sets for itself, and the problems of the annotations that are left out."""
    problems: list[InputError] = []
    factors: dict[str, int] = {}
    if text := annotations.get(ANNOTATION_LOAD_ESTIMATED_SCALING_FACTORS):
        try:
            factors = _parse_factors(text, obj)
        except InputError as error:
            problems.append(error)

    def seconds(key: str) -> int | None:
        text = annotations.get(key)
        if not text:
            return None
        if _SECONDS.fullmatch(text):
            return int(text)
        problem = "expected a whole number of seconds, 0 or more, of at most 18 digits"
        problems.append(
            InputError(obj=obj, field=annotation_field(key), value=text, problem=problem)
        )
        return None

    after_scheduled = seconds(ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_POD_SCHEDULED)
    after_initialized = seconds(ANNOTATION_LOAD_ESTIMATED_SECONDS_AFTER_INITIALIZED)
    if not factors and after_scheduled is None and after_initialized is None:
        return NO_ESTIMATION, tuple(problems)
    return LoadEstimation(factors, after_scheduled, after_initialized), tuple(problems)
