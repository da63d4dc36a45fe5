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


def test_a_failed_save_leaves_the_last_file(file: str, tmp_path: Path) -> None:
    before = Path(file).read_bytes()
    os.mkdir(f"{file}.new")
    with pytest.raises(OSError):
        saved.save(empty(), file, boot=BOOT, now=200.0)
    assert Path(file).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["measurements", "measurements.new"]
