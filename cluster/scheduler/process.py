"""One scheduler process: caches into tables and queue, decisions, writes.

Nothing is watched before the lease is ours. Every list then is a consistent read that was made
after the former leader could last write, so what is bound is seen before the first decision, and
nothing is decided twice. A decision takes a fraction of a millisecond; the loop that makes them
gives way to the other tasks after a few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final

from apis.core import Namespace
from apis.device import Device
from apis.nodemetric import NodeMetric
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from apis.topology import NodeResourceTopology
from cluster.scheduler.binding.binder import Binder
from cluster.scheduler.binding.events import EventWriter, failed, pod_reference, scheduled
from cluster.scheduler.binding.placement import Bound, Outcome, Placement, Why
from cluster.scheduler.binding.statuses import (
    SCHEDULER_ERROR,
    SCHEDULING_GATED,
    UNSCHEDULABLE,
    PodStatus,
    Shown,
    StatusWriter,
)
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.cycle.waiting import Attempt, Backoff, Gate, Place, scheduling_gates
from cluster.scheduler.metrics import SchedulerMetrics
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.registrations import registrations
from cluster.scheduler.sources.cluster import ClusterSource, shrink_node, shrink_pod
from cluster.scheduler.sources.node_facts import NodeFacts
from cluster.scheduler.sources.workloads import Workloads
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from kube.cache import Cache, Event, wait_all_synced
from kube.client import Client
from kube.faults import Faults
from kube.leader import LeaderElection
from kube.resources import (
    DEVICES,
    NAMESPACES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PODS,
)

_log = logging.getLogger(__name__)

_SLICE_S: Final = 0.005
"""How long decisions go on before watches, writes and probes get their turn. Chosen: 20 decisions
or more; at twice the value a burst of pods delays bindings by as much."""
_TICK_S: Final = 1.0
"""The longest pause of the loop: reports expire and backoffs end at times, not by events."""
_DRAIN_S: Final = 10.0
"""For bindings under way at a stop. Kubernetes grants 30 s."""


class SchedulerProcess:
    """The composition root: builds all parts and runs them."""

    def __init__(
        self,
        client: Client,
        configuration: SchedulerConfiguration,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """seed: fixes how ties are drawn; None draws it. clock: seconds since 1970."""
        self.client = client
        self._clock = clock
        self.configuration = configuration
        self.tables = Tables()
        self.plugins: Plugins = make_plugins(configuration, self.tables)
        self.queue: SchedulingQueue[PodShape] = SchedulingQueue(
            registrations(),
            gates=(Gate("SchedulingGates", scheduling_gates),),
            backoff=Backoff(
                float(configuration.pod_initial_backoff_seconds),
                float(configuration.pod_max_backoff_seconds),
            ),
        )
        self.scheduling = Scheduling(
            self.tables,
            self.plugins.profiles,
            seed=uuid.uuid4().int if seed is None else seed,
        )
        self.metrics = SchedulerMetrics(self.queue)
        self.leading = False
        self.ready = False
        self._faults = Faults("scheduler")
        self._wake = asyncio.Event()
        self._placed: dict[str, PendingPod[PodShape]] = {}
        """Pods whose binding is under way, by UID."""
        self._make_sources()
        self.statuses = StatusWriter(client, now=clock)
        self.events = EventWriter(client, instance=_identity(), now=clock)
        self.binder = Binder(client, self._bound, before=self.statuses.settle)

    def _make_sources(self) -> None:
        client = self.client
        self.workloads = Workloads(client)
        self.source = ClusterSource(
            self.tables,
            self.queue,
            scheduler_names=self.plugins.profiles,
            clock=self._clock,
            spread_by=self.workloads.selector_of,
        )
        self.pods: Cache[SchedulingPod] = Cache(client, PODS, SchedulingPod, shrink=shrink_pod)
        self.nodes: Cache[SchedulingNode] = Cache(client, NODES, SchedulingNode, shrink=shrink_node)
        metrics: Cache[NodeMetric] = Cache(client, NODE_METRICS, NodeMetric)
        topologies: Cache[NodeResourceTopology] = Cache(
            client, NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology
        )
        devices: Cache[Device] = Cache(client, DEVICES, Device)
        namespaces: Cache[Namespace] = Cache(client, NAMESPACES, Namespace)
        self.caches: tuple[Cache[Any], ...] = (
            self.nodes,
            namespaces,
            metrics,
            topologies,
            devices,
            *self.workloads.caches,
        )
        facts = NodeFacts(self.tables, self.plugins, self.queue, metrics, topologies, self._clock)
        # A node's row is made before its facts are looked for.
        self.nodes.subscribe(self.source.node_event)
        self.nodes.subscribe(facts.node_event)
        self.pods.subscribe(self.source.pod_event)
        metrics.subscribe(facts.metric_event)
        topologies.subscribe(facts.topology_event)
        devices.subscribe(facts.device_event)
        namespaces.subscribe(self._namespace_event)
        for cache in (*self.caches, self.pods):
            cache.subscribe(self._woken)

    def _namespace_event(self, event: Event[Namespace]) -> None:
        name = event.new.metadata.name
        if event.change.value == "deleted":
            self.tables.namespaces.delete(name)
        else:
            self.tables.namespaces.set(name, event.new.metadata.labels)

    def _woken(self, event: Event[Any]) -> None:
        self._wake.set()

    # --- running -------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raises LeadershipLost if the lease is lost."""
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[Any]] = []
            stack.push_async_callback(_end, tasks)

            def start(name: str, work: Coroutine[Any, Any, Any]) -> None:
                tasks.append(asyncio.create_task(work, name=name))

            start("stop", stop.wait())
            start("leader", self._lead_when_elected())
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.ready = False
            for task in done:
                task.result()

    async def _lead_when_elected(self) -> None:
        lease = self.configuration.leader_election
        if not lease.leader_elect:
            await self._lead()
            return
        # A client of its own: a renewal must not wait behind a thousand bindings.
        async with self.client.sibling() as client:
            election = LeaderElection(
                client,
                namespace=lease.resource_namespace,
                name=lease.resource_name,
                identity=_identity(),
                lease_seconds=lease.lease_duration,
                renew_deadline_seconds=lease.renew_deadline,
                retry_seconds=lease.retry_period,
            )
            await election.run(self._lead)

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
                await wait_all_synced(*caches)
            _log.info(
                "%d nodes, %d pods on them, %d waiting, read in %.1f s",
                self.tables.nodes.count,
                len(self.tables.bookings),
                len(self.queue),
                time.monotonic() - began,
            )
            start("statuses", self.statuses.run())
            start("events", self.events.run())
            stack.push_async_callback(self.events.flush, 3.0)
            stack.push_async_callback(self.binder.drain, _DRAIN_S)
            self.ready = True
            start("scheduling", self._schedule())
            # At a stop decisions end first: a binder that drains takes no more placements.
            stack.push_async_callback(_end, [tasks[-1]])
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    # --- decisions -----------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            if not self.schedule_for(_SLICE_S):
                until = self.queue.next_time()
                pause = _TICK_S if until is None else max(0.0, until - self._clock())
                try:
                    async with asyncio.timeout(min(pause, _TICK_S)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(0)

    def schedule_for(self, seconds: float) -> bool:
        """Schedule pods for so long; return whether more may be waiting."""
        now = self._clock()
        end = time.monotonic() + seconds
        for load in self.plugins.loads:
            load.advance(now)
        while time.monotonic() < end:
            attempt = self.queue.pop(now)
            if attempt is None:
                self._report_gated()
                return False
            try:
                self._attempt(attempt, now)
            except Exception as error:  # noqa: BLE001 - one pod must not end all scheduling
                self._faults.note("scheduling a pod", about=attempt.pod.key)
                self._abandon(attempt.pod, f"{type(error).__name__}: {error}", now)
        return True

    def _attempt(self, attempt: Attempt[PodShape], now: float) -> None:
        pod = attempt.pod
        began = time.perf_counter()
        outcome = self.scheduling.schedule(
            key=pod.key,
            uid=pod.uid,
            shape=pod.shape,
            profile=pod.shape.scheduler_name,
            now=now,
        )
        self.metrics.decided(outcome, pod.shape.scheduler_name, time.perf_counter() - began)
        if isinstance(outcome, Unplaced):
            self.queue.refuse(pod.uid, outcome.diagnosis.plugins or {"NoNodes"}, now)
            self._report(pod, UNSCHEDULABLE, outcome.diagnosis.message)
            return
        self._bind(pod, outcome)

    def _bind(self, pod: PendingPod[PodShape], placed: Placed) -> None:
        namespace, _, name = pod.key.partition("/")
        recorded = placed.recorded
        self._placed[pod.uid] = pod
        self.binder.submit(
            Placement(
                namespace=namespace,
                name=name,
                uid=pod.uid,
                node=placed.booking.node,
                annotations={k: v for k, v in recorded.annotations.items() if v is not None},
                labels={k: v for k, v in recorded.labels.items() if v is not None},
                removed_annotations=tuple(k for k, v in recorded.annotations.items() if v is None),
            )
        )

    def _bound(self, placement: Placement, outcome: Outcome) -> None:
        """Take the outcome of a binding."""
        pod = self._placed.pop(placement.uid)
        self.metrics.bound(outcome, pod)
        if isinstance(outcome, Bound):
            about = pod_reference(placement.namespace, placement.name, placement.uid)
            controller = pod.shape.scheduler_name
            self.events.record(scheduled(about, placement.node, controller=controller))
            self.statuses.forget(placement.uid)
            return
        if self.queue.place(placement.uid) is not Place.IN_FLIGHT:
            # The watch has already shown what became of the pod.
            return
        if outcome.why in (Why.DELETED, Why.OTHER_UID):
            self.tables.remove(placement.uid)
            self.queue.remove(placement.uid)
        else:
            _log.warning("%s", outcome.message)
            self._abandon(pod, outcome.message, self._clock())
        self._wake.set()

    def _abandon(self, pod: PendingPod[PodShape], message: str, now: float) -> None:
        """Give an attempt up because of an error; the pod is tried again after its back-off."""
        self._placed.pop(pod.uid, None)
        self.tables.remove(pod.uid)
        self.queue.fail(pod.uid, now)
        self._report(pod, SCHEDULER_ERROR, message)

    def _report(self, pod: PendingPod[PodShape], reason: str, message: str) -> None:
        namespace, _, name = pod.key.partition("/")
        known = self.pods.get(name, namespace=namespace)
        if known is None or known.metadata.uid != pod.uid:
            return
        self.statuses.submit(PodStatus(namespace, name, pod.uid, reason, message), _shown(known))
        if reason != SCHEDULING_GATED:
            about = pod_reference(namespace, name, pod.uid)
            self.events.record(failed(about, message, controller=pod.shape.scheduler_name))

    def _report_gated(self) -> None:
        for gated in self.queue.take_gated():
            # The API server itself writes the condition of pods with scheduling gates.
            if gated.plugin != "SchedulingGates":
                self._report(gated.pod, SCHEDULING_GATED, gated.reason)

    # --- state for pages -----------------------------------------------------------------------

    def pending(self) -> Mapping[str, int]:
        """Return how many pods wait, by place."""
        return {place.value: self.queue.count(place) for place in Place}


def _shown(pod: SchedulingPod) -> Shown:
    nominated = pod.status.nominated_node_name
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled":
            return Shown(condition.status, condition.reason, condition.message, nominated)
    return Shown(nominated_node=nominated)


def _identity() -> str:
    return f"{socket.gethostname()}_{uuid.uuid4()}"


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in reversed(tasks):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
