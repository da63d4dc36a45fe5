"""What follows a reply waits for a moment, in its order, unless something depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from koordlet.daemon.after_reply import AfterReply


def test_work_is_done_later_and_in_its_order() -> None:
    async def run() -> list[int]:
        after, done = AfterReply(), asyncio.Event()
        found: list[int] = []
        after.later(lambda: found.append(1))
        after.later(lambda: found.append(2))
        after.later(done.set)
        await asyncio.sleep(0)
        assert not found  # the loop sleeps first, so that the runtime gets its reply
        async with asyncio.timeout(10):
            await done.wait()
        return found

    assert asyncio.run(run()) == [1, 2]


def test_what_depends_on_it_has_it_done_at_once_and_only_once() -> None:
    async def run() -> list[int]:
        after = AfterReply()
        found: list[int] = []
        after.later(lambda: found.append(1))
        after.catch_up()
        assert found == [1]
        after.catch_up()
        done = asyncio.Event()
        after.later(lambda: found.append(2))
        after.later(done.set)
        async with asyncio.timeout(10):
            await done.wait()
        return found

    assert asyncio.run(run()) == [1, 2]


def test_work_that_fails_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[int]:
        after = AfterReply()
        found: list[int] = []

        def add() -> None:
            after.later(lambda: found.append(2))  # work may set off more
            raise ValueError("the disk")

        work: list[Callable[[], None]] = [add, lambda: found.append(1)]
        for each in work:
            after.later(each)
        after.catch_up()
        return found

    assert asyncio.run(run()) == [1, 2]
    assert "what follows a hook's reply failed" in caplog.text
    assert "the disk" in caplog.text
