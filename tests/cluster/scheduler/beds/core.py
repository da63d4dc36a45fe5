"""A scheduler without an API server: objects go in, and what it would write is kept."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from cluster.scheduler.binding.events import Event
from cluster.scheduler.binding.placement import Bound, Placement
from cluster.scheduler.binding.reservation_writer import ReservationRefusal
from cluster.scheduler.binding.reservations import ReservationPlacement
from cluster.scheduler.binding.statuses import PodStatus, Shown
from cluster.scheduler.binding.victims import Victim
from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.core import SchedulerCore
from kube.cache import Cache
from kube.client import Client

CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
"""
GANG_PREEMPTION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    postFilter: {enabled: [{name: Coscheduling}], disabled: [{name: "*"}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {enablePreemption: true}
"""
"""Gangs evict less important pods; pods without a gang do, too."""


class CoreBed:
    """A scheduler that sees the objects that it is shown, and keeps what it would write."""

    def __init__(
        self, configuration: str = CONFIGURATION, *, auditor: AuditorSettings | None = None
    ) -> None:
        self._configuration = configuration
        self._auditor = auditor
        self.now = 1_800_000_000.0
        self.placements: list[Placement] = []
        self.victims: list[Victim] = []
        self.events: list[Event] = []
        self.nominated: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.reserved: list[ReservationPlacement] = []
        self.refused: dict[str, str] = {}
        """Why Reservations have no node, by UID."""
        self._version = 0
        self.start()

    def start(self) -> None:
        """Begin with a scheduler that has seen nothing."""
        self.core = SchedulerCore(
            cast(Client, None),
            read_configuration(self._configuration, obj="test"),
            self,
            seed=1,
            clock=lambda: self.now,
            auditor=self._auditor,
        )

    # --- Writers -------------------------------------------------------------------------------

    def bind(self, placement: Placement) -> None:
        self.placements.append(placement)

    def status(self, status: PodStatus, shown: Shown) -> None:
        self.messages[status.name] = status.message
        if status.nominated_node is not None:
            self.nominated[status.name] = status.nominated_node

    def event(self, event: Event) -> None:
        self.events.append(event)

    def settled(self, *_: object) -> None: ...

    def reserve(self, placement: ReservationPlacement) -> None:
        self.reserved.append(placement)

    def refuse_reservation(self, refusal: ReservationRefusal) -> None:
        self.refused[refusal.uid] = refusal.message

    def evict(self, victim: Victim, controller: str) -> None:
        self.victims.append(victim)

    # --- objects -------------------------------------------------------------------------------

    def show(self, cache: Cache[Any], kind: str, obj: dict[str, Any]) -> None:
        """Have the scheduler see an object. kind: of the watch event."""
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        cache.take(msgspec.json.encode({"type": kind, "object": obj}))

    def node(self, name: str, cpu: int, **labels: str) -> None:
        amounts = {"cpu": str(cpu), "memory": "64Gi", "pods": "110"}
        self.show(
            self.core.nodes,
            "ADDED",
            {
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
                "status": {"allocatable": amounts},
            },
        )

    def network(self, *layers: str) -> None:
        """Show the layers of the network, the widest first; the label of each has its name."""
        rules: list[dict[str, Any]] = []
        above = "ClusterTopologyLayer"
        for layer in layers:
            rules.append({"topologyLayer": layer, "parentTopologyLayer": above})
            rules[-1]["labelKey"] = [layer]
            above = layer
        rules.append({"topologyLayer": "NodeTopologyLayer", "parentTopologyLayer": above})
        topology = {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": rules}}
        self.show(self.core.networks, "ADDED", topology)

    def evicted(self) -> list[str]:
        return sorted(victim.name for victim in self.victims)


class Bed(CoreBed):
    """The pods are those of the API server; the scheduler sees a change when it is shown."""

    def __init__(
        self, configuration: str = CONFIGURATION, *, auditor: AuditorSettings | None = None
    ) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        super().__init__(configuration, auditor=auditor)

    def budget(self, name: str, app: str, allowed: int) -> None:
        cache = next(c for c in self.core.caches if c.resource.kind == "PodDisruptionBudget")
        self.show(
            cache,
            "ADDED",
            {
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"selector": {"matchLabels": {"app": app}}},
                "status": {"disruptionsAllowed": allowed},
            },
        )

    def pod(
        self,
        name: str,
        cpu: int,
        priority: int,
        *,
        node: str = "",
        app: str = "",
        gang: int = 0,
        nominated: str = "",
        mode: str = "Strict",
        gather: str = "",
        of: str = "g",
        **spec: Any,
    ) -> None:
        """Make a pod. gang: the minimum of the gang `of` that the pod is in, 0 for none. mode,
        gather: of that gang, the latter as JSON."""
        prefix = "gang.scheduling.koordinator.sh"
        annotations = {f"{prefix}/name": of, f"{prefix}/min-available": str(gang)} if gang else {}
        if mode != "Strict":
            annotations[f"{prefix}/mode"] = mode
        if gather:
            annotations[f"{prefix}/network-topology-spec"] = gather
        self.pods[name] = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"u-{name}",
                "labels": {"app": app} if app else {},
                "annotations": annotations,
            },
            "spec": {
                "schedulerName": "koord-scheduler",
                "nodeName": node,
                "priority": priority,
                "containers": [{"name": "c", "resources": {"requests": {"cpu": str(cpu)}}}],
                **spec,
            },
            "status": {"nominatedNodeName": nominated} if nominated else {},
        }
        self.show(self.core.pods, "ADDED", self.pods[name])

    def change(self, name: str) -> None:
        """Show a pod as it is in `pods`."""
        self.show(self.core.pods, "MODIFIED", self.pods[name])

    def gone(self, name: str) -> None:
        self.show(self.core.pods, "DELETED", self.pods.pop(name))

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass and schedule; what is placed is bound."""
        self.now += seconds
        assert not self.core.schedule_for(10.0)
        while self.placements:
            placement = self.placements.pop(0)
            pod = self.pods[placement.name]
            pod["spec"]["nodeName"] = placement.node
            pod["metadata"].setdefault("annotations", {}).update(placement.annotations)
            pod["metadata"].setdefault("labels", {}).update(placement.labels)
            self.core.attempts.bound(placement, Bound())
            self.change(placement.name)

    def node_of(self, name: str) -> str:
        found: str = self.pods[name]["spec"].get("nodeName", "")
        return found
