"""What becomes of a Reservation, as a function of the object, its owners, its node and the time.

A reservation ends as Failed when its time is over, scheduled or not, or when its node is gone. One
for a single owner (`allocateOnce`) ends as Succeeded when it has that owner. Until then its status
says which pods use it, and how much of it. An ended one is deleted after a while.
Differences from upstream: docs/compatibility.md, "Reservation".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from apis.decode import to_plain
from apis.meta import ObjectReference, format_time, parse_duration, parse_time, unix_seconds
from apis.quantity import ResourceList, add_resources
from apis.scheduling import (
    ENDED_PHASES,
    Reservation,
    ReservationCondition,
    ReservationPhase,
)

_EXPIRED: Final = "Expired"
"""Reason of the condition Ready of every Failed reservation; upstream's descheduler reads it."""
_NANOSECONDS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Owner:
    """A pod that is bound to the reservation's node, uses the reservation and has not ended."""

    reference: ObjectReference
    requests: ResourceList


@dataclass(frozen=True, slots=True)
class Keep:
    """Nothing to do. until: when to look again without a change, in seconds since 1970."""

    until: float | None


@dataclass(frozen=True, slots=True)
class Write:
    """Merge this into the status, if the object has not changed."""

    status: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object."""

    why: str


Step = Keep | Write | Delete


def next_step(
    reservation: Reservation,
    *,
    owners: Sequence[Owner],
    node_exists: bool,
    now: float,
    collect_after_s: float | None,
    pending_expire: bool,
) -> Step:
    """Return what to do about a Reservation.

    node_exists: of the node that its status names. now: seconds since 1970. collect_after_s: how
    long an ended reservation is kept; None keeps it for ever. pending_expire: whether the time of
    a reservation without a node can be over.
    """
    status = reservation.status
    if status.phase in ENDED_PHASES:
        return _collected(reservation, now, collect_after_s)
    expiry = expires_at(reservation) if status.node_name or pending_expire else None
    if expiry is not None and now >= expiry:
        return _failed(reservation, "The time of the reservation is over.", now)
    if not status.node_name:
        return Keep(expiry)
    if not node_exists:
        message = f"Node {status.node_name} does not exist any more."
        return _failed(reservation, message, now)
    use = _use(reservation, owners)
    if owners and reservation.spec.allocate_once is not False:
        message = f"Pod {_key(owners[0].reference)} uses the reservation."
        phase = ReservationPhase.SUCCEEDED
        return _ended(reservation, phase, "Succeeded", message, now, use)
    return Write(use, "its owners changed") if use else Keep(expiry)


def expires_at(reservation: Reservation) -> float | None:
    """Return when a reservation that has not ended expires, in seconds since 1970, None for never.

    The earlier of `expires` and creation + `ttl`; a ttl of 0 means no limit. A text that cannot be
    read sets no limit either: the source of reservations names and refuses it.
    """
    spec = reservation.spec
    moments = []
    if spec.expires is not None:
        with suppress(ValueError):
            moments.append(parse_time(spec.expires).timestamp())
    if spec.ttl is not None:
        try:
            ttl = parse_duration(spec.ttl) / _NANOSECONDS
        except ValueError:
            ttl = 0
        if ttl:
            moments.append(unix_seconds(reservation.metadata.creation_timestamp) + ttl)
    return min(moments, default=None)


def _collected(reservation: Reservation, now: float, after_s: float | None) -> Step:
    if after_s is None or reservation.metadata.deletion_timestamp is not None:
        return Keep(None)
    until = _ended_at(reservation) + after_s
    if now >= until:
        return Delete(f"it is {reservation.status.phase} since {now - until + after_s:.0f} s")
    return Keep(until)


def _ended_at(reservation: Reservation) -> float:
    for condition in reservation.status.conditions:
        if condition.type == "Ready" and condition.status == "False":
            for text in (condition.last_transition_time, condition.last_probe_time):
                if moment := unix_seconds(text):
                    return moment
    return unix_seconds(reservation.metadata.creation_timestamp)


def _failed(reservation: Reservation, message: str, now: float) -> Write:
    return _ended(reservation, ReservationPhase.FAILED, _EXPIRED, message, now)


def _ended(
    reservation: Reservation,
    phase: ReservationPhase,
    reason: str,
    message: str,
    now: float,
    use: Mapping[str, Any] | None = None,
) -> Write:
    stamp = format_time(datetime.fromtimestamp(now, UTC))
    ready = ReservationCondition(
        type="Ready",
        status="False",
        reason=reason,
        message=message,
        last_probe_time=stamp,
        last_transition_time=stamp,
    )
    conditions = [*(c for c in reservation.status.conditions if c.type != "Ready"), ready]
    return Write({"phase": phase.value, "conditions": to_plain(conditions), **(use or {})}, message)


def _use(reservation: Reservation, owners: Iterable[Owner]) -> dict[str, Any]:
    """Return what of `currentOwners` and `allocated` differs from the owners, as a merge patch."""
    status = reservation.status
    patch: dict[str, Any] = {}
    inside = sorted(owners, key=lambda owner: _key(owner.reference))
    wanted = [owner.reference for owner in inside]
    if {_identity(each) for each in wanted} != {_identity(each) for each in status.current_owners}:
        patch["currentOwners"] = to_plain(wanted) or None
    total = add_resources(*(owner.requests for owner in inside))
    allocated = {name: amount for name, amount in total.items() if name in status.allocatable}
    if allocated != status.allocated:
        gone = dict.fromkeys(status.allocated.keys() - allocated.keys())
        patch["allocated"] = {**gone, **{k: str(v) for k, v in allocated.items()}}
    return patch


def _identity(reference: ObjectReference) -> tuple[str, str, str]:
    return reference.namespace, reference.name, reference.uid


def _key(reference: ObjectReference) -> str:
    return f"{reference.namespace}/{reference.name}"
