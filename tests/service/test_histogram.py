"""Buckets of durations."""

from __future__ import annotations

from service.histogram import Histogram


def test_each_duration_is_in_its_bucket_and_in_all_above() -> None:
    histogram = Histogram((0.001, 0.5, 10.0))
    for duration in (0.001, 0.002, 11.0):
        histogram.observe(duration)
    assert histogram.cumulative() == [("0.001", 1), ("0.5", 2), ("10", 2), ("+Inf", 3)]
    assert (histogram.count, histogram.sum, histogram.largest) == (3, 11.003, 11.0)
