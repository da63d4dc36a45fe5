"""The front's connections, with transports that a test plays: what is rare on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from runtime_proxy import server
from runtime_proxy.http2 import frames
from runtime_proxy.server import Front, Traffic
from tests.waiting import until


@dataclass
class Wire:
    """A transport that keeps what happens to it."""

    written: bytearray = field(default_factory=bytearray)
    closed: bool = False
    ended: bool = False
    reading: bool = True

    def set_write_buffer_limits(self, high: int) -> None:
        """There is no buffer."""

    def write(self, data: bytes) -> None:
        assert not self.closed and not self.ended
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class _Nothing:
    """No call is intercepted."""

    paths = frozenset[bytes]()

    def open(self, request: object) -> Any:
        raise AssertionError("no call is intercepted")


def run(test: Callable[[Front], Awaitable[None]]) -> None:
    """Run a test on a front whose runtime is away."""

    async def main() -> None:
        async with asyncio.timeout(10):
            front = Front(
                backend="/no/such/runtime.sock",
                interceptor=_Nothing(),
                max_message_bytes=1 << 16,
                traffic=Traffic(observe=lambda path, seconds: None),
            )
            try:
                await test(front)
            finally:
                await front.drain(0)

    asyncio.run(main())


def connect(front: Front) -> tuple[Any, Wire]:
    connection, wire = cast(Any, front.new_connection()), Wire()
    connection.connection_made(wire)
    return connection, wire


async def refused(front: Front) -> tuple[Any, Wire]:
    """Return a client that is held while the runtime is away, with its first frames answered."""
    connection, wire = connect(front)
    connection.data_received(frames.PREFACE + frames.settings({}))
    await until(lambda: bool(wire.written), "the first frames")
    return connection, wire


@pytest.mark.parametrize(("more", "closed"), [(0, False), (1, True)])
def test_what_comes_before_the_runtime_answers_the_dial_is_kept_up_to_a_limit(
    more: int, closed: bool
) -> None:
    async def test(front: Front) -> None:
        connection, wire = connect(front)
        connection.data_received(b"x" * (1024 * 1024 - 1))
        connection.data_received(b"x" * (1 + more))
        assert wire.closed is closed
        assert (connection in front.connections) is not closed

    run(test)


def test_a_runtime_that_answers_the_dial_after_the_client_has_gone_is_left() -> None:
    async def test(front: Front) -> None:
        connection, wire = connect(front)
        connection.connection_lost(None)
        late = Wire()
        connection.upstream_made(late)
        assert late.closed
        assert front.connections == set()
        assert not wire.written

    run(test)


def test_a_dial_that_fails_after_the_client_has_gone_looks_for_no_runtime() -> None:
    async def test(front: Front) -> None:
        connection, _ = connect(front)
        connection.connection_lost(None)
        connection._refuse(ConnectionRefusedError(111, "Connection refused"))
        assert not front.backend_away

    run(test)


def test_a_client_that_is_sent_away_gets_nothing_more_and_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_LINGER_S", 0.01)

    async def test(front: Front) -> None:
        connection, wire = await refused(front)
        connection.send_away()
        assert wire.ended and not wire.closed
        sent = bytes(wire.written)
        connection.data_received(frames.ping(b"12345678"))
        connection.send_away()
        assert wire.written == sent
        await until(lambda: wire.closed, "the end of the connection")
        assert front.connections == set()

    run(test)


def test_a_client_that_does_not_read_its_refusals_is_not_read() -> None:
    async def test(front: Front) -> None:
        connection, wire = await refused(front)
        connection.pause_writing()
        assert not wire.reading
        connection.resume_writing()
        assert wire.reading

    run(test)


def test_a_slow_side_of_a_pair_holds_up_the_other_one_unless_that_closes() -> None:
    async def test(front: Front) -> None:
        connection, client = connect(front)
        upstream = Wire()
        connection.upstream_made(upstream)
        connection.pause_writing()
        assert (client.reading, upstream.reading) == (True, False)
        connection.resume_writing()
        assert upstream.reading
        connection.upstream_paused()
        assert (client.reading, upstream.reading) == (False, True)
        connection.upstream_resumed()
        assert client.reading
        client.closed = upstream.closed = True
        connection.pause_writing()
        connection.upstream_paused()
        assert (client.reading, upstream.reading) == (True, True)
        client.reading = upstream.reading = False
        connection.resume_writing()
        connection.upstream_resumed()
        assert (client.reading, upstream.reading) == (False, False)

    run(test)


def test_a_runtime_that_leaves_ends_the_connection() -> None:
    async def test(front: Front) -> None:
        connection, client = connect(front)
        connection.upstream_made(Wire())
        connection.upstream_lost()
        assert client.closed
        assert front.connections == set()

    run(test)


@pytest.mark.parametrize("side", ["client", "runtime"])
def test_broken_http2_is_counted_answered_and_ends_both_connections(side: str) -> None:
    async def test(front: Front) -> None:
        connection, client = connect(front)
        upstream = Wire()
        connection.upstream_made(upstream)
        connection.data_received(frames.PREFACE + frames.settings({}))
        before = len(client.written)
        too_large = b"\xff\xff\xff" + bytes(6)
        (connection.data_received if side == "client" else connection.upstream_data)(too_large)
        assert front.traffic.faults == 1
        assert client.closed and upstream.closed
        assert client.written[before + 3] == frames.GOAWAY

    run(test)
