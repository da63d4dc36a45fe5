"""Long searches for victims that found none, so that they do not take all of the time.

A search for a large gang is one step in which nothing else is decided, and many events may help the
gang. So a search that took long and was in vain is not repeated before it has rested for a multiple
of its own time. What it found holds until then, for each member of the gang.
"""

from __future__ import annotations

from typing import Final

from cluster.scheduler.cycle.post_filter import NotFound

_REST: Final = 10
"""How many times its own duration a search rests. Chosen: such searches take a tenth of the time at
most. Twice the value leaves more to other pods; the gang learns later that it could have room."""
_SHORT_S: Final = 0.05
"""A search up to this does not rest. Chosen: the goal for the search for one pod."""


class FutileSearches:
    """By gang. Times are of one clock that never jumps, in seconds."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, NotFound]] = {}
        """Gang -> when its search may be repeated, and what it found."""

    def __len__(self) -> int:
        return len(self._kept)

    def found(self, gang: str, now: float) -> NotFound | None:
        """Return what the search for a gang found, while it rests."""
        until, found = self._kept.get(gang, (now, None))
        return found if now < until else None

    def searched(self, gang: str, found: NotFound, began: float, now: float) -> None:
        """Take what a search found that began at `began` and ends now."""
        self._kept = {each: kept for each, kept in self._kept.items() if now < kept[0]}
        self._kept.pop(gang, None)
        if now - began > _SHORT_S and not found.waits:
            self._kept[gang] = now + _REST * (now - began), found
