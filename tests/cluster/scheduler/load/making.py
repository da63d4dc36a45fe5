"""A node with a load table, and NodeMetrics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from apis.decode import json_decoder
from apis.keys import ANNOTATION_RESERVE_POD
from apis.nodemetric import NodeMetric
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.plugins.resources.load_aware import LoadAwareScheduling
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.load import LoadSettings, LoadTable
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import make_facts

NOW = 1_800_000_000.0
UPDATED = "2027-01-15T08:00:00Z"
_decode = json_decoder(NodeMetric)


def make_metric(
    cpu: str,
    memory: str = "0",
    *,
    pods: dict[str, tuple[str, str]] | None = None,
    windows: dict[str, dict[str, str]] | None = None,
    updated: str = UPDATED,
) -> NodeMetric:
    """pods: name -> (cpu, priority class). windows: duration -> percentile -> cpu."""
    return _decode(
        msgspec.json.encode(
            {
                "metadata": {"name": "n"},
                "status": {
                    "updateTime": updated,
                    "nodeMetric": {
                        "nodeUsage": {"resources": {"cpu": cpu, "memory": memory}},
                        "aggregatedNodeUsages": [
                            {
                                "duration": duration,
                                "usage": {p: {"resources": {"cpu": c}} for p, c in usage.items()},
                            }
                            for duration, usage in (windows or {}).items()
                        ],
                    },
                    "podsMetric": [
                        {
                            "namespace": "default",
                            "name": name,
                            "priority": priority,
                            "podUsage": {"resources": {"cpu": used}},
                        }
                        for name, (used, priority) in (pods or {}).items()
                    ],
                },
            }
        )
    )


class LoadNode:
    """One node of 32 cores and 128 GiB with a load table."""

    def __init__(self, settings: LoadSettings | None = None, **annotations: str) -> None:
        self.tables = Tables()
        self.load = LoadTable(self.tables.nodes, settings or LoadSettings())
        self.tables.add_node_part(self.load)
        self.shapes = Shapes()
        self.load.advance(NOW)
        self.row = self.tables.upsert_node(
            make_node(
                "n",
                allocatable={"cpu": "32", "memory": "128Gi"},
                annotations={
                    f"scheduling.koordinator.sh/{key.replace('_', '-')}": text
                    for key, text in annotations.items()
                },
            )
        )
        self.plugin = LoadAwareScheduling(self.load, restored=Restoring())

    def shape(self, *, priority: int = 9500, **spec: Any) -> PodShape:
        return self.shapes.of(make_pod("p", priority=priority, **spec))

    def place(
        self,
        name: str,
        *,
        start: float = NOW,
        initialized: float = 0.0,
        reservation: str = "",
        **spec: Any,
    ) -> None:
        """reservation: the name of the one that the pod uses."""
        booking = Booking(
            key=f"default/{name}",
            uid=name,
            shape=self.shape(**spec),
            node="n",
            start=start,
            initialized=initialized,
            allocation=Allocation(reservation=f"uid-{reservation}" if reservation else ""),
        )
        self.tables.place(booking)

    def reserve(self, name: str, requests: dict[str, str], *, on: str = "n", **spec: Any) -> None:
        """Have a Reservation on a node, for pods with the label app: a."""
        self.tables.reservations.upsert(make_facts(name, requests))
        annotations = {ANNOTATION_RESERVE_POD: "true"}
        shape = self.shape(requests=requests, annotations=annotations, **spec)
        uid = f"uid-{name}"
        self.tables.place(Booking(key=f"default/{uid}", uid=uid, shape=shape, node=on, start=NOW))

    def reasons(self, **spec: Any) -> list[str]:
        shape = self.shape(**spec)
        mask = int(self.plugin.filter(shape, self.tables, np.array([self.row]))[0])
        reasons = self.plugin.reasons(shape)
        return [reason.text for number, reason in enumerate(reasons) if mask >> number & 1]

    def score(self, **spec: Any) -> int:
        return int(self.plugin.score(self.shape(**spec), self.tables, np.array([self.row]))[0])
