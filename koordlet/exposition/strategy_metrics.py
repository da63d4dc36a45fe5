"""The series of strategies, their gauges under upstream's names, and of the collectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from koordlet.measurement.sampler import SamplerStatus
from koordlet.qos.runner import StrategyStatus

Gauge = tuple[str, tuple[tuple[str, str], ...], float]
"""Upstream's name without `koordlet_`, labels beside `node`, and the value."""


def of_gauges(node: str, gauges: Iterable[Gauge]) -> Iterator[Metric]:
    """Yield one family for each name; every series has upstream's label `node` too."""
    families: dict[str, GaugeMetricFamily] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, labels, value in gauges:
        family = families.get(name)
        if family is None:
            names[name] = tuple(label for label, _ in labels)
            family = families[name] = GaugeMetricFamily(
                f"koordlet_{name}",
                "Of a strategy, a collector or a report: docs/facts/koordlet.md.",
                labels=["node", *names[name]],
            )
        given = dict(labels)
        family.add_metric([node, *(given.get(label, "") for label in names[name])], value)
    yield from families.values()


def of_strategies(strategies: Iterable[StrategyStatus]) -> Iterator[Metric]:
    """Yield state, steps, failures and durations of the strategies."""
    on = GaugeMetricFamily("koordlet_strategy_on", "1 while a gate is on.", labels=["strategy"])
    claims = GaugeMetricFamily(
        "koordlet_strategy_claims", "1 while its claims are in force.", labels=["strategy"]
    )
    steps = CounterMetricFamily("koordlet_strategy_steps", "Steps made.", labels=["strategy"])
    failures = CounterMetricFamily(
        "koordlet_strategy_failures", "Steps that failed by a defect.", labels=["strategy"]
    )
    took = GaugeMetricFamily(
        "koordlet_strategy_last_step_seconds", "Time of the last step.", labels=["strategy"]
    )
    for each in strategies:
        on.add_metric([each.name], float(each.on))
        claims.add_metric([each.name], float(each.leased))
        steps.add_metric([each.name], float(each.steps))
        failures.add_metric([each.name], float(each.failures))
        took.add_metric([each.name], each.took_s)
    yield from (on, claims, steps, failures, took)


def of_evictions(node: str, total: int, pods: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """Yield how many pods were evicted. Untyped, since a counter's name would end in `_total`.

    pods: (namespace, name) -> evictions, of the last minutes.
    """
    evictions = Metric("koordlet_pod_eviction", "Pods that koordlet evicted.", "unknown")
    evictions.add_sample(evictions.name, {"node": node, "reason": "evicted"}, total)
    yield evictions
    detail = Metric("koordlet_pod_eviction_detail", "Evictions of single pods.", "unknown")
    for (namespace, name), count in pods.items():
        labels = {
            "node": node,
            "pod_namespace": namespace,
            "pod_name": name,
            "reason": "evicted",
        }
        detail.add_sample(detail.name, labels, count)
    yield detail


def of_collectors(status: SamplerStatus | None) -> Iterator[Metric]:
    """Yield how measuring goes; nothing where nothing is measured."""
    if status is None:
        return
    yield GaugeMetricFamily(
        "koordlet_measuring_last_round_seconds",
        "Time of the last round of measurements.",
        value=status.round_ms / 1000,
    )
    yield CounterMetricFamily(
        "koordlet_measuring_rounds", "Rounds of measurements.", value=float(status.rounds)
    )
    yield CounterMetricFamily(
        "koordlet_measuring_skipped_ticks",
        "Rounds that were left out because the one before took too long.",
        value=float(status.skipped_ticks),
    )
    age = GaugeMetricFamily(
        "koordlet_collector_age_seconds",
        "Time since a collector's last samples; without any there is no series.",
        labels=["collector"],
    )
    failures = CounterMetricFamily(
        "koordlet_collector_failures", "Rounds that a collector failed in.", labels=["collector"]
    )
    for each in status.collectors:
        if each.age_s is not None:
            age.add_metric([each.name], each.age_s)
        failures.add_metric([each.name], float(each.failures))
    yield from (age, failures)
