"""From what the kernel counts to what is stored: fields of its files, and rates of its counters."""

from __future__ import annotations

from typing import Final

from koordlet.measurement.series import Series

LEAST_S: Final = 0.2
"""The least time between two readings of a rate. The kernel books CPU time at its ticks, up to
10 ms apart: a rate over 0.2 s is wrong by 5 % of a core at most, over 0.02 s by 50 %."""
OUTDATED_INTERVALS: Final = 20
"""After so many intervals without a reading a counter starts again; upstream's rule."""
_OVER: Final = 1.1
"""Readings of different CPUs are not of one moment: a rate up to a tenth above what the machine
has is taken as all of it. What is above that is a defect and no sample."""


def number_after(content: bytes, key: bytes) -> int:
    """Return the number after the first `key`. ValueError if the key or the number is missing.

    key: with the line feed before the field's name and the blank or colon after it, such as
    b"\\nnr_periods ". A key at the very start of the file is found too.
    """
    at = content.find(key)
    if at < 0:
        if not content.startswith(key[1:]):
            raise ValueError(f"no field {key.strip().decode('ascii', 'replace')}")
        at = -1
    start = at + len(key)
    end = content.find(b"\n", start)
    text = content[start:end] if end >= 0 else content[start:]
    if text[-3:] == b" kB":
        return int(text[:-3]) * 1024
    return int(text)


class Rate:
    """The rate of one counter of the kernel.

    A counter that goes back, a first reading, and one after a long gap give no rate: what lies
    between two readings is known only of one and the same running counter.
    """

    __slots__ = ("_at", "_outdated_s", "_value")

    def __init__(self, interval_s: float) -> None:
        self._value = 0
        self._at = -float("inf")
        self._outdated_s = interval_s * OUTDATED_INTERVALS

    def forget(self) -> None:
        """Begin again: the next reading belongs to another counter."""
        self._at = -float("inf")

    def per_second(self, value: int, at: float) -> float | None:
        """Return the counter's increase per second since the last reading; None if unknown.

        at: seconds of the monotonic clock when the value was read.
        """
        elapsed = at - self._at
        if 0 <= elapsed < LEAST_S and value >= self._value:
            return None  # the former reading stands
        increase = value - self._value
        self._value, self._at = value, at
        if increase < 0 or not LEAST_S <= elapsed <= self._outdated_s:
            return None
        return increase / elapsed


def within(rate: float | None, most: float) -> float | None:
    """Return a rate that the machine can have: capped at `most`; None far above it."""
    if rate is None or rate > most * _OVER:
        return None
    return min(rate, most)


class RateSeries:
    """A series whose samples are the rate of one counter."""

    __slots__ = ("_most", "_rate", "_series", "_unit")

    def __init__(
        self, series: Series, interval_s: float, *, most: float, unit: float = 1.0
    ) -> None:
        """unit: what one count is, in the series' unit. most: the highest rate, in that unit, that
        the hardware can have; a rate far above it is a defect of the counter and no sample."""
        self._series = series
        self._rate = Rate(interval_s)
        self._most = most
        self._unit = unit

    def forget(self) -> None:
        """Begin again: the next reading belongs to another counter."""
        self._rate.forget()

    def add(self, samples: dict[Series, float], count: int, at: float) -> None:
        """Add the rate since the last reading to `samples`, if it is known.

        at: seconds of the monotonic clock when the counter was read.
        """
        rate = self._rate.per_second(count, at)
        sample = None if rate is None else within(rate * self._unit, self._most)
        if sample is not None:
            samples[self._series] = sample
