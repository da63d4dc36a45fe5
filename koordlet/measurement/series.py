"""The series that are measured, and how strategies, prediction and reports read them.

A series is a metric of one object, with upstream's metric names (docs/facts/koordlet.md, "Series").
Readers know the `Measurements` protocol alone: the store has it, and a test or a replay may too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple, Protocol


class Metric(StrEnum):
    """What is measured. The comment gives the unit, and what `Series.of` and `detail` name."""

    # the node
    NODE_CPU = "node_cpu_usage"  # cores
    NODE_MEMORY = "node_memory_usage"  # bytes, without page cache
    NODE_MEMORY_WITH_PAGE_CACHE = "node_memory_usage_with_page_cache"  # bytes
    NODE_MEMORY_WITH_HOT_PAGES = "node_memory_with_hot_page_usage"  # bytes
    NODE_MEMORY_COLD = "node_memory_cold_page_size"  # bytes
    NODE_NUMA_CPU = "node_numa_cpu_usage"  # cores; of: NUMA node
    NODE_NUMA_MEMORY = "node_numa_memory_usage"  # bytes; of: NUMA node
    SYSTEM_CPU = "sys_cpu_usage"  # cores: neither pods nor host applications
    SYSTEM_MEMORY = "sys_memory_usage"  # bytes, without page cache
    SYSTEM_MEMORY_WITH_PAGE_CACHE = "sys_memory_usage_with_page_cache"  # bytes; our own
    SYSTEM_NUMA_CPU = "sys_numa_cpu_usage"  # cores; of: NUMA node
    SYSTEM_NUMA_MEMORY = "sys_numa_memory_usage"  # bytes; of: NUMA node
    NODE_GPU_CORE = "node_gpu_core_usage"  # percent of one GPU; of: UUID, detail: minor
    NODE_GPU_MEMORY = "node_gpu_memory_usage"  # bytes; of: UUID, detail: minor
    NODE_PSI = "node_psi"  # percent; detail: see psi.py
    NODE_DISK_READ = "node_disk_read_bytes"  # bytes/s; of: device name
    NODE_DISK_WRITE = "node_disk_write_bytes"  # bytes/s; of: device name
    NODE_DISK_BUSY = "node_disk_busy"  # ratio 0..1; of: device name
    NODE_FILESYSTEM_SIZE = "node_filesystem_size_bytes"  # bytes; of: mount point
    NODE_FILESYSTEM_USED = "node_filesystem_used_bytes"  # bytes; of: mount point
    NODE_NETWORK_RECEIVE = "node_network_receive_bytes"  # bytes/s; of: interface
    NODE_NETWORK_SEND = "node_network_send_bytes"  # bytes/s; of: interface
    # all best-effort pods
    BE_CPU_USED = "node_be_usage"  # milli-cores
    BE_CPU_LIMIT = "node_be_real-limit"  # milli-cores that they may use now
    BE_CPU_REQUEST = "node_be_request"  # milli-cores of batch-cpu
    # pods; of: uid
    POD_CPU = "pod_cpu_usage"  # cores
    POD_MEMORY = "pod_memory_usage"  # bytes, without page cache
    POD_MEMORY_WITH_PAGE_CACHE = "pod_memory_usage_with_page_cache"  # bytes
    POD_MEMORY_WITH_HOT_PAGES = "pod_memory_with_hot_page_usage"  # bytes
    POD_MEMORY_COLD = "pod_memory_cold_page_size"  # bytes
    POD_CPU_THROTTLED = "pod_cpu_throttled"  # ratio of periods, 0..1
    POD_PSI = "pod_psi"  # percent; detail: see psi.py
    POD_GPU_CORE = "pod_gpu_core_usage"  # percent of one GPU; detail: "UUID/minor"
    POD_GPU_MEMORY = "pod_gpu_memory_usage"  # bytes; detail: "UUID/minor"
    # containers; of: the id without a scheme
    CONTAINER_CPU = "container_cpu_usage"  # cores
    CONTAINER_MEMORY = "container_memory_usage"  # bytes, without page cache
    CONTAINER_MEMORY_WITH_PAGE_CACHE = "container_memory_usage_with_page_cache"  # bytes
    CONTAINER_MEMORY_WITH_HOT_PAGES = "container_memory_with_hot_page_usage"  # bytes
    CONTAINER_MEMORY_COLD = "container_memory_cold_page_size"  # bytes
    CONTAINER_CPU_THROTTLED = "container_cpu_throttled"  # ratio of periods, 0..1
    CONTAINER_PSI = "container_psi"  # percent; detail: see psi.py
    CONTAINER_CPI = "container_cpi"  # events in the window; detail: "cycle" or "instruction"
    CONTAINER_GPU_CORE = "container_gpu_core_usage"  # percent of one GPU; detail: "UUID/minor"
    CONTAINER_GPU_MEMORY = "container_gpu_memory_usage"  # bytes; detail: "UUID/minor"
    # host applications; of: the application's name
    HOST_APP_CPU = "host_application_cpu_usage"  # cores
    HOST_APP_MEMORY = "host_application_memory_usage"  # bytes, without page cache
    HOST_APP_MEMORY_WITH_PAGE_CACHE = "host_application_memory_usage_with_page_cache"  # bytes
    HOST_APP_MEMORY_WITH_HOT_PAGES = "host_application_memory_with_hot_page_usage"  # bytes
    HOST_APP_MEMORY_COLD = "host_application_memory_cold_page_size"  # bytes
    # resctrl; of: group, detail: cache id, or "cache id/mbm_local_bytes" and so on
    RESCTRL_LLC = "resctrl_resource_llc"  # bytes
    RESCTRL_BANDWIDTH = "resctrl_resource_mb"  # bytes/s

    __hash__ = str.__hash__


class Series(NamedTuple):
    """One metric of one object. of, detail: see `Metric`; "" where a metric has none."""

    metric: Metric
    of: str = ""
    detail: str = ""


class Aggregate(NamedTuple):
    """Statistics over the samples of one window. span_s: from the first sample to the last."""

    samples: int
    span_s: float
    average: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float
    latest: float


class Measurements(Protocol):
    """The samples as of one moment, which stays the same while they are read."""

    @property
    def now(self) -> float:
        """The moment, in seconds of the monotonic clock."""
        ...

    def latest(self, series: Series, *, within_s: float) -> float | None:
        """Return the newest sample that is at most `within_s` old."""
        ...

    def average(self, series: Series, *, within_s: float) -> float | None:
        """Return the mean of the samples that are at most `within_s` old."""
        ...

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        """Return all statistics of the samples that are at most `within_s` old.

        Percentile p of n samples is the element at max(int(n p) - 1, 0) of the ascending order,
        as upstream's metric cache has it.
        """
        ...


LATEST_PERIODS: Final = 2
"""A sample counts as the latest for so many collection intervals; upstream's rule."""
