"""Resource amounts as integers: milli-cores of `cpu`, whole units of everything else.

Batch and mid CPU are written as plain integers that already are milli-cores. A quantity is
converted once, where an object is read; nothing behind this module knows quantities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import CPU, EPHEMERAL_STORAGE, MEMORY, PODS
from apis.quantity import Quantity

Amounts = Mapping[str, int]
"""Resource name -> amount: milli-cores of cpu, whole units of everything else."""

Vector = NDArray[np.int64]
"""An amount for each column of `ResourceNames`, or for each node."""

LARGEST_AMOUNT: Final = 2**52
"""A larger amount (4 PiB, or 4.5 * 10^15 of anything) is read as this one. A hundred times the sum
of two amounts, and the sum of the amounts of 1,000 pods, then fit the 64 bits of a column."""

MOST_RESOURCES: Final = 1024
"""Columns in all. Chosen: clusters have some dozens of resources; at 5,000 nodes, 1,024
columns are 134 MB. One node with 30,000 names would take 4 GB there."""

CPU_COLUMN: Final = 0
MEMORY_COLUMN: Final = 1
EPHEMERAL_STORAGE_COLUMN: Final = 2
OWN_COLUMNS: Final = 3
"""The columns above keep their names."""


def amount_of(name: str, quantity: Quantity) -> int:
    """Return the amount that a quantity of the resource `name` stands for, within bounds."""
    amount = quantity.milli_value() if name == CPU else quantity.value()
    return max(-LARGEST_AMOUNT, min(amount, LARGEST_AMOUNT))


def amounts_of(resources: Mapping[str, Quantity]) -> dict[str, int]:
    """Return the amounts of a resource list."""
    return {name: amount_of(name, quantity) for name, quantity in resources.items()}


class ResourceNames:
    """Numbers the names of the resources that nodes have. A number is a column.

    Pods add no names: what they request beyond these is on no node, and a pod with a thousand names
    must not widen the tables. There are at most MOST_RESOURCES columns. When they are all in use,
    a new name gets the column of one that no node offers any more.
    """

    def __init__(self) -> None:
        self.renamings = 0
        """Grows when a column gets another name: what was written by column is wrong then."""
        self._columns = {CPU: CPU_COLUMN, MEMORY: MEMORY_COLUMN}
        self._columns[EPHEMERAL_STORAGE] = EPHEMERAL_STORAGE_COLUMN
        self._names = list(self._columns)

    def __len__(self) -> int:
        return len(self._names)

    def column(self, name: str) -> int:
        """Return the column of a resource; a new name gets the next one."""
        known = self._columns.get(name)
        if known is None:
            known = self._columns[name] = len(self._names)
            self._names.append(name)
        return known

    def find(self, name: str) -> int | None:
        """Return the column of a resource, None if it has none."""
        return self._columns.get(name)

    def name(self, column: int) -> str:
        return self._names[column]

    @property
    def left(self) -> int:
        """Count of columns that may still be added."""
        return max(0, MOST_RESOURCES - len(self._names))

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names without a column. `pods` needs none: a pod counts as one."""
        return [name for name in names if name not in self._columns and name != PODS]

    def learn(self, names: Iterable[str], unused: Sequence[int] = ()) -> list[str]:
        """Give each name a column as long as there are any; return the new ones.

        unused: columns whose names may lose them when there are no others.
        """
        new, left = self.unknown(names), self.left
        del new[left + len(unused) :]
        for name in new[:left]:
            self.column(name)
        for name, column in zip(new[left:], unused, strict=False):
            self._rename(column, name)
        return new

    def _rename(self, column: int, name: str) -> None:
        del self._columns[self._names[column]]
        self._columns[name] = column
        self._names[column] = name
        self.renamings += 1

    def vector(self, amounts: Amounts) -> Vector:
        """Return the amounts by column, without those of resources that have no column."""
        result = np.zeros(len(self._names), dtype=np.int64)
        for name, value in amounts.items():
            column = self._columns.get(name)
            if column is not None:
                result[column] = value
        return result

    def amounts(self, vector: Iterable[int]) -> dict[str, int]:
        """Return the amounts other than 0 of a vector."""
        return {name: int(value) for name, value in zip(self._names, vector, strict=False) if value}
