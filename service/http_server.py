"""A small HTTP/1.1 server on h11: metrics, health and webhooks on TCP, an admin interface on a Unix
socket.

One request at a time on a connection. Bodies and headers are bounded in size and in time, idle
connections are closed, and connections are counted from the moment that they are accepted, so TLS
handshakes count too. A handler is a coroutine from `Request` to `Response`; a fault in one is
answered with 500, logged, and costs nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit

import h11
import msgspec

from service import addresses, unix

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
"""Enough for scrapers, probes and a few people; each may hold one answer of some MB."""
_MAX_HEADER_BYTES: Final = 16 << 10
"""Twice what common proxies let through."""
_ACCEPT_PAUSE_SECONDS: Final = 0.5
"""Between attempts to accept while the process or the system has no descriptor left. Chosen: the
listening socket stays readable, so without a pause the loop would spin. At twice the value clients
wait up to a second after descriptors are free again."""


Tls = ssl.SSLContext | Callable[[], ssl.SSLContext] | None
"""The TLS settings of a port; where they may change, a function that returns those for a new
connection. None: no TLS."""


class Patience(msgspec.Struct, frozen=True):
    """How many seconds a peer may take for each part of a connection before it is cut off."""

    handshake: float = 10.0
    """For TLS: several round trips of the slowest network, and the queue of a busy machine."""
    headers: float = 30.0
    """From accepting, or from the first byte of another request, to the end of the headers."""
    body: float = 30.0
    idle: float = 120.0
    """Between requests, and to take an answer. More than the 90 s after which Go's HTTP client
    closes an idle connection itself: a request never meets our closing."""
    linger: float = 3.0
    """For the rest of a refused request, which is read and dropped. Closing at once would reset the
    connection, and the peer would lose the answer that says why."""


_PATIENCE: Final = Patience()


class Peer(msgspec.Struct, frozen=True):
    """Who is connected. address: its IP address, "" on a Unix socket. certificate: what
    `ssl.SSLSocket.getpeercert` returns of a verified client certificate, empty without one."""

    address: str = ""
    certificate: Mapping[str, Any] = MappingProxyType({})


class Request(msgspec.Struct, frozen=True):
    """A whole request. `query` has the last value of each name.

    accept, authorization: these headers, or "".
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes
    accept: str = ""
    authorization: str = ""
    peer: Peer = Peer()


