"""CPU sets: upstream's table row by row, joined pools, quotas, and sets that never overlap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
    BATCH_CPU,
)
from apis.qos import KubeQoS, QoSClass
from hooks.facts import KernelFacts
from hooks.policies.cpuset_allocator import POLICY
from hooks.subject import HostAppSubject
from linux.resources import UNLIMITED, Resource
from tests.hooks.making import (
    a_container,
    a_pod,
    a_pod_subject,
    a_sandbox,
    decide,
    engine,
    node,
    only_fault,
    topology,
    values,
)

G, BU, BE = KubeQoS.GUARANTEED, KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT

LS_POOLS = [
    {"socket": 0, "node": 0, "cpuset": "0-3"},
    {"socket": 1, "node": 1, "cpuset": "8-11"},
]
BE_POOLS = [
    {"socket": 0, "node": 0, "cpuset": "0-5"},
    {"socket": 1, "node": 1, "cpuset": "8-13"},
]
TWO_NODES: dict[str, Any] = {
    ANNOTATION_CPU_SHARED_POOLS: LS_POOLS,
    ANNOTATION_BE_CPU_SHARED_POOLS: BE_POOLS,
}
SYSTEM = {ANNOTATION_SYSTEM_QOS_RESOURCE: {"cpuset": "14-15"}}
STATIC = {ANNOTATION_CPU_MANAGER_POLICY: {"policy": "static", "reservedCPUs": "0"}}
BE_MANAGER = {"BECPUManager": True}

OWN = {"cpuset": "4-5,7"}
NUMA_1 = {"numaNodeResources": [{"node": 1, "resources": {"cpu": "4"}}]}
NUMA_1_0 = {"numaNodeResources": [{"node": n, "resources": {"cpu": "4"}} for n in (1, 0)]}
NUMA_1_BATCH = {"numaNodeResources": [{"node": 1, "resources": {BATCH_CPU: "2k"}}]}
NUMA_1_EMPTY = {"numaNodeResources": [{"node": 1, "resources": {"cpu": "0", "memory": "1Gi"}}]}
NUMA_7 = {"numaNodeResources": [{"node": 7, "resources": {"cpu": "4"}}]}

ALL = "0-3,8-11"

# row, QoS, Kubernetes QoS, resource-status, topology annotations (None: no object), gates, CPUs
ROWS = [
    (2, "LSR", G, OWN, TWO_NODES, {}, "4-5,7"),
    (2, "LSE", G, {"cpuset": " 7,4-5"}, TWO_NODES, {}, "4-5,7"),
    (2, "BE", BE, OWN, TWO_NODES, {}, "4-5,7"),
    (2, "", BU, OWN, TWO_NODES, {}, "4-5,7"),
    (2, "LSR", G, OWN, None, {}, "4-5,7"),
    (2, "LSR", G, OWN | NUMA_1, TWO_NODES | STATIC, {}, "4-5,7"),
    (3, "LS", BU, None, None, {}, None),
    (3, "LS", BU, NUMA_1, None, {}, None),
    (4, "BE", BE, NUMA_1_BATCH, TWO_NODES, BE_MANAGER, "8-13"),
    (4, "BE", BU, NUMA_1_0, TWO_NODES, BE_MANAGER, "0-5,8-13"),
    (8, "BE", BE, NUMA_1_BATCH, TWO_NODES, {}, None),  # 4 with the gate off falls through
    (5, "LS", BU, NUMA_1, TWO_NODES, {}, "8-11"),
    (5, "LS", BU, NUMA_1_0, TWO_NODES, {}, ALL),
    (5, "", BU, NUMA_1, TWO_NODES | STATIC, {}, "8-11"),
    (5, "", BU, NUMA_1_BATCH, TWO_NODES, {}, "8-11"),
    (5, "SYSTEM", G, NUMA_1, TWO_NODES | SYSTEM, {}, "8-11"),
    (7, "LS", BU, NUMA_1_EMPTY, TWO_NODES, {}, ALL),  # no CPU on that node: not an allocation
    (7, "LS", BU, NUMA_7, TWO_NODES, {}, ALL),  # a node without a pool
    (6, "SYSTEM", G, None, TWO_NODES | SYSTEM, {}, "14-15"),
    (6, "SYSTEM", BE, None, TWO_NODES | SYSTEM | STATIC, {}, "14-15"),
    (7, "LS", BU, None, TWO_NODES, {}, ALL),
    (7, "LS", BE, None, TWO_NODES, {}, ALL),
    (7, "LS", G, None, TWO_NODES | STATIC, {}, ALL),
    (8, "BE", BE, None, TWO_NODES, BE_MANAGER, None),
    (8, "", BE, None, TWO_NODES, {}, None),
    (8, "SYSTEM", BE, None, TWO_NODES, {}, None),
    (9, "", BU, None, TWO_NODES | STATIC, {}, None),
    (9, "LSR", G, None, TWO_NODES | STATIC, {}, None),
    (9, "BE", BU, None, TWO_NODES | STATIC, {}, None),
    (10, "", G, None, TWO_NODES, {}, ALL),
    (10, "", BU, {}, TWO_NODES, {}, ALL),
    (10, "LSE", G, None, TWO_NODES, {}, ALL),
    (10, "LSR", G, None, TWO_NODES, {}, ALL),
    (10, "SYSTEM", BU, None, TWO_NODES, {}, ALL),
    (10, "BE", BU, None, TWO_NODES, {}, ALL),
    (10, "", BU, None, TWO_NODES | {ANNOTATION_CPU_MANAGER_POLICY: {"policy": "none"}}, {}, ALL),
]


def _pod(qos: str, kube_qos: KubeQoS, status: Any) -> Any:
    annotations = {} if status is None else {ANNOTATION_RESOURCE_STATUS: status}
    return a_pod(qos, kube_qos, annotations=annotations)


@pytest.mark.parametrize(("row", "qos", "kube_qos", "status", "nrt", "gates", "cpus"), ROWS)
@pytest.mark.parametrize("make", [a_container, a_sandbox])
def test_the_ten_rows(
    row: int, qos: str, kube_qos: KubeQoS, status: Any, nrt: Any, gates: Any, cpus: Any, make: Any
) -> None:
    facts = None if nrt is None else topology(nrt)
    decision = decide(make(_pod(qos, kube_qos, status)), node(topology=facts, gates=gates), POLICY)
    wanted = None if cpus is None else CpuSet.parse(cpus)
    assert decision.value(Resource.CPUSET_CPUS) == wanted


def test_row_1_a_bad_status_sets_nothing_and_is_named() -> None:
    pod = _pod("LSR", G, '{"cpuset":"0-3,"}')
    for subject in (a_container(pod), a_sandbox(pod), a_pod_subject(pod)):
        decision = decide(subject, node(topology=topology(TWO_NODES)), POLICY)
        assert decision.outcomes == {}
        message = only_fault(decision)
        assert "Pod default/web" in message
        assert f'{ANNOTATION_RESOURCE_STATUS}"].cpuset' in message and "0-3," in message


@pytest.mark.parametrize(
    ("pools", "cpus"),
    [
        ([{"node": 0, "cpuset": "0-3"}, {"node": 1, "cpuset": ""}], "0-3"),
        ([{"node": 0, "cpuset": ""}, {"node": 1, "cpuset": ""}], None),
        ([], None),
        ([{"node": 1, "cpuset": "4-7"}, {"node": 0, "cpuset": "0-3"}], "0-7"),
        ([{"node": 0, "cpuset": "0-2"}, {"node": 0, "cpuset": "2-5"}], "0-5"),
    ],
)
def test_pools_are_joined_as_sets_and_empty_ones_add_nothing(pools: Any, cpus: Any) -> None:
    inputs = node(topology=topology({ANNOTATION_CPU_SHARED_POOLS: pools}))
    decision = decide(a_container(a_pod("LS")), inputs, POLICY)
    assert decision.value(Resource.CPUSET_CPUS) == (None if cpus is None else CpuSet.parse(cpus))


@pytest.mark.parametrize(
    ("status", "there", "cpus", "said"),
    [
        (None, "0-15", ALL, ""),
        (None, "1-9", "1-3,8-9", ""),
        (None, "16-31", "", ""),  # another machine's report
        (NUMA_1, "0-3", "0-3", "the share pools of the allocated NUMA nodes 1 are empty"),
        (OWN, "0-6", "4-5", "this node has no CPU 7 for pods"),
    ],
)
def test_cpus_that_the_node_lacks_are_left_out(
    status: Any, there: str, cpus: str, said: str
) -> None:
    """The kernel refuses them, and so the container."""
    kernel = KernelFacts(pods_cpus=CpuSet.parse(there))
    inputs = node(topology=topology(TWO_NODES), kernel=kernel)
    for make in (a_container, a_sandbox):
        decision = decide(make(_pod("LS", BU, status)), inputs, POLICY)
        outcome = decision.outcomes.get((Resource.CPUSET_CPUS, ""))
        found = (str(outcome.value), outcome.degraded) if outcome is not None else ("", "")
        assert found == (cpus, said)
    state = engine(inputs, POLICY).state(POLICY.name)
    assert state is not None
    assert bool(POLICY.degraded(state.rule)) == (there != "0-15")


def test_an_empty_pool_of_the_allocated_node_is_degraded() -> None:
    nrt = {ANNOTATION_CPU_SHARED_POOLS: [LS_POOLS[0], {"node": 1, "cpuset": ""}]}
    decision = decide(a_container(_pod("LS", BU, NUMA_1)), node(topology=topology(nrt)), POLICY)
    outcome = decision.outcomes[Resource.CPUSET_CPUS, ""]
    assert str(outcome.value) == "0-3"
    assert "NUMA nodes 1" in outcome.degraded


def test_an_allocation_of_which_nothing_is_there_is_an_error_and_keeps_the_quota() -> None:
    inputs = node(topology=topology(TWO_NODES), kernel=KernelFacts(pods_cpus=CpuSet.parse("0-3")))
    decision = decide(a_container(_pod("LSR", G, OWN)), inputs, POLICY)
    assert decision.outcomes == {}
    message = only_fault(decision)
    assert f'{ANNOTATION_RESOURCE_STATUS}"].cpuset' in message and "4-5,7" in message
    assert "only 0-3" in message


def test_an_lsr_pod_without_allocated_cpus_is_degraded() -> None:
    decision = decide(a_container(a_pod("LSR", G)), node(topology=topology(TWO_NODES)), POLICY)
    assert "without allocated CPUs" in decision.outcomes[Resource.CPUSET_CPUS, ""].degraded


@pytest.mark.parametrize("make", [a_container, a_pod_subject])
@pytest.mark.parametrize(
    ("status", "quota"), [(OWN, UNLIMITED), (NUMA_1, None), ({}, None), (None, None)]
)
def test_cpus_of_its_own_need_no_quota(make: Any, status: Any, quota: Any) -> None:
    subject = make(_pod("LSR", G, status))
    inputs = node(topology=topology(TWO_NODES))
    assert decide(subject, inputs, POLICY).value(Resource.CPU_CFS_QUOTA) == quota


def test_disable_unset_cpu_quota_keeps_the_quota() -> None:
    inputs = node(topology=topology(TWO_NODES), disable_unset_cpu_quota=True)
    container = decide(a_container(_pod("LSR", G, OWN)), inputs, POLICY)
    assert set(values(container)) == {"cpuset.cpus"}
    assert values(decide(a_pod_subject(_pod("LSR", G, OWN)), inputs, POLICY)) == {}


def test_a_sandbox_gets_cpus_and_no_quota() -> None:
    decision = decide(a_sandbox(_pod("LSR", G, OWN)), node(topology=topology(TWO_NODES)), POLICY)
    assert set(values(decision)) == {"cpuset.cpus"}


@pytest.mark.parametrize("qos", list(QoSClass))
def test_only_ls_host_applications_get_the_share_pools(qos: QoSClass) -> None:
    subject = HostAppSubject(name="nginx", qos=qos, cgroup="system.slice/nginx.service")
    wanted = CpuSet.parse(ALL) if qos is QoSClass.LS else None
    decision = decide(subject, node(topology=topology(TWO_NODES)), POLICY)
    assert decision.value(Resource.CPUSET_CPUS) == wanted
    assert decision.faults == ()
    assert values(decide(subject, node(), POLICY)) == {}


def test_sources_name_the_field() -> None:
    inputs = node(topology=topology(TWO_NODES | SYSTEM), gates=BE_MANAGER)

    def source(qos: str, kube_qos: KubeQoS, status: Any) -> str:
        decision = decide(a_container(_pod(qos, kube_qos, status)), inputs, POLICY)
        return decision.outcomes[Resource.CPUSET_CPUS, ""].winner.source

    status = f"annotation {ANNOTATION_RESOURCE_STATUS}"
    nrt = "NodeResourceTopology annotation"
    assert source("LSR", G, OWN) == f"{status}.cpuset"
    assert source("BE", BE, NUMA_1_BATCH) == f"{status}.numaNodeResources"
    assert source("SYSTEM", G, None) == f"{nrt} {ANNOTATION_SYSTEM_QOS_RESOURCE}"
    assert source("LS", BU, None) == f"{nrt} {ANNOTATION_CPU_SHARED_POOLS}"


def _system_cpus(built: Any) -> tuple[str, str]:
    outcome = built.decide(a_container(a_pod("SYSTEM", G))).outcomes[Resource.CPUSET_CPUS, ""]
    return str(outcome.value), outcome.winner.source


def test_the_node_itself_may_set_cpus_apart_for_system_pods() -> None:
    """An administrator writes the Node; upstream's koordlet repeats it in the other object."""
    of_node = {ANNOTATION_SYSTEM_QOS_RESOURCE: '{"cpuset":"12-13"}'}
    for nrt in (TWO_NODES, TWO_NODES | SYSTEM):
        inputs = node(topology=topology(nrt), annotations=of_node)
        cpus, source = _system_cpus(engine(inputs, POLICY))
        assert cpus == "12-13" and source == f"Node annotation {ANNOTATION_SYSTEM_QOS_RESOURCE}"
    without = node(annotations=of_node)
    assert values(decide(a_container(a_pod("SYSTEM", G)), without, POLICY)) == {}  # row 3


