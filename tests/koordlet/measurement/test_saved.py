"""Measurements on disk: what a restart finds again, and what is ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koordlet.measurement import saved
from koordlet.measurement.saved import SavedError
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store

BOOT = "b0075ec4-0000-4000-8000-000000000000"
CPU = Series(Metric.NODE_CPU)
PSI = Series(Metric.POD_PSI, "uid", "cpu.some.avg10")


def empty() -> Store:
    store = Store()
    store.add_table("node", interval_s=1.0, retention_s=60.0)
    store.add_table("pods", interval_s=10.0, retention_s=300.0)
    return store


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of 50 rounds of a node until second 100."""
    store = empty()
    for second in range(51, 101):
        store.record("node", float(second), {CPU: second / 7} if second % 2 else {})
    store.record("pods", 95.0, {PSI: 12.5})
    path = str(tmp_path / "measurements")
    assert saved.save(store, path, boot=BOOT, now=100.0) == os.path.getsize(path)
    return path


def test_a_restart_finds_the_samples_again(file: str) -> None:
    store = empty()
    assert saved.load(store, file, boot=BOOT, now=104.0) == 2
    store.record("node", 105.0, {CPU: 3.0})
    found = store.view(105.0).aggregate(CPU, within_s=60)
    assert found is not None
    assert (found.samples, found.latest, found.span_s) == (26, 3.0, 54.0)
    assert found.average == pytest.approx((sum(range(51, 101, 2)) / 7 + 3) / 26, rel=1e-6)
    assert store.view(105.0).latest(PSI, within_s=60) == 12.5


def test_samples_older_than_the_retention_stay_out(file: str) -> None:
    store = empty()
    assert saved.load(store, file, boot=BOOT, now=150.0) == 2
    found = store.view(150.0).aggregate(CPU, within_s=1000)
    assert found is not None
    assert found.samples == 5
    assert saved.load(empty(), file, boot=BOOT, now=1000.0) == 0


def test_a_retention_that_became_shorter_keeps_the_newest_samples(file: str) -> None:
    store = Store()
    store.add_table("node", interval_s=1.0, retention_s=4.0)
    saved.load(store, file, boot=BOOT, now=100.0)
    found = store.view(100.0).aggregate(CPU, within_s=1000)
    assert found is not None
    assert found.latest == pytest.approx(99 / 7)
    assert found.span_s <= 4


@pytest.mark.parametrize(
    ("boot", "now", "why"),
    [
        ("another", 100.0, "another boot"),
        ("", 100.0, "another boot"),
        (BOOT, 100.0 + 3601, "3601 s old"),
        (BOOT, 50.0, "-50 s old"),
    ],
)
def test_a_file_of_another_boot_or_time_is_refused(
    file: str, boot: str, now: float, why: str
) -> None:
    store = empty()
    with pytest.raises(SavedError, match=why):
        saved.load(store, file, boot=boot, now=now)
    assert store.view(now).latest(CPU, within_s=1e9) is None


def test_without_a_boot_id_no_file_can_be_trusted(file: str) -> None:
    saved.save(empty(), file, boot="", now=100.0)
    with pytest.raises(SavedError, match="another boot"):
        saved.load(empty(), file, boot="", now=100.0)


@given(data=st.data())
def test_a_damaged_file_is_refused_whatever_the_damage(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = empty()
    store.record("node", 1.0, {CPU: 1.0})
    path = tmp_path_factory.getbasetemp() / "damaged"
    saved.save(store, str(path), boot=BOOT, now=1.0)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.one_of(
            st.just(whole[:at]),
            st.integers(1, 255).map(
                lambda bit: whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
            ),
            st.binary(max_size=64),
        )
    )
    path.write_bytes(damaged)
    fresh = empty()
    with pytest.raises(SavedError):
        saved.load(fresh, str(path), boot=BOOT, now=1.0)
    assert fresh.view(1.0).latest(CPU, within_s=1e9) is None


