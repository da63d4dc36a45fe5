"""Labels of nodes as columns of numbers, one for each key that a selector or a topology names.

A column is made when its key is first asked for, and follows the nodes from then on. Value 0 means
that a node lacks the label; any other number stands for one text. Pods may name any key, so columns
that were not asked for lately are dropped: at any time those of labels that no node has, which are
the same when they are made again; others when labels of a node change, because the numbers may be
others then, and what was worked out from them is not used after such a change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

ABSENT: Final = 0

_SPARSE: Final = 4
"""Numbers for each row above which a column is made again. Chosen: an evaluation takes time by the
count of numbers; making a column takes a millisecond for 5,000 rows, once in 15,000 changes."""

_MOST_COLUMNS: Final = 512
"""Chosen: 16 MB at 5,000 nodes, and 0.1 ms for each changed node. At twice the value both double. A
column that is dropped and asked for again costs a millisecond."""

_NO_LABELS: Final[Mapping[str, str]] = {}


class LabelColumn:
    """The values of one label key, by row."""

    def __init__(self, capacity: int) -> None:
        self.ids: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = [""]

    @property
    def values(self) -> int:
        """Count of numbers in use, with the 0 of absent labels."""
        return len(self._texts)

    def number(self, text: str | None) -> int:
        """Return the number of a value, ABSENT for None; a new text gets the next number."""
        if text is None:
            return ABSENT
        known = self._numbers.get(text)
        if known is None:
            known = self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return known

    def known(self, text: str) -> int:
        """Return the number of a value, or ABSENT if no node ever had it."""
        return self._numbers.get(text, ABSENT)

    def text(self, number: int) -> str:
        return self._texts[number]

    def where(self, holds: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return, for each number, whether its text passes; False for ABSENT."""
        table = np.zeros(len(self._texts), dtype=np.bool_)
        for number, text in enumerate(self._texts[1:], start=1):
            table[number] = holds(text)
        return table


class LabelTable:
    """The labels of all rows, and the columns made from them so far."""

    def __init__(self, capacity: int) -> None:
        self._labels: list[Mapping[str, str]] = [_NO_LABELS] * capacity
        self._columns: OrderedDict[str, LabelColumn] = OrderedDict()
        """The one that was asked for last comes last."""

    def grow(self, capacity: int) -> None:
        self._labels.extend([_NO_LABELS] * (capacity - len(self._labels)))
        for column in self._columns.values():
            column.ids = np.concatenate(
                (column.ids, np.zeros(capacity - len(column.ids), dtype=np.int32))
            )

    def of(self, row: int) -> Mapping[str, str]:
        return self._labels[row]

    def set(self, row: int, labels: Mapping[str, str]) -> bool:
        """Replace the labels of a row; return whether they changed."""
        if labels == self._labels[row]:
            return False
        self._labels[row] = labels
        self._drop(lambda column: True)
        for key, column in self._columns.items():
            column.ids[row] = column.number(labels.get(key))
            if column.values > _SPARSE * len(self._labels):
                # Names of deleted nodes and old values pile up: number the present ones afresh.
                self._columns[key] = self._made(key)
        return True

    def column(self, key: str) -> LabelColumn:
        """Return the column of a label key."""
        column = self._columns.get(key)
        if column is None:
            self._drop(lambda each: each.values == 1)
            column = self._columns[key] = self._made(key)
        else:
            self._columns.move_to_end(key)
        return column

    def _drop(self, may_go: Callable[[LabelColumn], bool]) -> None:
        """Drop columns that may go, if there are too many: those not asked for for the longest."""
        surplus = len(self._columns) - _MOST_COLUMNS + 1
        if surplus <= 0:
            return
        for key in [key for key, column in self._columns.items() if may_go(column)][:surplus]:
            del self._columns[key]

    def _made(self, key: str) -> LabelColumn:
        column = LabelColumn(len(self._labels))
        for row, labels in enumerate(self._labels):
            column.ids[row] = column.number(labels.get(key))
        return column

    def keys(self) -> Iterable[str]:
        return self._columns.keys()
