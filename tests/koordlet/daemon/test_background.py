"""Tasks that run as long as the daemon."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from koordlet.daemon.background import Background
from tests.waiting import until


def test_repeated_work_is_done_in_a_worker_thread_until_the_daemon_ends() -> None:
    threads: list[int] = []
    faults: list[str] = []

    async def test(workers: ThreadPoolExecutor) -> None:
        background = Background(lambda: faults.append("fault"))
        background.repeat(
            "look", lambda: threads.append(threading.get_ident()), workers=workers, pause_s=0.0
        )
        await until(lambda: len(threads) >= 3)
        await background.cancel()

    with ThreadPoolExecutor(1) as workers:
        asyncio.run(test(workers))
    assert threading.get_ident() not in threads
    assert faults == []


def test_repeated_work_that_fails_ends_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    faults: list[str] = []

    def look() -> None:
        raise ValueError("a defect")

    async def test(workers: ThreadPoolExecutor) -> None:
        background = Background(lambda: faults.append("fault"))
        background.repeat("look", look, workers=workers, pause_s=0.0)
        await until(lambda: faults)
        await background.cancel()

    with ThreadPoolExecutor(1) as workers:
        asyncio.run(test(workers))
    assert faults == ["fault"]
    assert "task failed, stopping" in caplog.text
