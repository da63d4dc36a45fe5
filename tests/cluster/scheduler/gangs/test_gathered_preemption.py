"""A gang that is gathered in the network makes room in one domain, or evicts nobody."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.cycle import gathered_seats
from cluster.scheduler.cycle.gathered_seats import GatheredSeats
from tests.cluster.scheduler.beds.core import Bed

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    postFilter: {enabled: [{name: Coscheduling}], disabled: [{name: "*"}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {enablePreemption: true, awareNetworkTopology: true}
"""
_CPUS = 4
"""Of each node."""


def _gather(**layers: str | int) -> str:
    """Return how a gang is gathered. layers: the strategy of each, or its podCountMultiple."""
    rules = [
        {"layer": layer, "strategy": "PreferGather", "podCountMultiple": how}
        if isinstance(how, int)
        else {"layer": layer, "strategy": f"{how}Gather"}
        for layer, how in layers.items()
    ]
    return json.dumps({"gatherStrategy": rules})


_RACK = _gather(rack="Must")


class _Network(Bed):
    """Nodes of 4 CPUs in racks. nodes: name -> (rack, priorities of its pods of 1 CPU each)."""

    def __init__(self, nodes: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        super().__init__(_CONFIGURATION)
        self.network("spine", "rack")
        for name, (rack, priorities) in nodes.items():
            self.node(name, _CPUS, rack=rack, spine=rack[0])
            for number, priority in enumerate(priorities):
                self.pod(f"{name}-{number}", 1, priority, node=name)

    def gang(self, count: int, cpu: int, gather: str = _RACK, priority: int = 10) -> list[str]:
        names = [f"g{number}" for number in range(count)]
        for name in names:
            self.pod(name, cpu, priority, gang=count, gather=gather)
        return names

    def finish(self) -> None:
        """Have all victims end, and the gang tried again."""
        for name in self.evicted():
            if name in self.pods:
                self.gone(name)
        self.run(30.0)


_FULL = (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "pods", "cpu", "gather", "expected"),
    [
        # Of two full racks, the one with the less important pods.
        (
            {"a0": ("s1", (2, 2, 2, 2)), "b0": ("s2", _FULL)},
            2, 2, _RACK, {"b0": 2},
        ),
        # Fewer victims: one CPU of a node in rack s2 is free.
        ({"a0": ("s1", _FULL), "b0": ("s2", _FULL[:3])}, 2, 2, _RACK, {"b0": 2}),
        # A single more important pod outweighs many victims.
        ({"a0": ("s1", (1, 1, 1, 5)), "b0": ("s2", _FULL)}, 1, 4, _RACK, {"b0": 1}),
        # Rack s1 is cheaper, but one of its nodes is out of reach and the other is too small.
        (
            {
                "a0": ("s1", (1, 1)), "a1": ("s1", (20,) * 4),
                "b0": ("s2", _FULL), "b1": ("s2", _FULL),
            },
            2, 4, _RACK, {"b0": 1, "b1": 1},
        ),
        # Equal costs: the rack with less headroom, which leaves the wide one to larger gangs.
        (
            {
                "a0": ("s1", _FULL), "a1": ("s1", _FULL), "a2": ("s1", _FULL),
                "b0": ("s2", _FULL), "b1": ("s2", _FULL),
            },
            2, 4, _RACK, {"b0": 1, "b1": 1},
        ),
        # Free room of a rack is used first.
        ({"a0": ("s1", ()), "a1": ("s1", _FULL)}, 2, 4, _RACK, {"a0": 1, "a1": 1}),
        # Also room for one member on a node where the next one needs an eviction.
        ({"a0": ("s1", (1,))}, 2, 2, _RACK, {"a0": 2}),
        (
            {"a0": ("s1", (1, 1)), "a1": ("s1", (1, 1))},
            6, 1, _gather(NodeTopologyLayer=3, rack="Must"), {"a0": 3, "a1": 3},
        ),
        # Where one rack is only preferred, it is freed as long as it can be.
        (
            {"a0": ("s1", _FULL), "a1": ("s1", _FULL), "b0": ("s2", ())},
            2, 4, _gather(rack="Prefer"), {"a0": 1, "a1": 1},
        ),
        (
            {"a0": ("s1", _FULL), "b0": ("s2", _FULL)},
            2, 4, _gather(rack="Prefer"), {"a0": 1, "b0": 1},
        ),
        # In one spine (s, t), as no rack takes three.
        (
            {
                "a0": ("s1", _FULL), "a1": ("s1", _FULL), "b0": ("s2", _FULL),
                "c0": ("t1", _FULL), "c1": ("t1", _FULL),
            },
            3, 4, _gather(spine="Must", rack="Prefer"), {"a0": 1, "a1": 1, "b0": 1},
        ),
        # On one node.
        (
            {"a0": ("s1", (1, 1, 1, 20)), "a1": ("s1", (2, 2, 2, 2))},
            4, 1, _gather(NodeTopologyLayer="Must"), {"a1": 4},
        ),
        # An even number of pods on each node: b0 takes three at most, and then none is left.
        (
            {"a0": ("s1", (3, 3, 3, 3)), "b0": ("s2", (1, 1, 1, 20))},
            4, 1, _gather(NodeTopologyLayer=2, rack="Must"), {"a0": 4},
        ),
        (
            {"a0": ("s1", (1, 1, 1, 20)), "a1": ("s1", (1, 1, 1, 20))},
            4, 1, _gather(NodeTopologyLayer=2, rack="Must"), {"a0": 2, "a1": 2},
        ),
    ],
)  # fmt: skip
def test_which_domain_is_freed(
    nodes: dict[str, tuple[str, tuple[int, ...]]],
    pods: int,
    cpu: int,
    gather: str,
    expected: dict[str, int],
) -> None:
    bed = _Network(nodes)
    names = bed.gang(pods, cpu, gather)
    bed.run()
    assert Counter(bed.nominated[name] for name in names) == expected
    assert bed.victims
    bed.finish()
    assert {name: bed.node_of(name) for name in names} == {n: bed.nominated[n] for n in names}
    assert len(bed.core.scheduling.nominator) == 0


