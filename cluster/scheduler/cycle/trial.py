"""Looks at the tables as if some pods were gone and others placed, and leaves them as they were.

    with Trial(tables) as trial:
        trial.remove(victim.uid)
        fits = checks.passes(pod, row)

Bookings are placed and removed in the tables themselves, so every plugin sees the trial without
knowing of it. Removing is the exact inverse of placing; rows of a trial count as changed, so masks
that are kept for shapes are worked out again for these rows.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Held, Profile
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.plugins.contract import Filter, Reason
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation, Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables, Taken

_NO_ROWS: Final = np.zeros(0, dtype=np.intp)


class Trial:
    """Changes of bookings that are all undone at the end of the `with` block, also after an error.

    A decision must not be made inside: what is placed there is gone afterwards.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._undo: list[tuple[Booking, Taken | None] | str] = []
        """In order: a booking to place again, or the UID of one to remove again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.back_to(0)

    def mark(self) -> int:
        """Return where the trial is, for `back_to`."""
        return len(self._undo)

    def back_to(self, mark: int) -> None:
        """Undo what was done after `mark` returned this number."""
        while len(self._undo) > mark:
            step = self._undo.pop()
            if isinstance(step, str):
                self._tables.remove(step)
            else:
                self._tables.place(*step)

    def remove(self, uid: str) -> None:
        """Look at the tables without this pod; a pod without a booking changes nothing."""
        taken = self._tables.taken(uid)
        booking = self._tables.remove(uid)
        if booking is not None:
            self._undo.append((booking, taken))

    def place(self, booking: Booking) -> None:
        """Look at the tables with this booking, in place of a former one of the same pod."""
        self.remove(booking.uid)
        self._tables.place(booking)
        self._undo.append(booking.uid)


class RowChecks:
    """Whether one node takes a pod, as the tables are at this moment, inside a trial or not."""

    def __init__(
        self,
        profile: Profile,
        tables: Tables,
        nominator: Nominator[PodShape] | None = None,
        apart_from: frozenset[str] = frozenset(),
    ) -> None:
        """nominator: of the pods that count although they are not placed yet. apart_from: gangs
        whose nominated pods do not count."""
        self.profile = profile
        self.tables = tables
        self._nominator = nominator
        self._apart_from = apart_from
        self._promised: tuple[tuple[int, int], NDArray[np.intp], NDArray[np.int64]] | None = None
        """Rows with nominated pods and their highest priorities, as of which nominations and
        nodes. Kept, because each decision asks and few change anything about it."""

    def apart_from(self, gangs: frozenset[str]) -> RowChecks:
        """Return the same checks, for which nominated pods of these gangs do not count.

        For members that are placed all at once: where the others were to go does not matter then.
        """
        return RowChecks(self.profile, self.tables, self._nominator, gangs)

    def masks(self, pod: PodShape, row: int) -> tuple[tuple[Filter, int], ...]:
        """Return the mask of each filter that applies, in the filters' order, for one node."""
        rows = np.array([row], dtype=np.intp)
        return tuple(
            (plugin, int(plugin.filter(pod, self.tables, rows)[0]))
            for plugin in self.profile.filters
            if plugin.applies(pod, self.tables)
        )

    def passes(self, pod: PodShape, row: int) -> bool:
        """Return whether all filters pass a node. Pods that are nominated do not count."""
        rows = np.array([row], dtype=np.intp)
        return all(
            not plugin.filter(pod, self.tables, rows)[0]
            for plugin in self.profile.filters
            if plugin.applies(pod, self.tables)
        )

    def fits(self, pod: PendingPod[PodShape], row: int) -> bool:
        """Return whether a node takes a pod, with and without the pods that are nominated for it.

        Nominated pods count from the pod's own priority upwards. The exact allocation is tried too.
        """
        nominated = self.nominated(pod, row)
        if nominated:
            with Trial(self.tables) as trial:
                self.place_nominated(trial, nominated, row)
                if not self._takes(pod.shape, row):
                    return False
        return self._takes(pod.shape, row)

    def nominated(self, pod: PendingPod[PodShape], row: int) -> tuple[PendingPod[PodShape], ...]:
        """Return the other pods that are nominated for a node and at least as important."""
        if self._nominator is None or not len(self._nominator):
            return ()
        at_least = self._nominator.at_least(self.tables.nodes.name(row), pod.priority)
        bookings = self.tables.bookings
        return tuple(
            other
            for other in at_least
            if other.uid != pod.uid
            and other.uid not in bookings
            and other.gang not in self._apart_from
        )

    def promised(self, pod: PendingPod[PodShape]) -> dict[int, tuple[PendingPod[PodShape], ...]]:
        """Return `nominated` of each row where it is not empty."""
        found = {}
        for row in self._promised_rows(pod.priority).tolist():
            nominated = self.nominated(pod, row)
            if nominated:
                found[row] = nominated
        return found

    def held_by_nominated(self, pod: PendingPod[PodShape], feasible: NDArray[np.intp]) -> Held:
        """Return those of `feasible`, ascending rows, that do not take a pod beside their nominated
        pods. Each node is looked at with its own nominated pods alone, as kube-scheduler does."""
        held: dict[int, tuple[tuple[Filter, int], ...]] = {}
        promised = self._promised_rows(pod.priority)
        for row in np.intersect1d(promised, feasible, assume_unique=True).tolist():
            nominated = self.nominated(pod, row)
            if not nominated:
                continue
            with Trial(self.tables) as trial:
                self.place_nominated(trial, nominated, row)
                masks = self.masks(pod.shape, row)
            if any(bits for _, bits in masks):
                held[row] = masks
        return held

    def _promised_rows(self, priority: int) -> NDArray[np.intp]:
        """Return the rows for which pods of at least this priority are nominated, ascending."""
        nominator, nodes = self._nominator, self.tables.nodes
        if nominator is None or not len(nominator):
            return _NO_ROWS
        version = nominator.version, nodes.membership
        if self._promised is None or self._promised[0] != version:
            highest = {nodes.row(node): nominator.highest(node) for node in nominator.nodes()}
            known = sorted(
                (row, most) for row, most in highest.items() if row is not None and most is not None
            )
            rows = np.array([row for row, _ in known], dtype=np.intp)
            priorities = np.array([most for _, most in known], dtype=np.int64)
            self._promised = version, rows, priorities
        _, rows, priorities = self._promised
        return rows[priorities >= priority]

    def place_nominated(
        self, trial: Trial, nominated: tuple[PendingPod[PodShape], ...], row: int
    ) -> None:
        """Place nominated pods on their node, with what the node can allocate to them now."""
        node = self.tables.nodes.name(row)
        for pod in nominated:
            allocation = self.allocation(pod.shape, row)
            if not isinstance(allocation, Allocation):
                allocation = NO_ALLOCATION
            trial.place(Booking(pod.key, pod.uid, pod.shape, node, allocation))

    def allocation(self, pod: PodShape, row: int) -> Allocation | tuple[str, Reason]:
        """Return what a node would allocate to a pod, or the plugin that cannot, and why."""
        allocation = NO_ALLOCATION
        for allocator in self.profile.allocators:
            if allocator.applies(pod, self.tables):
                given = allocator.allocate(pod, self.tables, row, allocation)
                if isinstance(given, Reason):
                    return allocator.name, given
                allocation = given
        return allocation

    def booking(self, pod: PendingPod[PodShape], row: int) -> Booking | None:
        """Return the booking of a pod on a node, or None if the node does not take it: `fits`."""
        if not self.fits(pod, row):
            return None
        allocation = self.allocation(pod.shape, row)
        if not isinstance(allocation, Allocation):
            return None
        return Booking(pod.key, pod.uid, pod.shape, self.tables.nodes.name(row), allocation)

    def _takes(self, pod: PodShape, row: int) -> bool:
        return self.passes(pod, row) and isinstance(self.allocation(pod, row), Allocation)
