"""Which pods a quota has to give back because it uses more than its runtime for too long.

Runtime falls below the use when another quota wants back what it had lent, when nodes go, or after
an edit. The least important pods go first, and of those that were chosen the most important ones
stay that are not needed after all. Pods that are not preemptible stay: they fit into the minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apis.keys import LABEL_PREEMPTIBLE, SYSTEM_QUOTA
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.quotas.tree import QuotaNode


@dataclass(frozen=True, slots=True)
class Revoked:
    """Pods to evict for one quota. used, runtime: of the resources that it uses too much of."""

    quota: str
    pods: tuple[Booking, ...]
    used: Mapping[str, int]
    runtime: Mapping[str, int]


class OveruseMonitor:
    """Watches all quotas but the system quota."""

    def __init__(self, table: QuotaTable, *, delay_s: float) -> None:
        """delay_s: how long a quota may use more than its runtime."""
        self._table = table
        self._delay_s = delay_s
        self._since: dict[str, float] = {}

    def look(self, now: float) -> tuple[Revoked, ...]:
        """Return what has to be evicted. now: seconds on a clock that never goes back.

        After that a quota has the delay again: evictions take time, and may be refused.
        """
        found = []
        quotas = self._table.quotas
        for name in self._since.keys() - quotas.keys():
            del self._since[name]
        for name, quota in quotas.items():
            if name == SYSTEM_QUOTA:
                continue
            over = _over(quota)
            if not over:
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) > self._delay_s:
                self._since[name] = now
                pods = self._chosen(quota)
                if pods:
                    used = {each: quota.all.used[each] for each in over}
                    found.append(Revoked(name, pods, used, over))
        return tuple(found)

    def _chosen(self, quota: QuotaNode) -> tuple[Booking, ...]:
        """Return the pods of a quota without which it uses no more than its runtime, or all that
        may go if it still does."""
        runtime = quota.runtimes()
        used = dict(quota.all.used)
        requests = {}
        candidates = []
        for booking in self._table.pods(quota):
            requests[booking.uid] = self._table.of(booking.shape).requests
            if booking.terminating:
                # It goes already.
                _add(used, requests[booking.uid], -1)
            elif booking.shape.labels.get(LABEL_PREEMPTIBLE) != "false":
                candidates.append(booking)
        candidates.sort(key=lambda each: (each.shape.priority, -each.start, each.key))
        chosen = []
        for booking in candidates:
            if all(used.get(name, 0) <= limit for name, limit in runtime.items()):
                break
            chosen.append(booking)
            _add(used, requests[booking.uid], -1)
        going = []
        for booking in reversed(chosen):
            asked = requests[booking.uid]
            if all(used.get(name, 0) + amount <= runtime[name] for name, amount in asked.items()):
                _add(used, asked, 1)
            else:
                going.append(booking)
        return tuple(reversed(going))


def _over(quota: QuotaNode) -> dict[str, int]:
    """Return the runtime of each resource of which a quota uses more."""
    result = {}
    for name, used in quota.all.used.items():
        runtime = quota.runtime(name) if name in quota.definition.most else used
        if used > runtime:
            result[name] = runtime
    return result


def _add(amounts: dict[str, int], requests: Mapping[str, int], sign: int) -> None:
    for name, amount in requests.items():
        amounts[name] = amounts.get(name, 0) + sign * amount
