"""Memory eviction: ends pods before the kernel's OOM killer or kubelet would choose.

Three gates; they are judged every second.

BEMemoryEvict, use. With p the node's memory use without page cache, in percent of its memory:

    p >= memoryEvictThresholdPercent: release (p - memoryEvictLowerPercent) % of the node's memory

from best-effort pods; those that use most go first among equal priorities. p is the smaller of the
newest sample and the mean of the last three seconds, so one odd sample evicts nothing. Upstream
judges one sample alone; the switch EvictionMeasuresCoarsely brings that back.

MemoryEvict, use. The same amount, from pods up to `evictEnabledPriorityThreshold`.

MemoryAllocatableEvict, requests. `eviction_rules.allocatable_rule` with memory, mid-memory and
batch-memory.

Worked examples: docs/qos.md, "Eviction".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from apis.errors import InputError
from apis.keys import BATCH_MEMORY, MEMORY, MID_MEMORY
from apis.qos import PriorityClass
from hooks.amounts import request_of_pod
from hooks.subject import Amounts, Pod
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies import candidates
from koordlet.qos.strategies.eviction_rules import (
    allocatable_rule,
    coarsely,
    latest,
    limits_of,
    over_use,
    thresholds,
    use_priority_limit,
    used_by,
    verdict_of,
)
from koordlet.qos.strategy import Shortage, Situation, Strategy, Verdict, Victim

BE_USE: Final = "BEMemoryEvict"
ALLOCATABLE: Final = "MemoryAllocatableEvict"
USE: Final = "MemoryEvict"

COOL_DOWN_S: Final = 4.0
"""Upstream's `memory-evict-cool-time-seconds`."""
_INTERVAL_S: Final = 1.0
"""Upstream's `memory-evict-interval-seconds`."""
_MEAN_PERIODS: Final = 3
"""Collection intervals of the mean. Chosen: one odd sample does not lift a mean of three above the
threshold for long, and memory that grows is seen 1 s later. Twice the value doubles that delay."""


def _be_rule(situation: Situation, gate: str, faults: list[InputError]) -> tuple[Shortage, ...]:
    def ranked(used: candidates.Releases) -> tuple[Victim, ...]:
        return candidates.best_effort(situation, gate, used, lambda pod: -used(pod), faults)

    return _over_use(situation, gate, ranked)


def _use_rule(situation: Situation, gate: str, faults: list[InputError]) -> tuple[Shortage, ...]:
    highest = use_priority_limit(situation, gate)

    def ranked(used: candidates.Releases) -> tuple[Victim, ...]:
        return candidates.by_priority(situation, gate, highest, used, faults)

    return _over_use(situation, gate, ranked)


def _over_use(
    situation: Situation, gate: str, ranked: Callable[[candidates.Releases], tuple[Victim, ...]]
) -> tuple[Shortage, ...]:
    """Return the shortage of a node above its threshold; none below.

    ranked: returns the pods that the gate may evict, from what the end of each releases.
    """
    slo = thresholds(situation)
    limits = limits_of(
        situation,
        "memoryEvict",
        slo.memory_evict_threshold_percent,
        slo.memory_evict_lower_percent,
        gate=gate,
    )
    used = latest(situation, Metric.NODE_MEMORY)
    if used is None:
        return ()
    if not coarsely(situation):
        mean = situation.measurements.average(
            Series(Metric.NODE_MEMORY), within_s=_MEAN_PERIODS * situation.interval_s
        )
        used = used if mean is None else min(used, mean)
    capacity = situation.node.memory_bytes
    over = over_use(used, capacity, limits, whole_percents=coarsely(situation))
    if over is None:
        return ()
    releases = used_by(situation, Metric.POD_MEMORY, 1)
    victims = ranked(releases)
    return (
        Shortage(
            gate=gate,
            resource=MEMORY,
            of_requests=False,
            needed=over.amount,
            numbers=(
                f"the node uses {_gib(used)} of {_gib(capacity)} GiB of memory"
                f" = {over.percent:.1f} %, at least {limits.threshold} %:"
                f" release {_gib(over.amount)} GiB to reach {limits.lower} %"
            ),
            victims=victims,
            cool_down_s=COOL_DOWN_S,
            others=candidates.others(situation.pods, victims, releases),
        ),
    )


def _gib(amount: float) -> str:
    return f"{amount / (1 << 30):.2f}"


def _allocatable_rule(
    situation: Situation, gate: str, faults: list[InputError]
) -> tuple[Shortage, ...]:
    slo = thresholds(situation)
    return allocatable_rule(
        situation,
        gate,
        faults,
        stem="memoryAllocatableEvict",
        limits=(
            slo.memory_allocatable_evict_threshold_percent,
            slo.memory_allocatable_evict_lower_percent,
        ),
        requests={MID_MEMORY: _mid_memory, BATCH_MEMORY: _batch_memory, MEMORY: _plain_memory},
        owner=_owned_memory,
        cool_down_s=COOL_DOWN_S,
    )


_OWNED: Final = {PriorityClass.MID: MID_MEMORY, PriorityClass.BATCH: BATCH_MEMORY}
"""What the pods of a class request; others request plain memory."""


def _owned_memory(pod: Pod) -> str:
    return _OWNED.get(candidates.class_of(pod), MEMORY)


def _batch_memory(pod: Pod) -> int:
    return candidates.extended_request(
        pod, lambda amounts: amounts.batch_memory_request_bytes, BATCH_MEMORY
    )


def _mid_memory(pod: Pod) -> int:
    return candidates.extended_request(
        pod, lambda amounts: amounts.mid_memory_request_bytes, MID_MEMORY
    )


def _plain_memory(pod: Pod) -> int:
    return request_of_pod(pod, _memory_request)


def _memory_request(amounts: Amounts) -> int | None:
    return amounts.memory_request_bytes


def step(state: Any, situation: Situation) -> tuple[Any, Verdict]:
    """Judge the three gates; stateless. Returns (None, verdict)."""
    return verdict_of(situation, {BE_USE: _be_rule, ALLOCATABLE: _allocatable_rule, USE: _use_rule})


STRATEGY: Final = Strategy(
    name="memoryEvict",
    gates={BE_USE: False, ALLOCATABLE: False, USE: False},
    interval_s=_INTERVAL_S,
    ttl_s=3 * _INTERVAL_S,
    initial=lambda: None,
    step=step,
)
