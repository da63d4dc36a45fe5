"""Prometheus series of the manager; names and labels are upstream's. Source: manager.md 27."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_STALE_AFTER_SECONDS: Final = 300.0


class ManagerMetrics:
    """All series of one manager process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

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
        self.allocatable = Gauge(
            "slo_controller_node_extended_resource_allocatable_internal",
            "Extended resources of a node: cpu in milli-cores (unit integer), memory in bytes.",
            ("node", "resource", "unit"),
            registry=self.registry,
        )
        self.webhook = Histogram(
            "koord_manager_webhook_webhook_duration_milliseconds",
            "Time that admission took.",
            ("webhook_type", "object_type", "operation", "plugin_name", "status"),
            buckets=[0.001 * 2**power for power in range(20)],
            registry=self.registry,
        )
        self.quota_shared_weight = Gauge(
            "koord_manager_webhook_quota_shared_weight",
            "Shared weight that admission gave a quota.",
            ("elasticquota_name", "resource_name"),
            registry=self.registry,
        )
        self.binding = counter(
            "koord_manager_webhook_binding_admission_decisions",
            "Decisions about pod bindings.",
            "decision",
        )
        self.is_leader = Gauge(
            "koordinator_manager_is_leader", "Whether this replica leads.", registry=self.registry
        )
        self.config_stale = Gauge(
            "koord_manager_slo_config_stale",
            "Whether a key of slo-controller-config runs on its last good value.",
            ("key",),
            registry=self.registry,
        )
        self.certificate_expiry = Gauge(
            "koord_manager_webhook_certificate_expiry_timestamp_seconds",
            "When the serving certificate ends.",
            registry=self.registry,
        )
        self._allocatable_at: dict[tuple[str, str, str], float] = {}

    def set_allocatable(self, node: str, resource: str, unit: str, value: int) -> None:
        labels = (node, resource, unit)
        self.allocatable.labels(*labels).set(value)
        self._allocatable_at[labels] = time.monotonic()

    def drop_stale(self) -> None:
        """Forget series of nodes that were not calculated for five minutes."""
        limit = time.monotonic() - _STALE_AFTER_SECONDS
        for labels in [labels for labels, at in self._allocatable_at.items() if at < limit]:
            del self._allocatable_at[labels]
            self.allocatable.remove(*labels)
