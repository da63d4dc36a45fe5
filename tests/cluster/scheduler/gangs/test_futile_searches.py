"""A search for room for a gang that was in vain rests for ten times as long as it took."""

from __future__ import annotations

import pytest

from cluster.scheduler.cycle.futile_searches import FutileSearches
from cluster.scheduler.cycle.post_filter import NotFound

_FOUND = NotFound("preemption: no room.")


def _searched(
    took: float, *, found: NotFound = _FOUND, into: FutileSearches | None = None, began: float = 100
) -> FutileSearches:
    searches = FutileSearches() if into is None else into
    searches.searched("g", found, by="a", as_of=1, began=began, now=began + took)
    return searches


@pytest.mark.parametrize(
    ("took", "member", "after", "rests"),
    [
        # For the other members, also where it was short.
        (0.02, "b", 0.0, True),
        (0.02, "b", 0.19, True),
        (0.02, "b", 0.21, False),
        (0.02, "a", 0.0, False),
        # A long one rests for the member that it was for, too.
        (0.5, "a", 4.9, True),
        (0.5, "b", 5.1, False),
        (0.5, "a", 5.1, False),
    ],
)
def test_a_search_rests(took: float, member: str, after: float, rests: bool) -> None:
    searches = _searched(took)
    resting = searches.resting("g", member, 100 + took + after)
    assert (resting is not None) is rests
    if resting is not None:
        assert (resting.found, resting.as_of, resting.by) == (_FOUND, 1, "a")
    assert searches.resting("another", member, 100) is None


@pytest.mark.parametrize(("took", "long"), [(0.03125, False), (0.0625, True)])
def test_a_search_of_more_than_50_ms_is_long(took: float, long: bool) -> None:
    resting = _searched(took).resting("g", "b", 100 + took)
    assert resting is not None
    assert resting.long is long
    assert resting.until == 100 + 11 * took


def test_a_search_that_took_no_time_or_waits_for_victims_does_not_rest() -> None:
    assert _searched(0.0).resting("g", "b", 100) is None
    waits = NotFound("preemption: victims end.", waits=True)
    assert _searched(1.0, found=waits).resting("g", "b", 101) is None
    # Nor does the one before it any longer.
    searches = _searched(1.0)
    _searched(1.0, found=waits, into=searches, began=105)
    assert searches.resting("g", "b", 106) is None


def test_searches_that_have_rested_are_forgotten() -> None:
    searches = _searched(1.0)
    searches.searched("later", _FOUND, by="x", as_of=2, began=109, now=110)
    assert len(searches) == 2
    searches.searched("last", _FOUND, by="y", as_of=3, began=110, now=111)
    assert len(searches) == 2
    assert searches.resting("later", "z", 111) is not None
