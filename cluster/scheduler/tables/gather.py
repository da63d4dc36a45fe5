"""How a gang wants its pods gathered in the network: read from annotations.

gang.scheduling.koordinator.sh/network-topology-spec:
  {"gatherStrategy": [{"layer": "SpineLayer", "strategy": "MustGather"},
    {"layer": "RackLayer", "strategy": "PreferGather", "podCountMultiple": 2}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from apis.annotations import annotation_field
from apis.decode import Embedded, decode_optional_field, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_GANG_NETWORK_TOPOLOGY_INDEX,
    ANNOTATION_GANG_NETWORK_TOPOLOGY_SPEC,
    ANNOTATION_NETWORK_TOPOLOGY_SELECTOR,
)
from cluster.scheduler.tables.shapes import PodShape

NO_INDEX: Final = -1


class Strategy(StrEnum):
    """MUST: all pods within one domain of the layer. PREFER: within one, where that is possible."""

    MUST = "MustGather"
    PREFER = "PreferGather"


class _Rule(Embedded, frozen=True):
    layer: str
    strategy: Strategy = Strategy.PREFER
    pod_count_multiple: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0


class _Spec(Embedded, frozen=True):
    gather_strategy: tuple[_Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class Gather:
    """must: layers in one domain of which all pods have to be. prefer: layers that are wished.
    multiples: layer -> the number of pods in a domain of it is a multiple of this, above 1."""

    must: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    multiples: tuple[tuple[str, int], ...] = ()


_decode: Final = field_decoder(_Spec)


def gather_of(annotations: Mapping[str, str], *, obj: str) -> Gather | None:
    """Return how a gang is to be gathered; None if it does not matter. Raises InputError."""
    text = annotations.get(ANNOTATION_GANG_NETWORK_TOPOLOGY_SPEC)
    if not text:
        return None
    field = annotation_field(ANNOTATION_GANG_NETWORK_TOPOLOGY_SPEC)
    spec = decode_optional_field(_decode, text, obj=obj, field=field)
    if spec is None or not spec.gather_strategy:
        return None
    rules = spec.gather_strategy
    names = [rule.layer for rule in rules]
    for name in names:
        if names.count(name) > 1:
            problem = "is given twice"
            raise InputError(obj=obj, field=f"{field}.gatherStrategy", value=name, problem=problem)
    return Gather(
        must=tuple(rule.layer for rule in rules if rule.strategy is Strategy.MUST),
        prefer=tuple(rule.layer for rule in rules if rule.strategy is Strategy.PREFER),
        multiples=tuple(
            (rule.layer, rule.pod_count_multiple) for rule in rules if rule.pod_count_multiple > 1
        ),
    )


def index_of(pod: PodShape) -> int:
    """Return the place of a pod in its gang; NO_INDEX where its annotation gives none."""
    text = pod.annotations.get(ANNOTATION_GANG_NETWORK_TOPOLOGY_INDEX, "")
    return int(text) if len(text) <= 9 and text.isascii() and text.isdigit() else NO_INDEX


def selected(pod: PodShape) -> tuple[str, str] | None:
    """Return the label (key, value) that is common to the pods which should be close to a pod."""
    key = pod.annotations.get(ANNOTATION_NETWORK_TOPOLOGY_SELECTOR, "")
    value = pod.labels.get(key, "") if key else ""
    return (key, value) if value else None
