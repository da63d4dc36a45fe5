"""Keeps the status of PodGroups: the phase of a gang and how many of its pods are bound and run.

Changes of a group's pods are gathered for a second, and the difference is written in one merge
patch. A patch names the version of the PodGroup that it was worked out from: after a write of
another client the server refuses it, and the status is worked out again when the watch shows that
write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.decode import json_decoder
from apis.quota import PodGroup
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.tables.pod_group_status import MemberStatus, next_status
from kube.cache import Event
from kube.client import ApiError, Client
from kube.own_writes import OwnWrites
from kube.patches import merge_patch
from kube.queue import WorkQueue
from kube.resources import POD_GROUPS

_GATHER_S: Final = 1.0
"""Chosen: a gang of 100 pods changes 300 times until it runs, mostly within a few seconds. With
twice the value a status is two seconds late."""
_WORKERS: Final = 2
"""Requests in parallel. Chosen: a status hurries less than a binding, and one lost answer must not
hold up all groups."""

_decode: Final = json_decoder(PodGroup)


class PodGroupStatuses:
    """Writes the status of each PodGroup that changed, or whose pods did; run it with `run`."""

    def __init__(
        self,
        client: Client,
        *,
        group_of: Callable[[str], PodGroup | None],
        pods_of: Callable[[str], Iterable[SchedulingPod]],
        now: Callable[[], float],
    ) -> None:
        """group_of, pods_of: by namespace/name of a PodGroup, as last seen; also terminated pods.
        now: the wall clock in seconds, for scheduleStartTime."""
        self._client = client
        self._group_of = group_of
        self._pods_of = pods_of
        self._now = now
        self._changed: dict[str, None] = {}
        self._own: OwnWrites[PodGroup] = OwnWrites()
        self.queue = WorkQueue("pod group statuses")
        self.written = 0
        """Patches since the start."""

    def seen(self, event: Event[PodGroup]) -> None:
        """Take a change of a PodGroup."""
        self._own.seen(event)
        self.changed(event.key)

    def changed(self, key: str) -> None:
        """Look at a group soon: one of its pods changed."""
        self._changed[key] = None

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_WORKERS):
                tasks.create_task(self.queue.work(self.write))
            while True:
                await asyncio.sleep(_GATHER_S)
                self.gather()

    def gather(self) -> None:
        """Have the groups written that changed since the last call."""
        changed, self._changed = self._changed, {}
        for key in changed:
            self.queue.add(key)

    async def write(self, key: str) -> None:
        """Write one group's status if it differs. Raises ApiError or Unreachable: tried again."""
        group = self._own.latest(key, self._group_of(key))
        if group is None or self._group_of(key) is None:
            self.queue.forget(key)
            return
        now = datetime.fromtimestamp(self._now(), UTC)
        pods = sorted(
            self._pods_of(key),
            key=lambda pod: (pod.metadata.creation_timestamp or "", pod.metadata.name),
        )
        status = next_status(group, [_member(pod) for pod in pods], now)
        if status is None:
            return
        patch = {
            "metadata": {"resourceVersion": group.metadata.resource_version},
            "status": merge_patch(msgspec.to_builtins(group.status), msgspec.to_builtins(status)),
        }
        meta = group.metadata
        try:
            body = await self._client.patch(
                POD_GROUPS, meta.name, msgspec.json.encode(patch), namespace=meta.namespace
            )
        except ApiError as error:
            if not error.not_found:
                raise
            # It was deleted; the watch has not shown that yet.
            return
        self._own.note(_decode(body))
        self.written += 1


def _member(pod: SchedulingPod) -> MemberStatus:
    return MemberStatus(
        namespace=pod.metadata.namespace,
        phase=pod.status.phase,
        bound=bool(pod.spec.node_name),
        owners=tuple(owner.name for owner in pod.metadata.owner_references),
    )
