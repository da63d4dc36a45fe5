"""What CPU and memory eviction have in common: gates, limits in percent, and requests.

Each gate is a rule of its own: a bad field of one gate is a fault that names the field, and the
other gates go on. `enable: false` in the NodeSLO switches all of them off.

    use:       p = 100 use / capacity;          p >= threshold: release (p - lower) % of capacity
    requests:  q = 100 requested / allocatable; q > threshold: release requested - lower % of it

Upstream cuts p to whole percents, so that 79.9 % is below a threshold of 80; here p is exact. The
switch EvictionMeasuresCoarsely brings that back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from apis.errors import InputError
from apis.nodeslo import ResourceThresholdStrategy
from hooks import compat
from hooks.subject import Pod
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from koordlet.qos.strategies import candidates
from koordlet.qos.strategy import Shortage, Situation, Verdict

_LOWER_BELOW_THRESHOLD: Final = 2
"""Upstream's default of a lower limit, in percent points below its threshold."""
_HIGHEST_ALLOCATABLE_PRIORITY: Final = 7999
"""Upstream's bound of `allocatableEvictPriorityThreshold`: the end of the mid band."""

Rule = Callable[[Situation, str, list[InputError]], tuple[Shortage, ...]]
"""(situation, gate, faults to add to) -> shortages; may raise InputError for its own settings."""


def verdict_of(situation: Situation, rules: Mapping[str, Rule]) -> tuple[None, Verdict]:
    """Return what the gates that are on find, in the order of `rules`.

    The state of these strategies is None.
    """
    if not thresholds(situation).enable:
        why = "NodeSLO spec.resourceUsedThresholdWithBE.enable is false"
        return None, Verdict(summary=f"nothing is evicted: {why}")
    shortages: list[Shortage] = []
    faults: list[InputError] = []
    for gate, rule in rules.items():
        if not situation.inputs.settings.gate(gate, default=False):
            continue
        try:
            shortages += rule(situation, gate, faults)
        except InputError as error:
            faults.append(error)
    return None, Verdict(
        shortages=tuple(shortages),
        summary="; ".join(f"{short.gate}: {short.numbers}" for short in shortages),
        faults=tuple({str(fault): fault for fault in faults}.values()),
    )


def thresholds(situation: Situation) -> ResourceThresholdStrategy:
    return situation.inputs.slo.resource_used_threshold_with_be


def coarsely(situation: Situation) -> bool:
    return compat.EVICTION_MEASURES_COARSELY in situation.inputs.settings.compat


def latest(situation: Situation, metric: Metric, of: str = "") -> float | None:
    """Return the newest sample, as long as it counts as the latest."""
    within_s = LATEST_PERIODS * situation.interval_s
    return situation.measurements.latest(Series(metric, of), within_s=within_s)


def used_by(situation: Situation, metric: Metric, scale: int) -> candidates.Releases:
    """Return pod -> its newest sample in whole units of 1/`scale`; 0 without one."""

    def used(pod: Pod) -> int:
        return int((latest(situation, metric, pod.uid) or 0.0) * scale)

    return used


def bad_field(situation: Situation, field: str, value: object, problem: str) -> InputError:
    """Return the fault of a field of the thresholds. field: its name in the NodeSLO."""
    return InputError(
        obj=f"NodeSLO {situation.inputs.node.name}".rstrip(),
        field=f"spec.resourceUsedThresholdWithBE.{field}",
        value=value,
        problem=problem,
    )


class Limits(NamedTuple):
    """Percents: eviction starts at `threshold` and is done at `lower`."""

    threshold: int
    lower: int


def limits_of(
    situation: Situation, stem: str, threshold: int | None, lower: int | None, *, gate: str
) -> Limits:
    """Return a pair of limits; raises InputError. stem: "cpuEvict" of "cpuEvictLowerPercent"."""
    threshold = _needed(situation, f"{stem}ThresholdPercent", threshold, gate)
    if lower is None:
        lower = threshold - _LOWER_BELOW_THRESHOLD
    if lower >= threshold:
        raise bad_field(
            situation, f"{stem}LowerPercent", lower, f"must be below {stem}ThresholdPercent"
        )
    return Limits(threshold, lower)


