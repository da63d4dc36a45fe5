"""What systemd is told."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from service.systemd import Notifier


def test_systemd_is_notified(tmp_path: Path) -> None:
    path = tmp_path / "n.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        notifier = Notifier({"NOTIFY_SOCKET": str(path)})
        notifier.send(READY="1", STATUS="fine")
        assert listener.recv(100) == b"READY=1\nSTATUS=fine"
    notifier.send(STOPPING="1")  # systemd left before us


def test_an_abstract_socket_is_notified() -> None:
    name = f"koord-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name)
        Notifier({"NOTIFY_SOCKET": "@" + name}).send(READY="1")
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "relative", "/does/not/exist"])
def test_without_systemd_nothing_happens(address: str) -> None:
    Notifier({"NOTIFY_SOCKET": address}).send(READY="1")


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_for_this_process_only(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert Notifier(environment).watchdog_seconds == seconds
