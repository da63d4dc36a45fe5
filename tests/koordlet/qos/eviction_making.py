"""Short ways to make pods, samples and situations for the tests of evictions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from apis.effective_nodeslo import decode_nodeslo
from apis.keys import (
    ANNOTATION_EVICTION_POLICY,
    ANNOTATION_EVICTION_PRIORITY,
    LABEL_EVICTION_ENABLED,
    LABEL_QOS_CLASS,
)
from apis.qos import KubeQoS
from hooks.facts import NodeInputs, NodeMeta, Settings
from hooks.subject import Amounts, ContainerKind, ContainerSpec, ContainerSubject, Pod, make_pod
from koordlet.measurement.series import Aggregate, Metric, Series
from koordlet.qos.strategy import NodeAmounts, PodOnNode, Situation

GIB = 1 << 30

Samples = Mapping[Series, tuple[float, ...]]


class Measured:
    """Measurements as lists, one sample a second, the newest last."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    @property
    def now(self) -> float:
        return 1000.0

    def _within(self, series: Series, within_s: float) -> tuple[float, ...]:
        return self._samples.get(series, ())[-max(int(within_s), 1) :]

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return next(iter(self._within(series, within_s)[-1:]), None)

    def average(self, series: Series, *, within_s: float) -> float | None:
        values = self._within(series, within_s)
        return sum(values) / len(values) if values else None

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        values = sorted(self._within(series, within_s))
        if not values:
            return None
        p50, p90, p95, p99 = (
            values[max(int(len(values) * p) - 1, 0)] for p in (0.5, 0.9, 0.95, 0.99)
        )
        return Aggregate(
            len(values),
            len(values) - 1.0,
            sum(values) / len(values),
            p50,
            p90,
            p95,
            p99,
            values[-1],
            self._within(series, within_s)[-1],
        )


def steady(value: float, count: int = 60) -> tuple[float, ...]:
    return (value,) * count


def a_pod(
    name: str,
    *,
    qos: str = "",
    priority: int | None = None,
    kube_qos: KubeQoS = KubeQoS.BURSTABLE,
    enabled: bool | None = None,
    policy: object = None,
    eviction_priority: object = None,
    labels: Mapping[str, str] | None = None,
    phase: str = "Running",
    uid: str = "",
    requests: Mapping[str, int] | None = None,
    more: Iterable[ContainerSpec] = (),
    **fields: Any,
) -> Pod:
    """Return a pod. requests: fields of Amounts of its first container; more: its other ones."""
    every = dict(labels or {})
    if qos:
        every[LABEL_QOS_CLASS] = qos
    if enabled is not None:
        every[LABEL_EVICTION_ENABLED] = "true" if enabled else "false"
    annotations: dict[str, str] = {}
    if policy is not None:
        annotations[ANNOTATION_EVICTION_POLICY] = (
            policy if isinstance(policy, str) else json.dumps(policy)
        )
    if eviction_priority is not None:
        annotations[ANNOTATION_EVICTION_PRIORITY] = str(eviction_priority)
    specs = (
        ContainerSpec("main", ContainerKind.REGULAR, Amounts(**(requests or {}))),
        *more,
    )
    return make_pod(
        namespace="default",
        name=name,
        uid=uid or f"uid-{name}",
        labels=every,
        annotations={**annotations, **fields.pop("annotations", {})},
        kube_qos=kube_qos,
        priority=priority,
        phase=phase,
        specs=specs,
        **fields,
    )


def on_node(pod: Pod, *, terminating: bool = False, containers: int = 1) -> PodOnNode:
    return PodOnNode(
        pod,
        tuple(
            ContainerSubject(pod=pod, name=f"c{index}", id=f"{pod.uid}-c{index}")
            for index in range(containers)
        ),
        terminating,
    )


def a_situation(
    pods: Iterable[Pod | PodOnNode] = (),
    samples: Samples | None = None,
    *,
    slo: Mapping[str, Any] | None = None,
    gates: Iterable[str] = (),
    compat: Iterable[str] = (),
    cpu_milli: int = 32000,
    memory_bytes: int = 256 * GIB,
    allocatable: Mapping[str, int] | None = None,
    pressures: Iterable[str] = (),
    now: float = 1000.0,
) -> Situation:
    spec = {"resourceUsedThresholdWithBE": {"enable": True, **(slo or {})}}
    return Situation(
        now=now,
        wall=1.7e9 + now,
        inputs=NodeInputs(
            slo=decode_nodeslo({"spec": spec}, obj="NodeSLO n1"),
            node=NodeMeta(name="n1", pressures=frozenset(pressures)),
            settings=Settings(feature_gates=dict.fromkeys(gates, True), compat=frozenset(compat)),
        ),
        node=NodeAmounts(cpu_milli, memory_bytes, dict(allocatable or {})),
        pods=tuple(each if isinstance(each, PodOnNode) else on_node(each) for each in pods),
        host_apps=(),
        measurements=Measured(samples or {}),
    )


def used(metric: Metric, **amounts: float) -> dict[Series, tuple[float, ...]]:
    """Return steady samples of pods, by their names."""
    return {Series(metric, f"uid-{name}"): steady(value) for name, value in amounts.items()}
