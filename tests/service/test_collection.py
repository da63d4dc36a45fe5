"""Young garbage, collected by a thread at a moment of its choice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from service.collection import collect_youngest


class Ring:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _no_other_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("new", "collected"), [(1500, True), (500, False)])
def test_young_garbage_goes_once_many_objects_are_new(new: int, *, collected: bool) -> None:
    lost = weakref.ref(Ring())
    kept = [[number] for number in range(new)]
    collect_youngest()
    assert (lost() is None) == collected
    assert len(kept) == new


def test_older_objects_are_not_looked_at() -> None:
    ring = Ring()
    lost = weakref.ref(ring)
    gc.collect(0)
    del ring
    kept = [[number] for number in range(2000)]
    collect_youngest()
    assert lost() is not None
    assert len(kept) == 2000
