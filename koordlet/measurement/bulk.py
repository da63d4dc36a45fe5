"""Reads of one metric of all objects at once, for readers that look at every pod of a node.

Prediction and reports need a figure for each of some hundred objects. One call for all of them
costs a pass over the samples of that metric instead of a hundred searches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from koordlet.measurement.series import Measurements, Metric

Key = tuple[str, str]
"""An object of a metric: `Series.of` and `Series.detail`."""


class Statistics(Protocol):
    """Statistics of one metric for all objects with a sample in the window."""

    @property
    def keys(self) -> tuple[Key, ...]: ...
    @property
    def p90(self) -> NDArray[np.float64]: ...
    @property
    def largest(self) -> NDArray[np.float64]: ...


class BulkMeasurements(Measurements, Protocol):
    """Measurements that can also be read metric by metric, as those of the store can."""

    def averages(self, metric: Metric, *, within_s: float) -> Mapping[Key, float]:
        """Return the mean of each object that has samples that are at most `within_s` old."""
        ...

    def statistics(self, metric: Metric, *, within_s: float) -> Statistics:
        """Return the statistics of each such object, as `Measurements.aggregate` defines them."""
        ...
