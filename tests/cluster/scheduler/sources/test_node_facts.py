"""NodeMetrics, NodeResourceTopologies and Devices into the tables, in any order of reading."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from apis.decode import json_decoder
from apis.nodemetric import NodeMetric
from apis.scheduling_pod import SchedulingNode
from apis.topology import NodeResourceTopology
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.events import Action
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.sources.node_facts import NodeFacts
from cluster.scheduler.sources.objects import MOST_OF_A_NODE, kept_node
from cluster.scheduler.tables.amounts import MOST_RESOURCES
from cluster.scheduler.tables.numa.facts import NO_FACTS, parse_numa_facts
from cluster.scheduler.tables.numa.table import MOST_NUMA_NAMES
from cluster.scheduler.tables.tables import Tables
from kube.cache import Cache, Change, Event
from tests.cluster.scheduler.devices.making import a_device_object, a_gpu
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology
from tests.cluster.scheduler.sources.heard import HeardQueue

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    filter: {enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}]}
""",
    obj="test",
)
_NOW = 1_800_000_000.0
_BAD_LABEL = {"node.koordinator.sh/numa-topology-policy": "Sometimes"}
_decode_metric = json_decoder(NodeMetric)


def _metric(cpu: str = "8") -> NodeMetric:
    usage = {"nodeUsage": {"resources": {"cpu": cpu, "memory": "1Gi"}}}
    status = {"updateTime": "2027-01-15T08:00:00Z", "nodeMetric": usage}
    return _decode_metric(msgspec.json.encode({"metadata": {"name": "n"}, "status": status}))


def _topology() -> NodeResourceTopology:
    return make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)


