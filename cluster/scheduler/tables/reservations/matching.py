"""Whether a pod may use a reservation: owners, affinity, taints, equal amounts.

The order of the steps is upstream's; docs/facts/scheduler.md, "Reservations".
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from apis.core import Taint
from apis.meta import ObjectReference, matches
from apis.scheduling import ReservationControllerReference, ReservationOwner
from apis.scheduling_pod import NodeSelectorRequirement, NodeSelectorTerm
from apis.taints import tolerated
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.reservations.asked import Asked, asked_of
from cluster.scheduler.tables.reservations.facts import ReservationFacts
from cluster.scheduler.tables.shapes import PodShape

_UNSCHEDULABLE: Final = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,19}\Z", re.ASCII)


class Match(enum.Enum):
    """The first step that decides about a pod and a reservation. A value is a part of messages."""

    YES = "matched"
    OWNER = "didn't match owners"
    NAME = "didn't match the requested reservation name"
    UNSCHEDULABLE = "is unschedulable"
    TAINT = "had untolerated taint"
    AFFINITY = "didn't match affinity rules"
    EXACT = "is not exact matched"


def match(
    pod: PodShape,
    facts: ReservationFacts,
    node_labels: Mapping[str, str],
    *,
    taints_for_all: bool = True,
) -> Match:
    """Return the step that decides whether the pod may use the reservation.

    node_labels: of the reservation's node; labels of the reservation go over them. taints_for_all:
    taints keep away pods without the annotation reservation-affinity too.
    """
    asked = pod.derived(asked_of)
    if not any(_owned(owner, pod) for owner in facts.owners):
        return Match.OWNER
    affinity = asked.affinity
    if affinity is not None and affinity.name:
        # A name means this reservation, in whatever state it is.
        if affinity.name != facts.name:
            return Match.NAME
        return _exact(asked, pod.requests, facts.allocatable)
    tolerations = affinity.tolerations if affinity is not None else ()
    if facts.unschedulable and not tolerated(_UNSCHEDULABLE, tolerations):
        return Match.UNSCHEDULABLE
    if (taints_for_all or affinity is not None) and untolerated_taints(pod, facts):
        return Match.TAINT
    if affinity is not None and (affinity.selector or affinity.terms is not None):
        labels = {**node_labels, **facts.labels}
        if any(labels.get(key) != value for key, value in affinity.selector.items()):
            return Match.AFFINITY
        if affinity.terms is not None and not any(
            _term_holds(term, labels, facts.name) for term in affinity.terms
        ):
            return Match.AFFINITY
    return _exact(asked, pod.requests, facts.allocatable)


def untolerated_taints(pod: PodShape, facts: ReservationFacts) -> tuple[Taint, ...]:
    """Return the taints of a reservation that keep the pod away.

    Tolerations are those of the annotation reservation-affinity: the pod's own are of nodes.
    """
    affinity = pod.derived(asked_of).affinity
    tolerations = affinity.tolerations if affinity is not None else ()
    return tuple(
        taint
        for taint in facts.taints
        if taint.effect in ("NoSchedule", "NoExecute") and not tolerated(taint, tolerations)
    )


def _exact(asked: Asked, requests: Amounts, allocatable: Amounts) -> Match:
    """Compare every listed resource; one that neither side has is equal."""
    if all(requests.get(name) == allocatable.get(name) for name in asked.exact):
        return Match.YES
    return Match.EXACT


# --- owners --------------------------------------------------------------------------------------


def _owned(owner: ReservationOwner, pod: PodShape) -> bool:
    """Return whether every member that is set means the pod."""
    if owner.object is not None and not _is_object(owner.object, pod):
        return False
    if owner.controller is not None and not _is_controlled(owner.controller, pod):
        return False
    return owner.label_selector is None or matches(owner.label_selector, pod.labels)


def _is_object(wanted: ObjectReference, pod: PodShape) -> bool:
    name, uid = pod.identity if pod.identity is not None else ("", "")
    return (
        wanted.uid in ("", uid)
        and wanted.name in ("", name)
        and wanted.namespace in ("", pod.namespace)
        and wanted.api_version in ("", "v1")
    )


def _is_controlled(wanted: ReservationControllerReference, pod: PodShape) -> bool:
    return wanted.namespace in ("", pod.namespace) and any(
        wanted.uid in ("", owner.uid)
        and wanted.name in ("", owner.name)
        and wanted.kind in ("", owner.kind)
        and wanted.api_version in ("", owner.api_version)
        and wanted.controller in (None, bool(owner.controller))
        for owner in pod.owner_references
    )


# --- index ---------------------------------------------------------------------------------------

Key = tuple[str, str, str]
"""Kind of key, and two texts. A reservation stands under keys of each of its owners' entries so
that each pod that an entry matches has one of them."""

EVERY: Final[Key] = ("every", "", "")
"""Entries that only comparing decides about; each pod has this key."""


def keys_of_reservation(facts: ReservationFacts) -> frozenset[Key]:
    """Return the keys of a reservation."""
    return frozenset(key for owner in facts.owners for key in _keys_of_owner(owner))


def _keys_of_owner(owner: ReservationOwner) -> Iterable[Key]:
    wanted = owner.object
    if wanted is not None and wanted.uid:
        return (("uid", wanted.uid, ""),)
    if wanted is not None and wanted.name:
        return (("name", wanted.name, ""),)
    controller = owner.controller
    if controller is not None and controller.uid:
        return (("controller-uid", controller.uid, ""),)
    if controller is not None and controller.name:
        return (("controller-name", controller.name, ""),)
    selector = owner.label_selector
    if selector is not None:
        for key, value in sorted(selector.match_labels.items()):
            return (("label", key, value),)
        for requirement in selector.match_expressions:
            if requirement.operator == "In":
                return tuple(("label", requirement.key, value) for value in requirement.values)
    return (EVERY,)


def names_pod(key: Key) -> bool:
    """Return whether a key is of one pod, by its name or UID."""
    return key[0] in ("uid", "name")


def keys_of_pod(pod: PodShape) -> Iterator[Key]:
    """Yield the keys of a pod."""
    yield EVERY
    for key, value in pod.labels.items():
        yield ("label", key, value)
    for owner in pod.owner_references:
        yield ("controller-uid", owner.uid, "")
        yield ("controller-name", owner.name, "")
    if pod.identity is not None:
        name, uid = pod.identity
        yield ("name", name, "")
        yield ("uid", uid, "")


# --- affinity ------------------------------------------------------------------------------------


def _term_holds(term: NodeSelectorTerm, labels: Mapping[str, str], name: str) -> bool:
    """Return whether all expressions and fields hold; a term without any holds nowhere."""
    if not term.match_expressions and not term.match_fields:
        return False
    return all(_holds(one, labels.get(one.key)) for one in term.match_expressions) and all(
        one.key == "metadata.name" and one.operator in ("In", "NotIn") and _holds(one, name)
        for one in term.match_fields
    )


def _holds(wanted: NodeSelectorRequirement, value: str | None) -> bool:
    match wanted.operator:
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "In":
            return value is not None and value in wanted.values
        case "NotIn":
            return value is None or value not in wanted.values
        case "Gt" | "Lt" if len(wanted.values) == 1 and _INTEGER.match(wanted.values[0]):
            if value is None or not _INTEGER.match(value):
                return False
            number, bound = int(value), int(wanted.values[0])
            return number > bound if wanted.operator == "Gt" else number < bound
    # An operator that the API server does not know holds nowhere.
    return False
