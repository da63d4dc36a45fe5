"""A scripted API server: it lists what it has, sends watchers each change, and refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

PLURALS = ("nodeslos", "nodes", "noderesourcetopologies", "devices")


class Server:
    """A server that lists what it has, and sends watchers what `put` and `delete` change."""

    def __init__(self, *further: str) -> None:
        """further: plurals of kinds beside the usual ones."""
        plurals = (*PLURALS, *further)
        self.stored: dict[str, dict[str, Any]] = {plural: {} for plural in plurals}
        self.watchers: dict[str, set[asyncio.Queue[bytes | None]]] = {p: set() for p in plurals}
        self.requests: list[str] = []
        self.refusal = 0
        self.forbidden: set[str] = set()
        self.url = ""

    def put(self, plural: str, tree: dict[str, Any]) -> None:
        name = tree["metadata"]["name"]
        kind = "MODIFIED" if name in self.stored[plural] else "ADDED"
        self.stored[plural][name] = tree
        self._tell(plural, kind, tree)

    def delete(self, plural: str, name: str) -> None:
        self._tell(plural, "DELETED", self.stored[plural].pop(name))

    def _tell(self, plural: str, kind: str, tree: dict[str, Any]) -> None:
        for watcher in self.watchers[plural]:
            watcher.put_nowait(json.dumps({"type": kind, "object": tree}).encode() + b"\n")

    def hang_up(self) -> None:
        for watchers in self.watchers.values():
            for watcher in watchers:
                watcher.put_nowait(None)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        plural = request.path.rpartition("/")[2]
        self.requests.append(f"{plural} {request.query.get('fieldSelector')}")
        if self.refusal:
            return web.Response(status=self.refusal, body=b'{"kind":"Status","message":"not now"}')
        if plural in self.forbidden:
            refusal = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no right"}
            return web.json_response(refusal, status=403)
        if "watch" not in request.query:
            items = list(self.stored[plural].values())
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.watchers[plural].add(queue)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while (line := await queue.get()) is not None:
                await response.write(line)
        finally:
            self.watchers[plural].discard(queue)
        return response


@asynccontextmanager
async def serving(*further: str) -> AsyncIterator[Server]:
    server = Server(*further)
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.hang_up()
        await runner.cleanup()
