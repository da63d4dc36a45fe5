"""The pods of each node in the order of their importance, as columns, for preemption.

A pod is more important than another one if its priority is higher, or equal and it started earlier.
A booking that changes marks its row alone; changed rows are written again when the columns are
read, so that a placement costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.amounts import ResourceNames
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape

NOBODY: Final = 0
"""The number that stands for no shape, where a row has fewer pods than the widest one."""
NO_PRIORITY: Final = 2**31
"""Of a number that stands for no shape; above every priority, which are int32."""
_FIRST_ROWS: Final = 64
"""Rows that are allocated at first, as many as the node table's."""
_FIRST_WIDTH: Final = 16
"""Pods of a row that are allocated at first. Chosen: some busy nodes have more and widen the table;
twice the value doubles the memory of a cluster whose nodes all have fewer."""


def importance(booking: Booking) -> tuple[int, float, str]:
    """Return what sorts pods by importance, the most important first."""
    return -booking.shape.priority, booking.start, booking.key


class Occupants:
    """Columns by [row, position in the order of importance].

    numbers: the shape of the pod, as a number. starts: when it started, seconds since 1970.
    By number: `shapes`, `priorities` (NO_PRIORITY where there is no shape), and `requests` with a
    column for each resource.
    """

    def __init__(
        self,
        resources: ResourceNames,
        on: Callable[[int], Mapping[str, Booking]],
        rows: Callable[[], int],
    ) -> None:
        """on: row -> the bookings of the node by the pod's UID. rows: how many the node table has,
        those of nodes without pods among them."""
        self._resources = resources
        self._on = on
        self._rows = rows
        self._changed: set[int] = set()
        self.numbers: NDArray[np.int32] = np.zeros((_FIRST_ROWS, _FIRST_WIDTH), dtype=np.int32)
        self.starts: NDArray[np.float64] = np.zeros((_FIRST_ROWS, _FIRST_WIDTH))
        self.bookings: list[tuple[Booking, ...]] = [()] * _FIRST_ROWS
        self.shapes: list[PodShape | None] = [None]
        self.priorities: NDArray[np.int64] = np.full(_FIRST_ROWS, NO_PRIORITY)
        self.requests: NDArray[np.int64] = np.zeros((_FIRST_ROWS, len(resources)), dtype=np.int64)
        self._renamings = resources.renamings
        self._number_of: dict[PodShape, int] = {}
        self._pods_of: list[int] = [0]
        self._free: list[int] = []

    def place(self, booking: Booking, row: int) -> None:
        """Note that a row has one pod more."""
        self._changed.add(row)

    def remove(self, booking: Booking, row: int) -> None:
        """Note that a row has one pod less."""
        self._changed.add(row)

    def follow(self) -> None:
        """Write the rows that changed; every row of the node table can be read then."""
        rows = self._rows()
        if rows > len(self.numbers):
            self._grow(2 * rows, self.numbers.shape[1])
        for row in self._changed:
            self._write(row)
        self._changed.clear()
        missing = len(self._resources) - self.requests.shape[1]
        if missing > 0 or self._renamings != self._resources.renamings:
            self._renamings = self._resources.renamings
            self.requests = np.pad(self.requests, ((0, 0), (0, missing)))
            for shape, number in self._number_of.items():
                self.requests[number] = self._resources.vector(shape.requests)

    def _write(self, row: int) -> None:
        bookings = tuple(sorted(self._on(row).values(), key=importance))
        if len(bookings) > self.numbers.shape[1]:
            self._grow(len(self.numbers), 2 * len(bookings))
        # The new shapes are counted first, so that one that stays keeps its number.
        numbers = [self._take(booking.shape) for booking in bookings]
        self._give_back(booking.shape for booking in self.bookings[row])
        self.bookings[row] = bookings
        count = len(bookings)
        self.numbers[row, :count] = numbers
        self.numbers[row, count:] = NOBODY
        self.starts[row, :count] = [booking.start for booking in bookings]

    def _take(self, shape: PodShape) -> int:
        number = self._number_of.get(shape)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = len(self.shapes)
                self.shapes.append(None)
                self._pods_of.append(0)
                if number == len(self.priorities):
                    unused = np.full(number, NO_PRIORITY)
                    self.priorities = np.concatenate((self.priorities, unused))
                    self.requests = np.pad(self.requests, ((0, number), (0, 0)))
            self._number_of[shape] = number
            self.shapes[number] = shape
            self.priorities[number] = shape.priority
            vector = self._resources.vector(shape.requests)[: self.requests.shape[1]]
            self.requests[number, : len(vector)] = vector
        self._pods_of[number] += 1
        return number

    def _give_back(self, shapes: Iterable[PodShape]) -> None:
        for shape in shapes:
            number = self._number_of[shape]
            self._pods_of[number] -= 1
            if not self._pods_of[number]:
                del self._number_of[shape]
                self.shapes[number] = None
                self.priorities[number] = NO_PRIORITY
                self._free.append(number)

    def _grow(self, rows: int, width: int) -> None:
        length, before = self.numbers.shape
        more = (0, rows - length), (0, width - before)
        self.numbers = np.pad(self.numbers, more)
        self.starts = np.pad(self.starts, more)
        self.bookings += [()] * (rows - length)
