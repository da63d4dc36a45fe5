"""Addresses to listen on."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Any

import pytest

from service.addresses import listen, parse_address
from tests.conftest import require


@pytest.mark.parametrize(
    ("address", "expected"),
    [(":9316", ("", 9316)), ("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_is_a_host_and_a_port(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


@pytest.mark.parametrize(
    "address", ["", "x", "x:", "x:0", "x:65536", "::1:80", "x:1x", "x:\N{SUPERSCRIPT TWO}", "x:-1"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError):
        parse_address(address)


def test_the_kernel_may_choose_the_port_where_that_is_meant() -> None:
    assert parse_address("localhost:0", least_port=0) == ("localhost", 0)


def reaches(listener: socket.socket, host: str) -> bool:
    try:
        socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("", ["127.0.0.1", "::1"]),
        ("::", ["127.0.0.1", "::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("::1", ["::1"]),
        # A name stands for its IPv4 address, as in a Go program.
        ("localhost", ["127.0.0.1"]),
    ],
)
def test_a_host_says_where_the_port_is_open(host: str, reached: list[str]) -> None:
    require(has_ipv6(), "needs IPv6 on the loopback interface", tier="ipv6")
    with listen(host, 0) as listener:
        assert [each for each in ("127.0.0.1", "::1") if reaches(listener, each)] == reached
        assert not listener.getblocking()


def has_ipv6() -> bool:
    try:
        listen("::1", 0).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("refused_at", ["socket", "bind"])
def test_a_machine_without_ipv6_listens_on_ipv4(
    monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    class Socket(socket.socket):
        def __init__(self, family: int = -1, *others: int) -> None:
            if family == socket.AF_INET6 and refused_at == "socket":
                raise OSError(errno.EAFNOSUPPORT, "no IPv6")
            super().__init__(family, *others)

        def bind(self, address: Any) -> None:
            if self.family == socket.AF_INET6:
                raise OSError(errno.EADDRNOTAVAIL, "no IPv6")
            super().bind(address)

    monkeypatch.setattr("service.addresses.socket.socket", Socket)
    with listen("", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(OSError, match="no IPv6"):
        listen("::", 0)


def test_a_taken_port_is_an_error() -> None:
    with listen("", 0) as listener, pytest.raises(OSError) as refused:
        listen("", listener.getsockname()[1])
    assert refused.value.errno == errno.EADDRINUSE


def test_hundreds_of_clients_may_wait_to_be_accepted() -> None:
    with listen("127.0.0.1", 0) as listener:
        # Of a socket that listens, tcpi_sacked is how many may wait.
        told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    (may_wait,) = struct.unpack_from("I", told, 28)
    assert may_wait >= 300
