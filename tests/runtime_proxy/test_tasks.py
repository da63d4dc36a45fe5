"""Background tasks: a failure is logged, with the name of the work."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runtime_proxy.tasks import spawn


def test_a_task_that_fails_is_logged_with_its_name_and_its_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("out of order")

    async def run() -> None:
        task = spawn("counting", fail())
        assert task.get_name() == "counting"
        await asyncio.wait({task})
        await asyncio.sleep(0)

    asyncio.run(run())
    (record,) = caplog.records
    assert (record.levelno, vars(record)["work"]) == (logging.ERROR, "counting")
    assert record.exc_info is not None and str(record.exc_info[1]) == "out of order"


def test_tasks_that_end_or_are_cancelled_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def end() -> None:
        """Nothing to do."""

    async def run() -> None:
        ended, cancelled = spawn("ended", end()), spawn("cancelled", asyncio.sleep(60))
        cancelled.cancel()
        await asyncio.wait({ended, cancelled})
        await asyncio.sleep(0)

    asyncio.run(run())
    assert caplog.records == []
