"""The store's rings: windows, statistics, expiry, bounds, and reads from other threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement import store as store_module
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store, View

CPU = Series(Metric.NODE_CPU)
MEMORY = Series(Metric.NODE_MEMORY)


def pod(uid: str) -> Series:
    return Series(Metric.POD_CPU, uid)


def filled(values: Sequence[float], *, retention_s: float = 100.0) -> Store:
    """A store with one sample of the node's CPU a second, from second 1 on."""
    store = Store()
    store.add_table("node", interval_s=1.0, retention_s=retention_s)
    for second, value in enumerate(values, 1):
        store.record("node", float(second), {CPU: value})
    return store


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p95", "p99"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 3, 6, 6, 6),  # the reference's worked example
        ([5], 5, 5, 5, 5),
        ([2, 1], 1, 1, 1, 1),
        (range(1, 101), 50, 90, 95, 99),
        (range(1, 11), 5, 9, 9, 9),
        (range(1, 21), 10, 18, 19, 19),
    ],
)
def test_a_percentile_is_an_element_of_the_ascending_order(
    values: Sequence[float], p50: float, p90: float, p95: float, p99: float
) -> None:
    view = filled(values, retention_s=200).view(1000.0)
    found = view.aggregate(CPU, within_s=1000)
    assert found is not None
    assert (found.p50, found.p90, found.p95, found.p99) == (p50, p90, p95, p99)


def test_an_aggregate_has_mean_count_span_and_latest_of_its_window() -> None:
    view = filled([9, 1, 2, 6]).view(4.0)
    found = view.aggregate(CPU, within_s=2)
    assert found is not None
    assert (found.samples, found.span_s, found.average, found.latest) == (3, 2.0, 3.0, 6.0)


def test_a_window_without_samples_has_no_result() -> None:
    view = filled([1, 2]).view(50.0)
    assert view.latest(CPU, within_s=2) is None
    assert view.average(CPU, within_s=2) is None
    assert view.aggregate(CPU, within_s=2) is None
    assert view.latest(MEMORY, within_s=100) is None
    assert view.averages(Metric.NODE_MEMORY, within_s=100) == {}
    assert view.statistics(Metric.NODE_MEMORY, within_s=100).keys == ()


def test_a_view_stays_as_of_its_moment() -> None:
    store = filled([1, 2, 3])
    view = store.view(3.0)
    store.record("node", 4.0, {CPU: 100.0})
    assert view.latest(CPU, within_s=10) == 3
    assert view.average(CPU, within_s=10) == 2
    assert view.latest_of(Metric.NODE_CPU, within_s=10) == {("", ""): 3.0}


def test_the_latest_sample_may_be_older_than_the_newest_round() -> None:
    store = filled([1, 2])
    store.record("node", 3.0, {MEMORY: 8.0})
    view = store.view(3.0)
    assert view.latest(CPU, within_s=1) == 2
    assert view.latest(CPU, within_s=0.5) is None


@given(
    st.lists(
        st.tuples(
            st.floats(0.25, 3.0),
            st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1e12), max_size=5),
        ),
        min_size=1,
        max_size=80,
    ),
    st.floats(0.5, 5.0),
)
def test_reads_of_one_object_and_of_all_agree_with_a_plain_list(
    rounds: list[tuple[float, dict[str, float]]], within_s: float
) -> None:
    store = Store()
    store.add_table("pods", interval_s=0.25, retention_s=5.0)
    now = 0.0
    samples: list[tuple[float, str, float]] = []
    for step, values in rounds:
        now += step
        store.record("pods", now, {pod(uid): value for uid, value in values.items()})
        samples.extend((now, uid, value) for uid, value in values.items())
        newest = store.view(now).latest_of(Metric.POD_CPU, within_s=0.1)
        assert newest == {(uid, ""): value for uid, value in values.items()}
    view = store.view(now)
    latest = view.latest_of(Metric.POD_CPU, within_s=within_s)
    averages = view.averages(Metric.POD_CPU, within_s=within_s)
    statistics = view.statistics(Metric.POD_CPU, within_s=within_s)
    for uid in "abcde":
        mine = [(at, v) for at, of, v in samples if of == uid and at >= now - within_s]
        key = (uid, "")
        one = view.aggregate(pod(uid), within_s=within_s)
        if not mine:
            assert one is None and key not in latest and key not in averages
            assert key not in statistics.keys
            continue
        values_only = [value for _, value in mine]
        assert one is not None
        assert one.samples == len(mine)
        assert one.average == pytest.approx(sum(values_only) / len(mine))
        assert latest[key] == one.latest == mine[-1][1] == view.latest(pod(uid), within_s=within_s)
        assert averages[key] == pytest.approx(one.average)
        assert averages[key] == pytest.approx(view.average(pod(uid), within_s=within_s))
        ordered = sorted(values_only)
        assert one.p90 == ordered[max(int(np.float32(len(mine)) * np.float32(0.9)) - 1, 0)]
        assert one.largest == ordered[-1]
        index = statistics.keys.index(key)
        assert tuple(getattr(statistics, name)[index] for name in one._fields) == pytest.approx(one)


