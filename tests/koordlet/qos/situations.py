"""Short ways to make what a strategy looks at: a node, its pods, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from apis.effective_nodeslo import decode_nodeslo
from hooks.facts import NodeInputs
from hooks.subject import ContainerSubject, HostAppSubject, Pod, Requested
from koordlet.measurement.series import Aggregate, Series
from koordlet.qos.strategy import NodeAmounts, PodOnNode, Situation
from linux.cpus import Cpu
from tests.hooks.making import node

GIB = 1 << 30


class Figures:
    """Measurements that hold one value for each series, whatever the window."""

    def __init__(self, values: Mapping[Series, float], now: float = 1000.0) -> None:
        self.values = dict(values)
        self.now = now

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return self.values.get(series)

    def average(self, series: Series, *, within_s: float) -> float | None:
        return self.values.get(series)

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        value = self.values.get(series)
        return None if value is None else Aggregate(1, 0.0, *[value] * 7)


def cpus(count: int = 16, *, nodes: int = 2, threads: int = 2) -> tuple[Cpu, ...]:
    """Return a machine: CPU i and i + count/threads are threads of one core."""
    cores = count // threads
    made = [
        Cpu(
            cpu=number,
            core=number % cores,
            socket=number % cores * nodes // cores,
            node=number % cores * nodes // cores,
            l3=0,
        )
        for number in range(count)
    ]
    return tuple(sorted(made, key=lambda cpu: (cpu.node, cpu.socket, cpu.core, cpu.cpu)))


def on_node(pod: Pod, *containers: tuple[str, Requested], terminating: bool = False) -> PodOnNode:
    """Return the pod with containers given as (name, what kubelet requested)."""
    return PodOnNode(
        pod=pod,
        containers=tuple(
            ContainerSubject(
                pod=pod,
                name=name,
                id=f"{pod.uid}-{name}",
                cgroup=f"{pod.cgroup}/{pod.uid}-{name}",
                requested=requested,
            )
            for name, requested in containers
        ),
        terminating=terminating,
    )


def a_situation(
    values: Mapping[Series, float],
    *pods: PodOnNode | Pod,
    slo: Mapping[str, Any] | None = None,
    inputs: NodeInputs | None = None,
    topology: tuple[Cpu, ...] | None = None,
    allocatable_milli: int | None = None,
    memory_bytes: int = 64 * GIB,
    host_apps: Iterable[HostAppSubject] = (),
    now: float = 1000.0,
) -> Situation:
    """Return a situation of a node with 16 CPUs, unless `topology` says otherwise."""
    machine = cpus() if topology is None else topology
    given = node() if inputs is None else inputs
    if slo is not None:
        given = msgspec.structs.replace(given, slo=decode_nodeslo({"spec": slo}, obj="NodeSLO n1"))
    return Situation(
        now=now,
        wall=now,
        inputs=given,
        node=NodeAmounts(
            cpu_milli=1000 * (len(machine) or 16),
            memory_bytes=memory_bytes,
            allocatable={} if allocatable_milli is None else {"cpu": allocatable_milli},
            cpus=machine,
        ),
        pods=tuple(pod if isinstance(pod, PodOnNode) else PodOnNode(pod) for pod in pods),
        host_apps=tuple(host_apps),
        measurements=Figures(values, now),
    )
