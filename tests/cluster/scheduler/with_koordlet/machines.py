"""Nodes as koordlet finds them: CPUs, memory, kubelet's settings, and what an operator reserved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from apis.cpuset import NO_CPUS, CpuSet
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_SYSTEM_QOS_RESOURCE,
)
from koordlet.sources.kubelet_settings import KubeletSettings
from linux.cpus import Cpu
from linux.numa_memory import NumaMemory

GIB = 2**30

KUBELET_POLICIES = {
    "none": "",
    "best-effort": "BestEffort",
    "restricted": "Restricted",
    "single-numa-node": "SingleNUMANode",
}
"""Kubelet's topology manager policy -> the scheduler's."""


@dataclass(frozen=True, slots=True)
class Machine:
    """cpus: those that are online. cores: the CPUs of each physical core that are online.

    siblings: how many threads a core has when all are online.
    """

    cpus: tuple[Cpu, ...]
    cores: frozenset[CpuSet]
    memory: Mapping[int, NumaMemory]

    @property
    def online(self) -> CpuSet:
        return CpuSet(cpu.cpu for cpu in self.cpus)

    def on_numa(self, number: int) -> CpuSet:
        return CpuSet(cpu.cpu for cpu in self.cpus if cpu.node == number)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a node has besides its machine.

    exclusive: pod uid -> CPUs that kubelet's static policy gave it. listed: CPUs of the node's
    reservation by number; counted: CPUs of it by amount, 0 where it has none. ratio: amplification
    of cpu in hundredths.
    """

    kubelet: KubeletSettings | None = None
    exclusive: Mapping[str, CpuSet] = field(default_factory=dict)
    listed: CpuSet = NO_CPUS
    counted: int = 0
    system: CpuSet = NO_CPUS
    system_exclusive: bool = True
    ratio: int = 100
    huge_pages: bool = False

    def annotations(self) -> dict[str, str]:
        """Return what an operator and the manager wrote on the Node."""
        texts: dict[str, Any] = {}
        reservation: dict[str, Any] = {}
        if self.listed:
            reservation["reservedCPUs"] = str(self.listed)
        if self.counted:
            reservation["resources"] = {"cpu": str(self.counted)}
        if reservation:
            texts[ANNOTATION_NODE_RESERVATION] = reservation
        if self.system:
            system: dict[str, Any] = {"cpuset": str(self.system)}
            if not self.system_exclusive:
                system["cpusetExclusive"] = False
            texts[ANNOTATION_SYSTEM_QOS_RESOURCE] = system
        if self.ratio != 100:
            texts[ANNOTATION_RESOURCE_AMPLIFICATION_RATIO] = {"cpu": self.ratio / 100}
        return {key: json.dumps(value) for key, value in texts.items()}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """One or two sockets; NUMA nodes of odd sizes, with gaps in their numbers, of memory alone, or
    across sockets; siblings side by side or half a machine apart; some threads offline."""
    sockets = draw(st.integers(1, 2))
    numa_of_socket = draw(st.sampled_from(["one", "two", "none"]))
    threads = draw(st.integers(1, 2))
    step = draw(st.sampled_from([1, 2, 8]))
    physical: list[tuple[int, int]] = []  # (socket, NUMA node) of each core
    for socket in range(sockets):
        places = {"one": [socket], "two": [2 * socket, 2 * socket + 1], "none": [0]}[numa_of_socket]
        for place in places:
            physical += [(socket, place * step)] * draw(st.integers(1, 4))
    apart = draw(st.booleans())
    threads_of = {
        number: [
            number + thread * len(physical) if apart else number * threads + thread
            for thread in range(threads)
        ]
        for number in range(len(physical))
    }
    everything = sorted(cpu for cpus in threads_of.values() for cpu in cpus)
    offline = set(draw(st.lists(st.sampled_from(everything), max_size=2, unique=True))) - {0}
    cores = [
        (place, CpuSet(there))
        for number, place in enumerate(physical)
        if (there := [cpu for cpu in threads_of[number] if cpu not in offline])
    ]
    cores.sort(key=lambda core: min(core[1]))
    cpus = [
        Cpu(cpu=cpu, core=rank, socket=socket, node=numa, l3=socket)
        for rank, ((socket, numa), siblings) in enumerate(cores)
        for cpu in siblings
    ]
    numbers = {cpu.node for cpu in cpus} | ({97} if draw(st.booleans()) else set())
    memory = {
        number: NumaMemory(
            draw(st.integers(2, 9)) * GIB + 4096,
            {"2Mi": draw(st.sampled_from([0, GIB])), "1Gi": 0},
        )
        for number in sorted(numbers)
    }
    return Machine(tuple(cpus), frozenset(siblings for _, siblings in cores), memory)


@st.composite
def settings_of(draw: st.DrawFn, machine: Machine) -> Setting:
    """Each kind of reservation, alone and together. They may overlap; they never name all CPUs."""
    online = sorted(machine.online)

    def some(most: int) -> CpuSet:
        return CpuSet(draw(st.lists(st.sampled_from(online), max_size=most, unique=True)))

    kubelet = None
    exclusive: dict[str, CpuSet] = {}
    if draw(st.booleans()):
        static = draw(st.booleans())
        listed = draw(st.booleans())
        reserved = some(1) if static and listed else NO_CPUS
        kubelet = KubeletSettings(
            cpu_manager_policy="static" if static else "none",
            cpu_manager_options=draw(
                st.sampled_from([{}, {"full-pcpus-only": "true"}]) if static else st.just({})
            ),
            reserved_cpus=reserved,
            reserved_milli_cpu=0 if listed else draw(st.sampled_from([0, 500, 1000])),
            topology_policy=draw(st.sampled_from(sorted(KUBELET_POLICIES))),
            topology_scope=draw(st.sampled_from(["container", "pod"])),
        )
        if static:
            exclusive = {"theirs-0": some(2) - reserved}
            exclusive["theirs-1"] = some(1) - reserved - exclusive["theirs-0"]
    return Setting(
        kubelet=kubelet,
        exclusive=exclusive,
        listed=draw(st.sampled_from([NO_CPUS, some(2)])),
        counted=draw(st.integers(0, 2)),
        system=draw(st.sampled_from([NO_CPUS, some(1)])),
        system_exclusive=draw(st.booleans()),
        ratio=draw(st.sampled_from([100, 150])),
        huge_pages=draw(st.booleans()),
    )


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Machine, Setting]:
    machine = draw(machines())
    return machine, draw(settings_of(machine))
