"""Keeps Reservations in step: status, end, and deletion, as `reservation_lifecycle` decides.

Every write names the version that it was decided on, so a Reservation that was changed meanwhile,
by a binding for example, is looked at again first. A write whose answer was lost is repeated in
the same way. Nothing is kept beside the objects: a restart loses nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from apis.core import is_terminated, pod_requests
from apis.keys import ANNOTATION_RESERVATION_ALLOCATED
from apis.meta import ObjectReference
from apis.scheduling import ENDED_PHASES, Reservation
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.controllers.reservation_lifecycle import (
    Delete,
    Keep,
    Owner,
    Write,
    next_step,
)
from kube.cache import Cache, Change, Event, object_key
from kube.client import ApiError, Client
from kube.queue import WorkQueue
from kube.resources import NODES, PODS, RESERVATIONS

_log = logging.getLogger(__name__)

_WORKERS: Final = 4
"""Requests in parallel. Chosen: with 5 ms a request, 800 reservations a second get their status,
more than pods are bound; at twice the value more of the API server is taken from bindings."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """collect_after_s: how long ended reservations are kept; None keeps them for ever.
    collect_every_s, look_again_s: the longest time without a look at an ended reservation and at
    any other, in case a clock jumped. clean_owners: whether pods lose the annotation about a
    reservation that is deleted. pending_expire: see `next_step`."""

    collect_after_s: float | None
    collect_every_s: float
    look_again_s: float
    clean_owners: bool
    pending_expire: bool


class ReservationController:
    """Follows Reservations, the pods that use them, and nodes; run it with `run`."""

    def __init__(
        self,
        client: Client,
        settings: ControllerSettings,
        *,
        reservations: Cache[Reservation],
        pods: Cache[SchedulingPod],
        nodes: Cache[SchedulingNode],
        reservation_of: Callable[[SchedulingPod], str],
        clock: Callable[[], float],
    ) -> None:
        """reservation_of: pod -> UID of the reservation that it is bound to use, or "". clock:
        seconds since 1970."""
        self._client = client
        self.settings = settings
        self._reservations = reservations
        self._nodes = nodes
        self._reservation_of = reservation_of
        self._clock = clock
        self._names: dict[str, str] = {}
        """UID -> name."""
        self._deleted: dict[str, str] = {}
        """Name -> UID of deleted reservations whose owners are still to be cleaned."""
        self._on_node = reservations.index(_node_of)
        self._users = pods.index(self._uids_of)
        self.queue = WorkQueue("reservations")
        reservations.subscribe(self._reservation_event)
        pods.subscribe(self._pod_event)
        nodes.subscribe(self._node_event)

    async def run(self) -> None:
        """Work until cancelled. All caches must have been read."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_WORKERS):
                group.create_task(self.queue.work(self._look_at))

    # --- what changes --------------------------------------------------------------------------

    def _reservation_event(self, event: Event[Reservation]) -> None:
        meta = event.new.metadata
        if event.old is not None and event.old.metadata.uid != meta.uid:
            self._names.pop(event.old.metadata.uid, None)
        if event.change is Change.DELETED:
            self._names.pop(meta.uid, None)
            if not self.settings.clean_owners:
                self.queue.forget(meta.name)
                return
            self._deleted[meta.name] = meta.uid
        else:
            self._names[meta.uid] = meta.name
        self.queue.add(meta.name)

    def _pod_event(self, event: Event[SchedulingPod]) -> None:
        """A pod may use a reservation now, or not any more."""
        for pod in (event.old, event.new):
            name = None if pod is None else self._names.get(self._reservation_of(pod))
            if name is not None:
                self.queue.add(name)

    def _node_event(self, event: Event[SchedulingNode]) -> None:
        """Reservations end with their node."""
        if event.change is Change.DELETED:
            for reservation in self._on_node.get(event.new.metadata.name):
                self.queue.add(reservation.metadata.name)

    def _uids_of(self, pod: SchedulingPod) -> tuple[str, ...]:
        uid = self._reservation_of(pod)
        return (uid,) if uid else ()

    # --- what follows --------------------------------------------------------------------------

    async def _look_at(self, name: str) -> float | None:
        """Do what a Reservation needs; return the seconds until it is looked at again."""
        await self._clean_owners(name)
        reservation = self._reservations.get(name)
        if reservation is None:
            self.queue.forget(name)
            return None
        await self._clean_elsewhere(reservation)
        settings, node = self.settings, reservation.status.node_name
        ended = reservation.status.phase in ENDED_PHASES
        node_exists = ended or not node or self._nodes.get(node) is not None
        if not node_exists:
            # Its own event may not have come yet. A reservation must not end because of that.
            node_exists = await self._exists(node)
        now = self._clock()
        step = next_step(
            reservation,
            owners=list(self._owners(reservation)),
            node_exists=node_exists,
            now=now,
            collect_after_s=settings.collect_after_s,
            pending_expire=settings.pending_expire,
        )
        match step:
            case Keep(until):
                longest = settings.collect_every_s if ended else settings.look_again_s
                return longest if until is None else max(0.0, min(until - now, longest))
            case Write():
                await self._write(reservation, step)
            case Delete(why):
                _log.info("reservation %s is deleted: %s", name, why)
                uid = reservation.metadata.uid
                try:
                    await self._client.delete(RESERVATIONS, name, uid=uid)
                except ApiError as error:
                    if not error.conflict:
                        raise  # A conflict means that another Reservation has the name now.
        return settings.look_again_s

    def _owners(self, reservation: Reservation) -> Iterator[Owner]:
        meta, node = reservation.metadata, reservation.status.node_name
        for pod in self._users.get(meta.uid):
            if pod.spec.node_name == node and not is_terminated(pod):
                yield Owner(
                    ObjectReference(
                        namespace=pod.metadata.namespace,
                        name=pod.metadata.name,
                        uid=pod.metadata.uid,
                    ),
                    pod_requests(pod),
                )

    async def _exists(self, node: str) -> bool:
        return await self._client.find(NODES, node, bytes) is not None

    async def _write(self, reservation: Reservation, step: Write) -> None:
        meta = reservation.metadata
        precondition = {"uid": meta.uid, "resourceVersion": meta.resource_version}
        body = msgspec.json.encode({"metadata": precondition, "status": step.status})
        try:
            await self._client.patch(RESERVATIONS, meta.name, body, subresource="status")
        except ApiError as error:
            if not error.not_found:
                raise
            return
        if phase := step.status.get("phase"):
            _log.info("reservation %s is %s: %s", meta.name, phase, step.why)

    async def _clean_owners(self, name: str) -> None:
        """Take the annotation about a deleted reservation from the pods that used it."""
        uid = self._deleted.get(name)
        if uid is None:
            return
        await self._clean(self._users.get(uid))
        if self._deleted.get(name) == uid:
            del self._deleted[name]

    async def _clean_elsewhere(self, reservation: Reservation) -> None:
        """Take the annotation from pods on other nodes than the reservation's.

        They were to be taken over there, and the reservation got another node instead, or ended.
        """
        meta, node = reservation.metadata, reservation.status.node_name
        decided = node or reservation.status.phase in ENDED_PHASES
        users = self._users.get(meta.uid) if decided else ()
        await self._clean(pod for pod in users if pod.spec.node_name != node)

    async def _clean(self, pods: Iterable[SchedulingPod]) -> None:
        for pod in pods:
            meta = pod.metadata
            annotations = {ANNOTATION_RESERVATION_ALLOCATED: None}
            body = msgspec.json.encode({"metadata": {"uid": meta.uid, "annotations": annotations}})
            try:
                await self._client.patch(PODS, meta.name, body, namespace=meta.namespace)
            except ApiError as error:
                if not error.not_found and not error.conflict and error.status != 422:
                    raise
                _log.debug("pod %s keeps its annotation: %s", object_key(pod), error)


def _node_of(reservation: Reservation) -> tuple[str, ...]:
    node = reservation.status.node_name
    return (node,) if node else ()
