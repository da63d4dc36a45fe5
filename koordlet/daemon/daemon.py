"""The daemon: the order in which its parts start and stop, and its periodic work.

`koordlet.daemon.parts` makes the parts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Final

from koordlet.configuration.config import Config
from koordlet.daemon.background import Background
from koordlet.daemon.parts import Parts
from koordlet.daemon.reloading import reload
from koordlet.daemon.serving.endpoints import Endpoints
from koordlet.daemon.sweep import SWEEP_S
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.node.machine import local_host
from linux.host import Host
from linux.local import LocalHost
from nri_plugin.options import Launch
from nri_plugin.supervisor import Supervisor
from service.locks import LockHeld
from service.systemd import Notifier

_LOG = logging.getLogger("koordlet")

_NETWORK_S: Final = 1.0
"""Between two looks of network QoS at pods and NodeSLO. Chosen: a new pod has its class and limits
after a second. Half of it doubles the comparisons of an idle node."""


class Daemon:
    """One daemon of one node."""

    def __init__(
        self,
        config: Config,
        *,
        reload: Callable[[], Config],
        launch: Launch | None = None,
        host: Host | None = None,
        lock: KubepodsLock | None = None,
    ) -> None:
        """reload: reads the configuration again; raises InputError or InputErrors. host: None for
        this machine's kernel. lock: excludes other daemons; None: a lock on the host's cgroups.
        """
        host = host or local_host(config)
        if lock is None and isinstance(host, LocalHost):
            lock = KubepodsLock(host.here)
        self.failed = False
        """True when the daemon stops because of an error: the exit status shows it."""
        self._reload = reload
        self._notifier = Notifier()
        self._stopping = asyncio.Event()
        self._background = Background(self._fail)
        self.parts = Parts(
            config,
            host=host,
            lock=lock,
            launch=launch,
            background=self._background,
            displaced=self._displaced,
        )
        self._endpoints = Endpoints(self.parts)

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Start all parts, serve until `stop` or a signal, then stop all parts.

        started: called once, after the start. Raises LockHeld when another daemon has this
        node's pods, DiscoveryError without cgroups, OSError without a run directory.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            await self._start()
            self._notify_ready()
            started()
            await self._stopping.wait()
        finally:
            await self._stop()

    def stop(self) -> None:
        """Begin to stop; `run` returns when everything has stopped."""
        self._stopping.set()

    def reload(self) -> None:
        """Read the configuration and the objects again, as on SIGHUP."""
        reload(self.parts, self._reload)

    # --- starting and stopping -----------------------------------------------------------------

    async def _start(self) -> None:
        parts = self.parts
        config = parts.config
        layout = await parts.kernel.find()
        parts.passes.claim(layout)
        await parts.kernel.probe()
        await parts.feeds.first_objects()
        if parts.site_watch is not None:
            await parts.site_watch.load()
        parts.rules.build_now()
        if config.measuring.enabled:
            await parts.dynamics.resume()
            self._background.spawn("leases", parts.dynamics.end_leases())
        parts.passes.start(layout, burst_above_quota=parts.kernel.burst_above_quota)
        await self._endpoints.open()
        if parts.site_watch is not None:
            parts.site_watch.start(self._background.spawn)
        parts.feeds.start()
        await self._endpoints.open_hook_service()
        self._background.spawn("audit", parts.audit.run())
        await parts.start_measuring()
        self._background.spawn("prediction", parts.predicting.run())
        self._background.spawn("reports", parts.reporting.run())
        for name, look in (
            ("terway-qos", parts.terway.look),
            ("network-qos", parts.network_qos.look),
        ):
            self._background.repeat(name, look, workers=parts.workers, pause_s=_NETWORK_S)
        self._background.spawn("evictions", parts.evictions.run())
        self._background.spawn("housekeeping", self._housekeeping())
        self._background.spawn("watchdog", parts.health.watch(self._notifier))
        if config.nri.enabled:
            supervisor = parts.nri.start(layout.version)
            self._background.spawn("nri", self._run_nri(supervisor))
            await parts.nri.wait_synced()

    def _notify_ready(self) -> None:
        status = self.parts.health.status_line()
        self._notifier.send(READY="1", STATUS=status)
        _LOG.info("ready", extra={"node": self.parts.node_name, "status": status})

    async def _stop(self) -> None:
        parts = self.parts
        self._notifier.send(STOPPING="1")
        parts.nri.stop()
        parts.feeds.close()
        if parts.site_watch is not None:
            parts.site_watch.close()
        await parts.stop_measuring()
        await self._background.cancel()
        parts.predicting.close()
        parts.evictions.close()
        await self._endpoints.close()
        parts.after_reply.catch_up()
        await parts.passes.stop()
        parts.requests.close()
        parts.audit.close()
        parts.workers.shutdown(wait=False, cancel_futures=True)
        _LOG.info("stopped")

    def _stop_signal(self, number: int) -> None:
        if self._stopping.is_set():
            # A second signal ends the process at once.
            os._exit(1)
        _LOG.info("stopping", extra={"signal": signal.Signals(number).name})
        self.stop()

    def _fail(self) -> None:
        self.failed = True
        self.stop()

    def _displaced(self, held: LockHeld) -> None:
        if not self._stopping.is_set():
            _LOG.critical("another daemon runs on this node, stopping: %s", held)
            self._fail()

    # --- while it runs -------------------------------------------------------------------------

    async def _run_nri(self, supervisor: Supervisor) -> None:
        await supervisor.run()
        # A plugin that the runtime launched lives as long as its connection.
        self.stop()

    async def _housekeeping(self) -> None:
        parts = self.parts
        facts_s = parts.config.intervals.facts
        facts_at = time.monotonic() + facts_s
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep()
            await self._endpoints.open_missing()
            if time.monotonic() >= facts_at:
                facts_at = time.monotonic() + facts_s
                await parts.kernel.probe_again()

    async def sweep(self) -> None:
        """Look for changes that no event reported: the pods' root, container starts, pod ends."""
        await self.parts.find_kubepods()
        await self.parts.look_at_volumes()
        if (layout := self.parts.kernel.layout) is not None:
            await self.parts.sweep.run(layout)
