"""Python's garbage collector in a koordlet: out of the way, and not forgotten."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from koordlet.process import collect_when_quiet


class Ring:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


class Runtime:
    """A runtime's hooks and lists, as a test counts them."""

    hooks_answered = 0
    lists_taken = 0


@pytest.fixture
def _thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("_thresholds")
@pytest.mark.parametrize("why", ["a list", "ten minutes"])
def test_objects_that_have_grown_old_are_looked_at_once_no_hook_comes(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """As a rule every ten minutes, and after five seconds without a hook: here a second each."""
    monkeypatch.setattr("koordlet.process._QUIET_S", 0.5)
    if why == "ten minutes":
        monkeypatch.setattr("koordlet.process._COLLECT_EVERY_S", 0.5)

    async def run() -> None:
        runtime = Runtime()
        trimmed = asyncio.Event()
        set_it = partial(asyncio.get_running_loop().call_soon_threadsafe, trimmed.set)
        monkeypatch.setattr("koordlet.process.give_back", set_it)
        task = asyncio.create_task(collect_when_quiet(runtime))
        await asyncio.sleep(0.1)
        ring = Ring()
        lost = weakref.ref(ring)
        gc.collect(0)
        gc.collect(1)  # now it is old
        del ring
        for _ in range(4):
            runtime.hooks_answered += 1
            runtime.lists_taken += why == "a list"
            await asyncio.sleep(0.5)
            gc.collect(0)
            assert lost() is not None
        await asyncio.wait_for(trimmed.wait(), 60)
        assert lost() is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
