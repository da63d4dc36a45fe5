"""Python's garbage collector in a manager: out of the way, and not forgotten."""

from __future__ import annotations

import asyncio
import gc
import weakref

from cluster.collection import collect_seldom
from tests.cluster.fake_api import in_virtual_time


class Ring:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_that_have_grown_old_are_looked_at_within_the_hour_or_so() -> None:
    before = gc.get_threshold()

    async def run() -> None:
        task = asyncio.create_task(collect_seldom())
        await asyncio.sleep(1)
        assert gc.get_threshold() == (2000, 5, 1_000_000)
        ring = Ring()
        lost = weakref.ref(ring)
        gc.collect(0)
        gc.collect(1)  # now it is old
        del ring
        await asyncio.sleep(3600 * 0.9 - 2)
        gc.collect(1)
        assert lost() is not None
        await asyncio.sleep(3600 * 0.2 + 2)
        assert lost() is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_virtual_time(run)
    assert gc.get_threshold() == before
