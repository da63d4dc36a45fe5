"""NodeNUMAResource against the slow oracle, and what holds for the NUMA table at any time."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    LABEL_NUMA_TOPOLOGY_POLICY,
)
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.numa.cpu_topology import Cpu
from cluster.scheduler.tables.numa.table import NumaTable
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import NumaCluster, make_topology
from tests.cluster.scheduler.numa.oracle import Node, Placed, Wish, spanned, takes, usable_cpus

GI = 1024**3

machines = st.builds(
    Machine,
    sockets=st.integers(1, 2),
    numa_per_socket=st.integers(1, 2),
    cores_per_numa=st.integers(1, 3),
    threads=st.sampled_from([1, 2]),
    far_siblings=st.booleans(),
)

BINDINGS = {
    "": {"preferredCPUBindPolicy": "ConstrainedBurst"},
    "full": {"preferredCPUBindPolicy": "FullPCPUs"},
    "full!": {"requiredCPUBindPolicy": "FullPCPUs"},
    "spread": {"preferredCPUBindPolicy": "SpreadByPCPUs"},
    "spread!": {"requiredCPUBindPolicy": "SpreadByPCPUs"},
}


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Machines with NUMA ids 1, 4, 7 and 10, with pods that share no CPUs."""
    cpus = [cpu._replace(numa=1 + 3 * cpu.numa) for cpu in draw(machines).cpus()]
    ids = sorted({cpu.numa for cpu in cpus})
    zones: dict[int, dict[str, int]] = {}
    for numa in ids:
        there = len([cpu for cpu in cpus if cpu.numa == numa])
        zones[numa] = {"cpu": 1000 * there, "memory": draw(st.integers(0, 4))}
    if draw(st.integers(0, 9)) == 0:
        zones = {}
    left = draw(st.permutations([cpu.id for cpu in cpus]))
    reserved = {left.pop() for _ in range(draw(st.integers(0, 1))) if len(left) > 1}
    pods: list[Placed] = []
    for _ in range(draw(st.integers(0, 3))):
        mine = {left.pop() for _ in range(draw(st.integers(0, 3))) if left}
        pod = Placed(mine, {}, lse=draw(st.booleans()))
        for numa in draw(st.sets(st.sampled_from(ids), max_size=2)):
            pod.numa[numa] = {"memory": draw(st.integers(0, 2))}
            if not mine:
                pod.numa[numa]["cpu"] = draw(st.sampled_from([0, 500, 1000]))
        pods.append(pod)
    return Node(cpus, zones, reserved, draw(st.sampled_from([100, 100, 150])), pods)


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    binding = draw(st.sampled_from(list(BINDINGS)))
    policy = draw(st.sampled_from(["", "BestEffort", "Restricted", "SingleNUMANode"]))
    exclusive = draw(st.sampled_from(["", "Preferred", "Required"])) if policy else ""
    amounts = {"cpu": 1000 * draw(st.integers(1, 6)), "memory": draw(st.integers(0, 5))}
    return Wish(
        {name: amount for name, amount in amounts.items() if amount},
        binding,
        draw(st.booleans()),
        policy,
        exclusive or ("Required" if policy in ("Restricted", "SingleNUMANode") else "Preferred"),
    )


def build(node: Node) -> NumaCluster:
    cluster = NumaCluster()
    zones = {
        numa: {"cpu": f"{amounts['cpu']}m", "memory": str(amounts["memory"])}
        for numa, amounts in node.zones.items()
    }
    annotations = {
        ANNOTATION_NODE_RESERVATION: json.dumps({"reservedCPUs": str(CpuSet(node.reserved))}),
        ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: json.dumps({"cpu": node.ratio / 100}),
    }
    # Far more allocatable cpu than CPUs: the whole node's amplified cpu is not under test here.
    cluster.add_node(
        "n",
        make_topology("n", cpus=node.cpus, zones=zones),
        annotations=annotations,
        allocatable={"cpu": "10000"},
    )
    for pod in node.pods:
        cluster.place(
            cluster.shape({}, qos="LSE" if pod.lse else "LSR"),
            "n",
            cpus=str(CpuSet(pod.cpus)),
            numa=tuple(sorted(pod.numa.items())),
        )
    return cluster


def shape_of(cluster: NumaCluster, wish: Wish) -> Any:
    numa = {"numaTopologyPolicy": wish.policy, "singleNUMANodeExclusive": wish.exclusive}
    return cluster.shape(
        {
            name: f"{amount}m" if name == "cpu" else str(amount)
            for name, amount in wish.amounts.items()
        },
        qos="LSE" if wish.lse else "LSR",
        spec=BINDINGS[wish.binding],
        numa=numa if wish.policy else None,
    )


@settings(max_examples=150)
@given(nodes(), wishes())
def test_the_filter_agrees_with_the_oracle_and_the_exact_allocation(node: Node, wish: Wish) -> None:
    cluster = build(node)
    shape = shape_of(cluster, wish)
    passes = cluster.reasons(shape)["n"] == ()
    assert passes is takes(node, wish)
    given_part = cluster.allocate(shape, "n")
    if not passes:
        assert isinstance(given_part, str)
        return
    assert isinstance(given_part, Allocation), given_part
    check(node, wish, given_part)