@pytest.mark.parametrize("text", ["{", '{"cpuset":"3-1"}', '{"cpuset":7}'])
def test_a_bad_annotation_of_the_node_freezes_no_share_pool(text: str) -> None:
    bad = {ANNOTATION_SYSTEM_QOS_RESOURCE: text}
    of_node = {ANNOTATION_SYSTEM_QOS_RESOURCE: '{"cpuset":"12-13"}'}
    fresh = engine(node(topology=topology(TWO_NODES | SYSTEM), annotations=bad), POLICY)
    assert _system_cpus(fresh)[0] == "14-15"
    good = engine(node(topology=topology(TWO_NODES), annotations=of_node), POLICY)
    shrunk = {ANNOTATION_CPU_SHARED_POOLS: [{"node": 0, "cpuset": "0-1"}]}
    built = engine(node(topology=topology(shrunk), annotations=bad), POLICY, previous=good)
    assert _system_cpus(built)[0] == "12-13"
    assert str(built.decide(a_container(a_pod("LS"))).value(Resource.CPUSET_CPUS)) == "0-1"
    state = built.state(POLICY.name)
    assert state is not None and "Node n1" in state.problem
    assert ANNOTATION_SYSTEM_QOS_RESOURCE in state.problem


def test_without_a_topology_the_policy_is_degraded() -> None:
    def degraded(facts: Any) -> str:
        state = engine(node(topology=facts), POLICY).state(POLICY.name)
        assert state is not None and state.active
        return POLICY.degraded(state.rule)

    assert "NodeResourceTopology" in degraded(None)
    assert degraded(topology(TWO_NODES)) == ""


