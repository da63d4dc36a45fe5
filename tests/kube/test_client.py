"""Requests: errors with reasons, polite retries, and writes that are not repeated."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from apis.meta import ObjectReference
from kube.client import (
    APPLY_PATCH,
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_PATCH,
    ApiError,
    Client,
    RateLimit,
    Unreachable,
    retry_on_conflict,
)
from kube.events import EventRecorder
from kube.kept_client import KeptClient
from kube.leader import LeaderElection, LeadershipLost
from kube.resources import NODES, PODS
from tests.beds.apiserver import eventually
from tests.kube.scripted import answer, api, status

BOTH = pytest.mark.parametrize("kind", [Client, KeptClient])


def test_names_are_escaped_in_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path(namespace="a/b", name="c d") == "/api/v1/namespaces/a%2Fb/pods/c%20d"
    assert NODES.path(name="n", subresource="status") == "/api/v1/nodes/n/status"


@BOTH
def test_an_error_carries_the_servers_reason(kind: type[Client]) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return status(409, "AlreadyExists", "nodes n exists")

    async def run() -> None:
        async with api(handler, kind=kind) as client:
            with pytest.raises(ApiError, match="409 AlreadyExists: nodes n exists") as caught:
                await client.create(NODES, b"{}")
            assert caught.value.already_exists
            assert not caught.value.conflict

    asyncio.run(run())


@BOTH
def test_a_busy_server_is_retried_after_the_time_that_it_names(kind: type[Client]) -> None:
    asked: list[float] = []

    async def handler(_: web.Request) -> web.StreamResponse:
        asked.append(time.monotonic())
        if len(asked) < 3:
            return status(429, "TooManyRequests", "", **{"Retry-After": "0"})
        return answer({})

    async def run() -> None:
        async with api(handler, kind=kind) as client:
            await client.create(NODES, b"{}")
            assert len(asked) == 3
            # An eviction that a disruption budget forbids is its caller's to repeat.
            asked.clear()
            with pytest.raises(ApiError) as caught:
                await client.request("POST", "/x", body=b"{}", tries=1)
            assert caught.value.status == 429
            assert len(asked) == 1

    asyncio.run(run())


@BOTH
def test_a_lost_connection_repeats_reads_and_never_writes(kind: type[Client]) -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked <= 2:
            assert request.transport is not None
            request.transport.close()
        return answer({"asked": asked})

    async def run() -> None:
        nonlocal asked
        async with api(handler, kind=kind) as client:
            assert msgspec.json.decode(await client.request("GET", "/x")) == {"asked": 3}
            asked = 0
            with pytest.raises(Unreachable):
                await client.request("POST", "/x", body=b"{}")
            assert asked == 1

    asyncio.run(run())


@BOTH
def test_each_kind_of_patch_has_its_content_type(kind: type[Client]) -> None:
    types: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        types.append(request.headers["Content-Type"])
        types.extend(f"{name}={value}" for name, value in request.query.items())
        return answer({})

    async def run() -> None:
        async with api(handler, kind=kind) as client:
            for patch in (MERGE_PATCH, STRATEGIC_PATCH, JSON_PATCH):
                await client.patch(NODES, "n", b"{}", content_type=patch)
            await client.patch(
                NODES, "n", b"{}", content_type=APPLY_PATCH, field_manager="me", force="true"
            )

    asyncio.run(run())
    assert types == [
        MERGE_PATCH,
        STRATEGIC_PATCH,
        JSON_PATCH,
        APPLY_PATCH,
        "fieldManager=me",
        "force=true",
    ]


def test_conflicts_are_retried_with_fresh_reads_and_other_errors_are_not() -> None:
    tried: list[str] = []

    async def conflicting() -> str:
        tried.append("x")
        if len(tried) < 3:
            raise ApiError(status=409, reason="Conflict", message="", what="PUT")
        return "done"

    assert asyncio.run(retry_on_conflict(conflicting)) == "done"

    async def forbidden() -> str:
        tried.append("y")
        raise ApiError(status=403, reason="Forbidden", message="", what="PUT")

    with pytest.raises(ApiError):
        asyncio.run(retry_on_conflict(forbidden))
    assert tried == ["x", "x", "x", "y"]


def test_the_rate_limit_spreads_what_comes_beyond_the_burst() -> None:
    async def run() -> float:
        limit = RateLimit(100, 5)
        loop = asyncio.get_running_loop()
        started = loop.time()
        for _ in range(15):
            await limit.take()
        return loop.time() - started

    assert asyncio.run(run()) >= 0.09


def test_a_siblings_requests_do_not_wait_behind_the_others() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer({})

    async def run() -> None:
        async with api(handler) as server:
            limited = Client(server._connection, qps=0.01, burst=1)
            async with limited, limited.sibling() as urgent:
                await limited.request("GET", "/first")
                waiting = asyncio.create_task(limited.request("GET", "/second"))
                await asyncio.wait_for(urgent.request("GET", "/lease"), 5)
                assert not waiting.done()
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())


def test_events_count_up_instead_of_piling_up() -> None:
    made: list[tuple[str, dict[str, object]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        made.append((request.method, body))
        return answer(body)

    async def run() -> None:
        about = ObjectReference(api_version="v1", kind="Node", name="n1", uid="u")
        async with api(handler) as client:
            recorder = EventRecorder(client, component="test")
            for _ in range(3):
                recorder.warning(about, "Broken", "it is broken")
            recorder.warning(about, "Fine", "x" * 5000)
            await recorder.flush()

    asyncio.run(run())
    assert [method for method, _ in made] == ["POST", "PATCH", "PATCH", "POST"]
    assert made[0][1]["type"] == "Warning"
    assert made[2][1]["count"] == 3
    assert len(str(made[3][1]["message"])) == 1024


# --- leases ------------------------------------------------------------------------------------


class Lease:
    """One lease on a scripted server, with optimistic locking."""

    def __init__(self) -> None:
        self.stored: dict[str, object] | None = None
        self.version = 0
        self.away = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.away:
            return status(500, "InternalError", "away")
        if request.method == "GET":
            if self.stored is None:
                return status(404, "NotFound")
            return answer(self.stored)
        body = msgspec.json.decode(await request.read())
        if request.method == "POST" and self.stored is not None:
            return status(409, "AlreadyExists")
        if request.method == "PUT" and body["metadata"]["resourceVersion"] != str(self.version):
            return status(409, "Conflict")
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.stored = body
        return answer(body)


def test_only_one_leads_and_the_next_takes_over() -> None:
    async def run() -> None:
        lease = Lease()
        async with api(lease.handle) as client:
            led: list[str] = []

            def election(identity: str) -> LeaderElection:
                return LeaderElection(
                    client,
                    namespace="ns",
                    name="l",
                    identity=identity,
                    lease_seconds=1,
                    renew_deadline_seconds=0.6,
                    retry_seconds=0.1,
                )

            async def lead(identity: str) -> None:
                led.append(identity)
                await asyncio.sleep(60)

            first, second = election("a"), election("b")
            one = asyncio.create_task(first.run(lambda: lead("a")))
            await eventually(lambda: led == ["a"])
            two = asyncio.create_task(second.run(lambda: lead("b")))
            await asyncio.sleep(1.5)
            assert led == ["a"]
            one.cancel()
            await asyncio.gather(one, return_exceptions=True)
            # Released, not run out: the next leads at once.
            await eventually(lambda: led == ["a", "b"], seconds=0.8)
            assert not first.leading
            # A leader that cannot renew stops by itself.
            lease.away = True
            with pytest.raises(LeadershipLost):
                await asyncio.wait_for(two, 5)
            assert not second.leading

    asyncio.run(run())


def test_a_lease_without_renewal_is_taken_over_after_its_time() -> None:
    async def run() -> None:
        lease = Lease()
        lease.version = 1
        lease.stored = {
            "metadata": {"name": "l", "resourceVersion": "1"},
            "spec": {
                "holderIdentity": "gone",
                "leaseDurationSeconds": 1,
                "renewTime": "2020-01-01T00:00:00.000000Z",
                "leaseTransitions": 4,
            },
        }
        async with api(lease.handle) as client:
            election = LeaderElection(
                client,
                namespace="ns",
                name="l",
                identity="me",
                lease_seconds=1,
                renew_deadline_seconds=0.8,
                retry_seconds=0.1,
            )
            led = asyncio.Event()

            async def lead() -> None:
                led.set()
                await asyncio.sleep(60)

            task = asyncio.create_task(election.run(lead))
            # By our own clock, not by the time that the lease names.
            await asyncio.sleep(0.5)
            assert not led.is_set()
            await asyncio.wait_for(led.wait(), 3)
            assert lease.stored is not None
            spec = lease.stored["spec"]
            assert isinstance(spec, dict)
            assert spec["leaseTransitions"] == 5
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_answers_that_come_late_never_make_two_leaders() -> None:
    """The holder's last renewal is stored at once and answered late, the next ones not at all."""

    async def run() -> None:
        lease = Lease()
        late: set[str] = set()
        cut_off: set[str] = set()
        stopped: dict[str, float] = {}
        started: dict[str, float] = {}
        loop = asyncio.get_running_loop()

        async def handle(request: web.Request) -> web.StreamResponse:
            agent = request.headers["User-Agent"]
            if agent in cut_off:
                await asyncio.sleep(60)
            response = await lease.handle(request)
            if agent in late and request.method == "PUT":
                cut_off.add(agent)
                await asyncio.sleep(0.7)
            return response

        def election(client: Client, identity: str) -> LeaderElection:
            return LeaderElection(
                client,
                namespace="ns",
                name="l",
                identity=identity,
                lease_seconds=1,
                renew_deadline_seconds=0.9,
                retry_seconds=0.1,
            )

        async def lead(identity: str) -> None:
            started[identity] = loop.time()
            try:
                await asyncio.sleep(60)
            finally:
                stopped[identity] = loop.time()

        async with api(handle) as client:
            connection = client._connection
            async with Client(connection, user_agent="a") as a, Client(connection) as b:
                first = asyncio.create_task(election(a, "a").run(lambda: lead("a")))
                await eventually(lambda: "a" in started)
                second = asyncio.create_task(election(b, "b").run(lambda: lead("b")))
                await asyncio.sleep(0.3)
                late.add("a")
                await eventually(lambda: "b" in started, seconds=5)
                second.cancel()
                await asyncio.gather(first, second, return_exceptions=True)
        assert stopped["a"] < started["b"]

    asyncio.run(run())


