"""Addresses to listen on: how flags and files write them, and the socket that one means."""

from __future__ import annotations

import errno
import socket
from typing import Final

BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted: more than all clients of a daemon open
at once after a restart. The kernel lowers it to net.core.somaxconn."""

_WITHOUT_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
"""What a kernel without IPv6 (`ipv6.disable=1`, or not built in) answers."""


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


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens, without blocking. Raises OSError.

    An empty host means every address of the machine, as in a Go program: one socket on `::` that
    takes IPv4 too, or one on 0.0.0.0 where the kernel has no IPv6. `::` takes both as well. Of the
    addresses of a name an IPv4 one is preferred, as Go does.
    """
    if host in ("", "::"):
        try:
            return _listening(socket.AF_INET6, ("::", port))
        except OSError as error:
            if host or error.errno not in _WITHOUT_IPV6:
                raise
        return _listening(socket.AF_INET, ("0.0.0.0", port))
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return _listening(family, address)


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # A port whose former owner has just ended would be refused otherwise.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made
