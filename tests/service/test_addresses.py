"""Addresses to listen on."""

from __future__ import annotations

import pytest

from service.addresses import parse_address


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
