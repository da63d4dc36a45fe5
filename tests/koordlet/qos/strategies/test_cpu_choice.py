"""Which CPUs are chosen: upstream's spread as a table, and sets that change as little as can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from koordlet.qos.strategies.cpu_choice import choose, share, spread
from linux.cpus import Cpu
from tests.koordlet.qos.situations import cpus

NODE = cpus()
ALL = "0-15"


@pytest.mark.parametrize(
    ("count", "free", "chosen"),
    [
        (2, ALL, "0,8"),
        (3, ALL, "0,4,8"),
        (4, ALL, "0,4,8,12"),
        (5, ALL, "0,1,4,8,12"),
        (6, ALL, "0-1,4,8-9,12"),
        (16, ALL, ALL),
        (17, ALL, ALL),
        (1, ALL, "0"),
        (0, ALL, ""),
        # the larger group comes first
        (4, "2-7,10-15", "2,4,10,12"),
        (2, "3,4-7,11-15", "4,12"),
        # no two threads of one core: single ones, in turn
        (3, "0-7", "0-1,4"),
        (2, "0,4", "0,4"),
        # pairs while there are some
        (4, "0,8,1,2,4", "0-1,4,8"),
        (4, "0,1,8,9,4", "0-1,8-9"),
        (3, "", ""),
    ],
)
def test_cpus_are_spread_over_numa_nodes_in_whole_cores(count: int, free: str, chosen: str) -> None:
    assert spread(count, CpuSet.parse(free), NODE) == CpuSet.parse(chosen)


@pytest.mark.parametrize(
    ("count", "chosen"), [(1, "0"), (2, "0,4"), (3, "0,4,7"), (4, "0-1,4,7"), (6, "0-1,4-5,7-8")]
)
def test_single_cpus_come_from_each_group_in_turn_the_largest_first(
    count: int, chosen: str
) -> None:
    """Without SMT, on NUMA nodes of four, three and two CPUs."""
    nodes = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    topology = tuple(
        Cpu(cpu=cpu, core=cpu, socket=0, node=node, l3=node) for cpu, node in enumerate(nodes)
    )
    assert spread(count, CpuSet(range(9)), topology) == CpuSet.parse(chosen)


@pytest.mark.parametrize(
    ("count", "free", "present", "chosen"),
    [
        (4, ALL, "", "0,4,8,12"),
        (4, ALL, "0,8", "0,4,8,12"),
        (5, ALL, "0,4,8,12", "0,1,4,8,12"),
        (6, ALL, "0-1,4,8,12", "0-1,4,8-9,12"),  # the sibling of 1 first
        (4, ALL, "3,7,11,15", "3,7,11,15"),  # no reason to move
        (3, ALL, "3,7,11,15", "3,7,11"),
        (6, ALL, "3,7,11,15", "0,3,7-8,11,15"),
        # CPU 8 was given away: its sibling stays, a CPU is added
        (2, "0-7,9-15", "0,8", "0,4"),
        (2, "4-7", "0,8", "4-5"),
    ],
)
def test_a_set_keeps_what_it_has(count: int, free: str, present: str, chosen: str) -> None:
    got = choose(count, CpuSet.parse(free), CpuSet.parse(present), NODE)
    assert got == CpuSet.parse(chosen)


@pytest.mark.parametrize(
    ("count", "lsr", "ls", "from_lsr"), [(5, 4, 12, 1), (4, 0, 16, 0), (4, 16, 0, 4), (3, 0, 0, 0)]
)
def test_lsr_cpus_are_a_proportional_share(count: int, lsr: int, ls: int, from_lsr: int) -> None:
    assert share(count, CpuSet(range(lsr)), CpuSet(range(100, 100 + ls))) == from_lsr


_SETS = st.integers(0, 2**16 - 1).map(CpuSet.of_mask)
_MACHINES = st.sampled_from(
    [cpus(), cpus(nodes=1), cpus(threads=1), cpus(nodes=4), cpus(threads=4, nodes=1)]
)


@given(st.integers(0, 20), _SETS, _SETS, _MACHINES)
@settings(max_examples=300, deadline=None)
def test_a_choice_has_the_asked_number_of_free_cpus_and_moves_no_more_than_needed(
    count: int, free: CpuSet, present: CpuSet, machine: tuple[Cpu, ...]
) -> None:
    chosen = choose(count, free, present, machine)
    assert chosen <= free
    assert len(chosen) == min(count, len(free))
    kept = present & free
    assert (kept <= chosen) if len(kept) <= count else (chosen <= kept)
    assert choose(count, free, chosen, machine) == chosen
