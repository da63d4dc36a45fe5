"""One scheduler process: caches into tables and queue, decisions, writes.

A replica that may not read all that it needs does not stand for the lease, so that it keeps none
that may. Nothing is watched before the lease is ours. Every list then is a consistent read that was
made after the former leader could last write, so what is bound is seen before the first decision,
and nothing is decided twice. A decision takes a fraction of a millisecond; the loop that makes them
gives way to the other tasks after a few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
import uuid
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from apis.schedule_explanation import ScheduleExplanation
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.events import Event as EventToWrite
from cluster.scheduler.binding.events import EventWriter
from cluster.scheduler.binding.evictor import Evictor
from cluster.scheduler.binding.network_topology import NetworkTopologyStatus
from cluster.scheduler.binding.node_locks import NodeLocks
from cluster.scheduler.binding.placement import Outcome, Placement, Refused
from cluster.scheduler.binding.pod_groups import PodGroupStatuses
from cluster.scheduler.binding.quota_upkeep import QuotaUpkeep
from cluster.scheduler.binding.reservation_writer import ReservationRefusal, ReservationWriter
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.binding.schedule_explanations import ScheduleExplanations
from cluster.scheduler.binding.statuses import PodStatus, Shown, StatusWriter
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.binding.volumes import VolumeBinder
from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.flags import CONTROLLERS
from cluster.scheduler.configuration.koordinator_arguments import ReservationCompat
from cluster.scheduler.controllers.reservations import (
    ControllerSettings,
    ReservationController,
)
from cluster.scheduler.core import SchedulerCore
from cluster.scheduler.cycle.permit import COSCHEDULING
from cluster.scheduler.cycle.timings import ERROR, PRE_BIND, SUCCESS
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.cycle.waking import LONGEST_UNSCHEDULABLE_S
from cluster.scheduler.extenders.consulting import Extenders, needs_nodes
from cluster.scheduler.extenders.nodes import WholeNode, WholeNodes, decode_whole_node
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA
from cluster.scheduler.plugins.reservations.reservation import NAME as RESERVATION
from cluster.scheduler.questions import Questions, kept_question
from cluster.scheduler.sources.bookings import reservation_of
from cluster.scheduler.sources.network_topology import NAME as NETWORK_NAME
from kube.cache import Cache, Event
from kube.client import Client
from kube.leader import LeaderElection
from kube.queue import WorkQueue
from kube.reading_rights import forbidden
from kube.resources import NODES, SCHEDULE_EXPLANATIONS

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.005
"""How long decisions go on before watches, writes and probes get their turn. Chosen: 20 decisions
or more; at twice the value a burst of pods delays bindings by as much."""
_TICK_S: Final = 1.0
"""The longest pause of the loop: reports expire and backoffs end at times, not by events."""
_LEASE_TOLERANCE_S: Final = 20.0
"""Beyond the lease's duration; kube-scheduler's, for its health check."""
_LEAST_DRAIN_S: Final = 1.0
"""For bindings under way at a stop, if the lease leaves no more."""
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
"""Between two looks whether the rights that are missing were granted, doubled each time. Chosen: a
look is two small requests for each type."""
_FORBIDDEN_S: Final = 10.0
"""How long a leader is refused to read a type before it gives the lease up. Chosen: an API server
that starts refuses everything for a second or two, until it has read the roles."""


class RightsMissing(Exception):
    """The API server does not let this process read what it needs to decide."""


class SchedulerProcess(SchedulerCore):
    """The composition root: the core with its writers, and what runs them."""

    def __init__(
        self,
        client: Client,
        configuration: SchedulerConfiguration,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        longest_unschedulable_s: float = LONGEST_UNSCHEDULABLE_S,
        controllers: Container[str] = CONTROLLERS,
        network_status: bool = False,
        auditor: AuditorSettings | None = None,
    ) -> None:
        """seed, clock, steady, longest_unschedulable_s, auditor: see SchedulerCore. controllers:
        names of the plugins that also write the status of their objects. network_status: whether
        the domains of the network are written into the ClusterNetworkTopology."""
        super().__init__(
            client,
            configuration,
            self,
            seed=seed,
            clock=clock,
            steady=steady,
            longest_unschedulable_s=longest_unschedulable_s,
            auditor=auditor,
        )
        self.leading = False
        self.ready = False
        self.missing_rights: tuple[str, ...] = ()
        """What the API server says about the types that this replica may not read. While there are
        any, it does not stand for the lease."""
        self.stopping = False
        self.election: LeaderElection | None = None
        self._wake = asyncio.Event()
        self.extenders = self._make_extenders()
        for cache in (*self.caches, self.pods):
            cache.subscribe(self._woken)
        # Apart from the others: decisions do not wait for it, also where the CRD is missing.
        self.asked: Cache[ScheduleExplanation] = Cache(
            client, SCHEDULE_EXPLANATIONS, ScheduleExplanation, shrink=kept_question
        )
        self.explanations = ScheduleExplanations(
            client, asked=self.asked.items, answer=Questions(self).answer, now=clock
        )
        self.statuses = StatusWriter(client, now=clock, bindings_wait=self._bindings_wait)
        self.events = EventWriter(
            client, instance=_identity(), now=clock, bindings_wait=self._bindings_wait
        )
        self.binder = Binder(
            client,
            self._outcome,
            before=self.statuses.settle,
            delegate=self.extenders.bind if self.extenders is not None else None,
            on_step=self._step,
        )
        self._prepared_since: dict[str, float] = {}
        """When the writes before the binder's began, by the pod's UID and time.perf_counter."""
        self.node_locks = NodeLocks(
            client,
            bind=self._prepared,
            refuse=self._not_prepared,
            pod_of=self.pods.items.get,
            clock=clock,
        )
        self.nodes.subscribe(self.node_locks.node_event)
        self.pods.subscribe(self.node_locks.pod_event)
        self.volume_binder = VolumeBinder(
            client,
            bind=self._volumes_bound,
            refuse=self._not_prepared,
            claims=self.volumes.claims,
            volumes=self.volumes.volumes,
            pod_of=self.pods.items.get,
            reaches=self.tables.reaches_volume,
            timeouts=self.plugins.volume_timeouts,
        )
        self.reservation_writer = ReservationWriter(client, self._outcome, now=clock)
        self.reservation_controller: ReservationController | None = None
        if self.plugins.reservations and RESERVATION in controllers:
            self._keep_reservations()
        self.evictor = Evictor(client, self._evicted, now=clock)
        self.network_status: NetworkTopologyStatus | None = None
        if self.plugins.gangs and network_status:
            self.network_status = NetworkTopologyStatus(
                client, self.plugins.network, lambda: self.networks.get(NETWORK_NAME)
            )
        self.pod_group_statuses: PodGroupStatuses | None = None
        if self.plugins.gangs and COSCHEDULING in controllers:
            self._keep_pod_group_statuses()
        self.quota_upkeep: QuotaUpkeep | None = None
        if ELASTIC_QUOTA in controllers:
            self._keep_quotas()

    def _make_extenders(self) -> Extenders | None:
        """Return what asks the configured extenders, if any. Raises InputError."""
        configured = self.configuration.extenders
        if not configured:
            return None
        whole: Cache[WholeNode] | None = None
        if needs_nodes(configured):
            whole = Cache(self.client, NODES, WholeNode, decode=decode_whole_node)
            self.caches = (*self.caches, whole)
        self.attempts.consultant = extenders = Extenders(
            self.client,
            configured,
            self.attempts,
            self.attempts.preemptions,
            nodes=WholeNodes({} if whole is None else whole.items),
            decided=self._wake.set,
        )
        return extenders

    def _keep_pod_group_statuses(self) -> None:
        groups_of = self.gangs.pod_groups_of
        members = self.pods.index(groups_of)
        statuses = self.pod_group_statuses = PodGroupStatuses(
            self.client, group_of=self.pod_groups.items.get, pods_of=members.get, now=self._clock
        )
        self.pod_groups.subscribe(statuses.seen)

        def pod_event(event: Event[SchedulingPod]) -> None:
            for pod in (event.old, event.new):
                for key in () if pod is None else groups_of(pod):
                    statuses.changed(key)

        self.pods.subscribe(pod_event)

    def _keep_reservations(self) -> None:
        # Reservations are of all profiles alike: the first that schedules them sets the times.
        arguments = next(iter(self.plugins.reservations.values()))
        kept = None if arguments.disable_garbage_collection else arguments.gc_duration_seconds
        self.reservation_controller = ReservationController(
            self.client,
            ControllerSettings(
                collect_after_s=kept,
                collect_every_s=arguments.gc_interval_seconds,
                look_again_s=arguments.resync_interval_seconds,
                clean_owners=self.configuration.gates.get(
                    "CleanExpiredReservationAllocated", False
                ),
                pending_expire=(
                    ReservationCompat.PENDING_RESERVATIONS_NEVER_EXPIRE not in arguments.compat
                ),
            ),
            reservations=self.reservations,
            pods=self.pods,
            nodes=self.nodes,
            reservation_of=reservation_of,
            clock=self._clock,
        )

    def _keep_quotas(self) -> None:
        table, arguments = self.plugins.quotas, self.plugins.quota_arguments
        if table is None or arguments is None:
            return
        upkeep = self.quota_upkeep = QuotaUpkeep(
            self.client,
            table,
            self.quotas.items,
            arguments,
            record=self.event,
            observe=self.metrics.quota_statuses.labels().observe,
        )
        self.quotas.subscribe(upkeep.statuses.seen)

    def _woken(self, event: Event[Any]) -> None:
        self._wake.set()

    # --- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set.

        Raises LeadershipLost if the lease is lost, RightsMissing if reading is refused under it.
        """
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            stack.push_async_callback(_end, tasks)

            def start(name: str, work: Coroutine[Any, Any, Any]) -> None:
                tasks.append(asyncio.create_task(work, name=name))

            start("stop", stop.wait())
            start("leader", self._lead_when_elected())
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.ready = False
            self.stopping = True
            for task in done:
                task.result()

    async def _lead_when_elected(self) -> None:
        await self._wait_for_rights()
        lease = self.configuration.leader_election
        if not lease.leader_elect:
            await self._lead()
            return
        # A client of its own: a renewal must not wait behind a thousand bindings.
        async with self.client.sibling() as client:
            self.election = election = LeaderElection(
                client,
                namespace=lease.resource_namespace,
                name=lease.resource_name,
                identity=_identity(),
                lease_seconds=lease.lease_duration,
                renew_deadline_seconds=lease.renew_deadline,
                retry_seconds=lease.retry_period,
            )
            await election.run(self._lead)

    async def _wait_for_rights(self) -> None:
        """Return once this process may read all types that decisions depend on."""
        collections = [cache.collection for cache in (*self.caches, self.pods)]
        pause = _FIRST_PAUSE_S
        while True:
            missing = await forbidden(self.client, collections)
            if missing and missing != self.missing_rights:
                _log.error("the lease is not stood for; rights are missing: %s", "; ".join(missing))
            self.missing_rights = missing
            if not missing:
                return
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _synced(self, caches: Iterable[Cache[Any]]) -> None:
        """Wait until caches are read. Raises RightsMissing if the API server keeps refusing one."""
        caches = tuple(caches)
        loop = asyncio.get_running_loop()
        for cache in caches:
            while not cache.synced:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await cache.wait_synced()
                latest = loop.time() - _FORBIDDEN_S
                refused = [
                    each.problem
                    for each in caches
                    if each.forbidden_since is not None and each.forbidden_since < latest
                ]
                if refused:
                    raise RightsMissing("; ".join(refused))

    async def _lead(self) -> None:
        self.leading = True
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            stack.push_async_callback(_end, tasks)

            def start(name: str, work: Coroutine[Any, Any, Any]) -> None:
                tasks.append(asyncio.create_task(work, name=name))

            began = time.monotonic()
            # Pods come last: what a pod's workload is follows from the others.
            for caches in (self.caches, (self.pods,)):
                for cache in caches:
                    start(f"cache {cache.resource.plural}", cache.run())
                await self._synced(caches)
            self.prepare()
            _log.info(
                "%d nodes, %d pods on them, %d waiting, read in %.1f s",
                self.tables.nodes.count,
                len(self.tables.bookings),
                len(self.queue),
                time.monotonic() - began,
            )
            start("statuses", self.statuses.run())
            start("events", self.events.run())
            start("reservations", self.reservation_writer.run())
            if self.reservation_controller is not None:
                start("reservation controller", self.reservation_controller.run())
            start(f"cache {self.asked.resource.plural}", self.asked.run())
            start("explanations", self.explanations.run())
            if self.network_status is not None:
                start("network topology status", self.network_status.run())
            if self.pod_group_statuses is not None:
                start("pod group statuses", self.pod_group_statuses.run())
            if self.quota_upkeep is not None:
                start("quota upkeep", self.quota_upkeep.run())
            stack.push_async_callback(self.events.flush, 3.0)
            if self.extenders is not None:
                # An extender may bind until the binder has drained.
                self.extenders.open()
                stack.push_async_callback(self.extenders.close)
            stack.push_async_callback(self.evictor.stop)
            stack.push_async_callback(self._drain)
            stack.push_async_callback(self.node_locks.stop)
            stack.push_async_callback(self.volume_binder.stop)
            if self.extenders is not None:
                stack.push_async_callback(self.extenders.stop_asking)
            self.ready = True
            start("scheduling", self._schedule())
            # At a stop decisions end first: a binder that drains takes no more placements.
            stack.push_async_callback(_end, [tasks[-1]])
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _drain(self) -> None:
        seconds = self._drain_seconds()
        await asyncio.gather(self.binder.drain(seconds), self.reservation_writer.drain(seconds))
        await self.node_locks.settle(_LEAST_DRAIN_S)

    def _drain_seconds(self) -> float:
        """Return how long bindings may go on at a stop.

        When the lease was not renewed in time, another replica may begin after the rest of its
        duration. A binding after that could meet one of the new leader's.
        """
        lease = self.configuration.leader_election
        left = lease.lease_duration - lease.renew_deadline - 1.0
        return max(_LEAST_DRAIN_S, left)

    # --- decisions -----------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            if not self.schedule_for(_SLICE_S):
                times = (self.queue.next_time(), self.permit.next_time())
                until = min((each for each in times if each is not None), default=None)
                pause = _TICK_S if until is None else max(0.0, until - self._steady())
                try:
                    async with asyncio.timeout(min(pause, _TICK_S)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(0)

    def _outcome(self, placement: Placement | ReservationPlacement, outcome: Outcome) -> None:
        if isinstance(placement, Placement):
            self.node_locks.ended(placement, outcome)
        self.attempts.bound(placement, outcome)
        self._wake.set()

    def _bindings_wait(self) -> bool:
        return self.binder.backlogged

    def _volumes_bound(self, placement: Placement) -> None:
        if placement.lock:
            # Behind the volumes, which may take longer than a lock lasts.
            self.node_locks.submit(placement)
        else:
            self._prepared(placement)

    def _prepared(self, placement: Placement) -> None:
        self._preparation_ended(placement, succeeded=True)
        self.binder.submit(placement)

    def _not_prepared(self, placement: Placement, outcome: Outcome) -> None:
        self._preparation_ended(placement, succeeded=False)
        self._outcome(placement, outcome)

    def _preparation_ended(self, placement: Placement, *, succeeded: bool) -> None:
        began = self._prepared_since.pop(placement.uid, None)
        if began is not None:
            self._step(placement, PRE_BIND, succeeded, time.perf_counter() - began)

    def _step(self, placement: Placement, step: str, succeeded: bool, seconds: float) -> None:
        """Count a step of a binding."""
        timings = self.timings.get(self.attempts.profile_of(placement.uid))
        if timings is not None:
            timings.step(step, SUCCESS if succeeded else ERROR, seconds)

    def _evicted(self, victim: Victim, refused: Refused | None) -> None:
        self.attempts.preemptions.evicted(victim, refused)
        self._wake.set()

    # --- what the attempts write ---------------------------------------------------------------

    def bind(self, placement: Placement) -> None:
        """Carry out a placement in the background."""
        if not placement.volumes and not placement.lock:
            self.binder.submit(placement)
            return
        self._prepared_since[placement.uid] = time.perf_counter()
        if placement.volumes:
            self.volume_binder.submit(placement)
        else:
            self.node_locks.submit(placement)

    def reserve(self, placement: ReservationPlacement) -> None:
        """Give a Reservation its node in the background."""
        self.reservation_writer.submit(placement)

    def refuse_reservation(self, refusal: ReservationRefusal) -> None:
        """Write why a Reservation has no node, in the background."""
        self.reservation_writer.refuse(refusal)

    def status(self, status: PodStatus, shown: Shown) -> None:
        """Write a pod's condition in the background."""
        self.statuses.submit(status, shown)

    def event(self, event: EventToWrite) -> None:
        """Write an event in the background."""
        self.events.record(event)

    def evict(self, victim: Victim, controller: str) -> None:
        """Evict a victim of a preemption in the background."""
        self.evictor.submit(victim, controller)

    def settled(self, placement: Placement | ReservationPlacement) -> None:
        """Write nothing more about a pod's earlier attempts."""
        if isinstance(placement, Placement):
            self.statuses.forget(placement.key, placement.uid)

    # --- state for pages -----------------------------------------------------------------------

    def overdue_lease(self) -> str:
        """Return why the lease may be lost without this process having noticed, or ""."""
        age = 0.0 if self.election is None else self.election.lease_age_seconds
        longest = self.configuration.leader_election.lease_duration + _LEASE_TOLERANCE_S
        return f"the lease was not renewed for {age:.0f} s" if age > longest else ""

    def unsynced(self) -> str:
        """Return why this replica does not schedule although it has the lease, or ""."""
        waits = self.leading and not self.ready and not self.stopping
        return "reading the cluster" if waits else ""

    def work_queues(self) -> tuple[WorkQueue, ...]:
        """Return the work queues of the parts that this process runs."""
        queues = [self.reservation_writer.queue]
        if self.reservation_controller is not None:
            queues.append(self.reservation_controller.queue)
        if self.pod_group_statuses is not None:
            queues.append(self.pod_group_statuses.queue)
        if self.quota_upkeep is not None:
            queues.append(self.quota_upkeep.statuses.queue)
        return tuple(queues)

    def pending(self) -> Mapping[str, int]:
        """Return how many pods wait, by place."""
        return {place.value: self.queue.count(place) for place in QueueState}


def _identity() -> str:
    return f"{socket.gethostname()}_{uuid.uuid4()}"


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in reversed(tasks):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
