"""The audit log of a running daemon: written in a worker thread, served as `GET /events`.

It has what strategies and the evictor note, and each kernel write, under upstream's reasons.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor as Workers
from functools import partial
from typing import Final

from koordlet.audit.log import AuditLog, Kind
from koordlet.audit.pages import Pages
from koordlet.configuration.config import Config
from koordlet.executor.slots import Act, PlannedWrite
from koordlet.exposition.audit_pages import answer
from koordlet.state.merging import PodView
from linux.cgroup_files import FILES
from linux.cgroup_paths import parse
from linux.resources import Resource
from service.http_server import Request, Response

_FLUSH_S: Final = 1.0
"""Between two writes to the disk. Chosen: a SIGKILL loses the entries of a second. Upstream waits
5 s; half of the value doubles the writes of a node on which much happens."""

_MOST_WRITES: Final = 8192
"""Writes that wait for the next second. Chosen: a burst of the write budget fits twice. Twice the
value doubles the memory of a disk that hangs, at most some MiB."""
_WRITE: Final = 3
_MOVED_TASKS: Final = 5
"""Upstream's verbosities of writes: moved tasks are left out by default, as they are many."""
_CGROUPS: Final = "UpdateCgroups"
_HOOKS: Final = "runtime-hooks"
_REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "BatchResource",
            "CPUNormalization",
            "CPUSetAllocator",
            "CoreSched",
            "GroupIdentity",
            "OOMScoreAdj",
            "Resctrl",
        ),
        _HOOKS,
    ),
    "MemoryQOS": "cgroup reconcile",
    "SystemConfig": "systemConfig reconcile",
    "BlkIO": "UpdateBlkIO",
}
"""Upstream's reasons for the writes of single policies. Writes to cgroup files for others, such as
strategies, are `UpdateCgroups`; what is no cgroup file has the policy's name."""


class Auditing:
    """Does nothing where gate AuditEvents is off. `note` and `wrote` are for any thread.

    views: returns the pods that were published last; from any thread.
    """

    def __init__(
        self, config: Config, workers: Workers, *, views: Callable[[], Collection[PodView]]
    ) -> None:
        audit = config.audit
        self._workers = workers
        self._most = audit.max_events
        self.served = config.feature_gates.get("AuditEventsHTTPHandler", False)
        """Whether `/events` is served; upstream answers it with nothing while AuditEvents is
        off."""
        self.log: AuditLog | None = None
        if config.feature_gates.get("AuditEvents", False):
            self.log = AuditLog(
                audit.directory,
                verbosity=audit.verbosity,
                most_bytes=audit.max_disk_space_mb << 20,
            )
        self._pages = Pages(audit.directory, most_readers=audit.max_concurrent_readers)
        self._reading = asyncio.Lock()
        self._views = views
        self._writes: deque[tuple[float, PlannedWrite, str]] = deque()
        self._flushing = threading.Lock()
        self._named: Collection[PodView] = ()
        """The pods whose names are in `_pods` and `_containers`."""
        self._pods: dict[str, tuple[str, str]] = {}
        self._containers: dict[str, str] = {}

    def note(self, verbosity: int, reason: str, message: str, *, pod: str = "") -> None:
        """Queue an entry about a pod, given as "namespace/name", or about the node."""
        if self.log is None:
            return
        namespace, _, name = pod.partition("/")
        kind = Kind.POD if pod else Kind.NODE
        self.log.add(verbosity, kind, reason, message, namespace=namespace, name=name)

    def wrote(self, write: PlannedWrite, policy: str) -> None:
        """Queue an entry about a kernel write. policy: that it is for, or was before a restore.

        Any thread. The names are looked up when the log is written: a new pod's values are written
        before the pod is published.
        """
        if self.log is None:
            return
        self._writes.append((time.time(), write, policy))
        if len(self._writes) > _MOST_WRITES:
            self._writes.popleft()
            self.log.lost += 1

    def _flush(self) -> None:
        """Write what is queued. Blocks on the disk; for a worker thread."""
        assert self.log is not None
        with self._flushing:
            self._take_writes()
        self.log.flush()

    def _take_writes(self) -> None:
        """Make entries of the writes."""
        views = self._views()
        if views is not self._named:
            # Those of before, too: a pod may have ended since its values were written.
            before, self._named = self._named, views
            both = (*before, *views)
            self._pods = {view.pod.uid: (view.pod.namespace, view.pod.name) for view in both}
            self._containers = {each.id: each.name for view in both for each in view.containers}
        while self._writes:
            self._add(*self._writes.popleft())

    def _add(self, at: float, write: PlannedWrite, policy: str) -> None:
        assert self.log is not None
        place, resource, key = write.slot
        found = parse(place) if place else None
        kind, namespace, name, container = Kind.NODE, "", "", ""
        if found is not None and found.pod_uid:
            kind = Kind.POD
            namespace, name = self._pods.get(found.pod_uid, ("", found.pod_uid))
            container = self._containers.get(found.container_id, found.container_id)
        elif place or resource is Resource.RESCTRL_SCHEMATA:
            kind, name = Kind.GROUP, place or key
        self.log.add(
            _MOVED_TASKS if write.act is Act.MOVE_TASKS else _WRITE,
            kind,
            _reason(write, policy),
            f"{write.path}: {write.old or 'nothing'} -> {write.new or 'nothing'}: {write.why}",
            namespace=namespace,
            name=name,
            container=container,
            at=at,
        )

    async def run(self) -> None:
        """Write what was queued, again and again."""
        if self.log is None:
            return
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_FLUSH_S)
            await loop.run_in_executor(self._workers, self._flush)

    def close(self) -> None:
        """Write what is left. Blocks on the disk."""
        if self.log is not None:
            self._flush()

    async def serve(self, request: Request) -> Response:
        """Answer `GET /events`; entries of this moment are written first, so that they are seen."""
        if self.log is None:
            return Response(200, b"")
        loop = asyncio.get_running_loop()
        async with self._reading:
            await loop.run_in_executor(self._workers, self._flush)
            page = partial(answer, self._pages, request, most=self._most)
            return await loop.run_in_executor(self._workers, page)


def _reason(write: PlannedWrite, policy: str) -> str:
    """Return upstream's reason for a write, or the policy's name where upstream has none."""
    resource = write.slot[1]
    if resource is Resource.RESCTRL_SCHEMATA:
        return "CreateCATGroup" if write.act is Act.MKDIR else "UpdateResctrl"
    if resource is Resource.RESCTRL_GROUP:
        return "ApplyCatL3GroupTasks"
    if resource in FILES or not policy:
        return _REASONS.get(policy, _CGROUPS)
    return _REASONS.get(policy, policy)
