"""What holds for the NUMA table at any time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import LABEL_NUMA_TOPOLOGY_POLICY
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.numa.cpu_topology import Cpu
from cluster.scheduler.tables.numa.table import NumaTable
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.numa.making import NumaCluster, make_topology
from tests.cluster.scheduler.numa.oracle import Node, Placed, Rules, Wish, decide
from tests.cluster.scheduler.numa.random_nodes import build, nodes, shape_of, wishes


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
    cluster = build(replace(node, pods=[]))
    before = snapshot(cluster.table)
    pods = list(node.pods)
    rng.shuffle(pods)
    bookings = [
        cluster.place(
            cluster.shape({}, qos="LSE" if pod.lse else "LSR"),
            "n0",
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
    node = replace(node, pods=[])
    cluster = build(node)
    total = {numa: dict(one.free) for numa, one in cluster.table.state(0).numa.items()}
    owner: dict[int, int] = {}
    used: dict[tuple[int, str], int] = {}
    lse_cores: dict[int, int] = {}
    core_of = {cpu.id: cpu.core for cpu in node.cpus}
    for number, wish in enumerate(pods):
        expected = decide(node, wish, Rules())
        shape = shape_of(cluster, wish)
        if cluster.reasons(shape)["n0"]:
            assert expected.reasons
            continue
        given_part = cluster.allocate(shape, "n0")
        assert isinstance(given_part, Allocation)
        assert set(given_part.cpus) == expected.cpus
        for cpu in given_part.cpus:
            assert cpu not in node.reserved
            assert owner.setdefault(cpu, number) == number
            if wish.qos == "LSE":
                assert lse_cores.setdefault(core_of[cpu], number) == number
        for numa, amounts in given_part.numa:
            for name, amount in amounts.items():
                bound = name == "cpu" and given_part.cpus
                used.setdefault((numa, name), 0)
                used[numa, name] += node.amplify(amount) if bound else amount
                assert name not in total[numa] or used[numa, name] <= total[numa][name]
        cluster.place(shape, "n0", cpus=str(given_part.cpus), numa=given_part.numa)
        node.pods.append(
            Placed(
                expected.cpus, expected.numa, wish.qos == "LSE", wish.cpu_exclusive, wish.amounts
            )
        )


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
