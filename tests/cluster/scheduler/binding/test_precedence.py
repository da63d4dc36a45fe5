"""Writes that can wait go behind bindings, at a low rate, and stay behind for no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from cluster.scheduler.binding import precedence
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.events import EventWriter, failed, pod_reference
from cluster.scheduler.binding.placement import Outcome, Placement
from cluster.scheduler.binding.precedence import BehindBindings
from cluster.scheduler.binding.statuses import UNSCHEDULABLE, PodStatus, Shown, StatusWriter
from kube.client import Client
from tests.beds.apiserver import eventually
from tests.cluster.fake_api import in_virtual_time


class _Held(Client):
    """An API server that answers when it is allowed to, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = asyncio.Event()

    async def request(self, method: str, path: str, **_: object) -> bytes:
        self.asked.append(f"{method} {path}")
        if path.endswith("/binding"):
            await self.open.wait()
        return b"{}"

    def others(self) -> int:
        """Return how many requests were not for bindings."""
        return sum(not each.endswith("/binding") for each in self.asked)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The pause between two writes behind bindings does not end in this test."""
    monkeypatch.setattr(precedence, "_EVERY_S", 3600.0)
    yield


class _Bed:
    """A binder with five bindings that are not answered, a status and an event behind them."""

    def __init__(self) -> None:
        self.client = _Held()
        self.outcomes: list[tuple[Placement, Outcome]] = []
        self.binder = Binder(self.client, self._ended, at_once=1)
        self.statuses = StatusWriter(self.client, now=lambda: 0.0, bindings_wait=self._wait)
        self.events = EventWriter(
            self.client, instance="i", now=lambda: 0.0, bindings_wait=self._wait
        )

    def _wait(self) -> bool:
        return self.binder.backlogged

    def _ended(self, placement: Placement, outcome: Outcome) -> None:
        self.outcomes.append((placement, outcome))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for number in range(5):
            self.binder.submit(Placement("ns", f"b{number}", f"ub{number}", "n"))
        assert self.binder.backlogged
        tasks = [asyncio.create_task(each.run()) for each in (self.statuses, self.events)]
        self.statuses.submit(PodStatus("ns", "p", "u", UNSCHEDULABLE, "no node"), Shown())
        self.events.record(failed(pod_reference("ns", "p", "u"), "no node", controller="c"))
        yield
        self.client.open.set()
        await eventually(lambda: len(self.outcomes) == 5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_statuses_and_events_wait_while_bindings_do(endless: None) -> None:
    async def run() -> None:
        bed = _Bed()
        async with bed.running():
            for _ in range(50):
                await asyncio.sleep(0)
            assert bed.client.others() == 0

    asyncio.run(run())


def test_statuses_and_events_are_written_when_no_binding_waits_any_more() -> None:
    async def run() -> None:
        bed = _Bed()
        async with bed.running():
            bed.client.open.set()
            await eventually(lambda: len(bed.outcomes) == 5)
            assert not bed.binder.backlogged
            await eventually(lambda: bed.client.others() == 2)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("busy", "waiting", "seconds"), [(True, 99, 0.15), (True, 100, 0.0), (False, 99, 0.0)]
)
def test_while_bindings_wait_the_others_are_written_one_by_one(
    busy: bool, waiting: int, seconds: float
) -> None:
    """A queue that is half full is not held back, so that it never overflows by this."""

    async def run() -> float:
        behind = BehindBindings(lambda: busy, many=100)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(behind.turn(lambda: waiting) for _ in range(3)))
        return asyncio.get_running_loop().time() - began

    assert in_virtual_time(run) == pytest.approx(seconds)


def test_a_write_that_the_server_does_not_take_is_followed_by_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.uniform", lambda least, most: (least + most) / 2)
    answers = [True, True, True, False, True, False]
    times: list[float] = []
    left = [len(answers)]

    async def run() -> None:
        wake, clock = asyncio.Event(), asyncio.get_running_loop().time
        began = clock()

        async def write_next() -> bool:
            times.append(clock() - began)
            left[0] -= 1
            return answers[len(times) - 1]

        behind = BehindBindings(lambda: False, many=100)
        task = asyncio.create_task(
            behind.write(write_next, waiting=lambda: left[0], wake=wake, pauses=(1.0, 3.0))
        )
        await asyncio.sleep(100)
        assert len(times) == len(answers)
        # What comes later is written when it wakes the writer.
        answers.append(False)
        left[0] = 1
        await asyncio.sleep(100)
        assert len(times) == len(answers) - 1
        wake.set()
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)
    assert times == [0, 1, 3, 6, 6, 7, 200]
