"""The proxy's own channel: one connection whoever asks, and calls that end where they began."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest

from runtime_proxy.channel import Channel, NotConnected
from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import add_prefix
from tests.waiting import until


class Server:
    """Answers pings at once and each call with its own request once `go_on` is set."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.accepted = 0
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.open: list[tuple[h2.connection.H2Connection, asyncio.StreamWriter]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        machine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        machine.initiate_connection()
        entry = (machine, writer)
        self.open.append(entry)
        writer.write(machine.data_to_send())
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                for event in machine.receive_data(data):
                    if isinstance(event, h2.events.StreamEnded):
                        self.asked.set()
                        await self.go_on.wait()
                        machine.send_headers(event.stream_id, [(":status", "200")])
                        machine.send_data(event.stream_id, add_prefix(b"answer"))
                        machine.send_headers(
                            event.stream_id, [("grpc-status", "0")], end_stream=True
                        )
                writer.write(machine.data_to_send())
        self.open.remove(entry)
        writer.close()

    def leave_gently(self) -> None:
        """Take no more calls on the connections that stand."""
        for _, writer in self.open:
            # h2 itself ends all streams with GOAWAY.
            writer.write(frames.goaway(frames.LARGEST_WINDOW, frames.ErrorCode.NO_ERROR))


def run(folder: Path, test: Callable[[Server, Channel], Awaitable[None]]) -> None:
    async def main() -> None:
        server = Server(folder / "s.sock")
        listening = await asyncio.start_unix_server(server.serve, server.socket)
        channel = Channel(str(server.socket), max_message_bytes=1000)
        async with asyncio.timeout(10), listening:
            await test(server, channel)
            channel.close()
            await until(lambda: not server.open)

    asyncio.run(main())


def test_many_who_connect_at_once_share_one_connection(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        await asyncio.gather(*(channel.connect(5) for _ in range(8)))
        assert server.accepted == 1

    run(tmp_path, test)


def test_a_channel_out_of_use_ends_with_its_last_call_and_begins_none(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        await channel.connect(5)
        call = asyncio.create_task(channel.unary(b"/s/m", b"x", timeout_s=5))
        await server.asked.wait()
        channel.retire()
        with pytest.raises(NotConnected):
            await channel.connect(5)
        server.go_on.set()
        assert await call == b"answer"
        await until(lambda: not server.open)

    run(tmp_path, test)


def test_a_new_connection_leaves_the_calls_on_the_old_one_alone(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        await channel.connect(5)
        call = asyncio.create_task(channel.unary(b"/s/m", b"x", timeout_s=5))
        await server.asked.wait()
        server.leave_gently()
        await until(lambda: not channel.connected)
        await channel.connect(5)
        assert server.accepted == 2
        server.go_on.set()
        assert await call == b"answer"

    run(tmp_path, test)


def test_without_a_connection_every_use_says_so(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        async def stream() -> None:
            async for _ in channel.messages(b"/s/m", b"x"):
                pass

        for use in (channel.ping(1), channel.unary(b"/s/m", b"x", timeout_s=1), stream()):
            with pytest.raises(NotConnected) as caught:
                await use
            assert caught.value.status.message == "not connected"
            assert "not connected" in str(caught.value)
            assert not caught.value.processed

    run(tmp_path, test)
