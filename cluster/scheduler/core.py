"""The scheduler without a process around it: tables, plugins, queue, sources and attempts as one.

Objects come in through the caches: from an API server, from files, or from a test. What is decided
goes out through the writers. Nothing here waits, reads or writes; `process` and `simulate` do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from apis.core import Namespace
from apis.device import Device
from apis.errors import InputError
from apis.meta import format_time
from apis.network_topology import ClusterNetworkTopology
from apis.nodemetric import NodeMetric
from apis.quota import ElasticQuota, PodGroup
from apis.scheduling import Reservation
from apis.scheduling_pod import SchedulingNode, SchedulingPod
from apis.topology import NodeResourceTopology
from cluster.scheduler.attempts import Attempts, Writers
from cluster.scheduler.auditing.auditor import WorkloadAuditor
from cluster.scheduler.auditing.metrics import AuditorMetrics
from cluster.scheduler.auditing.permit import AuditedPermit
from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.events import NAMESPACE, Action, ClusterEvent
from cluster.scheduler.cycle.permit import Permit, gang_gate
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.waiting import Backoff, Gate, scheduling_gates
from cluster.scheduler.cycle.waking import LONGEST_UNSCHEDULABLE_S
from cluster.scheduler.metrics import SchedulerMetrics
from cluster.scheduler.plugins.between_pods.hints import AffinityHint, ChangedPod, SpreadHint
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.plugins.quotas.elastic_quota import QuotaHint
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.registrations import registrations
from cluster.scheduler.sources.cluster import ClusterSource
from cluster.scheduler.sources.disruption_budgets import (
    DISRUPTION_BUDGETS,
    DisruptionBudget,
    DisruptionBudgetSource,
)
from cluster.scheduler.sources.gangs import GangSource
from cluster.scheduler.sources.network_topology import NetworkTopologySource
from cluster.scheduler.sources.node_facts import NodeFacts
from cluster.scheduler.sources.objects import kept_node, pod_keeper
from cluster.scheduler.sources.quotas import QuotaSource
from cluster.scheduler.sources.reservations import ReservationSource
from cluster.scheduler.sources.templates import TemplateSource
from cluster.scheduler.sources.volumes import VolumeSource
from cluster.scheduler.sources.workloads import Workloads
from cluster.scheduler.tables.gangs import Gangs
from cluster.scheduler.tables.load import estimation_problems
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from kube.cache import Cache, Change, Event
from kube.client import Client
from kube.resources import (
    CLUSTER_NETWORK_TOPOLOGIES,
    DEVICES,
    ELASTIC_QUOTAS,
    NAMESPACES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
)


def steady_clock() -> Callable[[], float]:
    """Return a clock that is right now and goes on with the monotonic one: seconds since 1970.

    When the system's clock is set, it goes on as if nothing had happened.
    """
    ahead = time.time() - time.monotonic()
    return lambda: ahead + time.monotonic()


class SchedulerCore:
    """Everything that decides, composed over one set of tables."""

    def __init__(
        self,
        client: Client,
        configuration: SchedulerConfiguration,
        writers: Writers,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        longest_unschedulable_s: float = LONGEST_UNSCHEDULABLE_S,
        auditor: AuditorSettings | None = None,
    ) -> None:
        """client: where the caches read from, once they are run. writers: take what is decided.
        seed: fixes how ties are drawn; None draws it. clock: seconds since 1970, for what objects
        show and what is compared with their times. steady: seconds that never jump, for back-offs
        and time limits; None: `steady_clock()` beside the system's clock, else `clock` itself.
        longest_unschedulable_s: see SchedulingQueue. auditor: of the workload auditor; None: there
        is none."""
        self.client = client
        self._clock = clock
        if steady is None:
            steady = steady_clock() if clock is time.time else clock
        self._steady = steady
        self.configuration = configuration
        self.tables = Tables()
        self.plugins: Plugins = make_plugins(configuration, self.tables)
        gangs = self.gang_table = Gangs()
        changed = ChangedPod(lambda pod: self.source.shape_of(pod))
        self.queue: SchedulingQueue[PodShape] = SchedulingQueue(
            registrations(
                QuotaHint(self.plugins.quota_admissions),
                SpreadHint(_spreads(self.plugins.profiles), self.tables, changed),
                AffinityHint(self.tables, changed),
            ),
            gates=(Gate("SchedulingGates", scheduling_gates), gang_gate(gangs)),
            backoff=Backoff(
                float(configuration.pod_initial_backoff_seconds),
                float(configuration.pod_max_backoff_seconds),
            ),
            longest_unschedulable_s=longest_unschedulable_s,
        )
        self.metrics = SchedulerMetrics(self.queue)
        self.auditor: WorkloadAuditor | None = None
        audit: AuditedPermit | None = None
        if auditor is not None:
            shown = AuditorMetrics(self.metrics.registry, auditor.labels)
            self.auditor = WorkloadAuditor(shown, auditor, steady)
            audit = AuditedPermit(self.queue, gangs, self.auditor)
        self.permit: Permit[PodShape] = audit or Permit(self.queue, gangs)
        self.scheduling = Scheduling(
            self.tables,
            self.plugins.profiles,
            seed=uuid.uuid4().int if seed is None else seed,
            preemption=self.plugins.preemption,
            quota_preemption=self.plugins.quota_preemption,
            gang_preemption=self.plugins.gang_preemption,
            network=self.plugins.network,
        )
        self.timings = {name: self.scheduling.timings(name) for name in self.plugins.profiles}
        self.metrics.show_timings(self.timings)
        if self.plugins.quotas is not None:
            self.metrics.show_quotas(self.plugins.quotas)
        self.pods: Cache[SchedulingPod] = Cache(
            client, PODS, SchedulingPod, shrink=pod_keeper(configuration.gates)
        )
        reservations = self.reservation_source = ReservationSource(
            self.tables.reservations,
            self.queue,
            pod_event=lambda event: self.source.pod_event(event),
            withdraw=lambda uid: self.source.withdraw(uid),
            scheduler_names=self.plugins.reservations,
            clock=steady,
            refuse=lambda pod, why: self.attempts.reports.refuse_reservation(pod, why),
        )
        self.attempts = Attempts(
            self.scheduling,
            self.queue,
            self.permit,
            self.metrics,
            writers,
            clock=steady,
            wall=clock,
            pod_of=self.pods.items.get,
            reserve_pods=reservations.reserve_pods,
            network=self.plugins.network,
            resizes=configuration.gates.get("ResizePod", False),
            audit=audit,
        )
        self._make_sources()

    def _make_sources(self) -> None:
        client = self.client
        self.workloads = Workloads(client)
        self.volumes = VolumeSource(client, self.tables, self.queue, clock=self._steady)
        follow = self.attempts.follow
        gangs = self.gangs = GangSource(
            self.permit, self.plugins.gangs, clock=self._steady, follow=follow
        )
        quotas = self.plugins.quotas
        self.quota_source = (
            None if quotas is None else QuotaSource(quotas, self.queue, clock=self._steady)
        )
        self.source = ClusterSource(
            self.tables,
            self.queue,
            self.permit,
            gangs,
            scheduler_names=self.plugins.profiles,
            clock=self._steady,
            follow=follow,
            forget=self.attempts.forget,
            seen_bound=self.attempts.seen_bound,
            nominator=self.scheduling.nominator,
            spread_by=self.workloads.selector_of,
            quotas=self.quota_source,
            other_nominations=self.configuration.gates.get("CrossSchedulerNomination", False),
            estimation_problems=self._estimation_problems,
            named=self._named,
        )
        self.attempts.look_again = self._look_again
        self.nodes: Cache[SchedulingNode] = Cache(client, NODES, SchedulingNode, shrink=kept_node)
        metrics: Cache[NodeMetric] = Cache(client, NODE_METRICS, NodeMetric)
        topologies: Cache[NodeResourceTopology] = Cache(
            client, NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology
        )
        devices: Cache[Device] = Cache(client, DEVICES, Device)
        namespaces: Cache[Namespace] = Cache(client, NAMESPACES, Namespace)
        self.pod_groups: Cache[PodGroup] = Cache(client, POD_GROUPS, PodGroup)
        self.reservations: Cache[Reservation] = Cache(client, RESERVATIONS, Reservation)
        budgets: Cache[DisruptionBudget] = Cache(client, DISRUPTION_BUDGETS, DisruptionBudget)
        # Without the pods, which are read last: what a pod's workload is follows from the others.
        self.caches: tuple[Cache[Any], ...] = (
            self.nodes,
            namespaces,
            budgets,
            metrics,
            topologies,
            devices,
            self.pod_groups,
            self.reservations,
            *self.workloads.caches,
            *self.volumes.caches,
        )
        self.quotas: Cache[ElasticQuota] = Cache(client, ELASTIC_QUOTAS, ElasticQuota)
        if self.quota_source is not None:
            self.caches = (*self.caches, self.quotas)
            self.quotas.subscribe(self.quota_source.quota_event)
        self.templates: TemplateSource | None = None
        if self.plugins.templates is not None:
            self.templates = TemplateSource(
                client,
                self.plugins.templates,
                self.plugins.devices,
                self.queue,
                clock=self._steady,
            )
            self.caches = (*self.caches, self.templates.cache)
        self.networks: Cache[ClusterNetworkTopology] = Cache(
            client, CLUSTER_NETWORK_TOPOLOGIES, ClusterNetworkTopology
        )
        if self.plugins.gangs:
            self.caches = (*self.caches, self.networks)
            networks = NetworkTopologySource(self.plugins.network, self.queue, clock=self._steady)
            self.networks.subscribe(networks.topology_event)
        facts = NodeFacts(self.tables, self.plugins, self.queue, metrics, topologies, self._steady)
        # A node's row is made before its facts are looked for.
        self.nodes.subscribe(self.source.node_event)
        self.nodes.subscribe(facts.node_event)
        self.pods.subscribe(self.source.pod_event)
        metrics.subscribe(facts.metric_event)
        topologies.subscribe(facts.topology_event)
        devices.subscribe(facts.device_event)
        self.pod_groups.subscribe(gangs.pod_group_event)
        self.reservations.subscribe(self.reservation_source.reservation_event)
        namespaces.subscribe(self._namespace_event)
        budgets.subscribe(DisruptionBudgetSource(self.scheduling.budgets).event)

    def _look_again(self, pod: SchedulingPod) -> None:
        if pod.metadata.uid in self.reservation_source.reserve_pods:
            self.reservation_source.look_again(pod.metadata.uid)
        else:
            self.source.pod_event(Event(Change.MODIFIED, pod, pod))

    def _estimation_problems(self, pod: SchedulingPod, shape: PodShape) -> tuple[InputError, ...]:
        """Return why annotations about a pod's load are not in force, if any profile reads them."""
        if not any(load.settings.customized for load in self.plugins.loads):
            return ()
        return estimation_problems(shape, obj=pod.ref)

    def _named(self, pod: SchedulingPod) -> str:
        """Return how errors name a pod: a reserve pod has no object but its Reservation."""
        reserve_pod = self.reservation_source.reserve_pods.get(pod.metadata.uid)
        return pod.ref if reserve_pod is None else f"Reservation {reserve_pod.name}"

    def _namespace_event(self, event: Event[Namespace]) -> None:
        name = event.new.metadata.name
        if event.change.value == "deleted":
            self.tables.namespaces.delete(name)
        else:
            self.tables.namespaces.set(name, event.new.metadata.labels)
            if event.old is not None and event.old.metadata.labels == event.new.metadata.labels:
                return
        self.queue.cluster_event(ClusterEvent(NAMESPACE, Action.UPDATE_OTHER), self._steady())

    def prepare(self) -> None:
        """Work out beforehand what the first preemption would have to, once all is read."""
        self.scheduling.prepare()

    def advance(self, now: float) -> None:
        """Let time pass, to `now` seconds since 1970: reports and grace periods end."""
        # Each table has to follow the time.
        expired = [load.advance(now) for load in self.plugins.loads]
        if self.plugins.expired_load_passes and any(expired):
            event = ClusterEvent("NodeMetric", Action.UPDATE_OTHER)
            self.queue.cluster_event(event, self._steady())
        if self.quota_source is not None:
            self.quota_source.advance(now)

    def schedule_for(self, seconds: float) -> bool:
        """Schedule pods for so long; return whether more may be waiting."""
        now, steady = self._clock(), self._steady()
        end = time.monotonic() + seconds
        self.advance(now)
        while time.monotonic() < end:
            if not self.attempts.next(steady):
                return False
        return True

    def why(self, key: str) -> dict[str, Any] | None:
        """Return what is known about the scheduling of the pod namespace/name, as JSON has it.

        None if there is no such pod. docs/scheduler.md, "Asking why", describes the members.
        """
        pod = self.pods.get(key.partition("/")[2], namespace=key.partition("/")[0])
        if pod is None:
            return None
        uid = pod.metadata.uid
        waits_on = self.attempts.waits_on(uid)
        place, gate = self.queue.state_of(uid), self.queue.gate(uid)
        if pod.spec.node_name:
            state = "bound"
        elif pod.spec.scheduler_name not in self.plugins.profiles:
            state = "of another scheduler"
        elif waits_on:
            state = "has a node"
        else:
            state = "unknown" if place is None else place.value
        result: dict[str, Any] = {
            "pod": key,
            "uid": uid,
            "schedulerName": pod.spec.scheduler_name,
            "state": state,
            "node": pod.spec.node_name or waits_on,
        }
        explained = self.attempts.explanations.get(key)
        if explained is not None and explained.uid == uid:
            result["decidedAt"] = format_time(datetime.fromtimestamp(explained.at, UTC))
            result |= explained.plain()
        if gate is not None:
            result["message"] = gate.reason
        return result

    def node_and_message(self, pod: SchedulingPod) -> tuple[str, str]:
        """Return the members `node` and `message` of `why` alone, "" where there is none."""
        meta = pod.metadata
        message = ""
        gate = self.queue.gate(meta.uid)
        if gate is not None:
            message = gate.reason
        else:
            explained = self.attempts.explanations.get(f"{meta.namespace}/{meta.name}")
            if explained is not None and explained.uid == meta.uid:
                message = explained.message
        return pod.spec.node_name or self.attempts.waits_on(meta.uid), message


def _spreads(profiles: Mapping[str, Profile]) -> dict[str, PodTopologySpread]:
    """Return the filter PodTopologySpread of each profile that has it, by scheduler name."""
    return {
        name: each
        for name, profile in profiles.items()
        for each in profile.filters
        if isinstance(each, PodTopologySpread)
    }
