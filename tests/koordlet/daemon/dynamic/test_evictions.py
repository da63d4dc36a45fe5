"""Evictions of the daemon: the settings, the connection to an API server, and what is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hooks.subject import Pod
from koordlet.configuration.config import Config
from koordlet.daemon.dynamic.evictions import Evictions, eviction_options
from koordlet.exposition.strategy_metrics import of_evictions
from koordlet.qos.eviction.past_file import PastFile
from koordlet.qos.strategy import Note, Shortage, Victim
from kube.connection import Connection, ConnectionConfigError
from service.events import Events
from tests.koordlet.configured import configured
from tests.koordlet.qos.eviction_making import a_pod, a_situation
from tests.kube.scripted import answer, api
from tests.waiting import until

V1 = [{"name": "pods"}, {"name": "pods/eviction", "group": "policy", "version": "v1"}]
POD = a_pod("web", qos="BE")


def config(folder: Path, *flags: str, **changes: Any) -> Config:
    return configured(*flags, runDir=str(folder), **changes)


def short(pod: Pod = POD) -> Shortage:
    return Shortage(
        gate="BEMemoryEvict",
        resource="memory",
        of_requests=False,
        needed=5,
        numbers="the node uses 79.3 %",
        victims=(Victim(pod, 10),),
        cool_down_s=4.0,
    )


@pytest.fixture
def workers() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def made(of: Config, workers: Executor, **given: Any) -> Evictions:
    kept = PastFile(f"{of.run_dir}/evictions", boot="b1", dry_run=of.qos.evict_dry_run)
    given.setdefault("note", lambda note: None)
    return Evictions(of, events=Events(), kept=kept, workers=workers, **given)


class Runtime:
    def __init__(self) -> None:
        self.stopped: list[str] = []

    async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
        self.stopped += container_ids
        return ""


def test_upstreams_flags_and_our_fields_reach_the_evictor(tmp_path: Path) -> None:
    made = eviction_options(
        config(
            tmp_path,
            "-only-evict-by-api",
            "-cpu-evict-cool-time-seconds=30",
            "-memory-evict-cool-time-seconds=5",
            qos={"evictDryRun": True, "evictMostPerRound": 3, "evictStopGrace": "2s"},
        )
    )
    assert (made.only_by_api, made.dry_run, made.most_per_round, made.stop_grace_s) == (
        True,
        True,
        3,
        2.0,
    )
    assert made.cool_downs == {
        "BECPUEvict": 30.0,
        "CPUAllocatableEvict": 30.0,
        "CPUEvict": 30.0,
        "BEMemoryEvict": 5.0,
        "MemoryAllocatableEvict": 5.0,
        "MemoryEvict": 5.0,
    }


def test_evictions_go_over_the_servers_connection_once_there_is_one(
    tmp_path: Path, workers: Executor
) -> None:
    asked: list[str] = []
    attempts = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1":
            return answer({"resources": V1})
        asked.append(request.path.removeprefix("/api/v1/namespaces/default/"))
        return answer({"metadata": {"name": "x"}})

    async def test() -> None:
        async with api(handler) as client:

            def connect() -> Connection:
                nonlocal attempts
                attempts += 1
                if attempts == 1:
                    raise ConnectionConfigError("no kubeconfig yet")
                return Connection(client._connection.server)

            notes: list[Note] = []
            evictions = made(
                config(tmp_path, kubernetes={"enabled": True}),
                workers,
                note=notes.append,
                connect=connect,
                stopper=Runtime(),
            )
            running = asyncio.create_task(evictions.run())
            await until(lambda: evictions._api is not None)
            evictions.evictor.submit([short()], a_situation([POD], now=time.monotonic()))
            await until(lambda: len(asked) == 2)
            running.cancel()
            await asyncio.wait([running])
            assert asked == ["pods/web/eviction", "events"]
            assert evictions.evictor.reports.evictions == 1 and len(notes) == 1
            assert evictions._api is None

    asyncio.run(test())
    assert attempts == 2


def test_a_node_without_an_api_server_stops_containers(tmp_path: Path, workers: Executor) -> None:
    async def test() -> list[str]:
        runtime = Runtime()
        evictions = made(config(tmp_path), workers, stopper=runtime)
        running = asyncio.create_task(evictions.run())
        evictions.evictor.submit([short()], a_situation([POD], now=time.monotonic()))
        await until(lambda: runtime.stopped)
        running.cancel()
        return runtime.stopped

    assert asyncio.run(test()) == ["uid-web-c0"]


def test_the_next_daemon_goes_on_with_the_cool_down(tmp_path: Path, workers: Executor) -> None:
    """The evicted pod has left; the node is as short as before, and another pod would go."""
    other = a_pod("other", qos="BE")
    slow = config(tmp_path, qos={"memoryEvictCoolDown": "1h"})

    async def life(pod: Pod) -> tuple[list[str], list[str]]:
        runtime = Runtime()
        evictions = made(slow, workers, stopper=runtime)
        running = asyncio.create_task(evictions.run())
        now = time.monotonic()
        evictions.evictor.submit([short(pod)], a_situation([pod], now=now))
        await until(lambda: runtime.stopped or evictions.evictor.status()["short"])
        running.cancel()
        await asyncio.wait([running])
        return runtime.stopped, [each["why"] for each in evictions.evictor.status()["short"]]

    assert asyncio.run(life(POD)) == (["uid-web-c0"], [])
    assert asyncio.run(life(other)) == ([], ["within 3600 s of the last evictions"])


def test_a_runtime_that_is_not_there_is_a_named_failure(tmp_path: Path, workers: Executor) -> None:
    socket = str(tmp_path / "nothing.sock")

    async def test() -> str:
        evictions = made(config(tmp_path, cri={"socket": socket}), workers)
        running = asyncio.create_task(evictions.run())
        evictions.evictor.submit([short()], a_situation([POD], now=time.monotonic()))
        await until(lambda: evictions.evictor.reports.history)
        running.cancel()
        await asyncio.wait([running])
        evictions.close()
        return evictions.evictor.reports.history[0].message

    assert "error container uid-web-c0: UNAVAILABLE" in asyncio.run(test())


def test_upstreams_series() -> None:
    total, detail = of_evictions("n1", 3, {("default", "web"): 2})
    assert [(each.name, each.labels, each.value) for each in total.samples] == [
        ("koordlet_pod_eviction", {"node": "n1", "reason": "evicted"}, 3)
    ]
    assert [(each.name, each.labels, each.value) for each in detail.samples] == [
        (
            "koordlet_pod_eviction_detail",
            {"node": "n1", "pod_namespace": "default", "pod_name": "web", "reason": "evicted"},
            2,
        )
    ]


def test_the_status_is_plain_data(tmp_path: Path, workers: Executor) -> None:
    evictions = made(config(tmp_path), workers)
    assert msgspec.json.decode(msgspec.json.encode(evictions.evictor.status())) == {
        "dryRun": False,
        "heldBack": "",
        "evictions": 0,
        "short": [],
        "last": [],
    }
