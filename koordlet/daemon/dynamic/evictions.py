"""Evictions in the daemon: connects the evictor with the API server and the runtime.

The connection is the evictor's own, so that evictions wait neither for reports nor for watches. The
runtime is connected to with the first container that has to be stopped: that imports gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from koordlet.configuration.config import Config
from koordlet.events import Events
from koordlet.qos.eviction.api import ApiEvictions
from koordlet.qos.eviction.evictor import EvictionOptions, Evictor
from koordlet.qos.eviction.means import EvictionApi, Stopper
from koordlet.qos.strategies import cpu_evict, memory_evict
from koordlet.qos.strategy import Note
from kube.client import Client
from kube.connection import Connection, load_connection, wait_for_connection

_RECONNECT_S: Final = 300.0
"""After evictions had no answer for so long the kubeconfig is read again: certificates and servers
change. Chosen: as for its objects."""
_LOOK_EVERY_S: Final = 5.0
"""Between two looks at whether the API server answers, at which events that wait for it are
tried again. Chosen: short beside `_RECONNECT_S`."""


class Evictions:
    """See the module. Belongs to the event loop; `evictor.submit` to any thread."""

    def __init__(
        self,
        config: Config,
        *,
        events: Events,
        note: Callable[[Note], None],
        connect: Callable[[], Connection] | None = None,
        stopper: Stopper | None = None,
    ) -> None:
        """note: takes a line of the audit log. connect, stopper: in place of those that the
        configuration names."""
        kubeconfig = config.kubernetes.kubeconfig or None
        self._config = config
        self._connect = connect or (lambda: load_connection(kubeconfig))
        self._api: ApiEvictions | None = None
        self._runtime = stopper or _Runtime(config.cri.socket)
        self.evictor = Evictor(
            eviction_options(config),
            api=self._current_api,
            stopper=self._runtime,
            events=events,
            note=note,
        )

    def _current_api(self) -> EvictionApi | None:
        return self._api

    async def run(self) -> None:
        """Evict until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._config.kubernetes.wanted:
                group.create_task(self._stay_connected())
            group.create_task(self.evictor.run())

    async def _stay_connected(self) -> None:
        while True:
            # The source of objects reads the same configuration, and reports a problem with it.
            connection = await wait_for_connection(self._connect)
            async with Client(connection, user_agent="koordlet") as client:
                self._api = ApiEvictions(client, self._config.node_name)
                try:
                    while True:
                        await asyncio.sleep(_LOOK_EVERY_S)
                        self._api.write_events()
                        if self._api.unreachable_s >= _RECONNECT_S:
                            break
                finally:
                    api, self._api = self._api, None
                    await api.close()

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
