"""What holds for every strategy: its gates and times, and how old a sample it decides by."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hooks.subject import Requested
from koordlet.measurement.series import Aggregate, Series
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.qos.strategy import Strategy
from tests.hooks.making import a_pod, be_pod, node
from tests.koordlet.qos.situations import Figures, a_situation, on_node

_SLO = {
    "resourceUsedThresholdWithBE": {
        "enable": True,
        "cpuEvictBESatisfactionLowerPercent": 50,
        "cpuEvictBESatisfactionUpperPercent": 80,
        "memoryEvictThresholdPercent": 70,
    },
    "cpuBurstStrategy": {"policy": "auto"},
}
_LIMITED = Requested(cfs_quota_us=100_000)
_BY_LATEST = [each for each in STRATEGIES if each.name != "BandwidthSuppress"]
"""Bandwidth control decides by averages alone."""
_STALL_WINDOW_S = 25.0
"""Pressure control also looks at pressure that the kernel averaged."""


def test_gates_intervals_and_times_to_live() -> None:
    """Gates and their defaults are upstream's, except those of the last two."""
    assert [(each.name, each.gates, each.interval_s, each.ttl_s) for each in STRATEGIES] == [
        ("BECPUSuppress", {"BECPUSuppress": True}, 1.0, 10.0),
        ("CPUBurst", {"CPUBurst": True}, 1.0, 10.0),
        (
            "CPUEvict",
            {"BECPUEvict": False, "CPUAllocatableEvict": False, "CPUEvict": False},
            1.0,
            3.0,
        ),
        (
            "memoryEvict",
            {"BEMemoryEvict": False, "MemoryAllocatableEvict": False, "MemoryEvict": False},
            1.0,
            3.0,
        ),
        ("PressureSuppress", {"PressureSuppress": False}, 1.0, 10.0),
        ("BandwidthSuppress", {"BandwidthSuppress": False}, 1.0, 10.0),
    ]


class _Looked(Figures):
    """Measurements that note how far back each newest sample may lie."""

    def __init__(self) -> None:
        super().__init__({})
        self.windows: set[float] = set()

    def latest(self, series: Series, *, within_s: float) -> float | None:
        self.windows.add(within_s)
        return 1.0

    def average(self, series: Series, *, within_s: float) -> float | None:
        return 1.0

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        return Aggregate(60, 60.0, *[1.0] * 7)


@pytest.mark.parametrize("interval_s", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("strategy", _BY_LATEST, ids=[each.name for each in _BY_LATEST])
def test_a_newest_sample_is_at_most_two_intervals_of_measuring_old(
    strategy: Strategy, interval_s: float
) -> None:
    looked = _Looked()
    pods = [on_node(pod, ("main", _LIMITED)) for pod in (a_pod("LS", name="web"), be_pod())]
    situation = a_situation(
        {},
        *pods,
        slo=_SLO,
        inputs=node(gates=dict.fromkeys(strategy.gates, True)),
        allocatable_milli=15_500,
    )
    situation = replace(situation, measurements=looked, interval_s=interval_s)
    strategy.step(strategy.initial(), situation)
    assert looked.windows - {_STALL_WINDOW_S} == {2 * interval_s}
