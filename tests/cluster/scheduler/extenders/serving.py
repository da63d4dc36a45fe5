"""An extender for the tests: answers from functions, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Tree = dict[str, Any]


@dataclass
class Serving:
    """answers: verb -> function from the request's body to the answer's. open: while it is not set,
    no answer comes. cuts: whether connections are closed in place of an answer.
    asked: (verb, body) of each request."""

    answers: dict[str, Callable[[Tree], Any]]
    url: str = ""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    cuts: bool = False
    asked: list[tuple[str, Tree]] = field(default_factory=list)

    def bodies(self, verb: str) -> list[Tree]:
        return [body for asked, body in self.asked if asked == verb]

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        verb = request.path.rpartition("/")[2]
        self.asked.append((verb, body))
        await self.open.wait()
        if self.cuts and request.transport is not None:
            request.transport.abort()
        made = self.answers[verb](body)
        text = made if isinstance(made, str) else json.dumps(made)
        return web.Response(status=self.status, text=text, content_type="application/json")


@asynccontextmanager
async def serving(
    answers: dict[str, Callable[[Tree], Any]], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Serving]:
    """Run an extender on loopback until the block ends."""
    made = Serving(answers)
    made.open.set()
    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{tail:.*}", made.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        port = runner.addresses[0][1]
        made.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/extend"
        yield made
    finally:
        made.open.set()
        await runner.cleanup()
