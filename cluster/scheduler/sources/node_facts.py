"""What other objects say about a node: its NodeMetric, NodeResourceTopology and Device.

Either may be read before its Node; it counts when both are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apis.device import Device
from apis.errors import InputError
from apis.keys import PODS
from apis.nodemetric import NodeMetric
from apis.scheduling_pod import SchedulingNode
from apis.topology import NodeResourceTopology
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.profiles import Plugins
from cluster.scheduler.sources.complaints import Complaints
from cluster.scheduler.sources.objects import MOST_OF_A_NODE
from cluster.scheduler.tables.amounts import MOST_RESOURCES
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.numa.table import MOST_NUMA_NAMES
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from kube.cache import Cache, Change, Event


class NodeFacts:
    """Takes the events of nodes, NodeMetrics and NodeResourceTopologies."""

    def __init__(
        self,
        tables: Tables,
        plugins: Plugins,
        queue: SchedulingQueue[PodShape],
        metrics: Cache[NodeMetric],
        topologies: Cache[NodeResourceTopology],
        clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._plugins = plugins
        self._queue = queue
        self._metrics = metrics
        self._topologies = topologies
        self._clock = clock
        self._nodes: dict[str, SchedulingNode] = {}
        self.complaints = Complaints()
        """Of Devices; of Nodes, with their NodeResourceTopologies and load thresholds."""

    def node_event(self, event: Event[SchedulingNode]) -> None:
        """Take a change of a node, after the node table took it."""
        name = event.new.metadata.name
        if event.change is Change.DELETED:
            self._nodes.pop(name, None)
            self.complaints.forget(f"Node {name}")
            self.complaints.forget(_resources_of(name))
            return
        self._nodes[name] = event.new
        self.complaints.set(_resources_of(name), self._resources_left_out(event.new))
        row = self._tables.nodes.row(name)
        if event.old is None and row is not None:
            metric = self._metrics.get(name)
            if metric is not None:
                for load in self._plugins.loads:
                    load.set_report(row, metric)
        old = event.old
        if old is None or old.metadata != event.new.metadata:
            self._set_numa(name)

    def _resources_left_out(self, node: SchedulingNode) -> list[InputError]:
        """Return why resources of a node do not count, if any are left out."""
        names, table = node.status.allocatable, self._tables.nodes.resources
        obj, field = f"Node {node.metadata.name}", "status.allocatable"
        problems = []
        for name in node.status.capacity:
            value = f"{name}, and any after it"
            problem = f"not counted: the first {MOST_OF_A_NODE} are: Kubernetes' own, then by name"
            problems.append(InputError(obj=obj, field=field, value=value, problem=problem))
        without = [name for name in names if name != PODS and table.find(name) is None]
        if without:
            value = without[0] if len(without) == 1 else f"{without[0]} and {len(without) - 1} more"
            problem = f"not counted: all nodes together have {MOST_RESOURCES} resources already"
            problems.append(InputError(obj=obj, field=field, value=value, problem=problem))
        return problems

    def metric_event(self, event: Event[NodeMetric]) -> None:
        """Take a change of a NodeMetric."""
        row = self._tables.nodes.row(event.new.metadata.name)
        if row is None:
            return
        deleted = event.change is Change.DELETED
        for load in self._plugins.loads:
            load.set_report(row, None if deleted else event.new)
        self._tell("NodeMetric", event)

    def topology_event(self, event: Event[NodeResourceTopology]) -> None:
        """Take a change of a NodeResourceTopology."""
        self._set_numa(event.new.metadata.name)
        self._tell("NodeResourceTopology", event)

    def device_event(self, event: Event[Device]) -> None:
        """Take a change of a Device."""
        name = event.new.metadata.name
        if event.change is Change.DELETED:
            self._plugins.devices.delete_device(name)
            self.complaints.forget(f"Device {name}")
        else:
            errors = self._plugins.devices.set_device(event.new)
            self.complaints.set(f"Device {name}", errors)
        self._tell("Device", event)

    def _set_numa(self, name: str) -> None:
        node = self._nodes.get(name)
        row = self._tables.nodes.row(name)
        if node is None or row is None:
            return
        facts, errors = parse_numa_facts(
            node, self._topologies.get(name), pod_level_alone=self._plugins.pod_level_alone
        )
        errors += tuple(
            InputError(
                obj=f"NodeResourceTopology {name}",
                field="zones",
                value=resource,
                problem=f"not counted: the NUMA nodes of all nodes together have {MOST_NUMA_NAMES}"
                " resources already",
            )
            for resource in self._plugins.numa.set_node(row, facts)
        )
        # Tables of profiles with other arguments read the same annotations.
        of_load = dict.fromkeys(str(e) for load in self._plugins.loads for e in load.problems(row))
        self.complaints.set(f"Node {name}", (*errors, *of_load))

    def _tell(self, kind: str, event: Event[Any]) -> None:
        action = {
            Change.ADDED: Action.ADD,
            Change.MODIFIED: Action.UPDATE_OTHER,
            Change.DELETED: Action.DELETE,
        }[event.change]
        self._queue.cluster_event(ClusterEvent(kind, action, event.old, event.new), self._clock())


def _resources_of(node: str) -> str:
    return f"Node {node}: status.allocatable"
