"""Columns of node labels: how many are kept, and that none is ever out of date."""

from __future__ import annotations

import pytest

from cluster.scheduler.tables import labels
from cluster.scheduler.tables.labels import LabelTable


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
