"""The admission webhooks of one process: their paths, the TLS server and the registration.

Every replica serves. Start order: caches synced, certificates loaded, listening, registered. No
review therefore reaches a server that cannot answer it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from apis.core import ObjectMeta
from apis.decode import Wire
from cluster.manager.caches import Caches
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.flags import Settings
from cluster.metrics import ManagerMetrics
from cluster.webhook.binding import BindingAdmission, BindingRules
from cluster.webhook.certificate_store import (
    CertificateStore,
    FolderStore,
    SecretStore,
    WebhookRegistration,
)
from cluster.webhook.configmap import ConfigMapAdmission
from cluster.webhook.configuration import MUTATING_NAME, VALIDATING_NAME, Address, active_paths
from cluster.webhook.elastic_quota import (
    QuotaAdmission,
    by_quota,
    quota_topology,
    unlabelled,
)
from cluster.webhook.enhanced import EnhancedRulesSource
from cluster.webhook.node import NodeValidation, mutate_node_status
from cluster.webhook.pod import PodAdmission, PodCaches
from cluster.webhook.quota_evaluation import QuotaEvaluator, RetryRules
from cluster.webhook.reservation import ReservationAdmission
from kube.cache import Cache, wait_all_synced
from kube.certificates import Certificates, ends_at
from kube.client import Client
from kube.webhook import AdmissionRequest, Handler, Verdict, WebhookServer

_log = logging.getLogger(__name__)

_RESYNC_SECONDS: Final = 60.0
"""Between two checks of certificates and webhook configurations; upstream's. With twice the value a
change that no watch reported is repaired twice as late."""
_RETRY_SECONDS: Final = 2.0
"""Between attempts after a failure. Chosen: an API server restarts in seconds, and each attempt
costs it a few requests from each replica."""
_FIRST_SYNC_SECONDS: Final = 60.0
"""For the first registration; a manager that cannot register exits and is restarted by kubelet.
Chosen: a webhook configuration that is applied a minute later is still found."""
_BACKOFF_RESET_SECONDS: Final = 300.0
"""After this time without a rewrite the back-off starts at its shortest pause again. Chosen: five
times the longest pause."""
_REWRITES_BEFORE_WARNING: Final = 5
"""Rewrites in a row that cause a warning. Chosen: a rolling update takes two or three."""


class _Bare(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


class RewriteBackoff:
    """The back-off between rewrites of a webhook configuration that another process rewrites too.

    During a rolling update two versions or sets of gates run side by side, and each immediately
    sees the writes of the other. Without a pause they would overwrite each other as fast as the API
    server can store.
    """

    def __init__(self) -> None:
        self._rewrites = 0
        self._last = float("-inf")

    def pause(self, now: float) -> float:
        """Return the seconds to wait after a rewrite at `now`.

        Half a second, doubled with each rewrite in a row, at most the resync interval. Half a
        second is chosen: a rolling update stays quick. The exponent stops at 10, far above the
        interval, so that the power stays small.
        """
        if now - self._last > _BACKOFF_RESET_SECONDS:
            self._rewrites = 0
        self._rewrites += 1
        self._last = now
        if self._rewrites == _REWRITES_BEFORE_WARNING:
            _log.warning(
                "another process keeps rewriting the webhook configurations; "
                "check for a manager of another version or with other feature gates"
            )
        return min(_RESYNC_SECONDS, 0.5 * 2.0 ** min(self._rewrites - 1, 10))


class Admission:
    """The webhooks of one process."""

    def __init__(
        self,
        client: Client,
        settings: Settings,
        caches: Caches,
        source: SLOConfigSource,
        metrics: ManagerMetrics,
        *,
        port: int | None = None,
    ) -> None:
        """port: overrides the environment; 0 picks a free one."""
        self._client = client
        self._settings = settings
        self._caches = caches
        self._source = source
        self._metrics = metrics
        self._port = settings.env_port("WEBHOOK_PORT", 9876) if port is None else port
        self.server: WebhookServer | None = None
        self._pods_by_quota = caches.pods.index(by_quota)
        self._unlabelled_pods = caches.pods.index(unlabelled)
        self._registration = self._make_registration()
        enhanced = EnhancedRulesSource(
            caches.enhanced_maps,
            namespace=settings.text("pod-enhanced-validator-config-namespace"),
            name=settings.text("pod-enhanced-validator-config-name"),
        )
        self._pods = PodAdmission(
            PodCaches(
                caches.profiles,
                caches.namespaces,
                caches.priority_classes,
                caches.quotas,
                caches.quota_profiles,
            ),
            settings.gates,
            caches.quota_tree,
            enhanced.current,
        )

    @property
    def wanted(self) -> bool:
        """Whether any webhook is enabled."""
        return bool(active_paths(self._settings.gates))

    @property
    def behind_a_service(self) -> bool:
        """Whether a Service leads here: reviews may then arrive for seconds after a stop began."""
        return self.wanted and not self._settings.env("WEBHOOK_HOST", "")

    @property
    def registered(self) -> bool:
        """Whether certificates are served."""
        return self._registration.current is not None

    def _make_registration(self) -> WebhookRegistration:
        settings = self._settings
        own = settings.env("POD_NAMESPACE", "koordinator-system")
        host = settings.env("WEBHOOK_HOST", "")
        address = Address(
            namespace=own,
            service=settings.env("SERVICE_NAME", "koordinator-webhook-service"),
            host=host,
            port=self._port,
        )
        writer = settings.env("WEBHOOK_CERT_WRITER", "fs" if host else "secret")
        store: CertificateStore
        if writer == "fs":
            folder = settings.env("WEBHOOK_CERT_DIR", "/tmp/koordinator-webhook-certs")
            store = FolderStore(Path(folder))
        else:
            name = settings.env("SECRET_NAME", "koordinator-webhook-certs")
            store = SecretStore(self._client, own, name)
        return WebhookRegistration(
            self._client,
            store,
            address,
            active_paths(settings.gates),
            mutating_name=settings.env("MUTATING_WEBHOOK_NAME", MUTATING_NAME),
            validating_name=settings.env("VALIDATING_WEBHOOK_NAME", VALIDATING_NAME),
        )

    def routes(self, bookings: Client) -> dict[str, Handler]:
        """Return the handlers of the paths whose gates are on.

        bookings: the client for booking pods on quotas; reviews must not wait for the rate limit of
        the controllers' writes.
        """
        settings, gates, caches = self._settings, self._settings.gates, self._caches
        quota = QuotaAdmission(
            caches.quota_tree,
            self._pods_by_quota,
            self._unlabelled_pods,
            gates,
            self._metrics,
        )
        evaluator = QuotaEvaluator(
            bookings,
            self._pods,
            gates,
            caches.quota_tree,
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
            caches.pods,
            lambda decision: self._metrics.binding.labels(decision).inc(),
        )
        config = ConfigMapAdmission(
            namespace=settings.text("config-namespace"),
            name=settings.text("slo-config-name"),
            nodes=lambda: tuple(caches.nodes.items.values()),
            names_required=settings.text("node-strategy-name-need-check") == "true",
        )
        routes: dict[str, Handler] = {
            "/mutate-pod": self._pods.mutate,
            f"/mutate-{_QUOTA_PATH}": quota.mutate,
            f"/validate-{_QUOTA_PATH}": quota.validate,
            "/mutate-node-status": mutate_node_status,
            "/validate-node": NodeValidation(lambda: self._source.config).validate,
            "/validate-configmap": config.validate,
            "/mutate-reservation": ReservationAdmission(self._pods.caches).mutate,
            "/validate-pod": evaluator.validate,
            "/validate-pod-binding": binding.validate,
        }
        active = active_paths(gates)
        return {path: handler for path, handler in routes.items() if path in active}

    def pages(self) -> dict[str, Callable[[], bytes]]:
        """Return the pages that GET reads: the quota tree at /elasticQuota, as upstream."""
        if f"/validate-{_QUOTA_PATH}" not in active_paths(self._settings.gates):
            return {}
        return {"/elasticQuota": lambda: quota_topology(self._caches.quota_tree())}

    async def start(self, stack: AsyncExitStack) -> None:
        """Serve and register; the server stops with `stack`."""
        bookings = await stack.enter_async_context(self._client.sibling())
        routes = self.routes(bookings)
        # Reviews are answered from the caches, so these must be synced first.
        await wait_all_synced(*self._caches.all)
        certificates = await self._registration.certificates()
        server = WebhookServer(
            host="",
            port=self._port,
            certificates=certificates,
            routes=routes,
            observe=self._observe,
            pages=self.pages(),
        )
        await server.start()
        stack.push_async_callback(server.stop)
        self.server = server
        self._registration.current = certificates
        self._metrics.certificate_expiry.set(ends_at(certificates).timestamp())
        if self._port == 0:
            self._registration.listen_on(server.port)
        async with asyncio.timeout(_FIRST_SYNC_SECONDS):
            await self._registration.sync(self._serve)

    def _serve(self, certificates: Certificates) -> None:
        assert self.server is not None
        self.server.use(certificates)
        self._metrics.certificate_expiry.set(ends_at(certificates).timestamp())

    def drain(self) -> None:
        """Close each connection after its next reply; clients reconnect to another replica."""
        if self.server is not None:
            self.server.drain()

    async def keep_registered(self) -> None:
        """Check certificates and webhook configurations each minute, and at once after a change."""
        changed = asyncio.Event()
        watches: list[Cache[Any]] = [
            Cache(self._client, resource, _Bare, field_selector=f"metadata.name={name}")
            for resource, name in self._registration.names
        ]
        for watch in watches:
            watch.subscribe(lambda _: changed.set())
        async with asyncio.TaskGroup() as group:
            for watch in watches:
                group.create_task(watch.run())
            pause = _RESYNC_SECONDS
            backoff = RewriteBackoff()
            while True:
                try:
                    await asyncio.wait_for(changed.wait(), pause)
                except TimeoutError:
                    _log.debug("checking certificates and webhook configurations")
                changed.clear()
                try:
                    if await self._registration.sync(self._serve):
                        await asyncio.sleep(backoff.pause(asyncio.get_running_loop().time()))
                    pause = _RESYNC_SECONDS
                except Exception as error:  # noqa: BLE001 - tried again, and said
                    _log.warning("cannot update certificates or webhook configurations: %s", error)
                    pause = _RETRY_SECONDS

    def _observe(
        self, path: str, request: AdmissionRequest, verdict: Verdict, seconds: float
    ) -> None:
        # Label values come from fixed sets: a series stays for the life of the process, so values
        # from a request could fill the memory.
        kind, plugin = _SERVED.get(path, ("", ""))
        self._metrics.webhook.labels(
            "mutate" if path.startswith("/mutate") else "validate",
            kind,
            request.operation if request.operation in _OPERATIONS else "",
            plugin,
            "allowed" if verdict.allowed else "rejected",
        ).observe(seconds * 1000)


_OPERATIONS: Final = frozenset({"CREATE", "UPDATE", "DELETE", "CONNECT"})
_QUOTA_PATH: Final = "scheduling-sigs-k8s-io-v1alpha1-elasticquota"
_SERVED: Final = {
    "/mutate-pod": ("Pod", "ClusterColocationProfile"),
    "/validate-pod": ("Pod", "ClusterColocationProfile"),
    "/validate-pod-binding": ("Binding", ""),
    f"/mutate-{_QUOTA_PATH}": ("ElasticQuota", ""),
    f"/validate-{_QUOTA_PATH}": ("ElasticQuota", ""),
    "/mutate-node-status": ("Node", "NodeResourceAmplificationPlugin"),
    "/validate-node": ("Node", "SLOManagerConfigConflictForNode"),
    "/validate-configmap": ("ConfigMap", "SLOConfig"),
    "/mutate-reservation": ("Reservation", "ClusterReservation"),
}
"""Path -> values of the labels object_type and plugin_name, upstream's."""