@pytest.mark.parametrize(
    ("nodes", "gather", "remark"),
    [
        (
            {"a0": ("s1", _FULL), "b0": ("s2", _FULL)},
            _RACK,
            "preemption: without less important pods, a domain of rack has room for 1 of 2 pods"
            " at most.",
        ),
        # A preferred spine above does not stand in for the rack.
        (
            {"a0": ("s1", _FULL), "b0": ("s2", _FULL)},
            _gather(spine="Prefer", rack="Must"),
            "preemption: without less important pods, a domain of rack has room for 1 of 2 pods"
            " at most.",
        ),
        (
            {"a0": ("s1", _FULL), "a1": ("s1", _FULL)},
            _gather(row="Must"),
            "preemption: the cluster network topology has no layer row.",
        ),
        (
            {"a0": ("s1", (20, 1, 1, 1)), "a1": ("s1", _FULL)},
            _RACK,
            "a domain of rack has room for 1 of 2 pods at most.",
        ),
    ],
)
def test_a_gang_that_fits_into_no_domain_evicts_no_pod(
    nodes: dict[str, tuple[str, tuple[int, ...]]], gather: str, remark: str
) -> None:
    bed = _Network(nodes)
    bed.gang(2, 4, gather)
    bed.run()
    assert bed.victims == []
    assert bed.nominated == {}
    assert remark in bed.messages["g0"]


def test_without_a_topology_no_pod_is_evicted() -> None:
    bed = Bed(_CONFIGURATION)
    bed.node("a0", 4)
    bed.pod("low", 4, 1, node="a0")
    bed.pod("g0", 4, 10, gang=1, gather=_RACK)
    bed.run()
    assert bed.victims == []
    assert "preemption: no cluster network topology." in bed.messages["g0"]


def test_a_domain_within_the_budgets_is_freed_although_its_pods_are_more_important() -> None:
    bed = _Network({"a0": ("s1", _FULL), "b0": ("s2", (5, 5, 5, 5))})
    for number in range(4):
        bed.pods[f"a0-{number}"]["metadata"]["labels"] = {"app": "kept"}
        bed.change(f"a0-{number}")
    bed.budget("kept", "kept", 3)
    bed.gang(2, 2)
    bed.run()
    assert bed.evicted() == [f"b0-{number}" for number in range(4)]


def test_members_are_nominated_in_the_order_of_their_names_and_keep_their_nodes() -> None:
    bed = _Network({f"a{number}": ("s1", _FULL) for number in range(3)})
    names = bed.gang(6, 2)
    bed.run()
    nominated = [bed.nominated[name] for name in names]
    # Two follow each other on each node.
    assert nominated[::2] == nominated[1::2]
    assert len(set(nominated)) == 3
    # Victims end one after another; no plan takes members elsewhere in between.
    for victim in bed.evicted():
        assert not any(bed.node_of(name) for name in names)
        bed.gone(victim)
        bed.run(30.0)
    assert [bed.node_of(name) for name in names] == nominated
    assert len(bed.victims) == 12


