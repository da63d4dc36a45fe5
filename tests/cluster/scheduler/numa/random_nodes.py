"""Random nodes, pods and arguments for NodeNUMAResource: as the oracle has them, and as objects."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_NUMA_TOPOLOGY_SPEC,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_RESOURCE_SPEC,
    LABEL_CPU_BIND_POLICY,
    LABEL_NUMA_ALLOCATE_STRATEGY,
    LABEL_NUMA_TOPOLOGY_POLICY,
)
from apis.numa import CPUBindPolicy
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.tables.shapes import PodShape
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.numa.making import NumaCluster, make_topology
from tests.cluster.scheduler.numa.oracle import Node, Placed, Rules, Strategy, Wish

BATCH = "kubernetes.io/batch-memory"

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
    "default": None,
    "full": {"preferredCPUBindPolicy": "FullPCPUs"},
    "full!": {"requiredCPUBindPolicy": "FullPCPUs"},
    "spread": {"preferredCPUBindPolicy": "SpreadByPCPUs"},
    "spread!": {"requiredCPUBindPolicy": "SpreadByPCPUs"},
}
_NODE_BINDINGS = {"full!": "FullPCPUsOnly", "spread!": "SpreadByPCPUs"}
_POLICIES = ["BestEffort", "Restricted", "SingleNUMANode"]
_RARELY = st.integers(0, 9).map(lambda number: number == 0)
_SOMETIMES = st.integers(0, 3).map(lambda number: number == 0)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Machines with NUMA ids 1, 4, 7 and 10, with pods that share no CPUs."""
    machine = draw(machines)
    ids = [1 + 3 * number for number in range(machine.sockets * machine.numa_per_socket)]
    node = Node(machine, ids, {})
    cpus = node.cpus
    for numa in ids:
        there = len([cpu for cpu in cpus if cpu.numa == numa])
        milli = 1000 * there + draw(st.sampled_from([0, 0, 0, -1, -700, 500]))
        node.zones[numa] = {"cpu": milli, "memory": draw(st.integers(0, 4))}
        if draw(_SOMETIMES):
            node.zones[numa][BATCH] = draw(st.integers(0, 3))
        if draw(_RARELY):
            del node.zones[numa]["cpu"]
    if draw(_RARELY):
        node.zones = {}
    left = draw(st.permutations([cpu.id for cpu in cpus]))
    node.reserved = {left.pop() for _ in range(draw(st.integers(0, 1))) if len(left) > 1}
    node.ratio = draw(st.sampled_from([100, 100, 150, 133]))
    node.amplified = draw(st.booleans())
    node.pods = [draw(_placed(ids, left)) for _ in range(draw(st.integers(0, 3)))]
    node.policy = draw(st.sampled_from(["", "", *_POLICIES]))
    node.bind = draw(st.sampled_from(["", "", "", *_NODE_BINDINGS]))
    node.strategy = draw(
        st.sampled_from(["", "MostAllocated", "LeastAllocated", "DistributeEvenly"])
    )
    # At times less than the CPUs, so that amplified cpu runs short.
    node.allocatable = {
        "cpu": 1000 * len(cpus) * draw(st.sampled_from([1, 2])),
        "memory": draw(st.integers(0, 12)),
    }
    if draw(_RARELY):
        node.machine, node.reserved = None, set()
    return node


@st.composite
def _placed(draw: st.DrawFn, ids: Sequence[int], left: list[int]) -> Placed:
    mine = {left.pop() for _ in range(draw(st.integers(0, 3))) if left}
    pod = Placed(
        mine,
        lse=draw(st.booleans()),
        exclusive=draw(st.sampled_from(["", "PCPULevel", "NUMANodeLevel"])),
        requests={"cpu": 1000 * len(mine) or 500, "memory": draw(st.integers(0, 3))},
    )
    for numa in draw(st.sets(st.sampled_from(ids), max_size=2)):
        pod.numa[numa] = {"memory": draw(st.integers(0, 2))}
        if not mine or draw(st.booleans()):
            pod.numa[numa]["cpu"] = draw(st.sampled_from([0, 500, 1000]))
    return pod


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    qos = draw(st.sampled_from(["LSE", "LSR", "LSR", "LS"]))
    milli = 1000 * draw(st.integers(0, 6))
    if qos == "LS" and draw(st.booleans()):
        milli += 500
    amounts = {"cpu": milli, "memory": draw(st.integers(0, 5))}
    if draw(_SOMETIMES):
        amounts[BATCH] = draw(st.integers(1, 3))
    policy = draw(st.sampled_from(["", *_POLICIES]))
    return Wish(
        {name: amount for name, amount in amounts.items() if amount},
        draw(st.sampled_from(list(BINDINGS))),
        qos,
        policy,
        draw(st.sampled_from(["", "Preferred", "Required"])),
        draw(st.sampled_from(["", "PCPULevel", "NUMANodeLevel"])),
    )


