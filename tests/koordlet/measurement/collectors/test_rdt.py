"""Cache occupancy and bandwidth of the classes' groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koordlet.measurement.collecting import Unavailable
from koordlet.measurement.collectors.rdt import ResctrlCollector
from koordlet.measurement.series import Metric, Series
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.simulated import DEBIAN_12_V2, INTEL_RDT, SimulatedKernel
from tests.simulated.resctrl import Counters

LOCAL = Series(Metric.RESCTRL_BANDWIDTH, "BE", "0/mbm_local_bytes")
TOTAL = Series(Metric.RESCTRL_BANDWIDTH, "BE", "0/mbm_total_bytes")
OCCUPANCY = Series(Metric.RESCTRL_LLC, "BE", "0")


def machine(*groups: str) -> tuple[SimulatedKernel, Rounds]:
    kernel = SimulatedKernel(INTEL_RDT)
    for group in groups:
        kernel.mkdir(f"/sys/fs/resctrl/{group}")
    return kernel, Rounds.over(ResctrlCollector(kernel), kernel)


Value = int | str
VALUES = st.integers(0, 2**64) | st.just("Error")


def count(
    kernel: SimulatedKernel, occupancy: int | str, total: int | str, local: int | str
) -> None:
    assert kernel.resctrl is not None
    kernel.resctrl.counters[("BE", 0)] = Counters(occupancy, total, local)


def test_bandwidth_is_a_rate_and_occupancy_a_size() -> None:
    kernel, rounds = machine("BE", "LS")
    count(kernel, 4096, 1000, 500)
    first = rounds.next()
    assert first[OCCUPANCY] == 4096
    assert {series.of for series in first} == {"BE", "LS"}
    assert {series.metric for series in first} == {Metric.RESCTRL_LLC}
    count(kernel, 8192, 11_000, 1500)
    second = rounds.next()
    assert (second[OCCUPANCY], second[TOTAL], second[LOCAL]) == (8192, 1000.0, 100.0)


def test_a_value_that_the_hardware_does_not_have_is_missing() -> None:
    kernel, rounds = machine("BE")
    count(kernel, 1, 1000, 1000)
    rounds.next()
    count(kernel, "Unavailable", 2000, "Error")
    found = rounds.next()
    assert OCCUPANCY not in found and LOCAL not in found
    assert found[TOTAL] == 100.0
    count(kernel, 1, 3000, 3000)
    assert rounds.next()[LOCAL] == 100.0  # over both intervals: 2000 bytes in 20 s


def test_a_group_that_is_made_again_starts_again() -> None:
    kernel, rounds = machine("BE")
    count(kernel, 1, 1000, 1000)
    rounds.next()
    kernel.rmdir("/sys/fs/resctrl/BE")
    assert rounds.next() == {}
    assert "LSR, LS, BE" in rounds.problems[0]
    kernel.mkdir("/sys/fs/resctrl/BE")
    count(kernel, 1, 9_000_000, 9_000_000)
    assert TOTAL not in rounds.next()
    assert rounds.next()[TOTAL] == 0.0


def test_a_machine_without_monitoring_is_unavailable() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    with pytest.raises(Unavailable, match="resctrl"):
        Rounds.over(ResctrlCollector(kernel), kernel).next()


@settings(max_examples=30)
@given(st.lists(st.tuples(VALUES, st.floats(0.01, 500)), max_size=8))
def test_no_bandwidth_is_absurd(steps: list[tuple[Value, float]]) -> None:
    kernel, rounds = machine("BE")
    for number, step_s in steps:
        count(kernel, number, number, number)
        for series, value in rounds.next(step_s).items():
            assert value >= 0
            assert series.metric is Metric.RESCTRL_LLC or value <= 1e13


def test_the_counts_are_those_of_the_last_round() -> None:
    kernel, rounds = machine("BE")
    assert isinstance(rounds.collector, ResctrlCollector)
    assert rounds.collector.counts == {}
    count(kernel, 1, 1000, 500)
    rounds.next()
    first = rounds.collector.counts
    assert {series: number for series, number in first.items() if series.detail[0] == "0"} == {
        LOCAL: 500,
        TOTAL: 1000,
    }
    count(kernel, 1, 1100, "Unavailable")
    rounds.next()
    assert rounds.collector.counts[TOTAL] == 1100
    assert LOCAL not in rounds.collector.counts
    assert first[TOTAL] == 1000, "a reader keeps what it has"
    rounds.collector.close()
    assert rounds.collector.counts == {}


def test_a_collector_that_is_closed_begins_again() -> None:
    kernel, rounds = machine("BE")
    count(kernel, 1, 0, 0)
    rounds.next()
    count(kernel, 1, 1000, 1000)
    rounds.collector.close()
    assert TOTAL not in rounds.next()
    count(kernel, 1, 3000, 3000)
    assert rounds.next()[TOTAL] == 200.0


def test_groups_of_others_are_not_measured_and_one_of_ours_is_enough() -> None:
    _, rounds = machine("operators", "LSR")
    assert {series.of for series in rounds.next()} == {"LSR"}
    assert rounds.problems == []
    _, rounds = machine("operators")
    assert rounds.next() == {}
    assert rounds.problems == ["/sys/fs/resctrl has none of the control groups LSR, LS, BE"]


def test_each_group_and_domain_counts_alone() -> None:
    kernel, rounds = machine("BE", "LS")
    assert kernel.resctrl is not None
    domains = kernel.resctrl.domains
    assert len(domains) > 1
    kernel.rmdir("/sys/fs/resctrl/LS")
    rounds.next()
    kernel.mkdir("/sys/fs/resctrl/LS")
    for group in ("BE", "LS"):
        for domain in domains:
            kernel.resctrl.counters[group, domain] = Counters(domain, 100 * (domain + 1), 0)
    found = rounds.next()
    # Of LS this is the first reading.
    assert {
        (series.of, series.detail): value
        for series, value in found.items()
        if series.metric is Metric.RESCTRL_BANDWIDTH and series.detail.endswith("total_bytes")
    } == {("BE", f"{domain}/mbm_total_bytes"): 10.0 * (domain + 1) for domain in domains}
    assert {
        (series.of, series.detail): value
        for series, value in found.items()
        if series.metric is Metric.RESCTRL_LLC
    } == {(group, str(domain)): domain for group in ("BE", "LS") for domain in domains}


def test_a_bandwidth_is_outdated_after_twenty_intervals_and_has_a_most() -> None:
    kernel, rounds = machine("BE")
    count(kernel, 1, 0, 0)
    rounds.next()
    count(kernel, 1, 2000, 10**16)
    found = rounds.next(200.0)
    assert found[TOTAL] == 10.0
    assert LOCAL not in found
    assert TOTAL not in rounds.next(200.5)


def test_the_reason_names_the_mount() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    reason = r"^/other is not mounted, or this machine has no monitoring$"
    with pytest.raises(Unavailable, match=reason):
        Rounds.over(ResctrlCollector(kernel, mount="/other"), kernel).next()