def test_the_ring_keeps_its_retention_and_no_more() -> None:
    store = filled(range(200), retention_s=30)
    found = store.view(200.0).aggregate(CPU, within_s=1000)
    assert found is not None
    assert 30 <= found.samples <= 40
    within = store.view(200.0).aggregate(CPU, within_s=30)
    assert within is not None
    assert within.samples == 31


def test_a_window_over_the_rings_end_is_in_the_order_of_time() -> None:
    store = filled([])
    store.add_table("short", interval_s=1.0, retention_s=10.0)
    for second in range(1, 100):
        store.record("short", float(second), {MEMORY: float(second)})
        view = store.view(float(second))
        found = view.aggregate(MEMORY, within_s=10)
        assert found is not None
        assert found.latest == second
        assert found.span_s == min(second - 1, 10)
        statistics = view.statistics(Metric.NODE_MEMORY, within_s=10)
        assert (statistics.latest[0], statistics.span_s[0]) == (second, found.span_s)
        store.record("node", float(second), {})
        assert view.latest_of(Metric.NODE_MEMORY, within_s=10) == {("", ""): second}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_value_that_no_metric_can_have_is_left_out_and_counted(bad: float) -> None:
    store = filled([1])
    store.record("node", 2.0, {CPU: bad, MEMORY: 4.0})
    assert store.view(2.0).latest(CPU, within_s=0.5) is None
    assert store.view(2.0).latest(MEMORY, within_s=0.5) == 4
    assert store.sizes()["node"][2] == 1


def test_a_round_that_is_not_later_is_refused() -> None:
    store = filled([1, 2])
    with pytest.raises(ValueError, match="not after"):
        store.record("node", 2.0, {CPU: 7.0})
    assert store.view(2.0).latest(CPU, within_s=1) == 2


def test_rows_of_vanished_objects_are_used_again() -> None:
    """Of five at a time that live 10 s each, in a table that keeps samples for 300 s."""
    store = Store()
    store.add_table("pods", interval_s=1.0, retention_s=300.0)
    for second in range(1, 2000):
        store.record("pods", float(second), {pod(f"{second // 10}-{n}"): 1.0 for n in range(5)})
        series, size, left_out = store.sizes()["pods"]
        assert series <= 5 * (30 + 30 + 10) // 10 + 5
        assert left_out == 0
    assert size <= 64 * 310 * 8
    view = store.view(1999.0)
    assert view.latest(pod("0-0"), within_s=5000) is None
    assert {f"{number}-0" for number in range(196, 200)} <= {
        of for of, _ in view.averages(Metric.POD_CPU, within_s=300)
    }


def test_a_series_of_the_node_is_kept_for_the_whole_retention() -> None:
    store = Store()
    store.add_table("node", interval_s=1.0, retention_s=300.0)
    store.record("node", 1.0, {CPU: 2.0})
    for second in range(2, 250):
        store.record("node", float(second), {MEMORY: 4.0})
    assert store.view(249.0).average(CPU, within_s=300) == 2.0


@pytest.mark.parametrize(
    ("interval_s", "pause_s", "rounds", "kept"),
    [
        pytest.param(1.0, 200.0, 1, True, id="a collector that paused has seen nothing go"),
        pytest.param(1.0, 0.0, 25, True, id="missing for less than half a minute"),
        pytest.param(1.0, 0.0, 70, False, id="missing for longer"),
        pytest.param(60.0, 0.0, 2, True, id="two slow rounds"),
        pytest.param(60.0, 0.0, 5, False, id="five slow rounds"),
    ],
)
def test_when_an_object_has_gone(
    interval_s: float, pause_s: float, rounds: int, kept: bool
) -> None:
    store = Store()
    store.add_table("pods", interval_s=interval_s, retention_s=1000.0)
    now = 0.0
    for _ in range(10):
        now += interval_s
        store.record("pods", now, {pod("it"): 3.0, pod("other"): 1.0})
    now += pause_s
    for number in range(rounds):
        now += interval_s
        store.record("pods", now, {pod("other"): 1.0, pod(f"new-{number}"): 1.0})
    assert (store.view(now).average(pod("it"), within_s=1000) == 3.0) is kept


def test_a_reused_row_has_nothing_of_its_former_series() -> None:
    store = Store()
    store.add_table("pods", interval_s=1.0, retention_s=10.0)
    for second in range(1, 10):
        store.record("pods", float(second), {pod("old"): 5.0})
    for second in range(10, 80):
        store.record("pods", float(second), {})
    store.record("pods", 80.0, {pod(f"new-{n}"): 1.0 for n in range(16)})
    view = store.view(80.0)
    assert set(view.averages(Metric.POD_CPU, within_s=1000).values()) == {1.0}


def test_a_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST_ROWS", 32)
    store = Store()
    store.add_table("pods", interval_s=1.0, retention_s=10.0)
    store.record("pods", 1.0, {pod(str(n)): float(n) for n in range(40)})
    series, _, left_out = store.sizes()["pods"]
    assert (series, left_out) == (32, 8)
    assert store.view(1.0).latest(pod("31"), within_s=1) == 31
    assert store.view(1.0).latest(pod("39"), within_s=1) is None


