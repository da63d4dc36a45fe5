"""Ratios of a node's CPUs, counted in hundredths so that arithmetic is exact.

The annotations spell them as decimals with two digits. Source: manager.md sections 10 and 11.
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal


def hundredths(ratio: float) -> int:
    """Return a ratio in hundredths, rounded as a text with two decimals is."""
    return int(Decimal(ratio).quantize(Decimal("0.01"), ROUND_HALF_EVEN) * 100)


def ratio_text(percent: int) -> str:
    """Return hundredths as the annotation spells them: 120 is "1.20"."""
    return f"{percent // 100}.{percent % 100:02d}"
