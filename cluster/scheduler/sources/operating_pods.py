"""Pods that are reservations themselves: label `operating-mode: Reservation`.

Such a pod runs, and what it requests is kept for the owners that its annotation names, for one of
them. Owners may use it while it runs and is ready. docs/scheduler.md, "Reservation".
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from apis.annotations import annotation_field
from apis.decode import json_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_RESERVATION_OWNERS,
    ANNOTATION_RESERVE_POD,
    LABEL_OPERATING_MODE,
    LABEL_RESERVATION_ORDER,
)
from apis.meta import selector_problem
from apis.reservation import parse_reservation_order
from apis.scheduling import ReservationOwner
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from cluster.scheduler.tables.reservations.table import ReservationTable

_log = logging.getLogger(__name__)

_RESERVATION_MODE: Final = "Reservation"
_FIELD: Final = annotation_field(ANNOTATION_RESERVATION_OWNERS)
_decode_owners: Final = json_decoder(tuple[ReservationOwner, ...])


class OperatingPods:
    """Keeps the table of reservations in step with such pods that have a node."""

    def __init__(self, table: ReservationTable) -> None:
        self._table = table
        self._known: dict[str, ReservationFacts] = {}
        self.problems: dict[str, str] = {}
        """UID -> what cannot be read of a pod."""

    def follow(self, pod: SchedulingPod, requests: Amounts) -> bool:
        """Take a pod that has a node; return whether what pods may use has changed."""
        uid, meta = pod.metadata.uid, pod.metadata
        mode = meta.labels.get(LABEL_OPERATING_MODE)
        if mode != _RESERVATION_MODE or ANNOTATION_RESERVE_POD in meta.annotations:
            return self.forget(uid)
        try:
            facts = _facts(pod, requests)
        except InputError as error:
            if self.problems.get(uid) != str(error):
                self.problems[uid] = str(error)
                _log.warning("%s", error)
            return self._withdraw(uid)
        self.problems.pop(uid, None)
        before = self._known.get(uid)
        self._known[uid] = facts
        self._table.upsert(facts)
        return facts != before

    def forget(self, uid: str) -> bool:
        """Forget a pod; return whether pods could use it."""
        self.problems.pop(uid, None)
        return self._withdraw(uid)

    def _withdraw(self, uid: str) -> bool:
        """Take a pod out of the table; return whether pods could use it."""
        facts = self._known.pop(uid, None)
        if facts is None:
            return False
        self._table.delete(uid)
        return facts.available


def _facts(pod: SchedulingPod, requests: Amounts) -> ReservationFacts:
    """Return the facts of a pod. Raises InputError."""
    meta = pod.metadata
    order = meta.labels.get(LABEL_RESERVATION_ORDER)
    return ReservationFacts(
        name=meta.name,
        uid=meta.uid,
        owners=_owners(pod),
        allocatable=requests,
        available=_is_ready(pod),
        policy=AllocatePolicy.ALIGNED,
        once=True,
        unschedulable=meta.deletion_timestamp is not None,
        labels=meta.labels,
        order=parse_reservation_order(order, obj=pod.ref) if order else 0,
    )


def _owners(pod: SchedulingPod) -> tuple[ReservationOwner, ...]:
    text = pod.metadata.annotations.get(ANNOTATION_RESERVATION_OWNERS)
    if not text:
        return ()

    def error(problem: str) -> InputError:
        return InputError(obj=pod.ref, field=_FIELD, value=text, problem=problem)

    try:
        owners = _decode_owners(text)
    except (msgspec.DecodeError, RecursionError) as cause:
        raise error(f"expected a list of owners: {cause}") from None
    for owner in owners:
        problem = selector_problem(owner.label_selector) if owner.label_selector else None
        if problem is not None:
            raise error(problem)
    return owners


def _is_ready(pod: SchedulingPod) -> bool:
    return pod.status.phase == "Running" and any(
        each.type == "Ready" and each.status == "True" for each in pod.status.conditions
    )
