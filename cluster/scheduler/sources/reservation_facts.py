"""What the decision looks at of a Reservation, from its spec, status, labels and annotations.

A label or annotation that cannot be read costs itself alone and is named. Owners that cannot be
compared make the reservation one that no pod may use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from apis.core import Taint
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESERVATION_RESTRICTED_OPTIONS,
    LABEL_RESERVATION_ORDER,
)
from apis.meta import selector_problem
from apis.reservation import parse_reservation_order, parse_restricted_options
from apis.scheduling import Reservation, ReservationPhase
from apis.topology import parse_node_reservation
from cluster.scheduler.sources.objects import renamed
from cluster.scheduler.sources.reserve_pods import ReservePod
from cluster.scheduler.tables.amounts import Amounts, amounts_of
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts

T = TypeVar("T")

_POLICIES: Final = {
    "": AllocatePolicy.DEFAULT,
    "Aligned": AllocatePolicy.ALIGNED,
    "Restricted": AllocatePolicy.RESTRICTED,
}


def facts_of(reserve_pod: ReservePod) -> tuple[ReservationFacts, tuple[InputError, ...]]:
    """Return the facts of a Reservation that has a node, and what could not be read."""
    reservation = reserve_pod.reservation
    meta, spec, status = reservation.metadata, reservation.spec, reservation.status
    problems: list[InputError] = []
    ref = f"Reservation {meta.name}"

    def read(text: str | None, parse: Callable[[str], T], default: T) -> T:
        if not text:
            return default
        try:
            return parse(text)
        except InputError as error:
            problems.append(error)
            return default

    policy = _POLICIES.get(spec.allocate_policy)
    if policy is None:
        problem = "expected Aligned or Restricted"
        field, value = "spec.allocatePolicy", spec.allocate_policy
        problems.append(InputError(obj=ref, field=field, value=value, problem=problem))
    restricted = read(
        meta.annotations.get(ANNOTATION_RESERVATION_RESTRICTED_OPTIONS),
        lambda text: frozenset(parse_restricted_options(text, obj=ref)),
        None,
    )
    reserved: Amounts = read(
        meta.annotations.get(ANNOTATION_NODE_RESERVATION),
        lambda text: amounts_of(parse_node_reservation(text, obj=ref).amounts()),
        dict[str, int](),
    )
    order = read(
        meta.labels.get(LABEL_RESERVATION_ORDER),
        lambda text: parse_reservation_order(text, obj=ref),
        0,
    )
    kept = renamed(status.allocatable) or reserve_pod.allocatable
    facts = ReservationFacts(
        name=meta.name,
        uid=meta.uid,
        owners=spec.owners,
        allocatable=amounts_of(kept),
        available=status.phase == ReservationPhase.AVAILABLE and _comparable(reservation),
        policy=policy or AllocatePolicy.DEFAULT,
        once=spec.allocate_once is not False,
        unschedulable=spec.unschedulable or meta.deletion_timestamp is not None,
        taints=tuple(
            Taint(key=taint.key, value=taint.value, effect=taint.effect) for taint in spec.taints
        ),
        labels=meta.labels,
        order=order,
        restricted=restricted,
        reserved=reserved,
    )
    return facts, tuple(problems)


def _comparable(reservation: Reservation) -> bool:
    """Return whether the owners' selectors have a meaning. Named where the pod is read."""
    selectors = (owner.label_selector for owner in reservation.spec.owners)
    return all(each is None or selector_problem(each) is None for each in selectors)
