"""What a plugin is: pure functions from a pod's shape and the tables to masks and scores.

A filter returns, for each row, a bit mask: 0 means that the node passes, bit k that reason k of
`reasons` holds it back. Several bits may be set (a node may lack both cpu and memory). A score
returns numbers that are 0..100 after `normalize`. Neither keeps anything of its own between calls:
what follows from the shape alone is kept with the shape (`PodShape.derived`), what follows from the
tables belongs to a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.amounts import Vector
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.table import Slots
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Mask = NDArray[np.int64]
"""Bits of reasons by row; 0 passes."""

Scores = NDArray[np.int64]

MAX_SCORE: Final = 100
NO_LIMIT: Final = 2**31
"""The headroom of a row that a filter does not limit: more than there are pods."""
MOST_REASONS: Final = 62
"""Bits of a mask that a plugin may use."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a node is held back. resolvable: evicting pods of the node could help."""

    text: str
    resolvable: bool = True


class Refusal(Exception):
    """The pod cannot be scheduled at all, whatever the nodes are like, by the plugin `plugin`.

    resolvable: evicting other pods could help.
    """

    def __init__(self, plugin: str, message: str, *, resolvable: bool = False) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.resolvable = resolvable


class Filter(Protocol):
    """Decides which nodes can take a pod."""

    @property
    def name(self) -> str: ...

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether any node could be held back. Raises Refusal."""
        ...

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        """Return the reasons that the bits of a mask stand for; at most MOST_REASONS."""
        ...

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        """Return the mask of each of `rows`. The rows may be those of deleted nodes."""
        ...

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        """Return a number that changes when a row's mask may change although the row did not.

        A constant for plugins whose mask depends on the row alone.
        """
        ...


@runtime_checkable
class Counting(Protocol):
    """A filter that can say how many pods of a shape fit on each node together."""

    def headroom(self, pod: PodShape, tables: Tables, rows: Rows, pods: int) -> NDArray[np.int64]:
        """Return how many more pods of this shape each of `rows` would pass, one after another.

        pods: how many pods of any shape are placed at most, also on other rows. Never less than
        that; 0 only where the mask holds the row back; NO_LIMIT where the filter sets none.
        """
        ...


class Leaving(Protocol):
    """Pods that could leave each of some rows."""

    def weigh(self, weigh: Callable[[PodShape], int]) -> NDArray[np.int64]:
        """Return for each row the sum of a pod's weight, which its shape gives, over its pods."""
        ...


@runtime_checkable
class Opening(Protocol):
    """A filter that knows which of the nodes that it holds back stay so whichever pods leave."""

    def may_open(
        self, pod: PodShape, tables: Tables, rows: NDArray[np.intp], leaving: Leaving
    ) -> NDArray[np.bool_]:
        """Return False only where a row is held back even if all of `leaving` left it.

        Each row is looked at as if no pod left any other one.
        """
        ...


@runtime_checkable
class RowFilter(Protocol):
    """A filter that decides about one row without NumPy, whose calls cost more than such a row."""

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return the mask that `filter` gives this row."""
        ...


@runtime_checkable
class RowScore(Protocol):
    """A score that is worked out for one row without NumPy."""

    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return what `score` gives this row."""
        ...


class Score(Protocol):
    """Ranks nodes that can take a pod by what their rows hold."""

    @property
    def name(self) -> str: ...

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether the scores of two nodes could differ."""
        ...

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        """Return the raw score of each of `rows`."""
        ...

    def normalize(self, raw: Scores) -> Scores:
        """Return 0..100 for the raw scores of all feasible nodes."""
        ...

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        """As Filter.cluster_version."""
        ...


class OfRowAlone:
    """A filter or score whose result for a row changes only when this row does."""

    __slots__ = ()

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return 0


class OfNodeAlone:
    """A filter or score whose result for a row follows from the Node object alone.

    It is not asked again when pods are placed on the node or removed from it.
    """

    __slots__ = ()


class AppliesByShape:
    """A plugin whose `applies` follows from the pod's shape and its own settings alone.

    It is asked once for a shape, and not again when tables change.
    """

    __slots__ = ()


class ScoredAsIs:
    """A score whose raw numbers are 0..100 already."""

    __slots__ = ()

    def normalize(self, raw: Scores) -> Scores:
        return raw


class SetScore(Protocol):
    """Ranks nodes by the whole set of feasible nodes; evaluated in each cycle."""

    @property
    def name(self) -> str: ...

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """As Score.applies."""
        ...

    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        """Return 0..100 for each of the feasible rows."""
        ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a placement writes on the pod. None as a value removes the annotation or label.

    lock: annotation of the node that has to be taken before the pod is bound, "" for none.
    """

    annotations: dict[str, str | None]
    labels: dict[str, str | None]
    lock: str = ""