class Usage(NamedTuple):
    """Use above a threshold. amount: to release; percent: of the capacity."""

    amount: int
    percent: float


def over_use(used: float, capacity: int, limits: Limits, *, whole_percents: bool) -> Usage | None:
    """Return how much of `capacity` has to be released; None below the threshold.

    used, capacity: milli-cores or bytes.
    """
    if capacity <= 0:
        return None
    percent = float(int(used) * 100 // capacity) if whole_percents else used * 100 / capacity
    amount = int(capacity * (percent - limits.lower) / 100)
    if percent < limits.threshold or amount <= 0:
        return None
    return Usage(amount, percent)


def use_priority_limit(situation: Situation, gate: str) -> int:
    """Return the highest priority that a gate may evict for the node's use; raises InputError."""
    highest = thresholds(situation).evict_enabled_priority_threshold
    return _needed(situation, "evictEnabledPriorityThreshold", highest, gate)


def _needed(situation: Situation, field: str, value: int | None, gate: str) -> int:
    """Return the value of a field that the gate needs; raises InputError without one."""
    if value is None:
        raise bad_field(situation, field, None, f"must be set for the gate {gate}")
    return value


def allocatable_rule(
    situation: Situation,
    gate: str,
    faults: list[InputError],
    *,
    stem: str,
    limits: tuple[int | None, int | None],
    requests: Mapping[str, candidates.Releases],
    owner: Callable[[Pod], str],
    cool_down_s: float,
) -> tuple[Shortage, ...]:
    """Return a shortage for each resource of which more is requested than the limit allows.

    requests: resource -> pod -> its request. owner: the resource that a pod's class requests.
    Only pods that request the short resource are victims: the end of another releases nothing.
    A resource that the Node lacks is not allocatable, so all that is requested is too much.
    """
    field = "allocatableEvictPriorityThreshold"
    highest = thresholds(situation).allocatable_evict_priority_threshold
    highest = _needed(situation, field, highest, gate)
    if highest > _HIGHEST_ALLOCATABLE_PRIORITY:
        problem = f"must be at most {_HIGHEST_ALLOCATABLE_PRIORITY}"
        raise bad_field(situation, field, highest, problem)
    for name, value in zip(("Threshold", "Lower"), limits, strict=True):
        _needed(situation, f"{stem}{name}Percent", value, gate)
    threshold, lower = limits_of(situation, stem, *limits, gate=gate)
    allocatable = situation.node.allocatable
    if not allocatable:
        return ()  # no Node object: what is allocatable is not known
    in_reach = tuple(each for each in situation.pods if candidates.priority_of(each.pod) <= highest)
    short: list[Shortage] = []
    for resource, request in requests.items():
        share = _share(resource, request, owner)
        requested = sum(share(each.pod) for each in candidates.live(in_reach))
        most = max(allocatable.get(resource, 0), 0)
        needed = requested - most * lower // 100
        if requested * 100 <= most * threshold or needed <= 0:
            continue
        percent = f" = {requested * 100 / most:.1f} %" if most else ""
        victims = candidates.by_priority(situation, gate, highest, share, faults)
        short.append(
            Shortage(
                gate=gate,
                resource=resource,
                of_requests=True,
                needed=needed,
                numbers=(
                    f"pods up to priority {highest} request {requested} {resource} of {most}"
                    f" allocatable{percent}, more than {threshold} %:"
                    f" release {needed} to reach {lower} %"
                ),
                victims=victims,
                cool_down_s=cool_down_s,
                others=candidates.others(in_reach, victims, share),
            )
        )
    return tuple(short)


def _share(
    resource: str, request: candidates.Releases, owner: Callable[[Pod], str]
) -> candidates.Releases:
    """Return pod -> its request of a resource; 0 for pods whose class requests another one."""
    return lambda pod: request(pod) if owner(pod) == resource else 0