@st.composite
def _node_with_allocations(draw: st.DrawFn) -> tuple[Any, list[set[int]]]:
    """A node whose pools are what disjoint allocations leave over, and these allocations."""
    owner = draw(st.lists(st.integers(0, 4), min_size=16, max_size=16))
    allocations = [{cpu for cpu in range(16) if owner[cpu] == pod} for pod in range(1, 5)]
    free = {cpu for cpu in range(16) if owner[cpu] == 0}
    pools = [
        {"node": 0, "cpuset": ",".join(map(str, sorted(free & set(range(8)))))},
        {"node": 1, "cpuset": ",".join(map(str, sorted(free & set(range(8, 16)))))},
    ]
    nrt = {ANNOTATION_CPU_SHARED_POOLS: pools, ANNOTATION_BE_CPU_SHARED_POOLS: pools}
    return nrt, [allocation for allocation in allocations if allocation]


@given(_node_with_allocations(), st.sampled_from(["LS", "", "SYSTEM", "LSR", "BE"]))
@settings(max_examples=60, deadline=None)
def test_exclusive_cpus_stay_disjoint_from_each_other_and_from_every_pool(
    node_and_allocations: tuple[Any, list[set[int]]], qos: str
) -> None:
    nrt, allocations = node_and_allocations
    inputs = node(topology=topology(nrt), gates=BE_MANAGER)
    given_out: list[set[int]] = []
    for cpus in allocations:
        pod = _pod("LSR", G, {"cpuset": ",".join(map(str, sorted(cpus)))})
        value = decide(a_container(pod), inputs, POLICY).value(Resource.CPUSET_CPUS)
        assert isinstance(value, CpuSet)
        given_out.append(set(value))
    assert sum(map(len, given_out)) == len(set().union(*given_out))
    for status in (None, NUMA_1, NUMA_1_0):
        pod = _pod(qos, BU, status)
        value = decide(a_container(pod), inputs, POLICY).value(Resource.CPUSET_CPUS)
        if isinstance(value, CpuSet):
            assert value and not set(value) & set().union(*given_out)
