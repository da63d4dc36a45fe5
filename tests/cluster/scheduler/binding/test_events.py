"""Events: wording, aggregation, and an account of those that are not written."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cluster.scheduler.binding import events as events_module
from cluster.scheduler.binding.events import (
    Event,
    EventCounts,
    EventWriter,
    failed,
    pod_reference,
    preempted,
    reservation_reference,
    scheduled,
)
from kube.kept_client import KeptClient
from tests.beds.apiserver import eventually
from tests.cluster.scheduler.binding.stored_pods import Fault, cut, refuse
from tests.kube.scripted import answer, api, status

POD = pod_reference("ns", "p", "u")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(events_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(events_module, "_LONGEST_PAUSE_S", 0.01)
    yield


def failure(note: str = "no node", name: str = "p") -> Event:
    return failed(pod_reference("ns", name, f"uid-{name}"), note, controller="c")


async def flushed(writer: EventWriter) -> int:
    """Wait until all is written, which is long before the time of the flush is over."""
    return await asyncio.wait_for(writer.flush(10_000), 30)


class Bed:
    """An API server that keeps events. faults: of the next writes; always: of all."""

    def __init__(self) -> None:
        self.moment = 1_700_000_000.0
        self.stored: dict[str, dict[str, Any]] = {}
        self.faults: deque[Fault | None] = deque()
        self.always: Fault | None = None
        self.writes: list[str] = []
        self.writer: EventWriter

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        self.writes.append(request.method)
        fault = self.faults.popleft() if self.faults else self.always
        if fault is not None:
            found = fault(request)
            if found is None:
                assert request.transport is not None
                request.transport.abort()
                return answer({})
            return found
        if request.method == "POST":
            self.stored[body["metadata"]["name"]] = {**body, "path": request.path}
        else:
            name = request.path.rsplit("/", 1)[-1]
            if name not in self.stored:
                return status(404, "NotFound")
            self.stored[name].update(body)
        return answer({})

    @asynccontextmanager
    async def running(self, *, at_once: int = 4) -> AsyncIterator[EventWriter]:
        async with api(self.handle, kind=KeptClient) as client:
            self.writer = EventWriter(
                client, instance="i", now=lambda: self.moment, at_once=at_once
            )
            task = asyncio.create_task(self.writer.run())
            yield self.writer
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert self.writer.faults.count == 0


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            scheduled(POD, "n1", controller="c"),
            ("Normal", "Scheduled", "Binding", "Successfully assigned ns/p to n1"),
        ),
        (
            failed(POD, "0/2 nodes are available", controller="c"),
            ("Warning", "FailedScheduling", "Scheduling", "0/2 nodes are available"),
        ),
        (
            preempted(POD, pod_reference("ns", "q", "v"), "n1", controller="c"),
            ("Normal", "Preempted", "Preempting", "Preempted by pod v on node n1"),
        ),
        (
            scheduled(reservation_reference("r", "u"), "n1", controller="c"),
            ("Normal", "Scheduled", "Binding", "Successfully assigned r to n1"),
        ),
    ],
)
def test_events_are_worded_as_kube_schedulers(
    event: Event, expected: tuple[str, str, str, str]
) -> None:
    bed = Bed()

    async def run() -> None:
        async with bed.running() as writer:
            writer.record(event)
            assert await flushed(writer) == 0

    asyncio.run(run())
    (stored,) = bed.stored.values()
    assert tuple(stored[key] for key in ("type", "reason", "action", "note")) == expected
    assert stored["regarding"]["uid"] == "u"
    assert stored["regarding"]["apiVersion"] == event.about.api_version
    assert stored["eventTime"] == "2023-11-14T22:13:20.000000Z"
    assert (stored["reportingController"], stored["reportingInstance"]) == ("c", "i")
    assert stored.get("related", {}).get("name") == ("q" if event.related else None)
    namespace = event.about.namespace or "default"
    assert stored["path"] == f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"


def test_a_repeated_failure_becomes_a_series_that_is_written_seldom() -> None:
    bed = Bed()

    async def run() -> None:
        async with bed.running() as writer:
            for _ in range(7):
                writer.record(failure())
                await flushed(writer)
                bed.moment += 10
            assert writer.counts.repeated == 6
            # After six minutes without it, it is an event of its own.
            bed.moment += 361
            writer.record(failure())
            await flushed(writer)

    asyncio.run(run())
    assert bed.writes == ["POST", "PATCH", "PATCH", "POST"]
    first, second = bed.stored.values()
    assert first["series"] == {"count": 7, "lastObservedTime": "2023-11-14T22:14:20.000000Z"}
    assert "series" not in second


def test_a_series_whose_event_has_ended_begins_again() -> None:
    bed = Bed()

    async def run() -> None:
        async with bed.running() as writer:
            for _ in range(3):
                writer.record(failure())
                await flushed(writer)
                if len(bed.writes) == 1:
                    bed.stored.clear()
                bed.moment += 31

    asyncio.run(run())
    assert bed.writes == ["POST", "PATCH", "POST"]


def test_of_a_pods_failures_that_wait_only_the_newest_is_written() -> None:
    bed = Bed()

    async def run() -> None:
        async with bed.running(at_once=1) as writer:
            for note in ("first", "second", "third"):
                writer.record(failure(note))
            writer.record(failure("other pod", name="q"))
            await flushed(writer)
            assert (writer.counts.replaced, writer.counts.written) == (2, 2)

    asyncio.run(run())
    assert [stored["note"] for stored in bed.stored.values()] == ["third", "other pod"]


@pytest.mark.parametrize("fault", [cut, *(refuse(code, "Reason") for code in (401, 408, 429, 500))])
def test_a_failed_write_is_repeated(fault: Fault) -> None:
    bed = Bed()
    bed.faults.append(fault)

    async def run() -> None:
        async with bed.running() as writer:
            writer.record(failure())
            writer.record(scheduled(POD, "n1", controller="c"))
            assert await flushed(writer) == 0
            assert (writer.counts.written, writer.counts.lost) == (2, 0)

    asyncio.run(run())
    assert len(bed.stored) == 2


def test_a_failure_that_is_recorded_while_an_older_one_is_refused_takes_its_place() -> None:
    bed = Bed()

    def meanwhile(_: web.Request) -> None:
        bed.writer.record(failure("newer"))

    bed.faults.append(meanwhile)

    async def run() -> None:
        async with bed.running(at_once=1) as writer:
            writer.record(failure("older"))
            assert await flushed(writer) == 0
            assert writer.counts == EventCounts(written=1, replaced=1)

    asyncio.run(run())
    assert [stored["note"] for stored in bed.stored.values()] == ["newer"]


def test_an_event_that_cannot_be_made_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed()
    made = EventWriter._body

    def broken(writer: EventWriter, waiting: Any, namespace: str) -> bytes:
        if waiting.event.note == "bad":
            raise ValueError("a defect")
        return made(writer, waiting, namespace)

    monkeypatch.setattr(EventWriter, "_body", broken)

    async def run() -> None:
        async with api(bed.handle, kind=KeptClient) as client:
            writer = EventWriter(client, instance="i", now=lambda: bed.moment, at_once=1)
            task = asyncio.create_task(writer.run())
            writer.record(failure("good"))
            writer.record(failure("bad", name="q"))
            assert await flushed(writer) == 0
            assert writer.counts == EventCounts(written=1, lost=1)
            assert writer.faults.count == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert "1 events are lost, the last is FailedScheduling about Pod ns/q: a defect" in caplog.text


def test_a_write_that_had_succeeded_is_not_an_error() -> None:
    bed = Bed()
    bed.faults.extend([cut, refuse(409, "AlreadyExists")])

    async def run() -> None:
        async with bed.running() as writer:
            writer.record(scheduled(POD, "n1", controller="c"))
            assert await flushed(writer) == 0
            assert (writer.counts.written, writer.counts.lost) == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("code", "writes"), [(403, 1), (404, 1), (422, 1), (500, 5)])
def test_a_refused_event_is_counted_and_logged(
    code: int, writes: int, caplog: pytest.LogCaptureFixture
) -> None:
    bed = Bed()
    bed.always = refuse(code, "Reason", "because")

    async def run() -> None:
        async with bed.running() as writer:
            writer.record(failure())
            assert await flushed(writer) == 0
            assert writer.counts.lost == 1

    asyncio.run(run())
    assert len(bed.writes) == writes
    assert "1 events are lost, the last is FailedScheduling about Pod ns/p" in caplog.text
    assert "because" in caplog.text


def test_what_waits_is_bounded_and_what_is_left_at_the_end_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events_module, "_MOST_WAITING", 10)
    bed = Bed()
    bed.always = cut

    async def run() -> None:
        async with bed.running() as writer:
            for number in range(15):
                writer.record(
                    scheduled(pod_reference("ns", f"p{number}", "u"), "n", controller="c")
                )
            assert (writer.waiting, writer.counts.lost) == (10, 5)
            await eventually(lambda: len(bed.writes) > 10)
            left = await writer.flush(0.05)
            # Up to four are being written, and are not given up.
            assert left == 10
            assert 5 + left - 4 <= writer.counts.lost <= 5 + left
            # The first of the five that were too many has a line of its own.
            text = f"{writer.counts.lost - 1} events are lost: the scheduler ends"
            assert text in caplog.text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("note", "stored"),
    [
        ("x" * 1024, "x" * 1024),
        ("é" * 512, "é" * 512),
        ("x" * 1025, "x" * 1021 + "..."),
        # A character of two bytes is not cut in half.
        ("é" * 1000, "é" * 510 + "..."),
    ],
)
def test_a_note_is_cut_to_what_the_server_takes(note: str, stored: str) -> None:
    bed = Bed()

    async def run() -> None:
        async with bed.running() as writer:
            writer.record(failure(note))
            await flushed(writer)

    asyncio.run(run())
    (event,) = bed.stored.values()
    assert event["note"] == stored
