"""Unix sockets: whose they are, and what may lie in their way."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from service import unix


def test_a_dead_socket_is_replaced_by_one_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    before = os.umask(0o022)
    os.umask(before)
    with unix.listen(str(path)) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        assert not listener.getblocking()
        assert not listener.get_inheritable()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert os.umask(before) == before


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(OSError, match="is not a socket"):
        unix.listen(str(path))
    assert path.read_text() == "data"


def test_a_link_to_a_socket_is_no_socket(tmp_path: Path) -> None:
    with unix.listen(str(tmp_path / "s.sock")):
        (tmp_path / "link").symlink_to("s.sock")
        with pytest.raises(OSError, match="is not a socket"):
            unix.listen(str(tmp_path / "link"))


def test_a_served_socket_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with unix.listen(path), pytest.raises(OSError, match="served by another process"):
        unix.listen(path)


def test_a_path_that_no_socket_can_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long for a socket's address"):
        unix.listen(str(tmp_path / ("x" * 108)))


def test_hundreds_of_clients_may_wait_to_be_accepted(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    with unix.listen(path), ExitStack() as clients:
        for _ in range(300):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(path)  # BlockingIOError where there is no room to wait
