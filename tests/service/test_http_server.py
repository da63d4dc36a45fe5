"""The small HTTP server: hostile and slow peers included."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from service.http_server import MAX_CONNECTIONS, Request, Response, Server, json, text
from tests.beds.apiserver import eventually


async def echo(request: Request) -> Response:
    return json({"body": request.body.decode(), "query": dict(request.query)})


async def broken(request: Request) -> Response:
    raise RuntimeError("secret detail")


PIECE = b"x" * 50_000
MANY = 400
made: list[int] = []
"""The pieces of the last answer of /pieces."""


async def pieces(request: Request) -> Response:
    """Answer with `MANY` pieces, or fail in the middle where the request asks for that."""

    async def produce() -> AsyncIterator[bytes]:
        made.clear()
        for number in range(MANY):
            if number == 2 and request.query.get("fails"):
                raise RuntimeError("secret detail")
            made.append(number)
            yield PIECE

    return Response(200, b"", pieces=produce())


ROUTES = {
    ("POST", "/echo"): echo, ("GET", "/echo"): echo, ("GET", "/broken"): broken,
    ("GET", "/pieces"): pieces,
}  # fmt: skip


def serve(test: Callable[[int, Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server(ROUTES, max_body_bytes=100)
        await server.listen_tcp("127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(test(port, server), 10)
        finally:
            await server.close()

    asyncio.run(run())


async def talk(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /echo?a=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"GET /no HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"PUT /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /broken HTTP/1.1\r\nHost: x\r\n\r\n", b"500"),
        (b"rubbish\r\n\r\n", b"400"),
        (b"GET /echo HTTP/1.1\r\n\r\n", b"400"),
        (b"GET //[ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /echo?" + b"a=1&" * 40 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 20_000, b"431"),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, b"413"),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 101\r\n\r\n", b"413"),
        (
            b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"32\r\n%s\r\n" % (b"x" * 50) * 3,
            b"413",
        ),
    ],
)
def test_each_request_gets_its_status(data: bytes, status: bytes) -> None:
    async def test(port: int, server: Server) -> None:
        answer = await talk(port, data)
        assert answer.split(b" ")[1] == status
        assert b"secret detail" not in answer

    serve(test)


def test_requests_follow_each_other_on_one_connection() -> None:
    async def test(port: int, server: Server) -> None:
        one = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
        answer = await talk(port, one * 3)
        assert answer.count(b"HTTP/1.1 200") == 3
        assert answer.count(b'"body":"hi"') == 3

    serve(test)


def test_a_request_may_come_byte_by_byte() -> None:
    async def test(port: int, server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()

    serve(test)


def test_a_peer_that_goes_away_leaves_nothing_behind() -> None:
    async def test(port: int, server: Server) -> None:
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /echo HTTP/1.1\r\n")
            writer.transport.abort()
        await asyncio.sleep(0.05)
        assert not server.connections

    serve(test)


def test_connections_are_counted() -> None:
    async def test(port: int, server: Server) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(70)]
        await asyncio.sleep(0.1)
        assert len(server.connections) == 64
        for _, writer in opened:
            writer.close()

    serve(test)


def test_silent_peers_keep_no_client_out() -> None:
    async def test(port: int, server: Server) -> None:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        for _, writer in opened:
            writer.write(b"GET /echo HTTP/1.1\r\n")
        await asyncio.sleep(0.1)
        request = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await talk(port, request)).startswith(b"HTTP/1.1 200")
        # It took the place of the one that was silent for longest.
        assert await opened[0][0].read() == b""
        assert not opened[1][0].at_eof()
        for _, writer in opened:
            writer.close()

    serve(test)


def test_peers_that_do_not_take_their_answers_keep_no_client_out() -> None:
    async def test() -> None:
        server = Server(ROUTES, max_connections=2)
        await server.listen_tcp("127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for peer in peers:
            peer.sendall(b"GET /pieces HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: [each.has_asked for each in server.connections] == [True, True])
        oldest, other = server.connections
        answer = b""
        # Until the buffers between the two are full, the server has something to do for them.
        while not answer:
            with suppress(OSError):
                answer = await talk(port, b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert oldest not in server.connections
        assert other in server.connections
        for peer in peers:
            peer.close()
        await server.close()

    asyncio.run(asyncio.wait_for(test(), 10))


def test_a_socket_that_listens_already_is_served() -> None:
    async def run() -> None:
        server = Server(ROUTES)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await server.listen_socket(listener)
            request = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = await talk(listener.getsockname()[1], request)
            await server.close()
        assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(run())


def test_a_text_ends_with_a_line_end() -> None:
    assert text(200, "ok").body == b"ok\n"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_an_answer_in_pieces_arrives_whole(version: str) -> None:
    async def test(port: int, _: Server) -> None:
        asked = f"GET /pieces HTTP/{version}\r\nHost: x\r\n\r\n".encode()
        another = b"GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await talk(port, asked + (another if version == "1.1" else b""))
        assert answer.count(PIECE) == MANY
        assert b"Content-Length: " not in answer.partition(PIECE)[0]
        # The next request of the connection is answered after it.
        assert answer.rpartition(PIECE)[2].count(b"HTTP/1.1 200") == (version == "1.1")

    serve(test)


def test_pieces_are_made_as_the_peer_takes_them() -> None:
    async def test(port: int, _: Server) -> None:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 10_000)
        peer.connect(("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=peer, limit=1000)
        writer.write(b"GET /pieces HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await reader.readline()
        before = -1
        while before != len(made):
            before = len(made)
            await asyncio.sleep(0.2)
        # 20 MB would be the whole: the rest is not made yet.
        assert 0 < len(made) < MANY
        answer = await reader.read()
        assert answer.count(b"x") >= MANY * len(PIECE)
        writer.close()

    serve(test)


def test_a_fault_in_a_piece_does_not_look_like_the_end() -> None:
    async def test(port: int, _: Server) -> None:
        loop = asyncio.get_running_loop()
        answer = bytearray()
        with socket.create_connection(("127.0.0.1", port)) as peer, suppress(ConnectionResetError):
            peer.setblocking(False)
            await loop.sock_sendall(peer, b"GET /pieces?fails=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            # Streams drop what came before a reset.
            while received := await loop.sock_recv(peer, 1 << 16):
                answer += received
        assert answer.startswith(b"HTTP/1.1 200")
        # What ends a body in chunks.
        assert not answer.endswith(b"0\r\n\r\n")
        assert made == [0, 1]

    serve(test)


def test_the_head_of_an_answer_in_pieces_makes_none() -> None:
    async def test(port: int, _: Server) -> None:
        made.clear()
        answer = await talk(port, b"HEAD /pieces HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert PIECE not in answer
        assert made == []

    serve(test)
