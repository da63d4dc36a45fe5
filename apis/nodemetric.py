"""NodeMetric: what a node reports about its use. Source: api.md section 5.

Struct values that upstream's Go types always write ({}, "0s", null) are written here too, so that
both sides store the same bytes for the same facts.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, json_decoder
from apis.device import DeviceInfo
from apis.meta import AnyObject, Int32, Int64, Time
from apis.quantity import ResourceList


class ResourceMap(Wire, frozen=True):
    """Amounts by resource name (cpu in cores, memory in bytes) and per device."""

    resources: ResourceList = field(default_factory=dict)
    devices: tuple[DeviceInfo, ...] = ()


class AggregatedUsage(Wire, frozen=True, omit_defaults=False):
    """Usage by percentile name (avg, p50, p90, p95, p99) over one window."""

    usage: dict[str, ResourceMap] = field(default_factory=dict)
    duration: str = "0s"


class NUMAUsage(Wire, frozen=True, omit_defaults=False):
    numa_node_id: Int32 = field(name="numaNodeID")
    node_usage: ResourceMap = ResourceMap()
    system_usage: ResourceMap = ResourceMap()


class NodeMetricInfo(Wire, frozen=True, omit_defaults=False):
    node_usage: ResourceMap = ResourceMap()
    aggregated_node_usages: tuple[AggregatedUsage, ...] = ()
    system_usage: ResourceMap = ResourceMap()
    aggregated_system_usages: tuple[AggregatedUsage, ...] = ()
    numa_usages: tuple[NUMAUsage, ...] = ()


class PodMetricInfo(Wire, frozen=True, omit_defaults=False):
    name: str = ""
    namespace: str = ""
    pod_usage: ResourceMap = ResourceMap()
    priority: str = ""
    qos: str = ""
    extensions: AnyObject = field(default_factory=dict)


class HostApplicationMetricInfo(Wire, frozen=True, omit_defaults=False):
    name: str = ""
    usage: ResourceMap = ResourceMap()
    priority: str = ""
    qos: str = ""


class ProdMetric(Wire, frozen=True, omit_defaults=False):
    resource: ResourceMap = ResourceMap()


class NodeMetricStatus(Wire, frozen=True):
    update_time: Time | None = None
    node_metric: NodeMetricInfo | None = None
    pods_metric: tuple[PodMetricInfo, ...] = ()
    host_application_metric: tuple[HostApplicationMetricInfo, ...] = ()
    prod_reclaimable_metric: ProdMetric | None = None
    prod_peak_metric: ProdMetric | None = None


class AggregatePolicy(Wire, frozen=True):
    durations: tuple[str, ...] = ()


_MEMORY_POLICIES: Final = ("usageWithHotPageCache", "usageWithoutPageCache", "usageWithPageCache")


class NodeMetricCollectPolicy(Wire, frozen=True):
    aggregate_duration_seconds: Int64 | None = None
    report_interval_seconds: Int64 | None = None
    node_aggregate_policy: AggregatePolicy | None = None
    node_memory_collect_policy: Annotated[
        str | None, Meta(extra_json_schema={"enum": list(_MEMORY_POLICIES)})
    ] = None


class NodeMetricSpec(Wire, frozen=True):
    metric_collect_policy: NodeMetricCollectPolicy | None = None


class NodeMetric(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: NodeMetricSpec = NodeMetricSpec()
    status: NodeMetricStatus = NodeMetricStatus()


decode_node_metric: Final = json_decoder(NodeMetric)
