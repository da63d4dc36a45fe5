"""How the command of the manager ends when it cannot go on."""

from __future__ import annotations

from typing import Any

import pytest

import cluster.manager.main as manager_main
from cluster.webhook.configuration import ConfigurationMissing
from kube.client import ApiError, Unreachable
from kube.connection import Connection
from kube.leader import LeadershipLost


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (LeadershipLost("the lease ended"), "the lease ended; exiting so that another replica can"),
        (TimeoutError(), "exiting: the API server did not answer in time"),
        (Unreachable("connection refused"), "exiting: connection refused"),
        (ConfigurationMissing("apply the manifest"), "exiting: apply the manifest"),
        (OSError("no file"), "exiting: no file"),
        (ApiError(status=403, reason="Forbidden", message="not yours", what="get"), "not yours"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_the_log_says_why_the_manager_exits(
    problem: Exception,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(*_: Any) -> None:
        raise problem

    connection = Connection("http://localhost")
    monkeypatch.setattr(manager_main, "load_connection", lambda *_, **__: connection)
    monkeypatch.setattr(manager_main, "_run", failing)
    monkeypatch.setattr("service.logs.set_up", lambda **_: None)
    monkeypatch.setattr("service.open_files.raise_limit", lambda: 64)
    assert manager_main.main([]) == 1
    assert text in caplog.text
