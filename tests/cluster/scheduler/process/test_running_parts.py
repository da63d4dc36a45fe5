"""What a leader runs, and in which order its parts end at a stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from kube.kept_client import KeptClient
from tests.beds.apiserver import eventually
from tests.kube.scripted import api, listing, status

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
extenders: [{urlPrefix: "http://127.0.0.1:1", filterVerb: filter, nodeCacheCapable: true}]
profiles:
- schedulerName: koord-scheduler
  plugins:
    multiPoint: {enabled: [{name: Reservation}, {name: Coscheduling}, {name: ElasticQuota}]}
"""
_ENDS = (
    ("extenders", "stop_asking"),
    ("volume_binder", "stop"),
    ("node_locks", "stop"),
    ("binder", "drain"),
    ("reservation_writer", "drain"),
    ("node_locks", "settle"),
    ("evictor", "stop"),
    ("extenders", "close"),
    ("events", "flush"),
)
"""The parts in the order in which they end: no part ends before those that it takes work from."""


async def _answer(request: web.Request) -> web.StreamResponse:
    """Answer as an API server without objects, which takes none."""
    if request.method != "GET":
        return status(403, "Forbidden", "nothing is written")
    if "watch" not in request.query:
        return listing(1)
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(60)
    return response


def test_a_leader_runs_its_parts_and_ends_them_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, str]] = []
    seconds: dict[tuple[str, str], tuple[Any, ...]] = {}

    async def scenario() -> None:
        stop = asyncio.Event()
        async with api(_answer, kind=KeptClient) as client:
            configuration = read_configuration(_CONFIGURATION, obj="test")
            process = SchedulerProcess(client, configuration, seed=1, network_status=True)

            def watch(part: str, name: str) -> None:
                original = getattr(getattr(process, part), name)

                async def recorded(*given: Any) -> None:
                    ended.append((part, name))
                    seconds[part, name] = given
                    await original(*given)

                monkeypatch.setattr(getattr(process, part), name, recorded)

            for part, name in _ENDS:
                watch(part, name)
            assert process.extenders is not None
            opened: list[bool] = []
            extenders_open = process.extenders.open

            def opens() -> None:
                opened.append(process.ready)
                extenders_open()

            monkeypatch.setattr(process.extenders, "open", opens)
            prepared: list[tuple[bool, bool, str]] = []
            monkeypatch.setattr(
                process.scheduling,
                "prepare",
                lambda: prepared.append((process.leading, process.ready, process.unsynced())),
            )
            task = asyncio.create_task(process.run(stop))
            assert (process.leading, process.ready, process.unsynced()) == (False, False, "")
            await eventually(lambda: process.ready)
            assert process.unsynced() == ""
            # Before the first decision, extenders may be asked and who is where is known.
            assert opened == [False]
            assert prepared == [(True, False, "reading the cluster")]
            names = {each.get_name() for each in asyncio.all_tasks()}
            caches = {f"cache {each.resource.plural}" for each in (*process.caches, process.pods)}
            assert names >= caches | {
                "stop",
                "leader",
                "statuses",
                "events",
                "reservations",
                "reservation controller",
                "cache scheduleexplanations",
                "explanations",
                "network topology status",
                "pod group statuses",
                "quota upkeep",
                "scheduling",
            }
            assert not ended
            stop.set()
            await task
            assert (process.ready, process.stopping, process.unsynced()) == (False, True, "")
            left = {each.get_name() for each in asyncio.all_tasks()}
            assert not left & (caches | {"scheduling", "statuses", "events", "reservations"})

    asyncio.run(scenario())
    # Both writers of nodes have the time that the lease leaves, together.
    assert ended == list(_ENDS)
    assert seconds["binder", "drain"] == seconds["reservation_writer", "drain"] == (4.0,)
    assert seconds["node_locks", "settle"] == (1.0,)
    assert seconds["events", "flush"] == (3.0,)
