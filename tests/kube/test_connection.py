"""Waiting until the API server's address and credentials can be read."""

from __future__ import annotations

import asyncio

import pytest

from kube import connection
from kube.connection import Connection, ConnectionConfigError, wait_for_connection


def test_a_kubeconfig_that_is_written_late_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FIRST_PAUSE_S", 0.001)
    found = Connection("https://[::1]:6443")
    attempts: list[Connection | None] = [None, None, found]

    def connect() -> Connection:
        made = attempts.pop(0)
        if made is None:
            raise ConnectionConfigError("no kubeconfig yet")
        return made

    refused: list[str] = []
    assert asyncio.run(wait_for_connection(connect, refused.append)) is found
    assert not attempts and refused == ["no kubeconfig yet"] * 2


def test_another_error_is_not_waited_for() -> None:
    def connect() -> Connection:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(wait_for_connection(connect))
