"""Quantiles of measured times."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(seconds: Sequence[float], part: float) -> float:
    """Return the value that `part` (0 to 1) of the values do not exceed; 0.0 of no values."""
    ordered = sorted(seconds)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0
