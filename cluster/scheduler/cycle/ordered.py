"""A heap whose items can be removed: each is in one such heap at most, at one place."""

from __future__ import annotations

import heapq
import itertools
from typing import Any, Final, Generic, TypeVar

_SPARE: Final = 64
"""Removed places that are kept at least, so that few items cause no constant sorting. Twice as
many places as items are kept at most, which bounds the memory."""

_serials = itertools.count(1)


class OrderedItem:
    """Base of items. `serial` names the place of an item in its heap; 0 means no place."""

    __slots__ = ("serial",)

    def __init__(self) -> None:
        self.serial = 0


P = TypeVar("P", bound=OrderedItem)


class Ordered(Generic[P]):
    """Items by a sort key, then by the order in which they were pushed."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, ...], int, P]] = []
        self._count = 0

    def push(self, key: tuple[Any, ...], item: P) -> None:
        """Add an item that is in no heap."""
        item.serial = next(_serials)
        self._count += 1
        heapq.heappush(self._heap, (key, item.serial, item))

    def remove(self, item: P) -> None:
        """Remove an item of this heap."""
        item.serial = 0
        self._count -= 1
        if len(self._heap) > 2 * self._count + _SPARE:
            self._heap = [place for place in self._heap if place[2].serial == place[1]]
            heapq.heapify(self._heap)

    def first(self) -> tuple[tuple[Any, ...], P] | None:
        """Return the first item with its sort key, or None."""
        while self._heap:
            key, serial, item = self._heap[0]
            if item.serial == serial:
                return key, item
            heapq.heappop(self._heap)
        return None
