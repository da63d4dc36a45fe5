"""One round of evictions as a state machine without I/O: shortages in, victims out.

A round takes the shortages of all strategies together. What a victim releases counts for every
shortage that it releases some of, also for one that may not evict it. The loop around it:

    while (choice := round.next()) is not None:
        round.evicted(choice) if <the pod was evicted> else round.refused(choice, <why>)

Victims go in the strategy's order; a refused one makes room for the next. A shortage is covered
when the pods that leave anyway, those evicted before and those of this round release what it needs,
so it never takes more than it needs by more than its last victim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from koordlet.qos.strategy import Shortage, Victim

Key = tuple[str, bool]
"""What is released: (resource, whether amounts are requests)."""


def key_of(shortage: Shortage) -> Key:
    return shortage.resource, shortage.of_requests


class Choice(NamedTuple):
    """A victim, and the shortage that it goes for."""

    shortage: Shortage
    victim: Victim


class Uncovered(NamedTuple):
    """A shortage at the end of a round. missing: what nothing releases; why: for people."""

    shortage: Shortage
    missing: int
    why: str


class Round:
    """See the module.

    expected: uid -> what a pod that was evicted before, or that leaves by itself, will release.
        Such a pod is not a victim.
    barred: uid -> why a pod is not a victim now, for people.
    cooling: gate -> cool-down in seconds, of those that evict nothing in this round.
    most: victims of the whole round.
    """

    def __init__(
        self,
        shortages: Sequence[Shortage],
        *,
        expected: Mapping[str, Mapping[Key, int]],
        barred: Mapping[str, str],
        cooling: Mapping[str, float],
        most: int,
    ) -> None:
        self._shortages = tuple(shortages)
        self._cooling = dict(cooling)
        self._left = most
        self._released: dict[Key, dict[str, int]] = {}
        for uid, amounts in expected.items():
            for key, amount in amounts.items():
                self._released.setdefault(key, {})[uid] = amount
        self._done = {*expected, *barred}
        self._refusals: dict[str, str] = dict(barred)
        self.taken: list[Choice] = []

    def next(self) -> Choice | None:
        """Return the next victim; None when all is covered, or no victim or room is left."""
        if self._left <= 0:
            return None
        for shortage in self._shortages:
            if shortage.gate in self._cooling or self.missing(shortage) <= 0:
                continue
            for victim in shortage.victims:
                if victim.releases > 0 and victim.pod.uid not in self._done:
                    return Choice(shortage, victim)
        return None

    def evicted(self, choice: Choice) -> None:
        """Count what the victim releases, for every shortage."""
        uid = choice.victim.pod.uid
        self._done.add(uid)
        self._left -= 1
        self.taken.append(choice)
        for key, amount in releases_of(uid, self._shortages).items():
            self._released.setdefault(key, {})[uid] = amount

    def refused(self, choice: Choice, why: str) -> None:
        """Go on without this victim."""
        self._done.add(choice.victim.pod.uid)
        self._refusals[choice.victim.pod.uid] = f"{choice.victim.pod.obj}: {why}"

    def missing(self, shortage: Shortage) -> int:
        """Return what is still to be released for a shortage; 0 or less when it is covered."""
        return shortage.needed - sum(self._released.get(key_of(shortage), {}).values())

    def gates_served(self) -> frozenset[str]:
        """Return the gates to whose shortages a victim of this round contributed."""
        uids = {choice.victim.pod.uid for choice in self.taken}
        keys = {key for key, pods in self._released.items() if uids & set(pods)}
        return frozenset(shortage.gate for shortage in self._shortages if key_of(shortage) in keys)

    def uncovered(self) -> tuple[Uncovered, ...]:
        """Return the shortages that are not covered, each with the reason."""
        found = []
        for shortage in self._shortages:
            missing = self.missing(shortage)
            if missing > 0:
                found.append(Uncovered(shortage, missing, self._why(shortage)))
        return tuple(found)

    def _why(self, shortage: Shortage) -> str:
        if shortage.gate in self._cooling:
            return f"within {self._cooling[shortage.gate]:g} s of the last evictions"
        if self._left <= 0:
            return "the limit of evictions in one round is reached"
        refusals = [
            self._refusals[victim.pod.uid]
            for victim in shortage.victims
            if victim.pod.uid in self._refusals
        ]
        if refusals:
            more = f", and {len(refusals) - 1} more" if len(refusals) > 1 else ""
            return f"{refusals[0]}{more}"
        return "no pod is left that may be evicted and would release any"


def releases_of(uid: str, shortages: Sequence[Shortage]) -> dict[Key, int]:
    """Return what a pod's end releases of all that is short."""
    amounts: dict[Key, int] = {}
    for shortage in shortages:
        for victim in (*shortage.victims, *shortage.others):
            if victim.pod.uid == uid:
                key = key_of(shortage)
                amounts[key] = max(amounts.get(key, 0), victim.releases)
    return amounts
