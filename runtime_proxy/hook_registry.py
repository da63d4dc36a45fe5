"""Keeps the hook servers in step with the folder of registration files."""

import logging
import os

from runtime_proxy.breaker import State
from runtime_proxy.hook_server import HookCounts, HookServers
from runtime_proxy.hooks import Skipped
from runtime_proxy.options import Options
from runtime_proxy.registration import Registrations
from runtime_proxy.status import Figures, Gauge
from service.directory_watch import DirectoryWatch

log = logging.getLogger(__name__)

# Between looks at the registration folder without a notice of inotify. Chosen: a look reads one
# directory. Twice the value: without inotify, a new hook server is found up to 10 s late.
_LOOK_EVERY_S = 5.0


class HookRegistry:
    def __init__(self, chosen: Options, figures: Figures) -> None:
        self._folder = chosen.hook_server_dir
        self._registrations = Registrations(self._folder)
        self._watch: DirectoryWatch | None = None
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
        self._watch = DirectoryWatch(self._folder, self._changed, poll=_LOOK_EVERY_S)
        self._changed()

    def _changed(self) -> None:
        if self._registrations.scan():
            self.servers.apply(self._registrations.current)

    @property
    def complaints(self) -> dict[str, str]:
        """Why a registration file is not used, by its name."""
        return dict(self._registrations.complaints)

    def status(self) -> list[dict[str, object]]:
        """Return the servers in the order in which they are asked."""
        return [
            {
                "name": server.name,
                "socket": server.registration.endpoint,
                "failurePolicy": "Fail" if server.registration.fail else "Ignore",
                "stages": sorted(stage.value for stage in server.registration.stages),
                "state": server.breaker.state.value,
                "reason": server.breaker.reason,
                "trips": server.breaker.trips,
            }
            for server in self.servers.all
        ]

    def troubles(self) -> list[str]:
        """Return why registrations are not used, and which servers make calls fail."""
        return [*self._registrations.complaints.values()] + [
            f"{server.name}: calls fail (failure policy Fail): {server.breaker.reason}"
            for server in self.servers.all
            if server.breaker.state is State.OPEN and server.registration.fail
        ]

    def close(self) -> None:
        if self._watch is not None:
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
