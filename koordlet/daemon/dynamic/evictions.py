"""Evictions in the daemon: connects the evictor with the API server and the runtime.

The connection is the evictor's own, so that evictions wait neither for reports nor for watches. The
runtime is connected to with the first container that has to be stopped: that imports gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from koordlet.configuration.config import Config
from koordlet.qos.eviction.api import ApiEvictions
from koordlet.qos.eviction.evictor import EvictionOptions, Evictor
from koordlet.qos.eviction.means import EvictionApi, Stopper
from koordlet.qos.eviction.past_file import PastFile
from koordlet.qos.eviction.past_rounds import Past
from koordlet.qos.strategies import cpu_evict, memory_evict
from koordlet.qos.strategy import Note
from kube.client import Client
from kube.connection import Connection, load_connection
from kube.reconnecting import stay_connected
from service.events import Events

_EVENTS_EVERY_S: Final = 5.0
"""Between two attempts to write events that wait for an API server that is away. Chosen: short
beside the five minutes for which events wait."""


class Evictions:
    """See the module. Belongs to the event loop; `evictor.submit` to any thread."""

    def __init__(
        self,
        config: Config,
        *,
        events: Events,
        note: Callable[[Note], None],
        kept: PastFile,
        workers: Executor,
        connect: Callable[[], Connection] | None = None,
        stopper: Stopper | None = None,
    ) -> None:
        """note: takes a line of the audit log. kept: where evictions are remembered over a
        restart. workers: threads for I/O. connect, stopper: in place of those that the
        configuration names."""
        kubeconfig = config.kubernetes.kubeconfig or None
        self._config = config
        self._kept = kept
        self._keeping = asyncio.Lock()
        self._workers = workers
        self._connect = connect or (lambda: load_connection(kubeconfig))
        self._api: ApiEvictions | None = None
        self._runtime = stopper or _Runtime(config.cri.socket)
        self.evictor = Evictor(
            eviction_options(config),
            api=self._current_api,
            stopper=self._runtime,
            events=events,
            note=note,
            keep=self._keep,
        )

    def _current_api(self) -> EvictionApi | None:
        return self._api

    async def run(self) -> None:
        """Evict until cancelled."""
        loop = asyncio.get_running_loop()
        self.evictor.resume(await loop.run_in_executor(self._workers, self._kept.load))
        async with asyncio.TaskGroup() as group:
            if self._config.kubernetes.wanted:
                # The source of objects reads the same configuration, and reports a problem with it.
                group.create_task(
                    stay_connected(
                        self._connect,
                        self._use,
                        answers=lambda: self._api is None or self._api.answers,
                        user_agent="koordlet",
                    )
                )
            group.create_task(self.evictor.run())

    async def _use(self, client: Client) -> None:
        self._api = ApiEvictions(client, self._config.node_name)
        try:
            while True:
                await asyncio.sleep(_EVENTS_EVERY_S)
                self._api.write_events()
        finally:
            api, self._api = self._api, None
            await api.close()

    async def _keep(self, past: Past) -> None:
        # One after the other, so that the newest is the last.
        async with self._keeping:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._workers, self._kept.save, past)

    def close(self) -> None:
        """End the connection to the runtime."""
        if isinstance(self._runtime, _Runtime):
            self._runtime.close()


def eviction_options(config: Config) -> EvictionOptions:
    """Return the evictor's settings."""
    qos = config.qos
    return EvictionOptions(
        only_by_api=qos.only_evict_by_api,
        dry_run=qos.evict_dry_run,
        most_per_round=qos.evict_most_per_round,
        stop_grace_s=float(qos.evict_stop_grace),
        cool_downs={
            **dict.fromkeys(cpu_evict.STRATEGY.gates, float(qos.cpu_evict_cool_down)),
            **dict.fromkeys(memory_evict.STRATEGY.gates, float(qos.memory_evict_cool_down)),
        },
    )


class _Runtime:
    """A `Stopper` that loads gRPC with the first call."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._stopper: Stopper | None = None
        self._close: Callable[[], None] = lambda: None
        self._loading = asyncio.Lock()

    async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
        async with self._loading:
            stopper = self._stopper
            if stopper is None:
                made, self._close = await asyncio.to_thread(_stopper, self._socket)
                stopper = self._stopper = made
        return await stopper.stop(container_ids, grace_s=grace_s)

    def close(self) -> None:
        self._close()


def _stopper(socket: str) -> tuple[Stopper, Callable[[], None]]:
    # Imports gRPC, which takes some 10 MB: only where a container is stopped.
    from koordlet.sources.cri_stop import ContainerStopper

    made = ContainerStopper(socket)
    return made, made.close
