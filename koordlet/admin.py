"""The admin interface: HTTP over a Unix socket under runDir that only root may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from koordlet.http_server import Request, Response, Routes, json

if TYPE_CHECKING:
    from koordlet.daemon import Daemon

SOCKET: Final = "admin.sock"
MAX_BODY_BYTES: Final = 32 << 20


def admin_routes(daemon: Daemon) -> Routes:
    """Return the admin interface of a daemon."""

    async def events(request: Request) -> Response:
        return json(daemon.events_log.as_json())

    return {("GET", "/events"): events}
