"""The runtime of quotas in the most obvious way: the whole tree each time, of one resource."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Plain:
    """A quota of one resource. wanted: the sum of the requests of its own pods."""

    name: str
    parent: str
    least: int
    most: int
    weight: int
    lends: bool
    wanted: int = 0


def limited_requests(quotas: Mapping[str, Plain]) -> dict[str, int]:
    """Return each quota's request as its parent sees it."""

    def request(name: str) -> int:
        quota = quotas[name]
        below = [request(other.name) for other in quotas.values() if other.parent == name]
        asked = quota.wanted + sum(below)
        if not quota.lends:
            asked = max(asked, quota.least)
        return min(asked, quota.most)

    return {name: request(name) for name in quotas}


def runtimes(quotas: Mapping[str, Plain], total: int, *, scale: bool = True) -> dict[str, int]:
    """Return the runtime of each quota. Parents have no pods of their own."""
    requests = limited_requests(quotas)
    result: dict[str, int] = {}

    def below(parent: str, has: int) -> None:
        children = sorted(
            (quota for quota in quotas.values() if quota.parent == parent),
            key=lambda quota: quota.name,
        )
        minimums = {quota.name: quota.least for quota in children}
        if scale and sum(minimums.values()) > max(has, 0):
            whole = sum(minimums.values())
            minimums = {
                name: int(Fraction(max(has, 0)) * least / whole) for name, least in minimums.items()
            }
        hungry = set()
        for quota in children:
            least, request = minimums[quota.name], requests[quota.name]
            if request > least:
                result[quota.name] = least
                if quota.weight:
                    hungry.add(quota)
            else:
                result[quota.name] = request if quota.lends else least
        left = has - sum(result[quota.name] for quota in children)
        while left > 0 and hungry:
            exact = {
                quota: Fraction(quota.weight * left, sum(q.weight for q in hungry))
                for quota in hungry
            }
            whole_units = {quota: int(part) for quota, part in exact.items()}
            missing = left - sum(whole_units.values())
            by_fraction = sorted(
                hungry, key=lambda quota: (whole_units[quota] - exact[quota], quota.name)
            )
            for quota in by_fraction[:missing]:
                whole_units[quota] += 1
            left = 0
            for quota in sorted(hungry, key=lambda quota: quota.name):
                result[quota.name] += whole_units[quota]
                over = result[quota.name] - requests[quota.name]
                if over >= 0:
                    left += over
                    result[quota.name] -= over
                    hungry.discard(quota)
        for quota in children:
            below(quota.name, result[quota.name])

    below("", total)
    return result
