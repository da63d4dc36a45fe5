"""The CPU of all best-effort pods: used, requested, and what they may use now.

What they may use: the CPUs in the cpuset of any of their containers, within the cpuset of their
QoS directory, and no more than that directory's quota. Files: docs/measurement.md, "Best effort".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from koordlet.measurement.collecting import Round, Targets, Unavailable, followed, layout_with
from koordlet.measurement.counters import Rate, number_after, within
from koordlet.measurement.kernel_files import GONE, KernelFile, close_all
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Layout, qos_dir

_MILLI: Final = 1000
_CPUSET_BYTES: Final = 32 * 1024
"""The longest list of 8192 CPUs has 20 KiB."""


class BestEffortCollector:
    """See the module."""

    name = "best-effort"
    gate = None

    def __init__(self, cpus: int, *, interval_s: float = 1.0, retention_s: float = 660.0) -> None:
        """cpus: of the machine. retention_s: upstream's CPU eviction averages at most 10 min."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._cpus = cpus
        self._targets: Targets | None = None
        self._directory = ""
        self._files: dict[str, KernelFile] = {}
        self._containers: dict[str, KernelFile | None] = {}
        self._rate = Rate(interval_s)

    def sample(self, round_: Round) -> dict[Series, float]:
        layout = layout_with(round_.targets, "cpu", "cpuacct")
        if not layout.kubepods:
            raise Unavailable("the directory of the pods is not known yet")
        if round_.targets is not self._targets:
            self._follow(round_.targets, layout)
        try:
            return self._sample(round_, layout)
        except (OSError, ValueError):
            self.close()
            raise

    def close(self) -> None:
        close_all((*self._files.values(), *self._containers.values()))
        self._files = {}
        self._containers = {}
        self._rate.forget()
        self._targets = None

    def _sample(self, round_: Round, layout: Layout) -> dict[Series, float]:
        samples: dict[Series, float] = {}
        if layout.version == 1:
            used = int(self._read(round_, layout, "cpuacct", "cpuacct.usage"))
            per_core = 1e9
        else:
            used = number_after(self._read(round_, layout, "cpu", "cpu.stat"), b"\nusage_usec ")
            per_core = 1e6
        rate = self._rate.per_second(used, round_.clock())
        cores = None if rate is None else within(rate / per_core, self._cpus)
        if cores is not None:
            samples[Series(Metric.BE_CPU_USED)] = cores * _MILLI
        samples[Series(Metric.BE_CPU_LIMIT)] = self._limit(round_, layout)
        requested = sum(
            pod.batch_cpu_request_milli for pod in round_.targets.pods if pod.best_effort
        )
        if requested > 0:
            samples[Series(Metric.BE_CPU_REQUEST)] = requested
        return samples

    def _limit(self, round_: Round, layout: Layout) -> float:
        """Return the milli-cores that best-effort pods may use."""
        cpus_file = "cpuset.cpus" if layout.version == 1 else "cpuset.cpus.effective"
        try:
            whole = cpu_mask(self._read(round_, layout, "cpuset", cpus_file))
            cpus = self._of_containers(round_, layout, whole, cpus_file).bit_count()
        except OSError as error:
            if error.errno not in GONE:
                raise
            cpus = 0
        except KeyError:
            cpus = 0  # v1 without a cpuset hierarchy
        limit = (cpus or self._cpus) * _MILLI
        quota = self._quota_milli(round_, layout)
        return limit if quota is None else min(limit, quota)

    def _of_containers(self, round_: Round, layout: Layout, whole: int, cpus_file: str) -> int:
        """Return the mask of the CPUs that any container may use; `whole` without containers."""
        union = 0
        for cgroup, file in self._containers.items():
            try:
                if file is None:
                    path = f"{layout.directory('cpuset', cgroup)}/{cpus_file}"
                    file = self._containers[cgroup] = round_.files.open(path, _CPUSET_BYTES)
                union |= cpu_mask(file.read())
            except OSError as error:
                if error.errno not in GONE:
                    raise
                if file is not None:
                    file.close()
                self._containers[cgroup] = None
            if union & whole == whole:
                break
        return union & whole or whole

    def _quota_milli(self, round_: Round, layout: Layout) -> int | None:
        if layout.version == 1:
            quota = int(self._read(round_, layout, "cpu", "cpu.cfs_quota_us"))
            if quota < 0:
                return None
            period = int(self._read(round_, layout, "cpu", "cpu.cfs_period_us"))
        else:
            try:
                content = self._read(round_, layout, "cpu", "cpu.max")
            except OSError as error:
                if error.errno in GONE:
                    return None  # the cpu controller is not enabled here
                raise
            first, _, second = content.partition(b" ")
            if first == b"max":
                return None
            quota, period = int(first), int(second)
        return quota * _MILLI // period if period > 0 else None

    def _read(self, round_: Round, layout: Layout, controller: str, name: str) -> bytes:
        file = self._files.get(name)
        if file is None:
            path = f"{layout.directory(controller, self._directory)}/{name}"
            file = self._files[name] = round_.files.open(path, _CPUSET_BYTES)
        return file.read()

    def _follow(self, targets: Targets, layout: Layout) -> None:
        directory = qos_dir(layout.driver, layout.kubepods, KubeQoS.BESTEFFORT)
        if directory != self._directory or (
            self._targets is not None and self._targets.layout != layout
        ):
            self.close()
            self._directory = directory
        wanted = (
            group.cgroup
            for group in targets.groups
            if not group.is_pod and group.cgroup.startswith(f"{directory}/")
        )
        self._containers = followed(
            self._containers, wanted, lambda _: None, lambda gone: close_all((gone,))
        )
        self._targets = targets


@lru_cache(maxsize=256)
def cpu_mask(content: bytes) -> int:
    """Return a kernel's CPU list as a bit mask. ValueError for what is none."""
    return CpuSet.parse(content.decode("ascii", "replace").strip()).mask
