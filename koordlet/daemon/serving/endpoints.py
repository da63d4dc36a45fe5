"""The daemon's endpoints: admin socket, metrics and health over HTTP, and the hook service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from koordlet.daemon.parts import Parts
from koordlet.daemon.serving.admin import MAX_BODY_BYTES, SOCKET, admin_routes
from koordlet.daemon.serving.readings import DaemonReadings
from koordlet.exposition.collector_metrics import pages
from koordlet.exposition.metrics import CONTENT_TYPE, Registries
from service.addresses import parse_address
from service.events import Severity
from service.files import UNWRITABLE
from service.http_server import Request, Response, Server, text

if TYPE_CHECKING:
    from koordlet.transports.hook_service import HookServer
    from koordlet.transports.pod_resources import PodResources


class Endpoints:
    """All servers of one daemon. Belongs to the event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._servers: list[Server] = []
        self._http_missing = bool(parts.config.http.address)
        self._hook_server: HookServer | None = None
        self._hook_service_missing = False
        self._pod_resources: PodResources | None = None
        self._admin: Server | None = None

    async def open(self) -> None:
        """Open the configured endpoints.

        Raises OSError when the admin socket cannot be served, unless the run directory is read-only
        or full.
        """
        try:
            await self._open_admin()
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
        await self.open_missing()

    async def open_missing(self) -> None:
        """Open endpoints that are not served: a port in use, a socket that could not be made."""
        if self._http_missing:
            await self._open_http()
        if self._admin is None:
            await self._open_admin_late()
        elif not os.path.exists(self._admin_path):
            await self._open_admin_again()
        if self._pod_resources is None:
            await self._open_pod_resources()
        if self._hook_service_missing:
            await self.open_hook_service()
        elif self._hook_server is not None:
            self._hook_server.register_if_missing()

    async def open_hook_service(self) -> None:
        """Serve the hook service, if it is configured; tried again while it fails."""
        config = self._parts.config.hook_service
        if not config.enabled:
            return
        # Imports gRPC: only where a runtime proxy is used.
        from koordlet.transports.hook_service import HookAnswers, HookServer

        parts = self._parts
        answers = HookAnswers(
            parts.state,
            parts.hook_decider,
            parts.after_hooks,
            parts.requests,
            failure_policy=config.failure_policy,
        )
        server = HookServer(config, answers, parts.events)
        try:
            await server.start()
        except OSError as error:
            self._hook_service_missing = True
            parts.events.add(
                "hook-service",
                "hookService",
                f"{error}; tried again every minute",
                severity=Severity.ERROR,
            )
            return
        self._hook_service_missing = False
        self._hook_server = server

    async def _open_pod_resources(self) -> None:
        """Serve kubelet's pod resources with the allocations, where the gate is on."""
        config = self._parts.config
        if not config.feature_gates.get("PodResourcesProxy", False):
            return
        # Imports gRPC: only where it is used.
        from koordlet.transports.pod_resources import PodResources

        settings = config.pod_resources
        server = PodResources(
            settings.directory,
            settings.kubelet_socket,
            pods=lambda: [view.pod for view in self._parts.state.pod_views()],
            events=self._parts.events,
        )
        try:
            await server.start()
        except OSError as error:
            self._parts.events.add(
                "pod-resources",
                settings.directory,
                f"the pod resources proxy does not listen: {error}; tried again every minute",
                severity=Severity.ERROR,
            )
            return
        self._pod_resources = server

    async def close(self) -> None:
        if self._pod_resources is not None:
            await self._pod_resources.stop()
        for server in self._servers:
            await server.close()
        if self._hook_server is not None:
            await self._hook_server.stop()

    @property
    def _admin_path(self) -> str:
        return f"{self._parts.config.run_dir}/{SOCKET}"

    async def _open_admin(self) -> None:
        admin = Server(admin_routes(self._parts), max_body_bytes=MAX_BODY_BYTES)
        await admin.listen_unix(self._admin_path)
        self._servers.append(admin)
        self._admin = admin

    async def _open_admin_late(self) -> None:
        """Open the admin socket if that failed at the start; hooks do not depend on it."""
        try:
            await self._open_admin()
        except OSError as error:
            self._parts.events.add(
                "admin",
                self._admin_path,
                f"koordctl cannot connect: {error.strerror or error}; tried again every minute",
                severity=Severity.ERROR,
            )
        else:
            self._parts.events.add(
                "admin", self._admin_path, "koordctl can connect", severity=Severity.INFO
            )

    async def _open_admin_again(self) -> None:
        """Open the admin socket again after its file was removed, so that koordctl can connect."""
        unreachable = self._admin
        try:
            await self._open_admin()
        except OSError as error:
            problem = f"{error.strerror or error}; make it again, and restart koordlet"
        else:
            problem = "it serves again; a restart makes the directory's other files again"
            if unreachable is not None:
                self._servers.remove(unreachable)
                await unreachable.close()
        self._parts.events.add("admin", self._admin_path, f"was removed: {problem}")

    async def _open_http(self) -> None:
        """Serve metrics and health. If the port is in use, the daemon works without them."""
        registries = Registries(DaemonReadings(self._parts))

        def exposition(
            which: CollectorRegistry,
        ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def serve(request: Request) -> Response:
                whole = [Registries.text(which)]
                if which is not registries.internal:
                    for page in self._collectors_pages():
                        whole.append(page)
                        await asyncio.sleep(0)  # hooks are answered between two pages
                return Response(200, b"".join(whole), CONTENT_TYPE)

            return serve

        audit = self._parts.audit
        server = Server(
            {
                **({("GET", "/events"): audit.serve} if audit.served else {}),
                ("GET", "/metrics"): exposition(registries.merged),
                ("GET", "/internal-metrics"): exposition(registries.internal),
                ("GET", "/external-metrics"): exposition(registries.external),
                ("GET", "/healthz"): self._healthz,
                ("GET", "/readyz"): self._readyz,
            }
        )
        address = self._parts.config.http.address
        try:
            await server.listen_tcp(*parse_address(address))
        except OSError as error:
            self._parts.events.add(
                "http",
                address,
                f"no metrics and no health checks: {error.strerror or error};"
                " tried again every minute",
                severity=Severity.ERROR,
            )
            return
        self._http_missing = False
        self._servers.append(server)

    def _collectors_pages(self) -> Iterator[bytes]:
        parts = self._parts
        latest = parts.measuring.latest()
        if latest is None:
            return iter(())
        counts = parts.measuring.bandwidth_counts()
        return pages(parts.node_name, parts.dynamics.views, latest, counts)

    async def _healthz(self, request: Request) -> Response:
        problem = self._parts.health.unhealthy()
        return text(503, problem) if problem else text(200, "ok")

    async def _readyz(self, request: Request) -> Response:
        reasons = self._parts.health.not_ready()
        return text(503, "\n".join(reasons)) if reasons else text(200, "ok")
