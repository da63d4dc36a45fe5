"""The evictor's loop: what is submitted to it, defects, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from hooks.subject import Pod
from koordlet.qos.eviction.means import Answer
from koordlet.qos.strategy import Situation
from tests.koordlet.qos.eviction.making import A, Api, B, Bed, Runtime, short
from tests.koordlet.qos.eviction_making import a_situation
from tests.waiting import until


def situation(bed: Bed, *pods: Pod) -> Situation:
    return a_situation(pods, now=bed.now)


def test_what_is_submitted_is_carried_out_unless_it_is_old() -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        assert bed.api is not None
        running = asyncio.create_task(bed.evictor.run())
        await asyncio.to_thread(bed.evictor.submit, [short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.evictor.reports.evictions == 1)
        stale = a_situation([B], now=bed.now - 6)
        bed.evictor.submit([short(5, (B, 10))], stale)
        await until(lambda: bed.evictor._submitted is None)
        assert bed.api.asked == ["a"], "old measurements evict nothing"
        running.cancel()

    asyncio.run(test())


def test_a_defect_in_a_round_does_not_end_the_evictor() -> None:
    class Broken(Api):
        async def evict(self, pod: Pod) -> Answer:
            if pod.name == "a":
                raise ZeroDivisionError
            return await super().evict(pod)

    async def test() -> None:
        bed = Bed(api=Broken())
        running = asyncio.create_task(bed.evictor.run())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.evictor._submitted is None)
        bed.evictor.submit([short(5, (B, 10))], situation(bed, B))
        await until(lambda: bed.evictor.reports.evictions == 1)
        running.cancel()

    asyncio.run(test())


def test_what_was_submitted_before_the_start_is_carried_out() -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        running = asyncio.create_task(bed.evictor.run())
        await until(lambda: bed.evictor.reports.evictions == 1)
        running.cancel()

    asyncio.run(test())


def test_what_is_submitted_after_the_end_is_no_error() -> None:
    """The strategies' thread may end after the event loop."""
    bed = Bed(api=Api())

    async def life() -> None:
        running = asyncio.create_task(bed.evictor.run())
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(life())
    bed.evictor.submit([short(5, (A, 10))], situation(bed, A))


@pytest.mark.parametrize(
    ("interval_s", "age_s", "asked"),
    [(1.0, 5.0, ["a"]), (1.0, 5.1, []), (4.0, 12.0, ["a"]), (4.0, 12.1, [])],
)
def test_measurements_are_old_after_five_seconds_or_three_intervals(
    interval_s: float, age_s: float, asked: list[str]
) -> None:
    async def test() -> None:
        bed = Bed(api=Api())
        assert bed.api is not None
        then = a_situation([A], now=bed.now - age_s)
        bed.evictor.submit(
            [short(5, (A, 10))], msgspec.structs.replace(then, interval_s=interval_s)
        )
        running = asyncio.create_task(bed.evictor.run())
        await until(lambda: bed.evictor._submitted is None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bed.api.asked == asked
        running.cancel()

    asyncio.run(test())


def test_the_end_of_the_evictor_is_the_end_of_its_waiting_for_containers() -> None:
    async def test() -> None:
        cancelled = asyncio.Event()

        class Hanging(Runtime):
            async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
                self.stopped.append((tuple(container_ids), grace_s))
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
                return ""

        bed = Bed(runtime=Hanging())
        assert bed.runtime is not None
        running = asyncio.create_task(bed.evictor.run())
        bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
        await until(lambda: bed.runtime is not None and bed.runtime.stopped)
        running.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)
        # Nothing takes what is submitted now, and nothing fails.
        bed.evictor.submit([short(5, (B, 10))], situation(bed, B))

    asyncio.run(test())


def test_a_defect_in_rounds_is_logged_and_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Api):
        async def evict(self, pod: Pod) -> Answer:
            self.asked.append(pod.name)
            raise ZeroDivisionError

    async def test() -> None:
        bed = Bed(api=Broken())
        assert bed.api is not None
        running = asyncio.create_task(bed.evictor.run())
        for count in (1, 2, 3):
            bed.evictor.submit([short(5, (A, 10))], situation(bed, A))
            await until(lambda count=count: bed.api and len(bed.api.asked) == count)  # type: ignore[misc]
        running.cancel()

    asyncio.run(test())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("koordlet.qos", "ERROR")
    assert record.getMessage() == "a round of evictions failed"
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
