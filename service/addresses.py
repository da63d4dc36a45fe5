"""Addresses to listen on, as flags and files write them."""

from __future__ import annotations


def parse_address(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Read `host:port`, `:port` (an empty host) or `[v6]:port`; raises ValueError.

    least_port: 0 where the kernel may choose the port.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and least_port <= int(port[:6]) < 65536):
        raise ValueError("expected host:port, such as 127.0.0.1:9316")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError("write an IPv6 address in brackets: [::1]:9316")
    return host.strip("[]"), int(port)
