"""One manager process: caches, webhooks on every replica, controllers on the leader.

Start order: certificates and registrations first, then caches, then ready, then the lease. An end
takes the reverse order: no new admission requests, controllers stop, the lease is released.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from apis.core import ConfigMap, Namespace, Node, ObjectMeta, Pod, PriorityClassObject
from apis.decode import Wire
from apis.device import Device
from apis.nodemetric import NodeMetric
from apis.profile import ClusterColocationProfile
from apis.quota import ElasticQuota, ElasticQuotaProfile
from apis.topology import NodeResourceTopology
from cluster.manager.colocation_profile import (
    ColocationProfileController,
    ProfileControllerSettings,
)
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.flags import Settings
from cluster.manager.metrics import ManagerMetrics
from cluster.manager.node_metric import node_metric_controller
from cluster.manager.node_resource import NodeResourceController
from cluster.manager.node_slo import node_slo_controller
from cluster.manager.objects import (
    StoredNodeSLO,
    detach_node_slo,
    shrink_node,
    shrink_node_metric,
    shrink_pod,
)
from cluster.manager.quota_profile import QuotaProfileController
from cluster.quota_tree import QuotaTree
from cluster.webhook.binding import BindingAdmission, BindingRules
from cluster.webhook.certificate_store import (
    CertificateStore,
    FolderStore,
    SecretStore,
    WebhookRegistration,
)
from cluster.webhook.configmap import ConfigMapAdmission
from cluster.webhook.configuration import MUTATING_NAME, VALIDATING_NAME, Address, active_paths
from cluster.webhook.elastic_quota import QuotaAdmission, by_quota, unlabelled
from cluster.webhook.enhanced import EnhancedRulesSource
from cluster.webhook.node import NodeValidation, mutate_node_status
from cluster.webhook.pod import PodAdmission, PodCaches
from cluster.webhook.quota_evaluation import QuotaEvaluator, RetryRules
from cluster.webhook.reservation import ReservationAdmission
from kube.cache import Cache, wait_all_synced
from kube.client import Client
from kube.events import EventRecorder
from kube.leader import LeaderElection
from kube.queue import WorkQueue
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    ELASTIC_QUOTAS,
    NAMESPACES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODE_SLOS,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    PROFILES,
    QUOTA_PROFILES,
    Resource,
)
from kube.webhook import AdmissionRequest, AsyncHandler, Handler, Verdict, WebhookServer

_log = logging.getLogger(__name__)

_METRIC_PAGES: Final = ("/metrics", "/internal-metrics", "/external-metrics", "/all-metrics")
_LEASE: Final = "koordinator-manager"
_RESYNC_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 2.0
_FIRST_SYNC_SECONDS: Final = 60.0

T = TypeVar("T")


class Controller(Protocol):
    """What the manager runs: a queue of keys and what is done with one of them."""

    queue: WorkQueue

    async def reconcile(self, name: str, /) -> float | None:
        """Bring one key up to date; return seconds until it is due again."""


class _Bare(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class Manager:
    """The parts of one process, wired. Run it with `run`."""

    def __init__(
        self, client: Client, settings: Settings, *, webhook_port: int | None = None
    ) -> None:
        """webhook_port: overrides the environment; 0 picks a free one."""
        self.client = client
        self.settings = settings
        self.metrics = ManagerMetrics()
        self.ready = False
        self.leading = False
        gates = settings.gates
        own = settings.env("POD_NAMESPACE", "koordinator-system")
        self._own_namespace = own
        config_namespace = settings.text("config-namespace")
        watched = settings.text("namespace")

        self._caches: list[Cache[Any]] = []
        self.nodes = self._cache(NODES, Node, shrink=shrink_node)
        self.pods = self._cache(PODS, Pod, namespace=watched, shrink=shrink_pod)
        self.config_maps = self._cache(CONFIG_MAPS, ConfigMap, namespace=config_namespace)
        self.node_metrics = self._cache(NODE_METRICS, NodeMetric, shrink=shrink_node_metric)
        self.node_slos = self._cache(NODE_SLOS, StoredNodeSLO, shrink=detach_node_slo)
        self.topologies = self._cache(NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology)
        self.devices = self._cache(DEVICES, Device)
        self.quotas = self._cache(ELASTIC_QUOTAS, ElasticQuota)
        self.quota_profiles = self._cache(QUOTA_PROFILES, ElasticQuotaProfile)
        self.profiles = self._cache(PROFILES, ClusterColocationProfile)
        self.namespaces = self._cache(NAMESPACES, Namespace)
        self.priority_classes = self._cache(PRIORITY_CLASSES, PriorityClassObject)

        self.events = EventRecorder(client, component="koord-manager")
        self.source = SLOConfigSource(
            self.config_maps,
            self.events,
            self.metrics,
            namespace=config_namespace,
            name=settings.text("slo-config-name"),
        )
        self._tree: QuotaTree | None = None
        self.quotas.subscribe(lambda _: self._forget_tree())
        self._pods_by_quota = self.pods.index(by_quota)
        self._unlabelled_pods = self.pods.index(unlabelled)
        self.controllers = self._make_controllers()
        self._registration = self._make_registration(webhook_port)
        self._webhook_port = (
            webhook_port if webhook_port is not None else int(settings.env("WEBHOOK_PORT", "9876"))
        )
        self.webhooks: WebhookServer | None = None
        enhanced_namespace = settings.text("pod-enhanced-validator-config-namespace")
        enhanced_maps = (
            self.config_maps
            if enhanced_namespace == config_namespace
            else self._cache(CONFIG_MAPS, ConfigMap, namespace=enhanced_namespace)
        )
        self._enhanced = EnhancedRulesSource(
            enhanced_maps,
            namespace=enhanced_namespace,
            name=settings.text("pod-enhanced-validator-config-name"),
        )
        self.pod_admission = PodAdmission(
            PodCaches(
                self.profiles,
                self.namespaces,
                self.priority_classes,
                self.quotas,
                self.quota_profiles,
            ),
            gates,
            self.tree,
            self._enhanced.current,
        )

    def _cache(self, resource: Resource, type_: type[Any], **options: Any) -> Cache[Any]:
        cache: Cache[Any] = Cache(self.client, resource, type_, **options)
        self._caches.append(cache)
        return cache

    def tree(self) -> QuotaTree:
        """Return the quota tree of the cached quotas."""
        if self._tree is None:
            self._tree = QuotaTree(self.quotas.items.values())
        return self._tree

    def _forget_tree(self) -> None:
        self._tree = None

    # --- wiring --------------------------------------------------------------------------------

    def _make_controllers(self) -> dict[str, Controller]:
        settings, gates = self.settings, self.settings.gates
        made: dict[str, Controller] = {}
        if "nodeslo" in settings.controllers:
            made["nodeslo"] = node_slo_controller(
                self.client, self.nodes, self.node_slos, self.source, self.events, self.metrics
            )
        if "nodemetric" in settings.controllers:
            made["nodemetric"] = node_metric_controller(
                self.client, self.nodes, self.node_metrics, self.source, self.metrics
            )
        if "noderesource" in settings.controllers:
            made["noderesource"] = NodeResourceController(
                self.client,
                self.nodes,
                self.pods,
                self.node_metrics,
                self.topologies,
                self.devices,
                self.source,
                self.events,
                self.metrics,
                plugins=settings.plugins,
                gpu_shares=gates.on("EnableSyncGPUSharedResource"),
            )
        if "quotaprofile" in settings.controllers:
            made["quotaprofile"] = QuotaProfileController(
                self.client, self.quota_profiles, self.quotas, self.nodes, self.events
            )
        if "colocationprofile" in settings.controllers and gates.on("ColocationProfileController"):
            made["colocationprofile"] = ColocationProfileController(
                self.client,
                self.profiles,
                self.pods,
                self.namespaces,
                self.pods.index(lambda pod: (pod.spec.node_name,)),
                ProfileControllerSettings(
                    by_default=settings.on("colocation-profile-reconcile-by-default"),
                    interval=settings.seconds("colocation-profile-reconcile-interval"),
                    forget_after=settings.seconds("colocation-profile-force-update-pod-duration"),
                    qps=settings.number("colocation-profile-update-pod-qps"),
                    burst=int(settings.number("colocation-profile-update-pod-qps-burst")),
                ),
            )
        return made

    def _make_registration(self, webhook_port: int | None) -> WebhookRegistration:
        settings = self.settings
        host = settings.env("WEBHOOK_HOST", "")
        port = int(settings.env("WEBHOOK_PORT", "9876")) if webhook_port is None else webhook_port
        self._address = Address(
            namespace=self._own_namespace,
            service=settings.env("SERVICE_NAME", "koordinator-webhook-service"),
            host=host,
            port=port,
        )
        writer = settings.env("WEBHOOK_CERT_WRITER", "fs" if host else "secret")
        store: CertificateStore
        if writer == "fs":
            folder = settings.env("WEBHOOK_CERT_DIR", "/tmp/koordinator-webhook-certs")
            store = FolderStore(Path(folder))
        else:
            name = settings.env("SECRET_NAME", "koordinator-webhook-certs")
            store = SecretStore(self.client, self._own_namespace, name)
        return WebhookRegistration(
            self.client,
            store,
            self._address,
            active_paths(settings.gates),
            mutating_name=settings.env("MUTATING_WEBHOOK_NAME", MUTATING_NAME),
            validating_name=settings.env("VALIDATING_WEBHOOK_NAME", VALIDATING_NAME),
        )

    def routes(self) -> tuple[dict[str, Handler], dict[str, AsyncHandler]]:
        """Return the handlers of the paths whose gates are on."""
        settings, gates = self.settings, self.settings.gates
        quota = QuotaAdmission(
            self.tree, self._pods_by_quota, self._unlabelled_pods, gates, self.metrics
        )
        evaluator = QuotaEvaluator(
            self.client,
            self.pod_admission,
            gates,
            self.tree,
            RetryRules(
                max_retries=int(settings.number("quota-update-max-retries")),
                jitter_seconds=settings.seconds("quota-update-retry-jitter"),
                max_total_jitter_seconds=settings.seconds("quota-update-max-total-jitter"),
            ),
        )
        binding = BindingAdmission(
            BindingRules(
                user_names=settings.names("binding-admission-user-name"),
                dry_run=settings.on("binding-admission-dry-run"),
                namespaces=settings.names("binding-admission-namespaces"),
                exclude_namespaces=settings.names("binding-admission-exclude-namespaces"),
                bypass_labels=settings.names("binding-admission-bypass-labels"),
                bypass_annotations=settings.names("binding-admission-bypass-annotations"),
            ),
            self.pods,
            lambda decision: self.metrics.binding.labels(decision).inc(),
        )
        config = ConfigMapAdmission(
            namespace=settings.text("config-namespace"),
            name=settings.text("slo-config-name"),
            nodes=lambda: self.nodes.items.values(),
            names_required=settings.text("node-strategy-name-need-check") == "true",
        )
        quota_path = "scheduling-sigs-k8s-io-v1alpha1-elasticquota"
        plain: dict[str, Handler] = {
            "/mutate-pod": self.pod_admission.mutate,
            f"/mutate-{quota_path}": quota.mutate,
            f"/validate-{quota_path}": quota.validate,
            "/mutate-node-status": mutate_node_status,
            "/validate-node": NodeValidation(lambda: self.source.config).validate,
            "/validate-configmap": config.validate,
            "/mutate-reservation": ReservationAdmission(self.pod_admission.caches).mutate,
            "/validate-pod-binding": binding.validate,
        }
        active = active_paths(gates)
        waiting: dict[str, AsyncHandler] = {"/validate-pod": evaluator.validate}
        return (
            {path: handler for path, handler in plain.items() if path in active},
            {path: handler for path, handler in waiting.items() if path in active},
        )

    # --- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raises when the lease is lost or a part fails for good."""
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            stack.push_async_callback(_end, tasks)

            def start(name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
                task = asyncio.create_task(work, name=name)
                tasks.append(task)
                return task

            for cache in self._caches:
                start(f"cache {cache.resource.plural}", cache.run())
            start("events", self.events.run())
            stack.push_async_callback(self.events.flush)
            await self._serve_pages(stack)
            if active_paths(self.settings.gates):
                await _or_stopped(self._start_webhooks(stack), stop)
                if stop.is_set():
                    return
                start("registration", self._keep_registered())
            await _or_stopped(wait_all_synced(*self._caches), stop)
            if stop.is_set():
                return
            self.ready = True
            _log.info("ready: %d nodes, %d pods", len(self.nodes.items), len(self.pods.items))
            start("controllers", self._lead_when_elected())
            start("stop", stop.wait())
            # No part ends by itself: whichever is first was told to, or failed for good.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.ready = False
            for task in done:
                task.result()

    async def _lead_when_elected(self) -> None:
        if not self.settings.on("enable-leader-election"):
            await self._control()
            return
        election = LeaderElection(
            self.client,
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
            await asyncio.sleep(60)
            self.metrics.drop_stale()

    async def _start_webhooks(self, stack: AsyncExitStack) -> None:
        plain, waiting = self.routes()
        # Answers from caches: none may be given before they are filled.
        await wait_all_synced(*self._caches)
        certificates = await self._registration.certificates()
        server = WebhookServer(
            host="0.0.0.0",
            port=self._webhook_port,
            certificates=certificates,
            routes=plain,
            async_routes=waiting,
            observe=self._observe,
        )
        await server.start()
        stack.push_async_callback(server.stop)
        self.webhooks = server
        self._registration.current = certificates
        if self._webhook_port == 0:
            self._registration.listen_on(server.port)
        async with asyncio.timeout(_FIRST_SYNC_SECONDS):
            await self._registration.sync(server.use)

    async def _keep_registered(self) -> None:
        """Look at certificates and registrations each minute, and at once when one is changed."""
        changed = asyncio.Event()
        watches: list[Cache[Any]] = [
            Cache(self.client, resource, _Bare, field_selector=f"metadata.name={name}")
            for resource, name in self._registration.names
        ]
        for watch in watches:
            watch.subscribe(lambda _: changed.set())
        async with asyncio.TaskGroup() as group:
            for watch in watches:
                group.create_task(watch.run())
            pause = _RESYNC_SECONDS
            while True:
                try:
                    await asyncio.wait_for(changed.wait(), pause)
                except TimeoutError:
                    _log.debug("looking at webhook registrations")
                changed.clear()
                try:
                    assert self.webhooks is not None
                    await self._registration.sync(self.webhooks.use)
                    pause = _RESYNC_SECONDS
                except Exception as error:  # noqa: BLE001 - tried again, and said
                    _log.warning("webhook registration: %s", error)
                    pause = _RETRY_SECONDS

    def _observe(
        self, path: str, request: AdmissionRequest, verdict: Verdict, seconds: float
    ) -> None:
        mutating = path.startswith("/mutate")
        self.metrics.webhook.labels(
            "mutate" if mutating else "validate",
            request.kind.kind,
            request.operation,
            _PLUGINS.get(path, ""),
            "allowed" if verdict.allowed else "rejected",
        ).observe(seconds * 1000)

    # --- pages ---------------------------------------------------------------------------------

    async def _serve_pages(self, stack: AsyncExitStack) -> None:
        metrics = self._page(
            lambda: web.Response(
                body=generate_latest(self.metrics.registry),
                headers={"Content-Type": CONTENT_TYPE_LATEST},
            )
        )
        await _serve(
            stack,
            self.settings.address("metrics-addr"),
            dict.fromkeys(_METRIC_PAGES, metrics),
        )
        await _serve(
            stack,
            self.settings.address("health-probe-addr"),
            {
                "/healthz": self._page(lambda: web.Response(text="ok")),
                "/readyz": self._page(self._readyz),
            },
        )

    def _page(
        self, answer: Callable[[], web.Response]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(_: web.Request) -> web.Response:
            return answer()

        return serve

    def _readyz(self) -> web.Response:
        waiting = [cache.resource.plural for cache in self._caches if not cache.synced]
        if waiting:
            return web.Response(status=503, text=f"waiting for lists of {', '.join(waiting)}\n")
        if active_paths(self.settings.gates) and self._registration.current is None:
            return web.Response(status=503, text="webhook certificates are not ready\n")
        return web.Response(text="ok") if self.ready else web.Response(status=503, text="starting")


_PLUGINS: Final = {
    "/mutate-pod": "ClusterColocationProfile",
    "/validate-pod": "ClusterColocationProfile",
    "/mutate-node-status": "NodeResourceAmplificationPlugin",
    "/validate-node": "SLOManagerConfigConflictForNode",
    "/validate-configmap": "SLOConfig",
    "/mutate-reservation": "ClusterReservation",
}


async def _serve(
    stack: AsyncExitStack,
    address: tuple[str, int] | None,
    pages: dict[str, Callable[[web.Request], Awaitable[web.Response]]],
) -> None:
    if address is None:
        return
    application = web.Application()
    for path, page in pages.items():
        application.router.add_get(path, page)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, *address).start()


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
    # Last started, first ended: controllers before the caches that they read.
    for task in reversed(tasks):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
