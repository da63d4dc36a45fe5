"""How long things took, counted into buckets.

Counting is plain additions, for hot paths; Prometheus' buckets are made for a scrape.
"""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Durations, in the unit of the bounds. counts[i] are those up to bounds[i]; the last one holds
    the rest."""

    __slots__ = ("bounds", "count", "counts", "largest", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0
        self.largest = 0.0

    def observe(self, duration: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds, duration)] += 1
        self.count += 1
        self.sum += duration
        if duration > self.largest:
            self.largest = duration

    def add(self, other: Histogram) -> None:
        """Count what another histogram with the same bounds has counted."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.count += other.count
        self.sum += other.sum
        self.largest = max(self.largest, other.largest)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return cumulative buckets as the exposition wants them."""
        total = 0
        made: list[tuple[str, float]] = []
        for bound, count in zip(self.bounds, self.counts, strict=False):
            total += count
            made.append((f"{bound:g}", total))
        made.append(("+Inf", self.count))
        return made
