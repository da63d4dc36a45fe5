"""Ratios of a node's resources, in hundredths so that arithmetic is exact.

Annotations spell a ratio as a decimal with two digits: docs/facts/manager.md, "Normalisation and
amplification".
"""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal


def hundredths(ratio: float) -> int:
    """Return a ratio in hundredths, rounded half to even, as upstream formats two decimals."""
    return int(Decimal(ratio).quantize(Decimal("0.01"), ROUND_HALF_EVEN) * 100)


def ratio_text(percent: int) -> str:
    """Return hundredths as the annotation spells them: 120 is "1.20"."""
    return f"{percent // 100}.{percent % 100:02d}"
