"""Connections that end at any moment, from either side: every call ends once, and nothing is left.

The peers are those of the generated worlds, here behind real sockets around the front.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
from collections.abc import Awaitable, Collection
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import Status, add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.http2.relay import Relay
from runtime_proxy.server import Forward, Front, Traffic, Verdict
from tests.runtime_proxy.http2.peer import Peer, Stream
from tests.runtime_proxy.http2.worlds import HELD, PLAIN
from tests.waiting import until

_ENDED_WELL = [("grpc-status", "0")]


class _Asked:
    """A held call: what it hears of its end."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self.ends = 0
        self.cancelled = False

    def decide(self) -> Verdict | Awaitable[Verdict]:
        return self._later() if self._random.random() < 0.7 else Forward()

    async def _later(self) -> Verdict:
        await asyncio.sleep(self._random.choice([0, 0.002, 10]))
        verdicts: list[Verdict] = [Forward(), Forward(add_prefix(b"x" * 100_000)), Status(2, "no")]
        return self._random.choice(verdicts)

    def answered(self, body: bytes) -> None:
        self.ends += 1

    def abandoned(self) -> None:
        self.ends += 1


class _Hooks:
    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self.calls: list[_Asked] = []

    @property
    def paths(self) -> Collection[bytes]:
        return [HELD.encode()]

    def open(self, request: RequestHeld) -> _Asked:
        self.calls.append(_Asked(self._random))
        return self.calls[-1]


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _live(peer: Peer, rng: random.Random, ends: _Ends, turns: int) -> None:
    """One end of a connection, for some turns; then it goes, one way or another."""
    reader, writer = ends
    for turn in range(turns):
        if peer.client and peer.can_open and rng.random() < 0.5:
            body = add_prefix(rng.randbytes(rng.choice([0, 900, 40_000])))
            number = 2 * len(peer.streams) + 1
            peer.open(number, [(":method", "POST"), (":path", rng.choice([HELD, PLAIN]))], body)
        for stream in peer.streams.values():
            if not peer.client and stream.got_end and not stream.may_send and not stream.reset:
                peer.answer(stream, [(":status", "200")], bytes(stream.got), _ENDED_WELL)
            peer.send_some(stream)
            if rng.random() < 0.02:
                peer.reset(stream)
        peer.give_windows()
        octets, peer.octets = bytes(peer.octets), bytearray()
        writer.write(octets[: rng.choice([7, 1 << 20])] if turn == turns - 1 else octets)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.001):
                part = await reader.read(rng.choice([10, 1 << 16]))
                if not part:
                    break
                peer.receive(part)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def _world(seed: int, folder: Path) -> _Hooks:
    rng = random.Random(seed)
    hooks = _Hooks(rng)
    broken: list[BaseException] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(rng, client=False)
        peer.on_headers = _ignore
        turns = rng.choice([0, 5, 1000])
        try:
            await _live(peer, rng, (reader, writer), turns)
        except OSError:
            pass
        except AssertionError as error:
            broken.append(error)

    backend, endpoint = folder / "runtime.sock", folder / "proxy.sock"
    runtime = await asyncio.start_unix_server(serve, backend)
    front = Front(
        backend=str(backend),
        interceptor=hooks,
        max_message_bytes=1 << 16,
        traffic=Traffic(observe=lambda path, seconds: None),
    )
    loop = asyncio.get_running_loop()
    listening = await loop.create_unix_server(front.new_connection, endpoint)

    async def call() -> None:
        ends = await asyncio.open_unix_connection(endpoint)
        await _live(Peer(rng, client=True), rng, ends, rng.choice([1, 5, 40]))

    for outcome in await asyncio.gather(*(call() for _ in range(4)), return_exceptions=True):
        if outcome is not None and not isinstance(outcome, OSError):
            raise outcome
    listening.close()
    async with asyncio.timeout(10):
        while front.connections:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    runtime.close()
    if broken:
        raise broken[0]
    # Cancelled hooks end with the next turn of the loop.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not [t for t in asyncio.all_tasks() if "_later" in repr(t.get_coro())]
    return hooks


def _ignore(stream: Stream) -> None:
    """The answer comes when the request has ended."""


def _relays() -> int:
    gc.collect()
    return sum(isinstance(one, Relay) for one in gc.get_objects())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_connections_that_end_anyhow_leave_nothing(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        descriptors, relays = len(os.listdir("/proc/self/fd")), _relays()
        hooks = asyncio.run(_world(seed, Path(folder)))
        assert [call.ends for call in hooks.calls] == [1] * len(hooks.calls)
        assert _relays() == relays
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_runtime_that_does_not_read_holds_its_client_up_and_loses_nothing(tmp_path: Path) -> None:
    """Pings have no window of HTTP/2's: without back-pressure they would pile up in the proxy."""
    pings = frames.ping(b"12345678") * 300_000

    async def main() -> None:
        go_on = asyncio.Event()
        received: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await go_on.wait()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            count = 0
            while count < len(whole) and (part := await reader.read(1 << 20)):
                count += len(part)
            received.set_result(count)
            writer.close()

        whole = frames.PREFACE + frames.settings({}) + pings
        runtime = await asyncio.start_unix_server(serve, tmp_path / "runtime.sock")
        front = Front(
            backend=str(tmp_path / "runtime.sock"),
            interceptor=_Hooks(random.Random(1)),
            max_message_bytes=1 << 16,
            traffic=Traffic(observe=lambda path, seconds: None),
        )
        loop = asyncio.get_running_loop()
        listening = await loop.create_unix_server(front.new_connection, tmp_path / "proxy.sock")
        _, writer = await asyncio.open_unix_connection(tmp_path / "proxy.sock")
        writer.write(whole)

        def held_up() -> bool:
            return any(
                one._client is not None and not one._client.is_reading()
                for one in front.connections
            )

        await until(held_up, "the client to be held up")
        (connection,) = front.connections
        assert connection._upstream is not None
        assert connection._upstream.get_write_buffer_size() < 2 << 20
        go_on.set()
        assert await asyncio.wait_for(received, 20) == len(whole)
        writer.close()
        await until(lambda: not front.connections, "the end of the connection")
        listening.close()
        runtime.close()

    asyncio.run(main())
