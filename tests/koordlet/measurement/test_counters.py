"""Fields of the kernel's files, and rates of its counters, at the edges of their rules."""

from __future__ import annotations

import re

import pytest

from koordlet.measurement.counters import Rate, RateSeries, number_after, within
from koordlet.measurement.series import Metric, Series

SERIES = Series(Metric.NODE_NETWORK_SEND, "eth0")


@pytest.mark.parametrize(
    ("content", "key", "number"),
    [
        (b"a 1\nb 2\n", b"\na ", 1),
        (b"a 1\nb 2\n", b"\nb ", 2),
        (b"a 1\nb 2", b"\nb ", 2),
        (b"ab 1\nb 2\n", b"\nb ", 2),
        (b"MemTotal:    16 kB\n", b"\nMemTotal:", 16_384),
        (b"MemTotal:    16 kB", b"\nMemTotal:", 16_384),
        (b"a -1\n", b"\na ", -1),
        (b"b 1\nb 2\n", b"\nb ", 2),
    ],
)
def test_a_field_is_found_by_its_line(content: bytes, key: bytes, number: int) -> None:
    assert number_after(content, key) == number


@pytest.mark.parametrize("content", [b"", b"ab 1\n", b"x a 1\n"])
def test_a_missing_field_is_named(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^no field a$"):
        number_after(content, b"\na ")


@pytest.mark.parametrize("content", [b"a \n", b"a x\n", b"a 1 MB\n", b"a 1 2\n"])
def test_a_field_without_a_number_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=re.escape("invalid literal")):
        number_after(content, b"\na ")


# Each reading: (value, seconds since the last one, the rate that it gives). The interval is 1 s, so
# that a counter is outdated after 20 s.
READINGS: dict[str, list[tuple[int, float, float | None]]] = {
    "the first one gives none": [(100, 1.0, None), (150, 1.0, 50.0), (150, 1.0, 0.0)],
    "two that are too close": [(100, 1.0, None), (110, 0.125, None), (150, 0.875, 50.0)],
    "two at one time": [(100, 1.0, None), (110, 0.0, None), (150, 1.0, 50.0)],
    "the least distance": [(0, 0.0, None), (10, 0.2, 50.0)],
    "one that went back": [(100, 1.0, None), (90, 1.0, None), (100, 1.0, 10.0)],
    "one that went back at once": [(100, 1.0, None), (90, 0.125, None), (190, 1.0, 100.0)],
    "the longest distance": [(0, 0.0, None), (100, 20.0, 5.0)],
    "one after a gap": [(0, 0.0, None), (100, 20.5, None), (150, 1.0, 50.0)],
    "a clock that went back": [(0, 0.0, None), (100, -5.0, None), (150, 1.0, 50.0)],
    "a clock that went back a little": [(0, 0.0, None), (100, -0.5, None), (150, 0.5, 100.0)],
}


@pytest.mark.parametrize("name", READINGS)
def test_readings_give_rates(name: str) -> None:
    rate = Rate(1.0)
    at = 0.0
    for value, step_s, expected in READINGS[name]:
        at += step_s
        assert rate.per_second(value, at) == expected


def test_a_counter_that_is_forgotten_begins_again() -> None:
    rate = Rate(1.0)
    assert rate.per_second(100, 1.0) is None
    rate.forget()
    assert rate.per_second(500, 2.0) is None
    assert rate.per_second(510, 3.0) == 10.0


@pytest.mark.parametrize(
    ("rate", "result"),
    [(None, None), (0.0, 0.0), (9.5, 9.5), (10.0, 10.0), (11.0, 10.0), (11.1, None)],
)
def test_a_rate_is_at_most_what_the_machine_has(rate: float | None, result: float | None) -> None:
    assert within(rate, 10.0) == result


def test_a_series_has_its_unit_and_its_most() -> None:
    series = RateSeries(SERIES, 1.0, most=1.0, unit=1e-3)
    samples: dict[Series, float] = {}
    for count, at in ((0, 0.0), (500, 1.0)):
        series.add(samples, count, at)
    assert samples == {SERIES: 0.5}
    series.add(samples, 1550, 2.0)
    assert samples == {SERIES: 1.0}
    samples.clear()
    series.add(samples, 3000, 3.0)
    assert samples == {}, "far above the most is a defect"
    series.add(samples, 3000, 4.0)
    assert samples == {SERIES: 0.0}
    samples.clear()
    series.forget()
    series.add(samples, 3100, 5.0)
    assert samples == {}
    series.add(samples, 3200, 6.0)
    assert samples == {SERIES: pytest.approx(0.1)}


def test_a_rate_is_in_counts_unless_said_otherwise() -> None:
    series = RateSeries(SERIES, 1.0, most=100.0)
    samples: dict[Series, float] = {}
    for count, at in ((0, 0.0), (7, 1.0)):
        series.add(samples, count, at)
    assert samples == {SERIES: 7.0}
