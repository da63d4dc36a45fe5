"""The series of the node's usage, of host applications, and of the Node's batch and mid resources.

Names and labels are upstream's: docs/facts/koordlet.md, "Metrics".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from apis.keys import BATCH_CPU, BATCH_MEMORY, MID_CPU, MID_MEMORY
from hooks.subject import HostAppSubject
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.measurement.series import Metric

Latest = Callable[[Metric], Mapping[tuple[str, str], float]]
"""From a metric to the newest sample of each object, by `Series.of` and `Series.detail`."""

_UNITS: Final = {
    BATCH_CPU: "integer",
    BATCH_MEMORY: "byte",
    MID_CPU: "integer",
    MID_MEMORY: "byte",
}
_OF_NODE: Final = {
    Metric.NODE_CPU: "node_used_cpu_cores",
    Metric.NODE_MEMORY: "node_used_memory_bytes",
}
_OF_HOST_APP: Final = {Metric.HOST_APP_CPU: "cpu", Metric.HOST_APP_MEMORY: "memory"}


def of_usage(latest: Latest, host_apps: Iterable[HostAppSubject]) -> Iterator[Gauge]:
    """Yield what the node and the host applications used lately: cores and bytes."""
    for metric, name in _OF_NODE.items():
        for value in latest(metric).values():
            yield name, (), value
    apps = {app.name: app for app in host_apps}
    for metric, resource in _OF_HOST_APP.items():
        for (of, _), value in latest(metric).items():
            if (app := apps.get(of)) is not None:
                labels = (
                    ("host_application_name", of),
                    ("resource", resource),
                    ("priority_class", app.priority),
                    ("qos", str(app.qos)),
                )
                yield "host_application_resource_usage", labels, value


def of_allocatable(node: str, allocatable: Mapping[str, int]) -> Iterator[Family]:
    """Yield the Node's batch and mid resources, 0 for one that it lacks; CPU in milli-cores."""
    family = GaugeMetricFamily(
        "koordlet_node_resource_allocatable",
        "Batch and mid resources of the node.",
        labels=["node", "resource", "unit"],
    )
    for resource, unit in _UNITS.items():
        family.add_metric([node, resource, unit], allocatable.get(resource, 0))
    yield family
