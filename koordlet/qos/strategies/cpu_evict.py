"""CPU eviction: the last resort when best-effort work gets too little CPU, or a node too busy.

Three gates, each with its own rule; they are judged every second.

BECPUEvict, satisfaction. Best-effort pods that get little of what they request make no progress,
and fewer of them would. With U used, R requested and L the CPU that they may use, each as a mean
over the window W and as the newest sample, eviction needs both times:

    L < 1 core, or U / L >= cpuEvictBEUsageThresholdPercent     they want more than they get
    L / R <= cpuEvictBESatisfactionLowerPercent                 and it is too little
    release  R x upper % - L                                    milli-cores of batch-cpu requests

Of mean and newest the smaller amount counts, so an eviction that began to help is not repeated.
L is the limit that suppression leaves, or with `evictByAllocatable` the Node's batch-cpu.
The mean counts only if its samples cover a third of W.

CPUEvict, use. The node's use against cpuEvictThresholdPercent; pods up to
`evictEnabledPriorityThreshold` go until cpuEvictLowerPercent is reached. Use is the smaller of the
mean over W and the newest sample: a mean stays high for a while after an eviction that was enough.

CPUAllocatableEvict, requests. `eviction_rules.allocatable_rule` with cpu, mid-cpu and batch-cpu:
for a node whose batch or mid resources shrank after pods were placed.

Worked examples: docs/qos.md, "Eviction".
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from apis.errors import InputError
from apis.keys import BATCH_CPU, CPU, MID_CPU
from apis.nodeslo import CPUEvictPolicy
from apis.qos import PriorityClass
from hooks.amounts import request_of_pod
from hooks.subject import Amounts, Pod
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies import candidates
from koordlet.qos.strategies.candidates import batch_cpu_request
from koordlet.qos.strategies.eviction_rules import (
    allocatable_rule,
    bad_field,
    coarsely,
    latest,
    limits_of,
    over_use,
    thresholds,
    use_priority_limit,
    used_by,
    verdict_of,
)
from koordlet.qos.strategy import Shortage, Situation, Strategy, Verdict

BE_SATISFACTION: Final = "BECPUEvict"
ALLOCATABLE: Final = "CPUAllocatableEvict"
USE: Final = "CPUEvict"

COOL_DOWN_S: Final = 20.0
"""Upstream's `cpu-evict-cool-time-seconds`."""
_INTERVAL_S: Final = 1.0
"""Upstream's `cpu-evict-interval-seconds`."""
_BE_USAGE_PERCENT: Final = 90
"""Upstream's default of `cpuEvictBEUsageThresholdPercent`."""
_ONE_CORE_MILLI: Final = 1000
"""Upstream's bound below which best-effort pods count as starved, however much they use."""
_HIGHEST_LOWER: Final = 60
"""Upstream's bound of `cpuEvictBESatisfactionLowerPercent`."""


def _be_rule(situation: Situation, gate: str, faults: list[InputError]) -> tuple[Shortage, ...]:
    slo = thresholds(situation)
    lower, upper = _satisfaction_limits(situation)
    usage_percent = slo.cpu_evict_be_usage_threshold_percent
    if usage_percent is None:
        usage_percent = _BE_USAGE_PERCENT
    window_s = _window_s(situation)
    figures = _mean_and_newest(situation, window_s)
    if figures is None:
        return ()
    mean, newest = figures
    needed = min(_wanted(each, lower, upper, usage_percent) for each in (mean, newest))
    if needed <= 0:
        return ()
    used = used_by(situation, Metric.POD_CPU, 1000)

    def unused_share(pod: Pod) -> float:
        return -used(pod) / max(batch_cpu_request(pod), 1)

    def of_best_effort(pod: Pod) -> int:
        return batch_cpu_request(pod) if pod.qos == "BE" else 0

    victims = candidates.best_effort(situation, gate, batch_cpu_request, unused_share, faults)
    return (
        Shortage(
            gate=gate,
            resource=BATCH_CPU,
            of_requests=True,
            needed=needed,
            numbers=(
                f"best-effort pods may use {mean.limit:.0f} of {mean.request:.0f} requested"
                f" milli-cores = {100 * mean.limit / mean.request:.1f} % <= {lower} %, and use"
                f" {mean.used:.0f} over {window_s:.0f} s:"
                f" release {needed} requested milli-cores to reach {upper} %"
            ),
            victims=victims,
            cool_down_s=COOL_DOWN_S,
            others=candidates.others(situation.pods, victims, of_best_effort),
        ),
    )


class _BestEffortCPU(NamedTuple):
    """U, R and L of the module, in milli-cores."""

    used: float
    request: float
    limit: float


def _mean_and_newest(
    situation: Situation, window_s: float
) -> tuple[_BestEffortCPU, _BestEffortCPU] | None:
    """Return the figures as means over the window and as newest samples; None if one is missing."""
    metrics = (Metric.BE_CPU_USED, Metric.BE_CPU_REQUEST, Metric.BE_CPU_LIMIT)
    means, newest = [], []
    for metric in metrics:
        mean = situation.measurements.aggregate(Series(metric), within_s=window_s)
        sample = latest(situation, metric)
        if mean is None or sample is None:
            return None
        if mean.samples * situation.interval_s < window_s // 3:
            return None
        means.append(mean.average)
        newest.append(sample)
    if thresholds(situation).cpu_evict_policy is CPUEvictPolicy.BY_ALLOCATABLE:
        means[2] = newest[2] = _allocatable_limit(situation)
    return _BestEffortCPU(*means), _BestEffortCPU(*newest)


