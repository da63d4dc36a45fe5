"""What LoadAwareScheduling says about a pod on a node, as slow plain code.

Written from docs/scheduler.md and docs/facts/scheduler.md, over objects alone: everything is worked
out again for each question, from the NodeMetric and the pods that are on the node at that moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from math import floor
from typing import Any

from apis.nodemetric import NodeMetric, ResourceMap
from apis.quantity import Quantity
from apis.scheduling_pod import SchedulingNode, SchedulingPod

Args = Mapping[str, Any]
"""Arguments of the plugin as they stand in a file."""
Amounts = dict[str, int]

_PREFIX = "scheduling.koordinator.sh/load-estimated"
_LARGEST = 2**52
_MINUTES = {"0s": 0, "5m": 300, "5m0s": 300, "10m0s": 600}


@dataclass(frozen=True)
class OraclePod:
    """start: when it got its node. initialized: when its init containers ended, or 0. reserves: it
    is a Reservation. uses: UID of the Reservation that it uses, or ""."""

    pod: SchedulingPod
    start: float = 0.0
    initialized: float = 0.0
    reserves: bool = False
    uses: str = ""


@dataclass
class OracleNode:
    node: SchedulingNode
    metric: NodeMetric | None = None
    pods: dict[str, OraclePod] = field(default_factory=dict)


def _amount(name: str, quantity: Quantity) -> int:
    amount = quantity.milli_value() if name == "cpu" else quantity.value()
    return min(amount, _LARGEST)


def _priority_class(pod: SchedulingPod) -> str:
    thousands = (pod.spec.priority or 0) // 1000
    return {9: "prod", 7: "mid", 5: "batch", 3: "free"}[thousands]


class Oracle:
    """The plugin with some arguments, at a moment (seconds since 1970)."""

    def __init__(self, args: Args, now: float) -> None:
        self.args = args
        self.now = now
        self.factors = {"cpu": 85, "memory": 70} | args.get("estimatedScalingFactors", {})
        self.dominant: int = args.get("dominantResourceWeight", 0)
        self.weights: dict[str, int] = args.get("resourceWeights", {})
        if not self.weights and not self.dominant:
            self.weights = {"cpu": 1, "memory": 1}
        self.limits = args.get("usageThresholds") or {"cpu": 65, "memory": 95}
        self.prod_limits = args.get("prodUsageThresholds", {})
        self.aggregated = args.get("aggregated") or {}
        of_windows = self.aggregated.get("usageThresholds", {})
        maps = (self.factors, self.weights, self.limits, self.prod_limits, of_windows)
        names = {"cpu", "memory", *args.get("supportedResources", ())}
        self.resources = sorted(names.union(*maps))

    # --- pods ------------------------------------------------------------------------------------

    def estimate(self, pod: SchedulingPod) -> Amounts:
        factors = dict(self.factors)
        own = pod.metadata.annotations.get(f"{_PREFIX}-scaling-factors", "{}")
        if self.args.get("allowCustomizeEstimation"):
            factors |= json.loads(own)
        result = dict.fromkeys(self.resources, 0)
        for name in self.resources:
            if name not in factors:
                continue
            real = name
            if name in ("cpu", "memory") and _priority_class(pod) in ("mid", "batch"):
                real = f"kubernetes.io/{_priority_class(pod)}-{name}"
            resources = pod.spec.containers[0].resources
            zero = Quantity.of(0)
            request = _amount(real, resources.requests.get(real, zero))
            limit = _amount(real, resources.limits.get(real, zero))
            if max(request, limit) == 0:
                result[name] = {"cpu": 250, "memory": 200 * 2**20}.get(name, 0)
                continue
            exact = Fraction(max(request, limit) * factors[name], 100)
            result[name] = floor(exact + Fraction(1, 2))
            if 0 < limit < result[name]:
                result[name] = limit
        return result

    def _ends(self, pod: OraclePod) -> float:
        """Return until when a pod that a report shows is estimated; 0 for not at all."""
        after_scheduled = self.args.get("estimatedSecondsAfterPodScheduled", 0)
        after_initialized = self.args.get("estimatedSecondsAfterInitialized", 0)
        if self.args.get("allowCustomizeEstimation"):
            own = pod.pod.metadata.annotations
            text = own.get(f"{_PREFIX}-seconds-after-pod-scheduled")
            after_scheduled = int(text) if text else after_scheduled
            text = own.get(f"{_PREFIX}-seconds-after-initialized")
            after_initialized = int(text) if text else after_initialized
        if after_initialized and pod.initialized:
            return float(pod.initialized + after_initialized)
        return float(pod.start + after_scheduled) if after_scheduled else 0.0

    # --- nodes -----------------------------------------------------------------------------------

    def _updated(self, on: OracleNode) -> float:
        text = on.metric.status.update_time if on.metric else None
        return datetime.fromisoformat(text).timestamp() if text else 0.0

    def _expired(self, on: OracleNode) -> bool:
        age = self.now - self._updated(on)
        return on.metric is not None and age >= self.args.get("nodeMetricExpirationSeconds", 180)

    def _has_usage(self, on: OracleNode) -> bool:
        return on.metric is not None and on.metric.status.node_metric is not None

    def _usage(self, usage: ResourceMap) -> Amounts:
        found = {name: max(0, _amount(name, q)) for name, q in usage.resources.items()}
        return {name: found.get(name, 0) for name in self.resources}

    def _node_usage(self, on: OracleNode, window: tuple[str, str] | None) -> Amounts:
        assert on.metric is not None and on.metric.status.node_metric is not None
        info = on.metric.status.node_metric
        found: dict[int, Amounts] = {}
        for each in info.aggregated_node_usages:
            if window is not None and each.usage.get(window[0], ResourceMap()).resources:
                found[_MINUTES[each.duration]] = self._usage(each.usage[window[0]])
        if window is not None and found:
            seconds = _MINUTES[window[1]] or max(found)
            if seconds in found:
                return found[seconds]
        return self._usage(info.node_usage)

    def _shown(self, on: OracleNode) -> dict[str, tuple[Amounts, str]]:
        """Return usage and class by the name of each pod that the report shows."""
        pods = on.metric.status.pods_metric if on.metric else ()
        return {each.name: (self._usage(each.pod_usage), each.priority) for each in pods}

    def _coming(self, on: OracleNode, *, prod: bool) -> dict[str, Amounts]:
        """Return what the report lacks of each pod, by UID; prod: of the load of prod pods."""
        shown = self._shown(on)
        result = {}
        for uid, each in on.pods.items():
            if prod and _priority_class(each.pod) != "prod":
                continue
            estimate = self.estimate(each.pod)
            if each.reserves:
                users = [self.estimate(p.pod) for p in on.pods.values() if p.uses == uid]
                lacks = {
                    name: estimate[name] - sum(user[name] for user in users)
                    for name in self.resources
                }
            else:
                usage, priority = shown.get(each.pod.metadata.name, (None, ""))
                if prod and priority != "koord-prod":
                    usage = None
                if usage is None:
                    lacks = estimate
                elif self._is_new(each, on):
                    lacks = {name: estimate[name] - usage[name] for name in self.resources}
                else:
                    lacks = {}
            result[uid] = {name: max(0, lacks.get(name, 0)) for name in self.resources}
        return result

    def _is_new(self, pod: OraclePod, on: OracleNode) -> bool:
        assert on.metric is not None
        policy = on.metric.spec.metric_collect_policy
        interval = (policy.report_interval_seconds if policy else None) or 60
        updated = self._updated(on)
        return updated - interval < pod.start or self._ends(pod) > updated

    def _prod_usage(self, on: OracleNode) -> Amounts:
        result = dict.fromkeys(self.resources, 0)
        info = on.metric.status.node_metric if on.metric else None
        if self.args.get("prodUsageIncludeSys") and info is not None:
            result = self._usage(info.system_usage)
        shown = self._shown(on)
        for each in on.pods.values():
            usage, priority = shown.get(each.pod.metadata.name, (None, ""))
            is_prod = _priority_class(each.pod) == "prod" and not each.reserves
            if usage is not None and is_prod and priority == "koord-prod":
                result = {name: result[name] + usage[name] for name in self.resources}
        return result

    def _given(self, pod: SchedulingPod, on: OracleNode, coming: dict[str, Amounts]) -> Amounts:
        """Return by how much less Reservations count if the pod comes."""
        reserved = [coming[uid] for uid, each in on.pods.items() if each.reserves and uid in coming]
        own = self.estimate(pod)
        labels = pod.metadata.labels
        if labels.get("scheduling.koordinator.sh/reservation-ignored") == "true":
            return {name: sum(each[name] for each in reserved) for name in self.resources}
        if labels.get("app") != "a":
            return dict.fromkeys(self.resources, 0)
        return {
            name: max([min(each[name], own[name]) for each in reserved], default=0)
            for name in self.resources
        }

    def _with(
        self, pod: SchedulingPod, on: OracleNode, usage: Amounts, coming: dict[str, Amounts]
    ) -> Amounts:
        """Return the load of the node with the pod."""
        own, given = self.estimate(pod), self._given(pod, on, coming)
        return {
            name: usage[name]
            + sum(each[name] for each in coming.values())
            + own[name]
            - given[name]
            for name in self.resources
        }

    def _allocatable(self, on: OracleNode) -> Amounts:
        found = {name: _amount(name, q) for name, q in on.node.status.allocatable.items()}
        raw = on.node.metadata.annotations.get("node.koordinator.sh/raw-allocatable")
        for name, text in json.loads(raw or "{}").items():
            found[name] = _amount(name, Quantity.of(int(text)))
        return {name: found.get(name, 0) for name in self.resources}

    def _looked_at(
        self, pod: SchedulingPod, on: OracleNode
    ) -> tuple[str, dict[str, int], tuple[str, str] | None]:
        """Return ("prod", "aggregated" or "plain", limits, window)."""
        text = on.node.metadata.annotations.get("scheduling.koordinator.sh/usage-thresholds")
        try:
            own = json.loads(text or "{}")
        except ValueError:
            own = {}
        of_prod = own.get("prodUsageThresholds") or self.prod_limits
        if of_prod and _priority_class(pod) == "prod":
            return "prod", of_prod, None
        for each in (own.get("aggregatedUsage") or {}, self.aggregated):
            if each.get("usageThresholds") and each.get("usageAggregationType"):
                window = each["usageAggregationType"], each.get("usageAggregatedDuration", "0s")
                return "aggregated", each["usageThresholds"], window
        return "plain", own.get("usageThresholds") or self.limits, None

    # --- decisions -------------------------------------------------------------------------------

    def reasons(self, pod: SchedulingPod, on: OracleNode) -> list[str]:
        """Return why the node does not take the pod, sorted."""
        owners = pod.metadata.owner_references
        path, limits, window = self._looked_at(pod, on)
        if any(each.controller and each.kind == "DaemonSet" for each in owners):
            return []
        if not any(limits.values()) or on.metric is None:
            return []
        if self._expired(on) and self.args.get("filterExpiredNodeMetrics", True):
            passes = self.args.get("enableScheduleWhenNodeMetricsExpired", False)
            return [] if passes else ["node(s) nodeMetric expired"]
        if not self._has_usage(on):
            return []
        prod = path == "prod"
        usage = self._prod_usage(on) if prod else self._node_usage(on, window)
        load = self._with(pod, on, usage, self._coming(on, prod=prod))
        allocatable = self._allocatable(on)
        found = []
        for name in self.resources:
            if limits.get(name, 0) > 0 and allocatable[name] > 0:
                percent = floor(Fraction(100 * load[name], allocatable[name]) + Fraction(1, 2))
                if percent > limits[name]:
                    kind = "aggregated usage" if path == "aggregated" else "usage"
                    found.append(f"node(s) {name} {kind} exceed threshold")
        return sorted(found)

    def score(self, pod: SchedulingPod, on: OracleNode) -> int:
        nothing = dict.fromkeys(self.resources, 0)
        if not self._has_usage(on) or self._expired(on):
            unreported = OracleNode(on.node, None, on.pods)
            load = self._with(pod, on, nothing, self._coming(unreported, prod=False))
        elif self.args.get("scoreAccordingProdUsage") and _priority_class(pod) == "prod":
            load = self._with(pod, on, self._prod_usage(on), self._coming(on, prod=True))
        else:
            kind = self.aggregated.get("scoreAggregationType")
            window = (kind, self.aggregated.get("scoreAggregatedDuration", "0s")) if kind else None
            load = self._with(pod, on, self._node_usage(on, window), self._coming(on, prod=False))
        allocatable = self._allocatable(on)
        parts = {
            name: (cap - load[name]) * 100 // cap if load[name] <= cap else 0
            for name, cap in allocatable.items()
            if cap > 0
        }
        total = sum(weight * parts.get(name, 0) for name, weight in self.weights.items())
        total += self.dominant * min(parts.values(), default=100)
        return total // (sum(self.weights.values()) + self.dominant)
