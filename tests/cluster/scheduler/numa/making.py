"""NodeResourceTopologies, pods and tables for the tests of CPUs and NUMA nodes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import decode_object
from apis.keys import (
    ANNOTATION_CPU_TOPOLOGY,
    ANNOTATION_NUMA_TOPOLOGY_SPEC,
    ANNOTATION_RESOURCE_SPEC,
    LABEL_QOS_CLASS,
)
from apis.topology import NodeResourceTopology
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.numa.cpu_topology import Cpu
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.making import make_node, make_pod


def topology_tree(
    name: str,
    *,
    cpus: Iterable[Cpu] = (),
    zones: Mapping[int, Mapping[str, str]] | None = None,
    annotations: Mapping[str, str] | None = None,
    policies: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the JSON of an object with these CPUs and allocatable amounts by NUMA id."""
    detail = [{"id": c.id, "core": c.core, "socket": c.socket, "node": c.numa} for c in cpus]
    found = {ANNOTATION_CPU_TOPOLOGY: json.dumps({"detail": detail})} if detail else {}
    return {
        "metadata": {"name": name, "annotations": found | dict(annotations or {})},
        "topologyPolicies": list(policies),
        "zones": [
            {
                "name": f"node-{number}",
                "type": "Node",
                "resources": [
                    {"name": n, "capacity": q, "allocatable": q, "available": q}
                    for n, q in amounts.items()
                ],
            }
            for number, amounts in (zones or {}).items()
        ],
    }


def make_topology(name: str, **given: Any) -> NodeResourceTopology:
    """Return the object that `topology_tree` describes."""
    tree = topology_tree(name, **given)
    return decode_object(tree, NodeResourceTopology, obj=f"NodeResourceTopology {name}")


class NumaCluster:
    """Tables with nodes that have NUMA facts, the plugin over them, and shapes of pods."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.tables = Tables()
        self.table = NumaTable(self.tables.nodes)
        self.tables.add_part(self.table)
        self.plugin = NodeNUMAResource(self.table, settings or Settings())
        self._shapes = Shapes()
        self._pods = 0

    def add_node(
        self,
        name: str,
        topology: NodeResourceTopology | None,
        *,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        allocatable: dict[str, str] | None = None,
    ) -> int:
        """Add a node whose objects have no faults; return its row."""
        node = make_node(name, labels=labels, annotations=annotations, allocatable=allocatable)
        row = self.tables.upsert_node(node)
        facts, errors = parse_numa_facts(node, topology)
        assert not errors
        self.table.set_node(row, facts)
        return row

    def shape(
        self,
        requests: dict[str, str],
        *,
        qos: str = "",
        spec: Mapping[str, str] | None = None,
        numa: Mapping[str, str] | None = None,
    ) -> PodShape:
        """Return a pod's shape. spec, numa: members of resource-spec and numa-topology-spec."""
        annotations = {}
        if spec is not None:
            annotations[ANNOTATION_RESOURCE_SPEC] = json.dumps(spec)
        if numa is not None:
            annotations[ANNOTATION_NUMA_TOPOLOGY_SPEC] = json.dumps(numa)
        labels = {LABEL_QOS_CLASS: qos} if qos else {}
        pod = make_pod(
            "p", requests=requests, limits=requests, labels=labels, annotations=annotations
        )
        return self._shapes.of(pod)

    def place(
        self,
        shape: PodShape,
        node: str,
        *,
        cpus: str = "",
        numa: tuple[tuple[int, Amounts], ...] = (),
        uid: str = "",
        reservation: str = "",
    ) -> Booking:
        """Book a pod with this allocation."""
        self._pods += 1
        booking = Booking(
            key=f"default/p{self._pods}",
            uid=uid or f"uid-{self._pods}",
            shape=shape,
            node=node,
            allocation=Allocation(
                cpus=CpuSet.parse(cpus) if cpus else NO_CPUS, numa=numa, reservation=reservation
            ),
        )
        self.tables.place(booking)
        return booking

    def reasons(self, shape: PodShape) -> dict[str, tuple[str, ...]]:
        """Return the reasons that hold each node back, by its name."""
        if not self.plugin.applies(shape, self.tables):
            return {self.tables.nodes.name(row): () for row in range(len(self.tables.nodes))}
        rows = slice(0, len(self.tables.nodes))
        texts = [reason.text for reason in self.plugin.reasons(shape)]
        return {
            self.tables.nodes.name(row): tuple(
                text for bit, text in enumerate(texts) if mask >> bit & 1
            )
            for row, mask in enumerate(self.plugin.filter(shape, self.tables, rows).tolist())
        }

    def scores(self, shape: PodShape) -> dict[str, int]:
        """Return each node's score, by its name."""
        rows = slice(0, len(self.tables.nodes))
        scores = self.plugin.score(shape, self.tables, rows).tolist()
        return {self.tables.nodes.name(row): score for row, score in enumerate(scores)}

    def allocate(self, shape: PodShape, node: str, *, reservation: str = "") -> Allocation | str:
        """Return what the pod would get on a node, or why it gets nothing."""
        row = self.tables.nodes.row(node)
        assert row is not None
        given = self.plugin.allocate(shape, self.tables, row, Allocation(reservation=reservation))
        return given if isinstance(given, Allocation) else given.text


SMALL = Machine(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=2)
"""16 CPUs, siblings (0,1), (2,3), ...; NUMA node 0 has CPUs 0-7, NUMA node 1 has 8-15."""

SMALL_ZONES = {0: {"cpu": "8", "memory": "32Gi"}, 1: {"cpu": "8", "memory": "32Gi"}}
