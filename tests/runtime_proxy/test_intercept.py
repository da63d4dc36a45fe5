"""A defect of the proxy's own costs hooks, never a pod."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy import merge
from runtime_proxy.hook_server import HookCounts, HookServers
from runtime_proxy.hooks import Hooks, Skipped
from runtime_proxy.http2.grpc import add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.model import Container, Pod, PodChanges, Resources
from runtime_proxy.registration import Registration
from runtime_proxy.server import Forward, InterceptedCall, Verdict
from runtime_proxy.stages import Stage
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


def held(method: str, request: Message) -> RequestHeld:
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
    assert made._hooks.skipped == Skipped(fault=1)


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
    assert made._hooks.skipped == Skipped(fault=1, unknown_object=1)


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


def decided(made: CriInterceptor, method: str, request: Message) -> InterceptedCall:
    call = made.open(held(method, request))
    asyncio.run(verdict_of(call.decide()))
    return call


def update(made: CriInterceptor, container: str, **resources: Any) -> InterceptedCall:
    request = cri.UpdateContainerResourcesRequest(
        container_id=container, linux=cri.LinuxContainerResources(**resources)
    )
    return decided(made, "UpdateContainerResources", request)


def known(**fields: Any) -> tuple[Store, CriInterceptor]:
    store = Store(NoJournal())
    store.put_pod(Pod(id="p"))
    store.put_container(
        Container(id="c0ffee", pod_id="p", resources=Resources(cpu_quota=5), **fields)
    )
    return store, interceptor(store)


def test_updates_that_overtake_each_other_are_both_remembered() -> None:
    store, made = known()
    first = update(made, "c0ffee", cpu_shares=7)
    second = update(made, "c0ffee", cpuset_cpus="3", unified={"memory.high": "1"})
    second.answered(add_prefix(b""))
    first.answered(add_prefix(b""))
    container = store.container("c0ffee")
    assert container is not None
    assert container.resources == Resources(
        cpu_quota=5, cpu_shares=7, cpuset_cpus="3", unified={"memory.high": "1"}
    )


def test_what_ended_while_a_call_ran_stays_ended() -> None:
    store, made = known()
    late = update(made, "c0ffee", cpu_shares=7)
    store.stop_container("c0ffee")
    late.answered(add_prefix(b""))
    container = store.container("c0ffee")
    assert container is not None
    assert container.stopped
    later = update(made, "c0ffee", cpu_shares=8)
    store.drop_container("c0ffee")
    later.answered(add_prefix(b""))
    assert store.container("c0ffee") is None


def test_a_shortened_id_is_the_whole_one() -> None:
    store, made = known()
    update(made, "c0", cpu_shares=7).answered(add_prefix(b""))
    container = store.container("c0ffee")
    assert container is not None
    assert container.resources == Resources(cpu_quota=5, cpu_shares=7)

    async def remove() -> None:
        request = cri.RemoveContainerRequest(container_id="c0")
        made.open(held("RemoveContainer", request)).answered(add_prefix(b""))

    asyncio.run(remove())
    assert store.container("c0ffee") is None


class Stored(Nowhere):
    """A runtime that knows nothing more than the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def pod(self, identifier: str) -> Pod | None:
        return self._store.pod(identifier)


@pytest.mark.parametrize(
    ("changed", "overhead", "resources"),
    [("resources", 3, 7), ("overhead", 7, 5)],
)
def test_a_sandboxes_update_that_no_hook_changes_goes_on_as_it_came(
    changed: str, overhead: int, resources: int
) -> None:
    """What the request names is remembered, and the rest stays."""
    store = Store(NoJournal())
    store.put_pod(Pod(id="p", overhead=Resources(cpu_shares=3), resources=Resources(cpu_shares=5)))
    request = cri.UpdatePodSandboxResourcesRequest(pod_sandbox_id="p")
    getattr(request, changed).cpu_shares = 7

    async def test() -> None:
        servers = HookServers(timeout_s=1, counts=HookCounts(lambda *observed: None))
        # Under policy Ignore, a server that is away changes nothing.
        servers.apply([Registration("h.json", "/nowhere.sock", False, frozenset(Stage))])
        hooks = Hooks(
            servers=servers, store=store, recovery=Stored(store), skip_label=("skip", "true")
        )
        call = CriInterceptor(hooks, max_message_bytes=1 << 20).open(
            held("UpdatePodSandboxResources", request)
        )
        assert await verdict_of(call.decide()) == Forward()
        call.answered(add_prefix(b""))
        servers.close()

    asyncio.run(test())
    pod = store.pod("p")
    assert pod is not None
    assert pod.overhead == Resources(cpu_shares=overhead)
    assert pod.resources == Resources(cpu_shares=resources)


def test_hooks_that_hang_delay_an_end_no_longer_than_its_limit() -> None:
    async def test() -> bool:
        servers = HookServers(timeout_s=1, counts=HookCounts(lambda *observed: None))
        store = Store(NoJournal())
        hooks = Hooks(servers=servers, store=store, recovery=Nowhere(), skip_label=("a", "b"))
        released = asyncio.Event()
        ended = asyncio.Event()

        async def hang() -> None:
            await released.wait()
            ended.set()

        hooks.in_background("p", hang())
        async with asyncio.timeout(30):
            await hooks.settle(0.05)
            hangs = not ended.is_set()
            released.set()
            await hooks.settle(30)
        servers.close()
        return hangs and ended.is_set()

    assert asyncio.run(test())


def test_an_answer_that_is_compressed_is_remembered_too() -> None:
    store = Store(NoJournal())
    request = cri.RunPodSandboxRequest(config={"metadata": {"uid": "u"}})
    call = decided(interceptor(store), "RunPodSandbox", request)
    answer = gzip.compress(cri.RunPodSandboxResponse(pod_sandbox_id="p").SerializeToString())
    call.answered(b"\1" + len(answer).to_bytes(4, "big") + answer)
    pod = store.pod("p")
    assert pod is not None
    assert pod.meta.uid == "u"
