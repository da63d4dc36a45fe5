"""What Nodes and NodeResourceTopologies say about CPUs and NUMA nodes; a fault costs one fact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_TOPOLOGY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_POD_CPU_ALLOCS,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    LABEL_CPU_BIND_POLICY,
    LABEL_NUMA_ALLOCATE_STRATEGY,
    LABEL_NUMA_TOPOLOGY_POLICY,
)
from apis.numa import NodeCPUBindPolicy, NUMAAllocateStrategy, NUMATopologyPolicy
from cluster.scheduler.tables.numa.facts import (
    MOST_NUMA_RESOURCES,
    NO_FACTS,
    amplify,
    parse_numa_facts,
)
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology

GI = 1024**3


def facts_of(
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    of_topology: dict[str, str] | None = None,
    **topology: Any,
) -> Any:
    """Return (facts, errors as texts) of a node with 16 CPUs in two NUMA nodes."""
    made = {"cpus": SMALL.cpus(), "zones": SMALL_ZONES} | topology
    node = make_node("n", labels=labels, annotations=annotations)
    facts, errors = parse_numa_facts(node, make_topology("n", annotations=of_topology, **made))
    return facts, [str(error) for error in errors]


def test_a_node_without_a_topology_object() -> None:
    assert parse_numa_facts(make_node("n"), None) == (NO_FACTS, ())


def test_all_reserved_cpus_together() -> None:
    allocs = [
        {"namespace": "a", "name": "g", "cpuset": "4-5", "managedByKubelet": True},
        {"namespace": "a", "name": "k", "cpuset": "6-7"},
    ]
    facts, errors = facts_of(
        annotations={
            ANNOTATION_NODE_RESERVATION: json.dumps({"reservedCPUs": "0"}),
            ANNOTATION_SYSTEM_QOS_RESOURCE: json.dumps({"cpuset": "8-9,99"}),
        },
        of_topology={
            ANNOTATION_CPU_MANAGER_POLICY: json.dumps({"policy": "static", "reservedCPUs": "1"}),
            ANNOTATION_POD_CPU_ALLOCS: json.dumps(allocs),
            ANNOTATION_SYSTEM_QOS_RESOURCE: json.dumps({"cpuset": "15"}),
        },
    )
    assert not errors
    assert str(CpuSet.of_mask(facts.reserved)) == "0-1,4-5,8-9"
    assert facts.zones[0] == {"cpu": 4000, "memory": 32 * GI}
    assert facts.zones[1] == {"cpu": 6000, "memory": 32 * GI}


@pytest.mark.parametrize(
    ("of_node", "of_topology", "reserved"),
    [
        ({"resources": {"cpu": "2"}}, {"resources": {"cpu": "2"}, "reservedCPUs": "0-1"}, "0-1"),
        ({"reservedCPUs": "4-5"}, {"reservedCPUs": "0-1"}, "4-5"),
        (None, {"reservedCPUs": "0-1"}, "0-1"),
        ({"resources": {"cpu": "2"}}, {}, ""),
        ({"reservedCPUs": "a"}, {"reservedCPUs": "0-1"}, "0-1"),
    ],
)
def test_koordlet_chooses_the_cpus_of_a_reservation_without_a_list(
    of_node: Any, of_topology: Any, reserved: str
) -> None:
    facts, errors = facts_of(
        annotations={ANNOTATION_NODE_RESERVATION: json.dumps(of_node)} if of_node else {},
        of_topology={ANNOTATION_NODE_RESERVATION: json.dumps(of_topology)},
    )
    assert str(CpuSet.of_mask(facts.reserved)) == reserved
    assert len(errors) == (of_node == {"reservedCPUs": "a"})


def test_system_cpus_stay_reserved_while_the_administrators_annotation_is_bad() -> None:
    facts, errors = facts_of(
        annotations={ANNOTATION_SYSTEM_QOS_RESOURCE: '{"cpuset":"a"}'},
        of_topology={ANNOTATION_SYSTEM_QOS_RESOURCE: '{"cpuset":"15"}'},
    )
    assert str(CpuSet.of_mask(facts.reserved)) == "15"
    assert len(errors) == 1


def test_shared_system_cpus_are_not_reserved() -> None:
    shared = json.dumps({"cpuset": "8-9", "cpusetExclusive": False})
    facts, errors = facts_of(of_topology={ANNOTATION_SYSTEM_QOS_RESOURCE: shared})
    assert (facts.reserved, errors) == (0, [])


@pytest.mark.parametrize(
    ("label", "policies", "policy"),
    [
        ("", (), ""),
        ("", ("None",), ""),
        ("", ("BestEffort",), "BestEffort"),
        ("", ("Restricted",), "Restricted"),
        ("", ("SingleNUMANodePodLevel",), "SingleNUMANode"),
        ("", ("SingleNUMANodeContainerLevel",), "SingleNUMANode"),
        ("", ("RestrictedPodLevel",), "Restricted"),
        ("", ("SomethingElse", "BestEffort"), "BestEffort"),
        ("BestEffort", ("SingleNUMANodePodLevel",), "BestEffort"),
    ],
)
def test_the_label_counts_before_kubelets_policy(
    label: str, policies: tuple[str, ...], policy: str
) -> None:
    facts, errors = facts_of(
        labels={LABEL_NUMA_TOPOLOGY_POLICY: label} if label else {}, policies=policies
    )
    assert (facts.policy, errors) == (NUMATopologyPolicy(policy), [])


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("SingleNUMANodePodLevel", "SingleNUMANode"),
        ("SingleNUMANodeContainerLevel", ""),
        ("RestrictedContainerLevel", ""),
        ("RestrictedPodLevel", ""),
        ("BestEffortPodLevel", ""),
        ("Restricted", "Restricted"),
        ("BestEffort", "BestEffort"),
    ],
)
def test_kubelets_policies_that_upstream_knows(written: str, policy: str) -> None:
    topology = make_topology("n", policies=(written,))
    facts, errors = parse_numa_facts(make_node("n"), topology, pod_level_alone=True)
    assert (facts.policy, errors) == (NUMATopologyPolicy(policy), ())


def test_amplification_by_the_node_and_by_the_topology() -> None:
    ratios = {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu":1.50,"memory":1.20}'}
    reserved = {ANNOTATION_CPU_MANAGER_POLICY: '{"policy":"static","reservedCPUs":"0"}'}
    facts, _ = facts_of(annotations=ratios, of_topology=reserved)
    assert facts.cpu_ratio == 150
    assert facts.zones[0] == {"cpu": 10500, "memory": amplify(32 * GI, 120)}
    facts, _ = facts_of(annotations=ratios, of_topology=reserved | ratios)
    assert facts.zones[0] == {"cpu": 6500, "memory": 32 * GI}


@pytest.mark.parametrize(
    ("amount", "ratio", "amplified"),
    [(1000, 150, 1500), (1001, 101, 1012), (7, 100, 7), (7, 50, 7)],
)
def test_amplify_rounds_up_and_never_lessens(amount: int, ratio: int, amplified: int) -> None:
    assert amplify(amount, ratio) == amplified


HOSTILE_NODES = [
    ({LABEL_CPU_BIND_POLICY: "Full"}, {}, "expected one of None, FullPCPUsOnly, SpreadByPCPUs"),
    ({LABEL_NUMA_ALLOCATE_STRATEGY: "Random"}, {}, "expected one of MostAllocated"),
    ({LABEL_NUMA_TOPOLOGY_POLICY: "Single"}, {}, "expected one of BestEffort"),
    ({}, {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu":"much"}'}, "cpu"),
    ({}, {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu":-1}'}, "cpu"),
    ({}, {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu":1e300}'}, "cpu"),
    ({}, {ANNOTATION_NODE_RESERVATION: '{"reservedCPUs":"5-1"}'}, "reservedCPUs"),
    ({}, {ANNOTATION_NODE_RESERVATION: "x" * 1_000_000}, "longer than"),
    ({}, {ANNOTATION_SYSTEM_QOS_RESOURCE: "[" * 100_000}, "not valid JSON"),
]


@pytest.mark.parametrize(("labels", "annotations", "named"), HOSTILE_NODES)
def test_a_bad_field_of_a_node_costs_that_fact_alone(
    labels: dict[str, str], annotations: dict[str, str], named: str
) -> None:
    facts, errors = facts_of(labels=labels, annotations=annotations)
    assert facts == facts_of()[0]
    assert len(errors) == 1
    assert errors[0].startswith("Node n: metadata.")
    assert named in errors[0]


def cpu_list(*cpus: tuple[Any, int, int, int]) -> str:
    """Return a cpu-topology of (id, core, socket, NUMA node)."""
    detail = [{"id": n, "core": core, "socket": s, "node": numa} for n, core, s, numa in cpus]
    return json.dumps({"detail": detail})


@pytest.mark.parametrize(
    ("key", "text", "named"),
    [
        (ANNOTATION_CPU_TOPOLOGY, cpu_list((0, 0, 0, 0), (0, 1, 0, 0)), "CPU 0 is listed twice"),
        (ANNOTATION_CPU_TOPOLOGY, cpu_list((-1, 0, 0, 0)), "negative number"),
        (ANNOTATION_CPU_TOPOLOGY, cpu_list((0, -1, 0, 0)), "negative number"),
        (ANNOTATION_CPU_TOPOLOGY, cpu_list((9999, 0, 0, 0)), "detail[0].id"),
        (ANNOTATION_CPU_TOPOLOGY, cpu_list(("0", 0, 0, 0)), "detail[0].id"),
        (ANNOTATION_CPU_TOPOLOGY, "{", "not valid JSON"),
        (ANNOTATION_CPU_MANAGER_POLICY, '{"reservedCPUs":"a"}', "reservedCPUs"),
        (ANNOTATION_POD_CPU_ALLOCS, '[{"cpuset":"1-0"}]', "cpuset"),
        (ANNOTATION_POD_CPU_ALLOCS, '{"cpuset":"0"}', "pod-cpu-allocs"),
        (ANNOTATION_RESOURCE_AMPLIFICATION_RATIO, "[1.5]", "ratio"),
    ],
)
def test_a_bad_annotation_of_a_topology_costs_that_fact_alone(
    key: str, text: str, named: str
) -> None:
    facts, errors = facts_of(of_topology={key: text})
    assert len(errors) == 1
    assert errors[0].startswith("NodeResourceTopology n: metadata.annotations")
    assert named in errors[0]
    assert list(facts.zones) == [0, 1]
    assert (facts.topology is None) is (key == ANNOTATION_CPU_TOPOLOGY)


def test_unknown_sockets_and_numa_nodes_count_as_0() -> None:
    facts, errors = facts_of(
        cpus=(), of_topology={ANNOTATION_CPU_TOPOLOGY: cpu_list((0, 0, -1, -1), (1, 0, -1, -1))}
    )
    assert not errors
    assert dict(facts.topology.numa) == {0: 3}


def test_more_than_eight_numa_nodes_are_not_scheduled() -> None:
    facts, errors = facts_of(zones={number: {"memory": "1Gi"} for number in range(9)})
    assert facts.zones == {}
    assert "at most 8 NUMA nodes" in errors[0]
    assert facts.topology is not None


def test_of_too_many_resources_the_first_count() -> None:
    odd = {f"example.com/r{number:02}": "1" for number in range(MOST_NUMA_RESOURCES)}
    facts, errors = facts_of(zones={0: odd, 1: odd | {"cpu": "8", "hugepages-2Mi": "1Gi"}})
    assert errors == [
        "NodeResourceTopology n: zones = '34 resources': the first 32 count: those of Kubernetes, "
        "then by name"
    ]
    first = sorted(odd)[: MOST_NUMA_RESOURCES - 2]
    assert sorted(facts.zones[0]) == first
    assert sorted(facts.zones[1]) == ["cpu", *first, "hugepages-2Mi"]


def test_other_zones_are_ignored() -> None:
    facts, errors = facts_of(zones={})
    assert (dict(facts.zones), errors) == ({}, [])


def test_labels_and_strategies() -> None:
    facts, _ = facts_of(
        labels={
            LABEL_CPU_BIND_POLICY: "SpreadByPCPUs",
            LABEL_NUMA_ALLOCATE_STRATEGY: "DistributeEvenly",
        }
    )
    assert facts.bind_policy is NodeCPUBindPolicy.SPREAD_BY_PCPUS
    assert facts.strategy is NUMAAllocateStrategy.DISTRIBUTE_EVENLY


def test_equal_machines_share_one_topology() -> None:
    assert facts_of()[0].topology is facts_of()[0].topology


@pytest.mark.parametrize(
    ("policy", "options", "bound", "strategy"),
    [
        ("static", {}, NodeCPUBindPolicy.NONE, NUMAAllocateStrategy.UNSET),
        (
            "static",
            {"full-pcpus-only": "true"},
            NodeCPUBindPolicy.FULL_PCPUS_ONLY,
            NUMAAllocateStrategy.UNSET,
        ),
        (
            "static",
            {"full-pcpus-only": "false", "distribute-cpus-across-numa": "true"},
            NodeCPUBindPolicy.NONE,
            NUMAAllocateStrategy.DISTRIBUTE_EVENLY,
        ),
        (
            "none",
            {"full-pcpus-only": "true", "distribute-cpus-across-numa": "true"},
            NodeCPUBindPolicy.NONE,
            NUMAAllocateStrategy.UNSET,
        ),
    ],
)
def test_options_of_kubelets_static_policy_hold_for_its_node(
    policy: str,
    options: dict[str, str],
    bound: NodeCPUBindPolicy,
    strategy: NUMAAllocateStrategy,
) -> None:
    written = json.dumps({"policy": policy, "options": options})
    facts, errors = facts_of(of_topology={ANNOTATION_CPU_MANAGER_POLICY: written})
    assert (facts.bind_policy, facts.strategy, errors) == (bound, strategy, [])
