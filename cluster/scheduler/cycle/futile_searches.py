"""Searches for victims that found none, so that they do not take all of the time.

A search for a large gang is one step in which nothing else is decided, and many events may help the
gang. So a search that took long and was in vain is not repeated before it has rested for a multiple
of its own time. What it found holds until then, for each member of the gang. A short search rests
for the other members alone: in a gang that is not strict they are refused one after another, and
each would look for room for the same gang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cluster.scheduler.cycle.post_filter import NotFound

_REST: Final = 10
"""How many times its own duration a search rests. Chosen: such searches take a tenth of the time at
most. Twice the value leaves more to other pods; the gang learns later that it could have room."""
_SHORT_S: Final = 0.05
"""A search up to this does not rest for the member that it was for. Chosen: the goal for the search
for one pod."""


@dataclass(frozen=True, slots=True)
class Resting:
    """found: what a search found. as_of: what it went by. by: UID of the member that it was for.
    until: when it may be repeated. long: it rests for that member too."""

    found: NotFound
    as_of: object
    by: str
    until: float
    long: bool


class FutileSearches:
    """By gang. Times are of one clock that never jumps, in seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, Resting] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def resting(self, gang: str, uid: str, now: float) -> Resting | None:
        """Return the search for a gang that rests, for the member with this UID."""
        kept = self._kept.get(gang)
        if kept is None or now >= kept.until or (kept.by == uid and not kept.long):
            return None
        return kept

    def searched(
        self, gang: str, found: NotFound, *, by: str, as_of: object, began: float, now: float
    ) -> None:
        """Take what a search found that began at `began` and ends now. by, as_of: see Resting."""
        self._kept = {each: kept for each, kept in self._kept.items() if now < kept.until}
        self._kept.pop(gang, None)
        took = now - began
        if took > 0 and not found.waits:
            long = took > _SHORT_S
            self._kept[gang] = Resting(found, as_of, by, now + _REST * took, long)
