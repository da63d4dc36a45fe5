"""The proxy's own channel: one connection whoever asks, and calls that end where they began."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest

from runtime_proxy.channel import Channel, NotConnected, RpcError
from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import Code, Status, add_prefix
from tests.runtime_proxy.http2.h2_server import H2Server, Reply
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
        assert len(server.open) == 2
        server.go_on.set()
        assert await call == b"answer"
        await until(lambda: len(server.open) == 1, "the old connection to be closed")
        assert channel.connected

    run(tmp_path, test)


def test_a_server_that_leaves_gets_its_idle_connection_closed(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        await channel.connect(5)
        server.leave_gently()
        await until(lambda: not server.open)

    run(tmp_path, test)


def test_without_a_connection_every_use_says_so(tmp_path: Path) -> None:
    async def test(server: Server, channel: Channel) -> None:
        async def stream() -> None:
            with channel.messages(b"/s/m", b"x"):
                pass

        for use in (channel.ping(1), channel.unary(b"/s/m", b"x", timeout_s=1), stream()):
            with pytest.raises(NotConnected) as caught:
                await use
            assert caught.value.status.message == "not connected"
            assert "not connected" in str(caught.value)
            assert not caught.value.processed

    run(tmp_path, test)


# -- calls ----------------------------------------------------------------------------------------


def with_peer(
    folder: Path,
    test: Callable[[Channel, H2Server], Awaitable[None]],
    *,
    max_message_bytes: int = 1000,
) -> None:
    """Run a test with a connected channel."""

    async def main() -> None:
        async with asyncio.timeout(20), H2Server(folder / "p.sock") as peer:
            channel = Channel(str(peer.socket), max_message_bytes=max_message_bytes)
            await channel.connect(5)
            assert channel.connected
            try:
                await test(channel, peer)
            finally:
                channel.close()

    asyncio.run(main())


async def failure(channel: Channel) -> tuple[Status, bool]:
    """Make a unary call that fails; return its status and whether the server may have seen it."""
    with pytest.raises(RpcError) as caught:
        await channel.unary(b"/s/m", b"x", timeout_s=5)
    assert str(caught.value) == str(caught.value.status)
    return caught.value.status, caught.value.processed


def test_a_call_returns_the_one_message_of_its_answer(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = lambda path, request: Reply(messages=[request * 2])
        answers = await asyncio.gather(
            *(channel.unary(b"/s/m", b"%d" % n, timeout_s=5) for n in range(5))
        )
        assert answers == [b"00", b"11", b"22", b"33", b"44"]
        assert peer.requests[0] == ("/s/m", b"0")
        assert peer.accepted == 1

    with_peer(tmp_path, test)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (
            Reply(trailers=[("grpc-status", "5"), ("grpc-message", "no%20such")]),
            Status(Code.NOT_FOUND, "no such"),
        ),
        (Reply(), Status(Code.INTERNAL, "the answer has no message")),
        (
            Reply(messages=[b"a", b"b"]),
            Status(Code.INTERNAL, "the answer has several messages"),
        ),
        (
            Reply(messages=[b"a"], trailers=[("grpc-status", "13")]),
            Status(Code.INTERNAL),
        ),
    ],
)
def test_a_failed_call_says_why_and_leaves_the_connection(
    tmp_path: Path, reply: Reply, status: Status
) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = reply
        assert await failure(channel) == (status, True)
        peer.reply = Reply(messages=[b"answer"])
        assert await channel.unary(b"/s/m", b"x", timeout_s=5) == b"answer"
        assert peer.accepted == 1

    with_peer(tmp_path, test)


def test_a_second_message_ends_the_call_at_once(tmp_path: Path) -> None:
    """Also at the server, which may never have ended it."""

    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"a", b"b"], ends=False)
        with pytest.raises(RpcError, match=r"^INTERNAL: the answer has several messages$"):
            await channel.unary(b"/s/m", b"x", timeout_s=5)
        await until(lambda: peer.cancelled == 1, "the call to be cancelled")

    with_peer(tmp_path, test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_that_is_given_up_is_cancelled_at_the_server(
    tmp_path: Path, cancelled: bool
) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"answer"], pause_before_end=True)
        limit_s = 5 if cancelled else 0.05
        call = asyncio.create_task(channel.unary(b"/s/m", b"x", timeout_s=limit_s))
        await until(lambda: peer.requests)
        if cancelled:
            call.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
            await call
        await until(lambda: peer.cancelled == 1, "the call to be cancelled")
        peer.reply = Reply(messages=[b"answer"])
        assert await channel.unary(b"/s/m", b"x", timeout_s=5) == b"answer"
        assert peer.accepted == 1

    with_peer(tmp_path, test)


def test_calls_on_a_connection_that_is_lost_fail_and_may_have_been_made(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"answer"], pause_before_end=True)
        call = asyncio.create_task(failure(channel))
        stream = asyncio.create_task(collected(channel))
        await until(lambda: len(peer.requests) == 2)
        await peer.cut_off()
        lost = Status(Code.UNAVAILABLE, "the server closed the connection")
        assert await call == (lost, True)
        with pytest.raises(RpcError) as caught:
            await stream
        assert caught.value.status == lost
        assert not channel.connected
        with pytest.raises(NotConnected, match=r"^UNAVAILABLE: not connected$"):
            await channel.ping(5)
        peer.reply = Reply(messages=[b"answer"])
        await channel.connect(5)
        assert await channel.unary(b"/s/m", b"x", timeout_s=5) == b"answer"

    with_peer(tmp_path, test)


# -- streams --------------------------------------------------------------------------------------


async def collected(channel: Channel) -> list[bytes]:
    with channel.messages(b"/s/m", b"x") as messages:
        return [message async for message in messages]


def test_a_stream_ends_with_its_status(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"a", b"", b"b"])
        assert await collected(channel) == [b"a", b"", b"b"]
        peer.reply = Reply(messages=[b"a"], trailers=[("grpc-status", "8")])
        received = []
        refused = pytest.raises(RpcError, match=r"^RESOURCE_EXHAUSTED$")
        with refused, channel.messages(b"/s/m", b"x") as messages:
            async for message in messages:
                received.append(message)
        assert received == [b"a"]

    with_peer(tmp_path, test)


def test_a_stream_that_is_left_is_cancelled_at_the_server(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"a", b"b"], ends=False)
        with channel.messages(b"/s/m", b"x") as stream:
            # The request is at the server although no message was asked for.
            await until(lambda: peer.requests == [("/s/m", b"x")], "the call to arrive")
            assert await anext(stream) == b"a"
            assert peer.cancelled == 0
        await until(lambda: peer.cancelled == 1, "the call to be cancelled")

    with_peer(tmp_path, test)


@pytest.mark.parametrize("too_many", [False, True])
def test_events_that_are_not_read_have_a_limit(tmp_path: Path, too_many: bool) -> None:
    count = 4098 if too_many else 4096

    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(raw=add_prefix(b"e") * count, ends=not too_many)
        with channel.messages(b"/s/m", b"x") as stream:
            # One is taken, and the others come while nothing reads: at most 4096 wait.
            received = [await anext(stream)]
            await until(lambda: peer.cancelled if too_many else peer.replied)
            await channel.ping(5)
            if too_many:
                with pytest.raises(RpcError, match=r"^RESOURCE_EXHAUSTED: events come too fast$"):
                    received += [message async for message in stream]
            else:
                received += [message async for message in stream]
                assert len(received) == count

    with_peer(tmp_path, test, max_message_bytes=100_000)


# -- connecting -----------------------------------------------------------------------------------


async def refusal(channel: Channel, limit_s: float = 5) -> str:
    with pytest.raises(NotConnected) as caught:
        await channel.connect(limit_s)
    assert not channel.connected
    assert not caught.value.processed
    assert caught.value.status.code == Code.UNAVAILABLE
    return caught.value.status.message


def on_server(
    folder: Path,
    test: Callable[[Channel], Awaitable[None]],
    said: Callable[[int], bytes],
) -> list[int]:
    """Run a test where the server says so much to its n-th connection. Return which have ended."""
    ended: list[int] = []

    async def main() -> None:
        accepted = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            number = accepted
            writer.write(said(number))
            with suppress(ConnectionError):
                while await reader.read(65_536):
                    pass
            ended.append(number)
            writer.close()

        path = folder / "s.sock"
        async with asyncio.timeout(20), await asyncio.start_unix_server(serve, path):
            channel = Channel(str(path), max_message_bytes=1000)
            await test(channel)
            await until(lambda: len(ended) == accepted, "the connections to be closed")
            channel.close()

    asyncio.run(main())
    return ended


def test_a_server_that_answers_no_ping_is_not_connected(tmp_path: Path) -> None:
    async def test(channel: Channel) -> None:
        assert await refusal(channel, 0.05) == "no sign of life within 0.05 s"

    assert on_server(tmp_path, test, lambda number: b"") == [1]


def test_a_server_that_closes_at_once_is_not_connected(tmp_path: Path) -> None:
    async def main() -> None:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with asyncio.timeout(20), await asyncio.start_unix_server(accept, tmp_path / "s"):
            channel = Channel(str(tmp_path / "s"), max_message_bytes=1000)
            # The system reports the end, or that octets of ours were never read.
            assert await refusal(channel) in (
                "the server closed the connection",
                "Connection reset by peer",
                "Broken pipe",
            )

    asyncio.run(main())


def test_a_server_that_breaks_the_protocol_is_left(tmp_path: Path) -> None:
    async def test(channel: Channel) -> None:
        assert await refusal(channel) == (
            "the server broke the protocol: FRAME_SIZE_ERROR: frame of 7631461 octets"
        )

    assert on_server(tmp_path, test, lambda number: b"tree of other octets") == [1]


def test_a_server_that_stops_answering_fails_the_ping(tmp_path: Path) -> None:
    settings = frames.settings({})

    async def test(channel: Channel) -> None:
        await channel.connect(5)
        with pytest.raises(NotConnected, match=r"^UNAVAILABLE: no sign of life within 0.05 s$"):
            await channel.ping(0.05)
        assert channel.connected
        assert channel._wire is not None
        assert channel._wire.pongs == {}
        channel.retire()

    # The first ping of a channel has the number 1.
    assert on_server(tmp_path, test, lambda number: settings + frames.ping_ack(PING_1)) == [1]


PING_1 = (1).to_bytes(8, "big")


def test_a_ping_is_answered_by_its_own_number(tmp_path: Path) -> None:
    async def test(channel: Channel) -> None:
        assert await refusal(channel, 0.05) == "no sign of life within 0.05 s"
        await channel.connect(5)
        channel.close()

    def pongs(number: int) -> bytes:
        return frames.settings({}) + frames.ping_ack((2).to_bytes(8, "big"))

    assert on_server(tmp_path, test, pongs) == [1, 2]


def test_without_a_socket_the_systems_reason_is_given(tmp_path: Path) -> None:
    async def main() -> None:
        channel = Channel(str(tmp_path / "none"), max_message_bytes=1000, owned_by_root=True)
        assert await refusal(channel) == "No such file or directory"
        (tmp_path / "none").write_text("")
        assert await refusal(channel) == "not a socket"
        channel = Channel(str(tmp_path / "none"), max_message_bytes=1000)
        assert await refusal(channel) == "Connection refused"

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a socket to another user")
def test_a_socket_of_another_user_is_refused_where_it_must_be_roots(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), H2Server(tmp_path / "p.sock") as peer:
            for must_be in (False, True):
                os.chown(peer.socket, 0, 0)
                channel = Channel(str(peer.socket), max_message_bytes=1000, owned_by_root=must_be)
                await channel.connect(5)
                channel.close()
                os.chown(peer.socket, 4711, 0)
                if must_be:
                    assert await refusal(channel) == "belongs to user 4711, must be root's"
                else:
                    await channel.connect(5)
                    channel.close()

    asyncio.run(main())


def test_a_channel_that_goes_out_of_use_while_it_connects_connects_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.setblocking(False)
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        loop = asyncio.get_running_loop()
        with listening:
            channel = Channel(str(tmp_path / "s"), max_message_bytes=1000)
            connecting = asyncio.create_task(refusal(channel))
            accepted, _ = await loop.sock_accept(listening)
            with accepted:
                channel.retire()
                await loop.sock_sendall(accepted, frames.settings({}) + frames.ping_ack(PING_1))
                assert await connecting == "no longer in use"
                while await loop.sock_recv(accepted, 1000):
                    pass
            assert await refusal(channel) == "no longer in use"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_retired_channel_makes_no_call_and_ends_with_the_last_stream(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"a", b"b"], pause_before_end=True)
        stream = asyncio.create_task(collected(channel))
        await until(lambda: peer.requests)
        channel.retire()
        assert not channel.connected
        with pytest.raises(NotConnected, match=r"^UNAVAILABLE: not connected$"):
            await channel.unary(b"/s/m", b"x", timeout_s=5)
        peer.go_on.set()
        assert await stream == [b"a", b"b"]
        await until(lambda: not peer.open_connections, "the connection to be closed")

    with_peer(tmp_path, test)


def test_a_closed_channel_connects_when_it_is_asked_to(tmp_path: Path) -> None:
    async def test(channel: Channel, peer: H2Server) -> None:
        channel.close()
        assert not channel.connected
        await until(lambda: not peer.open_connections, "the connection to be closed")
        channel.close()
        for _ in range(2):
            await channel.connect(5)
        await channel.ping(5)
        assert peer.accepted == 2

    with_peer(tmp_path, test)
