"""Measurements that a test writes down: a list of samples for each series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from koordlet.measurement.bulk import Key
from koordlet.measurement.series import Aggregate, Metric, Series


def rank(count: int, fraction: float) -> int:
    return max(int(np.float32(count) * np.float32(fraction)) - 1, 0)


@dataclass(frozen=True)
class Statistics:
    keys: tuple[Key, ...]
    p90: NDArray[np.float64]
    largest: NDArray[np.float64]


@dataclass
class Measured:
    """samples: (seconds, value), oldest first."""

    now: float = 0.0
    samples: dict[Series, list[tuple[float, float]]] = field(default_factory=dict)

    def constant(
        self, series: Series, value: float, *, over_s: float = 300.0, step_s: float = 1.0
    ) -> None:
        """Have one sample a step up to now."""
        count = int(over_s / step_s)
        self.samples[series] = [(self.now - step * step_s, value) for step in range(count, -1, -1)]

    def values(self, series: Series, values: Sequence[float]) -> None:
        """Have these samples, one a second, the last one now."""
        last = len(values) - 1
        self.samples[series] = [(self.now - last + i, v) for i, v in enumerate(values)]

    def window(self, series: Series, within_s: float) -> list[tuple[float, float]]:
        return [each for each in self.samples.get(series, ()) if each[0] >= self.now - within_s]

    def latest(self, series: Series, *, within_s: float) -> float | None:
        window = self.window(series, within_s)
        return window[-1][1] if window else None

    def average(self, series: Series, *, within_s: float) -> float | None:
        window = self.window(series, within_s)
        return sum(value for _, value in window) / len(window) if window else None

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        window = self.window(series, within_s)
        if not window:
            return None
        ordered = sorted(value for _, value in window)
        p50, p90, p95, p99 = (ordered[rank(len(ordered), p)] for p in (0.5, 0.9, 0.95, 0.99))
        return Aggregate(
            samples=len(window),
            span_s=window[-1][0] - window[0][0],
            average=sum(ordered) / len(ordered),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            largest=ordered[-1],
            latest=window[-1][1],
        )

    def _of(self, metric: Metric, within_s: float) -> list[Series]:
        return [
            series
            for series in self.samples
            if series.metric is metric and self.window(series, within_s)
        ]

    def averages(self, metric: Metric, *, within_s: float) -> Mapping[Key, float]:
        return {
            (series.of, series.detail): average
            for series in self._of(metric, within_s)
            if (average := self.average(series, within_s=within_s)) is not None
        }

    def statistics(self, metric: Metric, *, within_s: float) -> Statistics:
        found = self._of(metric, within_s)
        aggregates = [
            aggregate
            for series in found
            if (aggregate := self.aggregate(series, within_s=within_s)) is not None
        ]
        return Statistics(
            tuple((each.of, each.detail) for each in found),
            np.array([each.p90 for each in aggregates]),
            np.array([each.largest for each in aggregates]),
        )