def check(node: Node, wish: Wish, given_part: Allocation) -> None:
    """Assert that what a pod gets is free, complete and as its policies ask."""
    cpus = set(given_part.cpus)
    assert cpus <= usable_cpus(node, Wish(wish.amounts, "", wish.lse, "", ""))
    assert len(cpus) == (wish.amounts["cpu"] // 1000 if wish.binding else 0)
    cores = {cpu.core for cpu in node.cpus if cpu.id in cpus}
    if wish.binding == "full!":
        assert cpus == {cpu.id for cpu in node.cpus if cpu.core in cores}
    if wish.binding == "spread!":
        assert len(cores) == len(cpus)
    if not wish.policy:
        assert given_part.numa == ()
        return
    listed = {name for amounts in node.zones.values() for name in amounts}
    for name, amount in wish.amounts.items():
        if name in listed:
            assert sum(amounts.get(name, 0) for _, amounts in given_part.numa) == amount
    state = build(node).table.state(0)
    for numa, amounts in given_part.numa:
        for name, amount in amounts.items():
            counted = amount * node.ratio // 100 if name == "cpu" and wish.binding else amount
            assert counted <= state.numa[numa].free[name]
    if wish.policy == "SingleNUMANode":
        assert len(given_part.numa) <= 1
    if wish.exclusive == "Required" and len(given_part.numa) == 1:
        numa = given_part.numa[0][0]
        assert all(len(spanned(node, pod)) < 2 for pod in node.pods if numa in spanned(node, pod))


@settings(max_examples=50)
@given(nodes(), wishes())
def test_scores_are_between_0_and_100(node: Node, wish: Wish) -> None:
    cluster = build(node)
    assert 0 <= cluster.scores(shape_of(cluster, wish))["n"] <= 100


def snapshot(table: NumaTable) -> list[Any]:
    columns: list[Any] = [
        table.policy,
        table.bind_policy,
        table.cpu_ratio,
        table.core_step,
        table.bound,
        table.free_cpus,
        table.managed_cpus,
        table.slots,
        table.status,
    ]
    columns += [table.total[name] for name in sorted(table.total)]
    columns += [table.free[name] for name in sorted(table.free)]
    return [np.array(column) for column in columns]


def same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@settings(max_examples=60)
@given(nodes(), st.randoms(use_true_random=False))
def test_bookings_in_any_order_and_taken_back_leave_the_same_table(
    node: Node, rng: random.Random
) -> None:
    cluster = build(Node(node.cpus, node.zones, node.reserved, node.ratio, []))
    before = snapshot(cluster.table)
    pods = list(node.pods)
    rng.shuffle(pods)
    bookings = [
        cluster.place(
            cluster.shape({}, qos="LSE" if pod.lse else "LSR"),
            "n",
            cpus=str(CpuSet(pod.cpus)),
            numa=tuple(sorted(pod.numa.items())),
            reservation="uid-1" if rng.random() < 0.3 else "",
        )
        for pod in pods
    ]
    placed = snapshot(cluster.table)
    again = list(bookings)
    rng.shuffle(again)
    for booking in again:
        cluster.tables.remove(booking.uid)
    assert same(snapshot(cluster.table), before)
    for booking in again:
        cluster.tables.place(booking)
    assert same(snapshot(cluster.table), placed)


@settings(max_examples=40)
@given(st.lists(wishes(), min_size=1, max_size=12), nodes())
def test_pods_one_after_another_are_never_given_anything_twice(
    pods: list[Wish], node: Node
) -> None:
    cluster = build(Node(node.cpus, node.zones, node.reserved, node.ratio, []))
    total = {numa: dict(one.free) for numa, one in cluster.table.state(0).numa.items()}
    owner: dict[int, int] = {}
    used: dict[tuple[int, str], int] = {}
    lse_cores: dict[int, int] = {}
    core_of = {cpu.id: cpu.core for cpu in node.cpus}
    for number, wish in enumerate(pods):
        shape = shape_of(cluster, wish)
        if cluster.reasons(shape)["n"]:
            continue
        given_part = cluster.allocate(shape, "n")
        assert isinstance(given_part, Allocation)
        for cpu in given_part.cpus:
            assert cpu not in node.reserved
            assert owner.setdefault(cpu, number) == number
            if wish.lse:
                assert lse_cores.setdefault(core_of[cpu], number) == number
        for numa, amounts in given_part.numa:
            for name, amount in amounts.items():
                factor = node.ratio if name == "cpu" and wish.binding else 100
                used[numa, name] = used.get((numa, name), 0) + amount * factor // 100
                assert used[numa, name] <= total[numa][name]
        cluster.place(shape, "n", cpus=str(given_part.cpus), numa=given_part.numa)


def test_a_node_that_comes_back_with_its_pods() -> None:
    """Facts are dropped with the node, bookings wait for it."""
    cpus = [Cpu(number, number // 2, 0, 0) for number in range(8)]
    cluster = NumaCluster()
    topology = make_topology("n", cpus=cpus, zones={0: {"cpu": "8"}})
    row = cluster.add_node("n", topology, labels={LABEL_NUMA_TOPOLOGY_POLICY: "BestEffort"})
    cluster.place(cluster.shape({"cpu": "2"}, qos="LSR"), "n", cpus="0-1")
    before = snapshot(cluster.table)
    cluster.tables.delete_node("n")
    cluster.table.forget(row)
    assert not cluster.table.any_policy
    assert not cluster.table.free_cpus.any()
    again = cluster.add_node("n", topology, labels={LABEL_NUMA_TOPOLOGY_POLICY: "BestEffort"})
    assert again == row
    assert same(snapshot(cluster.table), before)


def test_columns_grow_with_the_node_table() -> None:
    cluster = NumaCluster()
    for number in range(200):
        cluster.tables.upsert_node(make_node(f"n{number}"))
    shape = cluster.shape({"cpu": "2"}, qos="LSR")
    assert set(cluster.reasons(shape).values()) == {("node(s) invalid CPU Topology",)}
    topology = make_topology("n7", cpus=[Cpu(0, 0, 0, 0), Cpu(1, 0, 0, 0)])
    cluster.add_node("n7", topology)
    assert cluster.reasons(shape)["n7"] == ()
