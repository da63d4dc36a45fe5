"""Keeps the store in line with a CRI runtime while the proxy runs, and reports ends of objects.

Ends come from the runtime's event stream and from its lists. The proxy misses the events that are
sent before it subscribes or after a stream has ended: containerd keeps events only while it has no
subscriber at all, and notices late that a subscriber has gone. Therefore the store is compared with
the lists after each subscription, after an event about an unknown object, and at intervals.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.hooks import Hooks
from runtime_proxy.recovery import Recovery, with_retries
from runtime_proxy.runtime import Runtime, RuntimeAway
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

# Before the next try to rebuild or to subscribe. Chosen: an absent runtime refuses a connection in
# microseconds. Twice the value: unknown objects are known, and ends reported, up to 1 s later.
_RETRY_S = 0.5
# Between comparisons with the lists while nothing calls for one. Chosen: they find what no event
# reported, which is rare. Twice the value: such an end is reported up to two minutes late.
_SWEEP_INTERVAL_S = 60.0
# Between two comparisons: a runtime that ends each event stream at once can bear lists of 500
# containers every two seconds. Chosen; at twice the value an end after a lost stream comes later.
_SWEEP_REST_S = 2.0


class Follower:
    def __init__(
        self,
        runtime: Runtime,
        recovery: Recovery,
        hooks: Hooks,
        *,
        catch_up: Callable[[], None],
    ) -> None:
        """catch_up: called before each comparison with the runtime's lists."""
        self._runtime = runtime
        self._recovery = recovery
        self._hooks = hooks
        self._catch_up = catch_up
        self._sweep_is_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [spawn("recovery", self._recover())]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _recover(self) -> None:
        await with_retries(self._recovery.rebuild, retry_s=_RETRY_S)
        self._tasks.append(spawn("sweeping", self._keep_sweeping()))
        if self._gives_events_to_everyone():
            self._tasks.append(spawn("runtime events", self._keep_subscribed()))
        else:
            self._sweep_is_due.set()

    def _gives_events_to_everyone(self) -> bool:
        """containerd 1.7 gives each event to one reader only, and that one must be kubelet."""
        version = self._runtime.version
        if version is None or version.runtime_name != "containerd":
            return False
        major = version.runtime_version.lstrip("v").split(".")[0]
        return major.isdigit() and int(major) >= 2

    async def _keep_sweeping(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_INTERVAL_S):
                    await self._sweep_is_due.wait()
            self._sweep_is_due.clear()
            try:
                await self.sweep()
            except RuntimeAway as error:
                log.debug("runtime gave no answer", extra={"reason": str(error)})
                self._sweep_is_due.set()
            await asyncio.sleep(_SWEEP_REST_S)

    async def sweep(self) -> None:
        """Report ends that no call or event reported. Raises RuntimeAway."""
        self._catch_up()
        found = await self._recovery.sweep()
        for identifier in found.ended_containers:
            self._hooks.container_exited(identifier)
        for identifier in found.ended_pods:
            self._hooks.sandbox_exited(identifier)
        self._hooks.vanished(found.gone_pods, found.gone_containers)

    async def _keep_subscribed(self) -> None:
        while True:
            try:
                await self.follow_events()
            except RuntimeAway as error:
                log.debug("no runtime events", extra={"reason": str(error)})
            await asyncio.sleep(_RETRY_S)

    async def follow_events(self) -> None:
        """Report ends from the event stream until it ends. Raises RuntimeAway."""
        async with self._runtime.events() as events:
            # What ended before the subscription has no event.
            self._sweep_is_due.set()
            async for event in events:
                self._take(event)

    def _take(self, event: cri.ContainerEventResponse) -> None:
        identifier = event.container_id
        store = self._hooks.store
        kind = event.container_event_type
        if kind not in (cri.CONTAINER_STOPPED_EVENT, cri.CONTAINER_DELETED_EVENT):
            return
        is_pod = store.pod(identifier) is not None
        if not is_pod and store.container(identifier) is None:
            if kind == cri.CONTAINER_STOPPED_EVENT:
                # Perhaps a predecessor created it in one of its last calls, and the journal has it.
                self._sweep_is_due.set()
            return
        # A deleted object has ended, also where the event of its end was missed.
        (self._hooks.sandbox_exited if is_pod else self._hooks.container_exited)(identifier)
        if kind == cri.CONTAINER_DELETED_EVENT:
            (store.drop_pod if is_pod else store.drop_container)(identifier)
