"""TCP ports of this machine that nobody listens on."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address, all different."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [int(one.getsockname()[1]) for one in sockets]


def free_port() -> int:
    """Return one port of the loopback address."""
    return free_ports(1)[0]
