"""Preemption and placement where many nodes pass all filters and refuse the exact allocation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from apis.cpuset import CpuSet
from apis.keys import LABEL_NUMA_TOPOLOGY_POLICY
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.node_search import MOST_REFUSED, Arguments
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.cycle.waiting import QueueState
from cluster.scheduler.plugins.contract import Reason, Recorded
from cluster.scheduler.plugins.nodes.taints import TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation, Booking
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.beds.core import Bed as CoreBed
from tests.cluster.scheduler.configuration.files import enabled, file
from tests.cluster.scheduler.devices.making import (
    a_device_object,
    a_gpu,
    full,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology
from tests.cluster.scheduler.preemption.making import Bed
from tests.cluster.scheduler.preemption.oracle import OracleNode, OraclePod

_NODES = 20


class _GivesOn:
    """An allocator that has what a pod needs on some nodes, once some pods are gone."""

    name = "Exact"

    def __init__(self, *nodes: str, without: str = "") -> None:
        self.nodes = nodes
        self.without = without
        self.tried: list[str] = []

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        self.tried.append(tables.nodes.name(row))
        if tables.nodes.name(row) in self.nodes and self.without not in tables.on(row):
            return allocation
        return Reason("refused")

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        return Recorded({}, {})


def _full(number: int) -> OracleNode:
    """Return a node that a pod of priority 2 can get from one of rising priority."""
    return OracleNode(f"n{number}", 1000, 9, (OraclePod(f"p{number}", -100 + number, 1000),))


@pytest.mark.parametrize("gives", ["n0", "n17", "n19"])
def test_the_one_node_that_can_give_the_allocation_is_freed_however_dear_it_is(gives: str) -> None:
    profile = Profile("koord-scheduler", (), (NodeResourcesFit(),), allocators=(_GivesOn(gives),))
    bed = Bed([_full(number) for number in range(_NODES)], profile=profile)
    before = bed.state()
    found = bed.find(OraclePod("new", 2, 500))
    assert isinstance(found, Candidate)
    assert bed.tables.nodes.name(found.row) == gives
    assert bed.state() == before
    profile = Profile("koord-scheduler", (), (NodeResourcesFit(),), allocators=(_GivesOn(),))
    bed = Bed([_full(number) for number in range(_NODES)], profile=profile)
    assert isinstance(bed.find(OraclePod("new", 2, 500)), NotFound)


def test_more_pods_are_evicted_than_amounts_ask_for_where_the_allocation_needs_it() -> None:
    allocator = _GivesOn("n1", without="kept-1")
    profile = Profile("koord-scheduler", (), (NodeResourcesFit(),), allocators=(allocator,))
    nodes = [
        OracleNode(
            f"n{number}",
            1000,
            9,
            (OraclePod(f"kept-{number}", 1, 400), OraclePod(f"gone-{number}", 0, 600)),
        )
        for number in range(2)
    ]
    bed = Bed(nodes, profile=profile)
    found = bed.find(OraclePod("new", 2, 500))
    assert isinstance(found, Candidate)
    # Without the pod that the allocation needs to go, the other one may stay.
    assert bed.tables.nodes.name(found.row) == "n1"
    assert [victim.uid for victim in found.victims] == ["kept-1", "gone-1"]


def test_nodes_beyond_those_of_one_search_are_tried_in_later_ones() -> None:
    allocators = (_GivesOn("n19"),)
    profile = Profile("koord-scheduler", (), (NodeResourcesFit(),), allocators=allocators)
    few = Arguments(candidates_percentage=0, candidates_absolute=4)
    bed = Bed([_full(number) for number in range(_NODES)], profile=profile, arguments=few)
    pod = bed.pending(OraclePod("new", 2, 500))
    rows = bed.evaluator.evaluate(pod.shape).masks[0][1].nonzero()[0]
    assert len(rows) == _NODES
    mix = 0x9E3779B97F4A7C15
    salts = [number * mix % 2**64 for number in range(100)]
    found = [bed.preemption.find(pod, rows, salt=salt) for salt in salts]
    freed = {bed.tables.nodes.name(each.row) for each in found if isinstance(each, Candidate)}
    assert freed == {"n19"}


def _dearer(number: int) -> OracleNode:
    pods = (OraclePod(f"p{number}", number - 1000, 1000),)
    return OracleNode(f"n{number}", 1000, 9, pods)


@pytest.mark.parametrize("by_amounts", [True, False])
@pytest.mark.parametrize("gives", ["", "n290"])
def test_a_search_that_many_nodes_refuse_goes_on_at_the_next_attempts(
    gives: str, by_amounts: bool
) -> None:
    nodes = 300
    allocator = _GivesOn(gives, without="p290")
    filters = (NodeResourcesFit(),) if by_amounts else ()
    profile = Profile("koord-scheduler", (), filters, allocators=(allocator,))
    every = Arguments(candidates_percentage=100)
    bed = Bed([_dearer(number) for number in range(nodes)], profile=profile, arguments=every)
    pod, rows = bed.pending(OraclePod("new", 2, 500)), np.arange(nodes)
    searches = []
    for salt in range(nodes):
        allocator.tried.clear()
        found = bed.preemption.find(pod, rows, salt=salt)
        # Beside those, up to 16 nodes are looked at for the text.
        assert len(allocator.tried) <= 2 * MOST_REFUSED + 16 + 3
        searches.append(set(allocator.tried))
        if not (isinstance(found, NotFound) and found.more):
            break
    tried = set().union(*searches)
    if gives:
        assert isinstance(found, Candidate)
        assert bed.tables.nodes.name(found.row) == gives
    else:
        assert isinstance(found, NotFound)
        assert len(tried) == nodes
        # No node is tried in two of the searches without a reason.
        assert len(searches) == -(-nodes // MOST_REFUSED)
        # The next search begins with all nodes again.
        assert bed.preemption.find(pod, rows, salt=1) == replace(found, more=True)


def test_a_node_that_has_changed_since_it_refused_a_pod_is_tried_again() -> None:
    allocator = _GivesOn()
    profile = Profile("koord-scheduler", (), (NodeResourcesFit(),), allocators=(allocator,))
    every = Arguments(candidates_percentage=100)
    bed = Bed([_dearer(number) for number in range(300)], profile=profile, arguments=every)
    pod, rows = bed.pending(OraclePod("new", 2, 500)), np.arange(300)
    first = bed.preemption.find(pod, rows, salt=1)
    assert isinstance(first, NotFound) and first.more
    allocator.nodes = ("n0",)
    second = bed.preemption.find(pod, rows, salt=1)
    assert isinstance(second, NotFound) and second.more
    bed.tables.nodes.touch(bed.row("n0"))
    third = bed.preemption.find(pod, rows, salt=1)
    assert isinstance(third, Candidate)
    assert bed.tables.nodes.name(third.row) == "n0"


@pytest.mark.parametrize("more", [True, False])
def test_a_pod_backs_off_while_its_search_goes_on(
    more: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Preemption, "find", lambda *_, **__: NotFound("preemption: text.", more=more)
    )
    bed = CoreBed()
    bed.node("n", 1)
    bed.pod("small", 1, 0, node="n")
    bed.pod("new", 1, 10)
    bed.run()
    state = bed.core.queue.state_of("u-new")
    assert state is (QueueState.BACKOFF if more else QueueState.UNSCHEDULABLE)
    assert "preemption: text." in bed.messages["new"]


def _scheduling() -> Scheduling:
    plugins = {point: enabled("NodeNUMAResource", "DeviceShare") for point in ("filter", "reserve")}
    profile = {"schedulerName": "koord-scheduler", "plugins": plugins}
    text = json.dumps(file(profiles=[profile]))
    tables, shapes = Tables(), Shapes()
    made = make_plugins(read_configuration(text, obj="test"), tables)

    def place(name: str, node: str, priority: int, allocation: Allocation, **amounts: str) -> None:
        shape = shapes.of(make_pod(name, requests=amounts, priority=priority))
        tables.place(Booking(f"default/{name}", name, shape, node, allocation))

    whole = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    for number in range(_NODES):
        name, last = f"n{number}", number == _NODES - 1
        node = make_node(
            name,
            labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"},
            allocatable={full("gpu"): "800"},
        )
        row = tables.upsert_node(node)
        topology = make_topology(name, cpus=SMALL.cpus(), zones=SMALL_ZONES)
        facts, errors = parse_numa_facts(node, topology)
        assert not errors
        made.numa.set_node(row, facts)
        gpus = [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2])) for minor in range(8)]
        assert not made.devices.set_device(a_device_object(name, gpus))
        # CPUs are left on NUMA node 1 alone, GPUs on NUMA node 0 but for the last node.
        place(f"cpus-{number}", name, 100, Allocation(cpus=CpuSet.parse("0-7")), cpu="8")
        minors = range(4) if last else range(4, 8)
        held = parsed_allocation({"gpu": [{"minor": n, "resources": whole} for n in minors]})
        place(f"gpus-{number}", name, 100, Allocation(devices=held), **{full("gpu"): "400"})
        place(f"memory-{number}", name, 5 if last else 0, NO_ALLOCATION, memory="60Gi")
    return Scheduling(tables, made.profiles, seed=1, preemption={"koord-scheduler": Arguments()})


def test_a_pod_is_placed_by_preemption_on_the_node_that_aligns_its_cpus_and_devices() -> None:
    scheduling = _scheduling()
    amounts = {"cpu": "4", "memory": "8Gi", full("gpu"): "100"}
    shape = Shapes().of(
        make_pod("new", requests=amounts, priority=50, schedulerName="koord-scheduler")
    )
    pod = PendingPod("default/new", "new", 50, shape, 0.0)
    tried = scheduling.schedule(
        key=pod.key, uid=pod.uid, shape=shape, profile="koord-scheduler", now=1
    )
    assert isinstance(tried, Unplaced)
    found = scheduling.post_filter(pod, tried.diagnosis, lambda booking: False)
    assert isinstance(found, Candidate)
    assert [victim.uid for victim in found.victims] == ["memory-19"]
    scheduling.tables.remove("memory-19")
    placed = scheduling.schedule(
        key=pod.key, uid=pod.uid, shape=shape, profile="koord-scheduler", now=1
    )
    assert isinstance(placed, Placed)
    assert placed.booking.node == "n19"


def test_a_pod_reaches_a_node_behind_many_that_refuse_the_allocation() -> None:
    """100 nodes have a higher score, and a pod tries 64 at a time."""
    tables, shapes = Tables(), Shapes()
    for number in range(101):
        taints = [{"key": "worst", "effect": "PreferNoSchedule"}] if number == 7 else []
        tables.upsert_node(make_node(f"n{number}", taints=taints))
    profile = Profile(
        "koord-scheduler", scores=((TaintToleration(), 1),), allocators=(_GivesOn("n7"),)
    )
    scheduling = Scheduling(tables, {"koord-scheduler": profile}, seed=1)
    shape = shapes.of(make_pod("new", requests={"cpu": "1"}))
    for _ in range(30):
        tried = scheduling.schedule(
            key="default/new", uid="new", shape=shape, profile="koord-scheduler", now=1
        )
        if isinstance(tried, Placed):
            break
    assert isinstance(tried, Placed)
