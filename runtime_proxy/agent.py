"""CRI mode put together: front, hooks, store, recovery, and what keeps them up to date."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.hook_registry import HookRegistry, hook_gauges
from runtime_proxy.hooks import Hooks
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.options import Options
from runtime_proxy.records import Records
from runtime_proxy.recovery import Recovery, with_retries
from runtime_proxy.runtime import Runtime, RuntimeAway
from runtime_proxy.server import Front, Traffic
from runtime_proxy.status import Figures, Gauge
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

_SWEEP_INTERVAL_S = 60.0
_RETRY_S = 0.5
_SETTLE_S = 2.0


class CriAgent:
    """A `backend.Backend` for a CRI runtime."""

    def __init__(self, chosen: Options, figures: Figures) -> None:
        self._chosen = chosen
        self._records = Records(chosen.state_dir)
        self._registry = HookRegistry(chosen, figures)
        self._runtime = Runtime(chosen.backend)
        self._store = self._records.store
        self._recovery = Recovery(
            self._runtime, self._store, self._records.recorded, self._records.reread
        )
        self._hooks = Hooks(
            servers=self._registry.servers,
            store=self._store,
            recovery=self._recovery,
            skip_label=(chosen.skip_key, chosen.skip_value),
        )
        self._traffic = Traffic(observe=figures.call_finished)
        self._front = Front(
            backend=chosen.backend,
            interceptor=CriInterceptor(self._hooks, max_message_bytes=chosen.max_message_bytes),
            max_message_bytes=chosen.max_message_bytes,
            traffic=self._traffic,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._registry.start()
        self._tasks = [spawn("following the runtime", self._follow_runtime())]

    def new_connection(self) -> asyncio.Protocol:
        return self._front.new_connection()

    async def _follow_runtime(self) -> None:
        await with_retries(self._recovery.rebuild, retry_s=_RETRY_S)
        self._tasks.append(spawn("sweeping", _forever(self._sweep, _SWEEP_INTERVAL_S)))
        if self._gives_events_to_everyone():
            self._tasks.append(spawn("runtime events", _forever(self._follow_events, _RETRY_S)))

    def _gives_events_to_everyone(self) -> bool:
        """containerd 1.7 gives each event to one reader only, and that one must be kubelet."""
        version = self._runtime.version
        if version is None or version.runtime_name != "containerd":
            return False
        major = version.runtime_version.lstrip("v").split(".")[0]
        return major.isdigit() and int(major) >= 2

    async def _sweep(self) -> None:
        self._records.catch_up()
        self._hooks.vanished(*await self._recovery.sweep())

    async def _follow_events(self) -> None:
        async for event in self._runtime.events():
            identifier = event.container_id
            is_pod = self._store.pod(identifier) is not None
            kind = event.container_event_type
            if kind in (cri.CONTAINER_STOPPED_EVENT, cri.CONTAINER_DELETED_EVENT):
                # A deleted object has ended, also where the event of its end was missed.
                (self._hooks.sandbox_exited if is_pod else self._hooks.container_exited)(identifier)
            if kind == cri.CONTAINER_DELETED_EVENT:
                (self._store.drop_pod if is_pod else self._store.drop_container)(identifier)

    # -- what an operator sees --------------------------------------------------------------------

    @property
    def gauges(self) -> tuple[Gauge, ...]:
        prefix = "koord_runtime_proxy_"
        return (
            Gauge(
                f"{prefix}connections",
                "Open client connections",
                lambda: len(self._front.connections),
            ),
            Gauge(f"{prefix}open_calls", "Calls in progress", lambda: self._front.open_calls),
            Gauge(
                f"{prefix}refused_calls",
                "Calls refused because the runtime was away",
                lambda: self._traffic.refused_calls,
                counter=True,
            ),
            Gauge(
                f"{prefix}protocol_faults",
                "Connections ended because a peer broke HTTP/2",
                lambda: self._traffic.faults,
                counter=True,
            ),
            Gauge(
                f"{prefix}runtime_up",
                "1 unless the runtime refuses connections",
                lambda: float(not self._front.backend_away),
            ),
            *self._records.gauges(),
            *hook_gauges(self._registry, self._hooks.skipped),
        )

    def health(self) -> list[str]:
        return [*self._registry.troubles(), *self._records.troubles()]

    def status(self) -> dict[str, object]:
        return {
            "runtime": {
                "socket": self._chosen.backend,
                "up": not self._front.backend_away,
            },
            "recovered": self._recovery.done,
            "hookServers": self._registry.status(),
            "unusableRegistrations": self._registry.complaints,
            **self._records.status(),
        }

    def readiness(self) -> list[str]:
        if self._front.backend_away:
            return [f"runtime is away: {self._chosen.backend}"]
        if not self._recovery.done:
            return ["recovery has not finished"]
        return []

    async def drain(self, limit_s: float) -> int:
        cut = await self._front.drain(limit_s)
        await self._hooks.settle(_SETTLE_S)
        return cut

    def stand_back(self) -> None:
        self._front.succeeded = True
        for task in self._tasks:
            task.cancel()
        self._records.stand_back()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._registry.close()
        self._runtime.close()
        self._records.close()


async def _forever(step: Callable[[], Awaitable[None]], interval_s: float) -> None:
    """Repeat a step. While the runtime is away, only the next try follows."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await step()
        except RuntimeAway as error:
            log.debug("runtime gave no answer", extra={"reason": str(error)})
