"""Looks at the tables as if some pods were gone and others placed, and leaves them as they were.

    with Trial(tables) as trial:
        trial.remove(victim.uid)
        fits = checks.passes(pod, row)

Bookings are placed and removed in the tables themselves, so every plugin sees the trial without
knowing of it. Removing is the exact inverse of placing; rows of a trial count as changed, so masks
that are kept for shapes are worked out again for these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Held, Profile
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.promised import Masks, PromisedRows, Verdicts
from cluster.scheduler.plugins.contract import Filter, Reason, RowFilter, only
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation, Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables, Taken

_NO_ROWS: Final = np.zeros(0, dtype=np.intp)

_LOOKS_AT_OTHER_ROWS: Final = frozenset(
    {
        "InterPodAffinity",
        "NodeVolumeLimits",
        "PodTopologySpread",
        "VolumeBinding",
        "VolumeRestrictions",
        "VolumeZone",
    }
)
"""Filters whose verdict on a node may depend on pods that are nominated for others, so that each
node has to be tried by itself."""


class Trial:
    """Changes of bookings that are all undone at the end of the `with` block, also after an error.

    A decision must not be made inside: what is placed there is gone afterwards.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._undo: list[tuple[Booking, Taken | None] | str] = []
        """In order: a booking to place again, or the UID of one to remove again."""
        self._content: dict[int, int] = {}
        """Row -> `content` before it was changed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.back_to(0)
        for row, content in self._content.items():
            self._tables.nodes.restore_content(row, content)

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
        booking = self._tables.bookings.get(uid)
        if booking is not None:
            self._changes(booking.node)
            taken = self._tables.taken(uid)
            self._tables.remove(uid)
            self._undo.append((booking, taken))

    def place(self, booking: Booking) -> None:
        """Look at the tables with this booking, in place of a former one of the same pod."""
        self.remove(booking.uid)
        self._changes(booking.node)
        self._tables.place(booking)
        self._undo.append(booking.uid)

    def _changes(self, node: str) -> None:
        row = self._tables.nodes.row(node)
        if row is not None:
            self._content.setdefault(row, int(self._tables.nodes.content[row]))


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
        self._by_row = tuple(
            each.filter_row if isinstance(each, RowFilter) else _by_array(each)
            for each in profile.filters
        )
        self._promised = None if nominator is None else PromisedRows(nominator, tables.nodes)
        self._verdicts = None if nominator is None else Verdicts(nominator, tables.nodes)

    def apart_from(self, gangs: frozenset[str]) -> RowChecks:
        """Return the same checks, for which nominated pods of these gangs do not count.

        For members that are placed all at once: where the others were to go does not matter then.
        """
        return RowChecks(self.profile, self.tables, self._nominator, gangs)

    def masks(self, pod: PodShape, row: int) -> Masks:
        """Return the mask of each filter that applies, in the filters' order, for one node."""
        return tuple(
            (plugin, by_row(pod, self.tables, row))
            for plugin, by_row in zip(self.profile.filters, self._by_row, strict=True)
            if plugin.applies(pod, self.tables)
        )

    def passes(self, pod: PodShape, row: int) -> bool:
        """Return whether all filters pass a node. Pods that are nominated do not count."""
        return not any(
            by_row(pod, self.tables, row)
            for plugin, by_row in zip(self.profile.filters, self._by_row, strict=True)
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
        if self._verdicts is None or self._nominator is None:
            return {}
        rows = np.intersect1d(self._promised_rows(pod.priority), feasible, assume_unique=True)
        if not len(rows):
            return {}
        tables = self.tables
        shape = tables.reduction.of(pod.shape)
        own = tables.nodes.row(self._nominator.node_of(pod.uid))
        others = rows if own is None else rows[rows != own]
        held = self._verdicts.held(
            shape,
            pod.priority,
            others,
            lambda: tuple(each.cluster_version(shape, tables) for each in self._applying(shape)),
            lambda stale: self._beside_nominated(pod, stale),
        )
        if len(others) < len(rows) and own is not None:
            # Its own nomination does not count for it, as it does for others of its shape.
            masks = self._beside_nominated(pod, [own])[own]
            if any(bits for _, bits in masks):
                held = {**held, own: masks}
        return held

    def _beside_nominated(
        self, pod: PendingPod[PodShape], rows: Collection[int]
    ) -> dict[int, Masks]:
        """Return the masks of rows, each beside the pods that are nominated for it."""
        shape = self.tables.reduction.of(pod.shape)
        nominated = {row: self.nominated(pod, row) for row in rows}
        if not any(each.shape.claims for of_row in nominated.values() for each in of_row):
            with Trial(self.tables) as trial:
                for row, pods in nominated.items():
                    self.place_nominated(trial, pods, row)
                applying = self._applying(shape)
                if not any(plugin.name in _LOOKS_AT_OTHER_ROWS for plugin in applying):
                    return self._masks_of(shape, applying, rows)
        found = {}
        for row, pods in nominated.items():
            with Trial(self.tables) as trial:
                self.place_nominated(trial, pods, row)
                found[row] = self.masks(shape, row)
        return found

    def _applying(self, pod: PodShape) -> tuple[Filter, ...]:
        return tuple(each for each in self.profile.filters if each.applies(pod, self.tables))

    def _masks_of(
        self, pod: PodShape, filters: Sequence[Filter], rows: Collection[int]
    ) -> dict[int, Masks]:
        every = np.array(list(rows), dtype=np.intp)
        columns = [plugin.filter(pod, self.tables, every).tolist() for plugin in filters]
        of_rows = zip(*columns, strict=True) if columns else [()] * len(rows)
        return {
            row: tuple(zip(filters, bits, strict=True))
            for row, bits in zip(rows, of_rows, strict=True)
        }

    def _promised_rows(self, priority: int) -> NDArray[np.intp]:
        """Return the rows for which pods of at least this priority are nominated, ascending."""
        if self._promised is None or self._nominator is None or not len(self._nominator):
            return _NO_ROWS
        return self._promised.at_least(priority)

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
        return self.booking_where_it_fits(pod, row) if self.fits(pod, row) else None

    def booking_where_it_fits(self, pod: PendingPod[PodShape], row: int) -> Booking | None:
        """Return the booking of a pod on a node of which `fits` has said that it takes the pod."""
        allocation = self.allocation(pod.shape, row)
        if not isinstance(allocation, Allocation):
            return None
        return Booking(pod.key, pod.uid, pod.shape, self.tables.nodes.name(row), allocation)

    def _takes(self, pod: PodShape, row: int) -> bool:
        return self.passes(pod, row) and isinstance(self.allocation(pod, row), Allocation)


def _by_array(plugin: Filter) -> Callable[[PodShape, Tables, int], int]:
    """Return what gives the mask of one row, for a filter that looks at arrays of rows."""
    return lambda pod, tables, row: int(plugin.filter(pod, tables, only(row))[0])