def test_a_scheduler_that_begins_while_victims_end_puts_members_on_the_nominated_nodes() -> None:
    bed = _Network({f"a{number}": ("s1", _FULL) for number in range(3)})
    names = bed.gang(3, 4)
    bed.run()
    nominated = [bed.nominated[name] for name in names]
    pods = {name: bed.pods[name] for name in bed.pods if name not in bed.evicted()}
    for name, node in zip(names, reversed(nominated), strict=True):
        # Not what it would choose by itself.
        pods[name]["status"] = {"nominatedNodeName": node}
    bed.start()
    bed.network("spine", "rack")
    for number in range(3):
        bed.node(f"a{number}", _CPUS, rack="s1", spine="s")
    for pod in pods.values():
        bed.show(bed.core.pods, "ADDED", pod)
    bed.pods = pods
    bed.run()
    assert [bed.node_of(name) for name in names] == nominated[::-1]


def test_members_that_are_nominated_do_not_hold_off_each_other() -> None:
    bed = _Network({"a0": ("s1", _FULL), "a1": ("s1", _FULL), "a2": ("s1", (20,) * 4)})
    names = bed.gang(2, 4)
    bed.run()
    node = bed.nominated[names[0]]
    other = bed.nominated[names[1]]
    assert {node, other} == {"a0", "a1"}
    # The room of the first member is lost, and another node has room.
    for victim in bed.evicted():
        bed.gone(victim)
    for number in range(4):
        bed.gone(f"a2-{number}")
    bed.pod("intruder", 4, 50, node=node)
    bed.run(30.0)
    assert {bed.node_of(name) for name in names} == {other, "a2"}
    assert len(bed.victims) == 8


def test_a_gang_of_the_same_priority_takes_no_room_that_is_promised() -> None:
    bed = _Network({f"a{n}": ("s1", _FULL) for n in range(2)} | {"b0": ("s2", (2,) * 4)})
    bed.gang(2, 4)
    bed.run()
    assert len(bed.evicted()) == 8
    for victim in bed.evicted()[:4]:
        bed.gone(victim)
    # One node of rack s1 is free by now, but it is promised.
    bed.pod("h0", 4, 10, gang=1, of="h", gather=_RACK)
    bed.run(30.0)
    assert bed.nominated["h0"] == "b0"
    bed.finish()
    bed.run(30.0)
    assert bed.node_of("h0") == "b0"
    assert {bed.node_of("g0"), bed.node_of("g1")} == {"a0", "a1"}


def test_no_room_is_made_while_a_member_has_scheduling_gates() -> None:
    bed = _Network({"a0": ("s1", _FULL), "a1": ("s1", _FULL)})
    bed.pod("g0", 4, 10, gang=1, gather=_RACK)
    bed.pod("g1", 4, 10, gang=1, gather=_RACK, schedulingGates=[{"name": "wait"}])
    bed.run()
    assert bed.victims == []
    bed.pods["g1"]["spec"]["schedulingGates"] = []
    bed.change("g1")
    bed.run(30.0)
    assert len(bed.victims) == 8


def test_a_refused_eviction_ends_all_nominations_of_the_node() -> None:
    bed = _Network({"a0": ("s1", _FULL), "a1": ("s1", _FULL)})
    bed.gang(2, 4)
    bed.run()
    for victim in tuple(bed.victims):
        bed.core.attempts.preemptions.evicted(victim, Refused(Why.FORBIDDEN, "no right"))
    assert len(bed.core.scheduling.nominator) == 0
    bed.run(30.0)
    assert len(bed.victims) == 16


