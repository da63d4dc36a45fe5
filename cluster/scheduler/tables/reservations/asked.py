"""What a pod asks about reservations."""

from __future__ import annotations

from dataclasses import dataclass

from apis.errors import InputError
from apis.keys import (
    ANNOTATION_EXACT_MATCH_RESERVATION,
    ANNOTATION_RESERVATION_AFFINITY,
    ANNOTATION_RESERVE_POD,
    LABEL_OPERATING_MODE,
    LABEL_RESERVATION_IGNORED,
)
from apis.reservation import (
    ReservationAffinity,
    parse_exact_match,
    parse_reservation_affinity,
)
from cluster.scheduler.tables.shapes import PodShape


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pod says about reservations.

    affinity: it has to use a reservation that this describes, None if it need not use one. exact:
    resources whose request has to equal what is reserved. ignores: it uses no reservation and
    takes what is reserved and not in use. reserves: it is a reservation itself, and uses none.
    error: an annotation cannot be used.
    """

    affinity: ReservationAffinity | None = None
    exact: tuple[str, ...] = ()
    ignores: bool = False
    reserves: bool = False
    error: InputError | None = None


def asked_of(shape: PodShape) -> Asked:
    """Return what a pod asks; for `PodShape.derived`. Errors name the pod as "Pod"."""
    affinity: ReservationAffinity | None = None
    exact: tuple[str, ...] = ()
    error: InputError | None = None
    try:
        if text := shape.annotations.get(ANNOTATION_RESERVATION_AFFINITY):
            affinity = parse_reservation_affinity(text, obj="Pod")
        if text := shape.annotations.get(ANNOTATION_EXACT_MATCH_RESERVATION):
            exact = parse_exact_match(text, obj="Pod")
    except InputError as found:
        error = found
    reserves = (
        shape.annotations.get(ANNOTATION_RESERVE_POD) == "true"
        or shape.labels.get(LABEL_OPERATING_MODE) == "Reservation"
    )
    return Asked(
        affinity=affinity,
        exact=exact,
        ignores=shape.labels.get(LABEL_RESERVATION_IGNORED) == "true" and not reserves,
        reserves=reserves,
        error=error,
    )
