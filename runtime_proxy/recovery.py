"""Brings the store in line with the runtime: at the start, on demand, and by a regular sweep.

The runtime says which objects exist and what they were given. The journal adds what the runtime
does not know: changes by hooks, and whether an end was reported. No call waits for recovery: one
that names an unknown object asks the runtime for this object.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.checkpoint import Recorded
from runtime_proxy.model import Container, Pod
from runtime_proxy.runtime import Runtime, RuntimeAway
from runtime_proxy.store import Store

log = logging.getLogger(__name__)

# Status calls under way during a rebuild. Chosen: enough that no time passes between two calls, few
# enough that kubelet's calls, which run at the same time, find the runtime free. Twice the value
# ends a rebuild sooner only where the runtime has CPUs to spare.
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


@dataclass(frozen=True, slots=True)
class Unreported:
    """Ends that no call or event reported: of listed objects by their ids, and of objects gone."""

    ended_pods: list[str]
    ended_containers: list[str]
    gone_pods: list[Pod]
    gone_containers: list[Container]

    @property
    def counts(self) -> dict[str, int]:
        return {
            "ended_pods": len(self.ended_pods),
            "ended_containers": len(self.ended_containers),
            "gone_pods": len(self.gone_pods),
            "gone_containers": len(self.gone_containers),
        }


def records_with(
    identifier: str, recorded: Recorded, reread: Callable[[], Recorded], *, recovered: bool
) -> Recorded:
    """Return the journal in which an object may be: `recorded`, as it was at the start, or as it
    is by now. After recovery an object that was not in it may be one that a predecessor added while
    its last calls ended.
    """
    return recorded if identifier in recorded or not recovered else reread()


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
        self._foreign: set[str] = set()
        """Ended objects that are listed, and neither in the store nor in the journal."""
        self.done = False

    def _records_with(self, identifier: str) -> Recorded:
        return records_with(identifier, self._recorded, self._reread, recovered=self.done)

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

    async def sweep(self) -> Unreported:
        """Compare the store with the runtime's lists: find ends that no call or event reported.

        What the runtime no longer lists leaves the store. Raises RuntimeAway.
        """
        store, births = self._store, self._store.births
        pods = await self._runtime.pods()
        containers = await self._runtime.containers()
        listed_pods, listed_containers = {p.id for p in pods}, {c.id for c in containers}
        gone = store.sweep(pods=listed_pods, containers=listed_containers, births=births)
        self._foreign &= listed_pods | listed_containers
        ended_pods = self._in_question(
            (p.id for p in pods if p.state == cri.SANDBOX_NOTREADY), store.pod, births
        )
        ended_containers = self._in_question(
            (c.id for c in containers if c.state == cri.CONTAINER_EXITED), store.container, births
        )
        # Since our start, a predecessor may have added an object or reported an end.
        recorded = self._reread() if ended_pods or ended_containers else Recorded()
        found = Unreported(
            await self._unreported(ended_pods, recorded.pods, self.pod, store.stop_pod),
            await self._unreported(
                ended_containers, recorded.containers, self.container, store.stop_container
            ),
            *gone,
        )
        if any(found.counts.values()):
            log.info("ends that no event reported", extra=found.counts)
        return found

    def _in_question(
        self, ended: Iterable[str], known: Callable[[str], Pod | Container | None], births: int
    ) -> list[str]:
        """Return which of the listed ends may be unreported.

        An object that was added after the mark `births` may have been listed before it started.
        """
        found = []
        for identifier in ended:
            entry = known(identifier)
            if entry is None:
                in_question = identifier not in self._foreign
            else:
                in_question = not entry.stopped and self._store.is_older(identifier, births)
            if in_question:
                found.append(identifier)
        return found

    async def _unreported(
        self,
        ended: Iterable[str],
        recorded: Mapping[str, Pod | Container],
        find: Callable[[str], Awaitable[Pod | Container | None]],
        mark_stopped: Callable[[str], object],
    ) -> list[str]:
        """Return which of these ends no process reported, with their objects in the store."""
        unreported = []
        for identifier in ended:
            record = recorded.get(identifier)
            if record is not None and record.stopped:
                mark_stopped(identifier)
            elif record is None and identifier not in self._store:
                # It never had a call through a proxy.
                self._foreign.add(identifier)
            elif await find(identifier) is not None:
                unreported.append(identifier)
        return unreported


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
