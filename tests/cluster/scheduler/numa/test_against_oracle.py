"""NodeNUMAResource against the slow oracle: reasons, scores, NUMA nodes, amounts and CPUs."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.scheduler.tables.booking import Allocation
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.numa.oracle import (
    CONTRADICTIONS,
    NOT_ENOUGH,
    Node,
    Placed,
    Rules,
    Strategy,
    Wish,
    decide,
)
from tests.cluster.scheduler.numa.random_nodes import BATCH, build, nodes, rules, shape_of, wishes

_MACHINE = Machine(sockets=1, numa_per_socket=2, cores_per_numa=2, threads=1)
_ZONES = {0: {"cpu": 2000, "memory": 4, BATCH: 4}, 1: {"cpu": 2000, "memory": 4, BATCH: 0}}
_ROOM = {"cpu": 4000, "memory": 8}


def _node(*pods: Placed, policy: str = "", ratio: int = 100) -> Node:
    return Node(
        _MACHINE, (0, 1), _ZONES, pods=list(pods), policy=policy, ratio=ratio, allocatable=_ROOM
    )


@example(
    # CPUs of other pods count amplified for a pod without a cpu request too.
    [_node(Placed({0, 1}, requests={"cpu": 2000}), ratio=150)],
    Wish({"memory": 1}),
    Rules(),
)
@example(
    # Batch memory that the pod does not request decides neither about NUMA nodes nor about nodes.
    [_node(policy="SingleNUMANode")],
    Wish({"memory": 1}, qos="LS"),
    Rules(
        scoring=Strategy(weights={BATCH: 1, "memory": 1}), numa_scoring=Strategy(True, {BATCH: 1})
    ),
)
@example(
    # A pod that needs nothing of NUMA nodes is scored by the whole node.
    [_node(Placed(numa={0: {"memory": 4}}, requests={"memory": 4}), policy="Restricted")],
    Wish({"example.com/gpu": 1}, qos="LS"),
    Rules(scoring=Strategy(most=True)),
)
@example(
    # A pod without requests is not held back by a node without NUMA resources.
    [Node(_MACHINE, (0, 1), {}, policy="Restricted", allocatable=_ROOM)],
    Wish({}, qos="LS"),
    Rules(),
)
@example(
    # There is room, but pods of one NUMA node and wider ones would meet.
    [_node(Placed(numa={0: {"memory": 1}}), policy="Restricted")],
    Wish({"memory": 6}, qos="LS", exclusive="Required"),
    Rules(),
)
@settings(max_examples=60)
@given(st.lists(nodes(), min_size=1, max_size=2), wishes(), rules)
def test_reasons_scores_and_allocations_equal_the_oracle(
    machines: list[Node], wish: Wish, arguments: Rules
) -> None:
    cluster = build(*machines, rules=arguments)
    shape = shape_of(cluster, wish)
    reasons = cluster.reasons(shape)
    assert cluster.plugin.applies(shape, cluster.tables) is bool(wish.amounts)
    scores = cluster.scores(shape)
    for number, machine in enumerate(machines):
        name = f"n{number}"
        expected = decide(machine, wish, arguments)
        assert set(reasons[name]) == expected.reasons
        mask = cluster.plugin.filter_row(shape, cluster.tables, number)
        assert bool(mask) is bool(expected.reasons)
        if expected.reasons & CONTRADICTIONS:
            continue
        given_part = cluster.allocate(shape, name)
        if expected.reasons:
            assert isinstance(given_part, str)
            assert given_part in expected.reasons or NOT_ENOUGH in expected.reasons
            continue
        assert isinstance(given_part, Allocation), given_part
        assert dict(given_part.numa) == expected.numa
        assert set(given_part.cpus) == expected.cpus
        if wish.amounts:
            assert scores[name] == expected.score
            assert cluster.plugin.score_row(shape, cluster.tables, number) == expected.score
