"""One round of evictions as a state machine without I/O: shortages in, victims out.

A round takes the shortages of all strategies together. What a victim releases of a resource counts
for every shortage of it, also where the gate of that shortage may not evict this pod. The loop
around it:

    while (choice := round.next()) is not None:
        round.evicted(choice) if <the pod was evicted> else round.refused(choice, <why>)

Which pods go is planned for the whole round, and again after each refusal:

1. Each shortage in turn takes victims until it is covered: the lowest rank first, and within a rank

       use        in the strategy's order, so those that use most first
       requests   the smallest that covers the rest; where none does, in the strategy's order

   A request is a fixed amount: what is released of it beyond the shortage is wasted. Use changes,
   and the largest user is mostly the one that grows: if a smaller pod went in its place, others
   would have to follow.
2. Of these, each that the others make needless is spared, the last taken first: all shortages stay
   covered without it. So no victim of a round can be left out, as long as none is refused.

A shortage is covered when the pods that leave anyway, those evicted before and those of this round
release what it needs.
"""

from __future__ import annotations

from collections import Counter
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
        self.releases = releases_by_pod(shortages)
        """uid -> what the pod's end releases."""
        self._released: dict[Key, dict[str, int]] = {}
        for uid, amounts in expected.items():
            for key, amount in amounts.items():
                self._released.setdefault(key, {})[uid] = amount
        self._done = {*expected, *barred}
        self._refusals: dict[str, str] = dict(barred)
        self._planned: list[Choice] | None = None
        self.taken: list[Choice] = []

    def next(self) -> Choice | None:
        """Return the next victim; None when all is covered, or no victim or room is left."""
        if self._left <= 0:
            return None
        if self._planned is None:
            self._planned = self._plan()
        return self._planned[0] if self._planned else None

    def evicted(self, choice: Choice) -> None:
        """Count what the victim releases, for every shortage."""
        uid = choice.victim.pod.uid
        self._done.add(uid)
        self._left -= 1
        self.taken.append(choice)
        for key, amount in self.releases[uid].items():
            self._released.setdefault(key, {})[uid] = amount
        if self._planned is not None:
            self._planned.remove(choice)

    def refused(self, choice: Choice, why: str) -> None:
        """Go on without this victim."""
        self._planned = None
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

    def _plan(self) -> list[Choice]:
        """Return the victims that are still to go, in order."""
        released = Counter({key: sum(pods.values()) for key, pods in self._released.items()})
        active = [each for each in self._shortages if each.gate not in self._cooling]
        done = set(self._done)
        choices: list[Choice] = []
        for shortage in active:
            key = key_of(shortage)
            victims = [
                each for each in shortage.victims if each.releases > 0 and each.pod.uid not in done
            ]
            largest = _largest(victims)
            for place, first in enumerate(victims):
                missing = shortage.needed - released[key]
                if missing <= 0:
                    break
                fits = shortage.of_requests and largest[place] >= missing
                victim = _smallest(victims[place:], missing) if fits else first
                choices.append(Choice(shortage, victim))
                done.add(victim.pod.uid)
                released.update(self.releases[victim.pod.uid])
        named = [{each.pod.uid for each in shortage.victims} for shortage in active]
        needed: list[Choice] = []
        for choice in reversed(choices):
            uid = choice.victim.pod.uid
            if any(
                self._needs(each, uid, released[key_of(each)], named=uid in names)
                for each, names in zip(active, named, strict=True)
            ):
                needed.append(choice)
            else:
                released.subtract(self.releases[uid])
        needed.reverse()
        return needed

    def _needs(self, shortage: Shortage, uid: str, released: int, *, named: bool) -> bool:
        """Return whether a shortage needs a planned pod.

        released: by all that is planned. named: whether the pod may go for this shortage.
        """
        amount = self.releases[uid].get(key_of(shortage), 0)
        if not amount or released - amount >= shortage.needed:
            return False
        return released >= shortage.needed or named

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


def releases_by_pod(shortages: Sequence[Shortage]) -> dict[str, dict[Key, int]]:
    """Return uid -> what the pod's end releases of all that is short."""
    found: dict[str, dict[Key, int]] = {}
    for shortage in shortages:
        key = key_of(shortage)
        for each in (*shortage.victims, *shortage.others):
            amounts = found.setdefault(each.pod.uid, {})
            amounts[key] = max(amounts.get(key, 0), each.releases)
    return found


def _largest(victims: Sequence[Victim]) -> list[int]:
    """Return for each victim the most that it or a later one of its rank releases."""
    found: list[int] = []
    for place in reversed(range(len(victims))):
        one = victims[place]
        same = place + 1 < len(victims) and victims[place + 1].rank == one.rank
        found.append(max(one.releases, found[-1]) if same else one.releases)
    found.reverse()
    return found


def _smallest(victims: Sequence[Victim], missing: int) -> Victim:
    """Return the victim of the first one's rank that covers what is missing with the least."""
    rank = victims[0].rank
    fitting = (each for each in victims if each.rank == rank and each.releases >= missing)
    return min(fitting, key=lambda each: each.releases)
