"""The threads of the process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from koordlet.decisions.overtime import Interrupter
from koordlet.process import new_event_loop
from tests import waiting

_COUNT = "import os, koordlet.measurement.store; print(len(os.listdir('/proc/self/task')))"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs: one thread for each")
def test_numpy_starts_no_thread_for_each_cpu() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def _scheduled(monkeypatch: pytest.MonkeyPatch, module: str) -> list[str]:
    """Return the names of the threads that `module` schedules beside the event loop, as they come.

    The scheduling itself is tested in tests/service/test_scheduling.py.
    """
    names: list[str] = []
    monkeypatch.setattr(
        f"{module}.schedule_beside_event_loop",
        lambda: names.append(threading.current_thread().name),
    )
    return names


def test_the_threads_of_asyncios_pool_are_scheduled_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = _scheduled(monkeypatch, "koordlet.process")
    with closing(new_event_loop()) as loop:
        worker = loop.run_until_complete(asyncio.to_thread(threading.current_thread))
        other = loop.run_until_complete(loop.run_in_executor(None, threading.current_thread))
        loop.run_until_complete(loop.shutdown_default_executor())
    assert {worker.name, other.name} == set(names)


def test_the_thread_that_watches_site_policies_is_scheduled_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = _scheduled(monkeypatch, "koordlet.decisions.overtime")
    Interrupter().run(lambda: None, 1.0)
    waiting.wait_until(lambda: names == ["koordlet-site"], "the watching thread")
