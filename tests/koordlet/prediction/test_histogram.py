"""Decaying histograms: buckets, decay and percentiles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.prediction.histogram import Histograms
from koordlet.prediction.models import CPU_BUCKETS, MEMORY_BUCKETS

HOUR = 3600.0
START = 1_700_000_000.0


def filled(*values: float, step_s: float = 60.0) -> Histograms:
    """Return CPU histograms whose row 0 has these samples."""
    made = Histograms(CPU_BUCKETS)
    for number, value in enumerate(values):
        made.add(np.array([0]), np.array([value]), START + number * step_s)
    return made


def percentile(histograms: Histograms, fraction: float, row: int = 0) -> float:
    return float(histograms.percentiles(np.array([row]), fraction)[0])


def test_the_number_of_buckets_is_upstreams() -> None:
    assert (CPU_BUCKETS.count, MEMORY_BUCKETS.count) == (158, 205)


@pytest.mark.parametrize(
    ("cores", "bucket"),
    [(0.0, 0), (0.0249, 0), (0.025, 1), (2.0, 32), (1e9, 157), (-1.0, 0)],
)
def test_a_value_lies_in_the_bucket_that_upstream_counts_it_in(cores: float, bucket: int) -> None:
    assert CPU_BUCKETS.indices(np.array([cores])).tolist() == [bucket]


def test_a_percentile_is_the_end_of_its_bucket() -> None:
    assert math.floor(percentile(filled(2.0), 0.95) * 1000) == 2001
    memory = Histograms(MEMORY_BUCKETS)
    memory.add(np.array([0]), np.array([4.0 * 2**30]), START)
    assert int(percentile(memory, 0.98)) == 4384414627


def test_only_zeros_give_the_width_of_one_bucket_and_nothing_gives_zero() -> None:
    assert percentile(filled(0.0, 0.0), 0.95) == 0.025
    assert percentile(Histograms(CPU_BUCKETS), 0.95) == 0.0


def test_the_last_bucket_counts_with_its_start() -> None:
    last = float(CPU_BUCKETS.starts()[-1])
    assert percentile(filled(1e9), 0.95) == last


def test_a_rare_peak_shows_in_a_high_percentile_only() -> None:
    histograms = filled(*[1.0] * 97, *[8.0] * 3, step_s=0.0)
    assert percentile(histograms, 0.95) < 1.06
    assert percentile(histograms, 0.98) > 8.0


def test_a_sample_weighs_half_after_one_half_life() -> None:
    histograms = Histograms(CPU_BUCKETS)
    row = np.array([0])
    histograms.add(row, np.array([1.0]), START)
    histograms.add(row, np.array([1.0]), START)
    histograms.add(row, np.array([8.0]), START + 12 * HOUR)
    # Two samples of half weight against one: both halves weigh the same.
    assert percentile(histograms, 0.49) < 1.06
    assert percentile(histograms, 0.51) > 8.0


def test_the_past_fades_out_when_the_reference_moves() -> None:
    histograms = filled(64.0)
    at = START + 101 * 12 * HOUR
    before = histograms.reference_s
    histograms.add(np.array([0]), np.array([1.0]), at)
    assert histograms.reference_s > before
    assert percentile(histograms, 1.0) < 1.06
    # A sample of the present survives the move with its weight.
    assert float(histograms.weights(0).sum()) == pytest.approx(
        2.0 ** ((at - histograms.reference_s) / (12 * HOUR))
    )


def test_a_moved_reference_keeps_the_percentiles_of_recent_samples() -> None:
    at = START + 100.4 * 12 * HOUR
    histograms = filled(1.0)
    for value in (2.0, 4.0, 4.0):
        histograms.add(np.array([0]), np.array([value]), at)
        at += 0.5 * 12 * HOUR
    direct = Histograms(CPU_BUCKETS)
    at -= 1.5 * 12 * HOUR
    for value in (2.0, 4.0, 4.0):
        direct.add(np.array([0]), np.array([value]), at)
        at += 0.5 * 12 * HOUR
    for fraction in (0.1, 0.3, 0.5, 0.95):
        assert percentile(histograms, fraction) == percentile(direct, fraction)


def test_rows_do_not_influence_each_other() -> None:
    histograms = Histograms(CPU_BUCKETS)
    histograms.reserve(500)
    rows = np.arange(500)
    values = np.linspace(0.0, 50.0, 500)
    histograms.add(rows, values, START)
    histograms.add(rows, values, START + 60)
    single = [percentile(filled(float(value), float(value)), 0.95) for value in values]
    assert histograms.percentiles(rows, 0.95).tolist() == single
    histograms.clear(7)
    assert percentile(histograms, 0.95, 7) == 0.0
    assert percentile(histograms, 0.95, 8) == single[8]


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
    st.floats(0, 40 * 12 * HOUR),  # further, a double forgets the older sample
)
def test_a_percentile_is_never_below_the_samples_it_covers_nor_far_above(
    values: list[float], fraction: float, later_s: float
) -> None:
    histograms = Histograms(CPU_BUCKETS)
    histograms.add(np.array([0]), np.array([values[0]]), START)
    for value in values[1:]:
        histograms.add(np.array([0]), np.array([value]), START + later_s)
    found = percentile(histograms, fraction)
    assert math.isfinite(found)
    assert min(values) * 0.999999 <= found <= max(values) * 1.05 + 0.0251
    assert percentile(histograms, 1.0) >= max(values) * 0.999999


def test_what_was_seen_before_the_reference_moved_keeps_its_weight() -> None:
    """A sample and three of a half-life later, 101 half-lives after the first of all: 1 to 6."""
    half_life = CPU_BUCKETS.half_life_s
    histograms, row = Histograms(CPU_BUCKETS), np.array([0])
    histograms.add(row, np.array([1.0]), START)
    histograms.add(row, np.array([4.0]), START + 99 * half_life)
    before = histograms.reference_s
    for _ in range(3):
        histograms.add(row, np.array([8.0]), START + 102 * half_life)
    assert histograms.reference_s > before
    # 4 cores weigh an eighth of each of the three: a 25th of the whole.
    assert percentile(histograms, 0.039) == pytest.approx(4.0, rel=0.06)
    assert percentile(histograms, 0.041) == pytest.approx(8.0, rel=0.06)
    # 1 core has 2^-102 of a sample's weight and counts no more.
    assert percentile(histograms, 0.0) != pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize("rows", [64, 65, 128, 129, 1000])
def test_room_for_more_objects_keeps_what_the_first_have(rows: int) -> None:
    histograms = filled(2.0)
    histograms.reserve(rows)
    last = np.array([rows - 1])
    histograms.add(last, np.array([8.0]), START)
    assert percentile(histograms, 0.95) == percentile(filled(2.0), 0.95)
    assert percentile(histograms, 0.95, row=rows - 1) == percentile(filled(8.0), 0.95)
