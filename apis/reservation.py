"""Annotations about reservations, on pods and on Reservations, as typed values.

`apis.scheduling` holds the Reservation itself.
"""

from __future__ import annotations

from typing import Final

from msgspec import field

from apis.annotations import annotation_field
from apis.core import Toleration
from apis.decode import Embedded, decode_text, field_decoder, remembered
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_EXACT_MATCH_RESERVATION,
    ANNOTATION_RESERVATION_AFFINITY,
    ANNOTATION_RESERVATION_RESTRICTED_OPTIONS,
    LABEL_RESERVATION_ORDER,
)
from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm

# --- reservation-affinity ------------------------------------------------------------------------


class _Requirement(Embedded, frozen=True):
    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class _Term(Embedded, frozen=True):
    match_expressions: tuple[_Requirement, ...] = ()
    match_fields: tuple[_Requirement, ...] = ()


class _Required(Embedded, frozen=True):
    reservation_selector_terms: tuple[_Term, ...] = ()


class _Toleration(Embedded, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class _Affinity(Embedded, frozen=True):
    name: str = ""
    required: _Required | None = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )
    reservation_selector: dict[str, str] | None = None
    tolerations: tuple[_Toleration, ...] = ()


class ReservationAffinity(Embedded, frozen=True):
    """A pod with it is placed through a matching reservation, or not at all.

    name: the one reservation that is meant, or "". terms: one of them must hold; None for no
    condition. selector: labels that the reservation must have. tolerations: of taints of
    reservations.
    """

    name: str = ""
    terms: tuple[NodeSelectorTerm, ...] | None = None
    selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()


def _affinity(read: _Affinity) -> ReservationAffinity:
    def requirements(those: tuple[_Requirement, ...]) -> tuple[NodeSelectorRequirement, ...]:
        return tuple(
            NodeSelectorRequirement(key=one.key, operator=one.operator, values=one.values)
            for one in those
        )

    terms = None
    if read.required is not None:
        terms = tuple(
            NodeSelectorTerm(
                match_expressions=requirements(term.match_expressions),
                match_fields=requirements(term.match_fields),
            )
            for term in read.required.reservation_selector_terms
        )
    return ReservationAffinity(
        name=read.name,
        terms=terms,
        selector=read.reservation_selector or {},
        tolerations=tuple(
            Toleration(key=one.key, operator=one.operator, value=one.value, effect=one.effect)
            for one in read.tolerations
        ),
    )


_AFFINITY_FIELD: Final = annotation_field(ANNOTATION_RESERVATION_AFFINITY)
_affinity_decoder: Final = field_decoder(_Affinity)
_parse_affinity: Final = remembered(
    lambda text: decode_text(_affinity_decoder, text, field=_AFFINITY_FIELD),
    _affinity,
    field=_AFFINITY_FIELD,
)


def parse_reservation_affinity(text: str, *, obj: str) -> ReservationAffinity:
    """Return the value of `reservation-affinity`. Raises InputError."""
    return _parse_affinity(text, obj)


# --- lists of resource names ---------------------------------------------------------------------


class _ExactMatch(Embedded, frozen=True):
    resource_names: tuple[str, ...] = ()


class _RestrictedOptions(Embedded, frozen=True):
    resources: tuple[str, ...] = ()


def _exact_names(read: _ExactMatch) -> tuple[str, ...]:
    return read.resource_names


def _restricted_names(read: _RestrictedOptions) -> tuple[str, ...]:
    return read.resources


_EXACT_FIELD: Final = annotation_field(ANNOTATION_EXACT_MATCH_RESERVATION)
_exact_decoder: Final = field_decoder(_ExactMatch)
_parse_exact: Final = remembered(
    lambda text: decode_text(_exact_decoder, text, field=_EXACT_FIELD),
    _exact_names,
    field=_EXACT_FIELD,
)

_RESTRICTED_FIELD: Final = annotation_field(ANNOTATION_RESERVATION_RESTRICTED_OPTIONS)
_restricted_decoder: Final = field_decoder(_RestrictedOptions)
_parse_restricted: Final = remembered(
    lambda text: decode_text(_restricted_decoder, text, field=_RESTRICTED_FIELD),
    _restricted_names,
    field=_RESTRICTED_FIELD,
)


def parse_exact_match(text: str, *, obj: str) -> tuple[str, ...]:
    """Return the resource names of `exact-match-reservation`. Raises InputError."""
    return _parse_exact(text, obj)


def parse_restricted_options(text: str, *, obj: str) -> tuple[str, ...]:
    """Return the resource names of `reservation-restricted-options`. Raises InputError."""
    return _parse_restricted(text, obj)


# --- reservation-order ---------------------------------------------------------------------------

_LARGEST_ORDER: Final = 2**63 - 1


def parse_reservation_order(text: str, *, obj: str) -> int:
    """Return the value of the label `reservation-order`; 0 means no order. Raises InputError."""
    digits = text[1:] if text[:1] in "+-" else text
    if digits.isascii() and digits.isdigit() and len(digits) <= 19:
        value = int(text)
        if -_LARGEST_ORDER <= value <= _LARGEST_ORDER:
            return value
    raise InputError(
        obj=obj,
        field=f'metadata.labels["{LABEL_RESERVATION_ORDER}"]',
        value=text,
        problem="expected an integer of 64 bits",
    )
