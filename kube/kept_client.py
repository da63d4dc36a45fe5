"""A client for many small requests: bindings, patches, events.

It is a `Client` in every respect (errors, retries, credentials, streams); only single requests take
a shorter way, over connections of its own (`kube.http_connection`). A binding costs half of the CPU
time that it costs through aiohttp (84 instead of 169 us; `benchmarks/kube_writes.py`). What the
short way leaves out: redirections are errors, and answers are bounded at 16 MiB, so lists are read
in pages (`kube.pages`), which become smaller where one is too long. Where the environment names a
proxy for the API server, every request goes through aiohttp.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlencode, urlsplit

from kube.client import AnswerTooLong, Client, Unreachable, api_error, environment_proxy
from kube.connection import Connection, watch_socket
from kube.http_connection import Answer, HttpConnection, LongAnswer, LostAnswer

_CONNECT_SECONDS: Final = 10.0
"""For TCP and TLS together. Chosen: as `Client.stream` allows; a refusal is reported at once."""
_IDLE_SECONDS: Final = 60.0
"""How long an unused connection is kept. As aiohttp's in `Client`; kube-apiserver closes idle
connections after 90 s, and a request that crosses such a close would be lost."""
_LONGEST_SWEEP_SECONDS: Final = 1.0
"""Between two looks at time limits; they are late by so much. Chosen: a timer for each request
would cost more than the request's own code, and 1 s is little of the usual 30 s."""
_VISIBLE: Final = re.compile(r"[!-~]+")
"""A request's target: visible ASCII. Anything else could end its line."""
_HEADER_VALUE: Final = re.compile(r"[ -~]*")


class KeptClient(Client):
    """A client with at most `connections` kept connections for its requests.

    More requests than that wait in order. 16 is chosen: an API server that answers
    after 10 ms takes 1600 requests a second from 16, twice what it can write.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        user_agent: str = "koordinator",
        qps: float = 0,
        burst: int = 100,
        timeout_seconds: float = 30,
        connections: int = 16,
    ) -> None:
        super().__init__(
            connection,
            user_agent=user_agent,
            qps=qps,
            burst=burst,
            timeout_seconds=timeout_seconds,
        )
        self._most = connections
        self._pool: _Pool | None = None
        self._prefix = ""
        self._common = ""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        server = self._connection.server
        parts = urlsplit(server)
        self._prefix = parts.path.rstrip("/")
        self._common = (
            f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"User-Agent: {self._user_agent}\r\nAccept: application/json\r\n"
        )
        if environment_proxy(server) is None and parts.hostname:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            tls = self._connection.tls
            if tls is None and parts.scheme == "https":
                tls = _trusting()
            self._pool = _Pool(
                parts.hostname, port, tls, most=self._most, timeout_seconds=self._timeout_seconds
            )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        await super().__aexit__(kind, error, trace)

    async def _once(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        pool = self._pool
        if pool is None:
            return await super()._once(method, path, params, body, content_type)
        headers = await self._headers()
        what = f"{method} {path}"
        target = f"{self._prefix}{path}?{urlencode(params)}" if params else self._prefix + path
        if not _VISIBLE.fullmatch(target):
            raise Unreachable(f"{what}: the path has characters that HTTP forbids")
        fields = ""
        for name, value in headers.items():
            if not _HEADER_VALUE.fullmatch(value):
                raise Unreachable(f"{what}: {name} has characters that HTTP forbids")
            fields += f"{name}: {value}\r\n"
        if body:
            fields += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {target}{self._common}{fields}\r\n".encode()
        try:
            answer = await pool.exchange(head + body if body else head)
        except LongAnswer as error:
            raise AnswerTooLong(f"{what}: {error}") from error
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{what}: {type(error).__name__}: {error}") from error
        self.counts.answered(method, answer.status)
        if answer.status >= 300:
            raise api_error(answer.status, answer.phrase, answer.retry_after, answer.body, what)
        return answer.body


def _trusting() -> ssl.SSLContext:
    """Return TLS settings without verification, as `Client` does where a connection names none."""
    tls = ssl.create_default_context()
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    return tls


class _Pool:
    """Kept connections to one address."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        most: int,
        timeout_seconds: float,
    ) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._most = most
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._all: set[HttpConnection] = set()
        self._connecting = 0
        self._idle: list[HttpConnection] = []
        self._waiting: deque[tuple[float, asyncio.Future[HttpConnection | None]]] = deque()
        self._sweep_seconds = min(_LONGEST_SWEEP_SECONDS, timeout_seconds / 4)
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def exchange(self, request: bytes) -> Answer:
        """Send a request over a free connection. Raises OSError or TimeoutError."""
        deadline = self._loop.time() + self._timeout_seconds
        connection = await self._take(deadline)
        connection.deadline = deadline
        try:
            return await connection.exchange(request)
        finally:
            self._release(connection)

    async def _take(self, deadline: float) -> HttpConnection:
        while True:
            if self._closed:
                raise LostAnswer("the client is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.usable:
                    return connection
            if len(self._all) + self._connecting < self._most:
                return await self._connect(deadline)
            waiter: asyncio.Future[HttpConnection | None] = self._loop.create_future()
            self._waiting.append((deadline, waiter))
            self._watch_time()
            try:
                offered = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._offer(waiter.result())
                raise
            if offered is not None and offered.usable:
                return offered

    async def _connect(self, deadline: float) -> HttpConnection:
        self._connecting += 1
        try:
            seconds = min(_CONNECT_SECONDS, deadline - self._loop.time())
            try:
                async with asyncio.timeout(seconds):
                    transport, connection = await self._loop.create_connection(
                        lambda: HttpConnection(self._lost),
                        self._host,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls is not None else None,
                    )
            except TimeoutError:
                raise TimeoutError(f"no connection within {seconds:.0f} s") from None
        except BaseException:
            self._connecting -= 1
            self._offer(None)
            raise
        self._connecting -= 1
        if self._closed or not connection.usable:
            connection.close()
            self._offer(None)
            raise LostAnswer("the connection was closed while it was opened")
        watch_socket(transport.get_extra_info("socket"))
        self._all.add(connection)
        self._watch_time()
        return connection

    def _release(self, connection: HttpConnection) -> None:
        if connection.usable and not self._closed:
            self._offer(connection)

    def _offer(self, connection: HttpConnection | None) -> None:
        """Give a free connection, or with None the right to open one, to who waits longest."""
        while self._waiting:
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if connection is not None:
            connection.idle_since = self._loop.time()
            self._idle.append(connection)

    def _lost(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._offer(None)

    def _watch_time(self) -> None:
        if self._sweeping is None and not self._closed:
            self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)

    def _sweep(self) -> None:
        """End what is past its time limit, and connections that were not used for long."""
        self._sweeping = None
        now = self._loop.time()
        for connection in list(self._all):
            if connection.busy and connection.deadline < now:
                connection.break_off(f"no answer within {self._timeout_seconds:g} s")
        for connection in [c for c in self._idle if now - c.idle_since > _IDLE_SECONDS]:
            self._idle.remove(connection)
            connection.close()
        for deadline, waiter in self._waiting:
            if deadline < now and not waiter.done():
                waiter.set_exception(
                    TimeoutError(f"no free connection within {self._timeout_seconds:g} s")
                )
        if self._all or self._waiting:
            self._watch_time()

    def close(self) -> None:
        """End all connections; requests that wait fail."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._all):
            if connection.busy:
                connection.break_off("the client is closed")
            else:
                connection.close()
        while self._waiting:
            _, waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(LostAnswer("the client is closed"))
