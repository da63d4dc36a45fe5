"""One manager process: caches, webhooks on every replica, controllers on the leader.

Start order: caches, certificates and registration, readiness, lease. At a stop the controllers stop
and the lease is released first. Admission is served until the Service has removed this replica from
its endpoints, because an API server that meets a closed port refuses pods.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Protocol, TypeVar

from cluster.exposition import CONTENT_TYPE
from cluster.manager.admission import Admission
from cluster.manager.caches import Caches
from cluster.manager.colocation_profile import (
    ColocationProfileController,
    ProfileControllerSettings,
)
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.flags import Settings
from cluster.manager.node_metric import node_metric_controller
from cluster.manager.node_resource import NodeResourceController
from cluster.manager.node_slo import node_slo_controller
from cluster.manager.quota_profile import QuotaProfileController
from cluster.metrics import ManagerMetrics
from kube.cache import wait_all_synced
from kube.client import Client
from kube.events import EventRecorder
from kube.faults import Faults
from kube.leader import LeaderElection
from kube.queue import WorkQueue
from service.http_server import Handler, Request, Response, Server, text

_log = logging.getLogger(__name__)

_METRIC_PAGES: Final = ("/metrics", "/internal-metrics", "/external-metrics", "/all-metrics")
_LEASE: Final = "koordinator-manager"
_SWEEP_SECONDS: Final = 60.0
"""Between two sweeps for series of deleted nodes; upstream's interval."""
_FLUSH_SECONDS: Final = 3.0
"""For sending the last events at a stop. Chosen: with the drain far below the 30 s that the
Deployment grants. Events that are not sent by then are lost."""
_DRAIN_SECONDS: Final = 5.0
"""Time to serve admission after readiness failed. Chosen: endpoints and the proxies on the API
servers' nodes follow within a few seconds. With half the value some pods would be refused."""

T = TypeVar("T")


class Controller(Protocol):
    """A queue of keys and a function that reconciles one key."""

    queue: WorkQueue

    async def reconcile(self, name: str, /) -> float | None:
        """Reconcile one key; return seconds until it is requeued, None for no timer."""


