"""An API server in memory: stores, merges patches, counts versions, records writes.

What it stores reaches a cache when the test says so (`show`), so that a cache can be late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from kube.cache import Cache
from kube.client import Client
from kube.resources import Resource
from tests.kube.scripted import answer, api, status

_SUBRESOURCES = ("/status",)


def merged(stored: Any, patch: Any) -> Any:
    """Return `stored` with a merge patch applied (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(stored) if isinstance(stored, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class FakeApi:
    """Objects by path, such as /api/v1/nodes/n1."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: list[tuple[str, str, Any]] = []
        """(method, path, body) of every write by a client, refused ones included."""
        self.refuse: dict[str, int] = {}
        """Path -> status code with which writes to it are refused."""
        self._version = 0
        self._changes: list[tuple[str, str, dict[str, Any]]] = []
        self._shown: dict[int, int] = {}

    def put(self, resource: Resource, plain: dict[str, Any]) -> dict[str, Any]:
        """Store an object as another client would; return it as stored."""
        meta = plain["metadata"]
        path = resource.path(namespace=meta.get("namespace", ""), name=meta["name"])
        return self._store(path, plain)

    def remove(self, resource: Resource, name: str, *, namespace: str = "") -> None:
        """Delete an object as another client would."""
        self._drop(resource.path(namespace=namespace, name=name))

    def get(self, resource: Resource, name: str, *, namespace: str = "") -> dict[str, Any]:
        return self.objects[resource.path(namespace=namespace, name=name)]

    def show(self, *caches: Cache[Any]) -> None:
        """Let caches see what happened since they were shown the last time."""
        for cache in caches:
            start = self._shown.get(id(cache), 0)
            self._shown[id(cache)] = len(self._changes)
            for kind, path, plain in self._changes[start:]:
                if f"/{cache.resource.plural}/" in path:
                    cache.take(msgspec.json.encode({"type": kind, "object": plain}))

    def _store(self, path: str, plain: dict[str, Any]) -> dict[str, Any]:
        known = self.objects.get(path)
        self._version += 1
        uid = known["metadata"]["uid"] if known else f"uid-{self._version}"
        metadata = {**plain["metadata"], "resourceVersion": str(self._version), "uid": uid}
        stored = {**plain, "metadata": metadata}
        self.objects[path] = stored
        self._changes.append(("MODIFIED" if known else "ADDED", path, stored))
        return stored

    def _drop(self, path: str) -> None:
        gone = self.objects.pop(path)
        self._version += 1
        metadata = {**gone["metadata"], "resourceVersion": str(self._version)}
        self._changes.append(("DELETED", path, {**gone, "metadata": metadata}))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        data = await request.read()
        body: dict[str, Any] = msgspec.json.decode(data) if data else {}
        for suffix in _SUBRESOURCES:
            path = path.removesuffix(suffix)
        if request.method != "GET":
            self.writes.append((request.method, request.path, body))
            # Another task may look at a cache while the write is under way.
            await asyncio.sleep(0)
            code = self.refuse.get(path)
            if code is not None:
                return status(code, "Refused", "the test refuses this")
        match request.method:
            case "POST":
                path = f"{path}/{body['metadata']['name']}"
                if path in self.objects:
                    return status(409, "AlreadyExists")
                return answer(self._store(path, body))
            case _ if path not in self.objects:
                return status(404, "NotFound", path)
            case "PATCH":
                new = merged(self.objects[path], body)
                same = new == self.objects[path]
                return answer(self.objects[path] if same else self._store(path, new))
            case "DELETE":
                self._drop(path)
                return answer({})
            case _:
                return answer(self.objects[path])

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Serve on loopback and yield a client."""
        async with api(self._handle) as client:
            yield client