_weights = st.dictionaries(
    st.sampled_from(["cpu", "memory", BATCH]), st.integers(1, 3), min_size=1, max_size=3
)
_strategies = st.builds(Strategy, most=st.booleans(), weights=_weights)

rules = st.builds(
    Rules,
    default=st.sampled_from(["full", "spread", ""]),
    scoring=_strategies,
    numa_scoring=_strategies,
    wider_restricted=st.booleans(),
    lse_shares_cores=st.booleans(),
)


def settings_of(given: Rules) -> Settings:
    def scoring(strategy: Strategy) -> Scoring:
        return Scoring(strategy.most, strategy.weights)

    defaults = {"full": CPUBindPolicy.FULL_PCPUS, "spread": CPUBindPolicy.SPREAD_BY_PCPUS}
    return Settings(
        default_bind_policy=defaults.get(given.default, CPUBindPolicy.UNSET),
        scoring=scoring(given.scoring),
        numa_scoring=scoring(given.numa_scoring),
        wider_restricted=given.wider_restricted,
        lse_shares_cores=given.lse_shares_cores,
    )


def build(*given: Node, rules: Rules | None = None) -> NumaCluster:
    """Return a cluster with these nodes, called n0, n1 and so on, and their pods."""
    cluster = NumaCluster(settings_of(rules or Rules()))
    for number, node in enumerate(given):
        add(cluster, node, f"n{number}")
    return cluster


def add(cluster: NumaCluster, node: Node, name: str) -> None:
    ratio = json.dumps({"cpu": node.ratio / 100})
    labels = {
        LABEL_NUMA_TOPOLOGY_POLICY: node.policy,
        LABEL_CPU_BIND_POLICY: _NODE_BINDINGS.get(node.bind, ""),
        LABEL_NUMA_ALLOCATE_STRATEGY: node.strategy,
    }
    cluster.add_node(
        name,
        make_topology(
            name,
            cpus=node.cpus,
            zones={numa: _texts(amounts) for numa, amounts in node.zones.items()},
            annotations={ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: ratio} if node.amplified else {},
        ),
        labels={key: value for key, value in labels.items() if value},
        annotations={
            ANNOTATION_NODE_RESERVATION: json.dumps({"reservedCPUs": str(CpuSet(node.reserved))}),
            ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: ratio,
        },
        allocatable=_texts(node.allocatable),
    )
    for pod in node.pods:
        shape = cluster.shape(
            _texts(pod.requests),
            qos="LSE" if pod.lse else "LSR",
            spec={"preferredCPUExclusivePolicy": pod.exclusive},
        )
        cpus = str(CpuSet(pod.cpus))
        cluster.place(shape, name, cpus=cpus, numa=tuple(sorted(pod.numa.items())))


def shape_of(cluster: NumaCluster, wish: Wish) -> PodShape:
    spec, numa = _specs(wish)
    return cluster.shape(_texts(wish.amounts), qos=wish.qos, spec=spec or None, numa=numa or None)


def annotations_of(wish: Wish) -> dict[str, str]:
    """Return the annotations by which a pod states its wish."""
    spec, numa = _specs(wish)
    return {
        ANNOTATION_RESOURCE_SPEC: json.dumps(spec),
        ANNOTATION_NUMA_TOPOLOGY_SPEC: json.dumps(numa),
    }


def _specs(wish: Wish) -> tuple[dict[str, str], dict[str, str]]:
    """Return the members of resource-spec and numa-topology-spec."""
    spec = dict(BINDINGS[wish.binding] or {})
    if wish.cpu_exclusive:
        spec["preferredCPUExclusivePolicy"] = wish.cpu_exclusive
    numa = {"numaTopologyPolicy": wish.policy, "singleNUMANodeExclusive": wish.exclusive}
    return spec, {member: value for member, value in numa.items() if value}


def _texts(amounts: dict[str, int]) -> dict[str, str]:
    return {name: f"{a}m" if name == "cpu" else str(a) for name, a in amounts.items()}
