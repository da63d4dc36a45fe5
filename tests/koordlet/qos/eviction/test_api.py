"""Evictions over a scripted API server: what is sent, and what each answer means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hooks.subject import Pod
from koordlet.qos.eviction.api import ApiEvictions
from koordlet.qos.eviction.means import Answer, Answered
from tests.koordlet.qos.eviction_making import a_pod
from tests.kube.scripted import answer, api, status
from tests.waiting import until

POD = a_pod("web")
V1 = [{"name": "pods"}, {"name": "pods/eviction", "group": "policy", "version": "v1"}]
OLD = [{"name": "pods"}, {"name": "pods/eviction"}]


def test_the_eviction_names_the_uid_and_the_event_is_upstreams() -> None:
    sent: list[tuple[str, str, Any]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            return answer({"resources": V1})
        sent.append((request.method, request.path, msgspec.json.decode(await request.read())))
        return answer({"kind": "Status", "status": "Success"})

    async def test() -> None:
        async with api(handler) as client:
            evictions = ApiEvictions(client, "n1")
            assert await evictions.evict(POD) == Answer(Answered.EVICTED)
            evictions.warn(POD, "evictPodSuccess", "evict Pod:default/web")
            await until(lambda: len(sent) == 2)
            await evictions.close()

    asyncio.run(test())
    assert sent[0] == (
        "POST",
        "/api/v1/namespaces/default/pods/web/eviction",
        {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": "default", "name": "web"},
            "deleteOptions": {"preconditions": {"uid": "uid-web"}},
        },
    )
    event = sent[1][2]
    assert sent[1][:2] == ("POST", "/api/v1/namespaces/default/events")
    assert {key: event[key] for key in ("type", "reason", "message", "source")} == {
        "type": "Warning",
        "reason": "evictPodSuccess",
        "message": "evict Pod:default/web",
        "source": {"component": "koordlet-qosManager", "host": "n1"},
    }
    assert event["involvedObject"]["uid"] == "uid-web"


def test_an_old_server_gets_the_version_that_it_serves() -> None:
    versions = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            return answer({"resources": OLD})
        versions.append(msgspec.json.decode(await request.read())["apiVersion"])
        return answer({})

    async def test() -> Answer:
        async with api(handler) as client:
            return await ApiEvictions(client, "n1").evict(POD)

    assert asyncio.run(test()).answered is Answered.EVICTED
    assert versions == ["policy/v1beta1"]


def _budget() -> web.Response:
    return status(429, "TooManyRequests", "would violate the budget", **{"Retry-After": "7"})


@pytest.mark.parametrize(
    ("response", "answered", "retry_after_s"),
    [
        (_budget, Answered.REFUSED, 7.0),
        (lambda: status(403, "Forbidden", "cannot create"), Answered.REFUSED, None),
        (lambda: status(500, "InternalError", "two budgets"), Answered.REFUSED, None),
        (lambda: status(404, "NotFound", "no such pod"), Answered.GONE, None),
        (lambda: status(409, "Conflict", "another uid"), Answered.GONE, None),
    ],
)
def test_answers(
    response: Callable[[], web.Response], answered: Answered, retry_after_s: float | None
) -> None:
    requests = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            return answer({"resources": V1})
        requests.append(request.path)
        return response()

    async def test() -> Answer:
        async with api(handler) as client:
            return await ApiEvictions(client, "n1").evict(POD)

    got = asyncio.run(test())
    assert (got.answered, got.retry_after_s) == (answered, retry_after_s)
    assert len(requests) == 1, "a refusal is not repeated at once: the next victim has its turn"
    assert got.detail


@pytest.mark.parametrize("hangs_at", ["/api/v1", "/api/v1/namespaces/default/pods/web/eviction"])
def test_a_server_that_hangs_is_unreachable(hangs_at: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == hangs_at:
            await asyncio.sleep(3600)
        return answer({"resources": V1})

    async def test() -> Answer:
        async with api(handler) as client:
            return await ApiEvictions(client, "n1", limit_s=0.1).evict(POD)

    assert asyncio.run(test()) == Answer(Answered.UNREACHABLE, "no answer within 0.1 s")


def test_a_server_that_drops_the_connection_is_unreachable() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            return answer({"resources": V1})
        assert request.transport is not None
        request.transport.close()
        return answer({})

    async def test() -> Answer:
        async with api(handler) as client:
            return await ApiEvictions(client, "n1").evict(POD)

    assert asyncio.run(test()).answered is Answered.UNREACHABLE


def test_whether_the_server_answered_the_last_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = None
    evictions = ApiEvictions(client, "n1")
    answers = iter([Answered.UNREACHABLE, Answered.UNREACHABLE, Answered.REFUSED, Answered.GONE])

    async def scripted(pod: Pod) -> Answer:
        return Answer(next(answers))

    monkeypatch.setattr(evictions, "_evict", scripted)
    found = [evictions.answers]
    for _ in range(4):
        asyncio.run(evictions.evict(POD))
        found.append(evictions.answers)
    assert found == [True, False, False, True, True]


def test_an_event_waits_for_a_server_that_is_away_and_is_written_once() -> None:
    written: list[str] = []
    away = [True]

    async def handler(request: web.Request) -> web.StreamResponse:
        event = msgspec.json.decode(await request.read())
        if away[0]:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        written.append(event["message"])
        return answer({})

    async def test() -> None:
        async with api(handler) as client:
            evictions = ApiEvictions(client, "n1")

            async def tried() -> None:
                await until(lambda: evictions._writing is None or evictions._writing.done())

            for message in ("first", "second"):
                evictions.warn(POD, "evictPodSuccess", message)
                await tried()
            evictions.write_events()
            await tried()
            assert written == []
            away[0] = False
            for _ in range(2):
                evictions.write_events()
                await tried()
            await evictions.close()

    asyncio.run(test())
    assert written == ["first", "second"]


def test_events_are_written_one_after_the_other_and_until_the_end() -> None:
    written: list[str] = []
    hang = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        event = msgspec.json.decode(await request.read())
        written.append(event["message"])
        if event["message"] == "last":
            await hang.wait()
        return answer({})

    async def test() -> None:
        async with api(handler) as client:
            evictions = ApiEvictions(client, "n1")
            await evictions.close()
            for count, message in enumerate(("first", "second", "last"), 1):
                evictions.warn(POD, "evictPodFail", message)
                await until(lambda count=count: len(written) == count)  # type: ignore[misc]
                if message != "last":
                    await until(lambda: evictions._writing is None or evictions._writing.done())
            writing = evictions._writing
            assert writing is not None and not writing.done()
            await evictions.close()
            assert writing.done()
            hang.set()

    asyncio.run(test())
    assert written == ["first", "second", "last"]
