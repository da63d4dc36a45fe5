"""Reservation: which pods take reserved room, and from which reservation.

A pod that matches reservations goes through the best one that has room on the chosen node; a node
with such a one is preferred to all others. Without room in any, the node's own free room serves,
unless the pod demands a reservation. docs/scheduler.md, "Reservation".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.decode import canonical_json
from apis.keys import ANNOTATION_RESERVATION_ALLOCATED
from cluster.scheduler.plugins.contract import (
    Allocator,
    Filter,
    Mask,
    OfRowAlone,
    Reason,
    Recorded,
    Refusal,
    Scores,
    only,
    to_largest,
    zeros,
)
from cluster.scheduler.plugins.reservations.explaining import explained
from cluster.scheduler.plugins.reservations.room import (
    MOST_NAMES,
    Room,
    best_first,
    node_alone,
    room_in,
    scores_in,
)
from cluster.scheduler.plugins.resources.fit import looked_at
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.asked import asked_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

NAME: Final = "Reservation"

_NO_MATCH: Final = Reason("node(s) no reservations match reservation affinity", resolvable=False)
_NONE_HELPS: Final = Reason("node(s) no reservation(s) to meet the requirements")
_NO_ALLOCATION: Final = Reason(
    "Reservation(s) cannot give the pod's ports, NUMA resources or devices"
)
_FIRST: Final = 2
"""Bits before those of amounts: _NO_MATCH and _NONE_HELPS."""
_FIRST_INSIDE: Final = _FIRST + MOST_NAMES + 1
"""Bits of what nodes lack: one for each name and one for pods; then of what reservations lack."""


@dataclass(frozen=True, slots=True)
class Reservation(OfRowAlone):
    """Admission, Filter, SetScore, Explainer and Allocator.

    ignored, ignored_groups: extended resources that are not looked at, by name and by prefix.
    others: allocators of NUMA nodes and devices, which a reservation on the chosen node is tried
    with.
    """

    ignored: frozenset[str] = frozenset()
    ignored_groups: frozenset[str] = frozenset()
    others: tuple[Allocator, ...] = ()
    name: str = NAME

    # --- pod -------------------------------------------------------------------------------------

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a pod whose annotations cannot be read. Raises Refusal."""
        error = pod.derived(asked_of).error
        if error is not None:
            raise Refusal(NAME, str(error))

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        if ANNOTATION_RESERVATION_ALLOCATED in pod.annotations:
            # `record` removes it, also from a pod that uses no reservation.
            return True
        return not _uses_none(pod) and (
            pod.derived(asked_of).affinity is not None or len(tables.reservations.matched(pod)) > 0
        )

    def _requests(self, pod: PodShape) -> list[tuple[str, int]]:
        return looked_at(pod, self.ignored, self.ignored_groups)

    def _room(self, pod: PodShape, tables: Tables, rows: Rows) -> Room:
        slots = tables.reservations.usable(pod, rows)
        required = pod.derived(asked_of).affinity is not None
        return room_in(pod, tables, slots, self._requests(pod), required=required)

    # --- filter ----------------------------------------------------------------------------------

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        names = [name for name, _ in self._requests(pod)][:MOST_NAMES]
        unused = [""] * (MOST_NAMES - len(names))
        return (
            _NO_MATCH,
            _NONE_HELPS,
            *(Reason(f"Insufficient {name} by node") for name in (*names, *unused)),
            Reason("Too many pods by node"),
            *(Reason(f"Reservation(s) Insufficient {name}") for name in (*names, *unused)),
            Reason("Reservation(s) Too many pods"),
        )

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask = zeros(len(tables.nodes))
        if _uses_none(pod):
            return mask[rows]
        required = pod.derived(asked_of).affinity is not None
        if required:
            mask[:] = 1
        room = self._room(pod, tables, rows)
        if len(room.slots):
            here = np.unique(room.rows)
            fits = np.zeros(len(mask), dtype=np.bool_)
            fits[room.rows[room.fits]] = True
            held = here[~fits[here]]
            mask[here] = 0
            if required:
                bits = (room.node << _FIRST) | (room.inside << _FIRST_INSIDE)
                np.bitwise_or.at(mask, room.rows, bits)
                mask[held] |= np.where(mask[held] == 0, 2, 0)
            else:
                mask[held] = node_alone(tables, held, self._requests(pod)) << _FIRST
            mask[fits] = 0
        return mask[rows]

    # --- score -----------------------------------------------------------------------------------

    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        """Return 0..100: of each node's best reservation, and 0 without one.

        The node with the reservation of the lowest order has the highest score.
        """
        result = zeros(len(feasible))
        if not len(feasible):
            return result
        room = self._room(pod, tables, slice(0, len(tables.nodes)))
        scores = scores_in(pod, tables, room.slots)
        places = best_first(tables, room, scores)
        if not len(places):
            return result
        rows = room.rows[places]
        first = np.ones(len(rows), dtype=np.bool_)
        first[1:] = rows[1:] != rows[:-1]
        places, rows = places[first], rows[first]
        at = np.searchsorted(feasible, rows)
        passes = (at < len(feasible)) & (feasible[np.minimum(at, len(feasible) - 1)] == rows)
        places, rows, at = places[passes], rows[passes], at[passes]
        # A reservation counts, however small a part of it the pod takes.
        result[at] = np.maximum(scores[places], 1)
        order = tables.reservations.order[room.slots[places]]
        ordered = np.flatnonzero(order)
        if len(ordered):
            lowest = ordered[order[ordered] == order[ordered].min()]
            chosen = lowest[tables.nodes.order[rows[lowest]].argmin()]
            result[at[chosen]] = result.max() + 1
        return to_largest(result)

    # --- reasons ----------------------------------------------------------------------------------

    def explain(self, pod: PodShape, tables: Tables, masks: Sequence[tuple[Filter, Mask]]) -> str:
        return explained(pod, tables, masks, name=self.name)

    # --- allocation ------------------------------------------------------------------------------

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        """Add the reservation that the pod uses on this node, if any."""
        if _uses_none(pod):
            return allocation
        for uid in self.nominees(pod, tables, row):
            tried = replace(allocation, reservation=uid)
            if not _ports_conflict(pod, tables, row, (uid,)) and self._others(
                pod, tables, row, tried
            ):
                return tried
        if pod.derived(asked_of).affinity is not None:
            return _NO_ALLOCATION
        alone = node_alone(tables, only(row), self._requests(pod))
        if int(alone[0]) or _ports_conflict(pod, tables, row, ()):
            return _NO_ALLOCATION
        return allocation

    def nominees(self, pod: PodShape, tables: Tables, row: int) -> list[str]:
        """Return the UIDs of the reservations on a node that have room for the pod, best first."""
        table = tables.reservations
        room = self._room(pod, tables, only(row))
        if not len(room.slots):
            return []
        scores = scores_in(pod, tables, room.slots)
        found = []
        for place in best_first(tables, room, scores).tolist():
            facts = table.facts(int(room.slots[place]))
            order = facts.order if facts.order else float("inf")
            found.append((order, -int(scores[place]), facts.name, facts.uid))
        return [uid for *_, uid in sorted(found)]

    def _others(self, pod: PodShape, tables: Tables, row: int, allocation: Allocation) -> bool:
        """Return whether NUMA nodes and devices can be given through this reservation."""
        for other in self.others:
            if other.applies(pod, tables):
                given = other.allocate(pod, tables, row, allocation)
                if isinstance(given, Reason):
                    return False
                allocation = given
        return True

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        facts = tables.reservations.get(booking.allocation.reservation)
        if facts is not None:
            text = canonical_json({"name": facts.name, "uid": facts.uid})
            return Recorded({ANNOTATION_RESERVATION_ALLOCATED: text}, {})
        if ANNOTATION_RESERVATION_ALLOCATED in booking.shape.annotations:
            # Written by someone else; the pod would count inside a reservation without using it.
            return Recorded({ANNOTATION_RESERVATION_ALLOCATED: None}, {})
        return Recorded({}, {})


def _uses_none(pod: PodShape) -> bool:
    """Return whether a pod uses no reservation: it ignores them, or is one itself."""
    asked = pod.derived(asked_of)
    return asked.ignores or asked.reserves


def _ports_conflict(pod: PodShape, tables: Tables, row: int, uids: Sequence[str]) -> bool:
    """Return whether a host port of the pod is in use by others than these reservations."""
    return bool(pod.ports) and tables.ports.conflicts(
        pod.ports, row, without=[tables.bookings[uid].shape.ports for uid in uids]
    )
