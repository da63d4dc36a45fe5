"""Keeps Python's garbage collector from holding the event loop of a process with large caches.

A full collection looks at every object. In the manager 280 ms were measured for the caches of 5,000
nodes, with admission waiting, and one came with every edit of the configuration. In the scheduler
they took two thirds of the time in which 100,000 pods are read. What the caches hold is freed by
its reference count. Requests leave cycles behind, which die young: those are still looked for among
young objects, and the rest once an hour.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_YOUNGEST: Final = 2000
"""New objects before they are looked at: 2 ms. CPython's own default until 3.13 is 700."""
_MIDDLE: Final = 5
"""Such looks before their survivors are looked at, too: 10,000 objects, 8 ms."""
_NEVER: Final = 1_000_000
"""Looks at the middle ones before all objects are looked at by themselves."""
_FULL_SECONDS: Final = 3600.0
"""Chosen: what dies old is an exception or a lost connection now and then."""


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Look at young and middle-aged objects alone until the end of the block."""
    before = gc.get_threshold()
    gc.set_threshold(_YOUNGEST, _MIDDLE, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def collect_seldom() -> None:
    """Take the full collections of this process over until cancelled."""
    with without_full_collections():
        while True:
            # Spread, so that two replicas do not stand still at once.
            await asyncio.sleep(_FULL_SECONDS * random.uniform(0.9, 1.1))
            gc.collect()
