"""The audit log of a running daemon: written in a worker thread, served as `GET /events`."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor as Workers
from functools import partial
from typing import Final

from koordlet.audit.log import AuditLog, Kind
from koordlet.audit.pages import Pages
from koordlet.configuration.config import Config
from koordlet.exposition.audit_pages import answer
from service.http_server import Request, Response

_FLUSH_S: Final = 1.0
"""Between two writes to the disk. Chosen: a SIGKILL loses the entries of a second. Upstream waits
5 s; half of the value doubles the writes of a node on which much happens."""


class Auditing:
    """Does nothing where gate AuditEvents is off. `note` is for any thread."""

    def __init__(self, config: Config, workers: Workers) -> None:
        audit = config.audit
        self._workers = workers
        self._most = audit.max_events
        self.served = config.feature_gates.get("AuditEventsHTTPHandler", False)
        """Whether `/events` is served; upstream answers it with nothing while AuditEvents is
        off."""
        self.log: AuditLog | None = None
        if config.feature_gates.get("AuditEvents", False):
            self.log = AuditLog(
                audit.directory,
                verbosity=audit.verbosity,
                most_bytes=audit.max_disk_space_mb << 20,
            )
        self._pages = Pages(audit.directory, most_readers=audit.max_concurrent_readers)
        self._reading = asyncio.Lock()

    def note(self, verbosity: int, reason: str, message: str, *, pod: str = "") -> None:
        """Queue an entry about a pod, given as "namespace/name", or about the node."""
        if self.log is None:
            return
        namespace, _, name = pod.partition("/")
        kind = Kind.POD if pod else Kind.NODE
        self.log.add(verbosity, kind, reason, message, namespace=namespace, name=name)

    async def run(self) -> None:
        """Write what was queued, again and again."""
        if self.log is None:
            return
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_FLUSH_S)
            await loop.run_in_executor(self._workers, self.log.flush)

    def close(self) -> None:
        """Write what is left. Blocks on the disk."""
        if self.log is not None:
            self.log.flush()

    async def serve(self, request: Request) -> Response:
        """Answer `GET /events`; entries of this moment are written first, so that they are seen."""
        if self.log is None:
            return Response(200, b"")
        loop = asyncio.get_running_loop()
        async with self._reading:
            await loop.run_in_executor(self._workers, self.log.flush)
            page = partial(answer, self._pages, request, most=self._most)
            return await loop.run_in_executor(self._workers, page)
