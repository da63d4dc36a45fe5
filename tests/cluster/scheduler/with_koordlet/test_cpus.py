"""CPUs and NUMA nodes over both sides.

What koordlet reports of a node is what the scheduler reads, what the scheduler binds is what
koordlet puts into force, and both agree about which CPUs are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import NO_CPUS, CpuSet
from apis.keys import CPU, MEMORY
from cluster.scheduler.tables.numa.facts import NumaFacts
from tests.cluster.scheduler.with_koordlet.cpus import BothSides
from tests.cluster.scheduler.with_koordlet.machines import (
    KUBELET_POLICIES,
    Machine,
    Setting,
    nodes,
)


class Wish(NamedTuple):
    """A pod that arrives. ends: another one succeeds before, by the place in the list of pods."""

    qos: str
    milli_cpu: int
    memory_mib: int
    bind: Mapping[str, str]
    numa: str
    ends: int | None


wishes = st.builds(
    Wish,
    qos=st.sampled_from(["LSE", "LSR", "LSR", "LS", ""]),
    milli_cpu=st.sampled_from([500, 1000, 1000, 2000, 3000]),
    memory_mib=st.sampled_from([0, 64, 2048]),
    bind=st.sampled_from(
        [
            {},
            {"preferredCPUBindPolicy": "SpreadByPCPUs"},
            {"requiredCPUBindPolicy": "FullPCPUs"},
            {"preferredCPUExclusivePolicy": "PCPULevel"},
        ]
    ),
    numa=st.sampled_from(["", "", "SingleNUMANode", "BestEffort", "Restricted"]),
    ends=st.one_of(st.none(), st.none(), st.integers(0, 9)),
)


def taken_from_pods(setting: Setting) -> CpuSet:
    """Return the CPUs that no pod gets, from what the node is and not from what was reported."""
    kept = CpuSet.union([NO_CPUS, *setting.exclusive.values(), setting.listed])
    if setting.system_exclusive:
        kept |= setting.system
    return kept


def reserved_by_kubelet(both: BothSides) -> CpuSet:
    kubelet = both.setting.kubelet
    if kubelet is None or not kubelet.static:
        return NO_CPUS
    return kubelet.reserved_cpus


@given(nodes())
@settings(max_examples=30)
def test_the_scheduler_reads_each_field_as_koordlet_found_it(node: tuple[Machine, Setting]) -> None:
    machine, setting = node
    both = BothSides(machine, setting)
    facts = both.read()
    topology = facts.topology
    assert topology is not None
    assert topology.cpus == machine.online.mask
    assert {CpuSet.of_mask(core.mask) for core in topology.cores} == machine.cores
    by_socket: dict[int, set[int]] = {}
    by_numa: dict[int, set[int]] = {}
    for cpu in machine.cpus:
        by_socket.setdefault(cpu.socket, set()).add(cpu.cpu)
        by_numa.setdefault(cpu.node, set()).add(cpu.cpu)
    assert topology.sockets == {socket: CpuSet(cpus).mask for socket, cpus in by_socket.items()}
    assert topology.numa == {number: CpuSet(cpus).mask for number, cpus in by_numa.items()}
    kubelet = setting.kubelet
    assert facts.policy == (KUBELET_POLICIES[kubelet.topology_policy] if kubelet else "")
    whole_cores = kubelet is not None and "full-pcpus-only" in kubelet.cpu_manager_options
    assert facts.bind_policy == ("FullPCPUsOnly" if whole_cores else "None")
    assert facts.cpu_ratio == setting.ratio
    check_reserved(both, facts)
    check_zones(both, facts)


def check_reserved(both: BothSides, facts: NumaFacts) -> None:
    machine, setting = both.machine, both.setting
    reserved = CpuSet.of_mask(facts.reserved)
    named = taken_from_pods(setting) | reserved_by_kubelet(both)
    assert named & machine.online <= reserved
    kubelet = setting.kubelet
    counted = 0 if setting.listed else setting.counted
    if kubelet is not None and kubelet.static and not kubelet.reserved_cpus:
        counted += -(-kubelet.reserved_milli_cpu // 1000)
    assert len(reserved - named) <= counted
    if not setting.listed:
        # The amount is taken from the machine, from whichever CPUs koordlet packs together.
        assert len(reserved) >= min(setting.counted, len(machine.online))
    # Pods are never given what koordlet keeps from them, and lose nothing else.
    assert both.free <= both.pools
    if kubelet is None or not kubelet.static:
        assert both.free == both.pools


def check_zones(both: BothSides, facts: NumaFacts) -> None:
    machine, setting = both.machine, both.setting
    assert list(facts.zones) == sorted(machine.memory)
    reserved = CpuSet.of_mask(facts.reserved)
    for number, zone in facts.zones.items():
        there = machine.on_numa(number)
        assert zone[CPU] == 10 * setting.ratio * len(there - reserved)
        memory = machine.memory[number]
        pages = memory.huge_pages_bytes["2Mi"] if setting.huge_pages else 0
        assert zone[MEMORY] == memory.total_bytes - pages
        assert zone["hugepages-2Mi"] == pages


@given(nodes(), st.lists(wishes, max_size=9))
@settings(max_examples=40)
def test_what_is_bound_is_in_force_and_both_sides_know_what_is_left(
    node: tuple[Machine, Setting], arriving: list[Wish]
) -> None:
    both = BothSides(*node)
    kept = CpuSet.of_mask(both.read().reserved)
    for number, wish in enumerate(arriving):
        if wish.ends is not None and wish.ends < len(both.bookings):
            both.end(sorted(both.bookings)[wish.ends])
        shape = both.cluster.shape(
            {"cpu": f"{wish.milli_cpu}m", "memory": f"{wish.memory_mib}Mi"},
            qos=wish.qos,
            spec=wish.bind,
            numa={"numaTopologyPolicy": wish.numa} if wish.numa else None,
        )
        if wish.qos in ("LSE", "LSR") and wish.milli_cpu % 1000:
            continue  # refused before any node is looked at
        if both.read().bind_policy != "None" and wish.milli_cpu % 1000:
            continue  # the same, by the node's policy
        both.schedule(f"p{number}", shape, wish.qos)
        both.report()
        check_at_rest(both, kept)


def check_at_rest(both: BothSides, kept: CpuSet) -> None:
    assert CpuSet.of_mask(both.read().reserved) == kept, "a pod of ours is not a reservation"
    owned: dict[str, CpuSet] = {}
    for name in both.bookings:
        cpus, in_force = both.recorded(name), both.in_force(name)
        if cpus:
            assert in_force == cpus
            assert cpus <= both.machine.online - kept
            assert not cpus & CpuSet.union([NO_CPUS, *owned.values()])
            assert not cpus & both.pools
            owned[name] = cpus
        elif in_force is not None:
            assert in_force <= both.pools
    check_cores(both, owned)
    assert both.free == both.machine.online - kept - CpuSet.union([NO_CPUS, *owned.values()])
    assert both.free == both.pools - kept
    other = both.restarted()
    row = other.tables.nodes.row("n1")
    assert row is not None
    assert other.table.state(row) == both.state


def check_cores(both: BothSides, owned: Mapping[str, CpuSet]) -> None:
    """LSE pods share no physical core with each other."""
    alone = [cpus for name, cpus in owned.items() if both.running[name].qos == "LSE"]
    for core in both.machine.cores:
        assert sum(bool(core & cpus) for cpus in alone) <= 1
