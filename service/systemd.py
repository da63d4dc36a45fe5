"""Telling systemd how we are: readiness, status and the watchdog, as sd_notify(3) describes.

One datagram to the socket that NOTIFY_SOCKET names; without it (no systemd) nothing happens.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

_LOG = logging.getLogger(__name__)


class Notifier:
    """The notification socket, or nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address: str | None = None
        if address.startswith(("/", "@")):
            # An abstract socket's name begins with a zero byte.
            self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = _watchdog(environment)

    @property
    def active(self) -> bool:
        """Return whether a supervisor listens."""
        return self._address is not None

    def send(self, **fields: str) -> None:
        """Send `KEY=value` lines: READY="1", STATUS="...", WATCHDOG="1", STOPPING="1"."""
        if self._address is None:
            return
        message = "\n".join(f"{key}={value}" for key, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            try:
                channel.sendto(message.encode(), self._address)
            except OSError as error:
                # systemd that does not listen is no reason to stop serving the node; if it
                # misses the watchdog message it restarts us, which is what it is for.
                _LOG.debug("supervisor not notified", extra={"reason": error.strerror})


def _watchdog(environment: Mapping[str, str]) -> float | None:
    """Return systemd's watchdog time-out in seconds, when it is meant for this process.

    Without WATCHDOG_PID it is meant for each process with the variable (sd_watchdog_enabled(3)).
    """
    text = environment.get("WATCHDOG_USEC", "")
    pid = environment.get("WATCHDOG_PID", "")
    if not (text.isascii() and text.isdigit()) or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 1e6 or None
