"""Pods on a scripted API server that binds, patches, and fails as a test says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kube.client import Client
from kube.kept_client import KeptClient
from tests.cluster.fake_api import merged
from tests.kube.scripted import answer, api, status

Fault = Callable[[web.Request], web.Response | None]
"""Called for a write: returns an answer in place of the server's own, or None to cut the line."""


def cut(_: web.Request) -> None:
    """Close the connection without an answer."""


def refuse(code: int, reason: str, message: str = "", **headers: str) -> Fault:
    return lambda _: status(code, reason, message, **headers)


@dataclass
class After:
    """A fault that strikes when the write has been carried out."""

    fault: Fault


@dataclass
class StoredPods:
    """faults: one for each of the next writes, None for a write that succeeds. down: cuts all."""

    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: deque[Fault | After | None] = field(default_factory=deque)
    always: Fault | None = None
    down: bool = False
    delay: float = 0.0
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    parallel: int = 0
    most_parallel: int = 0

    def add(self, name: str, uid: str = "u", **metadata: Any) -> dict[str, Any]:
        pod = {"metadata": {"name": name, "uid": uid, "resourceVersion": "1", **metadata}}
        self.pods[name] = {**pod, "spec": {}, "status": {}}
        return self.pods[name]

    @property
    def writes(self) -> list[str]:
        """Method and subresource of all writes that arrived, in order."""
        return [
            f"{method} {path.rsplit('/', 1)[-1]}"
            for method, path, _ in self.requests
            if method != "GET"
        ]

    @property
    def reads(self) -> int:
        return sum(method == "GET" for method, _, _ in self.requests)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.parallel += 1
        self.most_parallel = max(self.most_parallel, self.parallel)
        try:
            data = await request.read()
            body = msgspec.json.decode(data) if data else {}
            self.requests.append((request.method, request.path, body))
            if self.delay:
                await asyncio.sleep(self.delay)
            found = self._answer(request, body)
            if found is None:
                assert request.transport is not None
                request.transport.abort()
                return answer({})
            return found
        finally:
            self.parallel -= 1

    def _answer(self, request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if self.down:
            return None
        if request.method == "GET":
            return self._write(request, body)
        fault = self.faults.popleft() if self.faults else self.always
        if isinstance(fault, After):
            self._write(request, body)
            return fault.fault(request)
        return fault(request) if fault is not None else self._write(request, body)

    def _write(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        parts = request.path.split("/")
        name = parts[parts.index("pods") + 1]
        pod = self.pods.get(name)
        if pod is None:
            return status(404, "NotFound", f'pods "{name}" not found')
        metadata = pod["metadata"]
        if request.method == "GET":
            return answer(pod)
        given = body.get("metadata", {})
        for key in ("uid", "resourceVersion"):
            if given.get(key, metadata[key]) != metadata[key]:
                if request.method == "PATCH" and key == "uid":
                    return status(422, "Invalid", "metadata.uid: Invalid value: field is immutable")
                return status(409, "Conflict", f"Precondition failed: {key}")
        if request.method == "DELETE":
            if body["preconditions"]["uid"] != metadata["uid"]:
                return status(409, "Conflict", "Precondition failed: UID in precondition: x")
            return answer(self.pods.pop(name))
        if request.method == "POST":
            if pod["spec"].get("nodeName"):
                return status(409, "Conflict", f"pod {name} is already assigned")
            if metadata.get("deletionTimestamp"):
                return status(409, "Conflict", f"pod {name} is being deleted")
            if pod["spec"].get("schedulingGates"):
                return status(409, "Conflict", f"pod {name} has non-empty .spec.schedulingGates")
            pod["spec"]["nodeName"] = body["target"]["name"]
            metadata.setdefault("annotations", {}).update(given.get("annotations", {}))
            metadata["resourceVersion"] += "1"
            return status(201, "", "")
        self.pods[name] = merged(pod, body)
        self.pods[name]["metadata"]["resourceVersion"] += "1"
        return answer(self.pods[name])


@asynccontextmanager
async def serving(store: StoredPods) -> AsyncIterator[Client]:
    async with api(store.handle, kind=KeptClient) as client:
        yield client