def test_a_lost_lease_is_not_waited_for_when_the_server_is_silent() -> None:
    async def run() -> None:
        lease = Lease()
        silent = asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            if silent.is_set():
                await asyncio.sleep(60)
            return await lease.handle(request)

        async with api(handle) as client:
            election = LeaderElection(
                client,
                namespace="ns",
                name="l",
                identity="a",
                lease_seconds=1,
                renew_deadline_seconds=0.5,
                retry_seconds=0.1,
            )
            task = asyncio.create_task(election.run(lambda: asyncio.sleep(60)))
            await eventually(lambda: election.leading)
            silent.set()
            with pytest.raises(LeadershipLost):
                await asyncio.wait_for(task, 8)

    asyncio.run(run())


def test_a_silent_watch_is_kept_alive_by_tcp_probes() -> None:
    """Without probes, the client of a vanished server would wait until the watch's own end."""
    local: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        local.append(request.transport.get_extra_info("peername")[1])
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    def seconds_until_asked() -> float | None:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            kind, _, ticks = words[5].partition(":")
            if words[1].endswith(f":{local[0]:04X}") and kind == _KEEPALIVE_TIMER:
                return int(ticks, 16) / os.sysconf("SC_CLK_TCK")
        return None

    async def run() -> None:
        async with (
            api(handler) as client,
            client.stream("/watch", params={}, silence_seconds=600),
        ):
            assert await eventually(seconds_until_asked) <= 30

    asyncio.run(run())


_KEEPALIVE_TIMER = "02"
