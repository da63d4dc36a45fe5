"""CRI mode put together: front, hooks, store, recovery, and what keeps them up to date."""

import asyncio

from runtime_proxy.follower import Follower
from runtime_proxy.hook_registry import HookRegistry, hook_gauges
from runtime_proxy.hooks import Hooks
from runtime_proxy.intercept import CriInterceptor
from runtime_proxy.options import Options
from runtime_proxy.records import Records
from runtime_proxy.recovery import Recovery
from runtime_proxy.runtime import Runtime
from runtime_proxy.server import Front, Traffic
from runtime_proxy.status import Figures, Gauge

# How long a process that ends waits for reports to hook servers that no call waits for. As long as
# the default limit of one hook call. Twice the value: a server that hangs delays the end by 4 s;
# the shipped unit allows 30 s in all.
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
        self._follower = Follower(
            self._runtime, self._recovery, self._hooks, catch_up=self._records.catch_up
        )

    async def start(self) -> None:
        self._registry.start()
        self._follower.start()

    def new_connection(self) -> asyncio.Protocol:
        return self._front.new_connection()

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
        self._follower.stop()
        self._hooks.leave_ends()
        self._records.stand_back()

    async def close(self) -> None:
        await self._follower.close()
        self._registry.close()
        self._runtime.close()
        self._records.close()
