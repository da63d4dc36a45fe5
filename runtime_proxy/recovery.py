"""Brings the store in line with the runtime: at the start, on demand, and by a regular sweep.

The runtime says which objects exist and what they were given. The journal adds what the runtime
does not know: changes by hooks, and whether an end was reported. No call waits for recovery: one
that names an unknown object asks the runtime for this object.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.checkpoint import Recorded
from runtime_proxy.model import Container, Pod
from runtime_proxy.runtime import Runtime, RuntimeAway
from runtime_proxy.store import Store

log = logging.getLogger(__name__)

_PARALLEL_CALLS = 4


def with_record(pod: Pod, recorded: Pod | None) -> Pod:
    """Return a sandbox from the runtime with what the journal adds to it."""
    if recorded is None:
        return pod
    return msgspec.structs.replace(
        pod,
        cgroup_parent=pod.cgroup_parent or recorded.cgroup_parent,
        overhead=pod.overhead or recorded.overhead,
        resources=recorded.resources or pod.resources,
        changes=recorded.changes,
        # Whether the stop was reported to hooks, which the runtime does not know.
        stopped=recorded.stopped,
    )


def container_with_record(container: Container, recorded: Container | None) -> Container:
    if recorded is None:
        return container
    return msgspec.structs.replace(
        container,
        resources=container.resources or recorded.resources,
        cgroup_parent=recorded.cgroup_parent,
        annotations={**recorded.annotations, **container.annotations},
        stopped=recorded.stopped,
    )


class Recovery:
    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        recorded: Recorded,
        reread: Callable[[], Recorded] = Recorded,
    ) -> None:
        """reread: the journal as it is by now, with what a predecessor added to it."""
        self._runtime = runtime
        self._store = store
        self._recorded = recorded
        self._reread = reread
        self.done = False

    def _records_with(self, identifier: str) -> Recorded:
        if identifier in self._recorded or not self.done:
            return self._recorded
        return self._reread()

    async def rebuild(self) -> None:
        """Store everything that the runtime lists. Raises RuntimeAway, alone or in a group."""
        version = await self._runtime.identify()
        log.info(
            "runtime", extra={"runtime": version.runtime_name, "version": version.runtime_version}
        )
        births = self._store.births
        pods = await self._runtime.pods()
        containers = await self._runtime.containers()
        gate = asyncio.Semaphore(_PARALLEL_CALLS)

        async def adopt_pod(identifier: str) -> None:
            async with gate:
                await self.pod(identifier)

        async with asyncio.TaskGroup() as group:
            for pod in pods:
                group.create_task(adopt_pod(pod.id))

        async def adopt_container(listed: cri.Container) -> None:
            async with gate:
                if self._store.container(listed.id) is None:
                    self._adopt(await self._runtime.listed_container(listed))

        async with asyncio.TaskGroup() as group:
            for listed in containers:
                group.create_task(adopt_container(listed))
        alive = {*(p.id for p in pods), *(c.id for c in containers)}
        self._store.sweep(pods=alive, containers=alive, births=births)
        self._store.disown(self._recorded.identifiers - alive)
        self.done = True
        pod_count, container_count = self._store.sizes
        log.info("recovered", extra={"pods": pod_count, "containers": container_count})

    async def pod(self, identifier: str) -> Pod | None:
        """Return a sandbox from the store, else from the runtime; None if neither has it.

        Raises RuntimeAway.
        """
        known = self._store.pod(identifier)
        if known is not None:
            return known
        found = await self._runtime.pod(identifier)
        if found is None:
            return None
        # Another call may have come first, and its values may be newer.
        known = self._store.pod(found.id)
        if known is None:
            known = with_record(found, self._records_with(found.id).pods.get(found.id))
            self._store.put_pod(known)
        return known

    async def container(self, identifier: str) -> Container | None:
        known = self._store.container(identifier)
        if known is not None:
            return known
        return self._adopt(await self._runtime.container(identifier))

    def _adopt(self, found: Container | None) -> Container | None:
        """Store a container, unless another call has done so: its values may be newer."""
        if found is None:
            return None
        known = self._store.container(found.id)
        if known is None:
            recorded = self._records_with(found.id).containers.get(found.id)
            known = container_with_record(found, recorded)
            self._store.put_container(known)
        return known

    async def sweep(self) -> tuple[list[Pod], list[Container]]:
        """Drop and return what the runtime no longer lists. Raises RuntimeAway."""
        births = self._store.births
        pods = {pod.id for pod in await self._runtime.pods()}
        containers = {container.id for container in await self._runtime.containers()}
        lost = self._store.sweep(pods=pods, containers=containers, births=births)
        if any(lost):
            log.info("swept", extra={"pods": len(lost[0]), "containers": len(lost[1])})
        return lost


async def with_retries(step: Callable[[], Awaitable[None]], *, retry_s: float) -> None:
    """Try a step until the runtime answers. Its absence is logged once."""
    complained = False
    while True:
        try:
            await step()
            return
        except* RuntimeAway as group:
            if not complained:
                complained = True
                log.warning("runtime gave no answer", extra={"reason": str(group.exceptions[0])})
        await asyncio.sleep(retry_s)
