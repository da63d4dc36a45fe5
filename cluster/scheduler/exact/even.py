"""An amount divided evenly over NUMA nodes."""

from __future__ import annotations

from collections.abc import Mapping


def split_evenly(amount: int, available: Mapping[int, int], *, step: int = 1) -> dict[int, int]:
    """Return NUMA id -> share; the shares are as equal as the available amounts allow.

    The nodes are visited by available amount, the smallest first, equal ones by id. The i-th of k
    takes the smaller of its available amount and remaining / (k - i). 10 over {0: 3, 1: 20} is
    {0: 3, 1: 7}.

    step: the shares are multiples of it, as the available amounts have to be, except that the last
    node may get the rest. They add up to less than `amount` only where what is available does.
    """
    order = sorted(available, key=lambda node: (available[node], node))
    shares: dict[int, int] = {}
    left = amount
    for position, node in enumerate(order):
        nodes_left = len(order) - position
        fair = left if nodes_left == 1 else left // step // nodes_left * step
        shares[node] = min(available[node], fair)
        left -= shares[node]
    return shares
