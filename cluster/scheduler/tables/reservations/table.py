"""The reservation table: one slot for each reservation, int64 columns.

What a reservation is comes from its object (`upsert`, `delete`); where it is, and how much of it is
in use, from bookings: its own, which has the reservation's UID, and those of the pods that use it
(`Allocation.reservation`). The order of these does not matter. A reservation can be used when it is
available by its object and has a booking on a known node.

Which pods match which reservations is kept for each pod shape and follows changes one reservation
at a time. Every change of a reservation marks the row of its node as changed, so a mask that looks
at the reservations of its row alone is row-local.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.amounts import Vector
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.mentions import Mentions, mentioned_by_owners
from cluster.scheduler.tables.nodes import NodeTable, Rows
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.reservations.asked import asked_of
from cluster.scheduler.tables.reservations.facts import ReservationFacts
from cluster.scheduler.tables.reservations.groups import Group
from cluster.scheduler.tables.reservations.matching import (
    Key,
    Match,
    keys_of_pod,
    keys_of_reservation,
    match,
    names_pod,
)
from cluster.scheduler.tables.shapes import PodShape, personal
from cluster.scheduler.tables.use import Use, use_of

K = TypeVar("K")
V = TypeVar("V")

Slots = NDArray[np.intp]

NO_ROW: Final = -1
NO_LIMIT: Final = -1

_NO_SLOTS: Final = np.zeros(0, dtype=np.intp)
_FIRST_CAPACITY: Final = 16
_MOST_KEPT: Final = 1024
"""Shapes whose matches are kept, and shapes of single pods that reservations name. Chosen: several
times as many as have masks kept; one that matches 2,000 reservations takes 100 KB."""

Verdicts = tuple[tuple[int, Match], ...]
"""Slots whose owners mean a pod, each with the step that decides."""


@dataclass(slots=True)
class _Matches:
    """The slots that match a shape, as of a version of the table and a membership of nodes."""

    version: int
    membership: int
    matched: set[int]
    slots: Slots


def _group_of(booking: Booking) -> str:
    """Return the UID of the reservation that a pod uses, else the pod's own."""
    return booking.allocation.reservation or booking.uid


def _drop_oldest(kept: dict[K, V]) -> None:
    """Make room for one more entry."""
    if len(kept) >= _MOST_KEPT:
        del kept[next(iter(kept))]


_NO_MATCHES: Final = _Matches(0, 0, set(), _NO_SLOTS)


