"""A defect of the proxy's own costs hooks, never a pod."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import cast

import pytest

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy import merge
from runtime_proxy.hook_server import HookCounts, HookServers
from runtime_proxy.hooks import Hooks
from runtime_proxy.http2.grpc import add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.model import Container, Pod, PodChanges
from runtime_proxy.server import Forward, Verdict
from runtime_proxy.store import NoJournal, Store


class Nowhere:
    done = True

    async def pod(self, identifier: str) -> Pod | None:
        return None

    async def container(self, identifier: str) -> Container | None:
        return None


def interceptor(store: Store) -> CriInterceptor:
    servers = HookServers(timeout_s=1, counts=HookCounts(lambda *observed: None))
    hooks = Hooks(servers=servers, store=store, recovery=Nowhere(), skip_label=("skip", "true"))
    return CriInterceptor(hooks, max_message_bytes=1 << 20)


def held(method: str, request: cri.CreateContainerRequest) -> RequestHeld:
    path = f"/runtime.v1.RuntimeService/{method}".encode()
    return RequestHeld(1, path, add_prefix(request.SerializeToString()), None, b"identity")


async def verdict_of(answer: Verdict | Awaitable[Verdict]) -> Verdict:
    return answer if isinstance(answer, Forward) else await cast(Awaitable[Verdict], answer)


def test_a_defect_while_deciding_lets_the_request_go_on_as_it_came(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(NoJournal())
    store.put_pod(Pod(id="p", changes=PodChanges(labels={"a": "b"})))
    made = interceptor(store)

    def broken(*arguments: object) -> bool:
        raise ZeroDivisionError

    monkeypatch.setattr(merge, "patch_sandbox_config", broken)
    call = made.open(held("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id="p")))
    assert asyncio.run(verdict_of(call.decide())) == Forward()
    assert "hooks skipped" in caplog.text


def test_a_defect_after_the_answer_ends_with_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(NoJournal())
    made = interceptor(store)
    call = made.open(held("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id="p")))
    asyncio.run(verdict_of(call.decide()))

    def broken(container: Container) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(store, "put_container", broken)
    answer = cri.CreateContainerResponse(container_id="c").SerializeToString()
    call.answered(add_prefix(answer))
    assert "hooks skipped" in caplog.text


def test_a_sandboxes_changes_reach_its_containers_without_any_hook_server() -> None:
    store = Store(NoJournal())
    store.put_pod(Pod(id="p", changes=PodChanges(cgroup_parent="/moved")))
    call = interceptor(store).open(
        held("CreateContainer", cri.CreateContainerRequest(pod_sandbox_id="p"))
    )
    verdict = asyncio.run(verdict_of(call.decide()))
    assert isinstance(verdict, Forward)
    assert verdict.body is not None
    sent = cri.CreateContainerRequest.FromString(verdict.body[5:])
    assert sent.sandbox_config.linux.cgroup_parent == "/moved"
