"""The gauges of Reservations, made from the cache when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from apis.keys import CPU, MEMORY
from apis.quantity import Quantity
from apis.scheduling import Reservation, ReservationPhase
from cluster.exposition import label_text, number_text

_PHASES: Final = (
    ReservationPhase.PENDING,
    ReservationPhase.AVAILABLE,
    ReservationPhase.SUCCEEDED,
    ReservationPhase.FAILED,
)
_NANO: Final = 1e9
"""A quantity is an integer of billionths."""
_UNITS: Final[Mapping[str, tuple[str, float]]] = {CPU: ("core", 1.0), MEMORY: ("Gi", 2.0**30)}
"""Resource -> upstream's unit, and its size. Others are shown as they are, in the unit `raw`."""
_PHASE: Final = "scheduler_reservation_status_phase"
_RESOURCE: Final = "scheduler_reservation_resource"


def reservation_lines(reservations: Iterable[Reservation]) -> Iterator[str]:
    """Yield the lines of both metrics. Reservations may change meanwhile."""
    known = tuple(reservations)
    yield f"# HELP {_PHASE} Phases of Reservations: 1 for the present one.\n# TYPE {_PHASE} gauge\n"
    for reservation in known:
        now = reservation.status.phase or ReservationPhase.PENDING
        for phase in _PHASES:
            labels = label_text(("name", "phase"), (reservation.metadata.name, phase))
            yield f"{_PHASE}{{{labels}}} {int(now == phase)}\n"
    yield f"# HELP {_RESOURCE} What Reservations keep, and what is used of it.\n"
    yield f"# TYPE {_RESOURCE} gauge\n"
    for reservation in known:
        yield from _resources(reservation)


def _resources(reservation: Reservation) -> Iterator[str]:
    status = reservation.status
    for resource, kept in sorted(status.allocatable.items()):
        unit, size = _UNITS.get(resource, ("raw", 1.0))
        used = status.allocated.get(resource)
        values = {"allocatable": _value(kept, size), "allocated": _value(used, size)}
        for kind, value in values.items():
            yield _line(reservation, kind, resource, unit, value)
        if kept:
            ratio = values["allocated"] / values["allocatable"]
            yield _line(reservation, "utilization", resource, "ratio", ratio)


def _value(amount: Quantity | None, size: float) -> float:
    return 0.0 if amount is None else amount.nano / _NANO / size


def _line(reservation: Reservation, kind: str, resource: str, unit: str, value: float) -> str:
    labels = label_text(
        ("type", "name", "resource", "unit"), (kind, reservation.metadata.name, resource, unit)
    )
    return f"{_RESOURCE}{{{labels}}} {number_text(value)}\n"
