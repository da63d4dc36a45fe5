"""The work queue: every change is seen, no key is worked on twice at once, failures back off.

On uvloop, which the manager runs on: its timers differ from asyncio's in what their handles know.
"""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
import uvloop

from kube.faults import Faults
from kube.queue import WorkQueue
from tests.beds.apiserver import eventually
from tests.waiting import until


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

    uvloop.run(run())


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

    uvloop.run(run())


def test_work_is_counted() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        seen: list[str] = []
        gate = asyncio.Event()

        async def handle(key: str) -> float | None:
            seen.append(key)
            if len(seen) == 1:
                await gate.wait()
                raise RuntimeError("again")
            return None

        queue.add("a")
        worker = asyncio.create_task(queue.work(handle))
        await eventually(lambda: seen == ["a"])
        assert len(queue.running()) == 1
        gate.set()
        await eventually(lambda: len(seen) == 2 and queue.idle)
        counts = queue.counts
        assert (counts.adds, counts.retries) == (2, 1)
        assert counts.waited.count == counts.worked.count == 2
        assert not queue.running()
        worker.cancel()

    uvloop.run(run())


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
        worker.cancel()

    uvloop.run(run())


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

    uvloop.run(run())


@pytest.mark.parametrize("first", [0.0, -5.0, 1e-9])
def test_a_time_that_is_past_keeps_no_later_one_from_coming(first: float) -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        seen: list[str] = []

        async def handle(key: str) -> float | None:
            seen.append(key)
            return None

        worker = asyncio.create_task(queue.work(handle))
        queue.add_after("now", first)
        # The timer for "now" has not come yet, and is not asked when it comes.
        queue.add_after("soon", 0.02)
        queue.add_after("also now", 0)
        await until(lambda: set(seen) == {"now", "soon", "also now"})
        assert not worker.done()
        worker.cancel()

    uvloop.run(run())


def test_a_forgotten_key_does_not_become_due() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        queue.add_after("gone", 0.01)
        queue.add_after("kept", 0.02)
        queue.forget("gone")
        await until(lambda: queue.due)
        assert queue.take() == "kept"
        assert not queue.due

    uvloop.run(run())


@pytest.mark.parametrize("seconds", [1e12, math.inf, math.nan])
def test_a_time_that_no_timer_can_hold_is_far_away(seconds: float) -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        queue.add_after("never", seconds)
        queue.add_after("soon", 0.01)
        await until(lambda: queue.due)
        assert queue.take() == "soon"
        assert queue.remembered == 2  # the time of "never", and its place among the times
        queue.forget("never")
        assert not queue.due

    uvloop.run(run())


def test_a_time_beyond_the_longest_timer_is_reached_by_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kube.queue._LONGEST_TIMER_S", 0.01)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        queue = WorkQueue("test")
        started = loop.time()
        queue.add_after("a", 0.05)
        await until(lambda: queue.due)
        assert loop.time() - started >= 0.049

    uvloop.run(run())


def test_keys_that_come_and_go_leave_nothing_behind() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        for number in range(5000):
            queue.add_after(f"node-{number}", 300)
            if number >= 10:
                queue.forget(f"node-{number - 10}")
        assert queue.remembered < 200
        for _ in range(5000):  # a key that is asked for ever sooner
            queue.add_after("node-4999", 299 - _ / 1000)
        assert queue.remembered < 200

    uvloop.run(run())


def test_failures_of_a_key_that_is_gone_are_forgotten() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        tries = 0

        async def handle(_: str) -> float | None:
            nonlocal tries
            tries += 1
            raise RuntimeError("refused")

        worker = asyncio.create_task(queue.work(handle))
        queue.add("a")
        await until(lambda: tries >= 2)
        worker.cancel()
        queue.forget("a")
        assert len(queue._failures) == len(queue._later_at) == 0

    uvloop.run(run())


def test_a_fault_of_the_queue_ends_no_worker_and_loses_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kube.queue._FAULT_PAUSE_S", 0.01)

    async def run() -> None:
        queue = WorkQueue("nodes")
        seen: list[str] = []

        async def handle(key: str) -> float | None:
            seen.append(key)
            # The first answer is one that the queue's own code fails on.
            return "soon" if len(seen) == 1 else None  # type: ignore[return-value]

        worker = asyncio.create_task(queue.work(handle))
        queue.add("a")
        await until(lambda: seen == ["a", "a"])
        queue.add("b")
        await until(lambda: seen == ["a", "a", "b"])
        assert not worker.done()
        assert queue.faults.count == 1
        worker.cancel()

    uvloop.run(run())
    assert "nodes: the work queue of a failed" in caplog.text


def test_a_fault_while_a_timer_is_served_does_not_stop_the_timers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        queue = WorkQueue("nodes")
        make_due, calls = queue._make_due, 0

        def failing(now: float) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise AttributeError("when")
            make_due(now)

        monkeypatch.setattr(queue, "_make_due", failing)
        queue.add_after("a", 0.01)
        await until(lambda: queue.due)
        assert queue.faults.count == 1

    uvloop.run(run())
    assert "nodes: the timer failed" in caplog.text


def test_a_fault_that_repeats_is_counted_each_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = Faults("nodes")
    for number in range(100):
        try:
            raise KeyError(number)
        except KeyError:
            faults.note("a subscriber", about=f"key-{number}")
    assert faults.count == 100
    assert caplog.text.count("nodes: a subscriber of key-0 failed") == 1
    assert "key-99" not in caplog.text


def test_others_get_their_turn_while_many_keys_are_worked_on_without_waiting() -> None:
    async def run() -> None:
        queue = WorkQueue("test")
        done = 0
        turns: list[int] = []

        async def handle(_: str) -> float | None:
            nonlocal done
            done += 1
            return None

        async def other() -> None:
            while done < 1000:
                turns.append(done)
                await asyncio.sleep(0)

        for number in range(1000):
            queue.add(f"n{number}")
        workers = [asyncio.create_task(queue.work(handle)) for _ in range(4)]
        await other()
        assert max(later - sooner for sooner, later in itertools.pairwise(turns)) <= 4
        for worker in workers:
            worker.cancel()

    uvloop.run(run())
