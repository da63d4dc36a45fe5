"""CPU shares (cgroup v1) and CPU weights (cgroup v2): two formulas are in use on one node.

Kubelet and older runtimes convert linearly; runc from 1.3.2 and crun from 1.23 convert with a
quadratic exponent that keeps 1024 shares at weight 100. Weights count among siblings only, so a
writer has to use the formula that its siblings were made with: `detect` finds it from evidence.
Formulas and examples: docs/facts/kernel.md, "Shares, weights and quotas".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from math import ceil, log2
from typing import Final

# The kernel's ranges of cpu.shares and cpu.weight.
MIN_SHARES: Final = 2
MAX_SHARES: Final = 262144
MIN_WEIGHT: Final = 1
MAX_WEIGHT: Final = 10000


class Formula(StrEnum):
    """How shares become a weight."""

    LINEAR = "linear"
    QUADRATIC = "quadratic"


# 4096 pairs: a node has far fewer distinct requests. A miss costs about 1 us.
@lru_cache(maxsize=4096)
def weight_of_shares(shares: int, formula: Formula) -> int:
    """Return the weight of `shares`, which is clamped to 2..262144 first."""
    shares = min(max(shares, MIN_SHARES), MAX_SHARES)
    if formula is Formula.LINEAR:
        return MIN_WEIGHT + (shares - MIN_SHARES) * (MAX_WEIGHT - MIN_WEIGHT) // (
            MAX_SHARES - MIN_SHARES
        )
    if shares == MIN_SHARES:
        return MIN_WEIGHT
    if shares == MAX_SHARES:
        return MAX_WEIGHT
    exponent = log2(shares)
    weight = ceil(10 ** ((exponent * exponent + 125 * exponent) / 612 - 7 / 34))
    return min(max(weight, MIN_WEIGHT), MAX_WEIGHT)


def detect(samples: Iterable[tuple[int, int]]) -> Formula | None:
    """Return the formula that explains most of `samples`: (shares requested, weight found).

    Samples that fit both formulas or neither do not count. None without a majority.
    """
    votes = {Formula.LINEAR: 0, Formula.QUADRATIC: 0}
    for shares, weight in samples:
        fits = [formula for formula in Formula if weight_of_shares(shares, formula) == weight]
        if len(fits) == 1:
            votes[fits[0]] += 1
    linear, quadratic = votes[Formula.LINEAR], votes[Formula.QUADRATIC]
    if linear == quadratic:
        return None
    return Formula.LINEAR if linear > quadratic else Formula.QUADRATIC