class _Bed:
    """The facts of node n, whose objects a test adds in any order."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.plugins = make_plugins(_CONFIGURATION, self.tables)
        (self.load,) = self.plugins.loads
        self.load.advance(_NOW)
        self.queue = HeardQueue()
        self.metrics: dict[str, NodeMetric] = {}
        self.topologies: dict[str, NodeResourceTopology] = {}
        self.facts = NodeFacts(
            self.tables,
            self.plugins,
            self.queue,
            cast(Cache[NodeMetric], self.metrics),
            cast(Cache[NodeResourceTopology], self.topologies),
            lambda: _NOW,
        )
        self._node: SchedulingNode | None = None

    def node(self, **members: Any) -> None:
        old, self._node = self._node, kept_node(make_node("n", **members))
        self.tables.upsert_node(self._node)
        change = Change.ADDED if old is None else Change.MODIFIED
        self.facts.node_event(Event(change, old, self._node))

    def delete_node(self) -> None:
        assert self._node is not None
        self.tables.delete_node("n")
        self.facts.node_event(Event(Change.DELETED, self._node, self._node))
        self._node = None

    def metric(self, metric: NodeMetric, change: Change = Change.ADDED) -> None:
        self.metrics["n"] = metric
        if change is Change.DELETED:
            del self.metrics["n"]
        self.facts.metric_event(Event(change, None, metric))

    def topology(self, change: Change = Change.ADDED) -> None:
        topology = self.topologies["n"] = _topology()
        if change is Change.DELETED:
            del self.topologies["n"]
        self.facts.topology_event(Event(change, None, topology))

    def used_cpu(self) -> int:
        """Return the milli-cores that the node was reported to use."""
        row = self.tables.nodes.row("n")
        assert row is not None
        return int(self.load.base[row, self.load.resources.index("cpu")])

    def gpus(self) -> list[int]:
        """Return the minors of the healthy GPUs."""
        row = self.tables.nodes.row("n")
        assert row is not None
        devices = self.plugins.devices.view(row)
        states = () if devices is None else devices.states.get("gpu", ())
        return [state.unit.minor for state in states if state.unit.healthy]

    def cpus(self) -> int:
        """Return how many CPUs are known of the node."""
        row = self.tables.nodes.row("n")
        assert row is not None
        topology = self.plugins.numa.facts(row).topology
        return 0 if topology is None else topology.cpus.bit_count()


@pytest.mark.parametrize("node_first", [True, False])
def test_a_report_counts_whether_it_or_its_node_is_read_first(node_first: bool) -> None:
    bed = _Bed()
    if node_first:
        bed.node()
    bed.metric(_metric())
    if not node_first:
        bed.node()
    assert bed.used_cpu() == 8000
    bed.metric(_metric("4"), Change.MODIFIED)
    assert bed.used_cpu() == 4000
    bed.metric(_metric("4"), Change.DELETED)
    assert bed.used_cpu() == 0


@pytest.mark.parametrize("node_first", [True, False])
def test_cpus_count_whether_the_topology_or_the_node_is_read_first(node_first: bool) -> None:
    bed = _Bed()
    for step in (bed.node, bed.topology) if node_first else (bed.topology, bed.node):
        step()
    assert bed.cpus() == 16
    bed.topology(Change.DELETED)
    row = bed.tables.nodes.row("n")
    assert row is not None
    assert bed.plugins.numa.facts(row) == NO_FACTS


def test_a_node_that_comes_back_has_nothing_of_what_was_deleted_meanwhile() -> None:
    bed = _Bed()
    bed.node(labels=_BAD_LABEL)
    bed.metric(_metric())
    bed.topology()
    bed.delete_node()
    bed.metric(_metric(), Change.DELETED)
    bed.topology(Change.DELETED)
    bed.node()
    assert (bed.used_cpu(), bed.cpus()) == (0, 0)


def test_pods_are_tried_after_each_change_and_not_for_a_report_without_a_node() -> None:
    bed = _Bed()
    bed.metric(_metric())
    bed.topology()
    assert bed.queue.heard() == [("NodeResourceTopology", Action.ADD)]
    bed.node()
    bed.metric(_metric("3"), Change.MODIFIED)
    bed.metric(_metric("3"), Change.DELETED)
    bed.topology(Change.DELETED)
    assert bed.queue.heard() == [
        ("NodeMetric", Action.UPDATE_OTHER),
        ("NodeMetric", Action.DELETE),
        ("NodeResourceTopology", Action.DELETE),
    ]


def test_devices_come_and_go_and_have_pods_tried() -> None:
    bed = _Bed()
    bed.node()
    device = a_device_object("n", [a_gpu(0)])
    bed.facts.device_event(Event(Change.ADDED, None, device))
    assert bed.gpus() == [0]
    bed.facts.device_event(Event(Change.DELETED, device, device))
    assert bed.gpus() == []
    assert bed.queue.heard() == [("Device", Action.ADD), ("Device", Action.DELETE)]


def test_what_cannot_be_used_is_logged_once_and_named_until_it_is_right_or_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bed = _Bed()
    bed.node(labels=_BAD_LABEL)
    (problem,) = bed.facts.complaints.held["Node n"]
    assert "Sometimes" in problem
    bed.node(labels=_BAD_LABEL, annotations={"a": "b"})
    assert [record.getMessage() for record in caplog.records] == [problem]
    bed.node()
    assert not bed.facts.complaints.held
    bed.node(labels=_BAD_LABEL)
    assert bed.facts.complaints.held == {"Node n": (problem,)}
    bed.delete_node()
    assert not bed.facts.complaints.held


def test_thresholds_that_cannot_be_read_are_named_beside_other_problems() -> None:
    bed = _Bed()
    thresholds = {"scheduling.koordinator.sh/usage-thresholds": '{"usageThresholds":{"cpu":200}}'}
    bed.node(labels=_BAD_LABEL, annotations=thresholds)
    label, load = bed.facts.complaints.held["Node n"]
    assert "Sometimes" in label
    assert load.startswith("Node n: ") and "usageThresholds.cpu" in load
    bed.node()
    assert not bed.facts.complaints.held


def test_a_node_with_too_many_resources_has_the_first_and_takes_few_columns() -> None:
    bed = _Bed()
    names = [f"example.com/r{number:04}" for number in range(3 * MOST_RESOURCES)]
    bed.node(allocatable=dict.fromkeys(names, "1"))
    table = bed.tables.nodes.resources
    (problem,) = bed.facts.complaints.held["Node n: status.allocatable"]
    assert problem == (
        "Node n: status.allocatable = 'example.com/r0125, and any after it': not counted: the "
        "first 128 are: Kubernetes' own, then by name"
    )
    assert table.find("cpu") is not None and table.find(names[0]) is not None
    assert table.find(names[MOST_OF_A_NODE]) is None
    bed.node()
    assert not bed.facts.complaints.held
    # A node that changes its names again and again takes the columns of those that are gone.
    for first in range(0, len(names), 100):
        bed.node(allocatable=dict.fromkeys(names[first : first + 100], "1"))
        assert not bed.facts.complaints.held
    assert len(table) == MOST_RESOURCES
    nodes = bed.tables.nodes
    bed.node(allocatable={"example.com/new": "7"})
    assert nodes.allocatable[nodes.row("n"), table.find("example.com/new")] == 7


def test_resources_of_numa_nodes_beyond_those_of_all_nodes_are_named_and_count_later() -> None:
    bed = _Bed()
    table = bed.plugins.numa
    names = [f"example.com/r{number:04}" for number in range(MOST_NUMA_NAMES)]
    for first in range(0, len(names) - 2, 32):
        name = f"other-{first}"
        zones = {0: dict.fromkeys(names[first : first + 32], "1")}
        of_other = bed.tables.upsert_node(make_node(name))
        facts, _ = parse_numa_facts(make_node(name), make_topology(name, zones=zones))
        assert table.set_node(of_other, facts) == []
    bed.topologies["n"] = make_topology("n", zones={0: {"cpu": "4", names[0]: "2"}})
    bed.node()
    (problem,) = bed.facts.complaints.held["Node n"]
    assert problem == (
        "NodeResourceTopology n: zones = 'cpu': not counted: the NUMA nodes of all nodes together "
        "have 128 resources already"
    )
    row = bed.tables.nodes.row("n")
    assert row is not None
    assert "cpu" not in table.total and len(table.total) == MOST_NUMA_NAMES
    # The exact allocation sees what the columns see.
    assert dict(table.state(row).numa[0].total) == {names[0]: 2}
    assert table.total[names[0]][row, 0] == 2
    other = bed.tables.nodes.row("other-32")
    assert other is not None
    table.forget(other)
    bed.node(labels={"changed": "yes"})
    assert not bed.facts.complaints.held
    assert table.total["cpu"][row, 0] == 4000
    # A node that changes its names takes the places of its own former ones.
    for number in range(3):
        more = {0: {f"example.com/x{number}-{at}": "1" for at in range(32)}}
        bed.topologies["n"] = make_topology("n", zones=more)
        bed.node(labels={"changed": str(number)})
        assert not bed.facts.complaints.held
        assert len(table.total) == MOST_NUMA_NAMES


def test_a_node_with_as_many_resources_as_count_is_not_named() -> None:
    bed = _Bed()
    own = len(kept_node(make_node("n")).status.allocatable)
    names = [f"example.com/r{number:04}" for number in range(MOST_OF_A_NODE - own)]
    bed.node(allocatable=dict.fromkeys(names, "1"))
    assert not bed.facts.complaints.held
    assert bed.tables.nodes.resources.find(names[-1]) is not None
    bed.node(allocatable=dict.fromkeys([*names, "example.com/z"], "1"))
    (problem,) = bed.facts.complaints.held["Node n: status.allocatable"]
    assert "'example.com/z, and any after it'" in problem
    assert bed.tables.nodes.resources.find("example.com/z") is None


def test_a_resource_beyond_the_columns_of_all_nodes_is_named_and_counts_when_one_is_free() -> None:
    bed = _Bed()
    names = [f"example.com/r{number:04}" for number in range(MOST_RESOURCES)]
    others = [
        make_node(f"other-{first}", allocatable=dict.fromkeys(names[first : first + 100], "1"))
        for first in range(0, len(names), 100)
    ]
    for other in others:
        bed.tables.upsert_node(other)
    table, nodes = bed.tables.nodes.resources, bed.tables.nodes
    assert table.left == 0
    bed.node(allocatable={"example.com/new": "7", names[5]: "2"})
    (problem,) = bed.facts.complaints.held["Node n: status.allocatable"]
    assert "example.com/new" in problem
    assert problem.endswith("all nodes together have 1024 resources already")
    assert nodes.allocatable[nodes.row("n"), table.find(names[5])] == 2
    bed.tables.delete_node("other-100")
    bed.node(allocatable={"example.com/new": "7", names[5]: "2"})
    assert not bed.facts.complaints.held
    assert nodes.allocatable[nodes.row("n"), table.find("example.com/new")] == 7
    assert nodes.allocatable[nodes.row("n"), table.find(names[5])] == 2
