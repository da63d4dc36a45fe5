"""The daemon: sources feed the state, rules make the engine, NRI and the reconciler carry it out.

The event loop owns all mutable state and answers the runtime from memory. Whatever touches a disk
or the kernel runs in the worker threads or in the reconciler's thread. Nothing here decides
anything: this module says who talks to whom, and in which order things start and stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from apis.errors import InputError, InputErrors
from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta
from koordlet import kernel
from koordlet.config import Config, split_address
from koordlet.container_metrics import OF_PROCESSES, Standing
from koordlet.decider import Decider
from koordlet.events import Events, Severity
from koordlet.executor.executor import Executor, Limits
from koordlet.executor.slots import State as ValueState
from koordlet.feeds import KUBELET, Feeds, awaited
from koordlet.hostapps import host_app_subjects
from koordlet.journal import Journal, JournalError
from koordlet.machine import layout_of, local_host
from koordlet.metrics import CONTENT_TYPE, Registries
from koordlet.nri_handler import NriHandler
from koordlet.readings import DaemonReadings
from koordlet.reconciler import PassReport, Reconciler
from koordlet.requests_log import RequestsLog
from koordlet.rules import Rules
from koordlet.site_policies import Site
from koordlet.snapshot import Snapshot
from koordlet.state import NodeState
from koordlet.watch import DirectoryWatch
from linux import resctrl_groups
from linux.cgroup_paths import Layout
from linux.discovery import DiscoveryError
from linux.host import Host
from linux.local import LocalHost
from linux.procfs import boot_id
from linux.resources import Resource, Value
from nri_plugin.options import Launch, Options
from nri_plugin.statistics import Statistics
from nri_plugin.supervisor import Supervisor
from service.http_server import Request, Response, Server, text
from service.systemd import Notifier

if TYPE_CHECKING:
    from koordlet.hookservice import HookServer

_LOG = logging.getLogger("koordlet")

_READY_PATIENCE_S: Final = 3.0
"""How long start-up waits for the runtime before it reports ready without it."""

_SWEEP_S: Final = 60.0
_START_PATIENCE_S: Final = 30.0

_QUIET: Final = frozenset(
    {"create-container", "stop-container", "remove-container", "stop-sandbox"}
)
"""Changes of the state that give the reconciler nothing to do at once: a container that is being
created has no group yet, and one that ended has none any more."""

_PUBLISH_EVERY_S: Final = 0.02
"""A change is published at once; in a burst of changes they share a snapshot."""

_MOST_ENDED: Final = 16384

_STUCK_S: Final = 180.0
"""A pass that is silent for so long is stuck in the kernel, or its thread is gone."""


class Daemon:
    """One daemon of one node."""

    def __init__(
        self,
        config: Config,
        *,
        reload: Callable[[], Config],
        launch: Launch | None = None,
        host: Host | None = None,
    ) -> None:
        """reload: reads the configuration again; raises InputError or InputErrors. host: this
        machine's kernel when None."""
        self.config = config
        self.node_name = config.node_name
        self.started_at = time.time()
        self.events_log = Events()
        self.host = host or local_host(config)
        self._launch = launch
        self._reload = reload
        self._notifier = Notifier()
        self._workers = ThreadPoolExecutor(max_workers=3, thread_name_prefix="koordlet-io")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()
        self._requests = RequestsLog(f"{config.run_dir}/requests.log")
        self._passed_at = time.monotonic()
        self._looking = False
        self._loading = asyncio.Lock()
        self._publish_scheduled = False
        self._published_at = 0.0
        self._reasons: set[str] = set()
        self._missing_once: set[str] = set()
        self._servers: list[Server] = []
        self._http_missing = bool(config.http.address)
        self._hook_server: HookServer | None = None
        self._site_watch: DirectoryWatch | None = None
        self.layout: Layout | None = None
        self.executor: Executor | None = None
        self.reconciler: Reconciler | None = None
        self.probed: kernel.Probed | None = None
        self.journal = Journal(f"{config.run_dir}/journal", boot=boot_id(self.host))
        self._groups: tuple[str, ...] = ()
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)
        self._ended_before_pass: list[str] = []
        self.values: Mapping[tuple[Resource, ValueState], int] = {}
        self.of_processes: Sequence[Standing] = ()
        self.nri: Statistics | None = None
        self.supervisor: Supervisor | None = None
        self.loop_lag_s = 0.0
        self.worst_loop_lag_s = 0.0
        self.state = NodeState(remembered=self._requests.load(), awaited=awaited(config))
        self.site = Site(config, self.events_log) if config.site_policies.enabled else None
        self.hook_decider = Decider(
            self.events_log,
            site_guard=self.site.hook_guard if self.site else None,
            later=self.after_reply,
        )
        self.repair_decider = Decider(
            self.events_log, site_guard=self.site.repair_guard if self.site else None
        )
        self.rules = Rules(
            NodeInputs(node=NodeMeta(name=config.node_name), settings=config.settings()),
            self.events_log,
            self._engine_swapped,
            delay=config.intervals.rebuild_delay,
        )
        self.feeds = Feeds(
            config,
            state=self.state,
            rules=self.rules,
            events=self.events_log,
            workers=self._workers,
            surroundings=self,
        )
        self.handler = NriHandler(
            state=self.state,
            decider=self.hook_decider,
            events=self.events_log,
            requests=self._requests,
            surroundings=self,
        )

    # --- life ----------------------------------------------------------------------------------

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Start everything, serve until told to stop, stop everything.

        started: called once, when everything is up.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            await self._start()
            self._tell_ready()
            started()
            await self._stopping.wait()
        finally:
            await self._stop()

    def stop(self) -> None:
        """Begin to stop."""
        self._stopping.set()

    def _stop_signal(self, number: int) -> None:
        if self._stopping.is_set():
            # A second signal means now.
            os._exit(1)
        _LOG.info("stopping", extra={"signal": signal.Signals(number).name})
        self.stop()

    async def _start(self) -> None:
        config = self.config
        loop = asyncio.get_running_loop()
        self.set_layout(await loop.run_in_executor(self._workers, self._discover, ()))
        await self._probe()
        await self.feeds.first_objects()
        await self._load_site_policies()
        self.rules.build_now()
        self._start_reconciler()
        await self._listen_admin()
        if self._http_missing:
            await self._listen_http()
        if self.site is not None:
            self._site_watch = DirectoryWatch(
                config.site_policies.directory,
                lambda: self.spawn("site-policies", self._load_site_policies()),
                poll=config.intervals.objects,
            )
        self.feeds.start()
        if config.hook_service.enabled:
            await self._start_hook_service()
        self.spawn("housekeeping", self._housekeeping())
        self.spawn("watchdog", self._watchdog())
        if config.nri.enabled:
            self._start_nri()
            await self._wait_for_runtime()

    def _start_reconciler(self) -> None:
        config = self.config
        assert self.layout is not None
        self.executor = Executor(
            self.host,
            self.layout,
            self.journal,
            limits=Limits(writes_per_second=float(config.writes.budget_per_second)),
            page_size_bytes=self.rules.inputs.kernel.page_size_bytes,
            burst_above_quota=self.probed.burst_above_quota if self.probed else False,
        )
        self._snapshot = self.state.snapshot(self.engine)
        self.reconciler = Reconciler(
            self.executor,
            self.journal,
            self._snapshot_for_pass,
            interval_s=config.intervals.reconcile,
            guard=self.repair_decider.guard,
            on_pass=self._pass_done,
            watch=True,
            here=self.host.here if isinstance(self.host, LocalHost) else lambda path: path,
        )
        self.reconciler.start()

    @property
    def snapshot(self) -> Snapshot:
        """What the next pass works from."""
        return self._snapshot

    def _snapshot_for_pass(self) -> Snapshot:
        """In the reconciler's thread, which owns the executor: a new layout goes in here."""
        if self.executor is not None and self.layout is not None:
            self.executor.set_layout(self.layout)
        # What was handed over before an end is in the journal when this pass is done.
        self._ended_before_pass = [self._ended.popleft() for _ in range(len(self._ended))]
        return self._snapshot

    def _pass_done(self, report: PassReport) -> None:
        """In the reconciler's thread, after each pass."""
        self._passed_at = time.monotonic()
        self._forget_deliveries()
        if self.reconciler is not None:
            # Taken here, because a scrape must not wait for a pass.
            self.values = self.reconciler.states()
            told = {resource for resource, _ in self.values} & OF_PROCESSES
            self.of_processes = self.reconciler.standing(told) if told else ()
        if self.rules.inputs.kernel.resctrl is not None:
            self._groups = tuple(resctrl_groups.groups(self.host))
        if report.written or report.failed or report.restored:
            _LOG.info(
                "reconciled",
                extra={
                    "reasons": ",".join(report.reasons),
                    "subjects": report.subjects,
                    "decided": report.decided,
                    "written": report.written,
                    "failed": report.failed,
                    "restored": report.restored,
                    "cpu_ms": round(report.cpu_ms, 1),
                },
            )

    def _forget_deliveries(self) -> None:
        """Forget what was handed over for containers that ended, most of all unstarted ones."""
        try:
            for container_id in self._ended_before_pass:
                self.journal.done_with(container_id)
        except JournalError as error:
            _LOG.warning("deliveries stay in the journal: %s", error)
        self._ended_before_pass = []

    def _start_nri(self) -> None:
        config = self.config
        assert self.layout is not None
        options = Options(
            run_dir=config.run_dir,
            socket=config.nri.socket,
            name=config.nri.plugin_name,
            index=config.nri.plugin_index,
            cgroup_version=self.layout.version,
            first_backoff_s=config.nri.backoff,
        )
        self.nri = Statistics()
        self.supervisor = Supervisor(
            options, self.handler, statistics=self.nri, launch=self._launch
        )
        self.spawn("nri", self._run_nri(self.supervisor))

    async def _run_nri(self, supervisor: Supervisor) -> None:
        await supervisor.run()
        # A plugin that the runtime launched lives as long as its connection.
        self.stop()

    async def _wait_for_runtime(self) -> None:
        assert self.supervisor is not None
        try:
            async with asyncio.timeout(_READY_PATIENCE_S):
                await self.supervisor.wait_synced()
        except TimeoutError:
            _LOG.warning(
                "ready without the runtime; it will be dialled for ever",
                extra={"problem": self.supervisor.status.problem},
            )

    async def _start_hook_service(self) -> None:
        # Imports gRPC, which a daemon without a runtime proxy does not pay for.
        from koordlet.hookservice import HookAnswers, HookServer

        answers = HookAnswers(self.state, self.hook_decider, self)
        server = HookServer(self.config.hook_service, answers, self.events_log)
        try:
            await server.start()
        except OSError as error:
            self.events_log.add("hook-service", "hookService", str(error), severity=Severity.ERROR)
            return
        self._hook_server = server

    async def _listen_admin(self) -> None:
        from koordlet.admin import MAX_BODY_BYTES, SOCKET, admin_routes

        admin = Server(admin_routes(self), max_body_bytes=MAX_BODY_BYTES)
        await admin.listen_unix(f"{self.config.run_dir}/{SOCKET}")
        self._servers.append(admin)

    async def _listen_http(self) -> None:
        """Serve metrics and health. A port that is taken costs these, not the node's care."""
        registries = Registries(DaemonReadings(self))

        def exposition(which: Any) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            async def serve(request: Request) -> Response:
                return Response(200, Registries.text(which), CONTENT_TYPE)

            return serve

        server = Server(
            {
                ("GET", "/metrics"): exposition(registries.merged),
                ("GET", "/internal-metrics"): exposition(registries.internal),
                ("GET", "/external-metrics"): exposition(registries.external),
                ("GET", "/healthz"): self._healthz,
                ("GET", "/readyz"): self._readyz,
            }
        )
        try:
            await server.listen_tcp(*split_address(self.config.http.address))
        except OSError as error:
            self.events_log.add(
                "http",
                self.config.http.address,
                f"no metrics and no health checks: {error.strerror or error};"
                " tried again every minute",
                severity=Severity.ERROR,
            )
            return
        self._http_missing = False
        self._servers.append(server)

    def _tell_ready(self) -> None:
        self._notifier.send(READY="1", STATUS=self.status_line())
        _LOG.info("ready", extra={"node": self.node_name, "status": self.status_line()})

    async def _stop(self) -> None:
        self._notifier.send(STOPPING="1")
        if self.supervisor is not None:
            self.supervisor.stop()
        self.feeds.close()
        if self._site_watch is not None:
            self._site_watch.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.close()
        if self._hook_server is not None:
            await self._hook_server.stop()
        if self.reconciler is not None:
            loop = asyncio.get_running_loop()
            if await loop.run_in_executor(None, self.reconciler.stop):
                self.reconciler.close()
                self.journal.close()
            else:
                _LOG.warning("the reconciler is stuck in a kernel write; leaving it")
        self._requests.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        _LOG.info("stopped")

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task for the daemon's life. One that ends with an error ends the daemon."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                _LOG.critical("task failed, stopping", exc_info=error, extra={"task": name})
                self.failed = True
                self.stop()

        task.add_done_callback(ended)

    failed = False
    """True when the daemon stops because of a defect: then it exits with an error."""

    # --- the kernel ----------------------------------------------------------------------------

    def _discover(self, live: Iterable[str]) -> Layout:
        return layout_of(self.config, self.host, live=live)

    def set_layout(self, layout: Layout) -> None:
        """Take the node's layout into force."""
        if layout == self.layout:
            return
        self.layout = layout
        _LOG.info(
            "cgroup layout",
            extra={
                "version": layout.version,
                "driver": layout.driver.value,
                "kubepods": layout.kubepods,
            },
        )
        self.state.set_layout(layout)
        self._place_host_apps()
        self.state_changed("layout")

    async def _probe(self) -> None:
        """Find out what the kernel can do now: modules and switches come and go."""
        assert self.layout is not None
        loop = asyncio.get_running_loop()
        self.probed = await loop.run_in_executor(
            self._workers, kernel.probe, self.host, self.layout
        )
        self.rules.change(kernel=self.probed.facts)

    def _find_kubepods_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self.spawn("kubepods", self._find_kubepods())

    async def _find_kubepods(self) -> None:
        """A node's first pod makes the pods' root: look where it is, and what it can do."""
        live = [each.cgroup for each in self.state.pod_subjects() if each.cgroup]
        loop = asyncio.get_running_loop()
        try:
            layout = await loop.run_in_executor(self._workers, self._discover, live)
        except (OSError, DiscoveryError) as error:
            self.events_log.add("cgroups", "cgroups", str(error), severity=Severity.ERROR)
            return
        finally:
            self._looking = False
        if layout != self.layout:
            self.set_layout(layout)
            await self._probe()

    def objects_changed(self) -> None:
        self._place_host_apps()
        self.state_changed("objects")

    def _place_host_apps(self) -> None:
        if self.layout is None:
            return
        subjects, errors = host_app_subjects(self.rules.inputs.slo.host_applications, self.layout)
        for error in errors:
            self.events_log.add("bad-object", error.obj, str(error), severity=Severity.ERROR)
        self.state.set_host_apps(subjects)

    # --- policies of the site ------------------------------------------------------------------

    async def _load_site_policies(self) -> None:
        if self.site is None:
            return
        loop = asyncio.get_running_loop()
        async with self._loading:
            policies, problems = await loop.run_in_executor(self._workers, self.site.loader.load)
        for origin, problem in problems:
            self.events_log.add("bad-policy", origin, problem, severity=Severity.ERROR)
        if policies == self.rules.site_policies:
            return
        self.site.hook_guard.forget()
        self.site.repair_guard.forget()
        names = frozenset(policy.name for policy in policies)
        self.hook_decider.site_names = self.repair_decider.site_names = names
        self.rules.change_site_policies(policies)

    # --- what the hook service needs -----------------------------------------------------------

    @property
    def nri_protects(self) -> bool:
        return self.supervisor is not None and self.supervisor.status.protects

    def told_by_proxy(self, uid: str) -> None:
        self.pod_appeared(uid)
        self.feeds.ask_soon("cri")

    # --- what the NRI handler needs ------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        return self.rules.engine

    def after_reply(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(work)

    def state_changed(self, reason: str) -> None:
        self._reasons.add(reason)
        if not self._publish_scheduled:
            self._publish_scheduled = True
            loop = asyncio.get_running_loop()
            wait = self._published_at + _PUBLISH_EVERY_S - loop.time()
            if wait > 0:
                loop.call_later(wait, self._publish)
            else:
                loop.call_soon(self._publish)

    def pod_appeared(self, uid: str) -> None:
        if not self.state.known_to_kubelet(uid):
            self.feeds.ask_soon(KUBELET)

    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None:
        self.journal.note_delivered(container_id, resource, requested, value, policy=policy)

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        self.journal.supersede(container_id, resources)

    def ended(self, container_id: str) -> None:
        self._ended.append(container_id)

    def resctrl_groups(self) -> Collection[str]:
        return self._groups

    def _engine_swapped(self, engine: Engine) -> None:
        self._place_host_apps()
        self.state_changed("rules")

    def _publish(self) -> None:
        self._publish_scheduled = False
        self._published_at = asyncio.get_running_loop().time()
        reasons, self._reasons = self._reasons, set()
        self._snapshot = self.state.snapshot(self.engine)
        if self.layout is not None and not self.layout.kubepods and self.state.counts[0]:
            self._find_kubepods_soon()
        if self.reconciler is not None and reasons - _QUIET:
            self.reconciler.trigger(",".join(sorted(reasons)))

    # --- upkeep --------------------------------------------------------------------------------

    async def _housekeeping(self) -> None:
        facts_at = time.monotonic() + self.config.intervals.facts
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.sweep()
            if self._http_missing:
                await self._listen_http()
            if time.monotonic() >= facts_at:
                facts_at = time.monotonic() + self.config.intervals.facts
                await self._probe()

    async def sweep(self) -> None:
        """Drop sandboxes whose directories are gone twice in a row, and look for the pods' root."""
        assert self.layout is not None
        loop = asyncio.get_running_loop()
        if not self.layout.kubepods:
            await self._find_kubepods()
        if self.state.start_overdue(_START_PATIENCE_S):
            self.state_changed("start-container")
        candidates = self.state.stale_candidates()
        missing = await loop.run_in_executor(self._workers, self._missing, candidates)
        self.state.forget_sandboxes(missing & self._missing_once)
        if missing & self._missing_once:
            self.state_changed("sweep")
        self._missing_once = missing

    def _missing(self, cgroups: Mapping[str, str]) -> set[str]:
        assert self.layout is not None
        controller = next(iter(self.layout.mounts))
        return {
            id_
            for id_, cgroup in cgroups.items()
            if not self.host.is_dir(self.layout.directory(controller, cgroup))
        }

    async def _watchdog(self) -> None:
        """Say that we live, as long as we do, and measure how long the loop was busy."""
        period = min((self._notifier.watchdog_seconds or 10.0) / 3, 5.0)
        while True:
            asked = time.monotonic()
            await asyncio.sleep(period)
            self.loop_lag_s = max(time.monotonic() - asked - period, 0.0)
            self.worst_loop_lag_s = max(self.worst_loop_lag_s, self.loop_lag_s)
            if not self.unhealthy():
                self._notifier.send(WATCHDOG="1", STATUS=self.status_line())

    def reload(self) -> None:
        """SIGHUP: read the configuration and the objects again."""
        try:
            config = self._reload()
        except (InputError, InputErrors) as error:
            self.events_log.add(
                "bad-config",
                "configuration",
                f"{error}; the configuration in force stays",
                severity=Severity.ERROR,
            )
            return
        live = {"feature_gates", "compat", "disable_unset_cpu_quota", "hami_core_library", "log"}
        changed = {
            name
            for name in config.__struct_fields__
            if getattr(config, name) != getattr(self.config, name)
        }
        if late := changed - live:
            names = ", ".join(sorted(late))
            self.events_log.add(
                "restart-needed", "configuration", f"a restart is needed to change {names}"
            )
        self.config = msgspec.structs.replace(
            self.config, **{name: getattr(config, name) for name in changed & live}
        )
        logging.getLogger().setLevel(self.config.log.level.upper())
        self.rules.change(settings=self.config.settings())
        self.feeds.scan_soon()
        self.events_log.add(
            "reloaded", "configuration", "configuration read again", severity=Severity.INFO
        )

    # --- health and numbers --------------------------------------------------------------------

    def unhealthy(self) -> str:
        """Return why the daemon should be restarted; "" while it works."""
        if self.reconciler is None:
            return ""
        silent_s = time.monotonic() - self._passed_at
        if silent_s > max(_STUCK_S, 6 * self.config.intervals.reconcile):
            return f"the reconciler has not finished a pass for {silent_s:.0f} s"
        return ""

    def not_ready(self) -> list[str]:
        """Return why new containers are not protected, or the node is not kept in its state."""
        reasons = [f"{source} has not spoken yet" for source in self.state.awaited]
        if self.supervisor is not None and not self.supervisor.status.protects:
            problem = self.supervisor.status.problem or self.supervisor.status.state.value
            reasons.append(f"NRI is not connected: {problem}")
        return reasons

    def status_line(self) -> str:
        """Return one line for systemd and the log."""
        pods, containers = self.state.counts
        if self.supervisor is None:
            nri = "NRI off"
        else:
            status = self.supervisor.status
            runtime = (
                f" {status.runtime.name} {status.runtime.version_text}" if status.runtime else ""
            )
            nri = f"NRI {status.state.value}{runtime}"
        return f"{nri}; {pods} pods, {containers} containers"

    async def _healthz(self, request: Request) -> Response:
        problem = self.unhealthy()
        return text(503, problem) if problem else text(200, "ok")

    async def _readyz(self, request: Request) -> Response:
        reasons = self.not_ready()
        return text(503, "\n".join(reasons)) if reasons else text(200, "ok")

    @property
    def hooks_answered(self) -> int:
        """How many requests of the runtime were answered so far."""
        if self.nri is None:
            return 0
        return sum(histogram.count for histogram in self.nri.hook_latency.values())
