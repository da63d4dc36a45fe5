"""The series of reports: what was predicted, and what the NodeMetric says.

Names, labels and units are upstream's: docs/facts/koordlet.md, "Metrics".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from apis.keys import CPU, MEMORY
from apis.nodemetric import NodeMetricStatus, ResourceMap
from apis.qos import PriorityClass
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.prediction.peak import Both, Predictions

Labels = tuple[tuple[str, str], ...]

_PROD: Final = ("priority", PriorityClass.PROD.value)


def of_predictors(predictions: Predictions | None) -> Iterator[Gauge]:
    """Yield the internal series: the result of each predictor, and of the more careful one."""
    if predictions is None:
        return
    for name, each in (
        ("podReclaimablePredictor", predictions.by_pod),
        ("priorityReclaimablePredictor", predictions.by_class),
        ("minPredictor", predictions.careful),
    ):
        predictor = ("predictor", name)
        yield from _both("node_predicted_resource_reclaimable", (predictor,), each.reclaimable)
        yield from _both("node_predicted_resource_peak", (predictor,), each.peak)


def of_reclaimable(predictions: Predictions | None) -> Iterator[Gauge]:
    """Yield the external series: what prod pods leave, 0 while there is no prediction."""
    failed = predictions is None
    amount = Both() if predictions is None else predictions.careful.reclaimable
    yield "node_resource_priority_reclaimable_status", (_PROD,), float(failed)
    yield from _both("node_priority_resource_reclaimable", (_PROD,), amount)


def of_status(status: NodeMetricStatus | None) -> Iterator[Gauge]:
    """Yield the series of gate NodeMetricPromMetrics: the last report's usage."""
    if status is None or status.node_metric is None:
        return
    found = status.node_metric
    yield from _usage("node_metric_node_usage", (), found.node_usage)
    yield from _usage("node_metric_system_usage", (), found.system_usage)
    for zone in found.numa_usages:
        number = (("numa_node_id", str(zone.numa_node_id)),)
        yield from _usage("node_metric_numa_node_usage", number, zone.node_usage)
        yield from _usage("node_metric_numa_system_usage", number, zone.system_usage)


def _both(name: str, labels: Labels, both: Both) -> Iterator[Gauge]:
    yield name, (*labels, ("resource", CPU), ("unit", "core")), both.cpu_milli / 1000
    yield name, (*labels, ("resource", MEMORY), ("unit", "byte")), float(both.memory_bytes)


def _usage(name: str, labels: Labels, usage: ResourceMap) -> Iterator[Gauge]:
    for resource, unit in ((CPU, "core"), (MEMORY, "byte")):
        amount = usage.resources.get(resource)
        if amount is not None:
            yield name, (*labels, ("resource", resource), ("unit", unit)), amount.nano / 1e9
