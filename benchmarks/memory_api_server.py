"""A stand-in for an API server, in a process of its own: lists, watches and patches in memory.

A request costs about a tenth of what it costs kube-apiserver and etcd, so that on a small machine
the manager is measured, not they. It checks nothing: no types, no rights, no conflicts.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from kube.client import ApiError
from tests.cluster.fake_api import FakeApi


class _Server(FakeApi):
    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, list[tuple[int, str, bytes]]] = defaultdict(list)
        """By plural: (version, path, line of a watch)."""
        self._watchers: dict[str, dict[asyncio.Event, None]] = defaultdict(dict)

    def _change(self, kind: str, path: str, plain: dict[str, Any]) -> None:
        plural = path.split("/")[-2]
        version = int(plain["metadata"]["resourceVersion"])
        line = msgspec.json.encode({"type": kind, "object": plain}) + b"\n"
        self._lines[plural].append((version, path, line))
        for watcher in self._watchers[plural]:
            watcher.set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "GET" and not self._names_an_object(path):
            if request.query.get("watch") == "1":
                return await self._watch(request)
            return self._list(path)
        try:
            data = await request.read() if request.can_read_body else None
            found = await self.handle(request.method, path, data)
        except ApiError as error:
            body = {"kind": "Status", "code": error.status, "reason": error.reason}
            return _json(body, status=error.status)
        self.writes.clear()
        return _json(found)

    def _names_an_object(self, path: str) -> bool:
        parts = path.split("/")
        start = 3 if parts[1] == "api" else 4  # /api/v1/..., /apis/GROUP/VERSION/...
        rest = parts[start:]
        return len(rest) != 1 and not (len(rest) == 3 and rest[0] == "namespaces")

    def _matching(self, path: str, key: str) -> bool:
        return key.startswith(path + "/") or (
            "/namespaces/" not in path and key.split("/")[-2] == path.split("/")[-1]
        )

    def _list(self, path: str) -> web.Response:
        items = [plain for key, plain in self.objects.items() if self._matching(path, key)]
        return _json({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        plural = request.path.split("/")[-1]
        seen = int(request.query.get("resourceVersion") or 0)
        lines = self._lines[plural]
        response = web.StreamResponse()
        await response.prepare(request)
        at = next((i for i, (version, _, _) in enumerate(lines) if version > seen), len(lines))
        changed = asyncio.Event()
        self._watchers[plural][changed] = None
        try:
            while True:
                part = lines[at : at + 500]
                at += len(part)
                data = b"".join(
                    line for _, path, line in part if self._matching(request.path, path)
                )
                if data:
                    await response.write(data)
                if not part:
                    changed.clear()
                    await changed.wait()
        finally:
            del self._watchers[plural][changed]


def _json(plain: Any, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(plain)
    return web.Response(body=body, status=status, content_type="application/json")


def _run(pipe: Pipe) -> None:
    async def run() -> None:
        application = web.Application(client_max_size=16 << 20)
        application.router.add_route("*", "/{path:.*}", _Server().serve)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.to_thread(pipe.recv)
        await runner.cleanup()

    uvloop.run(run())


@contextmanager
def memory_api_server() -> Iterator[str]:
    """Run one until the block ends; yield its URL."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs,))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        with suppress(BrokenPipeError):  # it has ended, perhaps by the signal that ends us
            ours.send("stop")
        process.join(10)
        process.kill()
