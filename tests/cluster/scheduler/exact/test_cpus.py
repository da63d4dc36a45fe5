"""Which CPUs a pod gets: worked examples, the slow oracle, and what holds on odd machines too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.numa import CPUBindPolicy, CPUExclusivePolicy
from apis.numa import NUMAAllocateStrategy as Strategy
from cluster.scheduler.exact.cpus import NOT_ENOUGH, allocate_cpus
from cluster.scheduler.exact.even import split_evenly
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.tables.numa.cpu_topology import (
    Cpu,
    CpuTopology,
    cores_of,
    cpu_topology,
    one_of_each_core,
    whole_cores,
)
from cluster.scheduler.tables.numa.demand import FULL, SPREAD, CpuDemand
from tests.cluster.scheduler.exact import cpu_oracle
from tests.cluster.scheduler.exact.cpu_oracle import Machine

MOST, LEAST, EVENLY = (
    Strategy.MOST_ALLOCATED,
    Strategy.LEAST_ALLOCATED,
    Strategy.DISTRIBUTE_EVENLY,
)
CORE, NUMA = CPUExclusivePolicy.PCPU_LEVEL, CPUExclusivePolicy.NUMA_NODE_LEVEL
NONE = CPUExclusivePolicy.NONE

TWO_SOCKETS = cpu_topology(Machine(2, 1, 4, 2).cpus())
"""Siblings (0,1), (2,3), ...; NUMA node 0 has CPUs 0-7, NUMA node 1 has 8-15."""


def cpus(text: str) -> int:
    return CpuSet.parse(text).mask


def allocated(
    topology: CpuTopology,
    demand: CpuDemand,
    *,
    used: str = "",
    held: str = "",
    strategy: Strategy = LEAST,
    preferred: str = "",
    shares: dict[int, int] | None = None,
) -> str:
    free = topology.cpus & ~cpus(used) & ~cpus(held)
    mask = allocate_cpus(
        topology,
        free,
        demand,
        strategy=strategy,
        held=cpus(held),
        preferred=cpus(preferred),
        shares=shares,
    )
    assert not isinstance(mask, Unfit), mask
    return str(CpuSet.of_mask(mask))


@pytest.mark.parametrize(
    ("policy", "count", "exclusive", "used", "held", "most", "least"),
    [
        (FULL, 4, NONE, "", "", "0-3", "0-3"),
        (FULL, 4, NONE, "0-1", "", "2-5", "8-11"),
        (FULL, 4, NONE, "0,2,4", "", "8-11", "8-11"),
        (FULL, 3, NONE, "", "", "0-2", "0-2"),
        (FULL, 12, NONE, "", "", "0-11", "0-11"),
        (FULL, 8, NONE, "0,2,4,8,10", "", "6-7,9,11-15", "6-7,9,11-15"),
        (FULL, 10, NONE, "0,8", "", "2-7,10-13", "2-7,10-13"),
        (SPREAD, 4, NONE, "", "", "0,2,4,6", "0,2,4,6"),
        (SPREAD, 4, NONE, "0-1", "", "8,10,12,14", "8,10,12,14"),
        (SPREAD, 4, NONE, "0,2", "", "1,3-4,6", "8,10,12,14"),
        (SPREAD, 6, NONE, "", "", "0-4,6", "0-4,6"),
        (SPREAD, 10, NONE, "", "", "0-4,6,8,10,12,14", "0-4,6,8,10,12,14"),
        (SPREAD, 2, CORE, "", "0,2", "4,6", "8,10"),
        (SPREAD, 2, NONE, "0,2", "", "1,3", "8,10"),
        (SPREAD, 8, CORE, "", "0,2", "8-15", "8-15"),
        (FULL, 4, NUMA, "", "0-1", "8-11", "8-11"),
        (FULL, 4, NUMA, "", "0-1,8-9", "2-5", "2-5"),
        (FULL, 4, NUMA, "0-3", "", "4-7", "8-11"),
        # No NUMA node is left for the pod alone: it avoids the others' cores.
        (SPREAD, 2, NUMA, "", "0,8", "2,4", "2,4"),
        (SPREAD, 2, NUMA, "", "0,2,4,8", "10,12", "10,12"),
        (SPREAD, 6, NUMA, "", "0,2,8", "1,3-7", "9-14"),
    ],
)
def test_two_sockets_of_four_cores(
    policy: CPUBindPolicy,
    count: int,
    exclusive: CPUExclusivePolicy,
    used: str,
    held: str,
    most: str,
    least: str,
) -> None:
    demand = CpuDemand(count, policy, exclusive=exclusive)
    assert allocated(TWO_SOCKETS, demand, used=used, held=held, strategy=MOST) == most
    assert allocated(TWO_SOCKETS, demand, used=used, held=held, strategy=LEAST) == least


@pytest.mark.parametrize(
    ("demand", "used", "reason"),
    [
        (CpuDemand(17, FULL), "", NOT_ENOUGH),
        (CpuDemand(4, FULL, required=True), "0,2,4,6,8,10,12", NOT_ENOUGH),
        (CpuDemand(9, SPREAD, required=True), "", NOT_ENOUGH),
        (CpuDemand(3, FULL, required=True), "", "insufficient CPUs to satisfy required cpu bind"),
    ],
)
def test_what_is_impossible(demand: CpuDemand, used: str, reason: str) -> None:
    free = TWO_SOCKETS.cpus & ~cpus(used)
    result = allocate_cpus(TWO_SOCKETS, free, demand, strategy=LEAST)
    assert isinstance(result, Unfit)
    assert result.reason.startswith(reason)


def test_cpus_of_a_reservation_are_taken_first() -> None:
    assert allocated(TWO_SOCKETS, CpuDemand(4, FULL), preferred="12-15") == "12-15"
    assert allocated(TWO_SOCKETS, CpuDemand(4, FULL), preferred="14-15") == "0-1,14-15"
    spread = CpuDemand(2, SPREAD, required=True)
    assert allocated(TWO_SOCKETS, spread, preferred="1,3") == "1,3"


def test_shares_of_numa_nodes_are_kept() -> None:
    assert allocated(TWO_SOCKETS, CpuDemand(6, FULL), shares={0: 2, 1: 4}) == "0-1,8-11"
    free = TWO_SOCKETS.cpus & ~cpus("8-13")
    result = allocate_cpus(
        TWO_SOCKETS, free, CpuDemand(6, FULL), strategy=LEAST, shares={0: 2, 1: 4}
    )
    assert result == Unfit(NOT_ENOUGH)


def test_distribute_evenly_divides_only_what_one_numa_node_cannot_take() -> None:
    assert allocated(TWO_SOCKETS, CpuDemand(8, FULL), strategy=EVENLY) == "0-7"
    assert allocated(TWO_SOCKETS, CpuDemand(12, FULL), strategy=EVENLY) == "0-5,8-13"
    assert allocated(TWO_SOCKETS, CpuDemand(8, FULL), used="0-1,8-9", strategy=EVENLY) == (
        "2-5,10-13"
    )
    # Whole cores, as long as there are enough: NUMA node 0 has two of them.
    assert allocated(TWO_SOCKETS, CpuDemand(12, FULL), used="0,2", strategy=EVENLY) == "4-15"
    assert allocated(TWO_SOCKETS, CpuDemand(11, FULL), used="0,2", strategy=EVENLY) == "1,4-13"
    assert allocated(TWO_SOCKETS, CpuDemand(10, SPREAD), strategy=EVENLY) == "0-2,4,6,8-10,12,14"


def test_whole_cores_are_found_among_cores_of_different_size() -> None:
    """Two cores with threads and two without, as on hybrid machines."""
    hybrid = cpu_topology(Cpu(number, core, 0, 0) for number, core in enumerate([0, 0, 1, 1, 2, 3]))
    assert (hybrid.core_step, hybrid.widest_core) == (1, 2)
    required = CpuDemand(3, FULL, required=True)
    assert allocated(hybrid, required) == "0-1,4"
    assert allocate_cpus(hybrid, cpus("1-3"), required, strategy=LEAST) == Unfit(NOT_ENOUGH)
    assert allocated(hybrid, CpuDemand(4, FULL, required=True), used="0") == "2-5"


def test_a_part_of_a_core_is_one_of_the_widest() -> None:
    """Cores of two and of three threads, so that no whole core has the size."""
    mixed = cpu_topology(Cpu(number, core, 0, 0) for number, core in enumerate([0, 0, 1, 1, 1]))
    assert allocated(mixed, CpuDemand(1, FULL)) == "2"
    assert allocated(mixed, CpuDemand(4, FULL)) == "0,2-4"


def test_smaller_cores_are_taken_where_the_largest_leave_a_part() -> None:
    sizes = (3, 3, 2, 2)
    numbers = [core for core, size in enumerate(sizes) for _ in range(size)]
    mixed = cpu_topology(Cpu(number, core, 0, 0) for number, core in enumerate(numbers))
    for count, expected in ((4, "6-9"), (5, "0-2,6-7"), (6, "0-5"), (7, "0-2,6-9")):
        assert allocated(mixed, CpuDemand(count, FULL, required=True)) == expected


def test_whole_cores_are_found_where_a_thread_is_offline() -> None:
    """CPU 15 is offline, so NUMA node 1 has a core with one CPU."""
    uneven = cpu_topology(cpu for cpu in Machine(2, 1, 4, 2).cpus() if cpu.id != 15)

    def required(count: int) -> CpuDemand:
        return CpuDemand(count, FULL, required=True)

    # NUMA node 0 has more CPUs, and no core of one CPU.
    assert allocated(uneven, required(3)) == "8-9,14"
    assert allocated(uneven, required(9)) == "0-7,14"
    assert allocated(uneven, required(13), used="0") == "2-14"
    # Half a core of a reservation is left where it is.
    assert allocated(uneven, required(4), preferred="0-2") == "0-3"
    assert allocated(uneven, required(2), preferred="14") == "0-1"
    # Cores of a reservation come first, as many as leave a whole number of others.
    assert allocated(uneven, required(3), preferred="12-13") == "12-14"
    assert allocated(uneven, required(4), preferred="10-14") == "10-13"
    # Each NUMA node gives what is nearest to its share.
    assert allocated(uneven, required(5), shares={0: 2, 1: 3}) == "0-1,8-9,14"
    assert allocated(uneven, required(7), shares={0: 3, 1: 4}) == "0-3,8-9,14"
    result = allocate_cpus(uneven, cpus("0-13"), required(3), strategy=LEAST)
    assert isinstance(result, Unfit)


def test_limits_of_numa_nodes_are_kept() -> None:
    def within(demand: CpuDemand, limits: dict[int, int]) -> str:
        mask = allocate_cpus(TWO_SOCKETS, TWO_SOCKETS.cpus, demand, strategy=LEAST, limits=limits)
        return str(CpuSet.of_mask(mask)) if isinstance(mask, int) else mask.reason

    assert within(CpuDemand(4, FULL), {0: 3}) == "8-11"
    assert within(CpuDemand(11, FULL), {0: 3}) == "0-2,8-15"
    assert within(CpuDemand(10, FULL, required=True), {0: 3}) == "0-1,8-15"
    assert within(CpuDemand(12, FULL), {0: 3}) == NOT_ENOUGH
    assert within(CpuDemand(12, FULL, required=True), {0: 3}) == NOT_ENOUGH
    assert within(CpuDemand(6, SPREAD, required=True), {0: 2}) == "0,2,8,10,12,14"


def test_a_machine_whose_numa_node_spans_sockets() -> None:
    """NUMA is switched off in the firmware: all CPUs are in node 0."""
    flat = cpu_topology([Cpu(n, n // 2, n // 8, 0) for n in range(16)])
    assert allocated(flat, CpuDemand(12, FULL)) == "0-11"
    assert allocated(flat, CpuDemand(4, SPREAD)) == "0,2,4,6"


def test_a_topology_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="CPU 3 is listed twice"):
        cpu_topology([Cpu(3, 0, 0, 0), Cpu(3, 1, 0, 0)])
    with pytest.raises(ValueError, match="no CPUs"):
        cpu_topology([])


def test_512_cpus_in_eight_numa_nodes_are_given_out_to_the_last() -> None:
    """Pods of 24 CPUs on NUMA nodes of 64: two in each, then the rest is pieced together."""
    machine = Machine(sockets=2, numa_per_socket=4, cores_per_numa=32, threads=2, far_siblings=True)
    topology = cpu_topology(machine.cpus())
    free = topology.cpus
    spans = []
    for _ in range(21):
        demand = CpuDemand(24, FULL, required=True)
        mask = allocate_cpus(topology, free, demand, strategy=MOST)
        assert isinstance(mask, int)
        assert cores_of(topology, mask) == mask & free
        free &= ~mask
        spans.append(sum(1 for cpus in topology.numa.values() if cpus & mask))
    assert spans[:16] == [1] * 16
    assert free.bit_count() == 512 - 21 * 24


machines = st.builds(
    Machine,
    sockets=st.integers(1, 2),
    numa_per_socket=st.integers(1, 2),
    cores_per_numa=st.integers(1, 4),
    threads=st.sampled_from([1, 2, 2, 4]),
    far_siblings=st.booleans(),
)


@given(st.data())
def test_alike_machines_follow_the_rules(data: st.DataObject) -> None:
    machine = data.draw(machines)
    everything = [cpu.id for cpu in machine.cpus()]
    available = data.draw(st.sets(st.sampled_from(everything), min_size=1))
    held = data.draw(st.sets(st.sampled_from(everything))) - available
    count = data.draw(st.integers(1, len(available)))
    policy = data.draw(st.sampled_from([FULL, SPREAD]))
    exclusive = data.draw(st.sampled_from([NONE, CORE, NUMA]))
    strategy = data.draw(st.sampled_from([MOST, LEAST]))
    result = allocate_cpus(
        cpu_topology(machine.cpus()),
        CpuSet(available).mask,
        CpuDemand(count, policy, exclusive=exclusive),
        strategy=strategy,
        held=CpuSet(held).mask,
    )
    assert isinstance(result, int)
    assert set(CpuSet.of_mask(result)) == cpu_oracle.take(
        machine,
        available,
        held,
        count,
        full=policy is FULL,
        exclusive=exclusive.value,
        most=strategy is MOST,
    )


@st.composite
def odd_topologies(draw: st.DrawFn) -> CpuTopology:
    """Cores of one to three threads, NUMA ids with gaps, up to eight NUMA nodes."""
    ids = draw(st.lists(st.integers(0, 1023), min_size=1, max_size=8, unique=True))
    found: list[Cpu] = []
    numbers = draw(st.permutations(range(72)))
    for core in range(draw(st.integers(1, 24))):
        numa = draw(st.sampled_from(ids))
        for _ in range(draw(st.integers(1, 3))):
            found.append(Cpu(numbers[len(found)], core, numa % 3, numa))
    return cpu_topology(found)


@given(st.data())
def test_an_allocation_has_its_size_and_policy_within_the_free_cpus(data: st.DataObject) -> None:
    topology = data.draw(odd_topologies())
    everything = list(CpuSet.of_mask(topology.cpus))
    free = CpuSet(data.draw(st.sets(st.sampled_from(everything)))).mask
    held = CpuSet(data.draw(st.sets(st.sampled_from(everything)))).mask & ~free
    preferred = CpuSet(data.draw(st.sets(st.sampled_from(everything)))).mask
    demand = CpuDemand(
        data.draw(st.integers(1, len(everything))),
        data.draw(st.sampled_from([FULL, SPREAD])),
        data.draw(st.booleans()),
        data.draw(st.sampled_from([NONE, CORE, NUMA])),
    )
    strategy = data.draw(st.sampled_from(list(Strategy)))
    result = allocate_cpus(
        topology, free, demand, strategy=strategy, held=held, preferred=preferred
    )
    if isinstance(result, Unfit):
        if not demand.required:
            assert free.bit_count() < demand.count
        elif demand.policy is SPREAD:
            assert one_of_each_core(topology, free).bit_count() < demand.count
        return
    assert result & ~free == 0
    assert result.bit_count() == demand.count
    if demand.required and demand.policy is FULL:
        assert cores_of(topology, result) == result
    if demand.required and demand.policy is SPREAD:
        assert one_of_each_core(topology, result) == result


@given(st.data())
def test_whole_cores_are_found_whenever_some_have_the_size(data: st.DataObject) -> None:
    """Required whole cores, against all sums that the free cores have within the limits."""
    topology = data.draw(odd_topologies())
    everything = list(CpuSet.of_mask(topology.cpus))
    offline = CpuSet(data.draw(st.sets(st.sampled_from(everything), max_size=6))).mask
    preferred = CpuSet(data.draw(st.sets(st.sampled_from(everything)))).mask
    free = topology.cpus & ~offline
    count = data.draw(st.integers(1, len(everything)))
    limits = data.draw(st.dictionaries(st.sampled_from(list(topology.numa)), st.integers(0, 9)))
    shares = None
    if data.draw(st.booleans()):
        some = data.draw(st.sets(st.sampled_from(list(topology.numa)), min_size=1))
        shares = split_evenly(count, dict.fromkeys(some, count))
    reachable = {0}
    for numa in topology.numa if shares is None else shares:
        here = {0}
        for core in topology.cores:
            if core.numa == numa and not core.mask & ~free:
                here |= {size + core.mask.bit_count() for size in here}
        most = limits.get(numa, len(everything))
        reachable = {one + other for one in reachable for other in here if other <= most}
    result = allocate_cpus(
        topology,
        free,
        CpuDemand(count, FULL, required=True),
        strategy=data.draw(st.sampled_from(list(Strategy))),
        preferred=preferred,
        shares=shares,
        limits=limits,
    )
    assert isinstance(result, int) is (count in reachable)
    if isinstance(result, int):
        assert result.bit_count() == count and not result & ~free
        assert whole_cores(topology, result) == result
        for numa, most in limits.items():
            assert (result & topology.numa[numa]).bit_count() <= most
        if shares is not None:
            assert not result & ~sum(topology.numa[numa] for numa in shares)


@given(st.data())
def test_a_pod_that_fits_into_one_numa_node_gets_one(data: st.DataObject) -> None:
    topology = data.draw(odd_topologies())
    everything = list(CpuSet.of_mask(topology.cpus))
    free = CpuSet(data.draw(st.sets(st.sampled_from(everything), min_size=1))).mask
    policy = data.draw(st.sampled_from([FULL, SPREAD]))
    usable = whole_cores(topology, free) if policy is FULL else free
    most = max((mask & usable).bit_count() for mask in topology.numa.values())
    if not most:
        return
    count = data.draw(st.integers(1, most))
    strategy = data.draw(st.sampled_from(list(Strategy)))
    result = allocate_cpus(topology, free, CpuDemand(count, policy), strategy=strategy)
    assert isinstance(result, int)
    assert sum(1 for mask in topology.numa.values() if mask & result) == 1
