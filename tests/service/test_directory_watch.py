"""Directories that people edit, replace and make later: noticed without waiting for the poll."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.directory_watch import DirectoryWatch

POLL_S = 3600.0


class Notices:
    """Counts, and waits for the next one."""

    def __init__(self) -> None:
        self._came = asyncio.Event()

    def __call__(self) -> None:
        self._came.set()

    async def next(self) -> None:
        async with asyncio.timeout(10):
            await self._came.wait()
        # What belongs to the same change may come a moment later.
        await asyncio.sleep(0.1)
        self._came.clear()


@asynccontextmanager
async def watching(directory: Path) -> AsyncIterator[Notices]:
    notices = Notices()
    watch = DirectoryWatch(str(directory), notices, poll=POLL_S, missing_look_s=0.05)
    try:
        yield notices
    finally:
        watch.close()


def test_a_directory_that_was_swapped_for_another_is_followed(tmp_path: Path) -> None:
    """As configuration tools do it: the new one is made beside, then both are renamed."""
    directory, new = tmp_path / "objects.d", tmp_path / "objects.d.new"

    async def test() -> None:
        directory.mkdir()
        async with watching(directory) as notices:
            new.mkdir()
            directory.rename(tmp_path / "objects.d.old")
            await notices.next()
            new.rename(directory)
            await notices.next()
            (directory / "a.yaml").write_text("x")
            await notices.next()

    asyncio.run(test())


@pytest.mark.parametrize("before", ["never there", "deleted"])
def test_a_directory_that_is_made_later_is_noticed(tmp_path: Path, before: str) -> None:
    directory = tmp_path / "objects.d"

    async def test() -> None:
        if before == "deleted":
            directory.mkdir()
        async with watching(directory) as notices:
            if before == "deleted":
                directory.rmdir()
                await notices.next()
            directory.mkdir()
            await notices.next()
            (directory / "a.yaml").write_text("x")
            await notices.next()

    asyncio.run(test())


def test_every_way_a_file_comes_and_goes_is_noticed(tmp_path: Path) -> None:
    async def test() -> None:
        async with watching(tmp_path) as notices:
            (tmp_path / "k.json").write_text("{}")
            await notices.next()
            (tmp_path / "k.json").rename(tmp_path / "l.json")
            await notices.next()
            (tmp_path / "l.json").unlink()
            await notices.next()

    asyncio.run(test())
