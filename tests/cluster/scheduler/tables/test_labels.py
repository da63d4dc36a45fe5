"""Columns of node labels: how many are kept, and that none is ever out of date."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.scheduler.tables import labels
from cluster.scheduler.tables.labels import ABSENT, LabelTable


@pytest.fixture(autouse=True)
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_MOST_COLUMNS", 4)


def values(table: LabelTable, key: str) -> list[str]:
    column = table.column(key)
    return [column.text(int(number)) for number in column.ids]


def test_keys_that_no_node_has_do_not_pile_up() -> None:
    table = LabelTable(3)
    table.set(0, {"disk": "ssd"})
    for number in range(100):
        assert values(table, f"job-{number}") == ["", "", ""]
        assert values(table, "disk") == ["ssd", "", ""]
    assert len(list(table.keys())) <= 5
    table.set(1, {"job-3": "x"})
    assert values(table, "job-3") == ["", "x", ""]


def test_columns_that_were_not_asked_for_go_when_a_node_changes() -> None:
    table = LabelTable(3)
    keys = {f"k{number}": str(number) for number in range(20)}
    table.set(0, keys)
    for key, value in keys.items():
        assert values(table, key) == [value, "", ""]
    # Their numbers may stand in what was worked out before, until a node changes.
    assert len(list(table.keys())) == 20
    table.set(1, {"k1": "x"})
    assert list(table.keys()) == ["k17", "k18", "k19"]
    assert values(table, "k1") == ["1", "x", ""]


def test_columns_grow_with_the_rows_and_follow_each_change() -> None:
    table = LabelTable(2)
    assert table.set(0, {"disk": "ssd"}) and not table.set(0, {"disk": "ssd"})
    column = table.column("disk")
    table.grow(5)
    assert table.column("disk") is column
    assert column.ids.dtype == np.int32 and column.ids.tolist() == [1, 0, 0, 0, 0]
    assert table.set(4, {"disk": "hdd", "zone": "a"}) and table.set(0, {"zone": "a"})
    assert values(table, "disk") == ["", "", "", "", "hdd"]
    assert values(table, "zone") == ["a", "", "", "", "a"]
    assert table.of(4) == {"disk": "hdd", "zone": "a"} and table.of(3) == {}
    # Numbers stay as they are while a label is elsewhere or nowhere.
    assert (column.known("ssd"), column.known("hdd"), column.known("tape")) == (1, 2, ABSENT)
    assert column.values == 3
    passing = column.where(lambda text: text.startswith("h"))
    assert passing.tolist() == [False, False, True]
    assert passing.dtype == np.bool_


def test_a_column_asked_for_again_outlives_those_that_were_not() -> None:
    table = LabelTable(1)
    keys = [f"k{number}" for number in range(4)]
    table.set(0, dict.fromkeys(keys, "x"))
    for key in keys:
        table.column(key)
    table.column("k0")
    table.set(0, dict.fromkeys(keys, "y"))
    assert list(table.keys()) == ["k2", "k3", "k0"]


def test_values_of_old_are_numbered_afresh_and_the_present_ones_stay() -> None:
    table = LabelTable(2)
    table.set(1, {"name": "kept"})
    table.column("name")
    most = 0
    for number in range(50):
        table.set(0, {"name": f"n{number}"})
        column = table.column("name")
        most = max(most, column.values)
        assert values(table, "name") == [f"n{number}", "kept"]
    # At most four values for each row, and the one of absent labels.
    assert most <= 4 * 2 + 1
