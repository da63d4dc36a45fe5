"""Kept connections: reuse, bounds, time limits, and answers that are broken on purpose."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop

from kube import http_connection, kept_client
from kube.client import ApiError, Unreachable
from kube.connection import Connection, token_connection
from kube.kept_client import KeptClient
from tests.beds.apiserver import eventually

OnLoop = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> OnLoop:
    """Run a test on each event loop: their transports differ."""

    def run(test: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(test)

    return run


Reply = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
"""What a server does with one request: its head and body, and where to write."""


@dataclass
class RawServer:
    """A server of bytes on loopback, which answers as a test says."""

    reply: Reply
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                request = head + (await reader.readexactly(int(length[1])) if length else b"")
                self.requests.append(request)
                await self.reply(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    def client(self, *, timeout_seconds: float = 20, connections: int = 4) -> KeptClient:
        return KeptClient(
            Connection(f"http://127.0.0.1:{self.port}"),
            timeout_seconds=timeout_seconds,
            connections=connections,
        )


@asynccontextmanager
async def raw_server(reply: Reply) -> AsyncIterator[RawServer]:
    bed = RawServer(reply)
    server = await asyncio.start_server(bed.handle, "127.0.0.1", 0, limit=1 << 20)
    bed.port = server.sockets[0].getsockname()[1]
    try:
        yield bed
    finally:
        server.close()


def said(*pieces: bytes, close: bool = False) -> Reply:
    """Answer each request with `pieces`, written one by one."""

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            raise ConnectionResetError

    return reply


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_request_is_one_that_any_server_understands(on_loop: OnLoop) -> None:
    async def run() -> None:
        async with raw_server(said(OK)) as server:
            connection = token_connection(f"http://127.0.0.1:{server.port}/prefix", token="t")
            async with KeptClient(connection, user_agent="me") as client:
                await client.request("POST", "/x", body=b"body", params={"a": "b c", "d": "é"})
                await client.request("GET", "/y")
            port = b"%d" % server.port
            assert server.requests == [
                b"POST /prefix/x?a=b+c&d=%C3%A9 HTTP/1.1\r\nHost: 127.0.0.1:" + port + b"\r\n"
                b"User-Agent: me\r\nAccept: application/json\r\nAuthorization: Bearer t\r\n"
                b"Content-Type: application/json\r\nContent-Length: 4\r\n\r\nbody",
                b"GET /prefix/y HTTP/1.1\r\nHost: 127.0.0.1:" + port + b"\r\n"
                b"User-Agent: me\r\nAccept: application/json\r\nAuthorization: Bearer t\r\n\r\n",
            ]

    on_loop(run())


def test_requests_are_counted_by_their_answers(on_loop: OnLoop) -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"/gone" in request:
            raise ConnectionResetError
        status = b"404 Not Found" if b"/none" in request else b"201 Created"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")

    async def run() -> None:
        async with raw_server(reply) as server, server.client() as client:
            await client.request("POST", "/x", body=b"12345")
            with pytest.raises(ApiError):
                await client.request("GET", "/none")
            with pytest.raises(Unreachable):
                await client.request("POST", "/gone", tries=1)
            counts = client.counts
            assert counts.host == f"127.0.0.1:{server.port}"
            assert counts.answers == {
                ("POST", "201"): 1, ("GET", "404"): 1, ("POST", "<error>"): 1,
            }  # fmt: skip
            posts = counts.verb("POST")
            assert (posts.sent.sum, posts.sent.count) == (5, 2)
            assert (posts.received.sum, posts.received.count) == (2, 1)
            assert posts.duration.count == posts.limited.count == 2
            assert client.sibling().counts is counts

    on_loop(run())


def test_connections_are_kept_and_never_more_than_allowed(on_loop: OnLoop) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.001)
        writer.write(OK)

    async def run() -> None:
        async with raw_server(reply) as server, server.client(connections=3) as client:
            answers = await asyncio.gather(*(client.request("GET", f"/{n}") for n in range(60)))
            assert answers == [b"{}"] * 60
            assert server.connections == 3
            assert len(server.requests) == 60

    on_loop(run())


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        ([OK], b"{}"),
        ([OK[i : i + 1] for i in range(len(OK))], b"{}"),
        (
            [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
                b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nRetry-After: 9\r\n\r\n",
            ],
            b"abcde",
        ),
        ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: a\r\n\r\n", OK], b"{}"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b""),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
    ],
)
def test_every_framing_of_an_answer_is_read_and_the_connection_kept(
    on_loop: OnLoop, pieces: list[bytes], body: bytes
) -> None:
    async def run() -> None:
        async with raw_server(said(*pieces)) as server, server.client() as client:
            for _ in range(3):
                assert await client.request("POST", "/x", body=b"{}") == body
            assert server.connections == 1

    on_loop(run())


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.0 200 OK\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\n\r\n", b"{", b"}"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"],
    ],
)
def test_an_answer_that_ends_its_connection_is_whole(on_loop: OnLoop, pieces: list[bytes]) -> None:
    async def run() -> None:
        async with raw_server(said(*pieces, close=True)) as server, server.client() as client:
            for _ in range(2):
                assert await client.request("POST", "/x", body=b"{}") == b"{}"
            assert server.connections == 2

    on_loop(run())


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([HEAD + b"Content-Length: 10\r\n\r\n{}"], "closed before"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"], "closed before"),
        ([HEAD + b"Content-Le"], "closed before"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n"], "closed before"),
        ([], "closed before"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP/1.1"),
        ([HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"], "not HTTP/1.1"),
        ([HEAD + b"Content-Length: -1\r\n\r\n{}"], "not HTTP/1.1"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n"], "not HTTP/1.1"),
        ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], "not HTTP/1.1"),
        ([OK + OK], "more than one answer"),
    ],
)
def test_a_broken_answer_is_unreachable_and_the_next_request_is_not_harmed(
    on_loop: OnLoop, pieces: list[bytes], why: str
) -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        broken = request.startswith(b"POST /broken")
        await (said(*pieces, close=True) if broken else said(OK))(request, writer)

    async def run() -> None:
        async with raw_server(reply) as server, server.client() as client:
            with pytest.raises(Unreachable, match=f"POST /broken: LostAnswer: .*{why}"):
                await client.request("POST", "/broken", body=b"{}")
            assert await client.request("POST", "/fine", body=b"{}") == b"{}"
            assert len(server.requests) == 2

    on_loop(run())


@pytest.mark.parametrize(
    ("start", "again"),
    [
        (HEAD, b"X: " + b"y" * 4000 + b"\r\n"),
        (HEAD + b"X: ", b"y" * 4000),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;", b"e" * 4000),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: " + b"y" * 4000 + b"\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        (HEAD + b"Content-Length: 99999999\r\n\r\n", b"x" * 4000),
        (HEAD + b"\r\n", b"x" * 4000),
    ],
)
def test_an_endless_answer_is_cut_off(
    on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch, start: bytes, again: bytes
) -> None:
    monkeypatch.setattr(http_connection, "_LONGEST_ANSWER", 200_000)
    sent = 0

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(start)
        while sent < 50_000_000:
            writer.write(again)
            sent += len(again)
            await writer.drain()

    async def run() -> None:
        async with raw_server(reply) as server, server.client() as client:
            with pytest.raises(Unreachable, match=r"too long|not HTTP/1\.1"):
                await client.request("POST", "/x", body=b"{}")
            await eventually(lambda: server.open == 0)

    on_loop(run())
    assert sent < 50_000_000


@pytest.mark.parametrize(
    "pieces",
    [[], [HEAD], [HEAD + b"Content-Length: 5\r\n\r\n", b"{}"]],
)
def test_a_silent_server_is_left_after_the_time_limit(on_loop: OnLoop, pieces: list[bytes]) -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        await said(*pieces)(request, writer)
        await asyncio.sleep(60)

    async def run() -> None:
        async with raw_server(reply) as server:
            client = server.client(timeout_seconds=0.2, connections=1)
            async with client:
                # The second waits for the only connection.
                first, second = await asyncio.gather(
                    client.request("POST", "/1", body=b"{}"),
                    client.request("POST", "/2", body=b"{}"),
                    return_exceptions=True,
                )
            assert isinstance(first, Unreachable)
            assert "no answer within 0.2 s" in str(first)
            assert isinstance(second, Unreachable)

    on_loop(run())


def test_a_slow_drip_does_not_extend_the_time_limit(on_loop: OnLoop) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        for _step in range(100_000):
            writer.write(b"x")
            await asyncio.sleep(0.01)

    async def run() -> None:
        async with raw_server(reply) as server:
            client = server.client(timeout_seconds=0.2)
            async with client:
                with pytest.raises(Unreachable, match="no answer within"):
                    await client.request("POST", "/x", body=b"{}")

    on_loop(run())


def test_a_refused_connection_is_unreachable(on_loop: OnLoop) -> None:
    async def run() -> None:
        async with raw_server(said(OK)) as server:
            pass
        async with server.client() as client:
            for _ in range(6):
                with pytest.raises(Unreachable):
                    await client.request("POST", "/x", body=b"{}")

    on_loop(run())


def test_a_cancelled_requests_answer_is_not_the_next_ones(on_loop: OnLoop) -> None:
    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        path = request.split()[1]
        if path == b"/slow":
            await asyncio.sleep(0.05)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(path), path))

    async def run() -> None:
        async with raw_server(reply) as server, server.client(connections=1) as client:
            slow = asyncio.create_task(client.request("GET", "/slow"))
            await eventually(lambda: server.requests, every=0.001)
            # Waits for the connection that the cancelled request gives up.
            fast = asyncio.create_task(client.request("GET", "/fast"))
            gone = asyncio.create_task(client.request("GET", "/gone"))
            await asyncio.sleep(0)
            slow.cancel()
            gone.cancel()
            assert await fast == b"/fast"
            assert await client.request("GET", "/next") == b"/next"

    on_loop(run())


def test_a_connection_that_the_server_closed_while_idle_is_replaced(on_loop: OnLoop) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(OK)

    async def run() -> None:
        async with raw_server(reply) as server, server.client() as client:
            await client.request("POST", "/1", body=b"{}")
            writers[0].close()
            await eventually(lambda: server.open == 0)
            await asyncio.sleep(0)
            await client.request("POST", "/2", body=b"{}")
            assert server.connections == 2

    on_loop(run())


def test_connections_that_are_not_used_are_closed_in_time(
    on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_client, "_IDLE_SECONDS", 0.1)

    answered = said(OK)

    async def run() -> None:
        all_there = asyncio.Event()

        async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
            # An answer before that would free its connection for another request.
            if len(server.requests) == 4:
                all_there.set()
            await all_there.wait()
            await answered(request, writer)

        async with raw_server(reply) as server, server.client(timeout_seconds=2) as client:
            await asyncio.gather(*(client.request("GET", f"/{n}") for n in range(4)))
            assert server.connections == 4
            await eventually(lambda: server.open == 0)
            await client.request("GET", "/again")
            assert server.connections == 5

    on_loop(run())


def test_bytes_that_no_request_asked_for_end_the_connection(on_loop: OnLoop) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")

    async def run() -> None:
        async with raw_server(reply) as server, server.client() as client:
            assert await client.request("GET", "/1") == b"{}"
            await eventually(lambda: server.open == 0)
            assert await client.request("GET", "/2") == b"{}"

    on_loop(run())


def test_refused_credentials_are_renewed_once(on_loop: OnLoop) -> None:
    tokens = iter(["old", "new", "newer", "newest"])

    async def reply(request: bytes, writer: asyncio.StreamWriter) -> None:
        refused = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
        writer.write(OK if b"Bearer new\r\n" in request else refused)

    async def run() -> None:
        async with raw_server(reply) as server:
            connection = Connection(
                f"http://127.0.0.1:{server.port}", None, lambda: f"Bearer {next(tokens)}"
            )
            async with KeptClient(connection) as client:
                assert await client.request("POST", "/x", body=b"{}") == b"{}"
                connection.forget_credentials()
                with pytest.raises(ApiError) as caught:
                    await client.request("POST", "/x", body=b"{}", tries=1)
            assert caught.value.status == 401

    on_loop(run())


def test_what_would_end_a_line_is_not_sent(on_loop: OnLoop) -> None:
    async def run() -> None:
        async with raw_server(said(OK)) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with KeptClient(token_connection(url, token="a\r\nX: y")) as client:
                with pytest.raises(Unreachable, match="Authorization has characters"):
                    await client.request("GET", "/x")
            async with server.client() as client:
                with pytest.raises(Unreachable, match="the path has characters"):
                    await client.request("GET", "/x HTTP/1.1\r\nX: y", tries=1)
            assert server.requests == []

    on_loop(run())


def test_an_environment_with_a_proxy_is_obeyed(
    on_loop: OnLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with raw_server(said(OK)) as proxy:
            monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
            monkeypatch.setenv("no_proxy", "")
            async with KeptClient(Connection("http://api.example.test")) as client:
                assert await client.request("GET", "/x") == b"{}"
            assert proxy.requests[0].startswith(b"GET http://api.example.test/x HTTP/1.1\r\n")

    on_loop(run())


def test_closing_the_client_ends_what_waits(on_loop: OnLoop) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        async with raw_server(reply) as server:
            async with server.client(connections=1) as client:
                waiting = [
                    asyncio.create_task(client.request("POST", "/x", body=b"{}")) for _ in range(2)
                ]
                await eventually(lambda: server.requests, every=0.001)
            for one in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(one, Unreachable)

    on_loop(run())
