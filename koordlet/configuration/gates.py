"""The daemon's feature gates, with upstream's names, defaults and stages; and our own.

Facts: docs/facts/koordlet.md, "Feature gates".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from apis.gates import OFF, ON, OWN, Gate

GATES: Final[Mapping[str, Gate]] = MappingProxyType(
    {
        # runtime hooks
        "GroupIdentity": ON,
        "CPUSetAllocator": ON,
        "BatchResource": ON,
        "GPUEnvInject": OFF,
        "RDMADeviceInject": OFF,
        "CPUNormalization": OFF,
        "CoreSched": OFF,
        "TerwayQoS": OFF,
        "TCNetworkQoS": OFF,
        "Resctrl": OFF,
        "OOMScoreAdj": OFF,
        # the rest of the daemon
        "AuditEvents": OFF,
        "AuditEventsHTTPHandler": OFF,
        "BECPUSuppress": ON,
        "BECPUManager": OFF,
        "BECPUEvict": OFF,
        "CPUEvict": OFF,
        "CPUAllocatableEvict": OFF,
        "BEMemoryEvict": OFF,
        "MemoryEvict": OFF,
        "MemoryAllocatableEvict": OFF,
        "CPUBurst": ON,
        "SystemConfig": OFF,
        "RdtResctrl": ON,
        "ResctrlCollector": OFF,
        "CgroupReconcile": OFF,
        "NodeTopologyReport": ON,
        "Accelerators": OFF,
        "RDMADevices": OFF,
        "CPICollector": OFF,
        "Libpfm4": OFF,
        "PSICollector": OFF,
        "BlkIOReconcile": OFF,
        "ColdPageCollector": OFF,
        "HugePageReport": OFF,
        "PodResourcesProxy": OFF,
        "HamiCoreVGPUMonitor": OFF,
        "PerCPUMetric": OFF,
        "NodeMetricPromMetrics": OFF,
        # ours, unknown to upstream: docs/compatibility.md, "Gates of our own"
        "PressureSuppress": OWN,
        "BandwidthSuppress": OWN,
    }
)

BEYOND_POLICIES: Final = frozenset(
    {
        "Accelerators",
        "AuditEvents",
        "AuditEventsHTTPHandler",
        "BECPUManager",
        "CPICollector",
        "ColdPageCollector",
        "HamiCoreVGPUMonitor",
        "HugePageReport",
        "NodeMetricPromMetrics",
        "NodeTopologyReport",
        "PSICollector",
        "PerCPUMetric",
        "PodResourcesProxy",
        "RDMADevices",
        "ResctrlCollector",
        "TCNetworkQoS",
        "TerwayQoS",
    }
)
"""Gates that have an effect here but are not the gate of a policy."""
