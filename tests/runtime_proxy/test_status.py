"""What is counted, and how it is exposed."""

from __future__ import annotations

import pytest

from runtime_proxy.stages import Stage
from runtime_proxy.status import Figures


def test_hook_calls_are_counted_by_server_stage_and_outcome() -> None:
    figures = Figures(lambda: 10.0)
    for outcome in ("ok", "ok", "timeout"):
        figures.hook_called("a.json", Stage.PRE_RUN_POD_SANDBOX, outcome, 0.002)
    figures.hook_called("b.json", Stage.PRE_RUN_POD_SANDBOX, "ok", 3.0)
    assert figures.hook_calls == {
        ("a.json", Stage.PRE_RUN_POD_SANDBOX, "ok"): 2,
        ("a.json", Stage.PRE_RUN_POD_SANDBOX, "timeout"): 1,
        ("b.json", Stage.PRE_RUN_POD_SANDBOX, "ok"): 1,
    }
    histogram = figures.hook_seconds["a.json", Stage.PRE_RUN_POD_SANDBOX]
    assert histogram.sum == pytest.approx(0.006)


def test_calls_are_timed_by_path_and_strangers_together() -> None:
    now = 10.0
    figures = Figures(lambda: now)
    known = b"/runtime.v1.RuntimeService/Version"
    for path in (known, b"/evil/1", b"/evil/2", known):
        figures.call_finished(path, now - 0.5)
    assert set(figures.calls) == {known, b"other"}
    assert figures.calls[known].sum == pytest.approx(1.0)
    assert figures.calls[b"other"].sum == pytest.approx(1.0)
    for number in range(200):
        figures.call_finished(b"/runtime.v1.RuntimeService/Made%d" % number, now)
    assert len(figures.calls) == 128
