"""kubelet and the container runtime as other writers: they make the groups that we manage.

Names and values follow kubelet's (pod and QoS directories) and runc's or crun's (containers):
linear weights in directories, linear or quadratic ones in containers; on v1 runc copies an empty
cpuset from the parent. With the systemd driver the groups are units and systemd holds their
properties too.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Literal

from tests.simulated.cpuset import configured
from tests.simulated.kernel import SimulatedKernel
from tests.simulated.profiles import Driver, Runtime, WeightFormula
from tests.simulated.systemd import Properties, Systemd
from tests.simulated.tree import Task
from tests.simulated.values import list_text

KubeQos = Literal["Guaranteed", "Burstable", "BestEffort"]
UNLIMITED = -1
PERIOD_US = 100_000
SANDBOX_OOM_SCORE_ADJ = -998

_SCOPE_PREFIX = {
    Runtime.CONTAINERD: "cri-containerd-",
    Runtime.CRIO: "crio-",
    Runtime.DOCKER: "docker-",
}


def shares_of(milli_cpu: int) -> int:
    """kubelet's shares for a CPU request."""
    return 2 if milli_cpu == 0 else max(2, min(milli_cpu * 1024 // 1000, 1 << 18))


def oom_score_adj_of(qos: KubeQos, limits: Limits, capacity_bytes: int) -> int:
    """kubelet's oom_score_adj for a container: by its class, and its share of the memory."""
    if qos == "Guaranteed":
        return -997
    if qos == "BestEffort":
        return 1000
    return min(max(1000 - 1000 * limits.memory_request_bytes // capacity_bytes, 3), 999)


def linear_weight(shares: int) -> int:
    """`cpu.weight` as kubelet, and runc before 1.3.2, compute it."""
    return 1 + (shares - 2) * 9999 // 262142


def quadratic_weight(shares: int) -> int:
    """`cpu.weight` as runc since 1.3.2 and crun since 1.23 compute it."""
    if shares <= 2:
        return 1
    if shares >= 262144:
        return 10_000
    log = math.log2(shares)
    return math.ceil(10 ** ((log * log + 125 * log) / 612 - 7 / 34))


@dataclass(frozen=True)
class Limits:
    """What a container asks for. Milli-CPU and bytes; 0 limit: none."""

    cpu_request_milli: int = 0
    cpu_limit_milli: int = 0
    memory_limit_bytes: int = 0
    cpus: str = ""
    memory_request_bytes: int = 0

    @property
    def quota_us(self) -> int:
        if not self.cpu_limit_milli:
            return UNLIMITED
        return max(1000, self.cpu_limit_milli * PERIOD_US // 1000)


@dataclass
class Container:
    """A running container. `cgroup` is relative to the hierarchy's root."""

    id: str
    cgroup: str
    task: Task
    limits: Limits
    pod: Pod

    @property
    def pid(self) -> int:
        return self.task.pid


@dataclass
class Pod:
    """A pod with its directory."""

    uid: str
    qos: KubeQos
    cgroup: str
    kubelet: Kubelet = field(repr=False)
    limits: tuple[Limits, ...] = ()
    sandbox: Container | None = None
    containers: list[Container] = field(default_factory=list)

    def start(
        self,
        limits: Limits = Limits(),
        *,
        threads: int = 1,
        adjusted: Mapping[str, str] = MappingProxyType({}),
        oom_score_adj: int | None = None,
    ) -> Container:
        """Start a container in this pod, as the runtime does.

        adjusted: file name -> text that a plugin gave the runtime in place of kubelet's wish;
        oom_score_adj likewise.
        """
        container = self.kubelet.start_container(
            self, limits, threads=threads, adjusted=adjusted, oom_score_adj=oom_score_adj
        )
        self.containers.append(container)
        return container

    def remove(self) -> None:
        """End the pod and its directory."""
        self.kubelet.remove_pod(self)


class Kubelet:
    """Makes QoS directories, pods and containers on a simulated kernel."""

    def __init__(
        self,
        kernel: SimulatedKernel,
        *,
        driver: Driver | None = None,
        weights: WeightFormula | None = None,
        seed: int = 0,
    ) -> None:
        self.kernel = kernel
        self.driver = driver or kernel.profile.driver
        self.weights = weights or kernel.profile.weights
        self.systemd = Systemd(kernel)
        self.pods: dict[str, Pod] = {}
        self._random = Random(seed)
        self._ids = count(1)
        self.root = "kubepods.slice" if self.driver is Driver.SYSTEMD else "kubepods"
        allocatable = kernel.possible_cpus * 1000
        self._make(self.root, shares_of(allocatable), UNLIMITED, kernel.memory_bytes)
        for qos in ("Burstable", "BestEffort"):
            self._make(self.qos_dir(qos), 2, UNLIMITED, 0)

    def qos_dir(self, qos: KubeQos) -> str:
        """The directory of a QoS class."""
        if qos == "Guaranteed":
            return self.root
        if self.driver is Driver.SYSTEMD:
            return f"{self.root}/kubepods-{qos.lower()}.slice"
        return f"{self.root}/{qos.lower()}"

    def pod_dir(self, uid: str, qos: KubeQos) -> str:
        """The directory of a pod."""
        if self.driver is Driver.CGROUPFS:
            return f"{self.qos_dir(qos)}/pod{uid}"
        stem = "kubepods" if qos == "Guaranteed" else f"kubepods-{qos.lower()}"
        return f"{self.qos_dir(qos)}/{stem}-pod{uid.replace('-', '_')}.slice"

    def add_pod(self, *limits: Limits, qos: KubeQos = "Burstable", uid: str = "") -> Pod:
        """Make a pod's directory and its sandbox; `limits` are those of its containers to come."""
        uid = uid or str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        cgroup = self.pod_dir(uid, qos)
        pod = Pod(uid, qos, cgroup, self, limits)
        self.pods[uid] = pod
        milli = sum(limit.cpu_request_milli for limit in limits)
        bounded = bool(limits) and all(limit.cpu_limit_milli for limit in limits)
        quota = (
            max(1000, sum(limit.cpu_limit_milli for limit in limits) * PERIOD_US // 1000)
            if bounded
            else UNLIMITED
        )
        memory = (
            sum(limit.memory_limit_bytes for limit in limits)
            if limits and all(limit.memory_limit_bytes for limit in limits)
            else 0
        )
        self._make(cgroup, shares_of(milli), quota, memory)
        pod.sandbox = self.start_container(
            pod, Limits(), threads=1, adjusted={}, oom_score_adj=SANDBOX_OOM_SCORE_ADJ
        )
        self._update_qos()
        return pod

    def start_container(
        self,
        pod: Pod,
        limits: Limits,
        *,
        threads: int,
        adjusted: Mapping[str, str],
        oom_score_adj: int | None = None,
    ) -> Container:
        """As the runtime: make the group, write its values, start the process in it.

        A refused write fails the creation, as runc does: the group goes, OSError stays.
        """
        identity = f"{next(self._ids):08x}" + f"{self._random.getrandbits(224):056x}"
        if self.driver is Driver.SYSTEMD:
            name = f"{_SCOPE_PREFIX[self.kernel.profile.runtime]}{identity}.scope"
        elif self.kernel.profile.runtime is Runtime.CRIO:
            name = f"crio-{identity}"
        else:
            name = identity
        cgroup = f"{pod.cgroup}/{name}"
        try:
            self._make(
                cgroup,
                shares_of(limits.cpu_request_milli),
                limits.quota_us,
                limits.memory_limit_bytes,
                cpus=limits.cpus,
                writer="runtime",
                adjusted=adjusted,
            )
        except OSError:
            self._end_group(cgroup)
            raise
        task = self.kernel.spawn_process("app", cgroup=cgroup, threads=threads)
        if oom_score_adj is None:
            oom_score_adj = oom_score_adj_of(pod.qos, limits, self.kernel.memory_bytes)
        for thread in self.kernel.threads_of(task.pid):
            thread.oom_score_adj = oom_score_adj
        return Container(identity, cgroup, task, limits, pod)

    def stop_container(self, container: Container) -> None:
        """End a container and its group."""
        self._end_group(container.cgroup)
        if container in container.pod.containers:
            container.pod.containers.remove(container)

    def kill_pod(self, pod: Pod) -> None:
        """End a pod's containers. Its directory stays until the pod is removed."""
        for container in [*pod.containers, *([pod.sandbox] if pod.sandbox else ())]:
            self.stop_container(container)
        del self.pods[pod.uid]
        self._update_qos()

    def remove_pod(self, pod: Pod) -> None:
        """End a pod and its directory."""
        self._end_group(pod.cgroup)
        if self.pods.pop(pod.uid, None):
            self._update_qos()

    def resize(
        self,
        container: Container,
        limits: Limits,
        *,
        adjusted: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Resize a container in place: write the values, and set them in systemd's unit."""
        container.limits = limits
        unit = self.systemd.units.get(container.cgroup.rpartition("/")[2])
        if unit is not None:
            shares = shares_of(limits.cpu_request_milli)
            memory = limits.memory_limit_bytes
            unit.properties.update(
                self._properties(shares, limits.quota_us, memory, limits.cpus, "runtime", adjusted)
            )
        self._values(
            container.cgroup,
            shares_of(limits.cpu_request_milli),
            limits.quota_us,
            limits.memory_limit_bytes,
            limits.cpus,
            "runtime",
            adjusted,
        )

    def path(self, cgroup: str, file: str) -> str:
        """The absolute path of a group's file."""
        if self.kernel.profile.cgroup == 2:
            return f"/sys/fs/cgroup/{cgroup}/{file}"
        controller = "cpu" if file in ("tasks", "cgroup.procs") else file.split(".")[0]
        return f"/sys/fs/cgroup/{controller}/{cgroup}/{file}"

    def _update_qos(self) -> None:
        """kubelet keeps the Burstable directory's shares at the sum of its pods'.

        With the systemd driver it sets the property of both classes' slices with each pod that
        comes or goes, also when nothing changed.
        """
        milli = sum(
            limit.cpu_request_milli
            for pod in self.pods.values()
            if pod.qos == "Burstable"
            for limit in pod.limits
        )
        shares = shares_of(milli)
        if self.driver is Driver.SYSTEMD:
            for name, value in (("burstable", shares), ("besteffort", 2)):
                weight = self._weight(value, "kubelet")
                self.systemd.set_property(
                    f"kubepods-{name}.slice", CPUShares=value, CPUWeight=weight
                )
        self._values(self.qos_dir("Burstable"), shares, UNLIMITED, 0, "", "kubelet", {})

    def _end_group(self, cgroup: str) -> None:
        name = cgroup.rpartition("/")[2]
        if name in self.systemd.units:
            self.systemd.stop(name)
        else:
            self.kernel.remove_group(cgroup)

    def _make(
        self,
        cgroup: str,
        shares: int,
        quota_us: int,
        memory_bytes: int,
        *,
        cpus: str = "",
        writer: str = "kubelet",
        adjusted: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        kernel = self.kernel
        if kernel.profile.cgroup == 2:
            self._make_v2(cgroup)
        else:
            for hierarchy in kernel.hierarchies:
                self._make_v1(hierarchy.name or next(iter(hierarchy.controllers)), cgroup)
            self._copy_cpusets(cgroup, writer)
        if self.driver is Driver.SYSTEMD:
            self._hold_unit(cgroup, shares, quota_us, memory_bytes, cpus, writer, adjusted)
        self._values(cgroup, shares, quota_us, memory_bytes, cpus, writer, adjusted)

    def _hold_unit(
        self,
        cgroup: str,
        shares: int,
        quota_us: int,
        memory_bytes: int,
        cpus: str,
        writer: str,
        adjusted: Mapping[str, str],
    ) -> None:
        """Start the unit with the values that runc sets in it, a plugin's included.

        So a `daemon-reload` restores these values, and not kubelet's request.
        """
        properties = self._properties(shares, quota_us, memory_bytes, cpus, writer, adjusted)
        *above, name = cgroup.split("/")
        self.systemd.start(name, parent=above[-1] if above else "", **properties)

    def _properties(
        self,
        shares: int,
        quota_us: int,
        memory_bytes: int,
        cpus: str,
        writer: str,
        adjusted: Mapping[str, str],
    ) -> Properties:
        properties: Properties = {
            "CPUShares": shares,
            "CPUWeight": self._weight(shares, writer),
            "CPUQuotaUs": quota_us,
        }
        if memory_bytes:
            properties["MemoryMax"] = memory_bytes
        if "cpu.weight" in adjusted:
            properties["CPUWeight"] = int(adjusted["cpu.weight"])
        if "cpu.max" in adjusted:
            quota = adjusted["cpu.max"].split()[0]
            properties["CPUQuotaUs"] = UNLIMITED if quota == "max" else int(quota)
        if adjusted.get("memory.max", "max") != "max":
            properties["MemoryMax"] = int(adjusted["memory.max"])
        for file, prop in (("min", "MemoryMin"), ("low", "MemoryLow"), ("high", "MemoryHigh")):
            if adjusted.get(f"memory.{file}", "max") != "max":
                properties[prop] = int(adjusted[f"memory.{file}"])
        if adjusted.get("cpuset.cpus", cpus):
            properties["AllowedCPUs"] = adjusted.get("cpuset.cpus", cpus)
        return properties

    def _make_v1(self, controller: str, cgroup: str) -> None:
        self.kernel.make(f"/sys/fs/cgroup/{controller}/{cgroup}")

    def _make_v2(self, cgroup: str) -> None:
        parts = cgroup.split("/")
        for end in range(len(parts)):
            above = "/".join(["/sys/fs/cgroup", *parts[:end]])
            self.kernel.write_as(
                "kubelet", f"{above}/cgroup.subtree_control", "+cpuset +cpu +io +memory +pids"
            )
            self.kernel.make(f"{above}/{parts[end]}")

    def _copy_cpusets(self, cgroup: str, writer: str) -> None:
        parts = cgroup.split("/")
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            group = self.kernel.group(path, "cpuset")
            assert group.parent is not None
            for kind in ("cpus", "mems"):
                if not configured(group, kind):
                    self.kernel.write_as(
                        writer,
                        f"/sys/fs/cgroup/cpuset/{path}/cpuset.{kind}",
                        list_text(configured(group.parent, kind)),
                    )

    def _weight(self, shares: int, writer: str) -> int:
        if writer == "runtime" and self.weights is WeightFormula.QUADRATIC:
            return quadratic_weight(shares)
        return linear_weight(shares)

    def _values(
        self,
        cgroup: str,
        shares: int,
        quota_us: int,
        memory_bytes: int,
        cpus: str,
        writer: str,
        adjusted: Mapping[str, str],
    ) -> None:
        values: dict[str, str] = {}
        if self.kernel.profile.cgroup == 2:
            values["cpu.weight"] = str(self._weight(shares, writer))
            quota = "max" if quota_us == UNLIMITED else str(quota_us)
            values["cpu.max"] = f"{quota} {PERIOD_US}"
            if memory_bytes:
                values["memory.max"] = str(memory_bytes)
        else:
            values["cpu.shares"] = str(shares)
            values["cpu.cfs_period_us"] = str(PERIOD_US)
            values["cpu.cfs_quota_us"] = str(quota_us)
            if memory_bytes:
                values["memory.limit_in_bytes"] = str(memory_bytes)
        if cpus:
            values["cpuset.cpus"] = cpus
        values.update(adjusted)
        for file, value in values.items():
            self.kernel.write_as(writer, self.path(cgroup, file), value)
