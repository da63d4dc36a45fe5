"""How many pods of a kind are on each node, for spread and affinity between pods.

A counter holds, by row, the sum of weights of the pods that it counts; the weight follows from a
pod's shape alone. Bookings keep counters up to date, so nothing is recounted for a decision. The
count of a topology domain is one pass over a counter's column.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from apis.keys import ANNOTATION_RESERVE_POD
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.labels import LabelColumn
from cluster.scheduler.tables.mentions import Mentions, mentioned_by_affinity
from cluster.scheduler.tables.shapes import PodShape

Weigh = Callable[[PodShape], int]
"""Weight of each pod of a shape; 0 leaves the pod out."""


class Counter:
    """Sums of weights by row. `version` grows with each change, `total` is the sum of all rows."""

    __slots__ = ("__weakref__", "_column", "total", "version", "weigh", "with_terminating")

    def __init__(self, weigh: Weigh, *, with_terminating: bool) -> None:
        self.weigh = weigh
        self.with_terminating = with_terminating
        self.version = 0
        self.total = 0
        self._column: NDArray[np.int64] = np.zeros(64, dtype=np.int64)

    def column(self, length: int) -> NDArray[np.int64]:
        """Return the sums of the first `length` rows."""
        if length > len(self._column):
            grown = np.zeros(2 * length, dtype=np.int64)
            grown[: len(self._column)] = self._column
            self._column = grown
        return self._column[:length]

    def add(self, row: int, weight: int) -> None:
        self.column(row + 1)[row] += weight
        self.total += weight
        self.version += 1

    def by_domain(self, labels: LabelColumn, rows: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the sum of each value of a label, over the rows that are set in `rows`."""
        counts = np.where(rows, self.column(len(rows)), 0)
        # Weights become floats, which are exact up to 2^53.
        sums = np.bincount(labels.ids[: len(rows)], weights=counts, minlength=labels.values)
        return sums.astype(np.int64)


def _names_pods(shape: PodShape) -> bool:
    affinity = shape.affinity
    return affinity is not None and bool(affinity.pod_affinity or affinity.pod_anti_affinity)


def is_reserve_pod(shape: PodShape) -> bool:
    """Return whether a shape is of the pod that holds a Reservation's resources."""
    return ANNOTATION_RESERVE_POD in shape.annotations


def _without_reserve_pods(weigh: Weigh) -> Weigh:
    return lambda shape: 0 if is_reserve_pod(shape) else weigh(shape)


_LIVE: Final = 0
_TERMINATING: Final = 1


class MatchTable:
    """Counters over all bookings, and where the pods of each shape are."""

    def __init__(self, mentions: Mentions) -> None:
        """mentions: counts what the terms of pods on nodes mention."""
        self._mentions = mentions
        self._rows: dict[PodShape, tuple[dict[int, int], dict[int, int]]] = {}
        """Shape -> count of its pods by row: live ones and those that are being deleted."""
        self._counters: WeakValueDictionary[Hashable, Counter] = WeakValueDictionary()
        self._counted_by: WeakKeyDictionary[PodShape, tuple[int, tuple[Hashable, ...]]] = (
            WeakKeyDictionary()
        )
        self._generation = 0
        self._with_affinity: dict[PodShape, None] = {}
        self.affinity_version = 0
        """Grows when a shape with terms about other pods gets its first booking, or loses its last
        one."""

    def shapes(self) -> Iterator[PodShape]:
        """Yield the shapes that have bookings on known nodes."""
        return iter(self._rows)

    def rows_of(self, shape: PodShape) -> Iterable[int]:
        """Return the rows with pods of a shape that are not being deleted."""
        known = self._rows.get(shape)
        return () if known is None else known[_LIVE].keys()

    def shapes_with_affinity(self) -> Iterator[PodShape]:
        """Yield the shapes with terms about other pods that have bookings on known nodes."""
        return iter(self._with_affinity)

    def counter(
        self,
        key: Hashable,
        weigh: Weigh,
        *,
        with_terminating: bool = True,
        with_reserve_pods: bool = True,
    ) -> Counter:
        """Return the counter of a key, which the caller keeps as long as it is in use.

        Equal keys must mean equal weights. with_terminating: pods being deleted count too.
        with_reserve_pods: reserve pods of Reservations count too.
        """
        if not with_reserve_pods:
            key, weigh = ("without reserve pods", key), _without_reserve_pods(weigh)
        counter = self._counters.get(key)
        if counter is None:
            counter = Counter(weigh, with_terminating=with_terminating)
            for shape, (live, terminating) in self._rows.items():
                weight = weigh(shape)
                if not weight:
                    continue
                for row, pods in live.items():
                    counter.add(row, weight * pods)
                if with_terminating:
                    for row, pods in terminating.items():
                        counter.add(row, weight * pods)
            self._counters[key] = counter
            self._generation += 1
        return counter

    def place(self, booking: Booking, row: int) -> None:
        """Count a booking."""
        self._count(booking, row, 1)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did."""
        self._count(booking, row, -1)

    def _count(self, booking: Booking, row: int, sign: int) -> None:
        shape = booking.shape
        known = self._rows.get(shape)
        if known is None:
            known = self._rows[shape] = ({}, {})
            if _names_pods(shape):
                self._with_affinity[shape] = None
                self._mentions.add(shape.derived(mentioned_by_affinity))
                self.affinity_version += 1
        rows = known[_TERMINATING if booking.terminating else _LIVE]
        pods = rows.get(row, 0) + sign
        if pods:
            rows[row] = pods
        else:
            del rows[row]
            if not known[_LIVE] and not known[_TERMINATING]:
                del self._rows[shape]
                if _names_pods(shape):
                    del self._with_affinity[shape]
                    self._mentions.remove(shape.derived(mentioned_by_affinity))
                    self.affinity_version += 1
        for key in self._keys(shape):
            counter = self._counters.get(key)
            if counter is not None and (counter.with_terminating or not booking.terminating):
                counter.add(row, sign * counter.weigh(shape))

    def _keys(self, shape: PodShape) -> tuple[Hashable, ...]:
        """Return the keys of the counters that count pods of a shape."""
        known = self._counted_by.get(shape)
        if known is not None and known[0] == self._generation:
            return known[1]
        keys = tuple(key for key, counter in self._counters.items() if counter.weigh(shape))
        self._counted_by[shape] = (self._generation, keys)
        return keys