_PODS = st.lists(st.integers(0, 5), max_size=_CPUS)
_NODES = st.lists(st.tuples(st.sampled_from(["s1", "s2", "t1"]), _PODS), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    nodes=_NODES,
    members=st.integers(1, 5),
    cpu=st.integers(1, 4),
    priority=st.integers(0, 6),
    how=st.sampled_from(["rack", "spine", "NodeTopologyLayer"]),
    multiple=st.sampled_from([1, 1, 2]),
)
def test_a_domain_is_freed_if_there_is_one_and_no_pod_is_evicted_in_vain(
    nodes: list[tuple[str, list[int]]],
    members: int,
    cpu: int,
    priority: int,
    how: str,
    multiple: int,
) -> None:
    by_name = {f"n{number}": node for number, node in enumerate(nodes)}
    bed = _Network(by_name)
    strategies: dict[str, str | int] = {how: "Must"}
    each_node = 1
    if how != "NodeTopologyLayer":
        each_node = strategies["NodeTopologyLayer"] = multiple
    names = bed.gang(members, cpu, _gather(**strategies), priority)
    bed.run()

    def domain(name: str) -> str:
        rack = by_name[name][0]
        return {"rack": rack, "spine": rack[0], "NodeTopologyLayer": name}[how]

    def fits(evictable: bool) -> bool:
        rooms: Counter[str] = Counter()
        for name, (_, pods) in by_name.items():
            kept = [each for each in pods if not evictable or each >= priority]
            headroom = (_CPUS - len(kept)) // cpu
            rooms[domain(name)] += headroom - headroom % each_node
        return max(rooms.values()) >= members and members % each_node == 0

    victims = bed.evicted()
    if fits(evictable=False):
        assert not victims
        assert all(bed.node_of(name) for name in names)
        return
    assert bool(victims) == fits(evictable=True)
    if not victims:
        return
    assert all(bed.pods[name]["spec"]["priority"] < priority for name in victims)
    used = Counter(bed.nominated[name] for name in names)
    assert {name.partition("-")[0] for name in victims} <= set(used)
    # With a victim less, its node has no room for the members there.
    for name, count in used.items():
        gone = sum(victim.startswith(f"{name}-") for victim in victims)
        free = _CPUS - len(by_name[name][1]) + gone
        assert free >= count * cpu
        assert gone == 0 or free - 1 < count * cpu
    bed.finish()
    assert {name: bed.node_of(name) for name in names} == {n: bed.nominated[n] for n in names}
    assert len({domain(bed.node_of(name)) for name in names}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_cheapest_of_several_domains_is_freed(seed: int) -> None:
    random = Random(seed)
    racks = [f"s{number}" for number in range(3)]
    nodes = {
        f"{rack}n{number}": (rack, [random.randrange(8) for _ in range(_CPUS)])
        for rack, number in product(racks, range(2))
    }
    bed = _Network(nodes)
    bed.gang(2, 2)
    bed.run()

    def needed(rack: str) -> int:
        """Return the least priority up to which pods must go so that two members of 2 CPUs fit."""
        priorities = [pods for name, (of, pods) in nodes.items() if of == rack]
        return next(
            limit
            for limit in range(8)
            if sum(sum(each <= limit for each in pods) // 2 for pods in priorities) >= 2
        )

    highest = max(bed.pods[name]["spec"]["priority"] for name in bed.evicted())
    assert highest == min(needed(rack) for rack in racks)


def test_a_gang_that_domains_refuse_at_last_tries_a_few_of_them_at_each_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered_seats, "_CHEAPEST_IN_VAIN", 6)
    monkeypatch.setattr(gathered_seats, "_MOST_IN_VAIN", 12)
    in_domain = GatheredSeats._in_domain
    seated: list[int] = []

    def counting(self: GatheredSeats, *given: Any) -> Any:
        seats = in_domain(self, *given)
        seated.append(len(seats))
        return seats

    monkeypatch.setattr(GatheredSeats, "_in_domain", counting)
    racks = [f"r{number}" for number in range(10)]
    # The only rack that has the node which one member needs costs the most.
    bed = _Network(
        {f"{rack}-{n}": (rack, (5 if rack == "r9" else 1,) * 4) for rack in racks for n in "ab"}
    )
    bed.node("r9-c", 1, rack="r9", spine="r", disk="ssd")
    bed.pod("r9-c-0", 1, 9, node="r9-c")
    names = ["g0", "g1", "g2"]
    selector = {"disk": "ssd"}
    bed.pod("last", 1, 10, gang=4, gather=_RACK, nodeSelector=selector)
    for name in names:
        bed.pod(name, 1, 10, gang=4, gather=_RACK)
    for _ in range(100):
        seated.clear()
        bed.run(400.0)
        if bed.victims:
            break
        # Three members are seated before the one that finds no node.
        assert len(seated) == 4
    assert len(bed.evicted()) == 4 and {name[:2] for name in bed.evicted()} == {"r9"}


def test_a_network_without_nodes_has_room_for_no_member() -> None:
    bed = Bed(_CONFIGURATION)
    bed.network("spine", "rack")
    for node in ("n0", "n1"):
        bed.node(node, _CPUS)
        bed.pod(f"old-{node}", _CPUS, 1, node=node)
    for name in ("g0", "g1"):
        bed.pod(name, _CPUS, 10, gang=2, gather=_RACK)
    bed.run()
    assert not bed.evicted()
    assert bed.messages["g0"].endswith(
        "preemption: without less important pods, a domain of rack has room for 0 of 2 pods at"
        " most."
    )