def _satisfaction_limits(situation: Situation) -> tuple[int, int]:
    slo = thresholds(situation)
    lower = slo.cpu_evict_be_satisfaction_lower_percent
    upper = slo.cpu_evict_be_satisfaction_upper_percent
    if lower is None or not 0 < lower <= _HIGHEST_LOWER:
        raise bad_field(
            situation,
            "cpuEvictBESatisfactionLowerPercent",
            lower,
            f"must be 1 to {_HIGHEST_LOWER} for the gate {BE_SATISFACTION}",
        )
    if upper is None or not lower <= upper < 100:
        raise bad_field(
            situation,
            "cpuEvictBESatisfactionUpperPercent",
            upper,
            f"must be at least the lower percentage, {lower}, and below 100",
        )
    return lower, upper


def _allocatable_limit(situation: Situation) -> float:
    """Return the Node's batch-cpu in milli-cores; -1 where it has none, 1 for 0, as upstream."""
    amount = situation.node.allocatable.get(BATCH_CPU, -1)
    return -1.0 if amount < 0 else float(max(amount, 1))


def _wanted(figures: _BestEffortCPU, lower: int, upper: int, usage_percent: int) -> int:
    """Return the milli-cores of requests to release; 0 if best-effort pods are satisfied."""
    used, request, limit = figures
    if limit <= 0 or request <= 0:
        return 0
    if limit >= _ONE_CORE_MILLI and used * 100 < limit * usage_percent:
        return 0
    if limit * 100 > request * lower:
        return 0
    return max(int(request * upper / 100 - limit), 0)


def _use_rule(situation: Situation, gate: str, faults: list[InputError]) -> tuple[Shortage, ...]:
    slo = thresholds(situation)
    limits = limits_of(
        situation,
        "cpuEvict",
        slo.cpu_evict_threshold_percent,
        slo.cpu_evict_lower_percent,
        gate=gate,
    )
    highest = use_priority_limit(situation, gate)
    window_s = _window_s(situation)
    cores = situation.measurements.average(Series(Metric.NODE_CPU), within_s=window_s)
    if cores is None:
        return ()
    if not coarsely(situation):
        cores = min(cores, latest(situation, Metric.NODE_CPU) or 0.0)
    capacity = situation.node.cpu_milli
    over = over_use(cores * 1000, capacity, limits, whole_percents=coarsely(situation))
    if over is None:
        return ()
    used = used_by(situation, Metric.POD_CPU, 1000)
    victims = candidates.by_priority(situation, gate, highest, used, faults)
    return (
        Shortage(
            gate=gate,
            resource=CPU,
            of_requests=False,
            needed=over.amount,
            numbers=(
                f"the node uses {cores * 1000:.0f} of {capacity} milli-cores = {over.percent:.1f} %"
                f" over {window_s:.0f} s, at least {limits.threshold} %:"
                f" release {over.amount} milli-cores to reach {limits.lower} %"
            ),
            victims=victims,
            cool_down_s=COOL_DOWN_S,
            others=candidates.others(situation.pods, victims, used),
        ),
    )


def _allocatable_rule(
    situation: Situation, gate: str, faults: list[InputError]
) -> tuple[Shortage, ...]:
    slo = thresholds(situation)
    return allocatable_rule(
        situation,
        gate,
        faults,
        stem="cpuAllocatableEvict",
        limits=(
            slo.cpu_allocatable_evict_threshold_percent,
            slo.cpu_allocatable_evict_lower_percent,
        ),
        requests={MID_CPU: _mid_cpu, BATCH_CPU: batch_cpu_request, CPU: _plain_cpu},
        owner=_owned_cpu,
        cool_down_s=COOL_DOWN_S,
    )


def _window_s(situation: Situation) -> float:
    """Return W: the NodeSLO's window, at least one interval of the collectors."""
    return max(situation.interval_s, thresholds(situation).cpu_evict_time_window_seconds or 0)


_OWNED: Final = {PriorityClass.MID: MID_CPU, PriorityClass.BATCH: BATCH_CPU}
"""What the pods of a class request; others request plain CPU."""


def _owned_cpu(pod: Pod) -> str:
    return _OWNED.get(candidates.class_of(pod), CPU)


def _mid_cpu(pod: Pod) -> int:
    return candidates.extended_request(pod, lambda amounts: amounts.mid_cpu_request_milli, MID_CPU)


def _plain_cpu(pod: Pod) -> int:
    return request_of_pod(pod, _cpu_request)


def _cpu_request(amounts: Amounts) -> int | None:
    return amounts.cpu_request_milli


def step(state: Any, situation: Situation) -> tuple[Any, Verdict]:
    """Judge the three gates; stateless. Returns (None, verdict)."""
    return verdict_of(
        situation, {BE_SATISFACTION: _be_rule, ALLOCATABLE: _allocatable_rule, USE: _use_rule}
    )


STRATEGY: Final = Strategy(
    name="CPUEvict",
    gates={BE_SATISFACTION: False, ALLOCATABLE: False, USE: False},
    interval_s=_INTERVAL_S,
    ttl_s=3 * _INTERVAL_S,
    initial=lambda: None,
    step=step,
)
