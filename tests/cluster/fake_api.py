"""An API server in memory: stores, merges patches, counts versions, records writes.

A cache sees the stored objects when the test calls `show`, so that a cache can be late, or after a
delay with `follow`. No socket is involved, so it works in virtual time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from kube.cache import Cache
from kube.client import ApiError, Client
from kube.connection import Connection
from kube.resources import Resource

T = TypeVar("T")

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
        self._followers: list[tuple[tuple[Cache[Any], ...], float]] = []

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
        """Show the caches all changes since the last call."""
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
        self._change("MODIFIED" if known else "ADDED", path, stored)
        return stored

    def _drop(self, path: str) -> None:
        gone = self.objects.pop(path)
        self._version += 1
        metadata = {**gone["metadata"], "resourceVersion": str(self._version)}
        self._change("DELETED", path, {**gone, "metadata": metadata})

    def _change(self, kind: str, path: str, plain: dict[str, Any]) -> None:
        self._changes.append((kind, path, plain))
        for caches, after in self._followers:
            asyncio.get_running_loop().call_later(after, self.show, *caches)

    async def handle(self, method: str, path: str, data: bytes | None) -> dict[str, Any]:
        """Carry out one request. Raises ApiError."""
        body: dict[str, Any] = msgspec.json.decode(data) if data else {}
        if method != "GET":
            self.writes.append((method, path, body))
            # Another task may look at a cache while the write is under way.
            await asyncio.sleep(0)
        for suffix in _SUBRESOURCES:
            path = path.removesuffix(suffix)
        if method != "GET" and path in self.refuse:
            raise _refused(self.refuse[path], "Refused", path)
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                raise _refused(409, "AlreadyExists", path)
            return self._store(path, body)
        if path not in self.objects:
            raise _refused(404, "NotFound", path)
        if method == "PATCH":
            expected = (body.get("metadata") or {}).get("resourceVersion")
            if expected not in (None, self.objects[path]["metadata"]["resourceVersion"]):
                raise _refused(409, "Conflict", path)
            new = merged(self.objects[path], body)
            return self.objects[path] if new == self.objects[path] else self._store(path, new)
        if method == "DELETE":
            self._drop(path)
            return {}
        return self.objects[path]

    def collection(self, path: str) -> list[dict[str, Any]]:
        """Return the objects of a list request's path."""
        return [stored for key, stored in self.objects.items() if _is_in(key, path)]

    def changes(self, path: str, since: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """Return (kind, object) of what changed in a collection, and where to go on."""
        new = self._changes[since:]
        found = [(kind, plain) for kind, key, plain in new if _is_in(key, path)]
        return found, len(self._changes)

    def follow(self, *caches: Cache[Any], after: float = 0.01) -> None:
        """Show each change to these caches `after` seconds later."""
        self.show(*caches)
        self._followers.append((caches, after))

    def client(self) -> Client:
        return _MemoryClient(self)


class _MemoryClient(Client):
    def __init__(self, server: FakeApi) -> None:
        super().__init__(Connection("http://in-memory"))
        self._server = server

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        tries: int = 1,
    ) -> bytes:
        return msgspec.json.encode(await self._server.handle(method, path, body))


def _is_in(key: str, path: str) -> bool:
    """Return whether the object at `key` is in a collection, of one namespace or of all."""
    collection = key.rpartition("/")[0]
    return path in (collection, re.sub(r"/namespaces/[^/]+(?=/[^/]+$)", "", collection))


def _refused(code: int, reason: str, path: str) -> ApiError:
    return ApiError(status=code, reason=reason, message="by the test", what=path)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while there is work, and then jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a loop that waits for nothing; there must be no I/O in it."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
