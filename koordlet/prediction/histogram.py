"""Decaying histograms with exponential buckets: many of them as the rows of one matrix.

Bucket 0 is [0, f), and each bucket is r times as wide as the one before it: bucket n begins at
f (r^n - 1) / (r - 1). A percentile is the end of the bucket that it falls into: too high by less
than r - 1 (or f in bucket 0), and never too low. A sample that was added one half-life earlier
weighs half.

All histograms of a matrix share one reference time. Instead of decaying every weight, a new sample
weighs 2^((t - reference) / half-life); what counts is only the ratio of weights. When that exponent
exceeds 100, the reference moves forward and all weights are scaled down once.
Bounds, ratio and half-lives are upstream's: docs/facts/koordlet.md, "Prediction".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

EPSILON: Final = 0.0001
"""A bucket that weighs less counts as empty; upstream's."""
_FURTHEST: Final = 100.0
"""Half-lives between the reference and a new sample; upstream's. A double holds weights up to
2^1023, so ten times the value would overflow."""
_ROWS_AT_FIRST: Final = 64
"""Chosen: about half of a full node; the matrix doubles when it is full."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The buckets of one kind of histogram. first, largest: in the unit of the samples."""

    first: float
    ratio: float
    largest: float
    half_life_s: float

    @property
    def count(self) -> int:
        steps = math.log(self.largest * (self.ratio - 1) / self.first + 1) / math.log(self.ratio)
        return math.ceil(steps) + 1

    def starts(self) -> Floats:
        """Return where each bucket begins."""
        powers = self.ratio ** np.arange(self.count, dtype=np.float64)
        return self.first * (powers - 1) / (self.ratio - 1)

    def indices(self, values: Floats) -> Rows:
        """Return the bucket of each value; a negative value counts as 0, a huge one as largest."""
        found: Rows = np.searchsorted(self.starts(), values, side="right") - 1
        return np.maximum(found, 0)


class Histograms:
    """The histograms of many objects. A row is one of them; its owner keeps the row's number."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.reference_s = 0.0
        """The time at which a sample weighs 1, in seconds since the epoch; 0 before any sample."""
        self._starts = buckets.starts()
        # The last bucket has no end: a percentile in it is its start.
        self._ends = np.append(self._starts[1:], self._starts[-1])
        self._weights: Floats = np.zeros((_ROWS_AT_FIRST, buckets.count))

    def reserve(self, rows: int) -> None:
        """Make room for that many rows."""
        have = len(self._weights)
        if rows > have:
            more = np.zeros((max(rows, 2 * have) - have, self.buckets.count))
            self._weights = np.concatenate((self._weights, more))

    def clear(self, row: int) -> None:
        """Empty a row, so that another object can have it."""
        self._weights[row] = 0.0

    def add(self, rows: Rows, values: Floats, now_s: float) -> None:
        """Add one sample to each row. rows: without repetition; values: finite, one for each."""
        self._move_reference(now_s)
        weight = 2.0 ** ((now_s - self.reference_s) / self.buckets.half_life_s)
        self._weights[rows, self.buckets.indices(values)] += weight

    def percentiles(self, rows: Rows, fraction: float) -> Floats:
        """Return the value that `fraction` of each row's weight does not exceed; 0 where empty."""
        weights = self._weights[rows]
        weights[weights < EPSILON] = 0.0
        sums = np.cumsum(weights, axis=1)
        totals = sums[:, -1:]
        found = np.argmax(sums >= fraction * totals, axis=1)
        values: Floats = np.where(totals[:, 0] > 0, self._ends[found], 0.0)
        return values

    def weights(self, row: int) -> Floats:
        """Return the weights of one row's buckets, relative to the reference time."""
        found: Floats = self._weights[row].copy()
        return found

    def put(self, row: int, weights: Floats, reference_s: float) -> None:
        """Replace a row by weights that are relative to another reference time."""
        self._move_reference(reference_s)
        exponent = (reference_s - self.reference_s) / self.buckets.half_life_s
        self._weights[row] = weights * 2.0**exponent

    def _move_reference(self, now_s: float) -> None:
        half_life = self.buckets.half_life_s
        behind = (now_s - self.reference_s) / half_life
        if self.reference_s and behind <= _FURTHEST:
            return
        # A multiple of the half-life: the scale is then a power of two, which rounds nothing.
        moved = math.floor(now_s / half_life) * half_life
        if self.reference_s:
            self._weights *= 2.0 ** -min((moved - self.reference_s) / half_life, 1000.0)
            self._weights[self._weights < EPSILON] = 0.0
        self.reference_s = moved
