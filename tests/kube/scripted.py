"""A scripted API server on loopback: each test says what it answers and when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from kube.client import Client
from kube.connection import Connection

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, reason: str, message: str = "", **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.Response(
        status=code,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers=headers,
    )


def answer(plain: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(plain), content_type="application/json")


def node(name: str, version: int, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version), "labels": labels}}


def listing(version: int, *items: dict[str, Any], more: str = "") -> web.Response:
    metadata = {"resourceVersion": str(version), "continue": more}
    return answer({"metadata": metadata, "items": list(items)})


async def stream(request: web.Request, *events: tuple[str, dict[str, Any]]) -> web.StreamResponse:
    """Answer a watch with `events`, in odd pieces, and end the stream."""
    response = web.StreamResponse()
    await response.prepare(request)
    text = b"".join(
        msgspec.json.encode({"type": kind, "object": obj}) + b"\n" for kind, obj in events
    )
    for start in range(0, len(text), 37):
        await response.write(text[start : start + 37])
        await asyncio.sleep(0)
    return response


@asynccontextmanager
async def api(handler: Answer, *, kind: type[Client] = Client) -> AsyncIterator[Client]:
    """Serve `handler` for every request and yield a client of it."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with kind(Connection(f"http://127.0.0.1:{port}")) as client:
            yield client
    finally:
        await runner.cleanup()
