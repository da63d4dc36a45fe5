"""A daemon's connection to an API server over a long silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kube import connection, reconnecting
from kube.client import Client
from kube.connection import Connection, ConnectionConfigError
from kube.reconnecting import stay_connected
from tests.waiting import until

Use = Callable[[Client], Awaitable[None]]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(reconnecting, "_RECONNECT_S", 0.05)
    monkeypatch.setattr(reconnecting, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(reconnecting, "_PAUSE_S", 0.001)


class Bed:
    """Counts connections; each use waits, and notes its end."""

    def __init__(self) -> None:
        self.servers: list[str] = []
        self.ended: list[str] = []
        self.refused: list[str] = []
        self.answers = False

    def connect(self) -> Connection:
        self.servers.append(f"http://127.0.0.1:{len(self.servers) + 1}")
        if len(self.servers) == 2:
            raise ConnectionConfigError("half of a file")
        return Connection(self.servers[-1])

    async def use(self, client: Client) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(client._connection.server)

    def staying(self, use: Use | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(
            stay_connected(
                self.connect,
                use or self.use,
                answers=lambda: self.answers,
                user_agent="test",
                refused=self.refused.append,
            )
        )


def test_after_a_silence_another_connection_takes_the_place_of_the_first() -> None:
    async def test() -> None:
        bed = Bed()
        staying = bed.staying()
        await until(lambda: len(bed.servers) == 4)  # the second could not be read
        assert bed.ended == ["http://127.0.0.1:1", "http://127.0.0.1:3"]
        assert bed.refused == ["half of a file"]
        staying.cancel()
        await asyncio.wait([staying])
        assert staying.cancelled() and bed.ended[-1] == "http://127.0.0.1:4"

    asyncio.run(test())


def test_a_server_that_answers_is_kept() -> None:
    async def test() -> None:
        bed = Bed()
        bed.answers = True
        looks = 0

        def answers() -> bool:
            nonlocal looks
            looks += 1
            return True

        staying = asyncio.create_task(
            stay_connected(bed.connect, bed.use, answers=answers, user_agent="test")
        )
        await until(lambda: looks > 20)  # four times the silence
        assert len(bed.servers) == 1 and not bed.ended
        staying.cancel()
        await asyncio.wait([staying])

    asyncio.run(test())


def test_a_use_that_ends_is_not_repeated_before_a_silence() -> None:
    async def test() -> None:
        bed = Bed()
        bed.answers = True
        uses: list[str] = []

        async def use(client: Client) -> None:
            uses.append("")

        staying = bed.staying(use)
        await until(lambda: uses)
        await asyncio.sleep(0.2)
        assert len(uses) == 1 and not staying.done()
        staying.cancel()
        await asyncio.wait([staying])

    asyncio.run(test())


def test_a_defect_in_the_use_is_raised() -> None:
    async def use(client: Client) -> None:
        raise ValueError("a defect")

    async def test() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await Bed().staying(use)
        assert raised.group_contains(ValueError, match="a defect")

    asyncio.run(test())
