"""The registration folder and the hook servers that follow from it, kept in step."""

import asyncio
import logging
import os

from runtime_proxy.breaker import State
from runtime_proxy.hook_server import HookCounts, HookServers
from runtime_proxy.hooks import Skipped
from runtime_proxy.options import Options
from runtime_proxy.registration import FolderWatch, Registrations
from runtime_proxy.status import Figures, Gauge
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

# inotify tells at once; this is for what it cannot see, such as the folder made anew.
_SCAN_INTERVAL_S = 5.0


class HookRegistry:
    def __init__(self, chosen: Options, figures: Figures) -> None:
        self._folder = chosen.hook_server_dir
        self._registrations = Registrations(self._folder)
        self._watch: FolderWatch | None = None
        self._scanner: asyncio.Task[None] | None = None
        self.servers = HookServers(
            timeout_s=chosen.hook_timeout_s, counts=HookCounts(figures.hook_called)
        )

    def start(self) -> None:
        try:
            os.makedirs(self._folder, mode=0o755, exist_ok=True)
        except OSError as error:
            log.error(
                "the registration folder cannot be made",
                extra={"folder": self._folder, "reason": error.strerror},
            )
        loop = asyncio.get_running_loop()
        try:
            self._watch = FolderWatch(self._folder, self._changed)
            loop.add_reader(self._watch.descriptor, self._watch.drain)
        except OSError as error:
            log.warning(
                "no inotify: changes are seen by scanning", extra={"reason": error.strerror}
            )
        self._changed()
        self._scanner = spawn("scanning registrations", self._scan())

    def _changed(self) -> None:
        if self._registrations.refresh():
            self.servers.apply(self._registrations.current)

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(_SCAN_INTERVAL_S)
            if self._watch is not None:
                self._watch.renew()
            if self._registrations.scan():
                self.servers.apply(self._registrations.current)

    def troubles(self) -> list[str]:
        """Registrations that cannot be used, and servers that are given up."""
        return [*self._registrations.complaints.values()] + [
            f"{server.name}: given up for now: {server.breaker.reason}"
            for server in self.servers.all
            if server.breaker.state is State.OPEN and server.registration.fail
        ]

    def close(self) -> None:
        if self._scanner is not None:
            self._scanner.cancel()
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.descriptor)
            self._watch.close()
        self.servers.close()


_SKIPPED_BECAUSE = {
    "unreadable": "Intercepted requests that could not be read and went on as they were",
    "labelled": "Intercepted calls of pods whose label keeps hooks away",
    "unknown_object": "Intercepted calls for objects that neither we nor the runtime know",
    "runtime_away": "Intercepted calls whose object could not be looked up",
    "fault": "Intercepted calls that went on after a fault of the proxy's own",
}


def hook_gauges(registry: HookRegistry, skipped: Skipped) -> tuple[Gauge, ...]:
    """Return what an operator sees of hooks, in either mode."""

    def skips(reason: str, what: str) -> Gauge:
        return Gauge(
            f"koord_runtime_proxy_hooks_skipped_{reason}",
            what,
            lambda: float(getattr(skipped, reason)),
            counter=True,
        )

    return (
        Gauge(
            "koord_runtime_proxy_hook_servers",
            "Registered hook servers",
            lambda: len(registry.servers.all),
        ),
        Gauge(
            "koord_runtime_proxy_hook_servers_given_up",
            "Hook servers that are not called for now",
            lambda: sum(s.breaker.state is State.OPEN for s in registry.servers.all),
        ),
        Gauge(
            "koord_runtime_proxy_hook_server_trips",
            "How often hook servers were given up",
            lambda: sum(s.breaker.trips for s in registry.servers.all),
            counter=True,
        ),
        *(skips(reason, what) for reason, what in _SKIPPED_BECAUSE.items()),
    )