class Manager:
    """The composition root of one process: builds all parts and runs them."""

    def __init__(
        self, client: Client, settings: Settings, *, webhook_port: int | None = None
    ) -> None:
        """webhook_port: overrides the environment; 0 selects a free port."""
        self.client = client
        self.settings = settings
        self.metrics = ManagerMetrics()
        self.ready = False
        self.leading = False
        self.caches = Caches(client, settings)
        self.events = EventRecorder(client, component="koord-manager")
        self.source = SLOConfigSource(
            self.caches.config_maps,
            self.events,
            self.metrics,
            namespace=settings.text("config-namespace"),
            name=settings.text("slo-config-name"),
        )
        self.controllers = self._make_controllers()
        self._faults = Faults("manager")
        self.metrics.count_faults(
            [
                *(controller.queue.faults for controller in self.controllers.values()),
                *(cache.faults for cache in self.caches.all),
                self.source.faults,
                self.events.faults,
                self._faults,
            ]
        )
        self.admission = Admission(
            client, settings, self.caches, self.source, self.metrics, port=webhook_port
        )

    def _make_controllers(self) -> dict[str, Controller]:
        settings, gates, caches = self.settings, self.settings.gates, self.caches
        made: dict[str, Controller] = {}
        if "nodeslo" in settings.controllers:
            made["nodeslo"] = node_slo_controller(
                self.client, caches.nodes, caches.node_slos, self.source, self.events, self.metrics
            )
        if "nodemetric" in settings.controllers:
            made["nodemetric"] = node_metric_controller(
                self.client, caches.nodes, caches.node_metrics, self.source, self.metrics
            )
        if "noderesource" in settings.controllers:
            made["noderesource"] = NodeResourceController(
                self.client,
                caches.nodes,
                caches.pods,
                caches.node_metrics,
                caches.topologies,
                caches.devices,
                self.source,
                self.events,
                self.metrics,
                plugins=settings.plugins,
                gpu_shares=gates.on("EnableSyncGPUSharedResource"),
            )
        if "quotaprofile" in settings.controllers:
            made["quotaprofile"] = QuotaProfileController(
                self.client, caches.quota_profiles, caches.quotas, caches.nodes, self.events
            )
        if "colocationprofile" in settings.controllers and gates.on("ColocationProfileController"):
            made["colocationprofile"] = ColocationProfileController(
                self.client,
                caches.profiles,
                caches.pods,
                caches.namespaces,
                caches.pods.index(lambda pod: (pod.spec.node_name,)),
                ProfileControllerSettings(
                    by_default=settings.on("colocation-profile-reconcile-by-default"),
                    interval=settings.seconds("colocation-profile-reconcile-interval"),
                    forget_after=settings.seconds("colocation-profile-force-update-pod-duration"),
                    qps=settings.number("colocation-profile-update-pod-qps"),
                    burst=int(settings.number("colocation-profile-update-pod-qps-burst")),
                ),
            )
        return made

    # --- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raises if the lease is lost or a part fails permanently."""
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            stack.push_async_callback(_end, tasks)

            def start(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
                task = asyncio.create_task(work, name=name)
                tasks.append(task)
                return task

            for cache in self.caches.all:
                start(f"cache {cache.resource.plural}", cache.run())
            start("events", self.events.run())
            stack.push_async_callback(self._flush_events)
            await self._serve_pages(stack)
            if self.admission.wanted:
                await _or_stopped(self.admission.start(stack), stop)
                if stop.is_set():
                    return
                start("registration", self.admission.keep_registered())
            await _or_stopped(wait_all_synced(*self.caches.all), stop)
            if stop.is_set():
                return
            self.ready = True
            _log.info(
                "ready: %d nodes, %d pods",
                len(self.caches.nodes.items),
                len(self.caches.pods.items),
            )
            controllers = start("controllers", self._lead_when_elected())
            start("stop", stop.wait())
            # A task ends only after `stop`, or because it failed permanently.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.ready = False
            await _end([controllers])
            if self.admission.behind_a_service:
                self.admission.drain()
                await asyncio.sleep(_DRAIN_SECONDS)
            for task in done:
                task.result()

    def _loop_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count exceptions that reach the event loop: of callbacks, transports and lost tasks."""
        error = context.get("exception")
        message = str(context.get("message", ""))
        if _is_late_close(error):
            _log.debug("%s: %s", message, error)
            return
        try:
            raise error if isinstance(error, Exception) else RuntimeError(message)
        except Exception:  # noqa: BLE001 - raised to be logged with its traceback
            self._faults.note("the event loop", about=message)

    async def _flush_events(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self.events.flush()

    async def _lead_when_elected(self) -> None:
        if not self.settings.on("enable-leader-election"):
            await self._control()
            return
        # A client of its own: a renewal must not wait behind a thousand patches.
        async with self.client.sibling() as client:
            election = LeaderElection(
                client,
                namespace=self.settings.text("leader-election-namespace"),
                name=_LEASE,
                identity=f"{socket.gethostname()}_{uuid.uuid4()}",
            )
            await election.run(self._control)

    async def _control(self) -> None:
        self.leading = True
        self.metrics.is_leader.set(1)
        workers = max(1, int(self.settings.number("workers")))
        try:
            async with asyncio.TaskGroup() as group:
                for controller in self.controllers.values():
                    for _ in range(workers):
                        group.create_task(controller.queue.work(controller.reconcile))
                group.create_task(self._sweep())
        finally:
            self.leading = False
            self.metrics.is_leader.set(0)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                self.metrics.drop_stale()
            except Exception:  # noqa: BLE001 - a defect here must not end the process
                self._faults.note("dropping old series")

    # --- pages ---------------------------------------------------------------------------------

    async def _serve_pages(self, stack: AsyncExitStack) -> None:
        await _serve(
            stack,
            self.settings.address("metrics-addr"),
            dict.fromkeys(_METRIC_PAGES, self._exposition),
        )
        await _serve(
            stack,
            self.settings.address("health-probe-addr"),
            {"/healthz": self._healthz, "/readyz": self._readyz},
        )

    async def _exposition(self, _: Request) -> Response:
        slices = []
        for each in self.metrics.registry.slices():
            slices.append(each.encode())
            # Admission and the controllers run between two slices.
            await asyncio.sleep(0)
        return Response(200, b"".join(slices), CONTENT_TYPE)

    async def _healthz(self, _: Request) -> Response:
        return Response(200, b"ok")

    async def _readyz(self, _: Request) -> Response:
        waiting = self.caches.waiting()
        if waiting:
            return text(503, f"waiting for lists of {', '.join(waiting)}")
        if self.admission.wanted and not self.admission.registered:
            return text(503, "webhook certificates are not ready")
        return Response(200, b"ok") if self.ready else text(503, "starting")


def _is_late_close(error: object) -> bool:
    """Return whether the error is uvloop's for the end of a TLS connection that it already closed.

    It occurs when idle connections to the API server are closed, and loses no data.
    """
    return isinstance(error, RuntimeError) and "the handler is closed" in str(error)


async def _serve(
    stack: AsyncExitStack, address: tuple[str, int] | None, pages: Mapping[str, Handler]
) -> None:
    if address is None:
        return
    server = Server({("GET", path): page for path, page in pages.items()})
    stack.push_async_callback(server.close)
    await server.listen_tcp(*address)


async def _or_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of `work`, or None when `stop` comes first."""
    task = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, stopping):
            one.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    # In reverse order of the start: controllers end before the caches that they read.
    for task in reversed(tasks):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
