"""Hook servers that are functions: calls through the interceptors, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf.message import Message

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.docker.http1 import parse_request
from runtime_proxy.docker.intercept import DockerCall, DockerHooks
from runtime_proxy.docker.intercept import Verdict as DockerVerdict
from runtime_proxy.hook_server import HookError
from runtime_proxy.hooks import Hooks
from runtime_proxy.http2.grpc import add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.model import Container, Pod
from runtime_proxy.registration import Registration
from runtime_proxy.server import Forward, InterceptedCall, Verdict
from runtime_proxy.stages import Stage
from runtime_proxy.store import NoJournal, Store

Answer = Callable[[Any], Any]
"""From a hook's request to its response, to the response's bytes, or to a HookError."""

_Message = TypeVar("_Message", bound=Message)

_REQUESTS: dict[bool, Any] = {
    True: hook.PodSandboxHookRequest,
    False: hook.ContainerResourceHookRequest,
}


@dataclass(slots=True)
class ScriptedServer:
    """A hook server: what it answers to each stage, and what it was asked."""

    answers: dict[Stage, Answer]
    name: str = "scripted.json"
    fail: bool = False
    asked: list[tuple[Stage, Any]] = field(default_factory=list)

    @property
    def registration(self) -> Registration:
        return Registration(self.name, "/run/scripted.sock", self.fail, frozenset(self.answers))

    async def call(self, stage: Stage, request: bytes, *, budget_s: float | None) -> bytes | None:
        message = _REQUESTS["PodSandbox" in stage.value].FromString(request)
        self.asked.append((stage, message))
        answer = self.answers[stage](message)
        if isinstance(answer, HookError):
            raise answer
        return answer.SerializeToString() if isinstance(answer, Message) else answer

    def requests(self, stage: Stage) -> list[Any]:
        return [request for asked, request in self.asked if asked is stage]


class ScriptedServers:
    """Stands for `hook_server.HookServers`."""

    def __init__(self, *servers: ScriptedServer) -> None:
        self.all = servers

    def serving(self, stage: Stage) -> tuple[ScriptedServer, ...]:
        return tuple(server for server in self.all if stage in server.answers)


class StoreOnly:
    """A runtime, or dockerd, that knows what the store knows."""

    done = True

    def __init__(self, store: Store, driver: str = "cgroupfs") -> None:
        self._store = store
        self._driver = driver

    async def pod(self, identifier: str) -> Pod | None:
        return self._store.pod(identifier)

    async def container(self, identifier: str) -> Container | None:
        return self._store.container(identifier)

    async def driver(self) -> str:
        return self._driver

    async def resolve(self, reference: str) -> str:
        return reference


class World:
    """A proxy's interceptors over a store, asking scripted servers."""

    def __init__(self, *servers: ScriptedServer, driver: str = "cgroupfs") -> None:
        self.store = Store(NoJournal())
        self.runtime = StoreOnly(self.store, driver)
        self.hooks = Hooks(
            servers=cast(Any, ScriptedServers(*servers)),
            store=self.store,
            recovery=self.runtime,
            skip_label=("skip", "true"),
        )
        self.cri = CriInterceptor(self.hooks, max_message_bytes=1 << 24)
        self.docker = DockerHooks(self.hooks, cast(Any, self.runtime))

    def call(
        self, method: str, request: _Message, answer: Message | None = None
    ) -> _Message | Verdict:
        """Make a CRI call that the runtime answers.

        Returns what reached the runtime, or the status with which the proxy refused it. Hooks of
        after-stages have ended.
        """

        async def made() -> _Message | Verdict:
            path = f"/runtime.v1.RuntimeService/{method}".encode()
            body = add_prefix(request.SerializeToString())
            call = self.cri.open(RequestHeld(1, path, body, None, b"identity"))
            verdict = await _awaited(call)
            if not isinstance(verdict, Forward):
                call.abandoned()
                return verdict
            if answer is not None:
                call.answered(add_prefix(answer.SerializeToString()))
            await self.hooks.settle(5)
            sent = body if verdict.body is None else verdict.body
            return type(request).FromString(sent[5:])

        return _run(made())

    def ask_docker(
        self,
        method: str,
        target: str,
        document: dict[str, Any] | None = None,
        *,
        status: int = 204,
        answer: dict[str, Any] | None = None,
    ) -> dict[str, Any] | DockerVerdict | None:
        """Make a docker call that dockerd answers.

        Returns the new body, None for an unchanged one, or the refusal.
        """

        async def made() -> dict[str, Any] | DockerVerdict | None:
            head = parse_request(f"{method} {target} HTTP/1.1\r\n\r\n".encode())
            assert self.docker.wants(head)
            call: DockerCall = self.docker.open(head, json.dumps(document).encode())
            verdict = await call.decide()
            body = getattr(verdict, "body", verdict)
            if body is not None and not isinstance(body, bytes):
                return verdict
            call.answered(status, msgspec.json.encode(answer))
            await self.hooks.settle(5)
            return None if body is None else cast("dict[str, Any]", json.loads(body))

        return _run(made())


_Result = TypeVar("_Result")


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run(work)


async def _awaited(call: InterceptedCall) -> Verdict:
    verdict = call.decide()
    return await verdict if isinstance(verdict, Awaitable) else verdict
