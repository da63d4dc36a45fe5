"""Memory eviction: upstream's worked examples field by field, and what is decided otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import BATCH_MEMORY, MEMORY
from hooks.subject import Pod
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategies.memory_evict import step
from koordlet.qos.strategy import Shortage, Situation, Verdict
from tests.koordlet.qos.eviction_making import GIB, a_pod, a_situation, steady, used

COARSELY = "EvictionMeasuresCoarsely"


def verdict(situation: Situation) -> Verdict:
    return step(None, situation)[1]


def only(situation: Situation) -> Shortage:
    found = verdict(situation)
    assert found.faults == ()
    (short,) = found.shortages
    return short


def names(short: Shortage) -> list[str]:
    return [victim.pod.name for victim in short.victims]


def be(name: str, priority: int = 5000, **fields: Any) -> Pod:
    return a_pod(name, qos="BE", priority=priority, **fields)


def full(gib: float = 203, **changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "pods": [be("a"), be("b"), be("c", 5500)],
        "samples": {
            Series(Metric.NODE_MEMORY): steady(gib * GIB),
            **used(Metric.POD_MEMORY, a=10.0 * GIB, b=20.0 * GIB, c=40.0 * GIB),
        },
        "slo": {"memoryEvictThresholdPercent": 70},
        "gates": ["BEMemoryEvict"],
        **changes,
    }
    return a_situation(**fields)


@pytest.mark.parametrize(("lower", "needed"), [(None, 30236569763), (65, 38482906972)])
def test_the_worked_example_in_whole_percents(lower: int | None, needed: int) -> None:
    slo = {"memoryEvictThresholdPercent": 70}
    if lower is not None:
        slo["memoryEvictLowerPercent"] = lower
    short = only(full(slo=slo, compat=[COARSELY]))
    assert (short.gate, short.resource, short.of_requests, short.needed, short.cool_down_s) == (
        "BEMemoryEvict",
        "memory",
        False,
        needed,
        4.0,
    )
    assert [(victim.pod.name, victim.releases) for victim in short.victims] == [
        ("b", 20 * GIB),
        ("a", 10 * GIB),
        ("c", 40 * GIB),
    ]


def test_use_is_exact() -> None:
    short = only(full())
    assert short.needed == 31052613550  # 203 GiB - 68 % of 256 GiB
    assert short.numbers == (
        "the node uses 203.00 of 256.00 GiB of memory = 79.3 %, at least 70 %:"
        " release 28.92 GiB to reach 68 %"
    )


@pytest.mark.parametrize(
    ("percent", "threshold", "compat", "found"),
    [
        (79.9, 80, [], 0),
        (80.0, 80, [], 1),
        (79.95, 79, [COARSELY], 1),
        (78.99, 79, [COARSELY], 0),
    ],
)
def test_the_threshold(percent: float, threshold: int, compat: list[str], found: int) -> None:
    situation = full(percent * 2.56, slo={"memoryEvictThresholdPercent": threshold}, compat=compat)
    assert len(verdict(situation).shortages) == found


def test_one_odd_sample_evicts_nothing_and_three_do() -> None:
    def after(high: int, compat: tuple[str, ...] = ()) -> int:
        values = steady(150.0 * GIB, 57) + steady(203.0 * GIB, high)
        pods = used(Metric.POD_MEMORY, a=10.0 * GIB)
        samples = {Series(Metric.NODE_MEMORY): values, **pods}
        return len(verdict(full(samples=samples, compat=compat)).shortages)

    assert [after(1), after(3), after(1, (COARSELY,))] == [0, 1, 1]


def test_falling_use_counts_at_once() -> None:
    values = (*steady(203.0 * GIB), 150.0 * GIB)
    assert verdict(full(samples={Series(Metric.NODE_MEMORY): values})).shortages == ()


def test_without_a_sample_nothing_is_evicted() -> None:
    assert verdict(full(samples={})) == Verdict()


def test_by_priority_a_pod_releases_the_bytes_that_it_uses() -> None:
    pods = [be("a", enabled=True), be("b"), a_pod("ls", priority=7000, enabled=True)]
    situation = full(
        pods=pods,
        samples={
            Series(Metric.NODE_MEMORY): steady(203.0 * GIB),
            **used(Metric.POD_MEMORY, a=10.0 * GIB, b=20.0 * GIB, ls=3.0 * GIB),
        },
        slo={"memoryEvictThresholdPercent": 70, "evictEnabledPriorityThreshold": 7000},
        gates=["MemoryEvict"],
    )
    assert [(one.pod.name, one.releases) for one in only(situation).victims] == [
        ("a", 10 * GIB),
        ("ls", 3 * GIB),
    ]


@pytest.mark.parametrize(
    ("gate", "slo", "field"),
    [
        ("BEMemoryEvict", {"memoryEvictLowerPercent": 70}, "memoryEvictLowerPercent"),
        ("MemoryEvict", {}, "evictEnabledPriorityThreshold"),
        (
            "MemoryAllocatableEvict",
            {"allocatableEvictPriorityThreshold": 7999},
            "memoryAllocatableEvictThresholdPercent",
        ),
    ],
)
def test_bad_limits(gate: str, slo: dict[str, int], field: str) -> None:
    found = verdict(full(slo=slo, gates=[gate]))
    assert found.shortages == ()
    assert [error.field.rpartition(".")[2] for error in found.faults] == [field]


def test_requested_memory() -> None:
    def pod(name: str, priority: int, **requests: int) -> Pod:
        return a_pod(name, priority=priority, enabled=True, requests=requests)

    situation = a_situation(
        [
            pod("batch", 5000, batch_memory_request_bytes=14 * GIB),
            pod("mid", 7000, mid_memory_request_bytes=1 * GIB),
            pod("free", 3000, memory_request_bytes=3 * GIB),
        ],
        slo={
            "memoryAllocatableEvictThresholdPercent": 120,
            "memoryAllocatableEvictLowerPercent": 100,
            "allocatableEvictPriorityThreshold": 7999,
        },
        gates=["MemoryAllocatableEvict"],
        allocatable={BATCH_MEMORY: 10 * GIB, MEMORY: 2 * GIB},
    )
    assert [
        (short.resource, short.needed, names(short)) for short in verdict(situation).shortages
    ] == [
        ("kubernetes.io/mid-memory", GIB, ["mid"]),
        ("kubernetes.io/batch-memory", 4 * GIB, ["batch"]),
        ("memory", GIB, ["free"]),
    ]


def test_the_three_gates_in_order() -> None:
    situation = full(
        pods=[be("a", enabled=True, requests={"batch_memory_request_bytes": GIB})],
        slo={
            "memoryEvictThresholdPercent": 70,
            "evictEnabledPriorityThreshold": 7999,
            "memoryAllocatableEvictThresholdPercent": 120,
            "memoryAllocatableEvictLowerPercent": 100,
            "allocatableEvictPriorityThreshold": 7999,
        },
        gates=["MemoryEvict", "BEMemoryEvict", "MemoryAllocatableEvict"],
        allocatable={MEMORY: GIB},
    )
    assert [short.gate for short in verdict(situation).shortages] == [
        "BEMemoryEvict",
        "MemoryAllocatableEvict",
        "MemoryEvict",
    ]