class Response(msgspec.Struct, frozen=True):
    """A whole response. headers: further ones, names and values in ASCII.

    pieces: the body in place of `body`, where it is too large to be made at once. A piece is asked
    for when the peer has taken most of those before. A fault in it cuts the connection, so that the
    peer does not take a part for the whole.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()
    pieces: AsyncIterator[bytes] | None = None


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

    def __init__(
        self,
        routes: Routes,
        *,
        max_body_bytes: int = 0,
        max_connections: int = MAX_CONNECTIONS,
        max_held_bytes: int | None = None,
        patience: Patience = _PATIENCE,
        otherwise: Handler | None = None,
    ) -> None:
        """max_held_bytes: of all bodies that are read or answered at once; None: of all places.
        otherwise: answers requests for paths without a route; None: 404."""
        self._routes = routes
        self._otherwise = otherwise
        self._max_body_bytes = max_body_bytes
        self._max_connections = max_connections
        self._max_held_bytes = (
            max_body_bytes * max_connections if max_held_bytes is None else max_held_bytes
        )
        self._held_bytes = 0
        self._patience = patience
        self._listeners: dict[socket.socket, asyncio.Task[None]] = {}
        self._handshakes: dict[asyncio.Task[None], None] = {}  # in the order of their beginning
        self.connections: dict[_Connection, None] = {}  # in the order of their beginning
        self.draining = False
        """Whether each answer ends its connection: clients connect again, to who stays."""

    async def listen_tcp(self, host: str, port: int, *, tls: Tls = None) -> None:
        """Serve on an address; OSError when it is taken. Hosts: see `addresses.listen`."""
        await self.listen_socket(addresses.listen(host, port), tls=tls)

    async def listen_socket(self, listener: socket.socket, *, tls: Tls = None) -> None:
        """Serve on a socket that listens already."""
        listener.setblocking(False)
        self._listeners[listener] = asyncio.ensure_future(self._accept(listener, tls))

    async def listen_unix(self, path: str) -> None:
        """Serve on a Unix socket that only its owner may use. A dead socket is replaced."""
        await self.listen_socket(unix.listen(path))

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The sockets that are listened on."""
        return tuple(self._listeners)

    def hold(self, count: int) -> bool:
        """Count bytes of a body that are kept in memory; False: there is no room for them."""
        if self._held_bytes + count > self._max_held_bytes:
            return False
        self._held_bytes += count
        return True

    def let_go(self, count: int) -> None:
        """Count bytes of a body that are kept no longer."""
        self._held_bytes -= count

    def _make_room(self) -> bool:
        """Return whether there is a place for another connection, where necessary by taking one.

        Peers that have asked nothing yet give way first, then idle ones, then those that do not
        take their answer, of each the oldest first: else a few that open connections and send or
        read nothing would keep a health check out.
        """
        if len(self.connections) + len(self._handshakes) < self._max_connections:
            return True
        if self._handshakes:
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]
            oldest.cancel()
            return True
        silent = [each for each in self.connections if each.waits_for_peer]
        if not silent:
            return False
        chosen = min(silent, key=lambda each: (each.has_asked, each.answer is not None))
        del self.connections[chosen]
        chosen.abort()
        return True

    async def drain(self, seconds: float) -> None:
        """Take no new connection, and wait at most so long for the answers that are due."""
        self.draining = True
        await self._close_listeners()
        due = [each.answer for each in self.connections if each.answer is not None]
        if due:
            await asyncio.wait(due, timeout=seconds)

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        await self._close_listeners()
        handshakes = tuple(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
        for connection in tuple(self.connections):
            connection.abort()

    async def _close_listeners(self) -> None:
        accepting = list(self._listeners.values())
        for task in accepting:
            task.cancel()
        await asyncio.gather(*accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket, tls: Tls) -> None:
        loop = asyncio.get_running_loop()
        reported = False
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                if not reported:
                    _LOG.error("connections cannot be accepted", extra={"reason": str(error)})
                reported = True
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            reported = False
            if not self._make_room():
                peer.close()
                continue
            settings = tls() if callable(tls) else tls
            opening = asyncio.ensure_future(self._open(peer, settings))
            self._handshakes[opening] = None
            opening.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _open(self, peer: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._patience.handshake if tls is not None else None
        try:
            await loop.connect_accepted_socket(
                self._connection, peer, ssl=tls, ssl_handshake_timeout=timeout
            )
        except (OSError, asyncio.CancelledError) as error:
            # The peer left, took too long, or speaks no TLS that we do: no news.
            _LOG.debug("a connection was not opened", extra={"reason": str(error)})
            peer.close()

    def _connection(self) -> _Connection:
        return _Connection(self, self._max_body_bytes, self._patience)

    def route(self, request: Request) -> Handler | None:
        """Return what answers a request; None: nothing does."""
        handler = self._routes.get((request.method, request.path))
        if handler is None and request.method == "HEAD":
            handler = self._routes.get(("GET", request.path))
        if handler is None and not self.knows(request.path):
            return self._otherwise
        return handler

    def knows(self, path: str) -> bool:
        """Return whether a path has a route, for some method."""
        return any(path == known for _, known in self._routes)


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server, max_body_bytes: int, patience: Patience) -> None:
        self._server = server
        self._peer = Peer()
        self._max_body_bytes = max_body_bytes
        self._patience = patience
        self._wire = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body = bytearray()
        self.answer: asyncio.Task[None] | None = None
        """What answers the request that is whole; None while there is none."""
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False
        """Whether the last request was answered and no byte of another one has come."""
        self._full = False
        """Whether the peer does not take what was written for it."""
        self._takes = asyncio.Event()
        """Set while it does."""
        self._takes.set()
        self._refused = False
        self.has_asked = False
        """Whether one request was whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        self._peer = Peer(
            address=address[0] if isinstance(address, tuple) else "",
            certificate=transport.get_extra_info("peercert") or {},
        )
        self._server.connections[self] = None
        self._cut_off_after(self._patience.headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self, None)
        self._cut_off_after(None)
        self._drop_body()
        if self.answer is not None:
            self.answer.cancel()

    def pause_writing(self) -> None:
        self._full = True
        self._takes.clear()

    def resume_writing(self) -> None:
        self._full = False
        self._takes.set()
        if self.answer is None:
            self._go_on()

    @property
    def waits_for_peer(self) -> bool:
        """Whether nothing happens until the peer sends something or takes what was written."""
        return self.answer is None or self._full

    @property
    def unread(self) -> bytes:
        """What was received and belongs to no request that is being read or answered."""
        return self._wire.trailing_data[0]

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._waiting and data:
            self._waiting = False
            self._cut_off_after(self._patience.headers)
        self._wire.receive_data(data)
        if self.answer is None and not self._full:
            self._go_on()
        elif len(self.unread) > _MAX_HEADER_BYTES and self._transport is not None:
            # Requests that were sent before the answer to this one wait in the kernel.
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer asks nothing more; what it asked already is still answered, except over TLS."""
        if self._refused:
            return False
        self.data_received(b"")
        return self._transport is not None and self._transport.can_write_eof()

    def _go_on(self) -> None:
        try:
            self._advance()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, str(error))

    def _advance(self) -> None:
        """Take events until the request is whole or bytes run out."""
        while self.answer is None:
            event = self._wire.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                if self._transport is not None:
                    self._transport.resume_reading()
                return
            if isinstance(event, h11.Request):
                self._head = event
                if _announced(event) > self._max_body_bytes:
                    self._refuse(413, f"a body of more than {self._max_body_bytes} bytes")
                    return
                self._cut_off_after(self._patience.body)
                if self._wire.they_are_waiting_for_100_continue:
                    self._send(h11.InformationalResponse(status_code=100, headers=[]))
            elif isinstance(event, h11.Data):
                if len(self._body) + len(event.data) > self._max_body_bytes:
                    self._refuse(413, f"a body of more than {self._max_body_bytes} bytes")
                    return
                if not self._server.hold(len(event.data)):
                    self._refuse(503, "too many large requests at once; try again")
                    return
                self._body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert self._head is not None
                try:
                    request = _request(self._head, self._body, self._peer)
                except ValueError as error:
                    self._refuse(400, f"the target of the request: {error}")
                    return
                self._cut_off_after(None)
                self.has_asked = True
                self.answer = asyncio.ensure_future(self._answer(request))
            elif isinstance(event, h11.ConnectionClosed):
                if self._transport is not None:
                    self._transport.close()
                return

    async def _answer(self, request: Request) -> None:
        handler = self._server.route(request)
        if handler is None:
            known = self._server.knows(request.path)
            response = text(405, "not that method") if known else text(404, "not found")
        else:
            try:
                response = await handler(request)
            except Exception:  # noqa: BLE001 - one request is isolated, and its fault logged
                _LOG.exception("request failed", extra={"path": request.path})
                response = text(500, "the request failed; the log says why")
        self._drop_body()
        whole = response.pieces is None or request.method == "HEAD"
        if not whole:
            await self._stream(response, request.path)
        self.answer = None
        if self._transport is None or self._transport.is_closing():
            return
        if whole:
            self._respond(response, body=request.method != "HEAD")
        if self._wire.our_state is h11.MUST_CLOSE or self._wire.their_state is h11.MUST_CLOSE:
            self._transport.close()
            self._cut_off_after(self._patience.idle)
            return
        self._wire.start_next_cycle()
        self._waiting = not self.unread
        self._cut_off_after(self._patience.idle if self._waiting else self._patience.headers)
        if not self._full:
            self._go_on()

    async def _stream(self, response: Response, path: str) -> None:
        """Send a response in pieces, as fast as the peer takes them."""
        if self._transport is None or self._transport.is_closing():
            return
        assert response.pieces is not None
        self._send_head(response)
        try:
            async for piece in response.pieces:
                self._send(h11.Data(data=piece))
                if self._full:
                    self._cut_off_after(self._patience.idle)
                    await self._takes.wait()
                    self._cut_off_after(None)
        except Exception:  # noqa: BLE001 - one request is isolated, and its fault logged
            _LOG.exception("an answer was cut off", extra={"path": path})
            self.abort()
            return
        self._send(h11.EndOfMessage())

    def _respond(self, response: Response, *, body: bool = True) -> None:
        self._send_head(response)
        if body:
            self._send(h11.Data(data=response.body))
        self._send(h11.EndOfMessage())

    def _send_head(self, response: Response) -> None:
        headers = [
            ("Content-Type", response.content_type),
            ("Cache-Control", "no-store"),
            *response.headers,
        ]
        if response.pieces is None:
            headers.append(("Content-Length", str(len(response.body))))
        if self._server.draining or self._refused:
            headers.append(("Connection", "close"))
        self._send(h11.Response(status_code=response.status, headers=headers))

    def _refuse(self, status: int, problem: str) -> None:
        """Say why, if that is still possible, and end the connection."""
        if self._transport is None or self._transport.is_closing():
            return
        self._refused = True
        self._drop_body()
        if self._wire.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._respond(text(status, problem))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._cut_off_after(self._patience.linger)

    def _drop_body(self) -> None:
        self._server.let_go(len(self._body))
        self._body.clear()

    def _send(self, event: h11.Event) -> None:
        data = self._wire.send(event)
        if data and self._transport is not None:
            self._transport.write(data)

    def _cut_off_after(self, seconds: float | None) -> None:
        """Abort the connection after so many seconds, None: never."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.abort)


def _announced(head: h11.Request) -> int:
    """Return the length that the headers announce; h11 has checked that it is a number."""
    return next((int(value) for name, value in head.headers if name == b"content-length"), 0)


def _request(head: h11.Request, body: bytearray, peer: Peer) -> Request:
    target = urlsplit(head.target.decode("ascii", "replace"))
    return Request(
        method=head.method.decode("ascii"),
        path=target.path,
        query=dict(parse_qsl(target.query, keep_blank_values=True, max_num_fields=32)),
        body=bytes(body),
        accept=_header(head, b"accept"),
        authorization=_header(head, b"authorization"),
        peer=peer,
    )


def _header(head: h11.Request, name: bytes) -> str:
    """Return the first value of a header, "" if there is none."""
    return next((v.decode("latin-1") for n, v in head.headers if n == name), "")
