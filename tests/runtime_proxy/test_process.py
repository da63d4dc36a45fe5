"""The process' manners: sockets from outside, a successor that does not come up."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from runtime_proxy import handover, main
from service.systemd import Notifier


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, {}),
        ({"LISTEN_FDS": "1", "LISTEN_PID": "42"}, {"cri": 3}),
        ({"LISTEN_FDS": "2", "LISTEN_PID": "42"}, {"cri": 3}),
        ({"LISTEN_FDS": "1", "LISTEN_PID": "43"}, {}),
        ({"LISTEN_FDS": "x", "LISTEN_PID": "42"}, {}),
        ({"LISTEN_FDS": "0", "LISTEN_PID": "42"}, {}),
        (
            {"KOORD_RUNTIME_PROXY_SOCKETS": "cri=7:http=9:ready=11", "LISTEN_FDS": "1"},
            {"cri": 7, "http": 9, "ready": 11},
        ),
    ],
)
def test_sockets_are_taken_from_systemd_and_from_a_predecessor(
    environment: dict[str, str], found: dict[str, int]
) -> None:
    assert handover.passed_sockets(environment, 42) == found


@pytest.mark.parametrize("command", [["/bin/false"], ["/no/such/program"]])
def test_a_successor_that_does_not_serve_leaves_us_serving(command: list[str]) -> None:
    async def test() -> bool:
        ended = main._Ended(asyncio.Event())
        with socket.socket(socket.AF_UNIX) as listener:
            await main._hand_over(command, {"cri": listener}, ended, Notifier({}))
            assert listener.fileno() >= 0
        return ended.event.is_set()

    assert not asyncio.run(test())


def test_a_successor_finds_the_sockets_and_says_when_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As systemd starts the first process; what is meant for the main process is for its successor.
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    path = tmp_path / "s.sock"
    program = (
        "import os, time\n"
        "from runtime_proxy import handover\n"
        "from service.systemd import Notifier\n"
        "assert Notifier().watchdog_seconds == 60\n"
        "assert os.readlink('/proc/self/fd/0') == os.devnull\n"
        "passed = handover.take_passed()\n"
        "assert not {v for v in os.environ if v.startswith(('KOORD_RUNTIME_PROXY', 'LISTEN_'))}\n"
        "assert passed.sockets['cri'].getsockname().endswith('s.sock')\n"
        f"with open({str(tmp_path / 'parent')!r}, 'w') as file:\n"
        "    file.write(str(os.getppid()))\n"
        "passed.tell_predecessor()\n"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        successor = handover.start_successor([sys.executable, "-c", program], {"cri": listener})
    os.set_blocking(successor.ready, True)
    assert os.read(successor.ready, 16) == b"ready"
    assert os.read(successor.ready, 16) == b"", "its end can be seen"
    os.close(successor.ready)
    # systemd manages a new main process rightly only if that is a child of its own.
    assert (tmp_path / "parent").read_text() != str(os.getpid())


@pytest.mark.parametrize("serves", [True, False])
def test_systemd_is_notified_of_a_handover_and_of_a_failed_one(
    tmp_path: Path, serves: bool
) -> None:
    """It takes READY from the main process alone, so this one reports it for its successor."""
    program = "from runtime_proxy import handover\nhandover.take_passed().tell_predecessor()\n"
    command = [sys.executable, "-c", program if serves else ""]
    address = str(tmp_path / "notify")
    ended = main._Ended(asyncio.Event())
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        socket.socket(socket.AF_UNIX) as served,
    ):
        listener.bind(address)
        notifier = Notifier({"NOTIFY_SOCKET": address})

        async def hand_over() -> None:
            await main._hand_over(command, {"cri": served}, ended, notifier)

        before = len(os.listdir("/proc/self/fd"))
        asyncio.run(hand_over())
        assert len(os.listdir("/proc/self/fd")) == before
        listener.setblocking(False)
        assert listener.recv(200) == b"STATUS=handing over to a successor"
        last = listener.recv(200).decode().split("\n")
        with pytest.raises(BlockingIOError):
            listener.recv(200)
    assert (ended.event.is_set(), ended.handed_over) == (serves, serves)
    if serves:
        assert last[0].startswith("MAINPID=")
        assert last[0] != f"MAINPID={os.getpid()}"
        assert last[1:] == ["READY=1", "STATUS=serving"]
    else:
        assert last == ["READY=1", "STATUS=serving; a handover failed"]


def test_a_successor_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError, match="nothing"):
        handover.start_successor([str(tmp_path / "nothing")], {})
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_socket_that_cannot_be_served_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(main.StartError, match="is not a socket: remove it or choose another"):
        main.open_listener(str(path))
