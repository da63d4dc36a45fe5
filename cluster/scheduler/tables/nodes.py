"""The node table: one row for each node, int64 columns.

A row keeps its number as long as its node exists; the number of a deleted node is used again.
`touch` marks a row as changed. Whatever is derived from rows is kept with the version that it was
derived at, and only rows with a newer version are derived again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.core import Taint
from apis.keys import CPU, MEMORY, PODS
from apis.scheduling_pod import SchedulingNode
from cluster.scheduler.tables.amounts import OWN_COLUMNS, ResourceNames, Vector, amounts_of
from cluster.scheduler.tables.declared_features import declared
from cluster.scheduler.tables.labels import LabelTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.use import Use

Rows = slice | NDArray[np.intp]
"""Which rows a plugin evaluates: `ALL_ROWS` cut to the table's length, or an array of rows."""

_FIRST_CAPACITY: Final = 64
"""Rows that are allocated at first; a full table doubles them. Chosen: a small cluster never grows
its table. Twice the value saves one doubling, which takes microseconds."""

_SPARSE: Final = 2
"""Sets of taints for each row above which they are numbered afresh. Chosen: it takes as long as
10,000 changes of taints need to make them, and bounds what is kept."""

_RECENT: Final = 64
"""Changes of rows that are kept in their order. Measured: finding the rows of 1, 20 and 64 changes
takes 0.8, 1.6 and 3.3 us, a pass over the versions of 5,000 rows 2.8 us. Twice as many would take
longer than the pass."""

_NO_ROWS: Final[NDArray[np.intp]] = np.zeros(0, dtype=np.intp)
_NO_TAINTS: Final[tuple[Taint, ...]] = ()


