"""A NodeMetric as vectors over the resources that LoadAwareScheduling follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from apis.meta import parse_duration, unix_seconds
from apis.nodemetric import NodeMetric, ResourceMap
from apis.qos import PriorityClass
from cluster.scheduler.tables.amounts import Amounts, Vector, amounts_of

_DEFAULT_INTERVAL_S: Final = 60
"""Seconds between two reports of a NodeMetric that does not say it; upstream's."""
LONGEST: Final = 0
"""Duration that stands for the longest window of a report that has data."""

Window = tuple[str, int]
"""Percentile ("p95"), and length in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A NodeMetric as vectors. Negative amounts are 0.

    updated: seconds since 1970; 0 if the node never reported. interval: seconds between reports.
    usage: of the node, None if the report has none. windows: usage by window. system: usage that is
    neither of pods nor of host applications. pods: usage by namespace/name. prod_pods: those that
    the report shows with the class koord-prod.
    """

    updated: float
    interval: float
    usage: Vector | None
    windows: Mapping[Window, Vector]
    system: Vector
    pods: Mapping[str, Vector]
    prod_pods: frozenset[str]


def read_report(metric: NodeMetric, vector: Callable[[Amounts], Vector]) -> Report:
    """Return a NodeMetric as vectors. vector: amounts by resource -> amounts by column."""
    status = metric.status
    policy = metric.spec.metric_collect_policy
    interval = policy.report_interval_seconds if policy else None

    def usage_of(usage: ResourceMap) -> Vector:
        return np.maximum(0, vector(amounts_of(usage.resources)))

    windows: dict[Window, Vector] = {}
    info = status.node_metric
    aggregated = info.aggregated_node_usages if info else ()
    for window in sorted(aggregated, key=lambda window: _seconds(window.duration)):
        for percentile, usage in window.usage.items():
            if usage.resources:
                windows[percentile, _seconds(window.duration)] = used = usage_of(usage)
                windows[percentile, LONGEST] = used
    pods = {f"{pod.namespace}/{pod.name}": pod for pod in status.pods_metric}
    return Report(
        updated=unix_seconds(status.update_time),
        interval=float(interval or _DEFAULT_INTERVAL_S),
        usage=usage_of(info.node_usage) if info else None,
        windows=windows,
        system=usage_of(info.system_usage) if info else vector({}),
        pods={key: usage_of(pod.pod_usage) for key, pod in pods.items()},
        prod_pods=frozenset(key for key, pod in pods.items() if pod.priority == PriorityClass.PROD),
    )


def _seconds(duration: str) -> int:
    try:
        return parse_duration(duration) // 1_000_000_000
    except ValueError:
        return 0