class ReservationTable:
    """Columns by slot; `own`, `used` and the three masks have one more axis: the resource's column.

    row: of the node, NO_ROW without a booking on a known node. available, once, policy, order: see
    ReservationFacts. owners: count of pods that use the reservation. most_owners: NO_LIMIT without
    a limit. own: what its booking requests. used: what pods on its node that use it request.
    allocatable, reserved: of the facts. named: whether it reserves a resource at all. restricted:
    whether pods get the resource from the reservation alone.
    """

    def __init__(
        self,
        nodes: NodeTable,
        in_force: Callable[[str], tuple[Booking, int] | None],
        mentions: Mentions,
    ) -> None:
        """in_force: UID -> its booking that counts on a node now, and the node's row.
        mentions: counts what the owners of reservations mention."""
        self._nodes = nodes
        self._mentions = mentions
        self._in_force = in_force
        self._groups: dict[str, Group] = {}
        self._facts: list[ReservationFacts | None] = []
        self._slot_of: dict[str, int] = {}
        self._uid_of_name: dict[str, str] = {}
        self._free: list[int] = []
        self._on_row: dict[int, list[int]] = {}
        self._index: dict[Key, set[int]] = {}
        self._matches: dict[PodShape, _Matches] = {}
        self._verdicts: dict[PodShape, tuple[tuple[int, int], Verdicts]] = {}
        self._personal: dict[tuple[PodShape, str], PodShape] = {}
        self._naming: set[int] = set()
        self._node_labels = True
        self.taints_for_all = True
        """Whether taints keep away pods without the annotation reservation-affinity too. Set it
        before there are any reservations."""
        self._match_version = 0
        self._width = len(nodes.resources)
        self._renamings = nodes.resources.renamings
        self._changed = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.row = np.full(_FIRST_CAPACITY, NO_ROW, dtype=np.int64)
        self.available = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)
        self.once = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)
        self.policy = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.order = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.owners = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.most_owners = np.full(_FIRST_CAPACITY, NO_LIMIT, dtype=np.int64)
        self.own = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.int64)
        self.used = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.int64)
        self.allocatable = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.int64)
        self.reserved = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.int64)
        self.named = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.bool_)
        self.restricted = np.zeros((_FIRST_CAPACITY, self._width), dtype=np.bool_)

    # --- reading -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Count of reservations."""
        return len(self._slot_of)

    def __iter__(self) -> Iterator[ReservationFacts]:
        return (facts for facts in self._facts if facts is not None)

    def get(self, uid: str) -> ReservationFacts | None:
        """Return a reservation, None if it is not known."""
        slot = self._slot_of.get(uid)
        return self._facts[slot] if slot is not None else None

    def facts(self, slot: int) -> ReservationFacts:
        """Return the reservation of a slot that is in use."""
        facts = self._facts[slot]
        assert facts is not None
        return facts

    def by_name(self, name: str) -> ReservationFacts | None:
        """Return the reservation with this name."""
        return self.get(self._uid_of_name.get(name, ""))

    def slot(self, uid: str) -> int | None:
        """Return the slot of a reservation."""
        return self._slot_of.get(uid)

    def owners_of(self, uid: str) -> frozenset[str]:
        """Return the UIDs of the pods that are booked with a reservation, on whatever node."""
        group = self._groups.get(uid)
        return frozenset(group.owners) if group is not None else frozenset()

    def uses(self) -> Iterator[tuple[int, Use]]:
        """Yield what each group takes of each node: row and use."""
        for group in self._groups.values():
            rows = group.used.keys() | ({group.own[0]} if group.own is not None else set())
            for row in rows:
                yield row, group.on(row)

    def rows(self) -> frozenset[int]:
        """Return the rows with reservations, or with pods that use one."""
        groups = self._groups.values()
        used = (row for group in groups for row in group.used)
        return frozenset(used) | {group.own[0] for group in groups if group.own is not None}

    def slots_on(self, row: int) -> tuple[int, ...]:
        """Return the slots of the reservations that have their booking on a node, ascending."""
        return tuple(self._on_row.get(row, ()))

    def remainder(self, slots: Slots) -> Vector:
        """Return what is reserved and not in use, [slot, resource's column]; at least 0."""
        left: Vector = np.maximum(self.own[slots] - self.used[slots], 0)
        return left

    def shape_for(self, shape: PodShape, name: str, uid: str) -> PodShape:
        """Return the shape to decide about a pod with: its own if a reservation names the pod."""
        index = self._index
        if not self._naming or (("uid", uid, "") not in index and ("name", name, "") not in index):
            return shape
        known = self._personal.get((shape, uid))
        if known is None:
            _drop_oldest(self._personal)
            known = self._personal[shape, uid] = personal(shape, name, uid)
        return known

    @property
    def match_version(self) -> int:
        """Grows when a reservation comes, goes or means other pods."""
        return self._match_version

    def pod_for(self, pod: PendingPod[PodShape]) -> PendingPod[PodShape]:
        """Return a pod with the shape to decide about it with: see `shape_for`."""
        shape = self.shape_for(pod.shape, pod.key.partition("/")[2], pod.uid)
        return pod if shape is pod.shape else replace(pod, shape=shape)

    def matched(self, pod: PodShape) -> Slots:
        """Return the slots that a pod may use by what it is, in whatever state these are."""
        return self._matches_of(pod).slots

    def _matches_of(self, pod: PodShape) -> _Matches:
        if not self._slot_of:
            return _NO_MATCHES
        asked = pod.derived(asked_of)
        if asked.ignores or asked.reserves or asked.error is not None:
            return _NO_MATCHES
        known = self._matches.get(pod)
        if known is None:
            return self._first_matches(pod)
        by_labels = asked.affinity is not None and self._nodes.membership != known.membership
        if known.version != self._match_version or by_labels:
            since = -1 if by_labels else known.version
            self._follow(pod, known, np.flatnonzero(self._changed[: len(self._facts)] > since))
        return known

    def usable(self, pod: PodShape, rows: Rows) -> Slots:
        """Return the slots on these rows that a pod may use now: available, and not used up."""
        matches = self._matches_of(pod)
        slots = matches.slots
        if not len(slots):
            return slots
        if not isinstance(rows, slice):
            of_row, matched = self._on_row.get, matches.matched
            here = [slot for row in rows.tolist() for slot in of_row(row, ()) if slot in matched]
            if not here:
                return _NO_SLOTS
            slots = np.array(sorted(here), dtype=np.intp)
        open_: NDArray[np.bool_] = (
            self.available[slots]
            & (self.row[slots] != NO_ROW)
            & ~(self.once[slots] & (self.owners[slots] > 0))
        )
        return slots[open_]

    def every(self, rows: Rows) -> Slots:
        """Return the slots of all reservations that have their booking on these rows."""
        if isinstance(rows, slice):
            there: Slots = np.flatnonzero(self.row[: len(self._facts)] != NO_ROW)
            return there
        here = [slot for row in rows.tolist() for slot in self._on_row.get(row, ())]
        return np.array(sorted(here), dtype=np.intp)

    def verdicts(self, pod: PodShape) -> Verdicts:
        """Return the slots whose owners mean a pod, with the step that decides, for messages."""
        version = (self._match_version, self._nodes.membership)
        known = self._verdicts.get(pod)
        if known is None or known[0] != version:
            found = ((slot, self._match(pod, slot)) for slot in sorted(self._candidates(pod)))
            decided = tuple(each for each in found if each[1] is not Match.OWNER)
            _drop_oldest(self._verdicts)
            known = self._verdicts[pod] = (version, decided)
        return known[1]

    def omit_node_labels(self) -> None:
        """Compare affinity with the labels of reservations alone. Call it before there are any."""
        self._node_labels = False

    # --- changing: objects ---------------------------------------------------------------------

    def upsert(self, facts: ReservationFacts) -> None:
        """Add a reservation or take its new state."""
        slot = self._slot_of.get(facts.uid)
        before = self._facts[slot] if slot is not None else None
        if before == facts:
            return
        if slot is None:
            slot = self._new_slot(facts.uid)
            if facts.uid not in self._groups:
                self._groups[facts.uid] = self._new_group(facts.uid)
        if before is None or not before.matches_alike(facts):
            self._unindex(slot)
            self._mentions.add(mentioned_by_owners(facts.owners))
            for key in keys_of_reservation(facts):
                self._index.setdefault(key, set()).add(slot)
                if names_pod(key):
                    self._naming.add(slot)
            self._note(slot)
        if before is not None and self._uid_of_name.get(before.name) == facts.uid:
            del self._uid_of_name[before.name]
        self._uid_of_name[facts.name] = facts.uid
        self._facts[slot] = facts
        self._set_facts(slot, facts)
        self._set_use(slot)
        self._touch(slot)

    def delete(self, uid: str) -> None:
        """Forget a reservation. Its booking, and its pods, count as they did."""
        slot = self._slot_of.pop(uid, None)
        if slot is None:
            return
        self._touch(slot)
        facts = self.facts(slot)
        if self._uid_of_name.get(facts.name) == uid:
            del self._uid_of_name[facts.name]
        self._unindex(slot)
        self._note(slot)
        self._leave_row(slot)
        self._facts[slot] = None
        self.row[slot] = NO_ROW
        self.available[slot] = False
        self._free.append(slot)
        if not self._groups[uid].owners:
            del self._groups[uid]

    # --- changing: bookings --------------------------------------------------------------------

    def counts(self, booking: Booking) -> bool:
        """Return whether a booking counts as a part of a group: not alone, or as a reservation."""
        return _group_of(booking) != booking.uid or booking.uid in self._groups

    def place(self, booking: Booking, row: int) -> Use:
        """Count a booking for which `counts` holds; return what its node has more in use."""
        uid = _group_of(booking)
        group = self._groups.get(uid)
        if group is None:
            group = self._groups[uid] = self._new_group(uid)
        before = group.on(row)
        if uid == booking.uid:
            group.own = (row, use_of(booking.shape))
        else:
            group.add(booking.uid, row, use_of(booking.shape))
        self._count(uid)
        return group.on(row) - before

    def remove(self, booking: Booking, row: int) -> Use:
        """Take back what `place` did; return what its node has more in use (negative amounts)."""
        uid = _group_of(booking)
        group = self._groups[uid]
        before = group.on(row)
        if uid == booking.uid:
            group.own = None
        else:
            group.drop(booking.uid, row, use_of(booking.shape))
        self._count(uid)
        if not group.owners and uid not in self._slot_of:
            del self._groups[uid]
        return group.on(row) - before

    def _new_group(self, uid: str) -> Group:
        """Return a group; a booking of the reservation that is in force counts already."""
        group = Group()
        found = self._in_force(uid)
        if found is not None and _group_of(found[0]) == uid:
            group.own = (found[1], use_of(found[0].shape))
        return group

    def _count(self, uid: str) -> None:
        slot = self._slot_of.get(uid)
        if slot is not None:
            self._set_use(slot)
            # The pod may be on another node than the reservation.
            self._touch(slot)

    # --- columns -------------------------------------------------------------------------------

    def follow_resources(self) -> None:
        """Write the columns again after new resources were learned."""
        resources = self._nodes.resources
        if (len(resources), resources.renamings) == (self._width, self._renamings):
            return
        self._width, self._renamings = len(resources), resources.renamings
        for name in ("own", "used", "allocatable", "reserved", "named", "restricted"):
            column = getattr(self, name)
            grown = np.zeros((len(column), self._width), dtype=column.dtype)
            setattr(self, name, grown)
        for slot, facts in enumerate(self._facts):
            if facts is not None:
                self._set_facts(slot, facts)
                self._set_use(slot)

    def _set_facts(self, slot: int, facts: ReservationFacts) -> None:
        resources = self._nodes.resources
        self.available[slot] = facts.available
        self.once[slot] = facts.once
        self.policy[slot] = int(facts.policy)
        self.order[slot] = facts.order
        most = facts.most_owners
        self.most_owners[slot] = NO_LIMIT if most is None else most
        self.allocatable[slot] = resources.vector(facts.allocatable)[: self._width]
        self.reserved[slot] = resources.vector(facts.reserved)[: self._width]
        for column, names in (
            (self.named, facts.allocatable.keys()),
            (self.restricted, facts.restricted_names),
        ):
            column[slot] = resources.vector(dict.fromkeys(names, 1))[: self._width] > 0

    def _set_use(self, slot: int) -> None:
        """Set what follows from the group of a slot."""
        group = self._groups[self.facts(slot).uid]
        resources = self._nodes.resources
        row = group.own[0] if group.own is not None else NO_ROW
        if self.row[slot] != row:
            self._leave_row(slot)
            self.row[slot] = row
            if row != NO_ROW:
                on_row = self._on_row.setdefault(row, [])
                on_row.append(slot)
                on_row.sort()
            # Labels of the node may decide about affinity.
            self._note(slot)
        self.owners[slot] = len(group.owners)
        self.own[slot] = 0 if group.own is None else resources.vector(group.own[1].amounts)
        used = group.used.get(row)
        self.used[slot] = 0 if used is None else resources.vector(used.amounts)

    def _leave_row(self, slot: int) -> None:
        row = int(self.row[slot])
        if row == NO_ROW:
            return
        self._on_row[row].remove(slot)
        if not self._on_row[row]:
            del self._on_row[row]

    def _touch(self, slot: int) -> None:
        row = int(self.row[slot])
        if row != NO_ROW:
            self._nodes.touch(row)

    def _new_slot(self, uid: str) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._facts)
            self._facts.append(None)
            if slot == len(self.row):
                self._grow(2 * slot)
        self._slot_of[uid] = slot
        self.row[slot] = NO_ROW
        return slot

    def _grow(self, capacity: int) -> None:
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                new = np.zeros((capacity, *old.shape[1:]), dtype=old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)

    # --- matching ------------------------------------------------------------------------------

    def _match(self, pod: PodShape, slot: int) -> Match:
        row = int(self.row[slot])
        labels = self._nodes.labels.of(row) if row != NO_ROW and self._node_labels else {}
        return match(pod, self.facts(slot), labels, taints_for_all=self.taints_for_all)

    def _candidates(self, pod: PodShape) -> set[int]:
        """Return the slots whose owners may mean a pod."""
        candidates: set[int] = set()
        for key in keys_of_pod(pod):
            candidates |= self._index.get(key, set())
        return candidates

    def _first_matches(self, pod: PodShape) -> _Matches:
        matched = {slot for slot in self._candidates(pod) if self._match(pod, slot) is Match.YES}
        slots = np.array(sorted(matched), dtype=np.intp)
        known = _Matches(self._match_version, self._nodes.membership, matched, slots)
        _drop_oldest(self._matches)
        self._matches[pod] = known
        return known

    def _follow(self, pod: PodShape, known: _Matches, changed: Slots) -> None:
        """Bring the matches of a shape in line with slots that changed."""
        for slot in changed.tolist():
            if self._facts[slot] is not None and self._match(pod, slot) is Match.YES:
                known.matched.add(slot)
            else:
                known.matched.discard(slot)
        known.slots = np.array(sorted(known.matched), dtype=np.intp)
        known.version = self._match_version
        known.membership = self._nodes.membership

    def _note(self, slot: int) -> None:
        """Have the matches of all shapes follow a slot."""
        self._match_version += 1
        self._changed[slot] = self._match_version

    def _unindex(self, slot: int) -> None:
        facts = self._facts[slot]
        self._naming.discard(slot)
        if facts is not None:
            self._mentions.remove(mentioned_by_owners(facts.owners))
        for key in keys_of_reservation(facts) if facts is not None else ():
            slots = self._index[key]
            slots.discard(slot)
            if not slots:
                del self._index[key]
