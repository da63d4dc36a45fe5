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


def test_while_bindings_wait_the_others_are_written_one_by_one() -> None:
    async def run() -> None:
        behind = BehindBindings(lambda: True, many=100)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(behind.turn(lambda: 10) for _ in range(3)))
        assert loop.time() - began >= 2.9 * precedence._EVERY_S

    asyncio.run(run())


def test_a_queue_that_is_half_full_is_not_held_back(endless: None) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await BehindBindings(lambda: True, many=100).turn(lambda: 100)

    asyncio.run(run())
