"""Reservations and pods that use them in a whole scheduler without an API server."""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.scheduler.beds.core import CoreBed

CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    preFilter: {enabled: [{name: Reservation}]}
    filter: {enabled: [{name: Reservation}]}
    postFilter: {enabled: [{name: Reservation}]}
    preScore: {enabled: [{name: Reservation}]}
    score: {enabled: [{name: Reservation, weight: 5000}]}
    reserve: {enabled: [{name: Reservation}]}
    permit: {enabled: [{name: Coscheduling}]}
    preBind: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
- schedulerName: other
"""
USES = "scheduling.koordinator.sh/reservation-allocated"
WEB = [{"labelSelector": {"matchLabels": {"app": "web"}}}]


class ReservationBed(CoreBed):
    """One node "n" of 4 CPUs."""

    def __init__(self, configuration: str = CONFIGURATION) -> None:
        super().__init__(configuration)
        amounts = {"cpu": "4", "memory": "64Gi", "pods": "10"}
        node = {"metadata": {"name": "n"}, "status": {"allocatable": amounts}}
        self.show(self.core.nodes, "ADDED", node)

    def pod(
        self,
        name: str,
        cpu: str,
        *,
        kind: str = "MODIFIED",
        metadata: dict[str, Any] | None = None,
        node: str = "",
        ready: bool = False,
        priority: int = 0,
    ) -> None:
        status: dict[str, Any] = {}
        if ready:
            conditions = [{"type": "Ready", "status": "True"}]
            status = {"phase": "Running", "conditions": conditions}
        resources = {"requests": {"cpu": cpu}}
        obj = {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": f"uid-{name}",
                **(metadata or {}),
            },
            "spec": {
                "schedulerName": "koord-scheduler",
                "nodeName": node,
                "priority": priority,
                "containers": [{"name": "c", "resources": resources}],
            },
            "status": status,
        }
        self.show(self.core.pods, kind, obj)

    def reservation(self, name: str, cpu: str, *, kind: str = "MODIFIED", **members: Any) -> None:
        status = {
            "phase": "Available",
            "nodeName": "n",
            "allocatable": {"cpu": cpu},
            **members.pop("status", {}),
        }
        obj = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "labels": members.pop("labels", {}),
                **members.pop("metadata", {}),
            },
            "spec": {
                "template": {"spec": {"schedulerName": "koord-scheduler", "containers": []}},
                "owners": WEB,
                "ttl": "1h",
                **members,
            },
            "status": status,
        }
        self.show(self.core.reservations, kind, obj)

    def placed(self) -> dict[str, str]:
        """Schedule; return the name of the reservation of each pod that was placed, or ""."""
        self.now += 20.0
        self.core.schedule_for(10.0)
        result = {}
        for placement in self.placements:
            text = placement.annotations.get(USES)
            result[placement.name] = json.loads(text)["name"] if text else ""
        self.placements.clear()
        return result
