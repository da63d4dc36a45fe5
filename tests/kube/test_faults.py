"""A fault in the code of one part: counted, logged with the part's name, and survived."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from aiohttp import web

from apis.core import Node, ObjectMeta
from apis.meta import ObjectReference
from kube.cache import Cache, Event
from kube.client import Client
from kube.connection import Connection
from kube.events import EventRecorder
from kube.leader import LeaderElection
from kube.resources import NODES
from tests.kube.scripted import answer, api, listing, node
from tests.waiting import until


def test_a_fault_while_an_object_is_taken_ends_in_another_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kube.cache._FIRST_PAUSE", 0.01)
    lists = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        if request.query.get("watch") == "1":
            await asyncio.sleep(60)
        lists += 1
        return listing(lists, node("a", 1), node("b", 2))

    shrunk = 0

    def shrink(item: Node) -> Node:
        nonlocal shrunk
        shrunk += 1
        if shrunk == 2:
            raise KeyError("a bug")
        return item

    async def run() -> None:
        async with api(handler) as client:
            cache: Cache[Node] = Cache(client, NODES, Node, shrink=shrink)
            task = asyncio.create_task(cache.run())
            await until(lambda: cache.synced)
            assert set(cache.items) == {"a", "b"}
            assert (lists, cache.faults.count, task.done()) == (2, 1, False)
            task.cancel()

    uvloop.run(run())


def test_a_failing_index_or_subscriber_keeps_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        async with Client(Connection("http://localhost")) as client:
            cache: Cache[Node] = Cache(client, NODES, Node)
            heard: list[str] = []

            def broken(_: Event[Node]) -> None:
                raise ZeroDivisionError

            cache.put(Node())
            cache.subscribe(broken)  # hears of what is there already, too
            index = cache.index(lambda item: (item.metadata.name,))
            cache.subscribe(lambda event: heard.append(event.key))
            cache.index(lambda item: (1 // (item.metadata.name != "n"),))
            cache.put(Node(metadata=ObjectMeta(name="n")))
            assert heard == ["", "n"]
            assert [item.metadata.name for item in index.get("n")] == ["n"]
            assert cache.faults.count == 3

    uvloop.run(run())
    assert "cache of nodes: a subscriber failed" in caplog.text
    assert "cache of nodes: an index of n failed" in caplog.text


def test_an_event_that_cannot_be_written_keeps_no_other_from_being_written() -> None:
    written: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        written.append((await request.json())["message"])
        return answer({})

    async def run() -> None:
        async with api(handler) as client:
            events = EventRecorder(client, component="test")
            task = asyncio.create_task(events.run())
            about = ObjectReference(kind="Node", name="n1")
            events.warning(about, "Odd", "not a text: \ud800")
            events.warning(about, "Plain", "fine")
            await until(lambda: written)
            assert (events.faults.count, task.done()) == (1, False)
            task.cancel()

    uvloop.run(run())
    assert written == ["fine"]


def test_a_lease_that_cannot_be_read_is_waited_for_and_ends_nothing() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += request.method == "GET"
        if request.method == "GET" and asked < 3:
            return answer({"metadata": {}, "spec": {"holderIdentity": 7}})
        return answer({"metadata": {"resourceVersion": "1"}, "spec": {}})

    async def run() -> None:
        async with api(handler) as client:
            election = LeaderElection(
                client, namespace="ns", name="lease", identity="us", retry_seconds=0.01
            )
            led = asyncio.Event()

            async def lead() -> None:
                led.set()

            await asyncio.wait_for(election.run(lead), 10)
            assert led.is_set()

    uvloop.run(run())
    assert asked >= 3
