"""What neither pods nor host applications use: node - sum of pods - sum of host applications.

Both memory series of the system are differences of series of one kind, without page cache or with
it. The system's CPU is shared out among NUMA nodes as the whole node's is; memory per NUMA node is
a difference again. Formulas: docs/measurement.md, "System".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from koordlet.measurement.collecting import (
    Recent,
    Round,
    Targets,
    Unavailable,
    followed,
    layout_with,
)
from koordlet.measurement.collectors.cgroups import PAGE_BYTES
from koordlet.measurement.kernel_files import GONE, KernelFile, close_all
from koordlet.measurement.series import Metric, Series

OUTDATED_S: Final = 10.0
"""Upstream's limit: no system usage from samples that are older."""
_NUMA_STAT_BYTES: Final = 64 * 1024
"""v2 has a line for each kind of memory, with one number for each NUMA node."""


class SystemCollector:
    """CPU and memory of the system, from the samples of the collectors before it."""

    name = "system"
    gate = None

    def __init__(self, *, interval_s: float = 1.0, retention_s: float = 1830.0) -> None:
        """retention_s: as for the node."""
        self.interval_s = interval_s
        self.retention_s = retention_s

    def sample(self, round_: Round) -> dict[Series, float]:
        recent = round_.measured
        uids = [pod.uid for pod in round_.targets.pods]
        names = [app.name for app in round_.targets.host_apps]
        node_cpu = _one(recent, Metric.NODE_CPU)
        samples: dict[Series, float] = {}
        if node_cpu is not None:
            pods = _sum(recent, Metric.POD_CPU, uids)
            apps = _sum(recent, Metric.HOST_APP_CPU, names)
            system = max(node_cpu - pods - apps, 0.0)
            samples[Series(Metric.SYSTEM_CPU)] = system
            of_numa = recent.latest_of(Metric.NODE_NUMA_CPU, within_s=OUTDATED_S)
            whole = sum(of_numa.values())
            for (number, _), used in of_numa.items():
                share = used / whole if whole > 0 else 0.0
                samples[Series(Metric.SYSTEM_NUMA_CPU, number)] = system * share
        for of_system, of_node, of_pod, of_app in _MEMORY:
            node_memory = _one(recent, of_node)
            if node_memory is not None:
                pods = _sum(recent, of_pod, uids)
                apps = _sum(recent, of_app, names)
                samples[Series(of_system)] = max(node_memory - pods - apps, 0.0)
        if not samples:
            raise Unavailable("there are no samples of the node yet")
        return samples

    def close(self) -> None:
        pass


_MEMORY: Final = (
    (
        Metric.SYSTEM_MEMORY,
        Metric.NODE_MEMORY,
        Metric.POD_MEMORY,
        Metric.HOST_APP_MEMORY,
    ),
    (
        Metric.SYSTEM_MEMORY_WITH_PAGE_CACHE,
        Metric.NODE_MEMORY_WITH_PAGE_CACHE,
        Metric.POD_MEMORY_WITH_PAGE_CACHE,
        Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE,
    ),
)
"""Metrics of the system, the node, pods and host applications."""


def _one(recent: Recent, metric: Metric) -> float | None:
    return recent.latest(Series(metric), within_s=OUTDATED_S)


def _sum(recent: Recent, metric: Metric, objects: Sequence[str]) -> float:
    if not objects:
        return 0.0
    found = recent.latest_of(metric, within_s=OUTDATED_S)
    return sum([found.get((of, ""), 0.0) for of in objects])


class SystemNumaCollector:
    """Memory of the system by NUMA node: the node's - the sum of the pods', without page cache."""

    name = "system-numa"
    gate = None

    def __init__(self, *, interval_s: float = 10.0, retention_s: float = 660.0) -> None:
        """interval_s: reports need means of minutes, and each pod's file costs a read of 10 us."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._targets: Targets | None = None
        self._files: dict[str, KernelFile | None] = {}

    def sample(self, round_: Round) -> dict[Series, float]:
        layout = layout_with(round_.targets, "memory")
        of_node = round_.measured.latest_of(Metric.NODE_NUMA_MEMORY, within_s=OUTDATED_S)
        if not of_node:
            raise Unavailable("there are no samples of NUMA nodes")
        if round_.targets is not self._targets:
            self._follow(round_.targets)
        of_pods: dict[str, int] = {}
        for cgroup, file in self._files.items():
            try:
                if file is None:
                    path = f"{layout.directory('memory', cgroup)}/memory.numa_stat"
                    file = self._files[cgroup] = round_.files.open(path, _NUMA_STAT_BYTES)
                for number, used in numa_memory_of_group(file.read(), layout.version).items():
                    of_pods[number] = of_pods.get(number, 0) + used
            except (OSError, ValueError) as error:
                if file is not None:
                    file.close()
                self._files[cgroup] = None
                if not isinstance(error, OSError) or error.errno not in GONE:
                    round_.problem(f"{cgroup}: {error}")
            round_.step_aside()
        if self._files and not of_pods:
            raise Unavailable("no pod has memory.numa_stat")
        return {
            Series(Metric.SYSTEM_NUMA_MEMORY, number): max(used - of_pods.get(number, 0), 0)
            for (number, _), used in of_node.items()
        }

    def close(self) -> None:
        close_all(self._files.values())
        self._files = {}
        self._targets = None

    def _follow(self, targets: Targets) -> None:
        wanted = (group.cgroup for group in targets.groups if group.is_pod)
        self._files = followed(self._files, wanted, lambda _: None, lambda gone: close_all((gone,)))
        self._targets = targets


def numa_memory_of_group(stat: bytes, version: int) -> dict[str, int]:
    """Return bytes of each NUMA node that are not page cache, from `memory.numa_stat`.

    v1 has pages, and sums of the subtree in lines that begin with "hierarchical_"; v2 has bytes.
    v1's `anon` is what is on the lists of anonymous pages, shared memory included, so that the
    unevictable pages, which are on another list, are added. v2's `anon` lacks shared memory (an
    emptyDir in memory): the lists are summed up, as for the pod's own memory.
    """
    wanted = (
        (b"hierarchical_anon=", b"hierarchical_unevictable=")
        if version == 1
        else (b"inactive_anon ", b"active_anon ", b"unevictable ")
    )
    unit = PAGE_BYTES if version == 1 else 1
    result: dict[str, int] = {}
    for line in stat.split(b"\n"):
        if not line.startswith(wanted):
            continue
        for word in line.split(b" ")[1:]:
            node, equals, number = word.partition(b"=")
            if equals and node[:1] == b"N":
                name = node[1:].decode("ascii", "replace")
                result[name] = result.get(name, 0) + int(number) * unit
    return result
