"""Peers that are slow on purpose, or many: each is cut off, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from kube.certificates import make_certificates
from kube.webhook import load_certificates
from service.http_server import Patience, Request, Response, Server, text

ASK = b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /page HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n"
IMPATIENT = Patience(handshake=1, headers=1, body=1, idle=1, linger=1)
LONG = Patience(handshake=60, headers=60, body=60, idle=60)
LARGE = 1 << 20

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def page(request: Request) -> Response:
    return text(200, "page " + request.body.decode())


def tls_pair() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of a server and of a client that trusts it."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_certificates(server, make_certificates(("localhost",)))
    client = ssl.create_default_context()
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    return server, client


class Bed:
    """A server, and how to reach it."""

    def __init__(self, server: Server, client_tls: ssl.SSLContext | None) -> None:
        self.server = server
        self.client_tls = client_tls
        self.port = server.sockets[0].getsockname()[1]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=self.client_tls)

    async def connect_raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def empty(self) -> None:
        """Wait until the server has let go of every connection."""
        while self.server.connections:  # noqa: ASYNC110 - it reports that to no one
            await asyncio.sleep(0.01)

    async def answering(self, count: int) -> None:
        """Wait until so many requests are being answered."""
        while sum(each.answer is not None for each in self.server.connections) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def is_served(self) -> bool:
        reader, writer = await self.connect()
        answer = await ask(reader, writer)
        writer.close()
        return answer.startswith(b"HTTP/1.1 200")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(ASK)
    return await reader.readuntil(b"page \n")


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the server ends the connection."""
    got = b""
    with suppress(ConnectionError, ssl.SSLError):
        while piece := await reader.read(65536):
            got += piece
    return got


async def trickle(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError, ssl.SSLError):
        for byte in data * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)


def on_bed(
    test: Callable[[Bed], Awaitable[None]],
    *,
    loop: str = "asyncio",
    tls: bool = False,
    patience: Patience = IMPATIENT,
    max_connections: int = 10,
    max_body_bytes: int = 100,
    max_held_bytes: int | None = None,
    handler: Callable[[Request], Awaitable[Response]] = page,
) -> None:
    async def run() -> None:
        server_tls, client_tls = tls_pair() if tls else (None, None)
        server = Server(
            {("GET", "/page"): handler, ("POST", "/page"): handler},
            max_body_bytes=max_body_bytes,
            max_connections=max_connections,
            max_held_bytes=max_held_bytes,
            patience=patience,
        )
        await server.listen_tcp("127.0.0.1", 0, tls=server_tls)
        try:
            await asyncio.wait_for(test(Bed(server, client_tls)), 30)
        finally:
            await server.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


