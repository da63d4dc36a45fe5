"""What the log says of passes."""

from __future__ import annotations

import logging

import pytest

from koordlet.reconciler.pass_log import PERIOD_S, PassLog
from koordlet.reconciler.reports import PassReport


def test_passes_are_summed_up_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    log = PassLog(clock=lambda: now[0])
    log.add(PassReport(("timer",)))
    assert not caplog.records
    log.add(PassReport(("start",), subjects=3, written=5))
    for _ in range(59):
        now[0] += 1
        log.add(PassReport(("objects",), subjects=4, written=1, failed=2))
    assert len(caplog.records) == 1
    now[0] = PERIOD_S
    log.add(PassReport(("timer",), subjects=7))
    first, second = [vars(record) for record in caplog.records]
    assert (first["passes"], first["written"], first["reasons"]) == (2, 5, "start,timer")
    assert (second["passes"], second["written"], second["failed"]) == (60, 59, 118)
    assert (second["subjects"], second["reasons"]) == (7, "objects,timer")
    now[0] += 10 * PERIOD_S
    log.add(PassReport(("timer",)))
    assert len(caplog.records) == 2
