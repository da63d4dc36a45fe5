"""Failures that repeat are logged as changes of state and counted in between."""

from __future__ import annotations

import logging

import pytest

from runtime_proxy.failure_log import FailureLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    found = []
    for record in caplog.records:
        fields = record.__dict__
        count = fields.get("failures", fields.get("failures_before"))
        found.append((record.levelname, count))
    caplog.clear()
    return found


def test_a_server_that_keeps_failing_is_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = FailureLog(monotonic=clock)
    for _ in range(1000):
        log.failed("a.json", "PreRunPodSandbox", "out of order")
        clock.now += 1
    assert lines(caplog) == [("WARNING", None)]
    log.succeeded("a.json", "PreRunPodSandbox")
    log.succeeded("a.json", "PreRunPodSandbox")
    assert lines(caplog) == [("INFO", 1000)]
    log.failed("a.json", "PreRunPodSandbox", "again")
    assert lines(caplog) == [("WARNING", None)]


def test_a_server_that_fails_now_and_then_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    log = FailureLog(monotonic=clock)
    for _ in range(60):
        log.failed("a.json", "PreRunPodSandbox", "out of order")
        log.succeeded("a.json", "PreRunPodSandbox")
        clock.now += 1
    assert lines(caplog) == [("WARNING", None), ("INFO", 1)]
    log.failed("a.json", "PreRunPodSandbox", "out of order")
    assert lines(caplog) == [("WARNING", 59)]
    log.succeeded("a.json", "PreRunPodSandbox")
    assert lines(caplog) == [("INFO", 1)]


def test_servers_and_stages_are_logged_on_their_own(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for server in ("a.json", "b.json"):
        for stage in ("PreRunPodSandbox", "PreCreateContainer"):
            log.failed(server, stage, "out of order")
            log.failed(server, stage, "out of order")
    assert [(r.__dict__["server"], r.__dict__["stage"]) for r in caplog.records] == [
        ("a.json", "PreRunPodSandbox"),
        ("a.json", "PreCreateContainer"),
        ("b.json", "PreRunPodSandbox"),
        ("b.json", "PreCreateContainer"),
    ]
    log.succeeded("c.json", "PreRunPodSandbox")
