"""The work queue: every change is seen, no key is worked on twice at once, failures back off."""

from __future__ import annotations

import asyncio
import itertools

from kube.queue import WorkQueue
from tests.beds.apiserver import eventually


def test_a_key_waits_once_and_changes_during_work_are_not_lost() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        seen: list[str] = []
        at_once = 0
        gate = asyncio.Event()

        async def handle(key: str) -> float | None:
            nonlocal at_once
            at_once += 1
            assert at_once == 1
            seen.append(key)
            await gate.wait()
            at_once -= 1
            return None

        workers = [asyncio.create_task(queue.work(handle)) for _ in range(4)]
        for _ in range(3):
            queue.add("a")
        await eventually(lambda: seen == ["a"])
        queue.add("a")
        queue.add("a")
        gate.set()
        await eventually(lambda: seen == ["a", "a"] and queue.idle)
        for worker in workers:
            worker.cancel()

    asyncio.run(run())


def test_a_failing_key_backs_off_and_harms_no_other() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        tries: list[float] = []
        others: list[str] = []
        loop = asyncio.get_running_loop()

        async def handle(key: str) -> float | None:
            if key != "bad":
                others.append(key)
                return None
            tries.append(loop.time())
            if len(tries) < 5:
                raise RuntimeError("again")
            return None

        worker = asyncio.create_task(queue.work(handle))
        queue.add("bad")
        queue.add("good")
        await eventually(lambda: len(tries) == 5)
        pauses = [later - sooner for sooner, later in itertools.pairwise(tries)]
        assert pauses[-1] > pauses[0]
        assert others == ["good"]
        worker.cancel()

    asyncio.run(run())


def test_a_timer_makes_a_key_due_and_the_earlier_one_counts() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        seen: list[float] = []
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def handle(_: str) -> float | None:
            seen.append(loop.time() - started)
            return 0.05 if len(seen) < 3 else None

        worker = asyncio.create_task(queue.work(handle))
        queue.add_after("a", 30)
        queue.add_after("a", 0.05)
        queue.add_after("a", 60)
        await eventually(lambda: len(seen) == 3, seconds=3)
        assert 0.04 < seen[0] < 1
        queue.add_after("gone", 0.05)
        queue.forget("gone")
        await asyncio.sleep(0.15)
        assert len(seen) == 3
        worker.cancel()

    asyncio.run(run())


def test_a_key_wakes_one_worker_and_is_not_lost_with_it() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        seen: list[str] = []

        async def handle(key: str) -> float | None:
            seen.append(key)
            return None

        workers = [asyncio.create_task(queue.work(handle)) for _ in range(8)]
        await asyncio.sleep(0)
        assert len(queue._idlers) == 8
        queue.add("a")
        assert len(queue._idlers) == 7
        workers[0].cancel()
        await eventually(lambda: seen == ["a"])
        queue.add_after("b", 0.01)
        queue.add_after("c", 0.02)
        await eventually(lambda: seen == ["a", "b", "c"])
        assert len(queue._idlers) == 7
        for worker in workers:
            worker.cancel()

    asyncio.run(run())
