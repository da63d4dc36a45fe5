"""Conditions: only changes, only the newest, never after the binding, nothing lost in silence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.binding import statuses as statuses_module
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.placement import Bound, Outcome, Placement
from cluster.scheduler.binding.statuses import (
    SCHEDULING_GATED,
    UNSCHEDULABLE,
    PodStatus,
    Shown,
    StatusCounts,
    StatusWriter,
)
from tests.beds.apiserver import eventually
from tests.cluster.scheduler.binding.stored_pods import After, StoredPods, cut, refuse, serving

STATUS = PodStatus("ns", "p", "u", UNSCHEDULABLE, "0/2 nodes are available")
SAYS_SO = Shown("False", UNSCHEDULABLE, "0/2 nodes are available")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(statuses_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(statuses_module, "_LONGEST_PAUSE_S", 0.01)
    yield


@asynccontextmanager
async def writing(store: StoredPods, *, at_once: int = 4) -> AsyncIterator[StatusWriter]:
    async with serving(store) as client:
        writer = StatusWriter(client, now=lambda: 0.0, at_once=at_once)
        running = asyncio.create_task(writer.run())
        yield writer
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert writer.faults.count == 0


def one_pod() -> StoredPods:
    store = StoredPods()
    store.add("p")
    return store


def test_a_newer_status_takes_the_place_of_the_older_one() -> None:
    async def run() -> None:
        store = StoredPods()
        for name in ("p", "q"):
            store.add(name)
        async with serving(store) as client:
            writer = StatusWriter(client, now=lambda: 0.0, at_once=1)
            for name in ("p", "q"):
                writer.submit(replace(STATUS, name=name), Shown())
            writer.submit(replace(STATUS, name="p", message="another"), Shown())
            task = asyncio.create_task(writer.run())
            await eventually(lambda: len(store.requests) == 2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert [path.split("/")[-2] for _, path, _ in store.requests] == ["p", "q"]
        assert "another" in str(store.requests[0][2])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("shown", "change", "written"),
    [
        (Shown(), {}, True),
        (SAYS_SO, {}, False),
        (SAYS_SO, {"nominated_node": ""}, False),
        (SAYS_SO, {"nominated_node": "n"}, True),
        (replace(SAYS_SO, nominated_node="n"), {"nominated_node": "n"}, False),
        (replace(SAYS_SO, nominated_node="n"), {}, False),
        (replace(SAYS_SO, nominated_node="n"), {"nominated_node": ""}, True),
        (replace(SAYS_SO, status="True"), {}, True),
        (SAYS_SO, {"reason": SCHEDULING_GATED}, True),
        (SAYS_SO, {"message": "other"}, True),
    ],
)
def test_what_the_pod_shows_is_not_written(
    shown: Shown, change: dict[str, Any], written: bool
) -> None:
    async def run() -> None:
        async with writing(one_pod()) as writer:
            writer.submit(replace(STATUS, **change), shown)
            assert writer.waiting == int(written)
            assert writer.counts.unchanged == int(not written)

    asyncio.run(run())


def test_the_time_of_the_transition_is_set_when_there_is_one() -> None:
    store = one_pod()

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(STATUS, Shown())
            await eventually(lambda: writer.counts.written == 1)
            # The watch is late: our own write counts. The generation alone changes nothing.
            writer.submit(replace(STATUS, generation=3), Shown())
            assert writer.counts.unchanged == 1
            changed = replace(STATUS, message="m", nominated_node="", generation=3)
            writer.submit(changed, Shown())
            await eventually(lambda: writer.counts.written == 2)

    asyncio.run(run())
    condition: dict[str, Any] = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes are available",
        "lastTransitionTime": "1970-01-01T00:00:00Z",
    }
    (_, path, first), (_, _, second) = store.requests
    assert path == "/api/v1/namespaces/ns/pods/p/status"
    assert first == {"metadata": {"uid": "u"}, "status": {"conditions": [condition]}}
    del condition["lastTransitionTime"]
    condition |= {"message": "m", "observedGeneration": 3}
    status = {"conditions": [condition], "nominatedNodeName": None}
    assert second == {"metadata": {"uid": "u"}, "status": status}


def test_of_what_waits_only_the_newest_is_written() -> None:
    store = one_pod()

    async def run() -> None:
        async with writing(store) as writer:
            for number in range(5):
                writer.submit(replace(STATUS, message=str(number)), Shown())
            await eventually(lambda: writer.counts.written == 1)
            assert writer.counts.replaced == 4

    asyncio.run(run())
    (request,) = store.requests
    assert request[2]["status"]["conditions"][0]["message"] == "4"


@pytest.mark.parametrize(
    "fault",
    [
        cut,
        After(cut),
        refuse(500, "InternalError"),
        refuse(429, "TooManyRequests"),
        refuse(409, "Conflict"),
        refuse(408, "Timeout"),
        refuse(401, "Unauthorized"),
    ],
)
def test_a_failed_write_is_repeated(fault: After) -> None:
    store = one_pod()
    store.faults = deque([fault])

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(STATUS, Shown())
            await eventually(lambda: writer.counts.written == 1)
            assert writer.counts.lost == 0

    asyncio.run(run())
    assert len(store.requests) == 2


@pytest.mark.parametrize("name", ["gone", "p"])
def test_a_status_of_a_pod_that_is_gone_or_replaced_is_dropped(name: str) -> None:
    store = one_pod()

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, name=name, uid="before"), Shown())
            await eventually(lambda: writer.counts == StatusCounts(gone=1))
            assert writer.waiting == 0

    asyncio.run(run())
    assert "conditions" not in store.pods["p"]["status"]


def test_a_status_that_cannot_be_made_costs_itself_alone() -> None:
    store = one_pod()
    asked: list[None] = []

    def now() -> float:
        asked.append(None)
        if len(asked) == 1:
            raise ValueError("a defect")
        return 0.0

    async def run() -> None:
        async with serving(store) as client:
            writer = StatusWriter(client, now=now, at_once=1)
            running = asyncio.create_task(writer.run())
            writer.submit(replace(STATUS, name="q"), Shown())
            writer.submit(STATUS, Shown())
            await eventually(lambda: writer.counts == StatusCounts(written=1, lost=1))
            assert writer.faults.count == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_a_newer_status_takes_the_place_of_one_that_failed() -> None:
    store = one_pod()
    store.faults = deque([cut])
    store.delay = 0.02

    async def run() -> None:
        async with writing(store, at_once=1) as writer:
            writer.submit(STATUS, Shown())
            await eventually(lambda: store.requests, every=0.002)
            writer.submit(replace(STATUS, message="newer"), Shown())
            await eventually(lambda: writer.counts.written == 1)
            assert writer.counts.replaced == 1

    asyncio.run(run())
    assert [r[2]["status"]["conditions"][0]["message"] for r in store.requests][1:] == ["newer"]


def nominations(store: StoredPods) -> list[str | None]:
    """Return the nomination of each request; "-" where it has none."""
    return [body["status"].get("nominatedNodeName", "-") for _, _, body in store.requests]


@pytest.mark.parametrize("node", ["n1", ""])
@pytest.mark.parametrize("message", ["newer", STATUS.message])
def test_a_nomination_that_waits_is_written_with_the_newer_status(node: str, message: str) -> None:
    store = one_pod()
    shown = replace(SAYS_SO, nominated_node="" if node else "before")

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, nominated_node=node), shown)
            writer.submit(replace(STATUS, message=message), shown)
            await eventually(lambda: writer.counts.written == 1)

    asyncio.run(run())
    assert nominations(store) == [node or None]
    assert store.requests[0][2]["status"]["conditions"][0]["message"] == message


def test_a_nomination_that_waits_is_of_one_pod_alone() -> None:
    store = StoredPods()
    store.add("p", uid="later")

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, nominated_node="n1"), Shown())
            writer.submit(replace(STATUS, uid="later"), Shown())
            await eventually(lambda: writer.counts.written == 1)

    asyncio.run(run())
    assert nominations(store) == ["-"]


@pytest.mark.parametrize("node", ["n1", ""])
def test_a_nomination_whose_write_failed_is_written_with_the_newer_status(node: str) -> None:
    store = one_pod()
    store.faults = deque([cut])
    store.delay = 0.02

    async def run() -> None:
        async with writing(store, at_once=1) as writer:
            writer.submit(replace(STATUS, nominated_node=node), Shown())
            await eventually(lambda: store.requests, every=0.002)
            writer.submit(replace(STATUS, message="newer"), Shown())
            await eventually(lambda: writer.counts.written == 1)

    asyncio.run(run())
    assert nominations(store)[1:] == [node or None]


def test_a_nomination_that_ends_while_it_is_written_is_removed() -> None:
    store = one_pod()
    store.delay = 0.05

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, nominated_node="n1"), SAYS_SO)
            await eventually(lambda: store.requests, every=0.002)
            # The pod does not show the nomination yet.
            writer.submit(replace(STATUS, nominated_node=""), SAYS_SO)
            await eventually(lambda: writer.counts.written == 2)

    asyncio.run(run())
    assert nominations(store) == ["n1", None]


@pytest.mark.parametrize(("code", "requests"), [(403, 1), (422, 1), (500, 5)])
def test_a_refused_status_is_counted_and_logged(
    code: int, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = one_pod()
    store.always = refuse(code, "Reason", "no")

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(STATUS, Shown())
            await eventually(lambda: writer.counts.lost == 1)

    asyncio.run(run())
    assert len(store.requests) == requests
    assert "the status of pod ns/p (Unschedulable) is not written" in caplog.text


@pytest.mark.parametrize("node", ["n1", ""])
def test_a_nomination_that_was_refused_is_written_with_the_next_status(node: str) -> None:
    store = one_pod()
    store.faults = deque([refuse(403, "Forbidden", "by policy")])

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, nominated_node=node), Shown(nominated_node="n0"))
            await eventually(lambda: writer.counts.lost == 1)
            # The reason is the same, and the pod's next attempt leaves the nomination as it is.
            shown = replace(SAYS_SO, nominated_node="n0")
            writer.submit(STATUS, shown)
            await eventually(lambda: writer.counts.written == 1)
            writer.submit(STATUS, shown)
            writer.submit(replace(STATUS, nominated_node="n2"), shown)
            await eventually(lambda: writer.counts.written == 2)
            writer.submit(replace(STATUS, message="another"), shown)
            await eventually(lambda: writer.counts.written == 3)

    asyncio.run(run())
    assert nominations(store) == [node or None, node or None, "n2", "-"]


def test_too_many_that_wait_lose_the_oldest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(statuses_module, "_MOST_WAITING", 3)

    async def run() -> None:
        async with serving(StoredPods()) as client:
            writer = StatusWriter(client, now=lambda: 0.0)
            for number in range(5):
                writer.submit(replace(STATUS, name=f"p{number}"), Shown())
            assert (writer.waiting, writer.counts.lost) == (3, 2)

    asyncio.run(run())
    assert "the status of pod ns/p1 (Unschedulable) is not written: too many" in caplog.text


def test_a_message_is_cut() -> None:
    store = one_pod()

    async def run() -> None:
        async with writing(store) as writer:
            writer.submit(replace(STATUS, message="x" * 20_000), Shown())
            await eventually(lambda: writer.counts.written == 1)

    asyncio.run(run())
    message = store.requests[0][2]["status"]["conditions"][0]["message"]
    assert len(message) == 16 * 1024
    assert message.endswith("x...")


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_condition_never_follows_the_binding(in_flight: bool) -> None:
    store = one_pod()
    store.delay = 0.05

    async def run() -> None:
        async with serving(store) as client:
            outcomes: list[Outcome] = []
            writer = StatusWriter(client, now=lambda: 0.0)
            binder = Binder(client, lambda _, found: outcomes.append(found), before=writer.settle)
            running = asyncio.create_task(writer.run())
            writer.submit(STATUS, Shown())
            if in_flight:
                await eventually(lambda: store.requests, every=0.002)
            binder.submit(Placement("ns", "p", "u", "n1"))
            if not in_flight:
                await writer.settle("ns/p")
            await eventually(lambda: outcomes == [Bound()])
            await asyncio.sleep(0.1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert store.writes == (["PATCH status"] if in_flight else []) + ["POST binding"]
    assert store.most_parallel == 1


def test_a_condition_that_fails_while_the_binding_waits_for_it_is_not_repeated() -> None:
    store = one_pod()
    store.delay = 0.05
    store.faults = deque([refuse(429, "TooManyRequests")])

    async def run() -> None:
        async with serving(store) as client:
            outcomes: list[Outcome] = []
            writer = StatusWriter(client, now=lambda: 0.0)
            binder = Binder(client, lambda _, found: outcomes.append(found), before=writer.settle)
            running = asyncio.create_task(writer.run())
            writer.submit(STATUS, Shown())
            await eventually(lambda: store.requests, every=0.002)
            binder.submit(Placement("ns", "p", "u", "n1"))
            await eventually(lambda: outcomes == [Bound()])
            assert (writer.waiting, writer.counts.replaced) == (0, 1)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert store.writes == ["PATCH status", "POST binding"]


def test_what_waits_for_a_bound_pod_is_dropped() -> None:
    async def run() -> None:
        async with serving(one_pod()) as client:
            writer = StatusWriter(client, now=lambda: 0.0)
            writer.submit(STATUS, Shown())
            writer.forget("ns/p", "another pod of the name")
            assert writer.waiting == 1
            writer.forget("ns/p", "u")
            assert writer.waiting == 0

    asyncio.run(run())
