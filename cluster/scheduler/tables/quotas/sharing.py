"""How the amount of one resource that a parent has is divided between its children.

Each child has at least the smaller of what it requests and its minimum; what is left goes to those
that request more, by weight. Source of the rules: docs/facts/scheduler.md, "Runtime of quotas".
Integers throughout; products exceed 64 bits, so they are Python's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    # Pods of the default quota may use more than there is.
    total = max(total, 0)
    summed = sum(minimums)
    if summed <= total:
        return list(minimums)
    return [total * least // summed for least in minimums]


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
