"""A small HTTP/1.1 server on h11: metrics and health on TCP, an admin interface on a Unix socket.

One request at a time on a connection, bodies and headers bounded, slow and idle peers cut off,
connections counted. A handler is a coroutine from `Request` to `Response`; a fault in one is
answered with 500, logged, and costs nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, cast
from urllib.parse import parse_qsl, urlsplit

import h11
import msgspec

from service import unix

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
_MAX_HEADER_BYTES: Final = 16 << 10
_REQUEST_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 60.0


class Request(msgspec.Struct, frozen=True):
    """A whole request. `query` has the last value of each name."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes


class Response(msgspec.Struct, frozen=True):
    """A whole response."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Handler = Callable[[Request], Awaitable[Response]]
Routes = Mapping[tuple[str, str], Handler]
"""(method, path) -> handler."""


def text(status: int, message: str) -> Response:
    """Return a plain text response."""
    return Response(status, message.encode() + b"\n")


def json(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(status, msgspec.json.encode(value), "application/json")


class Server:
    """The listening sockets of one set of routes."""

    def __init__(self, routes: Routes, *, max_body_bytes: int = 0) -> None:
        self._routes = routes
        self._max_body_bytes = max_body_bytes
        self._servers: list[asyncio.Server] = []
        self.connections: dict[_Connection, None] = {}  # a set that knows who came first

    async def listen_tcp(self, host: str, port: int) -> None:
        """Serve on an address; OSError when it is taken. An empty host: all interfaces."""
        loop = asyncio.get_running_loop()
        made = await loop.create_server(
            self._connection, host or None, port, reuse_address=True, backlog=64
        )
        self._servers.append(made)

    async def listen_socket(self, listener: socket.socket) -> None:
        """Serve on a socket that listens already, on TCP."""
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_server(self._connection, sock=listener))

    async def listen_unix(self, path: str) -> None:
        """Serve on a Unix socket that only its owner may use. A dead socket is replaced."""
        listener = unix.listen(path)
        loop = asyncio.get_running_loop()
        self._servers.append(await loop.create_unix_server(self._connection, sock=listener))

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets that are listened on."""
        return tuple(each for server in self._servers for each in server.sockets)

    def make_room(self) -> bool:
        """Let go whoever has asked nothing for longest, where all places are taken.

        Else a few peers that open connections and say nothing would keep a health check out.
        """
        if len(self.connections) < MAX_CONNECTIONS:
            return True
        silent = next((each for each in self.connections if not each.answering), None)
        if silent is None:
            return False
        del self.connections[silent]
        silent.abort()
        return True

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        for server in self._servers:
            server.close()
        for connection in tuple(self.connections):
            connection.abort()
        self._servers.clear()

    def _connection(self) -> _Connection:
        return _Connection(self, self._routes, self._max_body_bytes)


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server, routes: Routes, max_body_bytes: int) -> None:
        self._server = server
        self._routes = routes
        self._max_body_bytes = max_body_bytes
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.make_room():
            self._transport.abort()
            return
        self._server.connections[self] = None
        self._patience(_REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self, None)
        self._patience(None)
        if self._task is not None:
            self._task.cancel()

    @property
    def answering(self) -> bool:
        return self._task is not None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._wire.receive_data(data)
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, str(error))

    def eof_received(self) -> bool:
        """The peer asks nothing more; what it asked already is still answered."""
        self.data_received(b"")
        return True

    def _advance(self) -> None:
        """Take events until the request is whole or bytes run out."""
        while self._task is None:
            event = self._wire.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if isinstance(event, h11.Request):
                self._head = event
                self._body.clear()
                self._patience(_REQUEST_SECONDS)
                if self._wire.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
            elif isinstance(event, h11.Data):
                if len(self._body) + len(event.data) > self._max_body_bytes:
                    self._refuse(413, "the request's body is too large")
                    return
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert self._head is not None
                self._patience(None)
                self._task = asyncio.ensure_future(self._answer(_request(self._head, self._body)))
            elif isinstance(event, h11.ConnectionClosed):
                if self._transport is not None:
                    self._transport.close()
                return

    async def _answer(self, request: Request) -> None:
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.method == "HEAD":
            handler = self._routes.get(("GET", request.path))
        if handler is None:
            known = any(path == request.path for _, path in self._routes)
            response = text(405, "not that method") if known else text(404, "not found")
        else:
            try:
                response = await handler(request)
            except Exception:  # noqa: BLE001 - one request is isolated, and its fault logged
                _LOG.exception("request failed", extra={"path": request.path})
                response = text(500, "the request failed; the log says why")
        self._task = None
        if self._transport is None or self._transport.is_closing():
            return
        self._respond(response, body=request.method != "HEAD")
        if self._wire.our_state is h11.MUST_CLOSE or self._wire.their_state is h11.MUST_CLOSE:
            self._transport.close()
            return
        self._wire.start_next_cycle()
        self._patience(_IDLE_SECONDS)
        try:
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, str(error))

    def _respond(self, response: Response, *, body: bool = True) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
        ]
        self._send(h11.Response(status_code=response.status, headers=headers))
        if body:
            self._send(h11.Data(data=response.body))
        self._send(h11.EndOfMessage())

    def _refuse(self, status: int, problem: str) -> None:
        """Say why, if that is still possible, and end the connection."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._wire.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._respond(text(status, problem))
        self._transport.close()

    def _send(self, event: h11.Event) -> None:
        data = self._wire.send(event)
        if data and self._transport is not None:
            self._transport.write(data)

    def _patience(self, seconds: float | None) -> None:
        """Cut the peer off if it is silent for so long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)


def _request(head: h11.Request, body: bytearray) -> Request:
    target = urlsplit(head.target.decode("ascii", "replace"))
    return Request(
        method=head.method.decode("ascii"),
        path=target.path,
        query=dict(parse_qsl(target.query, max_num_fields=32)),
        body=bytes(body),
    )