SLOW: dict[str, tuple[bytes, bytes]] = {
    # title: what is sent at once, and what is sent byte by byte for ever
    "nothing is sent": (b"", b""),
    "headers without an end": (b"GET /page HTTP/1.1\r\n", b"X: y\r\n"),
    "the second request's headers": (ASK + b"GET /page HTTP/1.1\r\n", b"X: y\r\n"),
    "a body without an end": (POST, b""),
    "chunks without an end": (
        b"POST /page HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0" * 30,
    ),
    "nothing after an answer": (ASK, b""),
    "a refused body without an end": (POST.replace(b"8", b"80000"), b"x"),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("tls", [False, True])
def test_slow_peers_are_cut_off(tls: bool, loop: str) -> None:
    async def test(bed: Bed) -> None:
        async def is_cut_off(title: str) -> None:
            first, trickled = SLOW[title]
            reader, writer = await bed.connect()
            writer.write(first)
            slow = asyncio.ensure_future(trickle(writer, trickled))
            await ended(reader)
            slow.cancel()
            writer.transport.abort()

        waiting = {title: asyncio.ensure_future(is_cut_off(title)) for title in SLOW}
        assert await bed.is_served()
        await asyncio.wait(waiting.values(), timeout=20)
        assert [title for title, task in waiting.items() if not task.done()] == []
        await bed.empty()

    on_bed(test, tls=tls, loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_peer_that_begins_no_handshake_is_cut_off(loop: str) -> None:
    async def test(bed: Bed) -> None:
        async def is_cut_off(said: bytes) -> None:
            reader, writer = await bed.connect_raw()
            writer.write(said)
            await ended(reader)
            writer.transport.abort()

        said = (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.gather(*map(is_cut_off, said))
        assert await bed.is_served()

    on_bed(test, tls=True, loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_peers_in_a_handshake_take_places_and_give_way(loop: str) -> None:
    async def test(bed: Bed) -> None:
        silent = [await bed.connect_raw() for _ in range(20)]
        assert await bed.is_served()
        # Those that came last are still waited for: 10 places, of which one was taken.
        assert await ended(silent[0][0]) == b""
        await asyncio.sleep(0.05)
        assert sum(not reader.at_eof() for reader, _ in silent) in (9, 10)
        for _, writer in silent:
            writer.transport.abort()

    on_bed(test, tls=True, loop=loop, patience=LONG)


def test_who_has_asked_keeps_its_place_before_who_has_not() -> None:
    async def test(bed: Bed) -> None:
        friend = await bed.connect()
        assert await ask(*friend)
        strangers = [await bed.connect() for _ in range(12)]
        for _, writer in strangers:
            writer.write(b"GET /page HTTP/1.1\r\n")
        await ended(strangers[0][0])
        assert (await ask(*friend)).startswith(b"HTTP/1.1 200")
        for _, writer in [friend, *strangers]:
            writer.transport.abort()

    on_bed(test, patience=LONG)


def test_a_place_is_refused_while_all_are_answered() -> None:
    release = asyncio.Event()

    async def waiting(request: Request) -> Response:
        await release.wait()
        return text(200, "page ")

    async def test(bed: Bed) -> None:
        busy = [await bed.connect() for _ in range(3)]
        for _, writer in busy:
            writer.write(ASK)
        await bed.answering(3)
        reader, writer = await bed.connect()
        assert await ended(reader) == b""
        writer.transport.abort()
        release.set()
        for reader, writer in busy:
            assert (await reader.readuntil(b"page \n")).startswith(b"HTTP/1.1 200")
            writer.close()

    on_bed(test, patience=LONG, max_connections=3, handler=waiting)


@pytest.mark.parametrize("tls", [False, True])
def test_answers_wait_for_a_peer_that_does_not_read(tls: bool) -> None:
    answered = 0

    async def large(request: Request) -> Response:
        nonlocal answered
        answered += 1
        return Response(200, b"x" * LARGE)

    async def test(bed: Bed) -> None:
        reader, writer = await bed.connect()
        writer.write(ASK * 100)
        before = -1
        while answered != before:
            before = answered
            await asyncio.sleep(0.2)
        # What the sockets and the client's own buffer hold, and one more.
        assert 0 < answered < 30
        got = 0
        while got < 100 * LARGE:
            got += len(await reader.read(LARGE))
        assert answered == 100
        writer.transport.abort()

    on_bed(test, tls=tls, patience=LONG, handler=large)


def test_what_is_sent_before_an_answer_waits_outside() -> None:
    release = asyncio.Event()

    async def waiting(request: Request) -> Response:
        await release.wait()
        return text(200, "page ")

    async def test(bed: Bed) -> None:
        reader, writer = await bed.connect()
        count = 400_000
        sending = asyncio.ensure_future(write_all(writer, ASK * count))
        await asyncio.sleep(0.5)
        (connection,) = bed.server.connections
        assert len(connection.unread) < 1 << 20
        assert not sending.done()
        release.set()
        for _ in range(2000):
            await reader.readuntil(b"page \n")
        sending.cancel()
        writer.transport.abort()

    on_bed(test, patience=LONG, handler=waiting)


async def write_all(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


@pytest.mark.parametrize("tls", [False, True])
def test_a_peer_learns_why_it_is_refused_while_it_is_still_sending(tls: bool) -> None:
    async def test(bed: Bed) -> None:
        reader, writer = await bed.connect()
        writer.write(POST.replace(b"8", b"50000000"))
        sending = asyncio.ensure_future(write_all(writer, b"x" * 5_000_000))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413") and b"connection: close" in head.lower()
        sending.cancel()
        writer.transport.abort()

    on_bed(test, tls=tls, patience=LONG)


def test_bodies_are_bounded_together() -> None:
    async def test(bed: Bed) -> None:
        half = [await bed.connect() for _ in range(3)]
        for _, writer in half:
            writer.write(POST.replace(b"8", b"80") + b"x" * 60)
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(reader.readline()) for reader, _ in half],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert [task.result().split(b" ")[1] for task in done] == [b"503"]
        # The places of those that leave are free again.
        for _, writer in half:
            writer.transport.abort()
        await bed.empty()
        for _ in range(3):
            reader, writer = await bed.connect()
            writer.write(POST.replace(b"8", b"80") + b"x" * 80)
            assert b" 200 " in await reader.readline()
            writer.transport.abort()

    on_bed(test, patience=LONG, max_held_bytes=150)


def test_a_server_that_drains_ends_connections_with_their_answers() -> None:
    release = asyncio.Event()

    async def waiting(request: Request) -> Response:
        await release.wait()
        return text(200, "page ")

    async def test(bed: Bed) -> None:
        reader, writer = await bed.connect()
        writer.write(ASK)
        await bed.answering(1)
        draining = asyncio.ensure_future(bed.server.drain(20))
        await asyncio.sleep(0.05)
        assert not draining.done()
        with pytest.raises(OSError):
            await bed.connect()
        release.set()
        await draining
        answer = await ended(reader)
        assert answer.startswith(b"HTTP/1.1 200") and b"Connection: close" in answer
        writer.close()

    on_bed(test, patience=LONG, handler=waiting)


def test_a_socket_file_is_served_like_a_port(tmp_path: Path) -> None:
    async def run() -> None:
        server = Server({("GET", "/page"): page}, patience=IMPATIENT)
        await server.listen_unix(str(tmp_path / "socket"))
        try:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
            assert (await ask(reader, writer)).startswith(b"HTTP/1.1 200")
            assert await ended(reader) == b""
            writer.close()
        finally:
            await server.close()

    for loop in LOOPS.values():
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(asyncio.wait_for(run(), 20))