def test_a_file_of_a_version_with_other_metrics_is_used_as_far_as_known(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_METRICS", frozenset({str(Metric.POD_PSI)}))
    store = Store()
    store.add_table("pods", interval_s=10.0, retention_s=300.0)
    assert saved.load(store, file, boot=BOOT, now=100.0) == 1
    assert store.view(100.0).latest(PSI, within_s=60) == 12.5


RETENTIONS = {"node": (1.0, 1830.0), "best-effort": (1.0, 660.0), "pods": (1.0, 330.0)}


def of_node() -> Store:
    store = Store()
    for name, (interval_s, retention_s) in RETENTIONS.items():
        store.add_table(name, interval_s=interval_s, retention_s=retention_s)
    return store


@pytest.mark.parametrize(
    ("minutes", "asked_s", "node", "best_effort", "pods"),
    [
        # of 1801, 661 and 331 samples, one a second
        (0, 0.0, 1801, 661, 331),
        (2, 0.0, 1711, 541, 211),
        (7, 0.0, 1411, 241, 0),
        (20, 0.0, 631, 0, 0),
        (45, 0.0, 0, 0, 0),
        # a report asked for 15 and 30 minutes of pods
        (7, 930.0, 1411, 241, 511),
        (20, 1830.0, 631, 0, 631),
        # nothing is kept for longer than the file counts
        (59, 9999.0, 0, 0, 61),
    ],
)
def test_a_restart_keeps_what_is_younger_than_each_retention(
    tmp_path: Path, minutes: int, asked_s: float, node: int, best_effort: int, pods: int
) -> None:
    """The daemon ends at second 10000, and another one begins so many minutes later."""
    series = {
        "node": CPU,
        "best-effort": Series(Metric.BE_CPU_USED),
        "pods": Series(Metric.POD_CPU, "u1"),
    }
    path, before = str(tmp_path / "measurements"), of_node()
    if asked_s:
        before.keep("pods", asked_s)
    for second in range(8200, 10_001):
        for table, one in series.items():
            before.record(table, float(second), {one: float(second)})
    saved.save(before, path, boot=BOOT, now=10_000.0)
    now, after = 10_000.0 + 60 * minutes, of_node()
    saved.load(after, path, boot=BOOT, now=now)
    found = {table: after.view(now).aggregate(one, within_s=1e9) for table, one in series.items()}
    counts = {table: 0 if each is None else each.samples for table, each in found.items()}
    assert counts == {"node": node, "best-effort": best_effort, "pods": pods}
    assert {each.latest for each in found.values() if each is not None} <= {10_000.0}
    # What the new daemon measures does not fill the gap.
    for second in range(3):
        for table, one in series.items():
            after.record(table, now + 1 + second, {one: 7.0})
    view = after.view(now + 3)
    assert view.latest(CPU, within_s=2) == 7.0
    recent = view.aggregate(CPU, within_s=60 * minutes + 2) if minutes else None
    assert recent is None or (recent.samples, recent.span_s) == (3, 2.0)
    whole = view.aggregate(CPU, within_s=1830)
    assert whole is not None and whole.span_s == (1830 if node and minutes else node + 2)


def test_a_longer_interval_keeps_whole_windows_of_fewer_samples(tmp_path: Path) -> None:
    path, before = str(tmp_path / "measurements"), of_node()
    for second in range(8200, 10_001):
        before.record("node", float(second), {CPU: float(second)})
    saved.save(before, path, boot=BOOT, now=10_000.0)
    after = Store()
    after.add_table("node", interval_s=10.0, retention_s=1830.0)
    saved.load(after, path, boot=BOOT, now=10_000.0)
    found = after.view(10_000.0).aggregate(CPU, within_s=1e9)
    assert found is not None
    assert (found.samples, found.latest, found.span_s) == (181, 10_000.0, 1800.0)
    after.record("node", 10_010.0, {CPU: 1.0})
    assert after.view(10_010.0).latest(CPU, within_s=5) == 1.0


_ROUNDS = st.lists(st.tuples(st.floats(0.5, 200), st.sets(st.sampled_from("abc"))), max_size=40)


@given(_ROUNDS, st.floats(-100, 3700), st.floats(0, 2000))
def test_whatever_was_measured_a_restart_reads_what_the_retention_allows(
    tmp_path_factory: pytest.TempPathFactory,
    measured: list[tuple[float, set[str]]],
    later: float,
    asked_s: float,
) -> None:
    """later: seconds from the end of one daemon to the start of the next one."""
    before, now = of_node(), 1000.0
    before.keep("pods", asked_s)
    for passed, objects in measured:
        now += passed
        before.record("pods", now, {Series(Metric.POD_CPU, of): now for of in sorted(objects)})
    path = str(tmp_path_factory.getbasetemp() / "any")
    saved.save(before, path, boot=BOOT, now=now)
    after, started = of_node(), now + later
    if not 0 <= started - now <= saved.YOUNG_S:
        with pytest.raises(SavedError, match="old"):
            saved.load(after, path, boot=BOOT, now=started)
        return
    saved.load(after, path, boot=BOOT, now=started)
    for of in "abc":
        was, found = (
            store.view(started).aggregate(Series(Metric.POD_CPU, of), within_s=within_s)
            for store, within_s in ((before, max(330.0, asked_s)), (after, 1e9))
        )
        assert (was is None) == (found is None)
        if was is not None and found is not None:
            assert found.samples == was.samples
            assert found == pytest.approx(was, rel=1e-6)


def test_a_failed_save_leaves_the_last_file(file: str, tmp_path: Path) -> None:
    before = Path(file).read_bytes()
    os.mkdir(f"{file}.new")
    with pytest.raises(OSError):
        saved.save(empty(), file, boot=BOOT, now=200.0)
    assert Path(file).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["measurements", "measurements.new"]
