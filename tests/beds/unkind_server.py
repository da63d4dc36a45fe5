"""A proxy before an API server that fails as networks and busy servers do.

Until `kind` is set, and by a seeded draw: requests are refused (409, 429, 500, 503) or delayed;
answers are lost after the server carried the request out; watches are cut in the middle of an
event. Single requests can be held for as long as a test needs.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from kube.connection import Connection
from tests.beds.apiserver import ApiServer, kubeconfig

_PASSED_ON = ("Authorization", "Content-Type", "Accept")
_REFUSALS = (429, 500, 429, 503)
_REFUSALS_OF_WRITES = (409, *_REFUSALS)
"""In turns, so that a handful of writes meets all of them."""
_LONGEST_DELAY_S = 0.3


class Held(enum.Enum):
    """Where a request waits."""

    BEFORE = "before the server gets it"
    AFTER = "after the server carried it out, before its answer"


@dataclass
class UnkindServer:
    """The proxy.

    share: the part of requests that fail. faults: how often each fault occurred; refusals also by
    status, as a text. holds: requests to hold, by method and path, until `release`; a client that
    goes ends the wait, and its request is never sent. held: those that arrived. carried_out: how
    many requests the server answered with a 2xx, by method and path.
    """

    connection: Connection
    token: str
    seed: int
    share: float
    kind: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    holds: dict[tuple[str, str], Held] = field(default_factory=dict)
    held: set[tuple[str, str]] = field(default_factory=set)
    carried_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self) -> None:
        """Let all requests go on, and hold no more."""
        self.holds.clear()
        self.released.set()

    def kubeconfig(self) -> str:
        """Return the text of a kubeconfig that leads here, as `admin`."""
        return kubeconfig({"server": self.connection.server}, "admin", self.token)


@asynccontextmanager
async def unkind(
    server: ApiServer, *, seed: int, share: float = 0.3
) -> AsyncIterator[UnkindServer]:
    """A proxy on loopback until the block ends."""
    draw = random.Random(seed)
    reads, writes = itertools.cycle(_REFUSALS), itertools.cycle(_REFUSALS_OF_WRITES)
    real = server.connection()
    connector = aiohttp.TCPConnector(ssl=real.tls or True, limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:

        async def answer(request: web.Request) -> web.StreamResponse:
            watches = request.query.get("watch", "") not in ("", "0", "false")
            about = (request.method, request.path)
            point = made.holds.get(about)
            if point is Held.BEFORE:
                made.held.add(about)
                await made.released.wait()
            fails = not made.kind and draw.random() < made.share
            if fails and not watches:
                fault = draw.choice(("refused", "refused", "lost", "late"))
                made.faults[fault] += 1
                if fault == "refused":
                    status = next(reads if request.method == "GET" else writes)
                    made.faults[str(status)] += 1
                    return _refusal(status)
                if fault == "late":
                    await asyncio.sleep(draw.uniform(0, _LONGEST_DELAY_S))
                if fault == "lost":
                    async with _forwarded(session, request) as reply:
                        await reply.read()
                        made.carried_out[about] += reply.ok
                    _cut(request)
                    return web.Response()
            async with _forwarded(session, request) as reply:
                made.carried_out[about] += reply.ok
                if point is Held.AFTER:
                    made.held.add(about)
                    await made.released.wait()
                if not watches:
                    return web.Response(
                        status=reply.status,
                        body=await reply.read(),
                        headers=_headers(reply),
                    )
                return await _watch(request, reply, made, draw)

        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        connection = Connection(f"http://{host}:{port}", None, real.authorization)
        made = UnkindServer(connection, server.tokens["admin"], seed, share)
        try:
            yield made
        finally:
            made.release()
            await runner.cleanup()


@asynccontextmanager
async def _forwarded(
    session: aiohttp.ClientSession, request: web.Request
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with session.request(
        request.method,
        request.rel_url,
        data=await request.read(),
        headers={name: request.headers[name] for name in _PASSED_ON if name in request.headers},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as reply:
        yield reply


async def _watch(
    request: web.Request, reply: aiohttp.ClientResponse, made: UnkindServer, draw: random.Random
) -> web.StreamResponse:
    """Pass a watch on, and cut it in the middle of an event now and then."""
    response = web.StreamResponse(status=reply.status, headers=_headers(reply))
    await response.prepare(request)
    with suppress(ConnectionResetError):
        async for chunk in reply.content.iter_any():
            if not made.kind and draw.random() < made.share / 5:
                made.faults["cut"] += 1
                await response.write(chunk[: len(chunk) // 2])
                _cut(request)
                break
            await response.write(chunk)
    return response


def _refusal(status: int) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    if status == 409:
        body["reason"] = "Conflict"
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response(body | {"message": "unkind"}, status=status, headers=headers)


def _headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {"Content-Type": reply.headers.get("Content-Type", "application/json")}


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