class NodeTable:
    """Columns by row. `allocatable` and `requested` have one more axis: the resource's column.

    scored: cpu (milli-cores) and memory (bytes) with the defaults of containers without a request.
    pods, allowed_pods: counts. order: a random but fixed number of the node's name, for ties.
    """

    def __init__(self, resources: ResourceNames) -> None:
        self.resources = resources
        self.version = 0
        """Grows with every change of a row."""
        self.object_version = 0
        """The `version` of the last change of a Node object."""
        self.membership = 0
        """Grows when a node appears or goes, or its labels or taints change."""
        self.row_version = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.content = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        """By row: equal as long as the row holds the same. It is the `row_version`, but for a row
        that a trial changed and left as it was: see `restore_content`."""
        self._recent: deque[int] = deque(maxlen=_RECENT)
        """The rows of the last changes: the last one is that of `version`."""
        self.object_row_version = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._appeared = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        """The `version` with which the row's node appeared."""
        self.alive = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)
        self.unschedulable = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)
        self.declared = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        """Bits of the features that a node declares: see `declared_features`."""
        self.allocatable = np.zeros((_FIRST_CAPACITY, len(resources)), dtype=np.int64)
        self.requested = np.zeros((_FIRST_CAPACITY, len(resources)), dtype=np.int64)
        self._offering = np.zeros(len(resources), dtype=np.int64)
        """By column: how many nodes have an amount other than 0."""
        self.scored = np.zeros((_FIRST_CAPACITY, 2), dtype=np.int64)
        self.pods = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.allowed_pods = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self.order = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self.taint_set = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self.labels = LabelTable(_FIRST_CAPACITY)
        self._taint_sets: list[tuple[Taint, ...]] = [_NO_TAINTS]
        self._taint_numbers: dict[tuple[Taint, ...], int] = {_NO_TAINTS: 0}
        self._names: list[str] = []
        self._row_of: dict[str, int] = {}
        self._free: list[int] = []

    # --- reading -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Count of rows, with those of deleted nodes that are not in use again yet."""
        return len(self._names)

    @property
    def count(self) -> int:
        """Count of nodes."""
        return len(self._row_of)

    def row(self, name: str) -> int | None:
        return self._row_of.get(name)

    def name(self, row: int) -> str:
        return self._names[row]

    def taints(self, number: int) -> tuple[Taint, ...]:
        """Return the taint set with this number (`taint_set`)."""
        return self._taint_sets[number]

    @property
    def has_taints(self) -> bool:
        """Whether any node may have taints."""
        return len(self._taint_sets) > 1

    def by_taints(self, rows: Rows, count: Callable[[tuple[Taint, ...]], int]) -> NDArray[np.int64]:
        """Return count(taints) of each of `rows`, worked out once for equal taints."""
        numbers = self.taint_set[rows]
        counts = np.zeros(len(self._taint_sets), dtype=np.int64)
        for number in np.flatnonzero(np.bincount(numbers, minlength=1)):
            counts[number] = count(self._taint_sets[number])
        return counts[numbers]

    def changed_since(self, version: int) -> NDArray[np.intp]:
        """Return the rows that changed after `version`, ascending."""
        changes = self.version - version
        if changes <= len(self._recent):
            rows = set(islice(reversed(self._recent), changes)) if changes > 0 else ()
            return np.array(sorted(rows), dtype=np.intp)
        return np.flatnonzero(self.row_version[: len(self)] > version)

    def objects_changed_since(self, version: int) -> NDArray[np.intp]:
        """Return the rows whose Node objects changed after `version`; placements do not count."""
        if self.object_version <= version:
            return _NO_ROWS
        return np.flatnonzero(self.object_row_version[: len(self)] > version)

    def same_since(self, rows: NDArray[np.intp], version: int) -> NDArray[np.intp]:
        """Return those of `rows` that still belong to the node that had them at `version`."""
        rows = rows[self.alive[rows]]
        return rows[self._appeared[rows] <= version]

    # --- changing ------------------------------------------------------------------------------

    def touch(self, row: int) -> None:
        """Mark a row as changed: masks and scores of this row are worked out again."""
        self.version += 1
        self.row_version[row] = self.version
        self.content[row] = self.version
        self._recent.append(row)

    def restore_content(self, row: int, content: int) -> None:
        """Note that a row holds again what it held when its `content` was this number."""
        self.content[row] = content

    def _touch_object(self, row: int) -> None:
        """As `touch`, where the Node object itself is new."""
        self.touch(row)
        self.object_version = self.version
        self.object_row_version[row] = self.version

    def upsert(self, node: SchedulingNode) -> int:
        """Add a node or take its new state; return its row. Requests of pods stay."""
        name = node.metadata.name
        row = self._row_of.get(name)
        if row is None:
            row = self._new_row(name)
            self._appeared[row] = self.version + 1
            self.membership += 1
        amounts = amounts_of(node.status.allocatable)
        self.learn(amounts)
        self._offer(row, self.resources.vector(amounts))
        self.allowed_pods[row] = amounts.get(PODS, 0)
        self.unschedulable[row] = node.spec.unschedulable
        self.declared[row] = declared(node.status.declared_features)
        taints = self._taint_number(node.spec.taints)
        if self.taint_set[row] != taints:
            self.taint_set[row] = taints
            self.membership += 1
        if self.labels.set(row, node.metadata.labels):
            self.membership += 1
        self._touch_object(row)
        return row

    def delete(self, name: str) -> None:
        """Remove a node that is known and whose bookings are removed."""
        row = self._row_of.pop(name)
        self.alive[row] = False
        self._offer(row, 0)
        self.allowed_pods[row] = 0
        self.labels.set(row, {})
        self.taint_set[row] = 0
        self._free.append(row)
        self.membership += 1
        self._touch_object(row)

    def place(self, row: int, shape: PodShape) -> None:
        """Count a pod of this shape on a node."""
        self._count(row, shape, 1)

    def remove(self, row: int, shape: PodShape) -> None:
        """Take back what `place` did."""
        self._count(row, shape, -1)

    def learn(self, names: Collection[str], of: str = "") -> list[str]:
        """Give resources columns; return the new ones, whose requests are not counted yet.

        of: the node whose resources these are. When there are no columns left, those are used again
        that no node, or this one alone, offered until now.
        """
        unknown = self.resources.unknown(names)
        if not unknown:
            return []
        short = len(unknown) - self.resources.left
        unused = self._unused(names, self._row_of.get(of))[:short] if short > 0 else []
        if unused:
            self.allocatable[:, unused] = 0
            self.requested[:, unused] = 0
            self._offering[unused] = 0
        new = self.resources.learn(unknown, unused)
        missing = len(self.resources) - self.allocatable.shape[1]
        if missing > 0:
            more = np.zeros((len(self.allocatable), missing), dtype=np.int64)
            self.allocatable = np.concatenate((self.allocatable, more), axis=1)
            self.requested = np.concatenate((self.requested, more), axis=1)
            self._offering = np.pad(self._offering, (0, missing))
        return new

    def request(self, row: int, name: str, amount: int) -> None:
        """Add to what is requested of one resource on a node."""
        if amount:
            self.requested[row, self.resources.column(name)] += amount
            self.touch(row)

    def add_use(self, row: int, use: Use) -> None:
        """Add to what is in use on a node; negative amounts take back."""
        vector = self.resources.vector(use.amounts)
        self.requested[row, : len(vector)] += vector
        self.scored[row] += (use.cpu, use.memory)
        self.pods[row] += use.pods
        self.touch(row)

    def _count(self, row: int, shape: PodShape, sign: int) -> None:
        # Single numbers: for the few resources of a pod, a vector costs three times as much.
        requested, scored = self.requested, self.scored
        for name, amount in shape.requests.items():
            column = self.resources.find(name)
            if column is not None:
                requested[row, column] += sign * amount
        scored[row, 0] += sign * shape.scored[CPU]
        scored[row, 1] += sign * shape.scored[MEMORY]
        self.pods[row] += sign
        self.touch(row)

    def _offer(self, row: int, vector: Vector | int) -> None:
        """Set what a node has of each resource."""
        of_row = self.allocatable[row]
        self._offering -= of_row != 0
        of_row[:] = vector
        self._offering += of_row != 0

    def _unused(self, names: Iterable[str], row: int | None) -> list[int]:
        """Return the columns that no node but `row` offers, without those of `names`."""
        offering = self._offering if row is None else self._offering - (self.allocatable[row] != 0)
        kept = {self.resources.find(name) for name in names} | set(range(OWN_COLUMNS))
        return [column for column in np.flatnonzero(offering == 0).tolist() if column not in kept]

    def _taint_number(self, taints: tuple[Taint, ...]) -> int:
        known = self._taint_numbers.get(taints)
        if known is None:
            if len(self._taint_sets) > _SPARSE * len(self._names) + _FIRST_CAPACITY:
                self._number_taints_afresh()
            known = self._taint_numbers[taints] = len(self._taint_sets)
            self._taint_sets.append(taints)
        return known

    def _number_taints_afresh(self) -> None:
        """Forget taints that no node has any more: some hold a time, and each is another set."""
        sets = [_NO_TAINTS]
        new_numbers = np.zeros(len(self._taint_sets), dtype=self.taint_set.dtype)
        for number in np.flatnonzero(np.bincount(self.taint_set)):
            if number:
                new_numbers[number] = len(sets)
                sets.append(self._taint_sets[number])
        self.taint_set = new_numbers[self.taint_set]
        self._taint_sets = sets
        self._taint_numbers = {taints: number for number, taints in enumerate(sets)}

    def _new_row(self, name: str) -> int:
        if self._free:
            row = self._free.pop()
            self._names[row] = name
        else:
            row = len(self._names)
            self._names.append(name)
            if row == len(self.alive):
                self._grow(2 * row)
        self._row_of[name] = row
        self.alive[row] = True
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.order[row] = int.from_bytes(digest, "little")
        return row

    def _grow(self, capacity: int) -> None:
        for column in (
            "row_version",
            "content",
            "object_row_version",
            "_appeared",
            "alive",
            "unschedulable",
            "declared",
            "allocatable",
            "requested",
            "scored",
            "pods",
            "allowed_pods",
            "order",
            "taint_set",
        ):
            old = getattr(self, column)
            new = np.zeros((capacity, *old.shape[1:]), dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, column, new)
        self.labels.grow(capacity)