def test_the_store_of_a_full_node_is_a_small_part_of_the_daemons_memory() -> None:
    """110 pods and 220 containers with every collector's series, at the default intervals."""
    objects = [("pod", 110), ("container", 220)]
    store = Store()
    tables: list[tuple[str, float, float, int, int]] = [
        # name, interval, retention, series of the node, series of each pod and container
        ("node", 1.0, 1830.0, 3 + 2 * 8, 0),
        ("pods", 1.0, 330.0, 0, 4),
        ("best-effort", 1.0, 660.0, 3, 0),
        ("system", 1.0, 1830.0, 3 + 8, 0),
        ("disks", 1.0, 330.0, 3 * 16, 0),
        ("network", 1.0, 330.0, 2 * 4, 0),
        ("gpu", 1.0, 330.0, 2 * 8, 2),
        ("pressure", 10.0, 630.0, 24, 24),
        ("cpi", 10.0, 1860.0, 0, 2),
        ("cold", 5.0, 630.0, 2, 2),
    ]
    metric = Metric.NODE_PSI
    for name, interval_s, retention_s, of_node, of_each in tables:
        store.add_table(name, interval_s=interval_s, retention_s=retention_s)
        series = [Series(metric, name, str(n)) for n in range(of_node)]
        for kind, count in objects:
            series += [
                Series(metric, f"{name}-{kind}-{n}", str(d))
                for n in range(count)
                for d in range(of_each)
            ]
        store.record(name, 1.0, dict.fromkeys(series, 1.0))
    assert sum(left_out for _, _, left_out in store.sizes().values()) == 0
    assert sum(size for _, size, _ in store.sizes().values()) < 24 << 20


@pytest.mark.parametrize(("interval_s", "retention_s"), [(0, 10), (-1, 10), (5, 1)])
def test_a_table_needs_an_interval_and_a_longer_retention(
    interval_s: float, retention_s: float
) -> None:
    with pytest.raises(ValueError, match="table x"):
        Store().add_table("x", interval_s=interval_s, retention_s=retention_s)


def test_other_threads_read_whole_rounds_while_one_records() -> None:
    store = Store()
    store.add_table("pods", interval_s=1.0, retention_s=20.0)
    done = threading.Event()
    wrong: list[object] = []

    def read(view_of: Store) -> None:
        while not done.is_set():
            view: View = view_of.view(1e9)
            for keys, times, values in view_of.windows(Metric.POD_CPU, 1e9, 1e9):
                # Each round writes its own time to every row.
                if not np.array_equal(values, np.broadcast_to(times, (len(keys), len(times)))):
                    wrong.append(values)
            view.statistics(Metric.POD_CPU, within_s=1e9)

    readers = [threading.Thread(target=read, args=(store,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for second in range(1, 1500):
            store.record("pods", float(second), {pod(str(n)): float(second) for n in range(30)})
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert not wrong


def test_a_window_without_a_round_has_no_newest_sample_and_no_average() -> None:
    store = Store()
    store.add_table("pods", interval_s=1.0, retention_s=60.0)
    store.record("pods", 100.0, {Series(Metric.POD_CPU, "u1"): 2.0})
    late = store.view(150.0)
    assert late.latest_of(Metric.POD_CPU, within_s=2.0) == {}
    assert late.averages(Metric.POD_CPU, within_s=2.0) == {}
    assert len(late.statistics(Metric.POD_CPU, within_s=2.0).keys) == 0


@pytest.mark.parametrize("rounds", [5, 17, 40])
def test_a_longer_retention_keeps_what_is_there_and_what_comes(rounds: int) -> None:
    """The ring is partly filled, just full, and has wrapped around."""
    store = filled(range(1, rounds + 1), retention_s=10.0)
    before = store.view(float(rounds)).average(CPU, within_s=10)
    store.keep("node", 30.0)
    assert store.view(float(rounds)).average(CPU, within_s=10) == before
    for second in range(rounds + 1, rounds + 31):
        store.record("node", float(second), {CPU: float(second)})
    found = store.view(rounds + 30.0).aggregate(CPU, within_s=30)
    assert found is not None
    assert (found.samples, found.span_s, found.latest) == (31, 30.0, rounds + 30.0)


def test_a_shorter_retention_keeps_the_newest() -> None:
    store = filled((), retention_s=10.0)
    store.keep("node", 30.0)
    for second in range(1, 41):
        store.record("node", float(second), {CPU: float(second)})
    store.keep("node", 5.0)  # the table's own retention is the least
    store.record("node", 41.0, {CPU: 41.0})
    found = store.view(41.0).aggregate(CPU, within_s=10)
    assert found is not None
    assert (found.samples, found.average, found.latest) == (11, 36.0, 41.0)
    everything = store.view(41.0).aggregate(CPU, within_s=100)
    assert everything is not None and everything.samples == 18  # eight columns are spare
