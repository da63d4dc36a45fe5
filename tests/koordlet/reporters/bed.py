"""A small API server: objects in memory with versions, merge patches, faults and other writers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from kube.client import Client
from tests.kube.scripted import answer, api, status

Plain = dict[str, Any]


def merged(target: Any, patch: Any) -> Any:
    """Apply a merge patch as RFC 7386 defines it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class Objects:
    """objects: by the path below the API's root. refusals: statuses that the next requests get."""

    def __init__(self) -> None:
        self.objects: dict[str, Plain] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.refusals: list[int] = []
        self.before_patch: Callable[[], None] | None = None
        self._version = 100

    def put(self, path: str, plain: Plain) -> None:
        """Write an object as another client would."""
        self._version += 1
        metadata = {**plain.get("metadata", {}), "resourceVersion": str(self._version)}
        self.objects[path] = {**plain, "metadata": metadata}

    def named(self, verb: str) -> list[Any]:
        """Return the bodies of the requests of a verb."""
        return [body for method, _, body in self.requests if method == verb]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body: Any = msgspec.json.decode(text) if text else None
        self.requests.append((request.method, request.path, body))
        if self.refusals:
            code = self.refusals.pop(0)
            return status(code, "Refused", "not now")
        path = request.path.removesuffix("/status")
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return status(409, "AlreadyExists")
            self.put(path, body)
            return answer(self.objects[path])
        if request.method == "PATCH" and self.before_patch is not None:
            change, self.before_patch = self.before_patch, None
            change()
        if path not in self.objects:
            return status(404, "NotFound")
        if request.method == "PATCH":
            stored = self.objects[path]
            version = body.get("metadata", {}).pop("resourceVersion", None)
            if version not in (None, stored["metadata"]["resourceVersion"]):
                return status(409, "Conflict")
            if request.path.endswith("/status"):
                body = {"status": body.get("status")}
            self.put(path, merged(stored, body))
        return answer(self.objects[path])


def with_server(test: Callable[[Objects, Client], Awaitable[None]]) -> None:
    """Run a test with an empty server and a client of it."""

    async def run() -> None:
        objects = Objects()
        async with api(objects.handle) as client:
            await test(objects, client)

    asyncio.run(asyncio.wait_for(run(), 30))
