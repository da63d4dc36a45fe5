"""How the amount of one resource that a parent has is divided between its children.

Each child has at least the smaller of what it requests and its minimum; what is left goes to those
that request more, by weight. Source of the rules: docs/facts/scheduler.md, "Runtime of quotas".
`divide` works with Python's integers, because products exceed 64 bits. `Columns` gives the same
result by NumPy, where weights and totals are within bounds; with 500 children it takes a tenth of
the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.amounts import Vector

_LARGEST_TOTAL: Final = 2**52
"""Of what is divided by NumPy. A quotient in floating point then is wrong by 3 at most."""
_LARGEST_SUM: Final = 2**60
"""Of weights and of minimums in NumPy. Eight times this fits 64 bits, so a remainder is known from
its lowest 64 bits where the quotient is wrong by 3 at most."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What one child asks of its parent, of one resource.

    request: at most the child's maximum. least: its minimum, not scaled. guaranteed: what it has in
    any case, scaled or not. lends: what it does not request goes to others.
    """

    name: str
    request: int
    least: int
    weight: int
    lends: bool = True
    guaranteed: int = 0


def scaled_minimums(total: int, minimums: Sequence[int]) -> list[int]:
    """Return the minimums, reduced in proportion and rounded down where `total` is less."""
    summed = sum(minimums)
    return [scaled_minimum(total, least, summed) for least in minimums]


def scaled_minimum(total: int, least: int, summed: int) -> int:
    """Return one of the minimums whose sum is `summed`, as `scaled_minimums` has it."""
    # Pods of the default quota may use more than there is.
    total = max(total, 0)
    return least if summed <= total else total * least // summed


def divide(total: int, claims: Sequence[Claim], *, scale: bool) -> list[int]:
    """Return what each claim gets of `total`, in the order of `claims`.

    scale: minimums whose sum is above `total` are reduced. Without it they count in full, and the
    sum of the results may be above `total`.
    """
    minimums = [claim.least for claim in claims]
    if scale:
        minimums = scaled_minimums(total, minimums)
    shares = []
    taking: list[int] = []
    for at, (claim, least) in enumerate(zip(claims, minimums, strict=True)):
        base = max(least, claim.guaranteed)
        if claim.request > base:
            shares.append(base)
            if claim.weight > 0:
                taking.append(at)
        else:
            shares.append(claim.request if claim.lends else base)
    left = total - sum(shares)
    while left > 0 and taking:
        parts = _proportional(left, [claims[at] for at in taking])
        left = 0
        still = []
        for at, part in zip(taking, parts, strict=True):
            share = shares[at] + part
            request = claims[at].request
            if share < request:
                still.append(at)
            else:
                left += share - request
                share = request
            shares[at] = share
        taking = still
    return shares


def _proportional(amount: int, claims: Sequence[Claim]) -> list[int]:
    """Return parts by weight that add up to `amount`: the largest remainders get the last units,
    of equal ones those that come first by name.
    """
    weights = sum(claim.weight for claim in claims)
    parts = []
    remainders = []
    for claim in claims:
        part, remainder = divmod(claim.weight * amount, weights)
        parts.append(part)
        remainders.append(remainder)
    missing = amount - sum(parts)
    if missing:
        order = sorted(range(len(claims)), key=lambda at: (-remainders[at], claims[at].name))
        for at in order[:missing]:
            parts[at] += 1
    return parts


@dataclass(slots=True)
class Columns:
    """The claims of all children of a parent, by name ascending; requests change in place."""

    names: list[str]
    request: Vector
    least: Vector
    weight: Vector
    lends: NDArray[np.bool_]
    at: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(claims: Sequence[Claim]) -> Columns | None:
        """Return the columns of claims in the order of their names; None if NumPy's integers do not
        suffice, or something is guaranteed."""
        bounded = all(
            max(claim.request, claim.least) < _LARGEST_SUM and not claim.guaranteed
            for claim in claims
        )
        sums = (sum(claim.weight for claim in claims), sum(claim.least for claim in claims))
        if not bounded or max(sums) >= _LARGEST_SUM:
            return None

        def column(values: list[int]) -> Vector:
            return np.array(values, dtype=np.int64)

        names = [claim.name for claim in claims]
        return Columns(
            names,
            column([claim.request for claim in claims]),
            column([claim.least for claim in claims]),
            column([claim.weight for claim in claims]),
            np.array([claim.lends for claim in claims], dtype=np.bool_),
            {name: at for at, name in enumerate(names)},
        )

    def set_request(self, name: str, request: int) -> bool:
        """Change a request; return whether it is within bounds."""
        if request >= _LARGEST_SUM:
            return False
        self.request[self.at[name]] = request
        return True

    def divide(self, total: int, *, scale: bool) -> Vector | None:
        """Return what `divide` returns; None for a total that is out of bounds."""
        if total >= _LARGEST_TOTAL:
            return None
        base = self.least
        summed = int(base.sum())
        if scale and summed > max(total, 0):
            base, _ = _times(base, max(total, 0), summed)
        wants = self.request > base
        shares = np.where(wants | ~self.lends, base, self.request)
        taking = np.flatnonzero(wants & (self.weight > 0))
        left = total - int(shares.sum())
        while left > 0 and len(taking):
            weight = self.weight[taking]
            parts, remainders = _times(weight, left, int(weight.sum()))
            missing = left - int(parts.sum())
            if missing:
                parts[np.argsort(-remainders, kind="stable")[:missing]] += 1
            grown = shares[taking] + parts
            over = grown - self.request[taking]
            shares[taking] = np.minimum(grown, self.request[taking])
            left = int(over[over > 0].sum())
            taking = taking[over < 0]
        return shares


def _times(values: Vector, factor: int, divisor: int) -> tuple[Vector, Vector]:
    """Return value * factor // divisor and the remainders, exactly, for values <= divisor.

    The product does not fit 64 bits. The quotient is near enough in floating point, and the
    remainder of a near quotient is right in the lowest 64 bits.
    """
    quotients = (values.astype(np.float64) * (factor / divisor)).astype(np.int64)
    wrapped = values.view(np.uint64) * np.uint64(factor)
    wrapped -= quotients.view(np.uint64) * np.uint64(divisor)
    remainders = wrapped.view(np.int64)
    off = remainders // divisor
    return quotients + off, remainders - off * divisor