class Admission(Protocol):
    """Decides about a pod before any node is looked at: quotas, gangs, unsupported requests."""

    @property
    def name(self) -> str: ...

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Return if the pod may be scheduled now. Raises Refusal."""
        ...


class Preference(Protocol):
    """Names nodes that are taken before all others if they pass, whatever the scores are."""

    @property
    def name(self) -> str: ...

    def preferred(self, pod: PodShape, tables: Tables) -> tuple[int, ...]:
        """Return rows in the order in which they are tried; none for most pods."""
        ...


class Allocator(Protocol):
    """The exact part of a placement, for one node that passed every filter."""

    @property
    def name(self) -> str: ...

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether the pod gets anything from this allocator."""
        ...

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        """Return `allocation` with this plugin's part added, or why the node cannot give it."""
        ...

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        """Return what has to stand on the pod for this booking."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """Room that reservations give back to a pod; a row may occur several times.

    rows: of the nodes. amounts: by resource's column. pods: how many pods more are allowed.
    """

    rows: NDArray[np.int64]
    amounts: Vector
    pods: NDArray[np.int64]


class Restored(Protocol):
    """Knows which reserved room a pod may take: of the reservations that it matches, or of all for
    a pod that ignores reservations."""

    def given(self, pod: PodShape, tables: Tables, rows: Rows) -> Given | None:
        """Return the room on these rows; None if there is none."""
        ...

    def slots(self, pod: PodShape, tables: Tables, rows: Rows) -> Slots:
        """Return the slots, in the table of reservations, of those on these rows."""
        ...

    def rows(self, pod: PodShape, tables: Tables) -> NDArray[np.int64]:
        """Return the rows with such room, ascending."""
        ...

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        """Return the UIDs of the reservations on a node that the pod may use, one of them."""
        ...

    def ignored(self, pod: PodShape, tables: Tables, row: int) -> frozenset[str]:
        """Return the UIDs of the reservations on a node that count as free all together."""
        ...

    def restricted(self, tables: Tables, uid: str) -> frozenset[str]:
        """Return the resources that pods get from this reservation alone."""
        ...

    def taken_over(
        self, pod: PodShape, tables: Tables, rows: Rows
    ) -> Mapping[int, tuple[Booking, ...]]:
        """Return by row the pods whose room a Reservation that pre-allocates takes over there."""
        ...


class Explainer(Protocol):
    """Adds a sentence to the reasons of a pod that no node takes."""

    def explain(self, pod: PodShape, tables: Tables, masks: Sequence[tuple[Filter, Mask]]) -> str:
        """Return the sentence, "" for none. masks: of every filter, by row."""
        ...


def zeros(shape: int | tuple[int, ...]) -> NDArray[np.int64]:
    """Return a mask that every row passes, or scores or amounts of 0."""
    return np.zeros(shape, dtype=np.int64)


def only(row: int) -> NDArray[np.intp]:
    """Return one row as an array of rows."""
    return np.array([row], dtype=np.intp)


def percent_of(part: Scores, whole: Scores) -> Scores:
    """Return part * 100 // whole; of nothing, a part of nothing is 0."""
    return part * MAX_SCORE // np.maximum(whole, 1)


def to_largest(raw: Scores) -> Scores:
    """Normalise so that the largest score becomes 100: raw * 100 // largest; all 0 stay 0."""
    return raw * MAX_SCORE // max(int(raw.max(initial=0)), 1)


def to_largest_reversed(raw: Scores) -> Scores:
    """Normalise so that 0 becomes 100 and the largest score 0; all 100 where all are 0."""
    return MAX_SCORE - to_largest(raw)
