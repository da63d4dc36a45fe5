"""Switches that bring upstream's behaviour back where ours differs on purpose. All default to off.

An operator lists their names under `compat` in the configuration. docs/compatibility.md explains
each, with its reason; a test keeps the two lists equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

GROUP_IDENTITY_BVT_ONLY: Final = "GroupIdentityBvtOnly"
CPU_IDLE_ON_QOS_DIRECTORIES: Final = "CPUIdleOnQoSDirectories"
POD_SUMS_OF_REGULAR_CONTAINERS: Final = "PodSumsOfRegularContainers"
GPU_MINOR_NUMBERS: Final = "GPUMinorNumbers"
GPU_WITHOUT_DEVICE_NODES: Final = "GPUWithoutDeviceNodes"
MEMORY_QOS_WRITES_ZEROS: Final = "MemoryQOSWritesZeros"
NORMALIZED_PODS_ON_V1: Final = "NormalizedPodsOnV1"
OOM_GROUP_ON_QOS_DIRECTORIES: Final = "OOMGroupOnQoSDirectories"
COLD_START_BY_AGE_ONLY: Final = "PredictionColdStartByAge"
PREDICTION_HOST_APPS_ARE_SYSTEM: Final = "PredictionHostAppsAreSystem"
PREDICTION_CUTS_MEMORY_PEAKS: Final = "PredictionCutsMemoryPeaks"
EVICT_BE_BY_PRIORITY_ALONE: Final = "EvictBEByPriorityAlone"
EVICTION_MEASURES_COARSELY: Final = "EvictionMeasuresCoarsely"
BEST_EFFORT_POOL_ALWAYS: Final = "BestEffortPoolAlways"
SUPPRESS_WITHOUT_DAMPING: Final = "SuppressWithoutDamping"
BURST_ON_ANY_THROTTLING: Final = "BurstOnAnyThrottling"
BURST_QUOTA_STAYS: Final = "BurstQuotaStays"
EVICTION_STOPS_CONTAINERS: Final = "EvictionStopsContainers"

SWITCHES: Final[Mapping[str, str]] = MappingProxyType(
    {
        GROUP_IDENTITY_BVT_ONLY: "GroupIdentity does nothing on kernels without cpu.bvt_warp_ns",
        CPU_IDLE_ON_QOS_DIRECTORIES: "CoreSched writes cpu.idle to QoS directories, not to pods",
        POD_SUMS_OF_REGULAR_CONTAINERS: (
            "pod sums leave out init containers, sidecars and overhead"
        ),
        GPU_MINOR_NUMBERS: "NVIDIA_VISIBLE_DEVICES names GPUs by minor number, never by UUID",
        GPU_WITHOUT_DEVICE_NODES: "GPUEnvInject gives no device nodes, only the environment",
        NORMALIZED_PODS_ON_V1: "CPU normalisation divides pods' own quotas on cgroup v1 as well",
        MEMORY_QOS_WRITES_ZEROS: (
            "memory QoS writes 0 or max where a percentage is 0 or a class is switched off"
        ),
        OOM_GROUP_ON_QOS_DIRECTORIES: (
            "memory QoS writes memory.oom.group to kubepods and the QoS directories as well"
        ),
        COLD_START_BY_AGE_ONLY: "prediction trusts the model of an old pod after its first sample",
        PREDICTION_HOST_APPS_ARE_SYSTEM: (
            "prediction counts host applications of koord-batch and koord-free as system"
        ),
        PREDICTION_CUTS_MEMORY_PEAKS: (
            "prediction learns the 90th percentile of a minute's memory, not the largest value"
        ),
        EVICT_BE_BY_PRIORITY_ALONE: (
            "evictions of best-effort pods ignore eviction-priority and eviction-enabled"
        ),
        EVICTION_MEASURES_COARSELY: (
            "evictions by use count whole percents, of one sample (memory) or of the mean (CPU)"
        ),
        EVICTION_STOPS_CONTAINERS: (
            "evictions stop containers at once unless only-evict-by-api is set, without the API"
        ),
        BEST_EFFORT_POOL_ALWAYS: (
            "best-effort pods are kept off LSE pods' and reserved CPUs while suppression is off"
        ),
        SUPPRESS_WITHOUT_DAMPING: "CPU suppression follows every change of one CPU at once",
        BURST_ON_ANY_THROTTLING: "one throttled period in the last sample raises a quota",
        BURST_QUOTA_STAYS: "a raised quota stays until the node is overloaded",
    }
)
"""Name -> what it does when it is on."""
