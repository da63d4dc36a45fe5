"""Gathers what the NodeResourceTopology is computed from: the machine, kubelet, pods and the Node.

Runs in worker threads, a few seconds apart. Pods, the Node and kubelet's file are looked at each
time; what changes seldom is read seldom, and is kept where it cannot be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from apis.cpuset import CpuSet
from hooks.facts import NodeMeta
from hooks.subject import Pod
from koordlet.configuration.config import Config
from koordlet.node.hardware import Machine
from koordlet.reporters.topology import Facts, KeptTopology, topology
from koordlet.sources.kubelet import KubeletClient
from koordlet.sources.kubelet_settings import KubeletSettings, read_exclusive_cpus
from koordlet.sources.polling import SourceError
from linux.cpus import Cpu
from linux.host import Host
from linux.numa_memory import CpuKind, NumaMemory, read_cpu_kind, read_numa_memory
from linux.topology import read_topology

_MACHINE_S: Final = 60.0
"""How often CPUs, memory and huge pages are read again; upstream's interval. A change of the online
CPUs is noticed at once."""
_KUBELET_S: Final = 300.0
"""How often kubelet's configuration is read again: it changes only with a restart of kubelet. Half
of it doubles the requests for nothing."""
_KUBELET_RETRY_S: Final = 10.0
"""How often kubelet is asked until it has answered once; as for its pods."""


class TopologyFacts:
    """One thread at a time gathers."""

    def __init__(
        self,
        config: Config,
        host: Host,
        *,
        machine: Callable[[], Machine | None],
        pods: Callable[[], Sequence[tuple[Pod, bool]]],
        node: Callable[[], NodeMeta | None],
        kubelet: Callable[[], KubeletClient | None],
        gate: Callable[[str], bool],
        listed: Callable[[], bool],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """The callables return the newest values. kubelet: None where it is no source. gate:
        whether a feature gate is on. listed: whether every source of pods has listed them once."""
        self._config = config
        self._host = host
        self._machine = machine
        self._pods = pods
        self._node = node
        self._kubelet = kubelet
        self._gate = gate
        self._listed = listed
        self._was_listed = False
        self._monotonic = monotonic
        self._read_of: Machine | None = None
        self._read_at = -float("inf")
        self._cpus: tuple[Cpu, ...] = ()
        self._memory: Mapping[int, NumaMemory] = {}
        self._kind = CpuKind()
        self._settings: KubeletSettings | None = None
        self._settings_problem = ""
        self._asked_at = -float("inf")
        self._facts: Facts | None = None
        self._kept: KeptTopology | None = None

    def gather(self) -> KeptTopology | None:
        """Return the topology; None while it is not to be reported.

        Raises OSError, ValueError and SourceError for what cannot be read, InputError for a bad
        annotation of the Node.
        """
        machine = self._machine()
        if machine is None or not self._gate("NodeTopologyReport"):
            return None
        if not self._was_listed:
            # One round later the pods of the last list are published for certain. Pools that are
            # computed without a pod would give its CPUs to others.
            self._was_listed = self._listed()
            return None
        self._read_machine(machine)
        settings = self._kubelet_settings()
        facts = Facts(
            cpus=self._cpus,
            memory=self._memory,
            kind=self._kind,
            kubelet=settings,
            exclusive=self._exclusive(settings),
            pods=tuple(pod for pod, _ in self._pods()),
            node=self._node() or NodeMeta(self._config.node_name),
            huge_pages=self._gate("HugePageReport"),
        )
        if self._kept is None or facts != self._facts:
            self._kept = KeptTopology(topology(facts))
            self._facts = facts
        return self._kept

    def _read_machine(self, machine: Machine) -> None:
        now = self._monotonic()
        if machine is self._read_of and now - self._read_at < _MACHINE_S:
            return
        found = read_topology(self._host)
        self._memory = read_numa_memory(self._host, found.nodes)
        self._kind = read_cpu_kind(self._host)
        self._cpus = found.cpus
        self._read_of, self._read_at = machine, now

    def _kubelet_settings(self) -> KubeletSettings | None:
        """Return kubelet's configuration: the last one that was read. Raises SourceError."""
        client = self._kubelet()
        if client is None or self._config.reports.disable_query_kubelet_config:
            return None
        now = self._monotonic()
        pause = _KUBELET_RETRY_S if self._settings_problem else _KUBELET_S
        if now - self._asked_at >= pause:
            self._asked_at = now
            try:
                self._settings = client.fetch_settings()
                self._settings_problem = ""
            except SourceError as error:
                self._settings_problem = str(error)
        if self._settings is None:
            raise SourceError(self._settings_problem)
        return self._settings

    def _exclusive(self, settings: KubeletSettings | None) -> Mapping[str, CpuSet]:
        if settings is None or not settings.static:
            return {}
        return read_exclusive_cpus(self._config.kubelet.directory)
