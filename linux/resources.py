"""What can be set on a node: one name and one canonical value type for each thing.

A name is the cgroup v1 file's where there is one, on v2 too, as in upstream's registry. The value
is canonical and independent of the cgroup version. Files, formats and ranges are in
`linux.cgroup_files`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from apis.cpuset import CpuSet

UNLIMITED: Final = -1
"""Canonical 'no limit' of quotas (µs) and memory limits (bytes), as cgroup v1 writes it."""


class Resource(StrEnum):
    """A thing that can be set. The comment gives the canonical value."""

    # cpu
    CPU_SHARES = "cpu.shares"  # int, 2..262144
    CPU_CFS_QUOTA = (
        "cpu.cfs_quota_us"  # int µs per 100 ms, UNLIMITED; effectors scale to the period
    )
    CPU_CFS_PERIOD = "cpu.cfs_period_us"  # int µs
    CPU_CFS_BURST = "cpu.cfs_burst_us"  # int µs
    CPU_BVT = "cpu.bvt_warp_ns"  # int, -1..2
    CPU_IDLE = "cpu.idle"  # int, 0 or 1
    CPUSET_CPUS = "cpuset.cpus"  # CpuSet, never empty
    CPUSET_MEMS = "cpuset.mems"  # CpuSet of NUMA nodes, never empty
    # memory, bytes unless said otherwise
    MEMORY_LIMIT = "memory.limit_in_bytes"  # int, UNLIMITED
    MEMORY_MIN = "memory.min"  # int
    MEMORY_LOW = "memory.low"  # int
    MEMORY_HIGH = "memory.high"  # int, UNLIMITED
    MEMORY_WMARK_RATIO = "memory.wmark_ratio"  # int percent
    MEMORY_WMARK_SCALE_FACTOR = "memory.wmark_scale_factor"  # int per mille
    MEMORY_WMARK_MIN_ADJ = "memory.wmark_min_adj"  # int percent
    MEMORY_PRIORITY = "memory.priority"  # int, 0..12
    MEMORY_USE_PRIORITY_OOM = "memory.use_priority_oom"  # int, 0 or 1
    MEMORY_OOM_GROUP = "memory.oom.group"  # int, 0 or 1
    MEMORY_PAGECACHE_LIMIT_ENABLE = "memory.pagecache_limit.enable"  # int, 0 or 1
    MEMORY_PAGECACHE_LIMIT_SIZE = "memory.pagecache_limit.size"  # int
    MEMORY_PAGECACHE_LIMIT_SYNC = "memory.pagecache_limit.sync"  # int, 0 or 1
    # block I/O, keyed by the disk's number "major:minor"; see `linux.block_io`
    BLKIO_READ_BPS = "blkio.throttle.read_bps_device"  # int bytes per second
    BLKIO_WRITE_BPS = "blkio.throttle.write_bps_device"  # int bytes per second
    BLKIO_READ_IOPS = "blkio.throttle.read_iops_device"  # int per second
    BLKIO_WRITE_IOPS = "blkio.throttle.write_iops_device"  # int per second
    BLKIO_COST_WEIGHT = "blkio.cost.weight"  # int, 100 is the default; of iocost
    BLKIO_BFQ_WEIGHT = "blkio.bfq.weight_device"  # int, 100 is the default; of the BFQ scheduler
    BLKIO_LATENCY = "io.latency"  # int µs
    BLKIO_COST_QOS = "blkio.cost.qos"  # str: canonical parameters; of the root
    BLKIO_COST_MODEL = "blkio.cost.model"  # str: canonical parameters; of the root
    # of processes
    OOM_SCORE_ADJ = "oom_score_adj"  # int, -1000..1000
    CORE_SCHED_COOKIE = "core_sched_cookie"  # str: the group whose cookie is shared
    # resctrl
    RESCTRL_GROUP = "resctrl.group"  # str: name of the group that the tasks belong to
    RESCTRL_SCHEMATA = "resctrl.schemata"  # str, keyed by group name: canonical schemata text
    # of the container's specification, at creation only
    ENV = "env"  # str, keyed by variable name
    MOUNT = "mount"  # Mount, keyed by destination
    DEVICE = "device"  # DeviceNode, keyed by path
    # of the node
    SYSCTL = "sysctl"  # str, keyed by dotted name: the scheduler's switches
    KERNEL_SETTING = "kernel_setting"  # str, keyed by name: see `linux.kernel_settings`
    HOST_DIRECTORY = "host_directory"  # int: the mode; keyed by absolute path

    # Decisions are dictionaries of resources: str's hash is cached and needs no Python call.
    __hash__ = str.__hash__


DELIVERED_AT_CREATION: Final = frozenset({Resource.OOM_SCORE_ADJ, Resource.RESCTRL_GROUP})
"""What a runtime sets on a container's first process, as the reply to its creation says."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount added to a container."""

    destination: str
    type: str
    source: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node added to a container. `type` is "c" or "b"; `file_mode` like 0o666."""

    path: str
    type: str
    major: int
    minor: int
    file_mode: int


Value = int | str | CpuSet | Mount | DeviceNode
"""The canonical value of a resource."""
