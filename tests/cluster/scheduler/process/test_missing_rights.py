"""A replica that may not read what it needs: it takes no lease, or gives it up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cluster.scheduler import process as process_module
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import RightsMissing, SchedulerProcess
from cluster.scheduler.serving.endpoints import Endpoints
from kube.connection import Connection
from kube.kept_client import KeptClient
from service.http_server import Request
from tests.beds.apiserver import eventually
from tests.kube.scripted import answer, api, listing, status

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
"""


class _Server:
    """An API server without objects that keeps one lease. forbidden: the requests to refuse."""

    def __init__(self, forbidden: Callable[[web.Request], bool]) -> None:
        self.forbidden = forbidden
        self.lease: dict[str, Any] | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/leases" in request.path:
            return await self._leases(request)
        if self.forbidden(request):
            verb = "watch" if "watch" in request.query else "list"
            kind = request.path.rpartition("/")[2]
            return status(403, "Forbidden", f'User "x" cannot {verb} resource "{kind}"')
        if "watch" not in request.query:
            return listing(1)
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(60)
        return response

    async def _leases(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            lease: dict[str, Any] = msgspec.json.decode(await request.read())
            lease["metadata"]["resourceVersion"] = "1"
            self.lease = lease
        if self.lease is None:
            return status(404, "NotFound")
        return answer(self.lease)


@asynccontextmanager
async def _running(server: _Server) -> AsyncIterator[tuple[SchedulerProcess, asyncio.Task[None]]]:
    stop = asyncio.Event()
    async with api(server.answer, kind=KeptClient) as client:
        configuration = read_configuration(_CONFIGURATION, obj="test")
        process = SchedulerProcess(client, configuration, seed=1)
        task = asyncio.create_task(process.run(stop))
        try:
            yield process, task
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)


def _play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_replica_without_a_right_stands_for_no_lease_until_it_is_granted(
    verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_module, "_FIRST_PAUSE_S", 0.05)
    granted = False

    def forbidden(request: web.Request) -> bool:
        watches = "watch" in request.query
        return not granted and request.path.endswith("/services") and watches == (verb == "watch")

    async def scenario() -> None:
        nonlocal granted
        server = _Server(forbidden)
        async with _running(server) as (process, _):
            health = Endpoints(process, parse(["--secure-port=0"])).health
            await eventually(lambda: bool(process.missing_rights))
            (missing,) = process.missing_rights
            assert f'User "x" cannot {verb} resource "services"' in missing
            shown = health.page(Request("GET", "/readyz", {}, b""))
            assert shown is not None
            assert shown.status == 503 and missing in shown.body.decode()
            assert missing in caplog.text
            # Some more looks.
            await asyncio.sleep(0.3)
            assert server.lease is None and not process.leading
            granted = True
            await eventually(lambda: process.ready, seconds=30)
            assert process.missing_rights == ()
            shown = health.page(Request("GET", "/readyz", {}, b""))
            assert shown is not None and shown.status == 200
            assert server.lease is not None

    _play(scenario)


def test_looks_for_rights_that_stay_missing_get_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    answers = iter([("none of services",)] * 7 + [()])

    async def look(*_: object) -> tuple[str, ...]:
        return next(answers)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(process_module, "forbidden", look)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)

    async def scenario() -> None:
        client = KeptClient(Connection("http://scheduler.invalid"), user_agent="test")
        configuration = read_configuration(_CONFIGURATION, obj="test")
        await SchedulerProcess(client, configuration, seed=1)._wait_for_rights()

    _play(scenario)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_leader_that_is_refused_while_it_reads_gives_the_lease_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "_FORBIDDEN_S", 0.3)

    def forbidden(request: web.Request) -> bool:
        # The look for rights reads one object.
        return request.path.endswith("/pods") and request.query.get("limit") == "500"

    async def scenario() -> None:
        server = _Server(forbidden)
        async with _running(server) as (process, task):
            with pytest.raises(RightsMissing, match='cannot list resource "pods"'):
                await asyncio.wait_for(task, 60)
            assert not process.ready
            assert server.lease is not None
            assert server.lease["spec"]["holderIdentity"] == ""

    _play(scenario)


def test_a_refusal_of_a_moment_does_not_end_a_leader() -> None:
    refusals = 3

    def forbidden(request: web.Request) -> bool:
        nonlocal refusals
        if request.path.endswith("/pods") and request.query.get("limit") == "500" and refusals:
            refusals -= 1
            return True
        return False

    async def scenario() -> None:
        async with _running(_Server(forbidden)) as (process, _):
            await eventually(lambda: process.ready, seconds=60)
            assert not refusals

    _play(scenario)
