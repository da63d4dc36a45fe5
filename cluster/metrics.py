"""Metrics of the manager.

Those that upstream has too keep its names, labels and label values: docs/facts/manager.md,
"Metrics". Upstream's counters have no suffix `_total`, except that of binding admission.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from cluster.exposition import Registry, label_text, number_text
from kube.faults import Faults

_STALE_AFTER_SECONDS: Final = 300.0
"""Upstream's: a series that was not set for five minutes is dropped. With twice the value a deleted
node shows twice as long."""
_WEBHOOK_BOUNDS_MS: Final = tuple(0.001 * 2.0**power for power in range(20))
"""Upstream's buckets, 1 microsecond to half a second: dashboards compute quantiles from them."""
_FAULTS: Final = "koord_manager_faults"


class ManagerMetrics:
    """All metrics of one manager process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = Registry()
        counter, gauge = self.registry.counter, self.registry.gauge
        self.node_resource = counter(
            "slo_controller_node_resource_reconcile_count",
            "Reconciles of a node's resources.",
            "status",
            "reason",
        )
        self.plugin = counter(
            "slo_controller_node_resource_run_plugin_status",
            "Runs of a resource plugin.",
            "plugin",
            "status",
            "reason",
        )
        self.node_metric = counter(
            "slo_controller_nodemetric_reconcile_count",
            "Reconciles of a NodeMetric.",
            "status",
            "reason",
        )
        self.node_metric_parse = counter(
            "slo_controller_nodemetric_spec_parse_count",
            "Calculations of a NodeMetric's spec.",
            "status",
            "reason",
        )
        self.node_slo = counter(
            "slo_controller_nodeslo_reconcile_count",
            "Reconciles of a NodeSLO.",
            "status",
            "reason",
        )
        self.node_slo_parse = counter(
            "slo_controller_nodeslo_spec_parse_count",
            "Calculations of a NodeSLO's spec.",
            "status",
            "reason",
        )
        self.allocatable = gauge(
            "slo_controller_node_extended_resource_allocatable_internal",
            "Extended resources of a node: cpu in milli-cores (unit integer), memory in bytes.",
            "node",
            "resource",
            "unit",
        )
        self.webhook = self.registry.histogram(
            "koord_manager_webhook_webhook_duration_milliseconds",
            "Duration of an admission review, in milliseconds.",
            "webhook_type",
            "object_type",
            "operation",
            "plugin_name",
            "status",
            bounds=_WEBHOOK_BOUNDS_MS,
        )
        self.quota_shared_weight = gauge(
            "koord_manager_webhook_quota_shared_weight",
            "Shared weight that admission set on a quota by default.",
            "elasticquota_name",
            "resource_name",
        )
        self.binding = counter(
            "koord_manager_webhook_binding_admission_decisions_total",
            "Decisions of binding admission.",
            "decision",
        )
        self.is_leader = gauge(
            "koordinator_manager_is_leader", "1 while this replica holds the leader lease."
        ).labels()
        self.config_stale = gauge(
            "koord_manager_slo_config_stale",
            "1 while the last good value of a key of slo-controller-config is in force.",
            "key",
        )
        self.certificate_expiry = gauge(
            "koord_manager_webhook_certificate_expiry_timestamp_seconds",
            "Expiry of the serving certificate, in seconds since 1970.",
        ).labels()
        self.faults: list[Faults] = []
        self.registry.also(self._fault_lines)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.registry.also(self._process_lines)
        self._allocatable_at: dict[tuple[str, str, str], float] = {}

    def count_faults(self, faults: Iterable[Faults]) -> None:
        """Expose the fault counts of these parts."""
        self.faults += faults

    def _fault_lines(self) -> Iterator[str]:
        yield f"# HELP {_FAULTS} Caught exceptions in the manager's own code; the log has them.\n"
        yield f"# TYPE {_FAULTS} counter\n"
        for each in self.faults:
            labels = label_text(("part",), (each.part,))
            yield f"{_FAULTS}{{{labels}}} {number_text(each.count)}\n"

    def _process_lines(self) -> Iterator[str]:
        yield generate_latest(self._process).decode()

    def set_allocatable(self, node: str, resource: str, unit: str, value: int) -> None:
        labels = (node, resource, unit)
        self.allocatable.labels(*labels).set(value)
        self._allocatable_at[labels] = time.monotonic()

    def drop_stale(self) -> None:
        """Drop the series of resources that were not set for five minutes."""
        limit = time.monotonic() - _STALE_AFTER_SECONDS
        for labels in [labels for labels, at in self._allocatable_at.items() if at < limit]:
            del self._allocatable_at[labels]
            self.allocatable.remove(*labels)
