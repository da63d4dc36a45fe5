"""NodeMetric: what a node reports about its use.

Struct values that upstream's Go types always write ({}, "0s", null) are written here too, so that
both sides store the same bytes for the same facts.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.device import DeviceInfo
from apis.meta import AnyObject, Int32, Int64, Time
from apis.quantity import ResourceList


class ResourceMap(Wire, frozen=True):
    """Amounts of resources.

    resources: Amounts by resource name: cpu in cores, memory in bytes.
    devices: Amounts of each device.
    """

    resources: ResourceList = field(default_factory=dict)
    devices: tuple[DeviceInfo, ...] = ()


class AggregatedUsage(Wire, frozen=True, omit_defaults=False):
    """Usage over one window, by percentile.

    usage: Amounts by percentile: avg, p50, p90, p95 or p99; empty while there are too few samples.
    duration: Length of the window.
    """

    usage: dict[str, ResourceMap] = field(default_factory=dict)
    duration: str = "0s"


class NUMAUsage(Wire, frozen=True, omit_defaults=False):
    """Usage of one NUMA node.

    numa_node_id: Number of the NUMA node.
    node_usage: All usage on it.
    system_usage: Usage on it that is neither of pods nor of host applications.
    """

    numa_node_id: Int32 = field(name="numaNodeID")
    node_usage: ResourceMap = ResourceMap()
    system_usage: ResourceMap = ResourceMap()


class NodeMetricInfo(Wire, frozen=True, omit_defaults=False):
    """Usage of the node.

    node_usage: All usage, averaged over the aggregate duration.
    aggregated_node_usages: All usage by window and percentile.
    system_usage: Usage that is neither of pods nor of host applications.
    aggregated_system_usages: That usage by window and percentile.
    numa_usages: Usage of each NUMA node.
    """

    node_usage: ResourceMap = ResourceMap()
    aggregated_node_usages: tuple[AggregatedUsage, ...] = ()
    system_usage: ResourceMap = ResourceMap()
    aggregated_system_usages: tuple[AggregatedUsage, ...] = ()
    numa_usages: tuple[NUMAUsage, ...] = ()


class PodMetricInfo(Wire, frozen=True, omit_defaults=False):
    """Usage of one pod.

    name: Name of the pod.
    namespace: Namespace of the pod.
    pod_usage: Usage, averaged over the aggregate duration.
    priority: Priority class of the pod, such as koord-batch.
    qos: QoS class of the pod, such as BE.
    extensions: Metrics of other parties, kept as they are.
    """

    name: str = ""
    namespace: str = ""
    pod_usage: ResourceMap = ResourceMap()
    priority: str = ""
    qos: str = ""
    extensions: AnyObject = field(default_factory=dict)


class HostApplicationMetricInfo(Wire, frozen=True, omit_defaults=False):
    """Usage of one host application.

    name: Name of the application.
    usage: Usage, averaged over the aggregate duration.
    priority: Priority class of the application.
    qos: QoS class of the application.
    """

    name: str = ""
    usage: ResourceMap = ResourceMap()
    priority: str = ""
    qos: str = ""


class ProdMetric(Wire, frozen=True, omit_defaults=False):
    """A prediction about pods of the class koord-prod.

    resource: The predicted amounts.
    """

    resource: ResourceMap = ResourceMap()


class NodeMetricStatus(Wire, frozen=True):
    """What the node measured.

    update_time: When the node last reported.
    node_metric: Usage of the node.
    pods_metric: Usage of each pod.
    host_application_metric: Usage of each host application.
    prod_reclaimable_metric: What koord-prod pods request and are predicted not to use.
    prod_peak_metric: Predicted peak of koord-prod pods and the system, with the safety margin.
    """

    update_time: Time | None = None
    node_metric: NodeMetricInfo | None = None
    pods_metric: tuple[PodMetricInfo, ...] = ()
    host_application_metric: tuple[HostApplicationMetricInfo, ...] = ()
    prod_reclaimable_metric: ProdMetric | None = None
    prod_peak_metric: ProdMetric | None = None


class AggregatePolicy(Wire, frozen=True):
    """Windows of reports by percentile.

    durations: Lengths of the windows, such as 5m or 1h30m.
    """

    durations: tuple[str, ...] = ()


_MEMORY_POLICIES: Final = ("usageWithHotPageCache", "usageWithoutPageCache", "usageWithPageCache")


class NodeMetricCollectPolicy(Wire, frozen=True):
    """How the node measures and reports.

    aggregate_duration_seconds: Seconds over which plain usage is averaged.
    report_interval_seconds: Seconds between two reports.
    node_aggregate_policy: Windows of reports by percentile.
    node_memory_collect_policy: How memory use counts page cache: usageWithHotPageCache,
        usageWithoutPageCache or usageWithPageCache.
    """

    aggregate_duration_seconds: Int64 | None = None
    report_interval_seconds: Int64 | None = None
    node_aggregate_policy: AggregatePolicy | None = None
    node_memory_collect_policy: Annotated[
        str | None, Meta(extra_json_schema={"enum": list(_MEMORY_POLICIES)})
    ] = None


class NodeMetricSpec(Wire, frozen=True):
    """What the node is asked to report.

    metric_collect_policy: How the node measures and reports.
    """

    metric_collect_policy: NodeMetricCollectPolicy | None = None


class NodeMetric(Wire, frozen=True):
    """Resource usage of one node, of the same name, as koordlet reports it.

    spec: What the node is asked to report.
    status: What the node measured.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: NodeMetricSpec = NodeMetricSpec()
    status: NodeMetricStatus = NodeMetricStatus()
