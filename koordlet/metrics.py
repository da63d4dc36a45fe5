"""The daemon's metrics: upstream's names where upstream has one, ours beside them.

Nothing is counted twice: the parts of the daemon keep plain numbers, and one collector turns them
into families when somebody asks. Upstream's facts: koordlet.md section 23, hooks.md section 2.12.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from koordlet.decider import Stage, TimingKey
from nri_plugin.statistics import Histogram, State, Statistics

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST


class Readings(Protocol):
    """The numbers, read on the event loop."""

    node_name: str
    started_at: float

    @property
    def timings(self) -> Iterable[Mapping[TimingKey, Histogram]]:
        """Durations of policies, in milliseconds, of each decider."""
        ...

    @property
    def nri(self) -> Statistics | None: ...

    @property
    def pods(self) -> int: ...

    @property
    def containers(self) -> int: ...

    @property
    def unprotected(self) -> int: ...

    @property
    def policies(self) -> Mapping[str, str]:
        """Policy -> state: "on", "off", "degraded"."""
        ...

    @property
    def generation(self) -> int: ...

    @property
    def events(self) -> Mapping[str, int]:
        """Event kind -> how often."""
        ...

    @property
    def problems(self) -> int: ...

    def extra(self) -> Iterable[Metric]:
        """Families of the reconciler and the executor."""
        ...


class Registries:
    """The internal, the external, and the merged registry of upstream's three paths."""

    def __init__(self, readings: Readings) -> None:
        self.internal = CollectorRegistry(auto_describe=False)
        self.external = CollectorRegistry(auto_describe=False)
        self.merged = CollectorRegistry(auto_describe=False)
        for registry in (self.internal, self.merged):
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            registry.register(_Internal(readings))

    @staticmethod
    def text(registry: CollectorRegistry) -> bytes:
        """Return the exposition of a registry."""
        return generate_latest(registry)


class _Internal(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        node = readings.node_name
        start = GaugeMetricFamily(
            "koordlet_start_time", "When the daemon started, in seconds.", labels=["node"]
        )
        start.add_metric([node], readings.started_at)
        yield start
        yield from _hook_durations(node, readings.timings)
        yield from _gauges(readings)
        if readings.nri is not None:
            yield from _nri(readings.nri)
        yield from readings.extra()


def _hook_durations(
    node: str, timings: Iterable[Mapping[TimingKey, Histogram]]
) -> Iterator[Metric]:
    hooks = HistogramMetricFamily(
        "koordlet_runtime_hook_invoked_duration_milliseconds",
        "Time that a policy took in a hook.",
        labels=["node", "hook", "stage", "status"],
    )
    for table in timings:
        for (policy, stage, succeeded), histogram in tuple(table.items()):
            if stage == Stage.RECONCILE:
                continue
            status = "succeeded" if succeeded else "failed"
            hooks.add_metric(
                [node, policy, stage, status], buckets(histogram), sum_value=histogram.sum_s
            )
    yield hooks


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative buckets as the exposition wants them."""
    total = 0
    made: list[tuple[str, float]] = []
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        made.append((f"{bound:g}", total))
    made.append(("+Inf", histogram.count))
    return made


def _gauges(readings: Readings) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "koordlet_pods", "Pods that the runtime or kubelet told of.", value=readings.pods
    )
    yield GaugeMetricFamily("koordlet_containers", "Live containers.", value=readings.containers)
    yield GaugeMetricFamily(
        "koordlet_containers_unprotected",
        "Live containers that no hook saw at creation, or that lack what only creation gives.",
        value=readings.unprotected,
    )
    yield GaugeMetricFamily(
        "koordlet_engine_generation", "Counts the rebuilds of the rules.", value=readings.generation
    )
    yield GaugeMetricFamily(
        "koordlet_objects_problems",
        "Things in the objects directory that could not be used.",
        value=readings.problems,
    )
    policies = GaugeMetricFamily(
        "koordlet_policy_state", "1 for the state that a policy is in.", labels=["policy", "state"]
    )
    for policy, state in readings.policies.items():
        policies.add_metric([policy, state], 1)
    yield policies
    events = CounterMetricFamily("koordlet_events", "Events by kind.", labels=["kind"])
    for kind, count in readings.events.items():
        events.add_metric([kind], count)
    yield events


def _nri(nri: Statistics) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "koordlet_nri_state", "1 for the state of the NRI connection.", labels=["state"]
    )
    for each in State:
        state.add_metric([each.value], 1 if nri.state is each else 0)
    yield state
    for name, text, value in (
        ("connected_seconds", "Time with a synchronized connection.", nri.connected_s),
        ("unprotected_seconds", "Time in which no container was adjusted.", nri.unprotected_s),
        ("connections", "Connections made.", nri.connections),
        ("dials", "Connections tried.", nri.dials),
        ("disconnections", "Connections lost.", nri.disconnections),
        ("synchronizations", "Full states received.", nri.synchronizations),
        ("adjustments", "Containers adjusted at creation.", nri.adjustments),
        ("updates", "Container updates in replies.", nri.updates),
        ("refused", "CRI calls refused on purpose.", nri.refused),
        ("handler_faults", "Defects of the daemon in hooks.", nri.handler_faults),
        ("created_while_away", "Containers created without us.", nri.created_while_away),
    ):
        yield CounterMetricFamily(f"koordlet_nri_{name}", text, value=float(value))
    missed = CounterMetricFamily(
        "koordlet_nri_missed_adjustments",
        "Adjustments that the runtime did not get.",
        labels=["reason"],
    )
    for reason, count in tuple(nri.missed.items()):
        missed.add_metric([reason.value], count)
    yield missed
    latency = HistogramMetricFamily(
        "koordlet_nri_hook_duration_seconds",
        "From the arrival of a request to its reply.",
        labels=["method"],
    )
    for method, histogram in tuple(nri.hook_latency.items()):
        latency.add_metric([method], buckets(histogram), sum_value=histogram.sum_s)
    yield latency
