"""Binds a Reservation: its status says which node keeps what, and from then on it is Available.

The first try is written against the version that the watch showed. Each later one begins by reading
the object, writes against that version, and so also resolves a write whose answer was lost. What
the scheduler records as annotations goes before the status, in one patch: the status of a custom
resource is a subresource that takes nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from apis.decode import canonical_json
from apis.keys import ANNOTATION_RESERVATION_ALLOCATED
from apis.meta import format_time
from cluster.scheduler.binding.pauses import MOST_FAILURES, Pauses
from cluster.scheduler.binding.placement import Bound, Outcome, Refused, Why
from kube.client import ApiError, Client, Unreachable
from kube.resources import PODS, RESERVATIONS

_log = logging.getLogger(__name__)

_ENDED: Final = ("Failed", "Succeeded")


class Seen(NamedTuple):
    """A Reservation without a node, as the watch showed it. conditions: as in its JSON."""

    resource_version: str
    annotations: Mapping[str, str]
    conditions: Sequence[dict[str, Any]]


class TakenPod(NamedTuple):
    """A running pod that uses the Reservation from now on."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ReservationPlacement:
    """A Reservation and the node that keeps its resources.

    allocatable: what is reserved, resource name -> quantity as text, such as "4" or "8Gi".
    annotations: set on the Reservation; None removes one. takes: marked as users before the
    Reservation is Available, so that their room is never counted beside it. seen: what the first
    try is written against; None reads the Reservation first.
    """

    name: str
    uid: str
    node: str
    allocatable: Mapping[str, str]
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    takes: tuple[TakenPod, ...] = ()
    seen: Seen | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None


class _Status(msgspec.Struct, rename="camel"):
    phase: str = ""
    node_name: str = ""
    conditions: list[dict[str, Any]] | None = None


class _Reservation(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    status: _Status = msgspec.field(default_factory=_Status)


_decode: Final = msgspec.json.Decoder(_Reservation).decode


async def bind_reservation(
    client: Client, placement: ReservationPlacement, *, now: Callable[[], float]
) -> Outcome:
    """Make a Reservation Available on its node; return when the outcome is certain.

    now: the wall clock in seconds, for the conditions.
    """
    pauses = Pauses()
    refusals = 0
    seen = placement.seen
    while True:
        try:
            if seen is not None:
                current, seen = _as_seen(seen), None
            else:
                current = _decode(
                    await client.request("GET", RESERVATIONS.path(name=placement.name), tries=1)
                )
                shown = _outcome_of(placement, current)
                if shown is not None:
                    return shown
            for pod in placement.takes:
                await _mark(client, pod, placement)
            await _write(client, placement, current, now())
            return Bound()
        except ApiError as error:
            outcome = _refused(error)
            if outcome is not None:
                return outcome
            if error.status == 409 or error.status >= 500:
                refusals += 1
            if refusals >= MOST_FAILURES:
                why = Why.CONFLICT if error.status == 409 else Why.FAILING
                return Refused(why, str(error))
            reason = str(error)
        except Unreachable as error:
            reason = str(error)
        _log.info("reservation %s is not bound yet: %s", placement.name, reason)
        await pauses.rest()


def _as_seen(seen: Seen) -> _Reservation:
    metadata = _Metadata(resource_version=seen.resource_version, annotations=dict(seen.annotations))
    return _Reservation(metadata, _Status(conditions=list(seen.conditions)))


def _outcome_of(placement: ReservationPlacement, current: _Reservation) -> Outcome | None:
    """Return the outcome that a Reservation shows; None while it waits for a node."""
    name = placement.name
    if current.metadata.uid != placement.uid:
        return Refused(
            Why.OTHER_UID,
            f"reservation {name} has uid {current.metadata.uid} now, not {placement.uid}",
        )
    status = current.status
    if status.phase in _ENDED:
        return Refused(Why.CONFLICT, f"reservation {name} is {status.phase}")
    if status.node_name == placement.node and status.phase == "Available":
        return Bound()
    if status.node_name:
        return Refused(
            Why.BOUND_ELSEWHERE,
            f"reservation {name} is on {status.node_name}, not on {placement.node} as decided",
        )
    if current.metadata.deletion_timestamp is not None:
        return Refused(Why.DELETED, f"reservation {name} is being deleted")
    return None


async def _mark(client: Client, pod: TakenPod, placement: ReservationPlacement) -> None:
    """Mark a pod as a user. If the pod is gone, its room is left to the Reservation."""
    uses = canonical_json({"name": placement.name, "uid": placement.uid})
    metadata = {"uid": pod.uid, "annotations": {ANNOTATION_RESERVATION_ALLOCATED: uses}}
    body = msgspec.json.encode({"metadata": metadata})
    try:
        await client.patch(PODS, pod.name, body, namespace=pod.namespace)
    except ApiError as error:
        replaced = error.status in (409, 422) and "uid" in error.message
        if not error.not_found and not replaced:
            raise


async def _write(
    client: Client, placement: ReservationPlacement, current: _Reservation, now: float
) -> None:
    version = current.metadata.resource_version
    stored = current.metadata.annotations or {}
    if any(stored.get(key) != value for key, value in placement.annotations.items()):
        metadata = {"annotations": dict(placement.annotations), "resourceVersion": version}
        body = msgspec.json.encode({"metadata": metadata})
        version = _decode(
            await client.patch(RESERVATIONS, placement.name, body)
        ).metadata.resource_version
    stamp = format_time(datetime.fromtimestamp(now, UTC))
    status = {
        "phase": "Available",
        "nodeName": placement.node,
        "allocatable": dict(placement.allocatable),
        "conditions": _conditions(current.status.conditions or [], stamp),
    }
    body = msgspec.json.encode({"metadata": {"resourceVersion": version}, "status": status})
    await client.patch(RESERVATIONS, placement.name, body, subresource="status")


def _conditions(before: list[dict[str, Any]], stamp: str) -> list[dict[str, Any]]:
    """Return the conditions with Scheduled and Ready true, and the others as they were."""
    after = [one for one in before if one.get("type") not in ("Scheduled", "Ready")]
    for kind, reason in (("Scheduled", "Scheduled"), ("Ready", "Available")):
        former = next((one for one in before if one.get("type") == kind), {})
        since = former.get("lastTransitionTime") if former.get("status") == "True" else None
        after.append(
            {
                "type": kind,
                "status": "True",
                "reason": reason,
                "lastProbeTime": stamp,
                "lastTransitionTime": since or stamp,
            }
        )
    return after


def _refused(error: ApiError) -> Refused | None:
    """Return the outcome of a refusal; None if a later try may succeed."""
    if error.not_found:
        return Refused(Why.DELETED, error.message)
    if error.status == 403:
        return Refused(Why.FORBIDDEN, error.message)
    if error.status in (401, 408, 409, 429) or error.status >= 500:
        return None
    return Refused(Why.INVALID, str(error))
