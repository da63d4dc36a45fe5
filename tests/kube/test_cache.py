"""The list/watch cache: pages, resuming, forgotten history, bookmarks, odd objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.core import Node
from kube.cache import Cache, Change, Event
from kube.client import Client
from kube.connection import Connection
from kube.resources import NODES
from tests.beds.apiserver import eventually
from tests.kube.scripted import api, listing, node, status, stream


def follow(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    check: Callable[[Cache[Node]], Awaitable[None]],
) -> None:
    """Run a cache against a scripted server and check it."""

    async def run() -> None:
        async with api(handler) as client:
            cache: Cache[Node] = Cache(client, NODES, Node)
            task = asyncio.create_task(cache.run())
            try:
                await check(cache)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def is_watch(request: web.Request) -> bool:
    return request.query.get("watch") == "1"


async def forever(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await asyncio.sleep(60)
    return response


def test_a_list_is_read_in_pages_and_watched_from_there() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_watch(request):
            if "continue" not in request.query:
                return listing(7, node("a", 1), more="token")
            assert request.query["continue"] == "token"
            return listing(7, node("b", 2))
        seen.append(request.query["resourceVersion"])
        if len(seen) == 1:
            return await stream(request, ("ADDED", node("c", 8)), ("DELETED", node("a", 9)))
        return await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await eventually(lambda: set(cache.items) == {"b", "c"} and len(seen) == 2)
        # The second watch goes on after the last event of the first.
        assert seen == ["7", "9"]
        assert cache.lists == 1

    follow(handler, check)


def test_the_first_list_is_taken_page_by_page_and_a_broken_one_is_mended() -> None:
    broken, mended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if is_watch(request):
            return await forever(request)
        if broken.is_set():
            return listing(9, node("a", 1), node("b", 8), node("d", 4))
        if "continue" not in request.query:
            return listing(7, node("a", 1), node("b", 2), node("c", 3), more="token")
        await mended.wait()
        broken.set()
        return status(410, "Expired", "the token is too old")

    events: list[tuple[Change, str]] = []

    async def check(cache: Cache[Node]) -> None:
        cache.subscribe(lambda event: events.append((event.change, event.key)))
        await eventually(lambda: set(cache.items) == {"a", "b", "c"})
        assert not cache.synced
        mended.set()
        await eventually(lambda: cache.synced)
        assert set(cache.items) == {"a", "b", "d"}
        first, rest = events[:3], set(events[3:])
        assert first == [(Change.ADDED, key) for key in "abc"]
        assert rest == {(Change.MODIFIED, "b"), (Change.ADDED, "d"), (Change.DELETED, "c")}

    follow(handler, check)


def test_other_tasks_go_on_while_a_long_list_is_read() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if is_watch(request):
            return await forever(request)
        return listing(7, *(node(f"n{number}", number + 1) for number in range(1000)))

    seen: set[int] = set()

    async def check(cache: Cache[Node]) -> None:
        while not cache.synced:
            seen.add(len(cache.items))
            await asyncio.sleep(0)
        assert {50, 500, 950} <= seen

    follow(handler, check)


def test_a_version_that_is_too_old_means_a_new_list_and_events_for_deleted_objects() -> None:
    lists = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal lists
        if not is_watch(request):
            lists += 1
            return listing(5, node("a", 1)) if lists == 1 else listing(9, node("b", 8))
        if request.query["resourceVersion"] == "5":
            gone = {"code": 410, "reason": "Expired", "message": "too old"}
            return await stream(request, ("ERROR", gone))
        return await forever(request)

    events: list[tuple[Change, str]] = []

    async def check(cache: Cache[Node]) -> None:
        cache.subscribe(lambda event: events.append((event.change, event.key)))
        await eventually(lambda: set(cache.items) == {"b"})
        assert events == [(Change.ADDED, "a"), (Change.DELETED, "a"), (Change.ADDED, "b")]

    follow(handler, check)


def test_a_bookmark_moves_the_version_to_resume_from() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_watch(request):
            return listing(5)
        seen.append(request.query["resourceVersion"])
        if len(seen) == 1:
            return await stream(request, ("BOOKMARK", node("", 400)))
        return await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await eventually(lambda: seen == ["5", "400"])

    follow(handler, check)


def test_a_request_to_a_failing_server_is_retried() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 1:
            return status(500, "InternalError", "etcd is away")
        if asked == 2:
            return web.Response(body=b"{not json", content_type="application/json")
        return listing(1, node("a", 1)) if not is_watch(request) else await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await eventually(lambda: "a" in cache.items)

    follow(handler, check)


def test_a_type_that_is_not_installed_is_an_empty_list() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return status(404, "NotFound", "the server could not find the requested resource")

    async def check(cache: Cache[Node]) -> None:
        await asyncio.wait_for(cache.wait_synced(), 10)
        assert not cache.items

    follow(handler, check)


def test_an_object_that_cannot_be_decoded_is_left_out_and_named() -> None:
    odd = {
        "metadata": {"name": "odd", "resourceVersion": "3"},
        "status": {"capacity": {"cpu": "x"}},
    }

    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_watch(request):
            return listing(5, node("a", 1), odd)
        if request.query["resourceVersion"] == "5":
            mended = {"metadata": {"name": "odd", "resourceVersion": "6"}}
            return await stream(request, ("MODIFIED", {**odd}), ("MODIFIED", mended))
        return await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await cache.wait_synced()
        await eventually(lambda: set(cache.items) == {"a", "odd"})
        assert cache.undecodable == {}

    follow(handler, check)


def test_an_object_that_became_undecodable_can_still_be_deleted() -> None:
    odd = {
        "metadata": {"name": "odd", "resourceVersion": "6"},
        "status": {"capacity": {"cpu": "x"}},
    }
    cache = unconnected()
    gone: list[str] = []
    cache.subscribe(lambda e: gone.append(e.key) if e.change is Change.DELETED else None)
    cache.take(line("ADDED", node("odd", 5)))
    cache.take(line("MODIFIED", odd))
    assert set(cache.items) == {"odd"}
    assert cache.left_out("odd")
    cache.take(line("DELETED", odd))
    assert (gone, dict(cache.items), cache.undecodable) == (["odd"], {}, {})


def test_an_object_whose_metadata_cannot_be_decoded_is_left_out_too() -> None:
    metadata = {"name": "odd", "resourceVersion": "6", "labels": 5}
    cache = unconnected()
    cache.take(line("ADDED", {"metadata": metadata}))
    cache.take(line("ADDED", node("a", 7)))
    assert set(cache.items) == {"a"}
    assert list(cache.undecodable) == ["odd"]
    cache.take(line("DELETED", {"metadata": metadata}))
    assert cache.undecodable == {}


def test_an_object_nested_too_deep_is_left_out_and_the_others_stay() -> None:
    nested = b'{"a":' * 3000 + b"1" + b"}" * 3000
    odd = b'{"metadata":{"name":"odd","resourceVersion":"3"},"spec":' + nested + b"}"

    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_watch(request):
            items = b",".join((msgspec.json.encode(node("a", 1)), odd))
            body = b'{"metadata":{"resourceVersion":"5"},"items":[' + items + b"]}"
            return web.Response(body=body, content_type="application/json")
        if request.query["resourceVersion"] == "5":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'{"type":"MODIFIED","object":' + odd + b"}\n")
            await response.write(line("ADDED", node("b", 7)) + b"\n")
            return response
        return await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await eventually(lambda: set(cache.items) == {"a", "b"})
        assert list(cache.undecodable) == ["odd"]
        assert cache.lists == 1

    follow(handler, check)


def test_a_watch_that_ends_at_once_backs_off() -> None:
    watches = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal watches
        if not is_watch(request):
            return listing(5)
        watches += 1
        return await stream(request)

    async def check(cache: Cache[Node]) -> None:
        await cache.wait_synced()
        await asyncio.sleep(0.5)
        assert 1 <= watches <= 6
        assert cache.lists == 1

    follow(handler, check)


def test_not_found_from_a_starting_server_keeps_the_cache_waiting() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 1:
            return status(404, "NotFound", "the server could not find the requested resource")
        return listing(5, node("a", 1)) if not is_watch(request) else await forever(request)

    async def check(cache: Cache[Node]) -> None:
        await asyncio.wait_for(cache.wait_synced(), 5)
        assert set(cache.items) == {"a"}

    follow(handler, check)


def test_a_refusal_ends_when_the_watch_is_open() -> None:
    granted = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if not is_watch(request):
            return listing(5, node("a", 1))
        return await forever(request) if granted.is_set() else status(403, "Forbidden", "no watch")

    async def check(cache: Cache[Node]) -> None:
        await eventually(lambda: cache.forbidden_since is not None)
        assert "no watch" in cache.problem
        granted.set()
        await eventually(lambda: cache.forbidden_since is None)
        assert cache.problem == ""

    follow(handler, check)


def test_what_a_cache_calls_forbidden_has_the_refusal_as_its_problem() -> None:
    """Also while a further watch is on its way, and when the server is away after a refusal."""
    waiting, broken = asyncio.Event(), asyncio.Event()
    watches = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal watches
        if not is_watch(request):
            return listing(5, node("a", 1))
        watches += 1
        if watches == 1:
            return status(403, "Forbidden", "no watch")
        waiting.set()
        await broken.wait()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def check(cache: Cache[Node]) -> None:
        await asyncio.wait_for(waiting.wait(), 10)
        assert cache.forbidden_since is not None and "no watch" in cache.problem
        broken.set()
        await eventually(lambda: "no watch" not in cache.problem)
        assert cache.forbidden_since is None and cache.problem

    follow(handler, check)


def unconnected() -> Cache[Node]:
    return Cache(Client(Connection("http://localhost")), NODES, Node)


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "object": obj})


def test_a_failing_subscriber_keeps_nothing_from_the_others() -> None:
    cache = unconnected()
    got: list[str] = []

    def fail(_: Event[Node]) -> None:
        raise RuntimeError("mine")

    cache.subscribe(fail)
    cache.subscribe(lambda event: got.append(event.key))
    cache.take(line("ADDED", node("a", 1)))
    assert got == ["a"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ADDED", "MODIFIED", "DELETED"]),
        st.sampled_from("abc"),
        st.sampled_from(["x", "y"]),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(EVENTS)
def test_indexes_and_subscribers_agree_with_the_items(
    events: list[tuple[str, str, str]],
) -> None:
    cache = unconnected()
    index = cache.index(lambda item: (item.metadata.labels.get("pool", ""),))
    mirror: dict[str, Node] = {}

    def copy(event: Event[Node]) -> None:
        if event.change is Change.DELETED:
            assert mirror.pop(event.key) is event.old
        else:
            assert (event.key in mirror) is (event.change is Change.MODIFIED)
            mirror[event.key] = event.new

    cache.subscribe(copy)
    for number, (kind, name, pool) in enumerate(events):
        cache.take(line(kind, node(name, number, pool=pool)))
    assert dict(cache.items) == mirror
    for pool in ("x", "y"):
        by_scan = {n for n, item in mirror.items() if item.metadata.labels["pool"] == pool}
        assert {item.metadata.name for item in index.get(pool)} == by_scan
        assert index.count(pool) == len(by_scan)
